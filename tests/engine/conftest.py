# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests with a real engine: the environments with the stock control and the patched wheel."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import given

PATCH_TESTS = Path(__file__).resolve().parents[1] / "patches"


@pytest.fixture(scope="session")
def stock() -> Path:
    """The Python of the environment with the stock control."""
    return Path(given("STOCK_PYTHON"))


@pytest.fixture(scope="session")
def patched() -> Path:
    """The Python of the environment with the patched wheel."""
    return Path(given("PATCHED_PYTHON"))


@pytest.fixture(scope="session")
def strace() -> str:
    """The tracer that shows what a process does with the network."""
    path = shutil.which("strace")
    if not path:
        assert not os.environ.get("CI"), "CI must have strace"
        pytest.skip("strace is not installed")
    return path


@pytest.fixture(scope="session")
def text_model(stock: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 without weights."""
    return _model("text", stock, tmp_path_factory)


@pytest.fixture(scope="session")
def vision_model(stock: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny hybrid with images of 2,048 and videos of 1,024 embeddings at most."""
    return _model("hybrid_vision", stock, tmp_path_factory)


@pytest.fixture(scope="session")
def deepstack_model(stock: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny dense Qwen3-VL, whose embeddings carry three more vectors."""
    return _model("dense_vision", stock, tmp_path_factory)


def _model(kind: str, python: Path, folders: pytest.TempPathFactory) -> Path:
    """A model of tiny_models, made in an environment that has upstream's tokenizers."""
    folder = folders.mktemp(kind)
    code = f"import pathlib, sys, tiny_models; tiny_models.write_{kind}_model(pathlib.Path(sys.argv[1]))"
    settings = environment(folder, PYTHONPATH=str(PATCH_TESTS))
    subprocess.run([str(python), "-c", code, str(folder)], check=True, env=settings)
    return folder


def environment(home: Path, **more: str) -> dict[str, str]:
    """A plain environment with an empty home: nothing of the caller's but PATH, and no downloads."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "LC_ALL": "C.UTF-8",
        # engines side by side must not be bound to one core
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # what upstream learns of its model classes in a process of its own at each first start; a new wheel starts anew
        "VLLM_CACHE_ROOT": str(Path(given("PATCHED_PYTHON")).parents[1] / "vllm"),
    } | more
