# SPDX-License-Identifier: Apache-2.0
"""tests/patches runs inside the stock and the patched environment (see test_both_trees.py), never in this process."""

import os
from pathlib import Path

import pytest

collect_ignore = [] if os.environ.get("TREE") else ["patches", "gpu"]


def given(name: str) -> str:
    """A variable that `build.py test` sets."""
    value = os.environ.get(name, "")
    assert value, "run the tests through build.py test"
    return value


@pytest.fixture(scope="session")
def uv() -> str:
    """The pinned uv."""
    return given("UV")


@pytest.fixture(scope="session")
def cache() -> Path:
    """The cache of the build that runs the tests: real artefacts and tools."""
    return Path(given("BUILD_CACHE"))
