# SPDX-License-Identifier: Apache-2.0
"""`vllm-ndt serve`: verifies its own files, says what runs, and becomes `vllm serve`.

An installation without the patches has no such command, so a specification that starts it cannot run one unawares.
"""

import os
import signal
import sys
import tempfile
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import NoReturn

from vllm_ndt import health, launch, verify, watch
from vllm_ndt.verify import Report

OTHER = verify.STATUS[verify.EDITED]


def refusal(report: Report, require: str | None) -> tuple[int, list[str]] | None:
    """Why an installation must not serve: an exit status and lines; None if it may."""
    found = report.manifest
    if report.status or found is None:
        why = (
            "it could not be checked" if report.verdict == verify.UNKNOWN else "this is not the build that was verified"
        )
        return report.status, [f"not started: {why}", *report.lines()]
    if require is not None and require != found.version:
        return OTHER, [f"not started: expected vllm {require} (--require), found {found.version}; use that image or wheel"]  # noqa: E501  # fmt: skip
    return None


def make_home(environ: MutableMapping[str, str]) -> None:
    """Give a user who has no home that can be written one below the folder for temporary files: caches go there."""
    home = environ.get("HOME", "")
    if home and os.access(home, os.W_OK | os.X_OK):
        return
    try:
        folder = Path(tempfile.gettempdir(), f"vllm-ndt-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            folder = Path(tempfile.mkdtemp(prefix="vllm-ndt-"))
    except OSError:
        return  # nothing can be written: whoever needs to says so
    environ["HOME"] = str(folder)
    # a user id without a name: asked for its name, Python fails, but for these
    environ.setdefault("USER", str(os.getuid()))


def serve(
    arguments: Sequence[str], *, require: str | None = None, expect: str | None = None, end_when_unhealthy: bool = False
) -> int:
    """Become `vllm serve` with these arguments; returns an exit status only where that must not be."""
    launch.end_on_sigterm()
    report = verify.check_running(expect=expect)
    if no := refusal(report, require):
        print("\n".join(no[1]), file=sys.stderr)
        return no[0]
    found = report.manifest
    assert found
    print(f"vllm {found.version}, verified: manifest {found.digest}, patches: {', '.join(found.patches)}", file=sys.stderr, flush=True)  # noqa: E501  # fmt: skip
    make_home(os.environ)
    health.announce(arguments)
    if end_when_unhealthy:
        watch.watch_beside(health.address(arguments))
    return _become(arguments)


def _become(arguments: Sequence[str]) -> NoReturn:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # it waits until launch handles it
    os.execv(sys.executable, [sys.executable, str(launch.__file__), "serve", *arguments])  # noqa: S606
