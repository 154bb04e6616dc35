# SPDX-License-Identifier: Apache-2.0
"""The real published wheel, of this machine's arch and of the other: the build gives the bytes of VERSIONS.lock."""

import csv
import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from builder import lockfile
from builder.hashing import sha256_of
from tests.builder.toy import ROOT

RELEASES = lockfile.read(ROOT / "VERSIONS.lock")
RELEASE = RELEASES[os.environ["RELEASE"]]
LABEL = f"{RELEASE.version}+{RELEASE.label}"


def build(arch: str, out: Path, cache: Path, *arguments: str) -> dict[str, str]:
    """What build.py says of the wheel that it built, with a plain environment."""
    command = [sys.executable, str(ROOT / "build.py"), "--vllm", RELEASE.version, "--arch", arch, "--json"]
    command += ["--out", str(out), "--cache", str(cache), "--image", "no", *arguments]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, str] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def wheel(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(build("x86_64", tmp_path_factory.mktemp("real"), cache)["wheel"])


def test_bytes_are_those_of_the_lock(wheel: Path) -> None:
    pinned = RELEASE.pinned_wheel("cuda", "x86_64")
    assert pinned is not None
    assert (wheel.name, sha256_of(wheel)) == (pinned.file, pinned.sha256)


def test_second_run_offline_and_the_other_arch(wheel: Path, cache: Path, tmp_path: Path) -> None:
    again = build("x86_64", tmp_path / "again", cache, "--offline")
    assert again["sha256"] == sha256_of(wheel)
    other = build("aarch64", tmp_path / "other", cache)
    pinned = RELEASE.pinned_wheel("cuda", "aarch64")
    assert pinned is not None
    assert (other["sha256"], other["manifest"]) == (pinned.sha256, pinned.manifest)
    assert other["wheel"].endswith("_aarch64.whl")


def test_every_untouched_member_is_upstreams(wheel: Path, cache: Path) -> None:
    """By checksum, size, time and mode of all of them, native libraries included; names with commas too."""
    artefact = RELEASE.wheel_artefact("cuda", "x86_64")
    changed = {row.path for row in RELEASE.changed} | {"vllm/_version.py"}
    with (
        zipfile.ZipFile(cache / "sha256" / artefact.sha256 / artefact.file) as upstream,
        zipfile.ZipFile(wheel) as patched,
    ):
        kept = [
            info for info in upstream.infolist() if info.filename.startswith("vllm/") and info.filename not in changed
        ]
        assert len(kept) == 4735 - 6 - len({row.path for row in RELEASE.changed if row.before}) - 1
        for old in kept:
            new = patched.getinfo(old.filename)
            facts = [
                (i.CRC, i.file_size, i.compress_size, i.date_time, i.external_attr, i.compress_type) for i in (old, new)
            ]
            assert facts[0] == facts[1], old.filename
        assert {info.filename for info in upstream.infolist() if info.filename.startswith("vllm/")} <= set(
            patched.namelist()
        )


def test_record_quotes_names_with_commas(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"vllm-{LABEL}.dist-info/RECORD").decode()
        assert sum('"' in line for line in text.splitlines()) == 561
        assert {row[0] for row in csv.reader(io.StringIO(text))} == set(archive.namelist())


def test_installed_site_is_verified(wheel: Path, uv: str, tmp_path: Path) -> None:
    site = tmp_path / "env"
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(site)], check=True, env=clean)
    command = [uv, "pip", "install", "--quiet", "--no-deps", "--python", str(site / "bin" / "python"), str(wheel)]
    subprocess.run(command, check=True, env=clean)
    done = subprocess.run(
        [site / "bin" / "vllm-ndt", "verify"], capture_output=True, text=True, check=False, cwd="/", env=clean
    )
    assert (done.returncode, done.stdout.split(":")[0]) == (0, "patched"), done.stdout
    deep = subprocess.run(
        [site / "bin" / "vllm-ndt", "verify", "--deep"], capture_output=True, check=False, cwd="/", env=clean
    )
    assert deep.returncode == 0
    library = next(site.glob("lib/python*/site-packages/vllm/*.so"))
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 1
    library.unlink()
    library.write_bytes(data)
    changed = subprocess.run(
        [site / "bin" / "vllm-ndt", "verify", "--deep"], capture_output=True, text=True, check=False, cwd="/", env=clean
    )
    assert changed.returncode == 1
    assert f"vllm/{library.name}: changed" in changed.stdout
