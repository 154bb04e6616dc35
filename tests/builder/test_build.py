# SPDX-License-Identifier: Apache-2.0
"""build.py as a user runs it: what it prints, its exit statuses, and that nothing half-made is left behind."""

import fcntl
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from builder.hashing import sha256_of
from tests.builder.toy import BUILT, FILES, PATCH, WHEEL, Toy, write_wheel

Prepare = Callable[[Toy], dict[str, str] | None]


def assert_one_line(done: subprocess.CompletedProcess[str], status: int, *words: str) -> None:
    """An error is one line that names what was expected and found, with the documented exit status."""
    assert done.returncode == status, done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("making ", "fetching "))]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    for word in ("expected ", "found", *words):
        assert word in lines[0]


def leftovers(folder: Path) -> list[str]:
    """What lies in an output folder."""
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_build_prints_wheel_sha256_and_manifest(built: Toy) -> None:
    done = built.run("--vllm", "0.27.1", "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 0
    assert result["sha256"] == sha256_of(built.dist / BUILT)
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", result["manifest"])
    text = built.run("--vllm", "0.27.1").stdout
    assert all(f" {value}" in text for value in (result["wheel"], result["sha256"], result["manifest"]))
    assert "image     none" in text
    assert leftovers(built.dist) == [".lock", "SHA256SUMS", "constraints.txt", BUILT]
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=built.dist, check=True, capture_output=True)


def test_constraints_pin_the_patched_wheel_and_the_closure(built: Toy) -> None:
    lines = (built.dist / "constraints.txt").read_text().splitlines()
    assert lines == ["vllm==0.27.1+ndt.1", "packaging==26.3", "tomli==2.4.1 ; python_version < '3.11'"]


def test_settings_that_the_docs_advise_do_not_stop_the_build(built: Toy, toy: Toy) -> None:
    """PIP_CONSTRAINT with our own constraints.txt keeps stock out of servers; here stock is what is asked for."""
    constraints = built.dist / "constraints.txt"
    settings = {"PIP_CONSTRAINT": str(constraints), "UV_CONSTRAINT": str(constraints), "PIP_REQUIRE_HASHES": "1"}
    done = toy.run(environment=settings | {"PIP_TARGET": str(toy.root / "elsewhere"), "PIP_USER": "1"})
    assert done.returncode == 0, done.stderr


def test_second_build_needs_no_network(toy: Toy) -> None:
    assert toy.run().returncode == 0
    shutil.rmtree(toy.index)
    shutil.rmtree(toy.dist)
    assert toy.run("--offline").returncode == 0
    assert BUILT in leftovers(toy.dist)


def test_damaged_cache_entry_is_fetched_again(toy: Toy) -> None:
    assert toy.run().returncode == 0
    cached = next(toy.cache.glob(f"sha256/*/{WHEEL}"))
    cached.write_bytes(cached.read_bytes()[:-1] + b"!")
    assert toy.run().returncode == 0
    assert sha256_of(cached) == cached.parent.name


def _other_wheel(toy: Toy) -> None:
    write_wheel(toy.index / WHEEL, FILES | {"vllm/cli.py": b"evil"})


def _lacking_index(toy: Toy) -> None:
    (toy.index / WHEEL).unlink()


