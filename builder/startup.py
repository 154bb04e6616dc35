# SPDX-License-Identifier: Apache-2.0
"""Finds, below the root of an image, the folders that a Python imports from, and what it runs there by itself at start.

The image's step writes down what it finds; `verify --image` compares. Links are followed as in the image: an absolute
one would lead to this machine's files. It needs the standard library alone.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

_PYTHON = re.compile(r"python3(?:\.\d+)?t?")
_PACKAGES = ("site-packages", "dist-packages")
_STARTUP = ("sitecustomize", "usercustomize")


def inside(root: Path, path: str) -> Path:
    """Where a path of the image leads."""
    left, place, links = path.split("/")[::-1], list[str](), 0
    while left:
        part = left.pop()
        if part == "..":
            place[-1:] = []
        elif part not in ("", "."):
            here = root.joinpath(*place, part)
            if here.is_symlink() and links < 40:
                links += 1
                target = os.readlink(here)
                place = [] if target.startswith("/") else place
                left += target.split("/")[::-1]
            else:
                place.append(part)
    return root.joinpath(*place)


def python_folders(root: Path) -> list[Path]:
    """The folders of Pythons' own modules and of packages, on the file system of `root` alone."""
    found, device = [], root.stat().st_dev
    for name, folders, _ in os.walk(root):
        path = Path(name)
        is_packages = path.name in _PACKAGES
        if is_packages or _PYTHON.fullmatch(path.name):
            found.append(path)
            folders[:] = [] if is_packages else [folder for folder in folders if folder in _PACKAGES]
        folders[:] = [folder for folder in folders if os.lstat(path / folder).st_dev == device]
    return sorted(found)


def holds(folder: Path, module: str) -> bool:
    """Whether a folder has a module or package of this name."""
    return any(name.partition(".")[0] == module for name in os.listdir(folder))


def files(root: Path, folders: list[Path]) -> dict[str, str]:
    """What Python runs by itself in these folders: the sha256 of each file by its path in the image."""
    found = {}
    for folder in folders:
        for name in os.listdir(folder):
            if name.endswith(".pth") or name.partition(".")[0] in _STARTUP:
                path = (folder / name).relative_to(root).as_posix()
                file = inside(root, path)
                data = file.read_bytes() if file.is_file() else b"no file"
                found[path] = hashlib.sha256(data).hexdigest()
    return found


def write(found: Mapping[str, str]) -> str:
    """The list of such files, a line each."""
    return "".join(f"{digest}  {path}\n" for path, digest in sorted(found.items()))
