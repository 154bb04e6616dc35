# SPDX-License-Identifier: Apache-2.0
"""Reads patches/<release>/series and the patches that it names, in order, and checks that nothing is left over."""

import ast
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from builder.errors import PatchProblem
from builder.patchfile import Patch, parse

NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+\.patch")


@dataclass(frozen=True)
class SeriesEntry:
    """One patch of a series: its path as the series writes it, its sha256 (hex) and its content."""

    path: str
    sha256: str
    data: bytes

    @property
    def name(self) -> str:
        """The patch's name: its file's name without .patch."""
        return self.path.rpartition("/")[2].removesuffix(".patch")


def read_series(folder: Path) -> tuple[SeriesEntry, ...]:
    """The patches of `folder` in the order of its file `series`.

    A line names a patch of the folder, or one of an older release (../RELEASE/NAME.patch) that still fits.
    Raises PatchProblem if a named patch is missing, one is named twice, or a patch of the folder is not named.
    """
    series = folder / "series"
    try:
        text = series.read_text("utf-8")
    except (FileNotFoundError, IsADirectoryError):
        raise _problem(
            str(series), "the order of the patches", "no file", "write it; see docs/adding-a-patch.md"
        ) from None
    except UnicodeDecodeError as error:
        raise _problem(str(series), "UTF-8", str(error), "restore the file") from None
    names = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    entries = []
    for name in names:
        older, _, file = name.rpartition("/")
        if not NAME.fullmatch(file) or (older and not re.fullmatch(r"\.\./[0-9][0-9a-z.]*", older)):
            raise _problem(
                f"{series}", "verb-first-kebab-case.patch, or one as ../RELEASE/NAME.patch", name, "correct the line"
            )
        try:
            data = (folder / name).read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            raise _problem(f"{series}", f"the file {name}", "no such file", "restore it or delete the line") from None
        entries.append(SeriesEntry(name, hashlib.sha256(data).hexdigest(), data))
    if len({entry.name for entry in entries}) != len(entries):
        raise _problem(f"{series}", "each patch once", "one twice", "delete a line")
    left_over = sorted({path.name for path in folder.glob("*.patch")} - set(names))
    if left_over:
        raise _problem(
            f"{series}",
            "every patch of the folder",
            f"{', '.join(left_over)} not named",
            "add a line or delete the file",
        )
    return tuple(entries)


def parse_series(entries: tuple[SeriesEntry, ...], root: Path) -> tuple[Patch, ...]:
    """The parsed patches; raises PatchProblem for a bad one, or one whose Test: names no test below `root`."""
    patches = tuple(parse(entry.name, entry.data) for entry in entries)
    for patch in patches:
        if patch.trailers["Layer"] == "native":
            raise _problem(
                patch.name, "Layer: python", "native", "native code needs a build from source; a wheel cannot take it"
            )
        check_test(patch, root)
    return patches


def check_test(patch: Patch, root: Path) -> None:
    """Raise PatchProblem unless the trailer Test: names a test function, FILE::FUNCTION, that exists."""
    file, _, function = patch.trailers["Test"].partition("::")
    path = root / file
    try:
        tree = ast.parse(path.read_bytes()) if file.startswith("tests/") and ".." not in file.split("/") else None
    except (OSError, SyntaxError, ValueError):
        tree = None
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} if tree else set()
    if not function.startswith("test_") or function not in names:
        raise _problem(
            f"{patch.name}: Test: {patch.trailers['Test']}",
            "tests/FILE.py::test_NAME that exists",
            "no such test",
            "write the test that fails on stock and passes on patched",
        )


def _problem(subject: str, expected: str, found: str, do: str) -> PatchProblem:
    return PatchProblem(subject, expected=expected, found=found, do=do)