def _dead_index(_: Toy) -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}/simple"
    return {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": address, "PIP_FIND_LINKS": "", "PIP_RETRIES": "0"}


def _repinned(change: Callable[[str], str]) -> Prepare:
    def prepare(toy: Toy) -> None:
        toy.patch.write_text(change(toy.patch.read_text()))

    return prepare


def _file(path: str, text: str) -> Prepare:
    def prepare(toy: Toy) -> None:
        target = toy.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    return prepare


def _without(path: str) -> Prepare:
    return lambda toy: (toy.root / path).unlink()


def _linked_overlay(toy: Toy) -> None:
    (toy.root / "overlay" / "vllm_ndt" / "link.py").symlink_to("/etc/passwd")


def _not_utf8(toy: Toy) -> None:
    (toy.patch.parent / "series").write_bytes(b"\xff\n")


def _series(text: str) -> Prepare:
    return _file("patches/0.27.1/series", text)


BAD: dict[str, tuple[Prepare, list[str], int, tuple[str, ...]]] = {
    "unknown release": (lambda toy: None, ["--vllm", "9.9.9"], 2, ("0.27.1", "'9.9.9'")),
    "no wheel pinned": (lambda toy: None, ["--arch", "aarch64"], 3, ("aarch64", "build.py lock")),
    "other hash": (_other_wheel, [], 3, (WHEEL, "VERSIONS.lock")),
    "not on the index": (_lacking_index, [], 3, (WHEEL, "pip")),
    "no network": (_dead_index, [], 3, (WHEEL, "pip")),
    "offline, nothing cached": (lambda toy: None, ["--offline"], 3, (WHEEL, "--offline")),
    "no lock": (_without("VERSIONS.lock"), [], 3, ("VERSIONS.lock",)),
    "lock without a release": (_file("VERSIONS.lock", "format = 1\n[release]"), [], 3, ("VERSIONS.lock",)),
    "damaged lock": (_file("VERSIONS.lock", "format = "), [], 3, ("VERSIONS.lock",)),
    "lock of another format": (_file("VERSIONS.lock", "format = 2\n[release]"), [], 3, ("format 1",)),
    "other closure": (_file("locks/toy.txt", "evil==1\n"), [], 3, ("locks/toy.txt",)),
    "patch does not apply": (
        _repinned(lambda text: text.replace("# line 8", "# line eight")),
        [],
        4,
        ("change-line-ten", "vllm/lines.py", "hunk 1", "line 8", "'# line eight'", "'# line 8'", "by sha256"),
    ),
    "patch with CRLF": (
        _repinned(lambda text: text.replace("\n", "\r\n")),
        [],
        4,
        ("change-line-ten", "CRLF", "by sha256"),
    ),
    "trailing blanks cut": (
        _repinned(lambda text: text.replace("\n # line 8", "\n# line 8")),
        [],
        4,
        ("change-line-ten", "by sha256"),
    ),
    "patch changed, applies": (
        _repinned(lambda text: text.replace("line ten", "line TEN")),
        [],
        3,
        ("change-line-ten.patch", "VERSIONS.lock"),
    ),
    "no trailers": (_repinned(lambda text: text.replace("Origin: toy\n", "")), [], 4, ("no Origin", "by sha256")),
    "no notice of change": (
        _repinned(lambda text: text.replace("changed by vllm-ndt", "changed by me")),
        [],
        4,
        ("4b",),
    ),
    "native patch": (_repinned(lambda text: text.replace("Layer: python", "Layer: native")), [], 4, ("native",)),
    "test does not exist": (
        _repinned(lambda text: text.replace("::test_ten", "::test_eleven")),
        [],
        4,
        ("test_eleven",),
    ),
    "test outside tests": (_repinned(lambda text: text.replace("tests/test_toy.py", "build.py")), [], 4, ("build.py",)),
    "test's file is gone": (_without("tests/test_toy.py"), [], 4, ("test_toy.py",)),
    "patch not in the series": (_series("# none\n"), [], 4, ("change-line-ten.patch not named",)),
    "series names no file": (
        _series("change-line-ten.patch\nchange-line-nine.patch\n"),
        [],
        4,
        ("change-line-nine.patch",),
    ),
    "series not in UTF-8": (_not_utf8, [], 4, ("series", "UTF-8")),
    "series names it twice": (_series("change-line-ten.patch\nchange-line-ten.patch\n"), [], 4, ("twice",)),
    "series names a path": (_series("change-line-ten.patch\n/etc/x-y.patch\n"), [], 4, ("/etc/x-y.patch",)),
    "no series": (_without("patches/0.27.1/series"), [], 4, ("series",)),
    "patch is gone": (_without("patches/0.27.1/change-line-ten.patch"), [], 4, ("change-line-ten.patch",)),
    "overlay on an upstream file": (_file("overlay/vllm/cli.py", ""), [], 4, ("overlay/vllm/cli.py",)),
    "overlay in upstream's package": (_file("overlay/vllm/new.py", ""), [], 4, ("overlay/vllm/new.py",)),
    "overlay in upstream's dist-info": (_file("overlay/vllm-0.27.1.dist-info/METADATA", ""), [], 4, ("overlay/",)),
    "link in the overlay": (_linked_overlay, [], 4, ("overlay/vllm_ndt/link.py",)),
    "overlay changed": (_file("overlay/vllm_ndt/cli.py", "# edited\n"), [], 3, ("vllm_ndt/cli.py", "VERSIONS.lock")),
    "overlay file more": (_file("overlay/vllm_ndt/more.py", ""), [], 3, ("vllm_ndt/more.py", "VERSIONS.lock")),
    "overlay file less": (_without("overlay/vllm_ndt/cli.py"), [], 3, ("vllm_ndt/cli.py",)),
    "an image": (lambda toy: None, ["--image", "yes"], 5, ("--image no",)),
    **{
        f"SOURCE_DATE_EPOCH={value[:20]}": (
            lambda toy, value=value: {"SOURCE_DATE_EPOCH": value},
            [],
            2,
            ("SOURCE_DATE_EPOCH", value),
        )
        for value in (
            "0",
            "315532799",
            "4354819200",
            "1667997441000",
            "1.7e9",
            "9" * 5000,
            "-1",
            " 1700000000",
            "\u0661",
        )
    },
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(toy: Toy, name: str) -> None:
    prepare, arguments, status, words = BAD[name]
    environment = prepare(toy)
    assert_one_line(toy.run(*arguments, environment=environment), status, *words)
    assert leftovers(toy.dist) == []
    assert not list(toy.cache.glob("sha256/*/.*"))
    assert not list(toy.cache.glob("sha256/*.download"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f'file = "{WHEEL}"', 'file = "/etc/passwd"'),
        (f'file = "{WHEEL}"', f'file = "../../{WHEEL}"'),
        ('file = "toy.txt"', 'file = "../../../etc/passwd"'),
        ('label = "ndt.1"', 'label = "../x"'),
        ('sha256 = "', 'sha256 = "../'),
        ("source_date_epoch = 1786406401", 'source_date_epoch = "x"'),
        ("source_date_epoch = 1786406401", "source_date_epoch = 99999999999999999"),
        ("size = ", "size = -"),
    ],
)
def test_lock_with_a_foolish_value_is_refused(toy: Toy, old: str, new: str) -> None:
    """Names of the lock become paths, which must stay where they belong."""
    lock = toy.root / "VERSIONS.lock"
    assert old in lock.read_text()
    lock.write_text(lock.read_text().replace(old, new))
    before = sorted(toy.root.parent.rglob("*"))
    assert_one_line(toy.run(), 3, "VERSIONS.lock")
    assert sorted(toy.root.parent.rglob("*")) == before


@pytest.mark.parametrize("pinned", ["", "0" * 64])
def test_pinned_hash_of_the_wheel_cannot_be_left_out(toy: Toy, pinned: str) -> None:
    lock = toy.root / "VERSIONS.lock"
    head, mark, tail = lock.read_text().rpartition('sha256 = "')
    lock.write_text(head + mark + pinned + tail[64:])
    assert_one_line(toy.run(), 3)
    assert leftovers(toy.dist) == []


def test_starts_in_pythons_safe_modes(toy: Toy) -> None:
    for flags in (["-I"], ["-P"] if sys.version_info >= (3, 11) else []):
        command = [sys.executable, *flags, str(toy.root / "build.py"), "--help"]
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_other_hash_is_said_with_both_hashes(toy: Toy) -> None:
    pinned = sha256_of(toy.index / WHEEL)
    _other_wheel(toy)
    done = toy.run()
    assert pinned in done.stderr
    assert sha256_of(toy.index / WHEEL) in done.stderr


def test_error_as_json(toy: Toy) -> None:
    done = toy.run("--json", "--vllm", "9.9.9")
    assert json.loads(done.stdout)["status"] == done.returncode == 2


def test_other_bytes_under_a_label_of_the_lock_are_refused(toy: Toy) -> None:
    """The inputs agree with the lock, and yet the wheel is another: the builder itself was changed."""
    sbom = toy.root / "builder" / "sbom.py"
    sbom.write_text(sbom.read_text().replace('"bomFormat": "CycloneDX"', '"bomFormat": "Other"'))
    assert_one_line(toy.run(), 3, BUILT, "already has this label", "--label")
    assert leftovers(toy.dist) == []


def test_patched_wheel_in_the_users_own_folder_is_not_taken_for_upstreams(built: Toy, toy: Toy) -> None:
    """pip prefers 0.27.1+ndt.1 for ==0.27.1."""
    shutil.copy(built.dist / BUILT, toy.index)
    assert toy.run().returncode == 0


def test_output_folder_that_cannot_be_written(toy: Toy) -> None:
    toy.dist.write_text("a file")
    assert_one_line(toy.run(), 1, str(toy.dist.name))
    assert_one_line(toy.run("--out", "/proc/here"), 1, "/proc/here")
    assert toy.dist.read_text() == "a file"


def test_full_disk_leaves_no_wheel(toy: Toy) -> None:
    """The kernel's limit on a file's size stands for a full disk: the write fails in the middle."""
    command = [sys.executable, str(toy.root / "build.py"), "--cache", str(toy.cache), "--out", str(toy.dist)]
    size = (toy.index / WHEEL).stat().st_size

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, size + 100))

    done = subprocess.run(command, env=toy.environment(), preexec_fn=limit, capture_output=True, text=True, check=False)
    assert_one_line(done, 1, "make room")
    assert leftovers(toy.dist) == []
    assert toy.run().returncode == 0


