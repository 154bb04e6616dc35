# SPDX-License-Identifier: Apache-2.0
"""Runs uv (for the closures and the test environments only) with pip's index and certificates."""

import os
import subprocess
from pathlib import Path

from builder.bootstrap import last_line
from builder.errors import InputProblem
from builder.pipconfig import index_settings

# The user's own settings of where packages come from hold; those of what is resolved (UV_CONSTRAINT, ...) do not.
NETWORK = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_HTTP", "UV_SYSTEM_CERTS", "UV_NATIVE_TLS", "UV_INSECURE", "UV_KEYRING")


def run_uv(uv: Path, arguments: list[str], cache: Path | None = None) -> None:
    """Run uv; raises InputProblem with uv's last words if it fails."""
    index, _ = index_settings()
    kept = {key: value for key, value in os.environ.items() if not key.startswith("UV_") or key.startswith(NETWORK)}
    environment = {"UV_DEFAULT_INDEX": index[0]} if index else {}
    # Extra indexes are left out: uv takes a package from the first that has it.
    environment |= {"UV_PYTHON_DOWNLOADS": "never", "UV_SYSTEM_CERTS": "true", "UV_NO_CONFIG": "1"} | kept
    if cache:
        environment["UV_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [str(uv), "--quiet", *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        found = last_line(done.stderr)
        raise InputProblem(f"uv {' '.join(arguments[:2])}", expected="it to succeed", found=found, do="see its message")
