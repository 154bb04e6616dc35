# SPDX-License-Identifier: Apache-2.0
"""Reads a patch as `git format-patch` writes it, and applies it to bytes: at its own lines or not at all.

git is not asked: what `git apply` does depends on the user's configuration, the environment and the repository
around, it moves hunks without a word, and below another repository it leaves files out with exit status 0.
"""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from builder.errors import PatchProblem

CONTEXT = 3
TRAILERS = ("Origin", "Forwarded", "Layer", "Test", "Drop-When")  # Applied-Upstream is for those that have one
LAYERS = ("python", "native")
_NO_NEWLINE = b"\\ No newline at end of file"
_HUNK = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@(?: .*)?")
_DIFF = re.compile(rb"diff --git a/(\S+) b/(\S+)")
_INDEX = re.compile(rb"index [0-9a-f]{40}\.\.[0-9a-f]{40} 100(?:644|755)")
_MAIL = re.compile(rb"From 0{40} Mon Sep 17 00:00:00 2001")


@dataclass(frozen=True)
class Hunk:
    """One hunk: its first line (from 1) before and after, and the lines with their ends, without the sign."""

    number: int
    old_start: int
    new_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]
    leading: int
    trailing: int


@dataclass(frozen=True)
class FilePatch:
    """The hunks for one file, in order."""

    path: str
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True)
class Patch:
    """A parsed patch: its name (the file's), subject, trailers and what it changes."""

    name: str
    subject: str
    body: str
    trailers: dict[str, str]
    files: tuple[FilePatch, ...]


def parse(name: str, data: bytes) -> Patch:
    """Read a patch; raises PatchProblem for anything but plain changes of text files in the project's mail form."""
    if b"\r\n" in data.split(b"\ndiff --git ", 1)[0]:
        raise _problem(name, "LF line ends", "CRLF", "restore the file; .gitattributes keeps git from changing it")
    lines = data.split(b"\n")
    if lines.pop() != b"":
        raise _problem(name, "a newline at the end", "none", "restore the file")
    first = next((n for n, line in enumerate(lines) if line.startswith(b"diff ")), len(lines))
    subject, body, trailers = _parse_mail(name, lines[:first])
    files = _parse_diff(name, lines, first)
    return Patch(name, subject, body, trailers, files)


def apply(patch: Patch, read: Callable[[str], bytes | None]) -> dict[str, bytes]:
    """The files that `patch` changes, by path, after it; `read` gives a file's bytes before it, or None.

    Raises PatchProblem, naming file and hunk, with the expected and the found line.
    """
    after = {}
    for file in patch.files:
        before = read(file.path)
        if before is None:
            raise _problem(f"{patch.name}: {file.path}", "the file in the release", "no such file", "port the patch")
        after[file.path] = _apply_hunks(f"{patch.name}: {file.path}", file.hunks, before)
    return after


def _apply_hunks(where: str, hunks: tuple[Hunk, ...], before: bytes) -> bytes:
    lines = _lines(before)
    result: list[bytes] = []
    position = 0
    for hunk in hunks:
        start = hunk.old_start - 1 if hunk.old else hunk.old_start
        result += lines[position:start]
        if len(result) != (hunk.new_start - 1 if hunk.new else hunk.new_start):
            raise _problem(
                f"{where}: hunk {hunk.number}", f"new line {len(result) + 1}", f"{hunk.new_start}", "write it anew"
            )
        for offset, expected in enumerate(hunk.old):
            found = lines[start + offset] if start + offset < len(lines) else b""
            if found != expected:
                raise _problem(
                    f"{where}: hunk {hunk.number}",
                    f"line {start + offset + 1} to be {_quote(expected)}",
                    _quote(found) if found else "the end of the file",
                    "port the patch to this file",
                )
        end = start + len(hunk.old)
        if (hunk.leading < CONTEXT and start > hunk.leading) or (hunk.trailing < CONTEXT and end < len(lines)):
            raise _problem(
                f"{where}: hunk {hunk.number}", f"{CONTEXT} lines of context", "fewer", "write it with git diff -U3"
            )
        result += hunk.new
        position = end
    result += lines[position:]
    return b"".join(result)


def _parse_mail(name: str, lines: list[bytes]) -> tuple[str, str, dict[str, str]]:
    """Subject, body and trailers of the mail before the first diff."""
    try:
        text = b"\n".join(lines).decode("utf-8")
    except UnicodeDecodeError as error:
        raise _problem(name, "UTF-8 in the mail", f"byte {error.start} that is not", "restore the file") from None
    head, _, rest = text.partition("\n\n")
    headers = head.split("\n")
    subject = " ".join(line.strip() for line in "\n".join(headers).partition("\nSubject: ")[2].split("\n"))
    if not lines or not _MAIL.fullmatch(lines[0]) or not subject.startswith("[PATCH] "):
        raise _problem(
            name,
            "a mail of git format-patch --zero-commit with 'Subject: [PATCH] ...'",
            repr(head[:60]),
            "see docs/adding-a-patch.md",
        )
    message, separator, _ = (rest + "\n").partition("\n---\n")
    if not separator:
        raise _problem(name, "a line '---' between message and diff", "none", "see docs/adding-a-patch.md")
    body, _, block = message.strip().rpartition("\n\n")
    trailers: dict[str, str] = {}
    key = ""
    for line in block.split("\n"):
        match = re.fullmatch(r"([A-Z][A-Za-z-]*): (\S.*)", line)
        if match:
            key = match[1]
            trailers[key] = match[2]
        elif key and line.startswith(" "):
            trailers[key] += " " + line.strip()
    missing = [key for key in TRAILERS if key not in trailers]
    if missing or not body:
        raise _problem(
            name,
            f"a body, and the trailers {', '.join(TRAILERS)}",
            f"no {', '.join(missing) or 'body'}",
            "see docs/adding-a-patch.md",
        )
    if trailers["Layer"] not in LAYERS:
        raise _problem(name, f"Layer: {' or '.join(LAYERS)}", trailers["Layer"], "correct the trailer")
    return subject.removeprefix("[PATCH] "), body, trailers


