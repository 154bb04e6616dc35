# SPDX-License-Identifier: Apache-2.0
"""`verify` on installed wheels: patched after every way to install, and named what happened to them since."""

import base64
import hashlib
import json
import os
import py_compile
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builder.toy import BUILT, FILES, LINES, ROOT, WHEEL, Toy, write_wheel

CASES = json.loads((Path(__file__).parent / "data" / "verify.json").read_text())
COMMAS = "vllm/configs/E=8,N=3584,device_name=H100.json"


class Site:
    """An environment with the toy's wheel, and the verdicts on it."""

    def __init__(self, folder: Path, toy: Toy, uv: str) -> None:
        self.folder, self.toy, self.uv = folder, toy, uv
        subprocess.run(
            [uv, "venv", "--quiet", "--seed", "--python", sys.executable, str(folder)], check=True, env=clean()
        )
        self.python = folder / "bin" / "python"
        self.packages = next(folder.glob("lib/python*/site-packages"))
        self.path = ""

    def pip(self, *arguments: str) -> None:
        command = [str(self.python), "-m", "pip", "install", "--quiet", "--no-index", *arguments]
        subprocess.run(command, check=True, env=clean(), capture_output=True)

    def uv_pip(self, *arguments: str, **environment: str) -> None:
        command = [
            self.uv,
            "pip",
            "install",
            "--quiet",
            "--offline",
            "--no-index",
            "--python",
            str(self.python),
            *arguments,
        ]
        subprocess.run(command, check=True, env=clean() | environment, capture_output=True)

    def inside(self, *arguments: str, path: str = "") -> tuple[int, str]:
        """Exit status and text of `vllm-ndt verify`, run without a home and without write access to the environment."""
        environment = {"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"} | (
            {"PYTHONPATH": path or self.path} if path or self.path else {}
        )
        command = [str(self.python), "-m", "vllm_ndt.cli", "verify", *arguments]
        script = self.folder / "bin" / "vllm-ndt"
        if script.exists():
            command = [str(script), "verify", *arguments]
        done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    def outside(self, *arguments: str, site: Path | None = None) -> tuple[int, str]:
        """Exit status and text of `build.py verify --site`."""
        done = self.toy.run("verify", "--site", str(site or self.folder), *arguments)
        return done.returncode, done.stdout + done.stderr


def clean() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PIP_", "UV"))}


@pytest.fixture
def site(tmp_path: Path, built: Toy, uv: str) -> Site:
    site = Site(tmp_path / "env", built, uv)
    # Copied: uv's hard links would let a test write into the cache that the next one installs from.
    site.uv_pip("--link-mode", "copy", str(built.dist / BUILT))
    return site


@pytest.fixture
def empty(tmp_path: Path, built: Toy, uv: str) -> Site:
    return Site(tmp_path / "env", built, uv)


def right(what_happened: str) -> tuple[int, str]:
    """The exit status and the verdict that are right after something happened, from data/verify.json."""
    [case] = [case for case in CASES if case["after"].startswith(what_happened)]
    verdict = next(value for key, value in case.items() if key.startswith("verify"))
    return {"patched": 0, "edited": 1, "incomplete": 1, "rolled back": 2}[verdict], verdict


def said(answer: tuple[int, str]) -> tuple[int, str]:
    """The exit status and the verdict of an answer."""
    return answer[0], answer[1].partition(":")[0]


WAYS: dict[str, Callable[[Site, str], None]] = {
    "pip": lambda site, wheel: site.pip(wheel),
    "pip, not compiled": lambda site, wheel: site.pip("--no-compile", wheel),
    "uv": lambda site, wheel: site.uv_pip(wheel),
    "uv, compiled": lambda site, wheel: site.uv_pip("--compile-bytecode", wheel),
    "uv, copied": lambda site, wheel: site.uv_pip("--link-mode", "copy", wheel),
    "uv, symlinks": lambda site, wheel: site.uv_pip("--link-mode", "symlink", wheel),
}


