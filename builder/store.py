# SPDX-License-Identifier: Apache-2.0
"""Images in a builder's store: what they are, their files, and where they are pushed to."""

import contextlib
import json
import re
import secrets
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.builders import attempt, problem_with, run
from builder.errors import ImageProblem, UsageProblem

_CREATE = {
    "docker": ["docker", "create"],
    "buildah": ["buildah", "from", "--pull-never"],
    "podman": ["podman", "create", "--pull", "never"],
}
REMOVE = {"docker": ["docker", "rm", "--force"], "buildah": ["buildah", "rm"], "podman": ["podman", "rm", "--force"]}
# what of an image's files says which Python code runs
_EXPORTED = re.compile(
    r"(?:s?bin|lib|(?:.*/)?python3[^/]*/(?:[^/]*-packages/)?(?:vllm(?:_ndt|-[^/]*)?(?:/.*)?|[^/]*\.pth|(?:site|user)"
    r"customize\.py)|(?:.*/)?bin/vllm-ndt|usr/share/vllm-ndt/.*)"
)


@dataclass(frozen=True)
class Configuration:
    """What an image says about how it is started."""

    labels: dict[str, str]
    entrypoint: list[str]
    environment: dict[str, str]


def inspect(builder: str, name: str) -> Any:
    """All that the builder says of an image that lies here; raises ImageProblem if it does not."""
    if builder == "buildah":
        return json.loads(run(["buildah", "inspect", "--type", "image", name]))
    return json.loads(run([builder, "image", "inspect", name]))[0]


def digest_of(builder: str, name: str) -> str:
    """The digest of an image that lies here."""
    found = inspect(builder, name)
    if builder == "docker":
        return str(next(iter(found.get("RepoDigests") or []), f"@{found['Id']}").partition("@")[2])
    return str(found.get("FromImageDigest") or found.get("Digest"))


def configuration(builder: str, name: str) -> Configuration:
    """How an image that lies here is started; raises ImageProblem if it does not."""
    found = inspect(builder, name)
    config = found["Docker"]["config"] if builder == "buildah" else found["Config"]
    environment = dict(entry.partition("=")[::2] for entry in config.get("Env") or [])
    return Configuration(dict(config.get("Labels") or {}), list(config.get("Entrypoint") or []), environment)


def pull_if_missing(builder: str, name: str) -> None:
    """Have an image here."""
    if problem_with([builder, "inspect", "--type", "image", name]):
        run([builder, "pull", name])


def python_of(builder: str, base: str) -> str:
    """The version, such as 3.12.7, of the command python3 of an image, which is pulled if it is not here."""
    code = "import platform; print(platform.python_version())"
    pull_if_missing(builder, base)
    with _container(builder, base, "--entrypoint=python3", after=["-c", code]) as container:
        if builder == "buildah":
            return run(["buildah", "run", "--network", "none", container, "--", "python3", "-c", code]).split()[-1]
        return run([builder, "start", "--attach", container]).split()[-1]


@contextlib.contextmanager
def _container(builder: str, image: str, *options: str, after: list[str] | None = None) -> Iterator[str]:
    """A container of an image, by a name of its own, until the block ends."""
    name = f"vllm-ndt-{secrets.token_hex(4)}"
    more = [] if builder == "buildah" else ["--network", "none", *options]
    try:
        run([*_CREATE[builder], "--name", name, *more, image, *([] if builder == "buildah" else after or [])])
        yield name
    finally:
        attempt([*REMOVE[builder], name])


@contextlib.contextmanager
def files(builder: str, name: str) -> Iterator[Path]:
    """The folder with an image's files, to be read until the block ends; nothing of it is run."""
    with _container(builder, name) as container, contextlib.ExitStack() as stack:
        if builder == "docker":
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
            _export(container, Path(scratch))
            yield Path(scratch)
        else:
            folder = run([builder, "mount", container]).split()[-1]
            stack.callback(attempt, [builder, "umount", container])
            yield Path(folder)


def _export(container: str, folder: Path) -> None:
    """Write what docker has of a container's files that say which Python code runs to a folder."""
    with (
        subprocess.Popen(["docker", "export", container], stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as archive,
    ):
        for member in archive:
            if _EXPORTED.fullmatch(member.name):
                with contextlib.suppress(tarfile.FilterError):  # a link to elsewhere
                    archive.extract(member, folder, filter="data")
    if process.returncode:
        raise ImageProblem(
            "docker export", expected="the container's files", found=f"status {process.returncode}", do="run it"
        )


def check_target(target: str) -> None:
    """Raise UsageProblem unless a name is REGISTRY/NAME without a tag: tools put others on Docker Hub."""
    registry, _, name = target.partition("/")
    if not (re.search(r"[.:]", registry) or registry == "localhost") or not re.fullmatch(r"[\w.-]+(?:/[\w.-]+)*", name):
        raise UsageProblem(
            "push",
            expected="REGISTRY/NAME without a tag, such as registry.example.com/team/vllm-ndt",
            found=repr(target),
            do="name the registry's host, docker.io for Docker Hub",
        )


def push(builder: str, name: str, target: str, *, insecure: bool) -> str:
    """Push an image to REGISTRY/NAME, with its own tag; returns the digest that it has there."""
    tagged = f"{target}:{name.rpartition(':')[2]}"
    if builder == "docker":
        run(["docker", "tag", name, tagged])
        said = re.findall(r"digest: (sha256:[0-9a-f]{64})", run(["docker", "push", tagged]))
        if not said:
            raise ImageProblem("docker push", expected="a digest", found="none", do="see `docker push`")
        return str(said[-1])
    with tempfile.TemporaryDirectory() as scratch:
        digest = Path(scratch, "digest")
        tls = [f"--tls-verify={str(not insecure).lower()}"]
        run([builder, "push", *tls, "--digestfile", str(digest), name, f"docker://{tagged}"])
        return digest.read_text("utf-8").strip()
