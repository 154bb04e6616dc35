# SPDX-License-Identifier: Apache-2.0
"""The image with the files beside it: bill of materials, provenance, and specifications that start it by its digest."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from builder import deploy, image, provenance, sbom, wheelhouse
from builder.atomic import replacing
from builder.closure import read_pins
from builder.errors import InputProblem
from builder.full import CLOSURE, WHEELS
from builder.image import Base, Image
from builder.inputs import Project
from builder.lockfile import Release
from builder.pipeline import describe

RECORD = "image.json"


@dataclass(frozen=True)
class Made:
    """An image that was built, on which base, whether the base was pinned, and by whom."""

    image: Image
    base: str
    pinned: bool
    builder: str
    version: str

    def as_dict(self) -> dict[str, Any]:
        """For a program."""
        return asdict(self.image) | {"reference": self.image.reference, "builder": self.builder, "version": self.version}  # noqa: E501  # fmt: skip


def build(
    project: Project,
    release: Release,
    flavor: str,
    arch: str,
    base_name: str | None,
    builder: str,
    out: Path,
    cache: Path,
    *,
    wheel: Path | None,
    offline: bool,
) -> Made:
    """Build the image and write the files beside it; raises ImageProblem or InputProblem.

    With a `wheel`, it and its closure are installed on a plain Python; without, the base's own vllm is patched.
    """
    default = Base(image.PLAIN, "") if wheel else Base(release.image["name"], release.image["digest"])
    base = Base(base_name, base_name.partition("@")[2]) if base_name else default
    folder, more = out / "image", {}
    closure = release.closure_of(flavor)
    if wheel and closure:  # which pipeline.build found to be there
        lock = project.locks / closure.file
        wheels = wheelhouse.gather(lock, image.python_of(builder, base.reference), arch, cache, offline=offline)
        more = {wheel.name: wheel, CLOSURE: lock, WHEELS: wheels}
    inputs = image.prepare(project, release, flavor, arch, folder, cache, more, offline=offline)
    made = image.build(release, flavor, arch, base, builder, folder, inputs, full=bool(wheel))
    version = describe(release, release.wheel_artefact(flavor, arch)).version
    pins = read_pins(folder / "pins.txt")
    result = Made(made, base.reference, bool(base.digest), builder, version)
    patches = [(row.name, row.sha256) for row in release.patch]
    bill = sbom.bill_of_image(
        name=made.name,
        digest=made.digest,
        version=version,
        base=base.name,
        base_digest=made.base,
        upstream=release.version,
        patches=patches,
        pins=pins,
        py_spy=release.packages["py-spy"],
    )
    statement = provenance.statement(made, base, release, flavor, arch, inputs, builder, wheel)
    _write(out / f"{_stem(version)}.cdx.json", bill)
    _write(out / f"{_stem(version)}.intoto.json", statement)
    _write(out / RECORD, (json.dumps(result.as_dict(), indent=1) + "\n").encode())
    deploy.render(
        project.root / "deploy", out / "deploy", image=made.reference, version=version, manifest=made.manifest
    )
    return result


def push(project: Project, out: Path, target: str, *, insecure: bool) -> str:
    """Push the image that `build` made and put it by digest into the specifications; returns the reference."""
    try:
        record = json.loads((out / RECORD).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InputProblem(
            str(out / RECORD), expected="the record of an image", found=f"{error}", do="build one: build.py --image yes"
        ) from None
    made = Image(record["name"], record["digest"], record["manifest"], record["base"])
    digest = image.push(record["builder"], made, target, insecure=insecure)
    reference = f"{target}@{digest}"
    deploy.render(
        project.root / "deploy", out / "deploy", image=reference, version=record["version"], manifest=made.manifest
    )
    for path in out.glob(f"{_stem(record['version'])}.intoto.json"):
        _write(path, provenance.renamed(path.read_bytes(), target, digest))
    return reference


def _stem(version: str) -> str:
    return f"vllm-ndt-image-{version}"


def _write(path: Path, data: bytes) -> None:
    with replacing(path) as file:
        file.write(data)
