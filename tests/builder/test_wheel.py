# SPDX-License-Identifier: Apache-2.0
"""The wheel that the writer gives: what other tools read in it, and that it is the same everywhere."""

import csv
import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from installer.sources import WheelFile

from tests.builder.conftest import other_pythons
from tests.builder.toy import BUILT, FILES, MODES, ROOT, WHEEL, Toy, make_toy

DIST_INFO = "vllm-0.27.1+ndt.1.dist-info"


@pytest.fixture(scope="module")
def archive(built: Toy) -> zipfile.ZipFile:
    return zipfile.ZipFile(built.dist / BUILT)


def test_outside_checkers_accept_it(built: Toy, tmp_path: Path) -> None:
    with WheelFile.open(built.dist / BUILT) as source:
        source.validate_record(validate_contents=True)
    subprocess.run(
        [sys.executable, "-m", "wheel", "unpack", "--dest", str(tmp_path), str(built.dist / BUILT)],
        check=True,
        capture_output=True,
    )
    (tmp_path / BUILT).write_bytes((built.dist / BUILT).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "wheel", "tags", "--build", "1", str(tmp_path / BUILT)], check=True, capture_output=True
    )


def test_name_and_version_agree_everywhere(archive: zipfile.ZipFile) -> None:
    metadata = archive.read(f"{DIST_INFO}/METADATA").decode()
    assert "Name: vllm\nVersion: 0.27.1+ndt.1\n" in metadata
    assert "Tag: cp38-abi3-manylinux_2_28_x86_64\n" in archive.read(f"{DIST_INFO}/WHEEL").decode()
    scope: dict[str, object] = {}
    exec(archive.read("vllm/_version.py"), scope)  # noqa: S102
    assert (scope["__version__"], scope["version_tuple"]) == ("0.27.1+ndt.1", (0, 27, 1, "ndt", 1))
    folders = {name.partition("/")[0] for name in archive.namelist()}
    assert folders == {"vllm", "vllm_ndt", DIST_INFO}


def test_metadata_keeps_upstreams_lines_and_description(archive: zipfile.ZipFile) -> None:
    metadata = archive.read(f"{DIST_INFO}/METADATA").decode()
    kept = FILES["vllm-0.27.1.dist-info/METADATA"].decode().replace("Version: 0.27.1", "Version: 0.27.1+ndt.1")
    head, _, description = kept.partition("\n\n")
    assert metadata.startswith(head + "\n")
    assert metadata.endswith("\n\n" + description)
    assert "Provides-Extra: locked\nRequires-Dist: packaging==26.3 ; extra == 'locked'\n" in metadata
    assert "Requires-Dist: tomli==2.4.1 ; (python_version < '3.11') and extra == 'locked'\n" in metadata


def test_untouched_members_are_byte_identical(built: Toy, archive: zipfile.ZipFile) -> None:
    """Header, packed bytes, time and mode of every member that no patch touches."""
    upstream = zipfile.ZipFile(built.index / WHEEL)
    changed = {"vllm/lines.py", "vllm/_version.py"}
    for old in upstream.infolist():
        if old.filename.startswith("vllm/") and old.filename not in changed:
            new = archive.getinfo(old.filename)
            assert (new.date_time, new.external_attr, new.CRC, new.compress_type) == (
                old.date_time,
                old.external_attr,
                old.CRC,
                old.compress_type,
            )
            packed = old.compress_size + 30 + len(old.filename.encode())
            raw = [
                Path(str(zipped.filename)).read_bytes()[info.header_offset :][:packed]
                for zipped, info in ((upstream, old), (archive, new))
            ]
            assert raw[0] == raw[1], old.filename


def test_modes_are_upstreams_or_plain(archive: zipfile.ZipFile) -> None:
    for info in archive.infolist():
        old = info.filename.replace(DIST_INFO, "vllm-0.27.1.dist-info")
        assert info.external_attr >> 16 == MODES.get(old, 0o100644), info.filename
        assert info.create_system == 3


def test_record_and_manifest_name_every_member(archive: zipfile.ZipFile) -> None:
    names = set(archive.namelist())
    rows = list(csv.reader(io.StringIO(archive.read(f"{DIST_INFO}/RECORD").decode())))
    assert {row[0] for row in rows} == names
    assert rows[-1] == [f"{DIST_INFO}/RECORD", "", ""]
    manifest = json.loads(archive.read("vllm_ndt/manifest.json"))
    assert set(manifest["files"]) == names - {f"{DIST_INFO}/RECORD", "vllm_ndt/manifest.json"}
    for name, line in manifest["files"].items():
        data = archive.read(name)
        assert line == f"{hashlib.sha256(data).hexdigest()} {len(data)}", name
    assert manifest["patches"][0]["name"] == "change-line-ten"
    assert manifest["version"] == "0.27.1+ndt.1"


def test_licences_and_change_notice(archive: zipfile.ZipFile) -> None:
    assert archive.read(f"{DIST_INFO}/licenses/LICENSE") == FILES["vllm-0.27.1.dist-info/licenses/LICENSE"]
    notice = archive.read(f"{DIST_INFO}/licenses/CHANGES.vllm-ndt.txt").decode()
    assert "vllm/lines.py (change-line-ten: Change line ten" in notice
    assert "vllm_ndt/cli.py" in notice
    assert "License-File: CHANGES.vllm-ndt.txt" in archive.read(f"{DIST_INFO}/METADATA").decode()


def test_bill_of_materials_is_valid_and_without_clock(archive: zipfile.ZipFile) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text = archive.read(f"{DIST_INFO}/sboms/vllm-ndt.cdx.json").decode()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    document = json.loads(text)
    assert "serialNumber" not in document
    assert "timestamp" not in document["metadata"]
    assert {component["name"] for component in document["components"]} == {"packaging", "tomli"}


SURROUNDINGS = {
    "umask": ("umask 077; ", {}),
    "time zone": ("", {"TZ": "Pacific/Kiritimati"}),
    "locale": ("", {"LC_ALL": "tr_TR.UTF-8"}),
    "no UTF-8": ("", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    "hash seed": ("", {"PYTHONHASHSEED": "1"}),
    "SOURCE_DATE_EPOCH": ("", {"SOURCE_DATE_EPOCH": "1000000000"}),
    "empty SOURCE_DATE_EPOCH": ("", {"SOURCE_DATE_EPOCH": ""}),
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_surroundings_change_no_byte(toy: Toy, built: Toy, name: str) -> None:
    before, environment = SURROUNDINGS[name]
    command = f"{before}exec {sys.executable} {toy.root}/build.py --cache {toy.cache} --out {toy.dist}"
    done = subprocess.run(
        ["sh", "-c", command], env=toy.environment() | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for file in (BUILT, "constraints.txt", "SHA256SUMS"):
        assert (toy.dist / file).read_bytes() == (built.dist / file).read_bytes()


@pytest.mark.parametrize(
    "python", other_pythons() or [pytest.param("", marks=pytest.mark.skip(reason="no other Python here"))]
)
def test_other_pythons_change_no_byte(built: Toy, tmp_path: Path, tools: Path, python: str) -> None:
    make = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from pathlib import Path; from builder import bootstrap; "
    make += f"bootstrap.ensure(Path({str(ROOT / 'locks' / 'tools.txt')!r}), Path({str(tools.parent)!r}), offline=False)"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([python, "-c", make], check=True, env=environment)
    toy = make_toy(tmp_path, tools)
    done = toy.run(python=python)
    assert done.returncode == 0, done.stderr
    assert (toy.dist / BUILT).read_bytes() == (built.dist / BUILT).read_bytes()
