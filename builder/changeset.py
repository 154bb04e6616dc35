# SPDX-License-Identifier: Apache-2.0
"""The value in the middle: what series and overlay make of an upstream tree, computed once."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from builder import patchfile
from builder.errors import InputProblem, PatchProblem
from builder.lockfile import Changed
from builder.patchfile import Patch

NOTICE = b"changed by vllm-ndt"  # Apache-2.0, section 4(b)


@dataclass(frozen=True)
class Change:
    """One file: sha256 (hex) of upstream's bytes, or "" for a new file; the bytes after."""

    before: str
    after: bytes

    def pin(self, path: str) -> Changed:
        """The change as the lock writes it."""
        return Changed(path, self.before, hashlib.sha256(self.after).hexdigest())


ChangeSet = dict[str, Change]


def compute(patches: tuple[Patch, ...], overlay: dict[str, bytes], read: Callable[[str], bytes | None]) -> ChangeSet:
    """Apply the patches in order and lay the overlay beside; `read` gives upstream's bytes, or None.

    Raises PatchProblem if a patch does not apply or leaves a file without its notice of change.
    """
    changes: ChangeSet = {}

    def current(path: str) -> bytes | None:
        return changes[path].after if path in changes else read(path)

    for patch in patches:
        for path, after in patchfile.apply(patch, current).items():
            before = changes[path].before if path in changes else hashlib.sha256(read(path) or b"").hexdigest()
            if NOTICE not in after:
                raise PatchProblem(
                    f"{patch.name}: {path}",
                    expected=f"a comment with the words '{NOTICE.decode()}' (Apache-2.0, section 4b)",
                    found="none",
                    do="add it to the patch",
                )
            changes[path] = Change(before, after)
    for path, data in overlay.items():
        changes[path] = Change("", data)
    return changes


def check(changes: ChangeSet, pinned: tuple[Changed, ...]) -> None:
    """Raise InputProblem unless the changes are those of the lock."""
    found = {path: change.pin(path) for path, change in changes.items()}
    expected = {row.path: row for row in pinned}
    for path in sorted(found.keys() | expected.keys()):
        if found.get(path) != expected.get(path):
            raise InputProblem(
                path,
                expected=_describe(expected.get(path)) + " (VERSIONS.lock)",
                found=_describe(found.get(path)),
                do="restore the file; after a change on purpose run `build.py lock`",
            )


def _describe(row: Changed | None) -> str:
    return f"{row.before[:12] or 'new'} to sha256 {row.after}" if row else "no change"