@pytest.mark.parametrize("way", WAYS)
def test_patched_after_every_way_to_install(empty: Site, way: str) -> None:
    WAYS[way](empty, str(empty.toy.dist / BUILT))
    for arguments in ((), ("--deep",)):
        status, text = empty.inside(*arguments)
        assert said((status, text)) == right("pip or uv install of the patched wheel"), text
        assert empty.outside(*arguments) == (0, text)
    assert "vllm 0.27.1+ndt.1, manifest sha256:" in text
    assert "patches: change-line-ten" in text


@pytest.mark.parametrize("option", ["--target", "--user"])
def test_patched_after_pip_into_another_folder(empty: Site, tmp_path: Path, option: str) -> None:
    wheel = str(empty.toy.dist / BUILT)
    base = tmp_path / "base"
    if option == "--target":
        empty.pip("--target", str(base), wheel)
        folder = base
    else:
        environment = clean() | {"PYTHONUSERBASE": str(base)}
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--user",
            "--break-system-packages",
            wheel,
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:  # an old pip does not know --break-system-packages
            command.remove("--break-system-packages")
            subprocess.run(command, env=environment, check=True, capture_output=True)
        folder = next(base.glob("lib/python*/site-packages"))
    status, text = empty.inside(path=str(folder))
    assert (status, text.split(":")[0]) == (0, "patched"), text
    assert empty.outside(site=folder)[0] == 0


def test_read_only_installation_is_verified(site: Site) -> None:
    """On a file system mounted read-only, which stops root too."""
    mount = f"mount --bind {site.folder} {site.folder} && mount -o remount,ro,bind {site.folder}"
    script = f"{mount} && ! touch {site.folder}/x 2>/dev/null && exec env -i {site.folder}/bin/vllm-ndt verify --deep"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        assert not os.environ.get("CI"), "CI must be able to make a mount namespace"
        pytest.skip("no right to make a mount namespace")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, check=False, cwd="/"
    )
    assert said((done.returncode, done.stdout)) == (0, "patched"), done.stderr


def test_stock_installed_over_it_is_rolled_back(site: Site) -> None:
    site.pip("--no-deps", "--force-reinstall", str(site.toy.index / WHEEL))
    status, text = site.outside()
    assert said((status, text)) == right("pip install --force-reinstall vllm==0.27.1")
    assert str(site.packages) in text
    assert "vllm 0.27.1 without this project's manifest" in text
    assert not (site.folder / "bin" / "vllm-ndt").exists()
    assert site.inside()[0] != 0


def test_stock_in_front_is_rolled_back(site: Site, tmp_path: Path) -> None:
    front = tmp_path / "front"
    site.pip("--target", str(front), "--no-deps", str(site.toy.index / WHEEL))
    status, text = site.inside(path=str(front))
    assert said((status, text)) == right("a second, stock vllm earlier on the path")
    assert str(front) in text


@pytest.mark.parametrize("name", ["vllm.py", "vllm/sub.py", "vllm/__init__.py"])
def test_any_module_of_the_name_in_front_is_rolled_back(site: Site, name: str) -> None:
    """Also a plain file one folder below the site, and a package without __init__.py."""
    path = site.packages / "front" / name
    path.parent.mkdir(parents=True)
    path.write_text("print('another')\n")
    answer = site.inside(path=str(site.packages / "front"))
    if name == "vllm/sub.py":  # a folder without __init__.py loses to a package further back
        assert said(answer) == (0, "patched")
    else:
        assert said(answer) == (2, "rolled back")
        assert "front" in answer[1]


@pytest.mark.parametrize("name", ["vllm-0.30.0.egg-info/PKG-INFO", "VLLM-0.1.0.dist-info/METADATA"])
def test_second_installation_is_seen_under_any_spelling(site: Site, name: str) -> None:
    path = site.packages / name
    path.parent.mkdir()
    path.write_text(f"Metadata-Version: 2.1\nName: VLLM\nVersion: {name.split('-')[1][:6]}\n")
    assert "two installations" in site.inside()[1]


def test_several_pythons_are_not_judged_by_the_first(site: Site) -> None:
    other = site.folder / "lib" / "python3.99" / "site-packages" / "vllm"
    other.mkdir(parents=True)
    assert site.outside()[0] == 3
    assert site.outside(site=site.packages)[0] == 0


