# SPDX-License-Identifier: Apache-2.0
"""The checks of `vllm-ndt doctor`, and its verdict. Nothing is started, nothing is written and nobody is asked.

Each check is a pair: one function reads the machine, another judges what was read.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_ndt import (
    doctor_flags,
    doctor_gpu,
    doctor_host,
    doctor_install,
    doctor_network,
    doctor_serving,
    doctor_v100,
    manifest,
    nvml,
    verify,
)
from vllm_ndt.doctor_findings import FAULT, LEVELS, UNCHECKED, WARNING, Finding
from vllm_ndt.doctor_flags import Serving
from vllm_ndt.manifest import Manifest

CLEAN, WARNINGS, FAULTS, CANNOT = 0, 1, 2, 3
MEANING = {CLEAN: "all is well", WARNINGS: "there are warnings", FAULTS: "there are faults"}


@dataclass(frozen=True)
class Situation:
    """What several checks look at: the variables, the serving flags, the digest that is expected, NVML's answer.

    `on_bus`: NVIDIA cards that the kernel lists.
    """

    environ: Mapping[str, str]
    serving: Serving | None
    expect: str | None
    answer: nvml.Answer
    on_bus: int

    @property
    def processes(self) -> int:
        """GPUs that the flags let work together."""
        return self.serving.processes if self.serving else 1


@dataclass(frozen=True)
class Report:
    """The findings, the worst first, and the manifest of this build if it can be read."""

    findings: tuple[Finding, ...]
    manifest: Manifest | None = None

    @property
    def status(self) -> int:
        """The exit status: FAULTS, WARNINGS or CLEAN."""
        levels = {finding.level for finding in self.findings}
        return FAULTS if FAULT in levels else WARNINGS if WARNING in levels else CLEAN

    @property
    def summary(self) -> str:
        """The last line: how many findings of each level, and the exit status."""
        counts = [(level, sum(finding.level == level for finding in self.findings)) for level in LEVELS]
        words = [f"{count} {level}{'s' * (level in (FAULT, WARNING) and count != 1)}" for level, count in counts]
        return f"{', '.join(words)}; exit status {self.status}: {MEANING[self.status]}"

    def as_dict(self) -> dict[str, Any]:
        """The report for a program; the keys are always the same."""
        return {
            "status": self.status,
            "error": None,
            "version": self.manifest.version if self.manifest else None,
            "manifest": self.manifest.digest if self.manifest else None,
            "findings": [asdict(finding) for finding in self.findings],
            "summary": self.summary,
        }


def failed(error: str) -> dict[str, Any]:
    """The report for a program when doctor could not run; the keys are those of Report.as_dict."""
    empty: dict[str, Any] = {"version": None, "manifest": None, "findings": [], "summary": error}
    return {"status": CANNOT, "error": error, **empty}


def run(environ: Mapping[str, str], flags: Sequence[str] = (), expect: str | None = None) -> Report:
    """Make every check; `flags` are arguments of `vllm serve`, `expect` is a manifest's digest.

    A check that fails itself is one that was not made. Raises doctor_flags.FlagError if the flags cannot be read.
    """
    serving = doctor_flags.read(flags, environ)
    situation = Situation(environ, serving, expect, nvml.read(), doctor_gpu.read_bus())
    found: list[Finding] = []
    for name, check in CHECKS.items():
        try:
            found += check(situation)
        except Exception as error:
            found.append(Finding(name, UNCHECKED, f"{type(error).__name__}: {error}", "this check failed itself"))
    found.sort(key=lambda finding: LEVELS.index(finding.level))
    return Report(tuple(found), _manifest())


def _files(now: Situation) -> list[Finding]:
    return doctor_install.files(verify.check_running())


def _usage(now: Situation) -> list[Finding]:
    return doctor_network.statistics(now.environ, doctor_network.marker_of(now.environ))


def _kernels(now: Situation) -> list[Finding]:
    packaged = importlib.util.find_spec("flashinfer_cubin") is not None
    return doctor_network.kernels(now.environ, now.answer.gpus, packaged)


def _late_downloads(now: Situation) -> list[Finding]:
    encodings = doctor_network.read_encodings(now.environ)
    return doctor_network.late_downloads(now.environ, now.serving, encodings)


def _budget(now: Situation) -> list[Finding]:
    facts = doctor_serving.read_budget(now.serving.arguments) if now.serving else None
    return doctor_serving.budget(facts, now.environ)


def _driver(now: Situation) -> list[Finding]:
    return doctor_gpu.driver(doctor_gpu.read_driver(now.answer), now.answer.gpus)


def _code(now: Situation) -> list[Finding]:
    return doctor_gpu.code(now.answer.gpus, doctor_gpu.read_libraries())


CHECKS: dict[str, Callable[[Situation], list[Finding]]] = {
    "own files": _files,
    "expected build": lambda now: doctor_install.build(_manifest(), now.expect),
    "locked versions": lambda now: doctor_install.versions(doctor_install.read_versions()),
    "settings": lambda now: doctor_install.variables(now.environ),
    "usage statistics": _usage,
    "hub telemetry": lambda now: doctor_network.telemetry(now.environ),
    "downloads at start": lambda now: doctor_network.downloads(now.environ, now.serving),
    "FlashInfer's kernels": _kernels,
    "downloads at requests": _late_downloads,
    "encoder cache": _budget,
    "NVIDIA cards": lambda now: doctor_gpu.cards(now.answer, now.on_bus),
    "NVIDIA driver": _driver,
    "kernel log": lambda now: doctor_gpu.kernel_log(doctor_gpu.read_log(), now.on_bus),
    "GPU code": _code,
    "V100": lambda now: doctor_v100.traps(now.answer.gpus, now.serving, now.environ),
    "flash-attention-v100": lambda now: doctor_v100.flash_attention(
        doctor_v100.read_flash_attention(), now.answer.gpus
    ),
    "ptrace": lambda now: doctor_host.tracing(doctor_host.read_tracing()),
    "shared memory": lambda now: doctor_host.shared_memory(doctor_host.read_memory(), now.processes),
    "limits": lambda now: doctor_host.limits(doctor_host.read_limits(), now.processes),
}


def _manifest() -> Manifest | None:
    """The manifest beside this package, or beside the vllm that would be imported."""
    places = [Path(__file__).absolute().parents[1]]
    spec = importlib.util.find_spec("vllm")
    places += [Path(folder).parent for folder in (spec.submodule_search_locations or ())] if spec else []
    for place in places:
        try:
            return manifest.read(place)
        except (OSError, manifest.ManifestError):
            continue
    return None
