# SPDX-License-Identifier: Apache-2.0
"""Reads a dependency closure of locks/ (pip's requirements format with hashes) as requirement lines."""

import re
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from builder.errors import InputProblem


def rows(text: str) -> Iterator[tuple[str, str]]:
    """The rows of a closure's text: the requirement, and its lines of hashes ("" if it has none)."""
    for row in re.split(r"^(?=[^\s#])", text, flags=re.MULTILINE):
        line, _, hashes = row.partition("\n")
        if line and line[0] not in " \t#":  # else it stands before the first row
            yield line.removesuffix("\\").strip(), hashes


def read_pins(path: Path) -> tuple[str, ...]:
    """The lines `name==version` or `name==version ; marker` of a closure, without hashes, in file order."""
    pins = []
    for pin, _ in rows(path.read_text("utf-8")):
        try:
            requirement = Requirement(pin)
        except InvalidRequirement as error:
            raise InputProblem(
                str(path), expected="requirement lines", found=f"{error}", do="run `build.py lock`"
            ) from None
        if requirement.url or not str(requirement.specifier).startswith("=="):
            raise InputProblem(str(path), expected="name==version", found=pin, do="run `build.py lock`")
        pins.append(pin)
    return tuple(pins)


def version_of(pins: tuple[str, ...], name: str) -> str:
    """The pinned version of a package without a marker of its own, or "" if the closure does not have it."""
    for pin in pins:
        requirement = Requirement(pin)
        if canonicalize_name(requirement.name) == name:
            return str(requirement.specifier).removeprefix("==")
    return ""