def test_pipe_in_place_of_a_file_is_not_waited_for(site: Site) -> None:
    (site.packages / "vllm" / "cli.py").unlink()
    os.mkfifo(site.packages / "vllm" / "cli.py")
    assert said(site.inside()) == (1, "edited")


def test_stock_unpacked_over_it_by_hand_is_found(site: Site) -> None:
    shutil.unpack_archive(site.toy.index / WHEEL, site.packages, "zip")
    status, text = site.inside()
    assert status == 1
    assert "vllm/lines.py: changed" in text
    assert "two installations of vllm: 0.27.1, 0.27.1+ndt.1" in text


@pytest.mark.parametrize("name", ["vllm/lines.py", "vllm/cli.py", "vllm/_version.py", "vllm_ndt/cli.py"])
def test_edited_files_are_named(site: Site, name: str) -> None:
    edit(site.packages / name)
    for status, text in (site.outside(), site.inside()) if name != "vllm_ndt/cli.py" else (site.outside(),):
        assert said((status, text)) == right("one byte of a patched file changed")
        assert f"  {name}: changed\n" in text


@pytest.mark.parametrize("name", [COMMAS, "vllm-0.27.1+ndt.1.dist-info/METADATA"])
def test_other_files_are_judged_by_size_or_deep(site: Site, name: str) -> None:
    edit(site.packages / name)
    assert site.inside()[0] == 0
    status, text = site.inside("--deep")
    assert status == 1
    assert f"  {name}: changed\n" in text
    with (site.packages / name).open("ab") as file:
        file.write(b"\n")
    assert f"  {name}: changed\n" in site.inside()[1]


def test_record_made_to_agree_does_not_help(site: Site) -> None:
    edit(site.packages / "vllm" / "unended.py")
    record = next(site.packages.glob("vllm-*.dist-info/RECORD"))
    digests = [
        base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        for data in (FILES["vllm/unended.py"], (site.packages / "vllm" / "unended.py").read_bytes())
    ]
    text = record.read_text()
    assert digests[0] in text
    record.write_text(text.replace(*digests))
    status, text = site.inside()
    assert said((status, text)) == right("one byte of an untouched Python file changed")
    assert "  vllm/unended.py: changed\n" in text


def test_native_library_needs_deep(site: Site) -> None:
    edit(site.packages / "vllm" / "native.abi3.so")
    assert site.inside()[0] == 0
    for status, text in (site.inside("--deep"), site.outside("--deep")):
        assert said((status, text)) == right("one byte of a native library changed")
        assert "  vllm/native.abi3.so: changed\n" in text


@pytest.mark.parametrize("name", ["vllm_ndt/verify.py", "vllm/lines.py", "vllm/native.abi3.so"])
def test_missing_files_are_named(site: Site, name: str) -> None:
    (site.packages / name).unlink()
    status, text = site.outside()
    assert said((status, text)) == right("one overlay file deleted")
    assert f"  {name}: missing\n" in text


def test_missing_manifest_is_incomplete(site: Site) -> None:
    (site.packages / "vllm_ndt" / "manifest.json").unlink()
    for status, text in (site.inside(), site.outside()):
        assert status == 1
        assert text.startswith("incomplete: ")
        assert "vllm_ndt/manifest.json" in text


WHOLE = '{"format":1,"version":"1","upstream":{"version":"1"},"files":%s,"changed":%s,"patches":%s}'
DAMAGED = ["", "{}", "[]", '{"format": 2}', '{"format": 1, "files": {"a": "b"}}', "[" * 100_000, "\xff"]
DAMAGED += [WHOLE % parts for parts in (('{"a":"b 1"}', "[1]", "[]"), ("{}", "[]", '[{"name":1}]'), ("[]", "[]", "[]"))]
DAMAGED += [WHOLE % ('{"a\\u0000":"b 1"}', "[]", "[]"), WHOLE % ('{"../../x":"b 1"}', "[]", "[]")]


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_manifest_is_edited(site: Site, text: str) -> None:
    (site.packages / "vllm_ndt" / "manifest.json").write_text(text)
    status, answer = site.inside()
    assert said((status, answer)) == (1, "edited")
    assert "Traceback" not in answer


