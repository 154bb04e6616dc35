# SPDX-License-Identifier: Apache-2.0
"""Work in a process of its own, which is given up after a time: calls into a broken driver may never come back."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

# the caller's folder must not shadow modules, as it would with -m
_CODE = "import sys; sys.path[:] = [p for p in sys.path if p]; from vllm_ndt.{} import main; sys.exit(main())"


class GaveUp(Exception):
    """A process that did not end in time; the message says after how many seconds."""


def call(module: str, arguments: Sequence[str], limit: float) -> str:
    """What `main()` of one of this package's modules prints; see `run`."""
    return run([sys.executable, "-c", _CODE.format(module), *arguments], limit)[1]


def run(command: Sequence[str], limit: float, stderr: int = subprocess.DEVNULL) -> tuple[int, str]:
    """A command's exit status and output, with stderr where that is STDOUT.

    Raises GaveUp after `limit` seconds, OSError if there is no such command.
    Nobody waits for a process that does not even end when it is killed.
    """
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        _end(process)
        raise GaveUp(f"no answer in {limit:g} seconds") from None
    except BaseException:
        _end(process)
        raise
    return process.returncode, output.decode("utf-8", "replace")


def _end(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1)
    if process.stdout:
        process.stdout.close()
    if process.returncode is None:
        process.returncode = -signal.SIGKILL  # the kernel holds it: its end is init's business, and no warning
