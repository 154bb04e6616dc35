# SPDX-License-Identifier: Apache-2.0
"""Runs uv (for the closures and the test environments only) with pip's index and certificates."""

import os
import subprocess
from pathlib import Path

from builder.bootstrap import last_line
from builder.errors import InputProblem
from builder.pipconfig import index_settings


def run_uv(uv: Path, arguments: list[str], cache: Path | None = None) -> None:
    """Run uv; raises InputProblem with uv's last words if it fails."""
    index, _ = index_settings()
    environment = {"UV_DEFAULT_INDEX": index[0]} if index else {}
    # The user's own UV_ variables win. Extra indexes are left out: uv takes a package from the first that has it.
    environment |= {"UV_PYTHON_DOWNLOADS": "never", "UV_SYSTEM_CERTS": "true", "UV_NO_CONFIG": "1"} | os.environ
    if cache:
        environment["UV_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [str(uv), "--quiet", *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        found = last_line(done.stderr)
        raise InputProblem(f"uv {' '.join(arguments[:2])}", expected="it to succeed", found=found, do="see its message")
