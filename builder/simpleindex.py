# SPDX-License-Identifier: Apache-2.0
"""Writes a simple index (PEP 503 and 658) of built wheels: a folder that any static server can serve."""

import html
import os
import shutil
import zipfile
from pathlib import Path
from urllib.parse import quote

from packaging.utils import parse_wheel_filename

from builder.atomic import replacing
from builder.errors import InputProblem
from builder.hashing import sha256_of

_PAGE = '<!DOCTYPE html>\n<html><head><meta name="pypi:repository-version" content="1.0"></head><body>\n{}\n</body></html>\n'  # noqa: E501  # fmt: skip


def write(wheels: Path, folder: Path) -> list[str]:
    """Make `folder`/vllm/ with the wheels of a folder, their metadata and a page; returns the wheels' names.

    Wheels are linked where the file system allows it, and copied elsewhere. Those that are there already stay.
    """
    found = sorted(wheels.glob("vllm-*+ndt.*.whl"))
    if not found:
        raise InputProblem(str(wheels), expected="wheels of a build", found="none", do="run `python build.py` first")
    project = folder / "vllm"
    project.mkdir(parents=True, exist_ok=True)
    for wheel in found:
        target = project / wheel.name
        if not target.exists() or sha256_of(target) != sha256_of(wheel):
            _link(wheel, target)
        version = parse_wheel_filename(wheel.name)[1]
        with zipfile.ZipFile(wheel) as archive, replacing(project / f"{wheel.name}.metadata") as file:
            file.write(archive.read(f"vllm-{version}.dist-info/METADATA"))
    lines = [_line(path) for path in sorted(project.glob("*.whl"))]
    for path, text in ((project, "\n".join(lines)), (folder, '<a href="vllm/">vllm</a>')):
        with replacing(path / "index.html") as file:
            file.write(_PAGE.format(text).encode())
    return [wheel.name for wheel in found]


def _line(wheel: Path) -> str:
    metadata = f"sha256={sha256_of(wheel.with_name(f'{wheel.name}.metadata'))}"
    return (
        f'<a href="{quote(wheel.name)}#sha256={sha256_of(wheel)}" data-requires-python="&gt;=3.10" '
        f'data-core-metadata="{metadata}" data-dist-info-metadata="{metadata}">{html.escape(wheel.name)}</a><br>'
    )


def _link(wheel: Path, target: Path) -> None:
    part = target.with_name(f".{target.name}.part")
    part.unlink(missing_ok=True)
    try:
        os.link(wheel, part)
    except OSError:
        shutil.copyfile(wheel, part)
    part.replace(target)
