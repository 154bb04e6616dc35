# SPDX-License-Identifier: Apache-2.0
"""Checks of the cards, their driver, the kernel's log of them, and the GPU code of the installed libraries."""

import contextlib
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_ndt import child, fatbin, nvml
from vllm_ndt.doctor_findings import FAULT, GOOD, UNCHECKED, WARNING, Finding, listed
from vllm_ndt.fatbin import Arch
from vllm_ndt.nvml import Answer, Gpu

BRANCH, LOST_FROM = 580, 605  # the branch to use; the first on which modified cards were lost
_PIN = "cp dist/deploy/nvidia-driver.pref /etc/apt/preferences.d/, apt-get update, apt-get dist-upgrade, reboot"
_GIB = 2**30
# The most memory, in GiB, that a model was sold with. Laptop models are others, and not here.
_SOLD = {
    "rtx 2060": 12, "rtx 2060 super": 8, "rtx 2070": 8, "rtx 2070 super": 8, "rtx 2080": 8, "rtx 2080 super": 8,
    "rtx 2080 ti": 11, "rtx 3050": 8, "rtx 3060": 12, "rtx 3060 ti": 8, "rtx 3070": 8, "rtx 3070 ti": 8,
    "rtx 3080": 12, "rtx 3080 ti": 12, "rtx 3090": 24, "rtx 3090 ti": 24, "rtx 4060": 8, "rtx 4060 ti": 16,
    "rtx 4070": 12, "rtx 4070 super": 12, "rtx 4070 ti": 12, "rtx 4070 ti super": 16, "rtx 4080": 16,
    "rtx 4080 super": 16, "rtx 4090": 24, "rtx 4090 d": 24, "rtx 5050": 8, "rtx 5060": 8, "rtx 5060 ti": 16,
    "rtx 5070": 12, "rtx 5070 ti": 16, "rtx 5080": 16, "rtx 5090": 32, "rtx 5090 d": 32, "rtx 5090 d v2": 24,
}  # fmt: skip
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)(?:, (.*))?")
_MEANING = {79: "the card fell off the bus", 119: "its firmware gave no answer", 154: "it asks for a recovery"}
_ON_HOST = "on the host, as root: journalctl -k | grep 'NVRM: Xid', or dmesg | grep 'NVRM: Xid'"


@dataclass(frozen=True)
class Log:
    """The kernel's log: where it was read, and its lines of the NVIDIA driver; or why it was not read."""

    source: str
    lines: tuple[str, ...] = ()
    why_not: str = ""


@dataclass(frozen=True)
class Library:
    """A native library: its name, the architectures of its GPU code, or why they are not known.

    `needed`: without code in it for a card nothing runs there.
    """

    name: str
    architectures: tuple[Arch, ...] = ()
    needed: bool = False
    problem: str = ""


def cards(answer: Answer, on_bus: int) -> list[Finding]:
    """Whether NVML answers for every card; `on_bus`: NVIDIA display controllers that the kernel lists."""
    name = "NVIDIA cards"
    if answer.state == nvml.HUNG:
        reason = "a call to the driver does not come back: the engine would hang as well"
        return [Finding(name, FAULT, f"NVML: {answer.why}", reason, f"look at the kernel log ({_ON_HOST}), reboot")]
    if answer.state == nvml.FAILED:
        reason = "the engine asks the same library"
        return [Finding(name, FAULT, answer.why, reason, "run nvidia-smi; after an update of the driver, reboot")]
    if answer.state == nvml.ABSENT and on_bus:
        return [
            Finding(
                name,
                WARNING,
                f"{on_bus} on the bus, and no driver here: {answer.why}",
                "the engine finds no card",
                f"in a container: --gpus all, or a CDI device; on the host: install driver {BRANCH}",
            )
        ]
    if answer.state == nvml.ABSENT:
        return [Finding(name, UNCHECKED, f"none here: {answer.why}", remedy="run it where the engine will run")]
    lost = [
        Finding(name, FAULT, one, "this card is gone until the machine starts again", "reboot; then see the kernel log")
        for one in answer.lost
    ]
    seen = [f"{gpu.index}: {gpu.name}, {gpu.memory / _GIB:.0f} GiB, sm_{_digits(gpu)}" for gpu in answer.gpus]
    if not seen and not lost:
        return [Finding(name, UNCHECKED, "the driver knows no card", remedy="run it where the engine will run")]
    return [*lost, *([Finding(name, GOOD, listed(seen))] if seen else [])]


