# SPDX-License-Identifier: Apache-2.0
"""Reads a dependency closure of locks/ (pip's requirements format with hashes) as requirement lines."""

from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from builder.errors import InputProblem


def read_pins(path: Path) -> tuple[str, ...]:
    """The lines `name==version` or `name==version ; marker` of a closure, without hashes, in file order."""
    lines = []
    for line in path.read_text("utf-8").splitlines():
        if line and not line[0].isspace() and not line.startswith("#"):
            pin = line.removesuffix("\\").strip()
            try:
                requirement = Requirement(pin)
            except InvalidRequirement as error:
                raise InputProblem(
                    str(path), expected="requirement lines", found=f"{error}", do="run `build.py lock`"
                ) from None
            if requirement.url or not str(requirement.specifier).startswith("=="):
                raise InputProblem(str(path), expected="name==version", found=pin, do="run `build.py lock`")
            lines.append(pin)
    return tuple(lines)


def version_of(pins: tuple[str, ...], name: str) -> str:
    """The pinned version of a package without a marker of its own, or "" if the closure does not have it."""
    for pin in pins:
        requirement = Requirement(pin)
        if canonicalize_name(requirement.name) == name:
            return str(requirement.specifier).removeprefix("==")
    return ""
