# SPDX-License-Identifier: Apache-2.0
"""The image with everything: the project's Dockerfile on a plain Python, with a closure of two packages for 6 GB."""

import json
import platform
import re
from pathlib import Path
from typing import Any

import pytest

from builder import image, wheelhouse
from builder import store as images
from builder.errors import ImageProblem, InputProblem
from builder.full import CLOSURE, WHEELS, missing
from builder.hashing import sha256_of
from builder.image import Base
from builder.inputs import Project
from builder.lockfile import Release
from tests.image.conftest import BASE, PLAIN, ROOT, Store

SOME = ("idna", "msgspec")  # of the CPU flavor's closure: one for any Python, one for this one


@pytest.fixture(scope="module")
def lock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A part of the closure."""
    text = (ROOT / "locks" / "0.27.1-cpu.txt").read_text()
    rows = [re.search(rf"^{name}==.*?(?=^\S)", text, re.MULTILINE | re.DOTALL) for name in SOME]
    path = tmp_path_factory.mktemp("lock") / "some.txt"
    path.write_text("".join(row[0] for row in rows if row))
    return path


@pytest.fixture(scope="module")
def wheels(store: Store, lock: Path) -> Path:
    return wheelhouse.gather(lock, "3.11.2", platform.machine(), store.cache, offline=False)


def build(store: Store, release: Release, folder: Path, base: str, more: dict[str, Path]) -> image.Image:
    inputs = image.prepare(Project(ROOT), release, "cpu", platform.machine(), folder, store.cache, more, offline=False)
    with pytest.MonkeyPatch.context() as patch:
        for key, value in store.environment.items():
            patch.setenv(key, value)
        return image.build(release, "cpu", platform.machine(), Base(base, ""), "buildah", folder, inputs, full=True)


@pytest.fixture(scope="module")
def made(
    store: Store, release: Release, lock: Path, wheels: Path, tmp_path_factory: pytest.TempPathFactory
) -> image.Image:
    wheel = next((store.cache / "test-wheels").glob("vllm-*+ndt*cpu-*.whl"))
    more = {wheel.name: wheel, CLOSURE: lock, WHEELS: wheels}
    return build(store, release, tmp_path_factory.mktemp("full") / "image", PLAIN, more)


def test_wheels_are_fetched_by_their_hashes_and_kept(lock: Path, wheels: Path, store: Store) -> None:
    found = {path.name.split("-")[0]: path for path in wheels.iterdir()}
    assert found.keys() == set(SOME)
    assert all(sha256_of(path) in lock.read_text() for path in found.values())
    assert "cp311" in found["msgspec"].name
    assert wheelhouse.gather(lock, "3.11.2", platform.machine(), store.cache, offline=True) == wheels


def test_markers_are_judged_for_the_images_python() -> None:
    text = "a==1 ; python_full_version >= '3.12' \\\n    --hash=sha256:00\nb==2 \\\n    --hash=sha256:11\n"
    new, old = (wheelhouse.requirements_for(text, python, "x86_64") for python in ("3.12.1", "3.11.9"))
    assert new == "a==1 \\\n    --hash=sha256:00\nb==2 \\\n    --hash=sha256:11\n"
    assert old == "b==2 \\\n    --hash=sha256:11\n"
    whole = (ROOT / "locks" / "0.27.1-cuda.txt").read_text()
    rows = {
        python: re.findall("^([^ =]+)==", wheelhouse.requirements_for(whole, python, "x86_64"), re.MULTILINE)
        for python in ("3.11.2", "3.12.0")
    }
    assert all(len(names) == len(set(names)) > 100 for names in rows.values())
    assert "six" in rows["3.12.0"]


def test_wheels_that_cannot_be_had_are_said(lock: Path, tmp_path: Path) -> None:
    with pytest.raises(InputProblem, match=r"some\.txt: expected its wheels in .*, found none; run once without --off"):
        wheelhouse.gather(lock, "3.12.0", platform.machine(), tmp_path, offline=True)
    other = tmp_path / "other.txt"
    other.write_text(re.sub("sha256:[0-9a-f]{60}", "sha256:" + "0" * 60, lock.read_text()))
    with pytest.raises(
        InputProblem, match=r"other\.txt: expected pip to download its wheels for Python 3\.11\.2, found"
    ):
        wheelhouse.gather(other, "3.11.2", platform.machine(), tmp_path, offline=False)
    assert not list((tmp_path / "wheelhouses").glob("*/*"))


def test_the_python_of_an_image_is_asked(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in store.environment.items():
        monkeypatch.setenv(key, value)
    assert [images.python_of(builder, PLAIN) for builder in ("buildah", "podman")] == ["3.11.2", "3.11.2"]


def test_it_holds_the_wheel_and_the_closure(store: Store, made: image.Image, release: Release) -> None:
    assert made.name == f"localhost/vllm-ndt:0.27.1-{release.label}.cpu-full"
    listed = store.inside(made.name, "python3", "-m", "pip", "list", "--format=json").stdout
    found: dict[str, Any] = {row["name"]: row["version"] for row in json.loads(listed)}
    assert found["vllm"] == f"0.27.1+{release.label}.cpu"
    assert found.keys() >= set(SOME)
    said = json.loads(store.inside(made.name, "vllm-ndt", "verify", "--json").stdout)
    assert (said["verdict"], said["manifest"]) == ("patched", made.manifest)
    done = store.inside(made.name, "cat", "/usr/share/vllm-ndt/manifest.digest", "/etc/vllm/do_not_track")
    assert done.stdout.strip() == made.manifest


def test_a_base_with_vllm_is_refused(store: Store, release: Release, lock: Path, wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ImageProblem, match="the base: expected a Python without vllm, found vllm; build without --full"
    ):
        build(store, release, tmp_path / "image", BASE, {CLOSURE: lock, WHEELS: wheels})


def test_only_what_lacks_is_installed(tmp_path: Path) -> None:
    header = tmp_path / "Python.h"
    assert missing(None, header) == ["g++", "python3-dev"]
    header.touch()
    assert missing("/usr/bin/g++", header) == []
