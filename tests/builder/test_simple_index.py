# SPDX-License-Identifier: Apache-2.0
"""`build.py index` makes a folder that any static server can serve, and pip and uv install from it."""

import functools
import http.server
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from builder.hashing import sha256_of
from tests.builder.toy import BUILT, Toy


@pytest.fixture
def folder(built: Toy, tmp_path: Path) -> Path:
    done = built.run("index", str(tmp_path / "simple"))
    assert done.returncode == 0, done.stderr
    assert BUILT in done.stdout
    return tmp_path / "simple"


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_the_page_names_hash_and_metadata(folder: Path, built: Toy) -> None:
    page = (folder / "vllm" / "index.html").read_text()
    assert f'href="{BUILT.replace("+", "%2B")}#sha256={sha256_of(built.dist / BUILT)}"' in page
    metadata = folder / "vllm" / f"{BUILT}.metadata"
    assert f'data-core-metadata="sha256={sha256_of(metadata)}"' in page
    assert "Version: 0.27.1+ndt.1" in metadata.read_text()
    assert 'href="vllm/"' in (folder / "index.html").read_text()


def test_again_changes_nothing_and_keeps_what_is_there(folder: Path, built: Toy) -> None:
    other = folder / "vllm" / BUILT.replace("ndt.1", "ndt.0")
    other.write_bytes((folder / "vllm" / BUILT).read_bytes())
    other.with_name(f"{other.name}.metadata").write_text("")
    assert built.run("index", str(folder)).returncode == 0
    page = (folder / "vllm" / "index.html").read_text()
    assert len(re.findall("<a ", page)) == 2
    assert built.run("index", str(folder)).returncode == 0
    assert (folder / "vllm" / "index.html").read_text() == page


def test_what_would_harm_an_index_is_refused(folder: Path, built: Toy, tmp_path: Path) -> None:
    """Other bytes under a published name, and a damaged wheel; nothing changes then."""
    before = {path: path.read_bytes() for path in (folder / "vllm").iterdir()}
    data = (built.dist / BUILT).read_bytes()
    wheel = tmp_path / BUILT
    for bad, words in (
        (data[:-30], "expected a wheel of a build"),
        (data + b" ", "expected the same wheel, as it was"),
    ):
        wheel.write_bytes(bad)
        done = built.run("index", str(folder), "--out", str(tmp_path))
        assert done.returncode == 3
        assert words in done.stderr
        assert {path: path.read_bytes() for path in (folder / "vllm").iterdir()} == before


def test_a_wheel_for_the_cpu_is_left_out(built: Toy, tmp_path: Path) -> None:
    """Installers take +ndt.1.cpu for newer than +ndt.1."""
    for name in (BUILT, BUILT.replace("+ndt.1-", "+ndt.1.cpu-")):
        (tmp_path / name).write_bytes((built.dist / BUILT).read_bytes())
    assert built.run("index", str(tmp_path / "i"), "--out", str(tmp_path)).returncode == 0
    assert "cpu" not in (tmp_path / "i" / "vllm" / "index.html").read_text()


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_pip_and_uv_take_the_wheel_from_it(address: str, built: Toy, uv: str, tmp_path: Path, tool: str) -> None:
    target = tmp_path / "site"
    words = ["install", "--no-deps", "--target", str(target), "--index-url", address, "vllm==0.27.1+ndt.1"]
    command = [sys.executable, "-m", "pip", *words] if tool == "pip" else [uv, "pip", *words, "--no-cache"]
    environment = {key: value for key, value in built.environment().items() if not key.startswith("PIP_")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (target / "vllm-0.27.1+ndt.1.dist-info").is_dir()


def test_a_folder_without_wheels_is_one_line(toy: Toy, tmp_path: Path) -> None:
    done = toy.run("index", str(tmp_path / "simple"), "--out", str(tmp_path))
    assert done.returncode == 3
    assert "expected wheels of a build for CUDA, found none" in done.stderr
    (tmp_path / "vllm-0.27.1+ndt.1.cpu-cp38-abi3-manylinux_2_28_x86_64.whl").touch()
    done = toy.run("index", str(tmp_path / "simple"), "--out", str(tmp_path))
    assert "found those for the CPU alone, which are not indexed" in done.stderr
    assert not (tmp_path / "simple").exists()
