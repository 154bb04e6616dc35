# SPDX-License-Identifier: Apache-2.0
"""What builds and judges images, without one: refusals, how builders are run, and folders that pass for images."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from vllm_ndt.verify import EDITED, PATCHED

from builder import builders, image, imagefiles, lockfile, startup, store, verifyimage
from builder.atomic import scratch
from builder.bootstrap import last_line
from builder.errors import BuildError, ImageProblem, InputProblem, StepProblem, UsageProblem
from builder.inputs import Project
from builder.layer import STARTUP, Base, check_version
from tests.builder.toy import ROOT, Toy

# ---- names ----


@pytest.mark.parametrize("name", ["", " ", "--help", "docker://localhost/x:1", "a b", "x@sha256:12", "4001075a8074"])
def test_a_base_that_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(UsageProblem, match=r"--base: expected the name of an image, such as docker\.io/"):
        image.check_base(name)


def test_bases_that_are_names() -> None:
    for name in ("docker.io/vllm/vllm-openai:v0.27.1", "localhost:5000/a/b_c:1", f"x/y:1@sha256:{'0' * 64}", "stock"):
        image.check_base(name)


def test_an_empty_base_is_one_line(toy: Toy) -> None:
    done = toy.run("--base", "", "--image", "no")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --base: expected the name of an image")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("target", ["foo", "team/foo", "", "/foo", "localhost", "registry.example.com/a:1", "a.b/x@y"])
def test_a_target_without_a_registry_is_refused(target: str) -> None:
    with pytest.raises(UsageProblem, match="push: expected REGISTRY/NAME without a tag"):
        store.check_target(target)


def test_targets_with_a_registry() -> None:
    for target in ("localhost/a", "localhost:5000/a/b", "registry.example.com/team/vllm-ndt", "docker.io/me/x"):
        store.check_target(target)


@pytest.mark.parametrize("text", ["{}", "[]", "null", "{", '{"name": 1}'])
def test_a_record_that_is_none_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "image.json").write_text(text)
    with pytest.raises(InputProblem, match=r"image\.json: expected the record of an image, found .*; build one"):
        imagefiles.push(Project(ROOT), tmp_path, "localhost/x", insecure=False)


BASES = [("0.27.1+cpu", "cpu", True), ("0.27.1", "cuda", True), ("0.27.1+cu129", "cuda", True)]
BASES += [(found, "cuda", False) for found in ("0.27.1+cpu", "0.27.1+ndt.1", "0.27.1+rocm700", "0.27.2")]
BASES += [(found, "cpu", False) for found in ("0.27.1", "0.27.1+ndt.1.cpu", "0.27.1+cu129")]


@pytest.mark.parametrize(("found", "flavor", "good"), BASES)
def test_a_base_must_have_the_flavor(tmp_path: Path, found: str, flavor: str, good: bool) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "_version.py").write_text(f"__version__ = version = '{found}'\n")
    base = Base(tmp_path, f"vllm-{found}.dist-info", {})
    if good:
        check_version(base, "0.27.1", flavor)
    else:
        with pytest.raises(InputProblem) as problem:
            check_version(base, "0.27.1", flavor)
        assert f"expected stock vllm 0.27.1 for {flavor}, found {found} (" in str(problem.value)


# ---- builders ----


def test_the_last_words_of_a_tool() -> None:
    assert last_line("a\nERROR: b\nc\n") == "b"
    assert last_line("Error: 1 error occurred:\n\t* pulling x: refused\n\n\n") == "* pulling x: refused"
    assert last_line("") == "no output"


def test_our_own_line_is_not_explained() -> None:
    line = "/usr: expected vllm 0.27.1 in the image, found none; use upstream's image"
    with pytest.raises(StepProblem) as problem:
        builders.run(["sh", "-c", f'echo "error: {line}"; echo "Error: exit status 3"; exit 1'])
    assert str(problem.value) == line
    with pytest.raises(ImageProblem, match="sh -c: expected it to succeed, found no such thing; correct what it says"):
        builders.run(["sh", "-c", "echo no such thing; exit 1"])


RUN = """
import signal, sys
from builder import builders, cli
signal.signal(signal.SIGTERM, cli._terminated)
builders.PATIENCE = 1
builders.run(["sh", "-c", sys.argv[1]])
"""
TIDY = "trap 'echo tidy > tidied; exit 1' TERM; touch up; while :; do sleep 0.1; done"
DEAF = "trap '' TERM; touch up; while :; do sleep 0.1; done"


@pytest.mark.parametrize("script", [TIDY, DEAF])
def test_a_builder_is_told_to_end_and_waited_for(tmp_path: Path, script: str) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/overlay"}
    with subprocess.Popen([sys.executable, "-c", RUN, script], cwd=tmp_path, env=environment) as run:
        while not (tmp_path / "up").exists():
            time.sleep(0.05)
        run.terminate()
        assert run.wait(20) == 143
    assert (tmp_path / "tidied").exists() == (script == TIDY)


DOCKER = """#!/bin/sh
echo "$*" >> log
for word; do
  case $word in type=local,dest=*) echo sha256:1 > "${word#type=local,dest=}/manifest.digest" ;; esac
