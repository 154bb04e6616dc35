# SPDX-License-Identifier: Apache-2.0
"""Renders the files of deploy/: the image, its version and its manifest's digest put in, so that they start only it."""

import re
from pathlib import Path

from builder.atomic import replacing
from builder.errors import InputProblem

TEMPLATES = ("compose.yaml", "kubernetes.yaml")
_PLACEHOLDER = re.compile(rb"@([A-Z][A-Z_]*)@")
_FORMS = {  # each stays one word in YAML, in an argument and in a comment
    "IMAGE": (r"[\w.:/-]+@sha256:[0-9a-f]{64}", "an image by digest, NAME@sha256:DIGEST"),
    "VERSION": (r"[\w.]+\+[\w.]+", "a version with a label, such as 0.27.1+ndt.1"),
    "MANIFEST": (r"sha256:[0-9a-f]{64}", "a manifest's digest, sha256:DIGEST"),
}


def render(folder: Path, out: Path, *, image: str, version: str, manifest: str) -> list[Path]:
    """Write the files of `folder` to `out`, TEMPLATES with the values put in and the others as they are; the paths.

    Raises InputProblem, before anything is written, where a value has not its form, a template is missing or lacks
    a placeholder, or a file has a placeholder that is not known.
    """
    values = {"IMAGE": image, "VERSION": version, "MANIFEST": manifest}
    for name, (form, words) in _FORMS.items():
        if not re.fullmatch(form, values[name], flags=re.ASCII):
            raise InputProblem(f"@{name}@", expected=words, found=repr(values[name]), do="give it in this form")
    paths = sorted(path for path in folder.glob("[!.]*") if path.is_file())
    for name in TEMPLATES:
        if folder / name not in paths:
            raise InputProblem(str(folder / name), expected="a template", found="no such file", do="restore it")
    rendered = {path.name: _render(path, values) for path in paths}
    for name, content in rendered.items():
        with replacing(out / name) as file:
            file.write(content)
    return [out / name for name in rendered]


def _render(path: Path, values: dict[str, str]) -> bytes:
    content = path.read_bytes()
    found = {match.decode() for match in _PLACEHOLDER.findall(content)}
    expected = set(values) if path.name in TEMPLATES else set()
    if found != expected:
        raise InputProblem(
            str(path),
            expected=_words(expected),
            found=_words(found),
            do="correct the template",
        )
    return _PLACEHOLDER.sub(lambda match: values[match[1].decode()].encode(), content)


def _words(names: set[str]) -> str:
    return ", ".join(f"@{name}@" for name in sorted(names)) or "no placeholder"