def test_forged_manifest_is_found_by_its_digest(site: Site) -> None:
    manifest = site.packages / "vllm_ndt" / "manifest.json"
    digest = "sha256:" + hashlib.sha256(manifest.read_bytes()).hexdigest()
    assert site.inside("--expect", digest)[0] == 0
    assert site.inside("--expect", digest.removeprefix("sha256:"))[0] == 0
    path = site.packages / "vllm" / "cli.py"
    old = hashlib.sha256(path.read_bytes()).hexdigest()
    edit(path)
    manifest.write_text(manifest.read_text().replace(old, hashlib.sha256(path.read_bytes()).hexdigest()))
    forged = "sha256:" + hashlib.sha256(manifest.read_bytes()).hexdigest()
    assert site.inside()[0] == 0
    for status, text in (site.inside("--expect", digest), site.outside("--expect", digest)):
        assert said((status, text)) == right("files and manifest forged together")
        assert digest in text
        assert forged in text


def test_another_build_of_the_same_label(site: Site, tmp_path: Path, tools: Path) -> None:
    from tests.builder.toy import make_toy

    other = make_toy(tmp_path / "other", tools)
    other.patch.write_text(other.patch.read_text().replace("line ten", "line TEN"))
    other.pin()
    assert other.run().returncode == 0
    assert site.inside("--against", str(site.toy.dist / BUILT))[0] == 0
    status, text = site.inside("--against", str(other.dist / BUILT))
    assert status == 1
    assert "another build" in text
    assert site.inside("--against", "/nowhere.whl")[0] == 3
    assert site.inside("--against", str(site.toy.index / WHEEL))[0] == 3


@pytest.mark.parametrize(
    "name",
    ["vllm/lines/__init__.py", "vllm/lines.abi3.so", "vllm/more.py", "vllm/gone.pyc", "vllm_ndt/settings/__init__.py"],
)
def test_code_that_would_run_in_place_of_the_builds_is_named(site: Site, name: str) -> None:
    path = site.packages / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")
    status, text = site.inside()
    assert status == 1
    assert f"  {name}: added\n" in text


def test_linked_folder_is_named(site: Site, tmp_path: Path) -> None:
    (tmp_path / "evil").mkdir()
    (site.packages / "vllm" / "lines").symlink_to(tmp_path / "evil")
    status, text = site.inside()
    assert status == 1
    assert "  vllm/lines: a link" in text


def evil_bytecode(path: Path, tmp_path: Path, mode: py_compile.PycInvalidationMode) -> Path:
    """Put bytecode of another source, with the header that Python asks for, where Python looks first."""
    evil = tmp_path / "evil.py"
    evil.write_text("raise SystemExit('evil')\n")
    status = path.stat()
    evil.write_bytes(evil.read_bytes().ljust(status.st_size, b"#")[: max(status.st_size, 30)])
    os.utime(evil, ns=(status.st_atime_ns, status.st_mtime_ns))
    cache = Path(py_compile.compile(str(evil), cfile=str(tmp_path / "evil.pyc"), doraise=True, invalidation_mode=mode))
    target = path.parent / "__pycache__" / f"{path.stem}.{sys.implementation.cache_tag}.pyc"
    target.parent.mkdir(exist_ok=True)
    shutil.copy(cache, target)
    return target


def test_bytecode_that_is_not_the_sources_is_named(site: Site, tmp_path: Path) -> None:
    """The source is right, and yet Python would run something else."""
    path = site.packages / "vllm" / "lines.py"
    evil_bytecode(path, tmp_path, py_compile.PycInvalidationMode.TIMESTAMP)
    ran = subprocess.run(
        [str(site.python), "-c", "import vllm.lines"], capture_output=True, text=True, check=False, cwd="/"
    )
    assert "evil" in ran.stderr
    status, text = site.inside()
    assert status == 1
    assert "bytecode that is not vllm/lines.py's" in text


def test_unchecked_bytecode_of_an_untouched_file_is_named(site: Site, tmp_path: Path) -> None:
    evil_bytecode(site.packages / "vllm" / "cli.py", tmp_path, py_compile.PycInvalidationMode.UNCHECKED_HASH)
    status, text = site.inside()
    assert status == 1
    assert "bytecode that is not vllm/cli.py's" in text


