# SPDX-License-Identifier: Apache-2.0
"""Builds the container image from the Dockerfile with docker, buildah or podman."""

import hashlib
import json
import re
import shutil
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from builder import store
from builder.atomic import link, scratch
from builder.builders import attempt, run
from builder.errors import ImageProblem, UsageProblem
from builder.fetch import fetch
from builder.hashing import sha256_of
from builder.inputs import Project
from builder.layer import DIGEST
from builder.lockfile import Release
from builder.pipeline import describe, read_closure

_COMMANDS = {
    "docker": ("docker", "buildx", "build"),
    # no intermediate images are left behind; OCI's configuration has no place for a health check
    "buildah": ("buildah", "bud", "--layers=false", "--format", "docker"),
    "podman": ("podman", "build", "--layers=false", "--format", "docker"),
}
LABELS = {"MANIFEST": "vllm-ndt.manifest", "BASE_DIGEST": "org.opencontainers.image.base.digest"}
PLAIN = "docker.io/library/python:3.12-slim-bookworm"  # the base of an image with everything
CONTEXT = ("Dockerfile", "VERSIONS.lock", "builder", "overlay", "patches", "tests/patches")


@dataclass(frozen=True)
class Base:
    """The image that the layer goes on: its name as given, and its digest, or "" if the name says none."""

    name: str
    digest: str

    @property
    def reference(self) -> str:
        """What to pull: by digest alone where there is one, as builders refuse a tag beside it."""
        if not self.digest:
            return self.name
        folder, slash, last = self.name.partition("@")[0].rpartition("/")
        return f"{folder}{slash}{last.partition(':')[0]}@{self.digest}"


@dataclass(frozen=True)
class Image:
    """A built image: its name here, its digest, the manifest's digest of the vLLM in it, and the base's digest."""

    name: str
    digest: str
    manifest: str
    base: str

    @property
    def reference(self) -> str:
        """The image by its digest."""
        return f"{self.name.rpartition(':')[0]}@{self.digest}"


def check_base(name: str) -> None:
    """Raise UsageProblem unless a text can be the name of an image: labels have it, so an id will not do."""
    if not re.fullmatch(r"[a-zA-Z0-9][\w.:/-]*(?:@sha256:[0-9a-f]{64})?", name) or re.search(
        "//|^[0-9a-f]{12,}$", name
    ):
        raise UsageProblem(
            "--base",
            expected="the name of an image, such as docker.io/vllm/vllm-openai:v0.27.1",
            found=repr(name),
            do="give one, or leave --base out for upstream's",
        )


def prepare(
    project: Project,
    release: Release,
    flavor: str,
    arch: str,
    folder: Path,
    cache: Path,
    more: Mapping[str, Path],
    *,
    offline: bool,
) -> str:
    """Make the folder that the image is built in, anew, with `more` files and folders by their names in it.

    Returns the sha256 of all that it holds.
    """
    pins = read_closure(project, release, flavor)
    tool = fetch(release.tool_artefact(arch), release.packages["py-spy"], cache, offline=offline)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in CONTEXT:
        source = project.root / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, folder / name)
    (folder / "pins.txt").write_text("".join(f"{pin}\n" for pin in pins), "utf-8")
    for name, source in more.items():
        if source.is_dir():
            shutil.copytree(source, folder / name, copy_function=link)
        else:
            link(source, folder / name)
    with zipfile.ZipFile(tool) as wheel:
        script = next(name for name in wheel.namelist() if name.endswith(".data/scripts/py-spy"))
        (folder / "py-spy").write_bytes(wheel.read(script))
    # the checkout's umask must not show in the image
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return _digest_of(folder)


