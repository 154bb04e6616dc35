# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests with a real image: a base with stock vLLM, made here of Debian, and the project's image on it.

The dependency closure is mounted when a container runs, where the base looks for it: 5 GB are not copied. Images lie in
a store of the tests' own.
"""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from builder import lockfile
from builder.atomic import locked
from builder.hashing import sha256_of
from tests.engine.conftest import deepstack_model, stock, text_model  # noqa: F401  (fixtures)

ROOT = Path(__file__).resolve().parents[2]
EPOCH = "1786406400"
TOOLS = ("buildah", "podman", "runc", "mmdebstrap", "catatonit")
# upstream's image has a compiler and headers too
PACKAGES = "python3,python3-dev,python3-pip,ca-certificates,libnuma1,g++"
BASE, PLAIN = "localhost/stock:0.27.1", "localhost/plain:1"
# without systemd, and without the right to raise limits
CONTAINERS = """\
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""
PLAIN_FILE = """\
FROM scratch
ADD debian.tar /
ARG SOURCE_DATE_EPOCH
RUN rm -f /etc/apt/sources.list
"""
CONTAINERFILE = f"""\
FROM {PLAIN}
ARG SOURCE_DATE_EPOCH
RUN --mount=type=bind,target=/src \\
    python3 -m pip install --no-index --no-deps --no-cache-dir --break-system-packages --root-user-action=ignore /src/*.whl && \\
    echo /closure > /usr/local/lib/python3.11/dist-packages/closure.pth
ENTRYPOINT ["vllm", "serve"]
"""


@dataclass(frozen=True)
class Store:
    """Where images and containers of the tests lie, and how its tools are called."""

    folder: Path
    cache: Path
    closure: Path

    @property
    def environment(self) -> dict[str, str]:
        more = {"CONTAINERS_CONF": "containers.conf", "CONTAINERS_STORAGE_CONF": "storage.conf"}
        return os.environ | {key: str(self.folder / name) for key, name in more.items()}

    def run(self, *words: str, check: bool = True, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run a command with this store."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=False, cwd=ROOT, **more
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
        return done

    def inside(self, image: str, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in a container of an image, in place of its entrypoint and without network."""
        words = ["podman", "run", "--rm", "--network=none", f"--entrypoint={command[0]}", image, *command[1:]]
        return self.run(*words, check=check)

    def command(self, out: Path, *words: str) -> list[str]:
        """build.py for the CPU flavor."""
        command = [sys.executable, "build.py", "--flavor", "cpu", "--image", "yes", "--out", str(out), "--json"]
        return [*command, "--cache", str(self.cache), *words]

    def build(
        self, out: Path, *words: str, check: bool = True, name: str | None = None, locking: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run build.py; `name`: a further name for the image, which no other build takes away."""
        with locked(self.folder / ".build.lock") if locking else contextlib.nullcontext():
            done = self.run(*self.command(out, *words), check=check)
            if name:
                self.run("podman", "tag", json.loads(done.stdout)["image"]["name"], name)
        return done

    @contextlib.contextmanager
    def building(self, out: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
        """A run of build.py, in a group of its own, whose image's first layer is just being made."""
        command = self.command(out, *words)
        with (
            locked(self.folder / ".build.lock"),
            subprocess.Popen(
                command, env=self.environment, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL
            ) as run,
        ):
            try:
                end = time.monotonic() + 120
                while not any("RUN" in log.read_text() for log in out.glob(".image.*.part/log")):
                    assert run.poll() is None
                    assert time.monotonic() < end
                    time.sleep(0.1)
                time.sleep(1)
                yield run
            finally:
                run.kill()

    def left(self) -> tuple[set[str], ...]:
        """What builders may leave behind: containers, images and their names, mounts, temporary folders."""
        containers = self.run("buildah", "containers", "--all", "--quiet").stdout
        images = self.run("buildah", "images", "--all", "--no-trunc", "--format", "{{.Name}}:{{.Tag}}").stdout
        mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if f" {self.folder}/" in line]
        # a finished image takes the name of the one before, which then has none
        names = {line for line in images.split() if "none" not in line}
        return set(containers.split()), names, set(mounts), set(os.listdir("/var/tmp"))  # noqa: S108

    def base(self, name: str, folder: Path, text: str) -> str:
        """Build an image of a Containerfile's text in a folder; returns its name."""
        (folder / "Containerfile").write_text(text)
        arguments = ["--timestamp", EPOCH, "--build-arg", f"SOURCE_DATE_EPOCH={EPOCH}", "--network", "none"]
        self.run("buildah", "bud", *arguments, "--tag", name, str(folder))
        return name


@pytest.fixture(scope="session")
def store(cache: Path, stock: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:  # noqa: F811
    """The store, with the base in it."""
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        assert not os.environ.get("CI"), f"CI must have {missing}"
        pytest.skip(f"not installed: {', '.join(missing)}")
    if os.geteuid():
        pytest.skip("containers are made as root here")
    folder = cache / "images"
    closure = next(path for path in stock.parents[1].glob("lib/python*/site-packages/closure.pth")).read_text().strip()
    folder.mkdir(exist_ok=True)
    (folder / "containers.conf").write_text(CONTAINERS)
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/store"\nrunroot = "{folder}/run"\n'
    )
    made = Store(folder, cache, Path(closure))
    with locked(folder / ".lock"):
        _make_base(made, tmp_path_factory.mktemp("base"))
    return made


def _make_base(store: Store, folder: Path) -> None:
    """PLAIN, Debian with Python, and BASE, the same with the stock control, if they are not there yet."""
    wheel = next((store.cache / "test-wheels").glob("vllm-*+cpu-*.whl"))
    mark = store.folder / "base.json"
    wanted = {"wheel": sha256_of(wheel), "packages": PACKAGES, "containerfile": PLAIN_FILE + CONTAINERFILE}
    there = store.run("buildah", "images", "--quiet", BASE, check=False).returncode == 0
    if there and mark.is_file() and json.loads(mark.read_text()) == wanted:
        return
    debian = store.folder / f"debian-{hashlib.sha256(PACKAGES.encode()).hexdigest()[:8]}.tar"
    if not debian.is_file():
        part = debian.with_suffix(".part.tar")
        command = [
            "mmdebstrap",
            "--quiet",
            "--variant=minbase",
            f"--include={PACKAGES}",
            "bookworm",
            str(part),
            _mirror(),
        ]
        subprocess.run(command, check=True, env=os.environ | {"SOURCE_DATE_EPOCH": EPOCH})
        part.replace(debian)
    shutil.copyfile(debian, folder / "debian.tar")
    store.base(PLAIN, folder, PLAIN_FILE)
    (folder / "debian.tar").unlink()
    shutil.copy(wheel, folder)
    store.base(BASE, folder, CONTAINERFILE)
    mark.write_text(json.dumps(wanted))


def _mirror() -> str:
    """Where this machine has its Debian packages from."""
    text = "".join(path.read_text() for path in (Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")) if path.is_file())  # fmt: skip
    words = text.split()
    return next(word for word in words if word.startswith("http") and word.rstrip("/").endswith("/debian"))


@pytest.fixture(scope="session")
def release() -> lockfile.Release:
    return lockfile.read(ROOT / "VERSIONS.lock")["0.27.1"]


@pytest.fixture(scope="session")
def built(store: Store, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The project's image on the base, as build.py says it; `out` is where it wrote."""
    out, name = tmp_path_factory.mktemp("out"), f"localhost/built-{os.getpid()}:1"
    done = store.build(out, "--base", BASE, name=name)
    return json.loads(done.stdout)["image"] | {"out": out, "name": name}
