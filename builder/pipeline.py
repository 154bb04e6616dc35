# SPDX-License-Identifier: Apache-2.0
"""From a release of the lock to a wheel in a folder, with the files beside it."""

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from builder import changeset, wheel
from builder.atomic import locked, replacing
from builder.closure import read_pins
from builder.distinfo import Build
from builder.errors import InputProblem, PatchProblem, UsageProblem
from builder.fetch import fetch
from builder.hashing import sha256_of
from builder.inputs import Project, check_series, read_inputs
from builder.lockfile import LATEST, Artefact, Release
from builder.wheel import UpstreamWheel, Written

FLAVORS = ("cuda", "cpu")
ARCHES = ("x86_64", "aarch64")
EARLIEST = 315532800  # 1980-01-01


def check_epoch() -> None:
    """Raise UsageProblem for a SOURCE_DATE_EPOCH that no archive could hold; a good one changes nothing."""
    value = os.environ.get("SOURCE_DATE_EPOCH", "")
    if value and not (re.fullmatch("[0-9]{1,12}", value) and EARLIEST <= int(value) <= LATEST):
        raise UsageProblem(
            "SOURCE_DATE_EPOCH",
            expected=f"whole seconds from {EARLIEST} to {LATEST} (1980 to 2107)",
            found=repr(value),
            do="correct or unset it; the wheel's time is the one in VERSIONS.lock anyway",
        )


def build(
    project: Project, release: Release, flavor: str, arch: str, out: Path, cache: Path, *, offline: bool
) -> Written:
    """Build the patched wheel with constraints and SHA256SUMS beside it.

    Raises InputProblem or PatchProblem if anything differs from VERSIONS.lock; then nothing new lies in `out`.
    """
    artefact = release.wheel_artefact(flavor, arch)
    pinned = release.pinned_wheel(flavor, arch)
    if pinned is None:
        raise InputProblem(
            f"{release.version}+{release.label} {flavor} {arch}",
            expected="the wheel in VERSIONS.lock",
            found="none",
            do="run `build.py lock`",
        )
    pins = read_closure(project, release, flavor)
    with _naming_damage(release, project):
        inputs = read_inputs(project, release.version)
    path = fetch(artefact, release.version, cache, offline=offline)
    spec = describe(release, artefact)
    with path.open("rb") as file:
        with _naming_damage(release, project):
            upstream = UpstreamWheel(file)
            changes = inputs.changes(set(upstream.members), upstream.read)
        check_series(inputs.entries, release)
        changeset.check(changes, release.changed)
        written = wheel.write(upstream, spec, inputs.content(changes, pins), out, expected=pinned.sha256)
    write_beside(out, written, release, spec, pins)
    return written


def build_stock(release: Release, flavor: str, arch: str, out: Path, cache: Path, *, offline: bool) -> Written:
    """The stock control for tests: upstream's files through the same writer, as version +cpu (or +stock on a GPU)."""
    artefact = release.wheel_artefact(flavor, arch)
    label = "cpu" if flavor == "cpu" else "stock"
    with fetch(artefact, release.version, cache, offline=offline).open("rb") as file:
        return wheel.write(UpstreamWheel(file), describe(replace(release, label=label), artefact), None, out)


def describe(release: Release, artefact: Artefact) -> Build:
    """What the wheel that is made of `artefact` is."""
    return Build(
        release=release.version,
        label=release.label,
        flavor=artefact.flavor,
        arch=artefact.arch,
        epoch=release.source_date_epoch,
        commit=release.commit,
        upstream_sha256=artefact.sha256,
    )


def read_closure(project: Project, release: Release, flavor: str) -> tuple[str, ...]:
    """The flavor's locked requirements; raises InputProblem unless the file is the pinned one."""
    return read_pins(closure_file(project, release, flavor))


def closure_file(project: Project, release: Release, flavor: str) -> Path:
    """The file of the flavor's locked requirements; raises InputProblem unless it is the pinned one."""
    closure = release.closure_of(flavor)
    if closure is None:
        raise InputProblem(
            f"{release.version} {flavor}", expected="a closure in VERSIONS.lock", found="none", do="run `build.py lock`"
        )
    path = project.locks / closure.file
    found = sha256_of(path) if path.is_file() else "no file"
    if found != closure.sha256:
        raise InputProblem(
            f"locks/{closure.file}",
            expected=f"sha256 {closure.sha256} (VERSIONS.lock)",
            found=found,
            do="restore the file",
        )
    return path


def write_beside(out: Path, written: Written, release: Release, spec: Build, pins: tuple[str, ...]) -> None:
    """Write constraints.txt (constraints-cpu.txt for the CPU flavor) and add the wheel to SHA256SUMS."""
    name = "constraints.txt" if spec.flavor == "cuda" else f"constraints-{spec.flavor}.txt"
    with locked(out / ".lock"):
        _write_text(out / name, "\n".join([f"vllm=={spec.version}", *pins]) + "\n")
        sums = out / "SHA256SUMS"
        old = sums.read_text("utf-8", "replace").splitlines() if sums.is_file() else []
        # Rows of wheels that the lock no longer has are left out: they would vouch for other bytes of the same label.
        pinned = {f"{row.sha256}  {row.file}" for row in release.wheel if (out / row.file).is_file()}
        lines = (pinned & set(old)) | {f"{written.sha256}  {written.path.name}"}
        lines |= {f"{sha256_of(path)}  {path.name}" for path in out.glob("constraints*.txt")}
        _write_text(sums, "\n".join(sorted(lines, key=lambda line: line.split("  ")[1])) + "\n")


def _write_text(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def _naming_damage(release: Release, project: Project) -> Iterator[None]:
    """Let a PatchProblem also say which patches are not the pinned ones: that is the likely cause."""
    try:
        yield
    except PatchProblem as problem:
        folder = project.patches(release.version)
        damaged = [
            row.file
            for row in release.patch
            if not (folder / row.file).is_file() or sha256_of(folder / row.file) != row.sha256
        ]
        if damaged:
            problem.args = (f"{problem} (not as VERSIONS.lock pins it, by sha256: {', '.join(damaged)})",)
        raise
