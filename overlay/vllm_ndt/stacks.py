# SPDX-License-Identifier: Apache-2.0
"""The Python stacks of an engine's processes: by py-spy where it may look, else each process prints its own.

For the latter every process of an engine registers a handler that works while Python code does not run. A signal goes
only to a process that has it: others would die of it.
"""

import contextlib
import faulthandler
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

from vllm_ndt import child

SIGNAL = signal.SIGUSR2
_SECONDS = 10.0  # for py-spy


def register() -> None:
    """Let this process print its threads' stacks to stderr on SIGNAL, unless something else handles that."""
    with contextlib.suppress(ValueError, OSError, RuntimeError):  # stderr is closed, or no file
        if sys.__stderr__ is not None and signal.getsignal(SIGNAL) == signal.SIG_DFL:
            faulthandler.register(SIGNAL, file=sys.__stderr__, all_threads=True)


def of_engine(pid: int | None, host: str | None) -> str:
    """The stacks of an engine core and its children as text, by process; at most some seconds for each."""
    if pid is None:
        return "Stacks: the engine core has not reported yet, so its process is not known."
    if host != socket.gethostname():
        return f"Stacks: the engine core runs on {host}, process {pid}; look there with py-spy dump --pid {pid}."
    import psutil  # vLLM requires it

    try:
        children = [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return f"Stacks: the engine core, process {pid}, is gone."
    return "\n".join(f"Stacks of process {one} ({_title(one)}): {of_process(one)}" for one in (pid, *children))


def py_spy() -> str | None:
    """Where py-spy lies: on the path, or beside this Python."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))


def of_process(pid: int) -> str:
    """py-spy's words, or where to look for the process's own."""
    problem = "py-spy is not installed"
    command = py_spy()
    if command:
        try:
            asked = [command, "dump", "--nonblocking", "--pid", str(pid)]
            status, text = child.run(asked, _SECONDS, stderr=subprocess.STDOUT)
            if status == 0:
                return text
            problem = "py-spy: " + (text.strip().splitlines() or ["no reason given"])[-1]
        except (OSError, child.GaveUp) as error:
            problem = f"py-spy: {error}"
    if not _catches(pid):
        return f"none ({problem}; no handler of signal {SIGNAL.name})"
    os.kill(pid, SIGNAL)
    return f"printed by itself on stderr ({problem})"


def _title(pid: int) -> str:
    """A process's command line, cut short, and its state in the kernel's letter: T stopped, D waits for a device."""
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        # the name before it is in brackets, and may hold anything
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "gone"
    return f"{title[:60]}, state {state}"


def _catches(pid: int) -> bool:
    """Whether a process has a handler for SIGNAL."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (SIGNAL - 1) & 1)
