# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the builder's tests."""

import os
import sys
from pathlib import Path

import pytest

from builder import bootstrap
from tests.builder.toy import ROOT, Toy, make_toy


@pytest.fixture(scope="session")
def tools(cache: Path) -> Path:
    """The folder of build.py's own environments, with the one for this Python in it."""
    return bootstrap.ensure(ROOT / "locks" / "tools.txt", cache, offline=False).parent


@pytest.fixture
def toy(tmp_path: Path, tools: Path) -> Toy:
    """A toy project of one's own."""
    return make_toy(tmp_path, tools)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, tools: Path) -> Toy:
    """A toy project whose wheel is built: to read only."""
    toy = make_toy(tmp_path_factory.mktemp("built"), tools)
    done = toy.run("--vllm", "0.27.1", "--image", "no")
    assert done.returncode == 0, done.stderr
    return toy


def other_pythons() -> list[str]:
    """Other supported Pythons of this machine."""
    found = {}
    for folder in [*os.environ.get("PATH", "").split(os.pathsep), *map(str, Path.home().glob(".pyenv/versions/*/bin"))]:
        for minor in range(10, 15):
            path = Path(folder, f"python3.{minor}")
            if path.is_file() and minor != sys.version_info.minor and ".pyenv/shims" not in folder:
                found.setdefault(minor, str(path))
    return [found[minor] for minor in sorted(found)]