def test_sums_do_not_vouch_for_a_wheel_that_the_lock_no_longer_has(toy: Toy) -> None:
    other = BUILT.replace("x86_64", "aarch64")
    toy.dist.mkdir()
    (toy.dist / other).write_bytes(b"another build of the same label")
    (toy.dist / "SHA256SUMS").write_text(f"{sha256_of(toy.dist / other)}  {other}\n")
    assert toy.run().returncode == 0
    assert other not in (toy.dist / "SHA256SUMS").read_text()


def test_two_builds_at_once(toy: Toy) -> None:
    command = [sys.executable, str(toy.root / "build.py"), "--cache", str(toy.cache), "--out", str(toy.dist)]
    runs = [subprocess.Popen(command, env=toy.environment(), stderr=subprocess.PIPE, text=True) for _ in range(4)]
    ended = [(run.communicate()[1], run.returncode) for run in runs]
    assert all(status == 0 and "error" not in text for text, status in ended), ended
    assert leftovers(toy.dist) == [".lock", "SHA256SUMS", "constraints.txt", BUILT]
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=toy.dist, check=True, capture_output=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_killed_download_is_never_taken_for_a_whole_one(toy: Toy, number: int) -> None:
    """A server sends half of the wheel and waits; the build is killed; the next one fetches it whole."""
    data = (toy.index / WHEEL).read_bytes()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        page = toy.root / "page.html"
        page.write_text(f'<a href="{address}/{WHEEL}">{WHEEL}</a>')
        environment = toy.environment() | {"PIP_FIND_LINKS": str(page), "PIP_RETRIES": "0"}
        command = [sys.executable, str(toy.root / "build.py"), "--cache", str(toy.cache), "--out", str(toy.dist)]
        run = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.PIPE)
        server.settimeout(60)
        connection, _ = server.accept()
        with connection:
            connection.recv(65536)
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: {len(data)}\r\n\r\n"
            connection.sendall(head.encode() + data[: len(data) // 2])
            time.sleep(0.5)
            os.killpg(run.pid, number)
            run.communicate(timeout=60)
    assert run.returncode != 0
    assert not list(toy.cache.glob(f"sha256/*/{WHEEL}"))
    assert toy.run().returncode == 0
    assert sha256_of(next(toy.cache.glob(f"sha256/*/{WHEEL}"))) == sha256_of(toy.index / WHEEL)


def test_killed_writer_leaves_nothing_under_the_final_name(toy: Toy, built: Toy) -> None:
    """A part file of a dead process is removed by the next build; one that is being written is let alone."""
    toy.dist.mkdir()
    dead = toy.dist / f".{BUILT}.dead.part"
    dead.write_bytes((built.dist / BUILT).read_bytes()[:100])
    alive = toy.dist / f".{BUILT}.alive.part"
    with alive.open("wb") as file:
        file.write(b"half")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        assert toy.run().returncode == 0
        assert alive.exists()
    assert not dead.exists()
    assert (toy.dist / BUILT).read_bytes() == (built.dist / BUILT).read_bytes()


HOSTILE_CONFIG = """\
[core]
	autocrlf = true
	fileMode = false
	quotePath = true
	attributesFile = ATTRIBUTES
[apply]
	whitespace = fix
[diff]
	noprefix = true
	mnemonicPrefix = true
[commit]
	gpgSign = true
[init]
	templateDir = TEMPLATE
"""


def _git(folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> str:
    identity = ["-c", "user.name=toy", "-c", "user.email=toy@toy.invalid", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *identity, *arguments],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
        env=environment or dict(os.environ),
    ).stdout


def _state(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_users_git_and_the_repository_around_change_nothing(toy: Toy, built: Toy, tmp_path: Path) -> None:
    """In somebody's monorepo, cloned with hostile settings, run from a hook: same bytes, and their repository untouched."""
    (tmp_path / "attributes").write_text("* text eol=crlf\n")
    (tmp_path / "template" / "hooks").mkdir(parents=True)
    config = tmp_path / "gitconfig"
    config.write_text(
        HOSTILE_CONFIG.replace("ATTRIBUTES", f"{tmp_path}/attributes").replace("TEMPLATE", f"{tmp_path}/template")
    )
    hostile = os.environ | {"GIT_CONFIG_GLOBAL": str(config), "GIT_CONFIG_SYSTEM": str(config), "LANG": "de_DE.UTF-8"}
    _git(toy.root, "init", "-q")
    _git(toy.root, "add", ".")
    _git(toy.root, "commit", "-qm", "toy")
    outer = tmp_path / "monorepo"
    outer.mkdir()
    _git(outer, "init", "-q", environment=hostile)
    (outer / "theirs.txt").write_text("theirs\n")
    _git(outer, "add", "theirs.txt", environment=hostile)
    _git(outer, "commit", "-qm", "theirs", environment=hostile)
    _git(outer, "clone", "-q", str(toy.root), "vendor", environment=hostile)
    shutil.rmtree(outer / "vendor" / ".git")
    before = _state(outer / ".git")
    hook = {
        "GIT_DIR": str(outer / ".git"),
        "GIT_WORK_TREE": str(outer),
        "GIT_INDEX_FILE": str(outer / ".git" / "index"),
        "GIT_PREFIX": "vendor/",
    }
    environment = (
        toy.environment()
        | {key: value for key, value in hostile.items() if key.startswith("GIT_")}
        | hook
        | {"LANG": "de_DE.UTF-8"}
    )
    command = [
        sys.executable,
        str(outer / "vendor" / "build.py"),
        "--cache",
        str(toy.cache),
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, cwd=outer / "vendor", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / BUILT).read_bytes() == (built.dist / BUILT).read_bytes()
    assert _state(outer / ".git") == before


def test_patch_of_an_older_release_is_named_and_not_copied(toy: Toy) -> None:
    older = toy.patch.parents[1] / "0.26.0" / toy.patch.name
    older.parent.mkdir()
    toy.patch.rename(older)
    (toy.patch.parent / "series").write_text("../0.26.0/change-line-ten.patch\n")
    toy.pin()
    assert toy.run().returncode == 0
    assert PATCH in older.read_text()


def test_help_reads_well(toy: Toy) -> None:
    done = toy.run("--help")
    assert done.returncode == 0
    for option in (
        "--vllm",
        "--flavor",
        "--arch",
        "--out",
        "--cache",
        "--offline",
        "--image",
        "--json",
        "exit statuses",
        "verify",
    ):
        assert option in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert_usage = toy.run("--flavour")
    assert assert_usage.returncode == 2


def test_no_home_and_no_cache_is_one_line(toy: Toy) -> None:
    environment = {key: value for key, value in toy.environment().items() if key not in ("HOME", "XDG_CACHE_HOME")} | {
        "HOME": "/proc/nowhere"
    }
    done = subprocess.run(
        [sys.executable, str(toy.root / "build.py")], env=environment, capture_output=True, text=True, check=False
    )
    assert_one_line(done, 1, "/proc/nowhere")


def test_old_python_gets_a_line(toy: Toy) -> None:
    """build.py itself is read by old Pythons; where none is here, its syntax is checked against theirs."""
    import ast

    ast.parse((toy.root / "build.py").read_text(), feature_version=(3, 6))
    old = next(iter(sorted(Path.home().glob(".pyenv/versions/3.[6789].*/bin/python3"))), None)
    if old:
        done = toy.run(python=str(old))
        assert done.returncode == 2
        assert done.stderr.startswith("error: Python: expected 3.10 or newer")
