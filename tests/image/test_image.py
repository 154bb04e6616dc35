# SPDX-License-Identifier: Apache-2.0
"""The image that build.py makes: what is in it, that it is always the same, what it refuses, and where it goes."""

import gzip
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from builder import builders, image
from builder.atomic import locked
from builder.errors import ImageProblem
from builder.lockfile import Release
from tests.image.conftest import BASE, EPOCH, ROOT, Store

SITE = "/usr/local/lib/python3.11/dist-packages"


def test_two_builds_at_the_same_time_do_not_mix(store: Store, built: dict[str, Any], tmp_path: Path) -> None:
    """One gives the digest that `built` has: in another folder, with another umask, by another builder."""
    other = store.base("localhost/other:1", tmp_path, f"FROM {BASE}\nLABEL other=1\n")
    before = store.left()
    common = [sys.executable, "build.py", "--flavor", "cpu", "--image", "yes", "--json", "--cache", str(store.cache)]
    ways = (["--base", BASE, "--builder", "podman"], ["--base", other, "--builder", "buildah"])
    with locked(store.folder / ".build.lock"):
        runs = [
            subprocess.Popen(
                [*common, *way, "--out", str(tmp_path / str(number))],
                env=store.environment,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
                umask=0o077,
            )
            for number, way in enumerate(ways)
        ]
        found = [json.loads(run.communicate()[0])["image"] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert (found[0]["digest"], found[0]["manifest"]) == (built["digest"], built["manifest"])
    assert found[1]["manifest"] != built["manifest"]
    for one, base in zip(found, (BASE, other), strict=True):
        config = json.loads(store.run("podman", "image", "inspect", one["reference"]).stdout)[0]["Config"]
        assert config["Labels"]["vllm-ndt.manifest"] == one["manifest"]
        assert config["Labels"]["org.opencontainers.image.base.name"] == base
    assert store.left() == before


def test_what_the_image_sets(store: Store, built: dict[str, Any], release: Release) -> None:
    found = json.loads(store.run("podman", "image", "inspect", built["name"]).stdout)[0]
    labels, config = found["Config"]["Labels"], found["Config"]
    base = json.loads(store.run("podman", "image", "inspect", BASE).stdout)[0]["Digest"]
    assert labels["org.opencontainers.image.version"] == built["version"] == f"0.27.1+{release.label}.cpu"
    assert labels["org.opencontainers.image.base.name"] == BASE
    assert labels["org.opencontainers.image.base.digest"] == built["base"] == base
    assert labels["vllm-ndt.manifest"] == built["manifest"]
    assert labels["vllm-ndt.patches"].split() == [row.file.removesuffix(".patch") for row in release.patch]
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", labels["vllm-ndt.source"])
    assert config["Entrypoint"] == ["vllm-ndt", "serve"]
    environment = dict(entry.split("=", 1) for entry in config["Env"])
    off = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_NDT_USAGE_STATS": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    assert environment.items() >= (off | {"VLLM_CONFIG_ROOT": "/etc/vllm"}).items()
    assert found["Healthcheck"]["Test"] == ["CMD", "vllm-ndt", "health"]
    assert found["Healthcheck"]["StartPeriod"] == 1800 * 10**9
    done = store.inside(
        built["name"],
        "sh",
        "-c",
        "ls /etc/vllm; py-spy --version",
    )
    assert done.stdout.split() == ["do_not_track", "py-spy", release.packages["py-spy"]]


def test_the_layer_holds_what_changed_and_is_small(
    store: Store, built: dict[str, Any], release: Release, tmp_path: Path
) -> None:
    store.run("buildah", "push", "--disable-compression", built["name"], f"dir:{tmp_path}")
    layers = json.loads((tmp_path / "manifest.json").read_text())["layers"]
    base = json.loads(store.run("podman", "image", "inspect", BASE).stdout)[0]["RootFS"]["Layers"]
    first, *others = [tmp_path / layer["digest"].removeprefix("sha256:") for layer in layers[len(base) :]]
    assert len(others) == 1
    assert len(gzip.compress(first.read_bytes())) < 1_000_000
    with tarfile.open(first) as layer:
        names = {member.name.lstrip("./") for member in layer if not member.isdir()}
    inside = {name.removeprefix(f"{SITE[1:]}/") for name in names}
    changed = {row.path for row in release.changed}
    assert inside >= changed | {"vllm/_version.py", "vllm_ndt/manifest.json"}
    # whiteouts of old bytecode and of the old dist-info folder, and what is made anew
    rest = {name for name in inside - changed if not re.search(r"(^|/)\.wh\.|^vllm-[^/]*\.dist-info/", name)}
    assert rest == {
        "vllm/_version.py",
        "vllm_ndt/manifest.json",
        "usr/local/bin/vllm-ndt",
        "usr/share/vllm-ndt/manifest.digest",
        "usr/share/vllm-ndt/startup",
        "etc/vllm/do_not_track",
    }


def test_the_layers_manifest_lists_the_base(store: Store, built: dict[str, Any], tmp_path: Path) -> None:
    done = store.inside(
        built["name"],
        "vllm-ndt",
        "verify",
        "--deep",
        "--json",
        "--expect",
        built["manifest"],
    )
    assert json.loads(done.stdout)["verdict"] == "patched"
    text = store.inside(
        built["name"],
        "cat",
        f"{SITE}/vllm_ndt/manifest.json",
    ).stdout
    assert json.loads(text)["upstream"]["image"] == built["base"]  # the same whatever the base is called
    text = store.inside(
        built["name"],
        "sh",
        "-c",
        f"ls -d {SITE}/vllm-*",
    ).stdout
    assert text.split() == [f"{SITE}/vllm-{built['version']}.dist-info"]


# ---- verify --image ----


def verify(store: Store, name: str, *words: str) -> tuple[int, str]:
    command = [sys.executable, "build.py", "verify", "--image", name, "--cache", str(store.cache), *words]
    done = store.run(*command, check=False)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


@pytest.mark.parametrize("builder", ["buildah", "podman"])
def test_verify_says_from_outside_what_an_image_is(store: Store, built: dict[str, Any], builder: str) -> None:
    containers = store.run("buildah", "containers", "--all", "--quiet").stdout
    status, text = verify(store, built["name"], "--builder", builder, "--expect", built["manifest"])
    assert status == 0
    assert text.startswith(f"patched: {built['name']}, vllm {built['version']}, manifest {built['manifest']}")
    status, text = verify(store, BASE, "--builder", builder)
    assert status == 2
    assert text.startswith(f"rolled back: {BASE}")
    status, text = verify(store, "localhost/none", "--builder", builder)
    assert status == 3
    assert text.startswith("could not check: localhost/none")
    status, text = verify(store, built["name"], "--builder", builder, "--expect", "0" * 64)
    assert status == 1
    assert "another build" in text
    assert store.run("buildah", "containers", "--all", "--quiet").stdout == containers


EDITS = {
    "a file": (f"RUN echo '# edited' >> {SITE}/vllm/envs.py", 1, "vllm/envs.py: changed"),
    "a label": ("LABEL vllm-ndt.manifest=sha256:" + "0" * 64, 1, "another build"),
    "how it starts": (
        'ENTRYPOINT ["vllm-ndt", "serve", "--require", "9"]\n'
        f"RUN echo '# mine' >> /usr/local/bin/vllm-ndt && mkdir -p /opt/b {SITE[:-14]}/site-packages && "
        f"cp /usr/local/bin/vllm-ndt /opt/b && touch /usr/lib/python3.11/vllm.py {SITE}/usercustomize.py && "
        f"echo /elsewhere > {SITE}/a.pth && echo >> {SITE}/closure.pth\n"
        "ENV PYTHONPATH=/mine LD_PRELOAD=x PYTHONPYCACHEPREFIX=/pc PATH=/opt/b:/usr/local/bin:/usr/bin:/bin",
        1,
        (
            "its entrypoint: expected vllm-ndt serve, found vllm-ndt serve --require 9",
            "its variable PYTHONPATH: expected none, found '/mine'",
            "its variable LD_PRELOAD:",
            "its variable PYTHONPYCACHEPREFIX:",
            "another vllm: /usr/lib/python3.11",
            "/usr/local/bin/vllm-ndt: changed",
            "the first vllm-ndt of its PATH: expected /usr/local/bin/vllm-ndt, found /opt/b/vllm-ndt",
            f"{SITE}/usercustomize.py: added, and Python runs it at start",
            f"{SITE}/a.pth: added",
            f"{SITE}/closure.pth: changed",
        ),
    ),
    "a stock image's label": ("LABEL vllm-ndt.manifest=sha256:1", 2, "rolled back"),
    "the manifest": (f"RUN rm {SITE}/vllm_ndt/manifest.json", 1, "manifest.json: missing"),
    "all of it": (f"RUN rm -r {SITE}/vllm", 3, "expected one vllm in it, found none"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_verify_finds_an_edited_image(store: Store, built: dict[str, Any], tmp_path: Path, edit: str) -> None:
    line, expected, words = EDITS[edit]
    base = BASE if "stock" in edit else built["name"]
    name = store.base(f"localhost/edited:{list(EDITS).index(edit)}", tmp_path, f"FROM {base}\n{line}\n")
    status, text = verify(store, name)
    assert status == expected, text
    for word in (words,) if isinstance(words, str) else words:
        assert word in text


# ---- bases ----

BAD_BASES = {
    "a file to replace": (f"RUN echo '# mine' >> {SITE}/vllm/envs.py", "vllm/envs.py: changed"),
    "another file": (f"RUN echo '# mine' >> {SITE}/vllm/sampling_params.py", "vllm/sampling_params.py: changed"),
    "a file less": (f"RUN rm {SITE}/vllm/sampling_params.py", "vllm/sampling_params.py: missing"),
    "a file more": (f"RUN touch {SITE}/vllm/sitecustomize.py", "vllm/sitecustomize.py: added"),
    "bytecode without a source": (f"RUN touch {SITE}/vllm/more.pyc", "vllm/more.pyc: added"),
    "a hash in RECORD too": (
        f"RUN cd {SITE} && echo '# mine' >> vllm/envs.py && "
        'python3 -c \'import base64,hashlib,re;p="vllm-0.27.1+cpu.dist-info/RECORD";d=open("vllm/envs.py","rb").read();'
        'h=base64.urlsafe_b64encode(hashlib.sha256(d).digest()).decode().rstrip("=");'
        't=re.sub(r"vllm/envs.py,.*",f"vllm/envs.py,sha256={h},{len(d)}",open(p).read());open(p,"w").write(t)\'',
        "vllm/envs.py: expected 567c99293678",
    ),
    "another release": (
        f"RUN cd {SITE} && mv vllm-0.27.1+cpu.dist-info vllm-0.27.2+cpu.dist-info && "
        "sed -i s/vllm-0.27.1+cpu/vllm-0.27.2+cpu/ vllm-0.27.2+cpu.dist-info/RECORD",
        "expected stock vllm 0.27.1 for cpu, found 0.27.2+cpu",
    ),
    "no vllm": (f"RUN rm -r {SITE}/vllm", "expected vllm 0.27.1 in the image, found none"),
}


@pytest.mark.parametrize("kind", BAD_BASES)
def test_a_base_that_is_not_the_release_is_refused(store: Store, tmp_path: Path, kind: str) -> None:
    line, word = BAD_BASES[kind]
    name = store.base(f"localhost/bad:{list(BAD_BASES).index(kind)}", tmp_path, f"FROM {BASE}\n{line}\n")
    done = store.build(tmp_path / "out", "--base", name, check=False)
    assert done.returncode == 5, done.stdout
    (error,) = done.stderr.strip().splitlines()
    assert word in error
    assert "by hand" not in error  # it says itself what to do
    assert {path.suffix for path in (tmp_path / "out").iterdir()} >= {".whl"}
    assert not (tmp_path / "out" / "image.json").exists()


def test_a_patched_image_is_no_base(store: Store, built: dict[str, Any], tmp_path: Path) -> None:
    done = store.build(tmp_path, "--base", built["name"], check=False)
    assert done.returncode == 5
    assert f"expected stock vllm 0.27.1 for cpu, found {built['version']}" in done.stderr


def test_bytecode_that_is_not_its_sources_is_removed(store: Store, tmp_path: Path) -> None:
    """Of a file that stays: what runs is what was verified."""
    cache = f"{SITE}/vllm/__pycache__/sampling_params.cpython-311.pyc"
    forge = (
        f"RUN cd {SITE}/vllm && cp sampling_params.py /tmp/s && echo 'import os' >> sampling_params.py && "
        'python3 -m py_compile sampling_params.py && python3 -c "import py_compile as p;'
        "p.compile('sampling_params.py',invalidation_mode=p.PycInvalidationMode.UNCHECKED_HASH)\" && "
        "cp /tmp/s sampling_params.py && rm /tmp/s"
    )
    name = store.base("localhost/forged:1", tmp_path, f"FROM {BASE}\n{forge}\n")
    assert store.inside(name, "ls", cache, check=False).returncode == 0
    done = json.loads(store.build(tmp_path / "out", "--base", name).stdout)["image"]
    assert store.inside(done["name"], "ls", cache, check=False).returncode != 0
    assert verify(store, done["name"], "--deep")[0] == 0


# ---- builds that end early ----


@pytest.mark.parametrize("builder", ["buildah", "podman"])
def test_a_build_that_is_told_to_end_leaves_nothing(store: Store, tmp_path: Path, builder: str) -> None:
    before = store.left()
    with store.building(tmp_path / "o", "--base", BASE, "--builder", builder) as run:
        run.terminate()
        assert run.wait(30) == 128 + signal.SIGTERM
        assert store.left() == before
        assert not list(tmp_path.glob("o/.image.*.part"))


def test_what_a_killed_build_left_goes_with_the_next(store: Store, tmp_path: Path) -> None:
    """A build that fails, and leaves nothing of its own either."""
    bad = store.base("localhost/bad:9", tmp_path, f"FROM {BASE}\nRUN rm {SITE}/vllm/envs.py\n")
    before = store.left()
    with store.building(tmp_path / "o", "--base", BASE) as run:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        assert store.left() != before
        assert list(tmp_path.glob("o/.image.*.part"))
        done = store.build(tmp_path / "o", "--base", bad, check=False, locking=False)
    assert "vllm/envs.py: missing" in done.stderr
    assert store.left() == before
    assert not list(tmp_path.glob("o/.image.*.part"))


# ---- publishing ----


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    if not shutil.which("docker-registry"):
        assert not os.environ.get("CI"), "CI must have docker-registry"
        pytest.skip("docker-registry is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(tmp_path / "r")}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    (tmp_path / "registry.yml").write_text(yaml.safe_dump(config))
    with (tmp_path / "registry.log").open("w") as log:
        run = subprocess.Popen(["docker-registry", "serve", str(tmp_path / "registry.yml")], stdout=log, stderr=log)
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        run.kill()
        run.wait()


def test_push_by_digest_and_pull_what_the_specs_name(
    store: Store, built: dict[str, Any], registry: str, tmp_path: Path
) -> None:
    """Of an image without the base's 700 MB: what is pushed is the same to a registry."""
    out = tmp_path / "out"
    shutil.copytree(built["out"], out, ignore=shutil.ignore_patterns("*.whl"))
    name = store.base(
        "localhost/small:1",
        tmp_path,
        f"FROM scratch\nCOPY --from={built['name']} /usr/share/vllm-ndt /usr/share/vllm-ndt\n",
    )
    record = json.loads((out / "image.json").read_text()) | {"name": name}
    (out / "image.json").write_text(json.dumps(record))
    command = [
        sys.executable,
        "build.py",
        "push",
        f"{registry}/team/vllm-ndt",
        "--out",
        str(out),
        "--cache",
        str(store.cache),
        "--json",
    ]
    other = store.run(*command, "--insecure", check=False)
    assert other.returncode == 5
    assert f"{name}: expected {built['digest']}, as it was built, found sha256:" in other.stderr
    found = store.run("podman", "image", "inspect", name, "--format", "{{.Digest}}").stdout.strip()
    (out / "image.json").write_text(json.dumps(record | {"digest": found}))
    refused = store.run(*command, check=False)
    assert refused.returncode == 5
    assert "HTTP response to HTTPS client" in refused.stderr
    reference = json.loads(store.run(*command, "--insecure").stdout)["image"]
    assert re.fullmatch(rf"{registry}/team/vllm-ndt@sha256:[0-9a-f]{{64}}", reference)
    for spec in ("compose.yaml", "kubernetes.yaml"):
        assert reference in (out / "deploy" / spec).read_text()
    statement = json.loads(next(out.glob("*.intoto.json")).read_text())
    assert statement["subject"] == [
        {"name": f"{registry}/team/vllm-ndt", "digest": {"sha256": reference.rpartition(":")[2]}}
    ]
    pulled = store.run("podman", "pull", "--quiet", "--tls-verify=false", reference).stdout.strip()
    assert (
        store.run("podman", "image", "inspect", pulled, "--format", "{{.Id}}").stdout
        == store.run("podman", "image", "inspect", name, "--format", "{{.Id}}").stdout
    )


def test_push_without_an_image_is_one_line(store: Store, tmp_path: Path) -> None:
    done = store.run(
        sys.executable,
        "build.py",
        "push",
        "127.0.0.1:1/x",
        "--out",
        str(tmp_path),
        "--cache",
        str(store.cache),
        check=False,
    )
    assert done.returncode == 3
    assert "build one: build.py --image yes" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_files_beside_the_image(store: Store, built: dict[str, Any], release: Release) -> None:
    statement = json.loads((built["out"] / f"vllm-ndt-image-{built['version']}.intoto.json").read_text())
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["subject"][0]["digest"] == {"sha256": built["digest"].removeprefix("sha256:")}
    definition = statement["predicate"]["buildDefinition"]
    digests = {next(iter(row["digest"].values())) for row in definition["resolvedDependencies"]}
    assert digests >= {built["base"].removeprefix("sha256:"), *(row.sha256 for row in release.patch)}
    bill = json.loads((built["out"] / f"vllm-ndt-image-{built['version']}.cdx.json").read_text())
    assert bill["metadata"]["component"]["version"] == built["digest"]
    names = [component["name"] for component in bill["components"]]
    assert names[:2] == ["vllm", "py-spy"]
    assert "torch" in names
    for spec in ("compose.yaml", "kubernetes.yaml"):
        text = (built["out"] / "deploy" / spec).read_text()
        assert all(word in text for word in (built["digest"], built["manifest"], f"--require={built['version']}"))


# ---- builders ----


def test_the_command_for_docker(tmp_path: Path) -> None:
    """By its arguments alone: no daemon runs here."""
    words = image.command("docker", tmp_path, {"BASE_IMAGE": "b@sha256:0"}, int(EPOCH), ["--tag", "t"])
    assert words[:3] == ["docker", "buildx", "build"]
    assert words[-1] == str(tmp_path)
    joined = " ".join(words)
    for part in (
        "--network none",
        "--build-arg BASE_IMAGE=b@sha256:0",
        "--output type=docker,rewrite-timestamp=true",
        "--provenance=false",
        f"--file {tmp_path}/Dockerfile",
        "--tag t",
    ):
        assert part in joined
    words = image.command("docker", tmp_path, {}, int(EPOCH), ["--target", "digest", "--output", "type=local,dest=x"])
    assert "type=docker" not in " ".join(words)


def test_a_docker_without_daemon_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, status in (("docker", 1), ("buildah", 1), ("podman", 0)):
        (tmp_path / name).write_text(f"#!/bin/sh\necho 'cannot connect' >&2\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert builders.find_builder(None) == "podman"
    with pytest.raises(ImageProblem, match=r"docker buildx version.*cannot connect; install"):
        builders.find_builder("docker")


def test_the_dockerfile_fetches_nothing() -> None:
    """No frontend, no file, no step that buildah 1.28 refuses."""
    text = (ROOT / "Dockerfile").read_text()
    assert "# syntax=" not in text.replace("No `# syntax=`", "")
    assert not re.search(r"<<|--link|RUN --network|https?://|apt-get|pip install", text)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("localhost:5000/vllm@sha256:aa", "localhost:5000/vllm@sha256:aa"),
        ("registry.example.com/a/b:1@sha256:aa", "registry.example.com/a/b@sha256:aa"),
        ("a/b:1", "a/b:1"),
        ("localhost:5000/b", "localhost:5000/b"),
    ],
)
def test_a_base_is_pulled_by_its_digest(name: str, wanted: str) -> None:
    assert image.Base(name, name.partition("@")[2]).reference == wanted
