# SPDX-License-Identifier: Apache-2.0
"""From a release of the lock to a wheel in a folder, with the files beside it."""

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from builder import changeset, overlay, series, wheel
from builder.atomic import locked, replacing
from builder.changeset import ChangeSet
from builder.closure import read_pins
from builder.errors import InputProblem, PatchProblem, UsageProblem
from builder.fetch import fetch
from builder.hashing import sha256_of
from builder.lockfile import LATEST, Artefact, Release
from builder.patchfile import Patch
from builder.series import SeriesEntry
from builder.wheel import Build, Content, UpstreamWheel, Written

FLAVORS = ("cuda", "cpu")
ARCHES = ("x86_64", "aarch64")
EARLIEST = 315532800  # 1980-01-01


@dataclass(frozen=True)
class Project:
    """The checkout: where patches, overlay, locks and tests lie."""

    root: Path

    @property
    def overlay(self) -> Path:
        return self.root / "overlay"

    @property
    def locks(self) -> Path:
        return self.root / "locks"

    @property
    def versions(self) -> Path:
        return self.root / "VERSIONS.lock"

    def patches(self, release: str) -> Path:
        return self.root / "patches" / release


@dataclass(frozen=True)
class Inputs:
    """Patches and overlay as read from the checkout, before they meet upstream's tree."""

    entries: tuple[SeriesEntry, ...]
    patches: tuple[Patch, ...]
    overlay: dict[str, bytes]

    def changes(self, upstream: UpstreamWheel) -> ChangeSet:
        """The change set on an upstream wheel; raises PatchProblem if a patch or an overlay file does not fit."""
        overlay.check_paths(self.overlay, set(upstream.members))
        return changeset.compute(self.patches, self.overlay, upstream.read)

    def content(self, changes: ChangeSet, pins: tuple[str, ...]) -> Content:
        """What the wheel writer needs."""
        digests = (entry.sha256 for entry in self.entries)
        return Content(changes, tuple(zip(self.patches, digests, strict=True)), pins)


def read_inputs(project: Project, release: str) -> Inputs:
    """Read and check series, patches and overlay; raises PatchProblem."""
    entries = series.read_series(project.patches(release))
    return Inputs(entries, series.parse_series(entries, project.root), overlay.read_overlay(project.overlay))


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
            changes = inputs.changes(upstream)
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


def check_series(entries: tuple[SeriesEntry, ...], release: Release) -> None:
    """Raise InputProblem unless series and patches are those of the lock, in its order."""
    found = [(entry.path, entry.sha256) for entry in entries]
    expected = [(patch.file, patch.sha256) for patch in release.patch]
    if found == expected:
        return
    end = ("the end of the series", "")
    rows = zip_longest(found, expected, fillvalue=end)
    (path, digest), (pinned_path, pinned_digest) = next(row for row in rows if row[0] != row[1])
    raise InputProblem(
        f"patches/{release.version}/series",
        expected=f"{pinned_path} sha256 {pinned_digest} (VERSIONS.lock)",
        found=f"{path} {digest}",
        do="restore the file; after a change on purpose run `build.py lock`",
    )


def read_closure(project: Project, release: Release, flavor: str) -> tuple[str, ...]:
    """The flavor's locked requirements; raises InputProblem unless the file is the pinned one."""
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
    return read_pins(path)


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
