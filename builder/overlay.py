# SPDX-License-Identifier: Apache-2.0
"""Reads overlay/: the new files of the distribution, none of which may stand where upstream has one."""

import os
import stat
from pathlib import Path

from builder.errors import PatchProblem
from builder.wheelfile import is_safe


def read_overlay(folder: Path) -> dict[str, bytes]:
    """The overlay's files, path below `folder` to bytes, sorted; raises PatchProblem for what is no plain file."""
    files: dict[str, bytes] = {}
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in [*names, *(entry for entry in folders if Path(root, entry).is_symlink())]:
            path = Path(root, name)
            relative = path.relative_to(folder).as_posix()
            if not stat.S_ISREG(path.lstat().st_mode) or not is_safe(relative) or not relative.isascii():
                raise PatchProblem(
                    f"overlay/{relative}",
                    expected="a regular file with a plain name",
                    found="another thing",
                    do="move it away",
                )
            files[relative] = path.read_bytes()
    return dict(sorted(files.items()))


def check_paths(overlay: dict[str, bytes], upstream: set[str]) -> None:
    """Raise PatchProblem if an overlay file lies on, in or around a path that upstream has."""
    tops = {name.partition("/")[0] for name in upstream}
    for path in overlay:
        if path.partition("/")[0] in tops:
            raise PatchProblem(
                f"overlay/{path}",
                expected="a path beside upstream's packages",
                found="one that belongs to upstream",
                do="upstream's files are changed by patches only: write a patch, or move the file",
            )
