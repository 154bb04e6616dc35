# SPDX-License-Identifier: Apache-2.0
"""The image with the files beside it: bill of materials, provenance, and specifications that start it by its digest."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from builder import deploy, image, provenance, sbom, store, wheelhouse
from builder.atomic import locked, replacing
from builder.closure import read_pins
from builder.errors import ImageProblem, InputProblem
from builder.full import CLOSURE, WHEELS
from builder.image import Base, Image
from builder.inputs import Project
from builder.lockfile import Release
from builder.pipeline import closure_file, describe

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
    Builds into the same folder wait for each other.
    """
    default = Base(image.PLAIN, "") if wheel else Base(release.image["name"], release.image["digest"])
    base = Base(base_name, base_name.partition("@")[2]) if base_name else default
    with locked(out / ".image.lock"):
        folder, more = out / "image", {}
        if wheel:
            lock = closure_file(project, release, flavor)
            wheels = wheelhouse.gather(lock, store.python_of(builder, base.reference), arch, cache, offline=offline)
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
    """Push the image that `build` made and put it by digest into the specifications; returns the reference.

    Raises ImageProblem if its name is another image's by now.
    """
    store.check_target(target)
    try:
        record = json.loads((out / RECORD).read_text("utf-8"))
        made = Image(*(str(record[key]) for key in ("name", "digest", "manifest", "base")))
        builder, version = str(record["builder"]), str(record["version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = f"no {error}" if isinstance(error, KeyError) else f"{error}"
        raise InputProblem(
            str(out / RECORD), expected="the record of an image", found=found, do="build one: build.py --image yes"
        ) from None
    if (found := store.digest_of(builder, made.name)) != made.digest:
        raise ImageProblem(made.name, expected=f"{made.digest}, as it was built", found=found, do="build it again")
    digest = store.push(builder, made.name, target, insecure=insecure)
    reference = f"{target}@{digest}"
    deploy.render(project.root / "deploy", out / "deploy", image=reference, version=version, manifest=made.manifest)
    for path in out.glob(f"{_stem(version)}.intoto.json"):
        _write(path, provenance.renamed(path.read_bytes(), target, digest))
    return reference


def _stem(version: str) -> str:
    return f"vllm-ndt-image-{version}"


def _write(path: Path, data: bytes) -> None:
    with replacing(path) as file:
        file.write(data)