def driver(version: str, gpus: Sequence[Gpu]) -> list[Finding]:
    """Whether the driver is of branch 580, and the danger of others for cards with more memory than they were sold with."""  # noqa: E501
    name = "NVIDIA driver"
    if not version:
        return [Finding(name, UNCHECKED, "no driver was found", remedy="run it where the engine will run")]
    number = re.match(r"\d{1,6}", version)
    branch = int(number[0]) if number else 0
    more = [f"{gpu.name} with {gpu.memory / _GIB:.0f} GiB" for gpu in gpus if modified(gpu)]
    if branch == BRANCH:
        note = f"; keep it there: {listed(more)}, more than it was sold with" if more else ""
        return [Finding(name, GOOD, f"{version}{note}")]
    if more and branch >= LOST_FROM:
        reason = f"such cards were lost on {LOST_FROM} and newer, until a reboot"
        return [Finding(name, FAULT, f"{version}, and {listed(more)}, more than it was sold with", reason, _PIN)]
    reason = f"this build needs CUDA 13, and CUDA 13 needs {BRANCH}"
    if branch > BRANCH:
        reason = f"the policy is branch {BRANCH}: cards with added memory were lost on {LOST_FROM} and newer"
    what = f"{version}, not branch {BRANCH}" + (f", and {listed(more)}, more than it was sold with" if more else "")
    return [Finding(name, WARNING, what, reason, _PIN)]


def modified(gpu: Gpu) -> bool:
    """Whether a consumer card has more memory than its model was sold with; half a GiB is no difference."""
    model = " ".join(gpu.name.lower().replace("nvidia", "").replace("geforce", "").split())
    sold = _SOLD.get(model) if "geforce" in gpu.name.lower() else None
    return sold is not None and gpu.memory > (sold + 0.5) * _GIB


def kernel_log(log: Log, on_bus: int) -> list[Finding]:
    """What the driver wrote into the kernel's log: Xid 79, 119 and 154 say that a card is, or was, lost."""
    name = "kernel log"
    if log.why_not:
        reason = "Xid 119 and 154, which say that a card was lost, would be there" if on_bus else ""
        return [Finding(name, UNCHECKED, log.why_not, reason, _ON_HOST)]
    events = [event.groups("") for line in log.lines if (event := _XID.search(line))]
    counts: dict[tuple[str, int], list[str]] = {}
    for card, number, text in events:
        counts.setdefault((card, int(number)), []).append(text)
    found: list[Finding] = []
    others = []
    for (card, code), texts in sorted(counts.items()):
        recovered = code == 154 and re.search(r" to 0x0\b", texts[-1])
        if code in _MEANING and not recovered:
            what = f"Xid {code} of {card}, {len(texts)} times: {_plain(texts[-1])}"
            found.append(Finding(name, FAULT, what, _MEANING[code], f"reboot the machine; keep driver {BRANCH}"))
        else:
            others.append(f"Xid {code} of {card} ({len(texts)})")
    if others:
        reason = "a program's fault or the card's; NVIDIA's list of Xid errors says which"
        found.append(Finding(name, WARNING, listed(others), reason, _ON_HOST))
    return found or [Finding(name, GOOD, f"no Xid ({log.source})")]


def code(gpus: Sequence[Gpu], libraries: Sequence[Library]) -> list[Finding]:
    """Whether the native libraries hold code for the cards."""
    name = "GPU code"
    broken = [f"{library.name}: {library.problem}" for library in libraries if library.problem]
    found = []
    if broken:
        reason = "a library that cannot be read cannot be loaded either"
        found.append(Finding(name, WARNING, listed(broken, 3), reason, "vllm-ndt verify --deep"))
    with_code = [library for library in libraries if library.architectures]
    needed = [library for library in with_code if library.needed]
    if not any(library.name.startswith("vllm") for library in needed):
        what = "vllm's libraries hold none: this is no build for NVIDIA cards"
        if gpus:
            found.append(Finding(name, WARNING, what, "the cards here would not be used", "install the CUDA wheel"))
        elif not broken:
            found.append(Finding(name, UNCHECKED, what))
        return found
    if not gpus:
        return [*found, Finding(name, UNCHECKED, f"no card to compare with; {_all(needed)}")]
    for capability in sorted({gpu.capability for gpu in gpus}):
        found.append(_code_for(name, capability, needed, with_code))
    return found