def test_bytecode_of_an_untouched_file_needs_deep(site: Site, tmp_path: Path) -> None:
    evil_bytecode(site.packages / "vllm" / "cli.py", tmp_path, py_compile.PycInvalidationMode.TIMESTAMP)
    assert site.inside()[0] == 0
    assert "bytecode that is not vllm/cli.py's" in site.inside("--deep")[1]


def test_stale_bytecode_is_no_difference(site: Site, tmp_path: Path) -> None:
    target = evil_bytecode(site.packages / "vllm" / "lines.py", tmp_path, py_compile.PycInvalidationMode.TIMESTAMP)
    data = bytearray(target.read_bytes())
    data[8] ^= 1  # another source time: Python ignores it
    target.write_bytes(data)
    assert site.inside("--deep")[0] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--expect", "abc"],
        ["--expect", ""],
        ["--nonsense"],
        ["--expect", "0" * 64, "--against", "/x.whl"],
        ["--against", "/"],
    ],
)
def test_wrong_use_could_not_check(site: Site, arguments: list[str]) -> None:
    """2 says rolled back, so wrong use must not."""
    status, text = site.inside(*arguments)
    assert status == 3
    assert "Traceback" not in text


def test_no_vllm_could_not_check(empty: Site, tmp_path: Path) -> None:
    assert empty.outside()[0] == 3
    assert empty.outside(site=tmp_path / "nowhere")[0] == 3
    assert empty.outside(site=Path("/etc/passwd"))[0] == 3


def test_vllm_removed_by_hand_is_incomplete(site: Site) -> None:
    shutil.rmtree(site.packages / "vllm")
    for status, text in (site.inside(), site.outside()):
        assert status == 1
        assert text.startswith("incomplete")


def test_json_report(site: Site) -> None:
    status, text = site.inside("--json")
    report = json.loads(text)
    assert (status, report["verdict"], report["status"], report["findings"]) == (0, "patched", 0, [])
    assert report["version"] == "0.27.1+ndt.1"
    assert report["patches"] == ["change-line-ten"]


