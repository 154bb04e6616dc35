# SPDX-License-Identifier: Apache-2.0
"""tests/patches runs inside the stock and the patched environment (see test_both_trees.py), never in this process."""

import os
from pathlib import Path

import pytest

collect_ignore = [] if os.environ.get("TREE") else ["patches", "gpu"]


@pytest.fixture(scope="session")
def uv() -> str:
    """The pinned uv."""
    path = os.environ.get("UV", "")
    assert path, "run the tests through build.py test"
    return path


@pytest.fixture(scope="session")
def cache() -> Path:
    """The cache of the build that runs the tests: real artefacts and tools."""
    path = os.environ.get("BUILD_CACHE", "")
    assert path, "run the tests through build.py test"
    return Path(path)
