# SPDX-License-Identifier: Apache-2.0
"""Says from outside whether an image has the patched vLLM and starts it: its files are read, nothing of it is run."""

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from vllm_ndt import manifest, verify
from vllm_ndt.verify import EDITED, INCOMPLETE, PATCHED, UNKNOWN, Report

from builder import startup, store
from builder.builders import find_builder
from builder.distinfo import recorded_hash
from builder.errors import BuildError, ImageProblem
from builder.image import LABELS
from builder.layer import STARTUP

ENTRYPOINT = ["vllm-ndt", "serve"]
# what puts other code in front of the image's, or beside it; the build sets none
ENVIRONMENT = ("PYTHONPATH", "PYTHONHOME", "PYTHONPYCACHEPREFIX", "PYTHONSTARTUP", "PYTHONUSERBASE", "LD_PRELOAD")
_LABEL = LABELS["MANIFEST"]
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def check_image(name: str, builder: str | None, *, deep: bool, expect: str | None) -> Report:
    """Judge an image that lies here; without `expect` its label must name the manifest that is in it.

    Its Python is not run, so bytecode of files that stay is not compared; `vllm-ndt verify --deep` in it does that.
    """
    try:
        builder = find_builder(builder)
        if builder != "docker" and os.geteuid():
            do = "run it as root, or in `buildah unshare` or `podman unshare`, whichever has the image"
            raise ImageProblem("verify --image", expected="root, to mount the image", found=f"user {os.geteuid()}", do=do)  # noqa: E501  # fmt: skip
        configuration = store.configuration(builder, name)
        with store.files(builder, name) as root:
            report = _judge(root, configuration, deep, expect)
            report = replace(report, findings=[line.replace(str(root), "") for line in report.findings])
    except (BuildError, OSError) as error:
        return Report(name, UNKNOWN, findings=[str(error)])
    return replace(report, where=name)


def _judge(root: Path, configuration: store.Configuration, deep: bool, expect: str | None) -> Report:
    folders = startup.python_folders(root)
    sites = [folder for folder in folders if startup.holds(folder, "vllm")]
    ours = [site for site in sites if (site / manifest.NAME).is_file()] or sites
    if len(ours) != 1:
        return Report("", UNKNOWN, findings=[f"expected one vllm in it, found {', '.join(map(str, ours)) or 'none'}"])
    site = ours[0]
    report = verify.check_site(site, deep=deep, expect=expect, same_python=False)
    if report.verdict not in (PATCHED, EDITED, INCOMPLETE) or report.manifest is None:
        return report
    more = [f"another vllm: {other}" for other in sites if other != site]
    more += _configured(configuration, report.manifest.digest, label=expect is None)
    more += _command(root, site, configuration.environment.get("PATH") or _PATH)
    more += _startup(root, site, folders)
    return replace(report, verdict=EDITED if more else report.verdict, findings=[*report.findings, *more])


def _configured(configuration: store.Configuration, digest: str, *, label: bool) -> Iterator[str]:
    """Findings on the image's configuration; on its label only if nothing else says what manifest it must have."""
    found = configuration.labels.get(_LABEL, "none")
    if label and found != digest:
        yield f"another build: its label {_LABEL} says {found}, and {digest} is in it"
    if configuration.entrypoint != ENTRYPOINT:
        yield f"its entrypoint: expected {' '.join(ENTRYPOINT)}, found {' '.join(configuration.entrypoint) or 'none'}"
    for name in ENVIRONMENT:
        if name in configuration.environment:
            yield f"its variable {name}: expected none, found {configuration.environment[name]!r}"


def _command(root: Path, site: Path, path: str) -> Iterator[str]:
    """Findings on the command vllm-ndt: it must be as RECORD has it, and the first of its name."""
    text = "".join(file.read_text("utf-8") for file in site.glob("vllm-*.dist-info/RECORD"))
    rows = [row for row in csv.reader(io.StringIO(text)) if row[0].startswith("../") and row[0].endswith("/vllm-ndt")]
    if len(rows) != 1:
        yield f"the command vllm-ndt: expected one in RECORD, found {len(rows)}"
        return
    file = startup.inside(root, f"{site.relative_to(root)}/{rows[0][0]}")
    if not file.is_file() or recorded_hash(file.read_bytes()) != rows[0][1]:
        yield f"{file}: {'changed' if file.is_file() else 'missing'}"
    found = [startup.inside(root, f"{folder}/vllm-ndt") for folder in path.split(":")]
    first = next((other for other in found if other.is_file()), None)
    if first != file:
        yield f"the first vllm-ndt of its PATH: expected {file}, found {first or 'none'}"


def _startup(root: Path, site: Path, folders: list[Path]) -> Iterator[str]:
    """Findings on what Python runs at start: it must be what the build found in the base."""
    try:
        text = (root / STARTUP).read_text("utf-8")
    except OSError:
        yield f"/{STARTUP}: missing"
        return
    pinned = json.loads((site / manifest.NAME).read_bytes())["upstream"].get("startup")
    if pinned and hashlib.sha256(text.encode()).hexdigest() != pinned:
        yield f"/{STARTUP}: changed"
    listed = {line[66:]: line[:64] for line in text.splitlines()}
    for path, digest in startup.files(root, folders).items():
        if listed.get(path) != digest:
            yield f"/{path}: {'changed' if path in listed else 'added'}, and Python runs it at start"
