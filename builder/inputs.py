# SPDX-License-Identifier: Apache-2.0
"""Patches and overlay as the checkout has them, and what they make of an upstream tree.

It needs the standard library alone: the image's layer is made of the same inputs, inside an image.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from builder import changeset, overlay, series
from builder.changeset import ChangeSet
from builder.distinfo import Content
from builder.errors import InputProblem
from builder.lockfile import Release
from builder.patchfile import Patch
from builder.series import SeriesEntry


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

    def changes(self, names: set[str], read: Callable[[str], bytes | None]) -> ChangeSet:
        """The change set on upstream's files, whose names and bytes are given.

        Raises PatchProblem if a patch or an overlay file does not fit.
        """
        overlay.check_paths(self.overlay, names)
        return changeset.compute(self.patches, self.overlay, read)

    def content(self, changes: ChangeSet, pins: tuple[str, ...]) -> Content:
        """What the writers need."""
        digests = (entry.sha256 for entry in self.entries)
        return Content(changes, tuple(zip(self.patches, digests, strict=True)), pins)


def read_inputs(project: Project, release: str) -> Inputs:
    """Read and check series, patches and overlay; raises PatchProblem."""
    entries = series.read_series(project.patches(release))
    return Inputs(entries, series.parse_series(entries, project.root), overlay.read_overlay(project.overlay))


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