done
case "$1 $2" in
  "image inspect") echo '[{"Id": "sha256:a", "RepoDigests": ["x@sha256:b"], "Config": {"Labels": {"vllm-ndt.manifest": "LABEL"}}}]' ;;
esac
"""


@pytest.mark.parametrize("label", ["sha256:1", "sha256:2"])
def test_docker_is_asked_twice_and_the_label_must_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label: str
) -> None:
    """By a command that says what docker would say: no daemon runs here."""
    (tmp_path / "docker").write_text(DOCKER.replace("LABEL", label))
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    release = lockfile.read(ROOT / "VERSIONS.lock")["0.27.1"]

    def build() -> image.Image:
        base = image.Base("example.com/a:1", "")
        return image.build(release, "cuda", "x86_64", base, "docker", tmp_path / "image", "0", full=False)

    if label != "sha256:1":
        with pytest.raises(ImageProblem, match="expected manifest sha256:1 in its label, found sha256:2; build it"):
            build()
        return
    made = build()
    assert (made.digest, made.manifest, made.base) == ("sha256:b", "sha256:1", "sha256:b")
    calls = (tmp_path / "log").read_text().splitlines()
    assert sum("--build-arg ORIGIN=sha256:b " in call for call in calls) == 2
    (last,) = [call for call in calls if " --tag " in call]
    assert "--build-arg MANIFEST=sha256:1 --build-arg BASE_DIGEST=sha256:b" in last
    assert not list(tmp_path.glob(".image.*"))


def test_scratch_folders_go_also_those_of_killed_processes(tmp_path: Path) -> None:
    gone: list[Path] = []
    dead = tmp_path / ".image.00000000.part"
    dead.mkdir()
    (dead / "x").touch()
    with scratch(tmp_path / "image", gone.append) as mine:
        assert gone == [dead]
        assert not dead.exists()
        (mine / "y").touch()
        with scratch(tmp_path / "image", gone.append) as other:
            assert gone == [dead]  # mine is locked
        assert gone == [dead, other]
    with pytest.raises(ValueError, match="x"), scratch(tmp_path / "image", gone.append):
        raise ValueError("x")
    assert len(gone) == 4
    assert list(tmp_path.iterdir()) == []


# ---- verify --image ----

LIB = "usr/local/lib/python3.12"
SITE = f"{LIB}/dist-packages"
GOOD = store.Configuration({}, ["vllm-ndt", "serve"], {"PATH": "/usr/local/bin:/usr/bin"})


@pytest.fixture
def root(built: Toy, tmp_path: Path) -> Path:
    """A folder as an image has it: the toy wheel installed, a command, what Python runs at start."""
    root = tmp_path / "root"
    (root / SITE).mkdir(parents=True)
    wheel = next(built.dist.glob("*.whl"))
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(root / SITE)], check=True)
    script = b"#!/usr/bin/python3\n"
    write(root, "usr/local/bin/vllm-ndt", script.decode())
    digest = base64.urlsafe_b64encode(hashlib.sha256(script).digest()).decode().rstrip("=")
    with next((root / SITE).glob("vllm-*.dist-info")).joinpath("RECORD").open("a") as record:
        record.write(f"../../../bin/vllm-ndt,sha256={digest},{len(script)}\n")
    write(root, f"{SITE}/base.pth", "/closure\n")
    write(root, "etc/sitecustomize.py", "")
    (root / LIB / "sitecustomize.py").symlink_to("/etc/sitecustomize.py")
    write(root, str(STARTUP), startup.write(startup.files(root, startup.python_folders(root))))
    return root


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def judge(root: Path, **changes: Any) -> Any:
    configuration = store.Configuration(**{**vars(GOOD), **changes})
    return verifyimage._judge(root, configuration, False, "sha256:" + manifest(root))


def manifest(root: Path) -> str:
    return hashlib.sha256((root / SITE / "vllm_ndt/manifest.json").read_bytes()).hexdigest()


def test_an_image_as_it_was_built(root: Path) -> None:
    assert (judge(root).verdict, judge(root).findings) == (PATCHED, [])
    labelled = store.Configuration({"vllm-ndt.manifest": f"sha256:{manifest(root)}"}, GOOD.entrypoint, GOOD.environment)
    assert verifyimage._judge(root, labelled, False, None).findings == []


@pytest.mark.parametrize("label", [{}, {"vllm-ndt.manifest": "sha256:1"}, {"vllm-ndt.manifest": "sha256:" + "0" * 64}])
def test_a_label_must_name_the_manifest(root: Path, label: dict[str, str]) -> None:
    report = verifyimage._judge(root, store.Configuration(label, GOOD.entrypoint, GOOD.environment), False, None)
    assert report.verdict == EDITED
    assert "another build: its label" in report.findings[0]


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "arguments in the entrypoint": ({"entrypoint": ["vllm-ndt", "serve", "--port=1"]}, "its entrypoint: expected"),
    "no entrypoint": ({"entrypoint": []}, "its entrypoint: expected vllm-ndt serve, found none"),
    **{
        name: ({"environment": {**GOOD.environment, name: "/x"}}, f"its variable {name}: expected none, found '/x'")
        for name in verifyimage.ENVIRONMENT
    },
    "a path without it": ({"environment": {"PATH": "/usr/bin"}}, "the first vllm-ndt of its PATH: expected"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_an_image_sets_is_judged(root: Path, change: str) -> None:
    changes, words = CHANGES[change]
    report = judge(root, **changes)
    assert report.verdict == EDITED
    assert words in report.findings[0]


FILES = {
    "usr/local/bin/vllm-ndt": "bin/vllm-ndt: changed",
    f"{SITE}/new.pth": f"/{SITE}/new.pth: added, and Python runs it at start",
    f"{SITE}/base.pth": f"/{SITE}/base.pth: changed",
    f"{SITE}/usercustomize/__init__.py": f"/{SITE}/usercustomize: added",
    "etc/sitecustomize.py": f"/{LIB}/sitecustomize.py: changed",
    f"{LIB}/vllm/__init__.py": "another vllm: ",
    "opt/x/lib/python3.11/site-packages/vllm.py": "another vllm: ",
    str(STARTUP): "base.pth: added",
}


@pytest.mark.parametrize("name", FILES)
def test_what_lies_in_an_image_is_judged(root: Path, name: str) -> None:
    write(root, name, "# other\n")
    report = judge(root)
    assert report.verdict == EDITED
    assert any(FILES[name] in line for line in report.findings), report.findings


def test_a_command_before_it_is_found_through_links(root: Path) -> None:
    write(root, "opt/other/vllm-ndt", "")
    (root / "bin").symlink_to("/opt/other")
    report = judge(root, environment={"PATH": "/bin:/usr/local/bin"})
    assert report.findings[0].startswith("the first vllm-ndt of its PATH: expected ")
    (root / "bin").unlink()
    (root / "bin").symlink_to("usr/local/bin")
    assert judge(root, environment={"PATH": "/bin:/usr/local/bin"}).verdict == PATCHED


def test_the_list_of_what_runs_at_start_is_in_the_manifest(root: Path) -> None:
    path = root / SITE / "vllm_ndt/manifest.json"
    document = json.loads(path.read_text())
    document["upstream"]["startup"] = "0" * 64
    path.write_text(json.dumps(document))
    assert f"/{STARTUP}: changed" in judge(root).findings


def test_links_out_of_an_image_are_not_followed(tmp_path: Path) -> None:
    """An image must not be judged by this machine's files."""
    for place in ("outside/vllm", "root/usr/lib/python3.11/site-packages/vllm", "root/usr/lib/python3.12"):
        (tmp_path / place).mkdir(parents=True)
    root = tmp_path / "root"
    (root / "usr/lib/python3.12/dist-packages").symlink_to(tmp_path / "outside")
    folders = [folder for folder in startup.python_folders(root) if startup.holds(folder, "vllm")]
    assert [folder.relative_to(root).as_posix() for folder in folders] == ["usr/lib/python3.11/site-packages"]
    (root / "loop").symlink_to("/loop/x")
    for path in ("loop", "../../etc", "usr/lib/python3.12/dist-packages"):
        assert startup.inside(root, path).is_relative_to(root)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_somebody_who_cannot_mount_is_told_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifyimage, "find_builder", lambda _: "podman")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    report = verifyimage.check_image("x", None, deep=False, expect=None)
    assert report.status == 3
    assert "expected root, to mount the image, found user 1000; run it as root, or in `buildah" in report.findings[0]


def test_problems_have_documented_statuses() -> None:
    assert [kind.status for kind in (StepProblem, UsageProblem, InputProblem, BuildError)] == [5, 2, 3, 1]