def edit(path: Path) -> None:
    """Change one byte, size kept; the file may be a link into an installer's cache, which stays as it is."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    path.write_bytes(data)


class TestWheelFile:
    """`build.py verify FILE`: 0 patched, 6 different, 3 no wheel."""

    def check(self, toy: Toy, path: Path, *arguments: str) -> tuple[int, str]:
        done = toy.run("verify", str(path), *arguments)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout + done.stderr

    def test_built_wheel_is_patched(self, built: Toy) -> None:
        status, text = self.check(built, built.dist / BUILT)
        assert (status, text.split(":")[0]) == (0, "patched")

    def test_stock_wheel_is_rolled_back(self, built: Toy) -> None:
        status, text = self.check(built, built.index / WHEEL)
        assert (status, text.split(":")[0]) == (6, "rolled back")

    def test_rewritten_wheel_is_edited(self, built: Toy, tmp_path: Path) -> None:
        import zipfile

        with zipfile.ZipFile(built.dist / BUILT) as archive:
            files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}
        path = write_wheel(tmp_path / BUILT, files | {"vllm/cli.py": b"evil"})
        status, text = self.check(built, path)
        assert (status, text.split(":")[0]) == (6, "edited")
        assert "vllm/cli.py: changed" in text
        assert "another build" in text

    def test_renamed_or_forged_wheel_needs_its_digest(self, built: Toy, tmp_path: Path) -> None:
        """A wheel that agrees with itself proves nothing: its manifest must be one of the lock, or the one expected."""
        import zipfile

        renamed = tmp_path / "renamed.whl"
        shutil.copy(built.dist / BUILT, renamed)
        assert self.check(built, renamed)[0] == 0
        with zipfile.ZipFile(built.dist / BUILT) as archive:
            files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}
        old = hashlib.sha256(files["vllm/cli.py"]).hexdigest()
        files["vllm/cli.py"] = files["vllm/cli.py"].replace(b"import", b"import")[:-1] + b" "
        new = hashlib.sha256(files["vllm/cli.py"]).hexdigest()
        files["vllm_ndt/manifest.json"] = files["vllm_ndt/manifest.json"].replace(old.encode(), new.encode())
        forged = write_wheel(tmp_path / "forged.whl", files)
        status, text = self.check(built, forged)
        assert (status, text.split(":")[0]) == (6, "edited")
        assert "VERSIONS.lock" in text
        digest = hashlib.sha256(files["vllm_ndt/manifest.json"]).hexdigest()
        assert self.check(built, forged, "--expect", digest)[0] == 0

    def test_other_digest_is_edited(self, built: Toy) -> None:
        status, text = self.check(built, built.dist / BUILT, "--expect", "0" * 64)
        assert status == 6
        assert "0" * 64 in text

    def test_no_wheel_is_one_line(self, built: Toy, tmp_path: Path) -> None:
        (tmp_path / "x.whl").write_bytes(b"no zip")
        for path in (tmp_path / "x.whl", tmp_path / "nothing.whl", tmp_path):
            status, text = self.check(built, path)
            assert status == 3
            assert text.startswith("error: ")
            assert len(text.splitlines()) == 1


def test_toy_has_what_the_cases_need() -> None:
    assert COMMAS in FILES
    assert len(LINES) == 30
    assert (ROOT / "overlay" / "vllm_ndt" / "verify.py").is_file()


@pytest.mark.parametrize("arguments", [["--expect", "abc"], ["--nonsense"], ["--expect"], ["--deep", "--site"]])
def test_wrong_use_from_outside_could_not_check(site: Site, arguments: list[str]) -> None:
    status, text = site.outside(*arguments)
    assert status == 3
    assert "Traceback" not in text


def test_wrong_use_with_an_equals_sign_could_not_check(site: Site) -> None:
    assert site.toy.run("verify", f"--site={site.folder}", "--nonsense").returncode == 3
    assert site.toy.run("verify", f"--site={site.folder}").returncode == 0


def test_bytecode_without_positions_is_no_difference(site: Site) -> None:
    """PYTHONNODEBUGRANGES saves memory; `verify` runs with the server's environment, so with it too."""
    shutil.rmtree(site.packages / "vllm" / "__pycache__", ignore_errors=True)
    command = [
        str(site.python),
        "-m",
        "compileall",
        "-qf",
        str(site.packages / "vllm"),
        str(site.packages / "vllm_ndt"),
    ]
    subprocess.run(command, check=True, env={"PYTHONNODEBUGRANGES": "1"})
    script = [str(site.folder / "bin" / "vllm-ndt"), "verify", "--deep"]
    done = subprocess.run(
        script, env={"PYTHONNODEBUGRANGES": "1"}, capture_output=True, text=True, check=False, cwd="/"
    )
    assert said((done.returncode, done.stdout)) == (0, "patched")


@pytest.mark.parametrize("change", ["1 -> True", "name", "number"])
def test_bytecode_that_differs_a_little_is_named(site: Site, change: str) -> None:
    """Also where Python's own comparison of code would see none."""
    path = site.packages / "vllm" / "lines.py"
    target = path.parent / "__pycache__" / f"lines.{sys.implementation.cache_tag}.pyc"
    target.parent.mkdir(exist_ok=True)
    other = {"1 -> True": "X = True\n", "name": "Y = 1\n", "number": "X = 2\n"}[change]
    evil = path.with_name("evil.py")
    evil.write_text(other)
    py_compile.compile(str(evil), cfile=str(target), doraise=True)
    evil.unlink()
    status = path.stat()
    header = int(status.st_mtime).to_bytes(4, "little") + status.st_size.to_bytes(4, "little")
    data = target.read_bytes()
    target.write_bytes(data[:8] + header + data[16:])
    assert "bytecode that is not vllm/lines.py's" in site.inside()[1]


def test_folder_in_place_of_a_file_is_edited(site: Site) -> None:
    (site.packages / "vllm" / "cli.py").unlink()
    (site.packages / "vllm" / "cli.py").mkdir()
    assert said(site.inside()) == (1, "edited")


def test_outside_needs_no_cache(site: Site, tmp_path: Path) -> None:
    """A cache that cannot be made must not look like a verdict."""
    (tmp_path / "file").write_text("")
    command = [sys.executable, str(ROOT / "build.py"), "verify", "--site", str(site.folder)]
    done = subprocess.run([*command, "--cache", str(tmp_path / "file")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split(":")[0]) == (0, "patched")
