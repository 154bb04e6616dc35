# SPDX-License-Identifier: Apache-2.0
"""Builds the container image from the Dockerfile with docker, buildah or podman, whichever can."""

import contextlib
import hashlib
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.atomic import link
from builder.bootstrap import last_line
from builder.errors import ImageProblem
from builder.fetch import fetch
from builder.hashing import sha256_of
from builder.inputs import Project
from builder.layer import DIGEST
from builder.lockfile import Release
from builder.pipeline import describe, read_closure

BUILDERS = ("docker", "buildah", "podman")
# what must succeed before a builder is taken: a command of that name alone says little
_PROBES = {
    "docker": (["docker", "buildx", "version"], ["docker", "info"]),
    "buildah": (["buildah", "info"],),
    "podman": (["podman", "info"],),
}
_COMMANDS = {
    "docker": ("docker", "buildx", "build"),
    # no intermediate images are left behind; OCI's configuration has no place for a health check
    "buildah": ("buildah", "bud", "--layers=false", "--format", "docker"),
    "podman": ("podman", "build", "--layers=false", "--format", "docker"),
}
LABELS = {"MANIFEST": "vllm-ndt.manifest", "BASE_DIGEST": "org.opencontainers.image.base.digest"}
_CREATE = {
    "docker": ["docker", "create"],
    "buildah": ["buildah", "from", "--pull-never"],
    "podman": ["podman", "create", "--pull", "never"],
}
PLAIN = "docker.io/library/python:3.12-slim-bookworm"  # the base of an image with everything
INSTALL = "install docker with buildx, buildah or podman, or use --image no"
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


def find_builder(wanted: str | None) -> str:
    """The first builder that can build here, or the one that is wanted; raises ImageProblem if there is none."""
    said = {}
    for name in (wanted,) if wanted else BUILDERS:
        said[name] = next((problem for probe in _PROBES[name] if (problem := _problem_with(probe))), "")
        if not said[name]:
            return name
    found = "; ".join(f"{name}: {problem}" for name, problem in said.items())
    raise ImageProblem("--image", expected="a builder of images", found=found, do=INSTALL)


