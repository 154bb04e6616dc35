# SPDX-License-Identifier: Apache-2.0
"""Checks of the machine or container: the right to look into a process, shared memory, limits."""

import contextlib
import os
import re
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_ndt import stacks
from vllm_ndt.doctor_findings import FAULT, GOOD, UNCHECKED, WARNING, Finding

_PTRACE = 19  # CAP_SYS_PTRACE
_MIB = 2**20
_SMALL, _ENOUGH = 64 * _MIB, 1024 * _MIB
_FILES, _PROCESSES = 4096, 4096
_SHM = "/dev/shm"  # noqa: S108
_SCOPE = "/proc/sys/kernel/yama/ptrace_scope"


@dataclass(frozen=True)
class Tracing:
    """Yama's ptrace_scope (None: no Yama), whether this process may trace any other, and py-spy's path or ""."""

    scope: int | None
    capability: bool
    py_spy: str


@dataclass(frozen=True)
class Memory:
    """Shared memory: its size and what is free, in bytes; `why_not`, if it cannot be looked at."""

    size: int = 0
    free: int = 0
    why_not: str = ""


def tracing(facts: Tracing) -> list[Finding]:
    """Whether the stacks of a server that stands still can be read."""
    # no warnings: without them the processes of a server that stands still print their stacks themselves
    found = [
        Finding("py-spy", GOOD, facts.py_spy or "not found: processes print their own stacks (pip install py-spy)")
    ]
    name = "ptrace"
    if facts.capability and facts.scope != 3:
        return [*found, Finding(name, GOOD, "permitted (CAP_SYS_PTRACE)")]
    if not facts.scope:
        return [*found, Finding(name, GOOD, "permitted for processes of the same user")]
    if facts.scope == 1:
        return [*found, Finding(name, GOOD, "permitted for children, as an engine is of its only API server")]
    remedy = "until the next boot" if facts.scope == 3 else "without CAP_SYS_PTRACE (docker run --cap-add SYS_PTRACE)"
    text = f"{_SCOPE} is {facts.scope}: not permitted {remedy}; processes print their own stacks"
    return [*found, Finding(name, GOOD, text)]


def shared_memory(facts: Memory, processes: int) -> list[Finding]:
    """Whether /dev/shm is large enough for `processes` GPUs that work together."""
    name = "shared memory"
    if facts.why_not:
        return [Finding(name, WARNING, f"{_SHM}: {facts.why_not}", "the engine's processes exchange data there", f"mount a tmpfs at {_SHM}")]  # noqa: E501  # fmt: skip
    text = f"{_SHM} has {facts.size // _MIB} MiB, {facts.free // _MIB} MiB free"
    reason = "processes that work together, and images on their way, share it; too little ends in a bus error"
    remedy = f"docker run --shm-size 16g (or --ipc=host); Kubernetes: an emptyDir of medium Memory at {_SHM}"
    together = f"; {processes} GPUs work together" if processes > 1 else ""
    if facts.size <= _SMALL:
        return [Finding(name, FAULT if processes > 1 else WARNING, text + together, reason, remedy)]
    if facts.free <= _SMALL or (processes > 1 and facts.size < _ENOUGH):
        return [Finding(name, WARNING, text + together, reason, f"{remedy}; see what lies in {_SHM}")]
    return [Finding(name, GOOD, text)]


def limits(soft: Mapping[str, int | None], processes: int) -> list[Finding]:
    """Whether the soft limits are enough; None: unlimited, a missing key: not known. memlock and core are in bytes."""
    found = []
    if "nofile" in soft:
        text, files = f"open files (ulimit -n): {_number(soft['nofile'])}", soft["nofile"]
        few = files is not None and files < _FILES
        reason = "each connection, file of weights and process takes one"
        remedy = "ulimit -n 65536; docker run --ulimit nofile=65536; systemd: LimitNOFILE=65536"
        found.append(_limit(few, text, reason, remedy))
    if "nproc" in soft:
        text, count = f"processes and threads (ulimit -u): {_number(soft['nproc'])}", soft["nproc"]
        few = count is not None and count < _PROCESSES
        reason = "each library makes threads for each core, and all of the user's count"
        remedy = "ulimit -u unlimited; docker run --ulimit nproc=-1; systemd: LimitNPROC=infinity"
        found.append(_limit(few, text, reason, remedy))
    if "memlock" in soft:
        text, size = f"locked memory (ulimit -l): {_bytes(soft['memlock'])}", soft["memlock"]
        few = size is not None and size < _SMALL and processes > 1
        reason = "NCCL over InfiniBand locks its buffers; one machine's own links do not need it"
        remedy = "ulimit -l unlimited; docker run --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity"
        found.append(_limit(few, text, reason, remedy))
    if "core" in soft:
        text = f"core files (ulimit -c): {_bytes(soft['core'])}"
        note = ", a crash leaves none" if soft["core"] == 0 else ", a crash may write prompts and weights to the disk"
        found.append(Finding("limits", GOOD, text + note))
    return found or [Finding("limits", UNCHECKED, "they cannot be read here")]


def read_tracing() -> Tracing:
    """What decides on ptrace, and where py-spy lies."""
    scope, capability = None, False
    with contextlib.suppress(OSError, ValueError):
        scope = int(Path(_SCOPE).read_text())
    with contextlib.suppress(OSError):
        found = re.search(r"^CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
        capability = bool(found and int(found[1], 16) >> _PTRACE & 1)
    return Tracing(scope, capability, stacks.py_spy() or "")


def read_memory(path: str = _SHM) -> Memory:
    """The size of shared memory."""
    try:
        status = os.statvfs(path)
    except OSError as error:
        return Memory(why_not=str(error.strerror))
    return Memory(status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize)


def read_limits() -> dict[str, int | None]:
    """The soft limits of this process, which a server started from here inherits."""
    found: dict[str, int | None] = {}
    for name in ("nofile", "nproc", "memlock", "core"):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            soft = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[0]
            found[name] = None if soft == resource.RLIM_INFINITY else soft
    return found


def _limit(few: bool, text: str, reason: str, remedy: str) -> Finding:
    return Finding("limits", WARNING, text, reason, remedy) if few else Finding("limits", GOOD, text)


def _number(value: int | None) -> str:
    return "unlimited" if value is None else str(value)


def _bytes(value: int | None) -> str:
    return "unlimited" if value is None else f"{value // 1024} KiB"