def _code_for(name: str, capability: tuple[int, int], needed: list[Library], all_of_them: list[Library]) -> Finding:
    card = f"sm_{capability[0]}{capability[1]}"
    without = [one for one in all_of_them if not any(arch.runs_on(*capability) for arch in one.architectures)]
    if missing := [one for one in needed if one in without]:
        remedy = "use another card, or build vLLM from source for it"
        if capability == (7, 0):
            remedy = (
                "use another card; on V100 only a source build can run: vLLM 0.27.1 and PyTorch 2.13 for CUDA 12.6, "
                "with --attention-backend TRITON_ATTN --dtype float16"
            )
        text = f"{card}: none in {listed([one.name for one in missing])} ({_all(missing)})"
        return Finding(name, FAULT, text, "the first kernel on this card fails", remedy)
    rest = f"; not in {listed([one.name for one in without])}" if without else ""
    return Finding(name, GOOD, f"{card} is there{rest}")


def read_log(limit: float = 5.0) -> Log:
    """The kernel's log of this boot: of the journal, or else the kernel's own memory of it."""
    why = []
    for command in (["journalctl", "--dmesg", "--boot", "--no-pager", "--quiet", "--output=cat"], ["dmesg"]):
        try:
            status, text = child.run(command, limit)
        except (OSError, child.GaveUp) as error:
            why.append(f"{command[0]}: {getattr(error, 'strerror', None) or error}")
            continue
        if status == 0 and text.strip():
            return Log(command[0], tuple(line for line in text.splitlines() if "NVRM" in line))
        why.append(f"{command[0]}: not permitted, or empty")
    try:
        return Log("/dev/kmsg", tuple(line for line in _kmsg() if "NVRM" in line))
    except OSError as error:
        return Log("", why_not="; ".join([*why, f"/dev/kmsg: {error.strerror}"]))


def read_libraries() -> list[Library]:
    """The native libraries of vllm and torch, without importing either; without those that hold no GPU code."""
    libraries = [
        *_libraries("vllm", "**/*.so", "_C*.so"),
        *_libraries("torch", "lib/libtorch_cuda*.so", "lib/libtorch_cuda.so"),
    ]
    return [one for one in libraries if one.architectures or one.problem]


def read_bus(root: Path = Path("/sys/bus/pci/devices")) -> int:
    """How many NVIDIA display controllers are on the bus, also those that a container does not get."""
    count = 0
    with contextlib.suppress(OSError):
        for device in root.iterdir():
            with contextlib.suppress(OSError):
                kind = (device / "class").read_text().strip()
                count += (device / "vendor").read_text().strip() == "0x10de" and kind.startswith("0x03")
    return count


def read_driver(answer: Answer, path: Path = Path("/sys/module/nvidia/version")) -> str:
    """The driver's version, of NVML or, where that does not answer, of the loaded module; "" if there is none."""
    if answer.driver:
        return answer.driver
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


def _libraries(package: str, pattern: str, needed: str) -> Iterator[Library]:
    """Those of a package; the ones that are `needed` are a pattern, too."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        needs = set(Path(folder).glob(needed))
        for path in sorted(Path(folder).glob(pattern)):
            name = str(path.relative_to(Path(folder).parent))
            try:
                yield Library(name, fatbin.architectures(path), path in needs)
            except fatbin.FatbinError as error:
                yield Library(name, problem=str(error))
            except OSError as error:
                yield Library(name, problem=str(error.strerror))


def _kmsg() -> Iterator[str]:
    file = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    try:
        for _ in range(1_000_000):
            try:
                record = os.read(file, 8192)
            except BrokenPipeError:  # overwritten while it was read: the next one
                continue
            except BlockingIOError:
                return
            if not record:
                return
            yield record.decode("utf-8", "replace").partition(";")[2].partition("\n")[0]
    finally:
        os.close(file)


def _all(libraries: Sequence[Library]) -> str:
    return " ".join(str(arch) for arch in sorted({arch for one in libraries for arch in one.architectures}))


def _digits(gpu: Gpu) -> str:
    return "".join(str(number) for number in gpu.capability)


def _plain(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:160]
