# SPDX-License-Identifier: Apache-2.0
"""Checks of the installation: its own files, the build that was expected, the locked versions, the settings."""

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_ndt import settings, verify
from vllm_ndt.doctor_findings import FAULT, GOOD, UNCHECKED, WARNING, Finding, listed
from vllm_ndt.manifest import Manifest
from vllm_ndt.verify import Report

_REINSTALL = "pip install --force-reinstall --no-deps WHEEL, then vllm-ndt verify"


@dataclass(frozen=True)
class Versions:
    """Versions by normalised name: those of the lock, and what is installed of them (None: not installed)."""

    locked: Mapping[str, str]
    installed: Mapping[str, str | None]
    why_not: str = ""


def files(report: Report) -> list[Finding]:
    """Whether the vLLM that this Python would import is this build, by `verify`'s report."""
    if report.verdict == verify.PATCHED and report.manifest:
        found = report.manifest
        return [Finding("own files", GOOD, f"{found.version}, patched, manifest {found.digest}")]
    text = f"{report.verdict}: {listed(report.findings, 3)}"
    if report.verdict == verify.UNKNOWN:
        return [
            Finding(
                "own files",
                WARNING,
                text,
                "nobody knows what would run",
                "run vllm-ndt verify as a user who can read the environment",
            )
        ]
    if any("comes first on the path" in line for line in report.findings):
        reason, remedy = "another vLLM runs than this build", "remove it, or the path entry that leads there"
        return [Finding("own files", FAULT, text, reason, remedy)]
    reason = "what runs is not what was built and tested"
    if report.verdict == verify.ROLLED_BACK:
        reason = "stock vLLM runs, without the patches"
    return [Finding("own files", FAULT, text, reason, _REINSTALL)]


def build(found: Manifest | None, expect: str | None) -> list[Finding]:
    """Whether the manifest is the one with the digest that was given."""
    name = "expected build"
    if expect is None:
        return [Finding(name, UNCHECKED, "no digest given", remedy="vllm-ndt doctor --expect DIGEST")]
    digest = expect.removeprefix("sha256:")
    other = verify.other_build(digest, found) if found else ["no manifest is there, expected one"]
    if not other:
        return [Finding(name, GOOD, f"sha256:{digest}")]
    reason = "this machine runs another build than the one that you chose"
    return [Finding(name, FAULT, other[0], reason, f"install the wheel or image of manifest sha256:{digest}")]


def versions(facts: Versions) -> list[Finding]:
    """Whether the dependencies have the versions that this build was tested with."""
    name = "locked versions"
    if facts.why_not:
        return [Finding(name, UNCHECKED, facts.why_not, remedy=_REINSTALL)]
    other = [
        f"{package} {facts.installed[package] or 'missing'} (locked {version})"
        for package, version in sorted(facts.locked.items())
        if not _same(facts.installed[package], version)
    ]
    if not other:
        return [Finding(name, GOOD, f"all {len(facts.locked)} as locked")]
    return [
        Finding(
            name,
            WARNING,
            f"{len(other)} of {len(facts.locked)} differ: {listed(other)}",
            "newer dependencies break models of this release: some no longer import",
            "pip install -c constraints.txt WHEEL (see docs/installing.md#the-locked-closure)",
        )
    ]


def variables(environ: Mapping[str, str]) -> list[Finding]:
    """Whether a VLLM_NDT_* variable has a value with which a server would not start."""
    try:
        settings.check(environ)
    except settings.SettingError as error:
        name = str(error).partition(":")[0]
        return [Finding("settings", FAULT, str(error), "vllm serve refuses to start with it", f"unset {name}")]
    given = [name for name in sorted(environ) if name.startswith("VLLM_NDT_")]
    return [Finding("settings", GOOD, f"set: {listed(given)}" if given else "no VLLM_NDT_ variable is set")]


def read_versions() -> Versions:
    """The lock in the installed vllm's metadata (its extra `locked`), and what importlib finds of it."""
    try:
        lines = importlib.metadata.requires("vllm") or []
    except importlib.metadata.PackageNotFoundError:
        return Versions({}, {}, "no vllm is installed")
    locked = locked_of(lines)
    if not locked:
        return Versions({}, {}, "the installed vllm has no lock: its extra `locked` is missing, or packaging is")
    return Versions(locked, {name: _installed(name) for name in locked})


def locked_of(lines: list[str]) -> dict[str, str]:
    """The versions that requirements with the extra `locked` pin for this Python and machine, by normalised name."""
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:
        return {}
    found = {}
    for line in lines:
        if "locked" not in line:
            continue
        try:
            one = Requirement(line)
        except InvalidRequirement:
            continue
        pins = [pin.version for pin in one.specifier if pin.operator == "=="]
        if pins and one.marker and one.marker.evaluate({"extra": "locked"}) and not one.marker.evaluate({"extra": ""}):
            found[re.sub(r"[-_.]+", "-", one.name).lower()] = pins[0]
    return found


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _same(installed: str | None, locked: str) -> bool:
    # 2.13.0+cu130 is 2.13.0, as pip has it
    return installed is not None and installed in (locked, f"{locked}+{installed.partition('+')[2]}")