def _problem_with(probe: Sequence[str]) -> str:
    if not shutil.which(probe[0]):
        return "not installed"
    try:
        done = subprocess.run(probe, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"`{' '.join(probe)}`: {error}"
    return f"`{' '.join(probe)}`: {last_line(done.stderr or done.stdout)}" if done.returncode else ""


def python_of(builder: str, base: str) -> str:
    """The version, such as 3.12.7, of the command python3 of an image, which is pulled if it is not here."""
    code = "import platform; print(platform.python_version())"
    if builder != "buildah":
        words = [builder, "run", "--rm", "--network", "none", "--entrypoint", "python3", base, "-c", code]
        return _run(words).split()[-1]
    container = _run(["buildah", "from", base]).split()[-1]
    try:
        return _run(["buildah", "run", "--network", "none", container, "--", "python3", "-c", code]).split()[-1]
    finally:
        _run(["buildah", "rm", container])


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

    docker keeps what it made in its cache, so it is asked twice: for the manifest's digest, then for all.
    """
    spec = describe(release, release.wheel_artefact(flavor, arch))
    name = f"localhost/vllm-ndt:{spec.version.replace('+', '-')}{'-full' if full else ''}"
    arguments = {
        "BASE_IMAGE": base.reference,
        "INPUTS": inputs,
        "KIND": "full" if full else "layer",
        "SOURCE_DATE_EPOCH": str(release.source_date_epoch),
        "RELEASE": release.version,
        "FLAVOR": flavor,
        "ARCH": arch,
        "ORIGIN": base.reference,
        "VERSION": spec.version,
        "PATCHES": " ".join(row.name for row in release.patch),
        "SOURCE": f"sha256:{inputs}",
        "BASE_NAME": base.name.partition("@")[0],
    }
    epoch = release.source_date_epoch
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        if builder == "docker":
            if not base.digest and _problem_with(["docker", "image", "inspect", base.reference]):
                _run(["docker", "pull", base.reference])  # what buildx pulls cannot be asked for its digest
            _run(command(builder, folder, arguments, epoch, ["--target", "digest", "--output", f"type=local,dest={scratch}"]))  # noqa: E501  # fmt: skip
            manifest = Path(scratch, DIGEST.name).read_text("utf-8").strip()
            base_digest = base.digest or _image_digest(builder, base.reference)
            labels = {"MANIFEST": manifest, "BASE_DIGEST": base_digest}
            _run(command(builder, folder, arguments | labels, epoch, ["--tag", name]))
        else:
            part = f"{name}.part"  # the name stays what it was until all is done
            _run(command(builder, folder, arguments, epoch, ["--tag", part]))
            base_digest = base.digest or _image_digest(builder, base.reference)
            manifest = _finish(builder, part, name, base_digest, Path(scratch, "image"))
    return Image(name, _image_digest(builder, name), manifest, base_digest)


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


def _run(words: Iterable[str]) -> str:
    words = list(words)
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines()]
        ours = [line for line in lines if "error: " in line and "expected" in line]  # of builder.layer
        found = ours[-1].partition("error: ")[2] if ours else last_line(done.stdout)
        what = " ".join(words[:2])
        raise ImageProblem(
            what, expected="it to succeed", found=found, do=f"correct what it says, or run `{what}` by hand"
        )
    return done.stdout


def _inspect(builder: str, name: str) -> Any:
    if builder == "buildah":
        return json.loads(_run(["buildah", "inspect", "--type", "image", name]))
    return json.loads(_run([builder, "image", "inspect", name]))[0]


def _image_digest(builder: str, name: str) -> str:
    """The digest of an image that lies here."""
    found = _inspect(builder, name)
    if builder == "docker":
        return str(next(iter(found.get("RepoDigests") or []), f"@{found['Id']}").partition("@")[2])
    return str(found.get("FromImageDigest") or found.get("Digest"))


def configuration(builder: str, name: str) -> tuple[dict[str, str], list[str]]:
    """The labels and the entrypoint of an image that lies here; raises ImageProblem if it does not."""
    found = _inspect(builder, name)
    config = found["Docker"]["config"] if builder == "buildah" else found["Config"]
    return dict(config.get("Labels") or {}), list(config.get("Entrypoint") or [])


@contextlib.contextmanager
def files(builder: str, name: str) -> Iterator[Path]:
    """The folder with an image's files, to be read until the block ends; nothing of it is run."""
    container = _run(_CREATE[builder] + [name]).split()[-1]
    with contextlib.ExitStack() as stack:
        stack.callback(_run, [builder, "rm", container])
        if builder == "docker":
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
            _export(container, Path(scratch))
            yield Path(scratch)
        else:
            folder = _run([builder, "mount", container]).split()[-1]
            stack.callback(_run, [builder, "umount", container])
            yield Path(folder)


def _export(container: str, folder: Path) -> None:
    """Write what docker has of a container's Python packages for vllm to a folder."""
    wanted = re.compile(r"(?:.*/)?python3[^/]*/[^/]*-packages/vllm(?:_ndt|-[^/]*)?(?:/.*)?")
    with (
        subprocess.Popen(["docker", "export", container], stdout=subprocess.PIPE) as run,
        tarfile.open(fileobj=run.stdout, mode="r|") as archive,
    ):
        for member in archive:
            if wanted.fullmatch(member.name):
                archive.extract(member, folder, filter="data")
    if run.returncode:
        raise ImageProblem(
            "docker export", expected="the container's files", found=f"status {run.returncode}", do="run it"
        )


def push(builder: str, image: Image, target: str, *, insecure: bool) -> str:
    """Push an image to REGISTRY/NAME, with its version as tag; returns the digest that it has there.

    Raises ImageProblem if the name is another image's by now.
    """
    if (found := _image_digest(builder, image.name)) != image.digest:
        raise ImageProblem(image.name, expected=f"{image.digest}, as it was built", found=found, do="build it again")
    tagged = f"{target}:{image.name.rpartition(':')[2]}"
    if builder == "docker":
        _run(["docker", "tag", image.name, tagged])
        said = re.findall(r"digest: (sha256:[0-9a-f]{64})", _run(["docker", "push", tagged]))
        if not said:
            raise ImageProblem("docker push", expected="a digest", found="none", do="see `docker push`")
        return str(said[-1])
    with tempfile.TemporaryDirectory() as scratch:
        digest = Path(scratch, "digest")
        tls = [f"--tls-verify={str(not insecure).lower()}"]
        _run([builder, "push", *tls, "--digestfile", str(digest), image.name, f"docker://{tagged}"])
        return digest.read_text("utf-8").strip()


def _finish(builder: str, part: str, name: str, base_digest: str, folder: Path) -> str:
    """Complete the image `part` that buildah or podman built, by way of an empty folder; it is `name` then.

    What is only known now becomes labels; what differs from build to build goes: the names of the container it was made
    in, and of the image before it. Returns the manifest's digest that the image's layer has.
    """
    _run([builder, "push", part, f"dir:{folder}"])
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
    _run([builder, "pull", f"dir:{folder}"])
    _run([builder, "tag", found, name])
    _run([builder, "rmi", part])
    return manifest


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
