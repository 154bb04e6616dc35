# SPDX-License-Identifier: Apache-2.0
"""Writes a simple index (PEP 503 and 658) of built wheels: a folder that any static server can serve."""

import email
import html
import zipfile
from pathlib import Path
from urllib.parse import quote

from packaging.utils import parse_wheel_filename

from builder.atomic import link, replacing
from builder.errors import InputProblem
from builder.hashing import sha256_of

_PAGE = '<!DOCTYPE html>\n<html><head><meta name="pypi:repository-version" content="1.0"></head><body>\n{}\n</body></html>\n'  # noqa: E501  # fmt: skip


def write(wheels: Path, folder: Path) -> list[str]:
    """Make `folder`/vllm/ with the wheels of a folder, their metadata and a page; returns the wheels' names.

    Wheels are linked where the file system allows it, and copied elsewhere. Those that are there already stay. Those of
    the CPU flavor are left out: installers would prefer them. Raises InputProblem for a wheel that cannot be read, and
    for other bytes under a name that is there; then nothing was changed.
    """
    found = [path for path in sorted(wheels.glob("vllm-*+ndt.*.whl")) if ".cpu-" not in path.name]
    if not found:
        cpu = any(wheels.glob("vllm-*+ndt.*.cpu-*.whl"))
        raise InputProblem(
            str(wheels),
            expected="wheels of a build for CUDA",
            found="those for the CPU alone, which are not indexed" if cpu else "none",
            do="run `python build.py` first",
        )
    project = folder / "vllm"
    metadata = {wheel: _metadata(wheel) for wheel in found}
    for wheel in found:
        if (project / wheel.name).exists() and sha256_of(project / wheel.name) != sha256_of(wheel):
            raise InputProblem(str(project / wheel.name), expected="the same wheel, as it was published", found="other bytes", do="build with a new label, or another folder")  # noqa: E501  # fmt: skip
    project.mkdir(parents=True, exist_ok=True)
    for wheel, data in metadata.items():
        with replacing(project / f"{wheel.name}.metadata") as file:
            file.write(data)
        if not (project / wheel.name).exists():
            _link(wheel, project / wheel.name)
    lines = [_line(path) for path in sorted(project.glob("*.whl"))]
    for path, text in ((project, "\n".join(lines)), (folder, '<a href="vllm/">vllm</a>')):
        with replacing(path / "index.html") as file:
            file.write(_PAGE.format(text).encode())
    return [wheel.name for wheel in found]


def _metadata(wheel: Path) -> bytes:
    version = parse_wheel_filename(wheel.name)[1]
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(f"vllm-{version}.dist-info/METADATA")
    except (zipfile.BadZipFile, KeyError) as error:
        raise InputProblem(str(wheel), expected="a wheel of a build", found=str(error), do="build it again") from None


def _line(wheel: Path) -> str:
    beside = wheel.with_name(f"{wheel.name}.metadata")
    metadata = f"sha256={sha256_of(beside)}"
    python = email.message_from_bytes(beside.read_bytes())["Requires-Python"] or ""
    return (
        f'<a href="{quote(wheel.name)}#sha256={sha256_of(wheel)}" data-requires-python="{html.escape(python)}" '
        f'data-core-metadata="{metadata}" data-dist-info-metadata="{metadata}">{html.escape(wheel.name)}</a><br>'
    )


def _link(wheel: Path, target: Path) -> None:
    part = target.with_name(f".{target.name}.part")
    part.unlink(missing_ok=True)
    link(wheel, part)
    part.replace(target)
