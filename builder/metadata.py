# SPDX-License-Identifier: Apache-2.0
"""Edits the generated files of a wheel (METADATA, WHEEL, _version.py, entry_points.txt) as text, line by line."""

import re
from collections.abc import Iterable

from builder.errors import InputProblem


def edit_metadata(text: str, *, version: str, locked: Iterable[str], license_files: Iterable[str], cpu: bool) -> str:
    """METADATA with name vllm, the new version, more licence files, and an extra `locked` of requirement lines.

    The CPU flavor asks for `torch==2.13.0+cpu`, which the public index does not have: it gets the release itself.
    """
    head, separator, description = text.partition("\n\n")
    lines = head.split("\n")
    _replace(lines, re.compile(r"Version: .*"), f"Version: {version}", "METADATA")
    _replace(lines, re.compile(r"Name: .*"), "Name: vllm", "METADATA")
    if cpu:
        lines = [re.sub(r"^(Requires-Dist: torch==[0-9.]+)\+cpu", r"\1", line) for line in lines]
    lines += [f"License-File: {name}" for name in license_files]
    requirements = list(locked)
    if requirements:
        lines.append("Provides-Extra: locked")
        lines += [f"Requires-Dist: {with_extra(line, 'locked')}" for line in requirements]
    return "\n".join(lines) + separator + description


def with_extra(requirement: str, extra: str) -> str:
    """A requirement line that holds only for an extra."""
    name, semicolon, marker = requirement.partition(";")
    condition = f"extra == '{extra}'"
    return f"{name.strip()} ; ({marker.strip()}) and {condition}" if semicolon else f"{name.strip()} ; {condition}"


def edit_wheel(text: str, tags: Iterable[str]) -> str:
    """WHEEL with the tags of the file name; upstream's says another platform than its file name."""
    lines = [line for line in text.rstrip("\n").split("\n") if not line.startswith("Tag: ")]
    return "\n".join([*lines, *(f"Tag: {tag}" for tag in sorted(tags))]) + "\n"


def edit_version_module(text: str, version: str) -> str:
    """_version.py with the new version: upstream's compile cache key and its CPU platform read it."""
    parts = [int(part) if part.isdigit() else part for part in re.split(r"[.+]", version)]
    lines = text.split("\n")
    _replace(lines, re.compile(r"__version__ = version = .*"), f"__version__ = version = {version!r}", "_version.py")
    _replace(
        lines,
        re.compile(r"__version_tuple__ = version_tuple = .*"),
        f"__version_tuple__ = version_tuple = {tuple(parts)!r}",
        "_version.py",
    )
    return "# changed by vllm-ndt: the version\n" + "\n".join(lines)


def edit_entry_points(text: str, script: str) -> str:
    """entry_points.txt with one more console script line."""
    lines = text.split("\n")
    _replace(lines, re.compile(r"\[console_scripts\]"), f"[console_scripts]\n{script}", "entry_points.txt")
    return "\n".join(lines)


def _replace(lines: list[str], pattern: re.Pattern[str], new: str, file: str) -> None:
    """Replace the one line that matches, in place."""
    hits = [number for number, line in enumerate(lines) if pattern.fullmatch(line)]
    if len(hits) != 1:
        raise InputProblem(
            file,
            expected=f"one line {pattern.pattern!r}",
            found=f"{len(hits)}",
            do="port builder/metadata.py to this release",
        )
    lines[hits[0]] = new