def _parse_diff(name: str, lines: list[bytes], position: int) -> tuple[FilePatch, ...]:
    files: list[FilePatch] = []
    while position < len(lines):
        header = _DIFF.fullmatch(lines[position])
        if not header or header[1] != header[2]:
            raise _problem(
                name,
                "'diff --git a/PATH b/PATH' with one plain path",
                _quote(lines[position]),
                "patches only change files; a new file goes into overlay/",
            )
        path = _checked_path(name, header[1])
        expected = [
            _INDEX,
            re.compile(rb"--- a/" + re.escape(header[1])),
            re.compile(rb"\+\+\+ b/" + re.escape(header[1])),
        ]
        for pattern in expected:
            position += 1
            line = lines[position] if position < len(lines) else b""
            if not pattern.fullmatch(line):
                raise _problem(
                    f"{name}: {path}",
                    "a change of a text file (full index line, --- a/, +++ b/)",
                    _quote(line) if line else "nothing",
                    "no new, deleted, renamed, copied or binary files, no links and no mode changes",
                )
        position += 1
        hunks: list[Hunk] = []
        while position < len(lines) and lines[position].startswith(b"@@"):
            hunk, position = _parse_hunk(f"{name}: {path}", lines, position, len(hunks) + 1)
            hunks.append(hunk)
        if not hunks:
            raise _problem(f"{name}: {path}", "a hunk", "none", "write the patch with git format-patch")
        for first, second in pairwise(hunks):
            if second.old_start < first.old_start + len(first.old):
                raise _problem(
                    f"{name}: {path}: hunk {second.number}",
                    "hunks in order",
                    "an overlap",
                    "write the patch with git format-patch",
                )
        files.append(FilePatch(path, tuple(hunks)))
    paths = [file.path for file in files]
    if not files or len(set(paths)) != len(paths):
        raise _problem(
            name,
            "each changed file once",
            "none" if not files else "one twice",
            "write the patch with git format-patch",
        )
    return tuple(files)


def _parse_hunk(where: str, lines: list[bytes], position: int, number: int) -> tuple[Hunk, int]:
    where = f"{where}: hunk {number}"
    match = _HUNK.fullmatch(lines[position])
    if not match:
        raise _problem(where, "@@ -LINE,COUNT +LINE,COUNT @@", _quote(lines[position]), "restore the patch")
    old_start, old_count, new_start, new_count = (int(group) if group is not None else 1 for group in match.groups())
    old: list[bytes] = []
    new: list[bytes] = []
    signs: list[bytes] = []
    position += 1
    while len(old) < old_count or len(new) < new_count or lines[position : position + 1] == [_NO_NEWLINE]:
        line = lines[position] if position < len(lines) else b""
        sign, content = line[:1], line[1:] + b"\n"
        if line == _NO_NEWLINE and signs:
            for sign, side in ((b" -", old), (b" +", new)):
                if signs[-1] in sign:
                    side[-1] = side[-1].removesuffix(b"\n")
        elif sign == b" " or sign == b"-" or sign == b"+":
            signs.append(sign)
            if sign != b"+":
                old.append(content)
            if sign != b"-":
                new.append(content)
        else:
            raise _problem(
                where,
                f"{old_count} lines before and {new_count} after",
                f"{len(old)} and {len(new)}, then {_quote(line)}",
                "restore the patch",
            )
        position += 1
    if len(old) != old_count or len(new) != new_count or not signs or set(signs) == {b" "}:
        raise _problem(
            where, f"a change of {old_count} lines to {new_count}", f"{len(old)} to {len(new)}", "restore the patch"
        )
    leading = next(n for n, sign in enumerate(signs) if sign != b" ")
    trailing = next(n for n, sign in enumerate(reversed(signs)) if sign != b" ")
    return Hunk(number, old_start, new_start, tuple(old), tuple(new), leading, trailing), position


def _checked_path(name: str, raw: bytes) -> str:
    path = raw.decode("ascii", "replace")
    parts = path.split("/")
    if not re.fullmatch(r"[A-Za-z0-9_.+/-]+", path) or path.startswith("/") or {"", ".", ".."} & set(parts):
        raise _problem(
            name, "a relative path of plain characters", _quote(raw), "patches stay inside the release's tree"
        )
    return path


def _lines(data: bytes) -> list[bytes]:
    """Lines with their ends; unlike with splitlines, a lone CR ends no line."""
    return io.BytesIO(data).readlines()


def _quote(line: bytes) -> str:
    text = line.decode("utf-8", "backslashreplace").rstrip("\n").encode("unicode_escape").decode()
    return f"'{text[:120]}'"


def _problem(subject: str, expected: str, found: str, do: str) -> PatchProblem:
    return PatchProblem(subject, expected=expected, found=found, do=do)