def _digest_of(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        total.update(f"{name}\0{sha256_of(path)}\n".encode())
    return total.hexdigest()


def build(
    release: Release, flavor: str, arch: str, base: Base, builder: str, folder: Path, inputs: str, *, full: bool
) -> Image:
    """Build the image in the folder that `prepare` made; raises ImageProblem with the builder's last words.

    Until it is whole it has no name, so the name stays what it was, and builds at the same time do not mix.
    """
    spec = describe(release, release.wheel_artefact(flavor, arch))
    name = f"localhost/vllm-ndt:{spec.version.replace('+', '-')}{'-full' if full else ''}"
    store.pull_if_missing(builder, base.reference)
    base_digest = store.digest_of(builder, base.reference)
    arguments = {
        "BASE_IMAGE": base.reference,
        "INPUTS": inputs,
        "KIND": "full" if full else "layer",
        "SOURCE_DATE_EPOCH": str(release.source_date_epoch),
        "RELEASE": release.version,
        "FLAVOR": flavor,
        "ARCH": arch,
        "ORIGIN": base_digest,
        "VERSION": spec.version,
        "PATCHES": " ".join(row.name for row in release.patch),
        "SOURCE": f"sha256:{inputs}",
        "BASE_NAME": base.name.partition("@")[0],
    }
    make = _with_docker if builder == "docker" else _without_docker
    with scratch(folder, lambda part: _forget(builder, part)) as place:
        image, digest, manifest = make(builder, folder, arguments, release.source_date_epoch, base_digest, name, place)
    labelled = store.configuration(builder, image).labels.get(LABELS["MANIFEST"])
    if labelled != manifest:
        raise ImageProblem(name, expected=f"manifest {manifest} in its label", found=f"{labelled}", do="build it again")
    if builder != "docker":
        run([builder, "tag", image, name])
    return Image(name, digest, manifest, base_digest)


def _with_docker(
    builder: str, folder: Path, arguments: dict[str, str], epoch: int, base_digest: str, name: str, place: Path
) -> tuple[str, str, str]:
    """The image's name, its digest and the manifest's. docker keeps what it made in its cache, so it is asked twice:
    for the manifest's digest, then for all."""
    run(command(builder, folder, arguments, epoch, ["--target", "digest", "--output", f"type=local,dest={place}"]))
    manifest = (place / DIGEST.name).read_text("utf-8").strip()
    labels = {"MANIFEST": manifest, "BASE_DIGEST": base_digest}
    run(command(builder, folder, arguments | labels, epoch, ["--tag", name]))
    return name, store.digest_of(builder, name), manifest


def _without_docker(
    builder: str, folder: Path, arguments: dict[str, str], epoch: int, base_digest: str, name: str, place: Path
) -> tuple[str, str, str]:
    """The image's id, its digest and the manifest's. Its containers are called by the base's name, so the base gets one
    of this build's own: what the builder leaves behind can be told by it."""
    own = _own_name(place)
    run([builder, "tag", arguments["BASE_IMAGE"], own])
    (place / "tmp").mkdir()
    environment = {"TMPDIR": str(place / "tmp")}
    words = command(builder, folder, arguments | {"BASE_IMAGE": own}, epoch, ["--iidfile", str(place / "id")])
    run(words, log=place / "log", environment=environment)
    return _finish(builder, _id(place), base_digest, place / "image", environment)


def _own_name(place: Path) -> str:
    """The base's name in a build with a scratch folder, by the folder's token."""
    return f"localhost/vllm-ndt-build-{place.name.split('.')[-2]}:base"


def _forget(builder: str, place: Path) -> None:
    """Remove what a build with a scratch folder has in the builder's store: containers, unnamed images, its name."""
    if builder == "docker":
        return
    log = (place / "log").read_text("utf-8", "replace") if (place / "log").exists() else ""
    images = re.findall(r"FROM ([0-9a-f]{64})$", log, re.MULTILINE)  # of the first stage
    prefixes = (_own_name(place).rpartition("/")[2].partition(":")[0], *(image[:12] for image in images))
    listing = ["buildah", "containers", "--all"] if builder == "buildah" else ["podman", "ps", "--all", "--external"]
    form = "{{.ContainerName}}" if builder == "buildah" else "{{.Names}}"
    for container in attempt([*listing, "--format", form]).split():
        if any(container.startswith(f"{prefix}-working-container") for prefix in prefixes):
            attempt([*store.REMOVE[builder], container])
    if (place / "id").exists():
        images.append(_id(place))
    for image in (*images, _own_name(place)):
        attempt([builder, "rmi", image])


def _id(place: Path) -> str:
    return (place / "id").read_text("utf-8").strip().removeprefix("sha256:")


def command(builder: str, folder: Path, arguments: dict[str, str], epoch: int, more: Sequence[str]) -> list[str]:
    """The builder's command line, with every time in the image set to `epoch` (Unix).

    Without network, but for an image with everything: a base without a compiler gets one from Debian.
    """
    words = list(_COMMANDS[builder])
    if builder == "docker":
        words += ["--provenance=false"]
        words += [] if "--output" in more else ["--output", "type=docker,rewrite-timestamp=true"]
    else:
        words += ["--timestamp", str(epoch)]
    words += ["--network", "host" if arguments.get("KIND") == "full" else "none", "--file", str(folder / "Dockerfile")]
    words += [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
    return [*words, *more, str(folder)]


def _finish(
    builder: str, image: str, base_digest: str, folder: Path, environment: Mapping[str, str]
) -> tuple[str, str, str]:
    """Complete the image that buildah or podman built, by way of an empty folder, as a new one.

    What is only known now becomes labels; what differs from build to build goes: the names of the container it was made
    in, and of the image before it. Returns the new one's id and digest, and the manifest's that the image's layer has.
    """
    plain = ["--disable-compression"] if builder == "buildah" else []  # podman's way; two ways would be two digests
    run([builder, "push", *plain, image, f"dir:{folder}"], environment=environment)
    path = folder / "manifest.json"
    document = json.loads(path.read_text("utf-8"))
    manifest = _read_digest([folder / layer["digest"].removeprefix("sha256:") for layer in document["layers"]])
    old = folder / document["config"]["digest"].removeprefix("sha256:")
    config = json.loads(old.read_text("utf-8"))
    for key in ("container", "parent"):
        config.pop(key, None)
    for section in ("config", "container_config"):
        config.get(section, {}).pop("Hostname", None)
    for step in config["history"]:
        step.pop("comment", None)
    config["config"]["Labels"] |= {LABELS["MANIFEST"]: manifest, LABELS["BASE_DIGEST"]: base_digest}
    config.get("container_config", {}).pop("Labels", None)
    data = json.dumps(config, separators=(",", ":"), sort_keys=True).encode()
    found = hashlib.sha256(data).hexdigest()
    old.unlink()
    (folder / found).write_bytes(data)
    document["config"] |= {"digest": f"sha256:{found}", "size": len(data)}
    path.write_text(json.dumps(document, separators=(",", ":"), sort_keys=True), "utf-8")
    run([builder, "pull", f"dir:{folder}"], environment=environment)
    return found, f"sha256:{sha256_of(path)}", manifest


def _read_digest(layers: Sequence[Path]) -> str:
    for layer in reversed(layers):
        with tarfile.open(layer) as archive:
            for member in archive:
                if member.name.lstrip("./") == str(DIGEST):
                    file = archive.extractfile(member)
                    return file.read().decode().strip() if file else ""
    raise ImageProblem(
        "the image", expected=f"/{DIGEST} in it", found="none", do="report this defect of the Dockerfile"
    )
