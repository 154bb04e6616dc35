# SPDX-License-Identifier: Apache-2.0
"""The wheel installs with pip and uv: from a file, a folder, and over HTTP from a page of links and a simple index."""

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from builder.uv import run_uv
from tests.builder.toy import BUILT, WHEEL, Toy

PLAIN = {"PATH": os.environ["PATH"]}
PLUS = {"plain": BUILT, "escaped": quote(BUILT)}


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A static server, as any is, with ranges: uv reads a wheel's metadata by them."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module", params=PLUS)
def served(request: pytest.FixtureRequest, built: Toy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a folder with the stock and the patched wheel, links.html, and a simple index; `+` plain or as %2B."""
    folder = tmp_path_factory.mktemp("served")
    shutil.copy(built.dist / BUILT, folder)
    shutil.copy(built.index / WHEEL, folder)
    link = PLUS[request.param]
    (folder / "links.html").write_text(f'<a href="{link}">{BUILT}</a> <a href="{WHEEL}">{WHEEL}</a>\n')
    (folder / "simple" / "vllm").mkdir(parents=True)
    (folder / "simple" / "index.html").write_text('<a href="vllm/">vllm</a>\n')
    (folder / "simple" / "vllm" / "index.html").write_text(
        f'<a href="../../{link}">{BUILT}</a> <a href="../../{WHEEL}">{WHEEL}</a>\n'
    )
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def clean(tmp_path: Path) -> dict[str, str]:
    """The environment without the caller's settings of Python, pip and uv."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PIP_", "UV"))}
    return kept | {"PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1", "UV_CACHE_DIR": str(tmp_path / "uv-cache")}


@pytest.fixture
def environment(tmp_path: Path, uv: str) -> Path:
    """An empty environment with pip."""
    folder = tmp_path / "env"
    run_uv(Path(uv), ["venv", "--seed", "--python", sys.executable, str(folder)])
    return folder


def install(tool: str, environment: Path, uv: str, tmp_path: Path, *arguments: str) -> None:
    """Install with pip or uv into `environment`."""
    python = str(environment / "bin" / "python")
    command = [python, "-m", "pip", "install"] if tool == "pip" else [uv, "pip", "install", "--python", python]
    done = subprocess.run([*command, *arguments], env=clean(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def assert_patched(environment: Path, version: str = "0.27.1+ndt.1") -> None:
    """The environment has the patched wheel, whole."""
    code = "import importlib.metadata, vllm; print(importlib.metadata.version('vllm'), vllm.__version__)"
    done = subprocess.run(
        [environment / "bin" / "python", "-c", code], capture_output=True, text=True, check=True, cwd="/", env=PLAIN
    )
    assert done.stdout.split() == [version, version]
    verified = subprocess.run(
        [environment / "bin" / "vllm-ndt", "verify", "--deep"], capture_output=True, check=False, cwd="/", env=PLAIN
    )
    assert verified.returncode == 0
    tool = next(environment.glob("lib/python*/site-packages/vllm/tool.sh"))
    assert subprocess.run([tool], capture_output=True, check=True).stdout == b"tool\n"


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_from_a_file(tool: str, environment: Path, uv: str, built: Toy, tmp_path: Path) -> None:
    install(tool, environment, uv, tmp_path, "--no-index", str(built.dist / BUILT))
    assert_patched(environment)


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_from_a_folder_the_patched_wheel_wins(
    tool: str, environment: Path, uv: str, built: Toy, tmp_path: Path
) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    shutil.copy(built.dist / BUILT, folder)
    shutil.copy(built.index / WHEEL, folder)
    install(tool, environment, uv, tmp_path, "--no-index", "--find-links", str(folder), "vllm==0.27.1")
    assert_patched(environment)


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_over_http(tool: str, environment: Path, uv: str, served: str, tmp_path: Path) -> None:
    install(tool, environment, uv, tmp_path, "--no-index", f"vllm @ {served}/{quote(BUILT)}")
    assert_patched(environment)


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_from_a_page_of_links(tool: str, environment: Path, uv: str, served: str, tmp_path: Path) -> None:
    install(tool, environment, uv, tmp_path, "--no-index", "--find-links", f"{served}/links.html", "vllm==0.27.1")
    assert_patched(environment)


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_from_a_simple_index(tool: str, environment: Path, uv: str, served: str, tmp_path: Path) -> None:
    install(tool, environment, uv, tmp_path, "--index-url", f"{served}/simple/", "vllm")
    assert_patched(environment)


def test_second_sync_changes_nothing(environment: Path, uv: str, served: str, tmp_path: Path) -> None:
    """A version that differs in one of its five places makes uv install again at every sync."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[project]\nname = "app"\nversion = "1"\nrequires-python = ">=3.10"\ndependencies = ["vllm==0.27.1"]\n'
        f'[[tool.uv.index]]\nurl = "{served}/simple/"\ndefault = true\n'
    )
    settings = {key: value for key, value in clean(tmp_path).items() if key != "UV_NO_CONFIG"}

    def run(*arguments: str) -> str:
        command = [uv, *arguments, "--python", sys.executable]
        done = subprocess.run(command, cwd=project, env=settings, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stderr

    run("lock")
    assert 'version = "0.27.1+ndt.1"' in (project / "uv.lock").read_text()
    assert "vllm==0.27.1+ndt.1" in run("sync")
    second = run("sync")
    assert "vllm" not in second, second
    run("lock", "--check")
    run("pip", "check")
    assert_patched(project / ".venv")


@pytest.mark.parametrize("tool", ["pip", "uv"])
@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_modes_follow_upstreams_files(
    tool: str, mask: int, environment: Path, uv: str, built: Toy, tmp_path: Path
) -> None:
    """A changed or new file gets the mode that an untouched one gets, whatever the umask; executables stay so."""
    old = os.umask(mask)
    try:
        install(tool, environment, uv, tmp_path, "--no-index", str(built.dist / BUILT))
    finally:
        os.umask(old)
    packages = next(environment.glob("lib/python*/site-packages"))
    modes = {
        name: (packages / name).stat().st_mode & 0o777 for name in ("vllm/cli.py", "vllm/lines.py", "vllm_ndt/cli.py")
    }
    assert len(set(modes.values())) == 1, modes
    assert (packages / "vllm" / "tool.sh").stat().st_mode & 0o100
    assert_patched(environment)
