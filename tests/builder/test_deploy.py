# SPDX-License-Identifier: Apache-2.0
"""What deploy/ gives: specifications that start this build only, keep its limits, and are what their engines accept."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import compose_spec
import kubernetes_validate
import pytest
import yaml
from vllm_ndt import cli, encoder_metrics, health, nan_metrics, settings, stall_watch, watch

from builder import deploy
from builder.errors import InputProblem
from tests.builder.toy import ROOT

IMAGE = f"registry.example.com/vllm-ndt@sha256:{'1a' * 32}"
VERSION = "0.27.1+ndt.1"
MANIFEST = f"sha256:{'2b' * 32}"
MODEL = "/models/qwen"
STALL_SECONDS = settings.stall_seconds({})  # from the last progress to the first answer that is not 200
OFF = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NDT_USAGE_STATS": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
}
TMP, SHM = "/tmp", "/dev/shm"  # noqa: S108
KUBERNETES = ("1.28", "1.37")  # the oldest that the file promises, and the newest whose schema there is


def render(out: Path, folder: Path = ROOT / "deploy", **changes: str) -> list[Path]:
    values = {"image": IMAGE, "version": VERSION, "manifest": MANIFEST} | changes
    return deploy.render(folder, out, **values)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deploy")
    render(folder)
    return folder


@pytest.fixture(scope="module")
def compose(out: Path) -> dict[str, Any]:
    """The one service, with the variables of the caller put in."""
    services = yaml.safe_load(interpolated((out / "compose.yaml").read_text(), {"MODEL": MODEL}))["services"]
    assert list(services) == ["vllm"]
    return services["vllm"]


@pytest.fixture(scope="module")
def kubernetes(out: Path) -> dict[str, dict[str, Any]]:
    """The objects by kind."""
    return {found["kind"]: found for found in yaml.safe_load_all((out / "kubernetes.yaml").read_text())}


@pytest.fixture(scope="module")
def pod(kubernetes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return kubernetes["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def container(pod: dict[str, Any]) -> dict[str, Any]:
    assert len(pod["containers"]) == 1
    return pod["containers"][0]


def interpolated(text: str, environ: dict[str, str]) -> str:
    """Compose's ${NAME:-default} and ${NAME:?message}."""
    return re.sub(r"\$\{(\w+):([-?])([^}]*)\}", lambda found: environ.get(found[1]) or found[3], text)


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {row["name"]: row["value"] for row in container["env"] if "value" in row}


def seconds(text: str) -> float:
    return compose_spec.parse_duration(text)


def option(arguments: list[str], name: str) -> str:
    (found,) = [word.partition("=")[2] for word in arguments if word.startswith(f"--{name}=")]
    return found


def need(*tools: str) -> None:
    for tool in tools:
        if not shutil.which(tool):
            assert not os.environ.get("CI"), f"CI must have {tool}"
            pytest.skip(f"no {tool}")


def need_namespaces() -> None:
    need("unshare")
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        assert not os.environ.get("CI"), "CI must be able to make a network namespace"
        pytest.skip("no right to make a network namespace")


# Rendering


def test_each_file_comes_out_and_only_the_values_are_new(out: Path) -> None:
    names = {path.name for path in (ROOT / "deploy").iterdir()}
    assert names == {path.name for path in out.iterdir()} >= {*deploy.TEMPLATES, "egress.nft", "nvidia-driver.pref"}
    for name in names:
        text = (out / name).read_text()
        assert not re.search("@[A-Z_]+@", text), name
        back = text.replace(IMAGE, "@IMAGE@").replace(VERSION, "@VERSION@").replace(MANIFEST, "@MANIFEST@")
        assert back == (ROOT / "deploy" / name).read_text(), name


@pytest.mark.parametrize("name", deploy.TEMPLATES)
def test_a_template_is_yaml_too(name: str) -> None:
    assert all(yaml.safe_load_all((ROOT / "deploy" / name).read_text()))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("compose.yaml", lambda text: text.replace("@MANIFEST@", MANIFEST), "found @IMAGE@, @VERSION@;"),
        ("kubernetes.yaml", lambda text: text.replace("@IMAGE@", "vllm"), "found @MANIFEST@, @VERSION@;"),
        ("kubernetes.yaml", lambda text: text + "# @PORT@\n", "found @IMAGE@, @MANIFEST@, @PORT@, @VERSION@;"),
        ("egress.nft", lambda text: text + "# @VERSION@\n", "expected no placeholder, found @VERSION@;"),
        ("compose.yaml", lambda _: None, "expected a template, found no such file;"),
    ],
)
def test_a_damaged_template_is_refused_with_one_line(tmp_path: Path, name: str, change: Any, said: str) -> None:
    folder = shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    text = change((folder / name).read_text())
    (folder / name).unlink() if text is None else (folder / name).write_text(text)
    with pytest.raises(InputProblem) as raised:
        render(tmp_path / "out", folder)
    assert str(raised.value).startswith(f"{folder / name}: ")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"image": "registry.example.com/vllm-ndt:0.27.1-ndt.1"},
        {"image": f"x@{MANIFEST}\nprivileged: true"},
        {"version": "0.27.1"},
        {"manifest": "2b" * 32},
    ],
)
def test_a_value_of_another_form_is_refused(tmp_path: Path, changes: dict[str, str]) -> None:
    with pytest.raises(InputProblem, match="expected a"):
        render(tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


# What the engines accept


def test_compose_accepts_its_file(out: Path) -> None:
    text = interpolated((out / "compose.yaml").read_text(), {"MODEL": MODEL})
    compose_spec.PyCompose.from_yaml(text).validate()
    for old, new in [("read_only:", "readonly:"), ("30m", "30 parsecs"), ("127.0.0.1:8000:8000", "127.0.0.1:web:8000")]:
        assert old in text
        with pytest.raises(ValueError):
            compose_spec.PyCompose.from_yaml(text.replace(old, new))


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_accepts_its_objects(kubernetes: dict[str, dict[str, Any]], version: str) -> None:
    assert set(kubernetes) == {"ConfigMap", "Deployment", "Service", "NetworkPolicy"}
    for found in kubernetes.values():
        assert kubernetes_validate.validate(found, version, strict=True) == version
    spec = kubernetes["Service"]["spec"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(kubernetes["Service"] | {"spec": spec | {"prots": []}}, version, strict=True)


def test_podman_compose_reads_the_same_and_asks_for_the_model(out: Path, tmp_path: Path, compose: Any) -> None:
    (tmp_path / "podman").write_text("#!/bin/sh\necho podman version 4.3.1\n")  # it is asked for its version only
    (tmp_path / "podman").chmod(0o755)
    command = [sys.executable, "-m", "podman_compose", "--file", str(out / "compose.yaml"), "config"]
    environ = {key: value for key, value in os.environ.items() if key not in ("MODEL", "MODELS")}
    environ |= {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode
    assert "set MODEL to a folder" in done.stderr
    done = subprocess.run(command, env=environ | {"MODEL": MODEL}, capture_output=True, text=True, check=True)
    assert yaml.safe_load(done.stdout)["services"]["vllm"] == compose


# The rules


def test_both_start_this_build_and_no_other(compose: Any, container: Any) -> None:
    assert compose["image"] == container["image"] == IMAGE
    assert compose["entrypoint"] == container["command"] == ["vllm-ndt", "serve"]
    given, others = cli.parser().parse_known_args(["serve", *compose["command"]])
    assert (given.require, given.expect, given.exit_when_unhealthy) == (VERSION, MANIFEST, True)
    assert others[0] == MODEL
    given, rest = cli.parser().parse_known_args(["serve", *container["args"]])
    # one who restarts is enough: here it is the kubelet
    assert (given.require, given.expect, given.exit_when_unhealthy) == (VERSION, MANIFEST, False)
    assert rest == ["$(MODEL)", *others[1:]]
    assert str(health.address(rest)) == "http://127.0.0.1:8000/health"
    assert option(rest, "host") == "0.0.0.0"  # noqa: S104
    assert option(rest, "limit-mm-per-prompt") == '{"image": 4, "video": 1}'


def test_the_model_has_a_place_of_its_own(kubernetes: dict[str, dict[str, Any]], container: Any) -> None:
    (row,) = [row for row in container["env"] if "valueFrom" in row]
    assert row["name"] == "MODEL"
    reference = row["valueFrom"]["configMapKeyRef"]
    assert reference["name"] == kubernetes["ConfigMap"]["metadata"]["name"]
    assert kubernetes["ConfigMap"]["data"][reference["key"]].startswith("/models/")


def test_statistics_are_off_and_the_variables_known(compose: Any, container: Any) -> None:
    for environ in (compose["environment"], variables(container)):
        assert OFF.items() <= environ.items()
        known = {value for value in vars(settings).values() if isinstance(value, str)}
        assert {name for name in environ if name.startswith("VLLM_NDT_")} <= known
        settings.check(environ)
        assert settings.encoder_cache_tokens(environ) == settings.AUTO
    assert compose["environment"] == variables(container)


def test_compose_gives_the_container_little(compose: Any) -> None:
    assert not {"privileged", "cap_add", "devices", "network_mode", "pid", "env_file"} & set(compose)
    assert compose["user"].partition(":")[0] not in ("0", "root")
    assert compose["cap_drop"] == ["ALL"]
    assert compose["security_opt"] == ["no-new-privileges:true"]
    assert compose["read_only"] is True
    assert compose["ipc"] == "private"
    assert compose["shm_size"] == "16g"
    assert compose["volumes"] == ["/srv/models:/models:ro"]
    (tmp,) = compose["tmpfs"]
    path, _, options = tmp.partition(":")
    assert path == TMP
    assert {"size=16g", "exec"} <= set(options.split(","))
    assert compose["ports"] == ["127.0.0.1:8000:8000"]
    assert set(compose["logging"]["options"]) == {"max-size", "max-file"}
    (device,) = compose["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def test_compose_restarts_in_time(compose: Any) -> None:
    assert compose["init"] is True
    assert compose["restart"] == "unless-stopped"
    assert seconds(compose["stop_grace_period"]) > int(option(compose["command"], "shutdown-timeout"))
    check = compose["healthcheck"]
    assert check["test"] == ["CMD", "vllm-ndt", "health"]
    assert seconds(check["timeout"]) > health.TIMEOUT
    assert seconds(check["start_period"]) == watch.START == int(compose["environment"]["VLLM_ENGINE_READY_TIMEOUT_S"])
    assert STALL_SECONDS + watch.PERIOD * watch.FAILURES + watch.GRACE == 175  # as docs/deploying.md says


def test_kubernetes_gives_the_container_little(pod: Any, container: Any) -> None:
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(pod)
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["models"]["persistentVolumeClaim"]["readOnly"] is True
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert volumes["tmp"]["emptyDir"] == {"sizeLimit": "16Gi"}
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert {name: mount["mountPath"] for name, mount in mounts.items()} == {"models": "/models", "shm": SHM, "tmp": TMP}
    assert mounts["models"]["readOnly"] is True


def test_kubernetes_restarts_in_time(kubernetes: dict[str, dict[str, Any]], pod: Any, container: Any) -> None:
    assert kubernetes["Deployment"]["spec"]["replicas"] == 1
    assert kubernetes["Deployment"]["spec"]["strategy"] == {"type": "Recreate"}
    assert pod["shareProcessNamespace"] is True
    probes = {name: container[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}
    lasts = {name: probe["periodSeconds"] * probe["failureThreshold"] for name, probe in probes.items()}
    (port,) = [port["name"] for port in container["ports"] if port["containerPort"] == 8000]
    for probe in probes.values():
        assert probe["httpGet"] == {"path": "/health", "port": port}
        assert probe["timeoutSeconds"] == 5 <= probe["periodSeconds"]
        assert probe.get("successThreshold", 1) == 1
    start = int(variables(container)["VLLM_ENGINE_READY_TIMEOUT_S"])
    assert lasts["startup"] == start == 1800 < kubernetes["Deployment"]["spec"]["progressDeadlineSeconds"]
    assert STALL_SECONDS + lasts["liveness"] == 170  # as docs/deploying.md says
    assert STALL_SECONDS + lasts["liveness"] + probes["liveness"]["terminationGracePeriodSeconds"] <= 180
    assert lasts["readiness"] <= lasts["liveness"]
    assert pod["terminationGracePeriodSeconds"] > int(option(container["args"], "shutdown-timeout"))


def test_nothing_leaves_the_pod(kubernetes: dict[str, dict[str, Any]]) -> None:
    labels = kubernetes["Deployment"]["spec"]["template"]["metadata"]["labels"]
    policy = kubernetes["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == kubernetes["Service"]["spec"]["selector"] == labels
    assert kubernetes["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert policy["egress"] == []
    (row,) = policy["ingress"]
    assert row["ports"] == [{"protocol": "TCP", "port": 8000}]
    assert row["from"] == [{"podSelector": {"matchLabels": {"vllm-ndt-client": "true"}}}]


# The machine

EGRESS = """
import json, socket, subprocess, sys, time
rules, sh = sys.argv[1], lambda *words: subprocess.run(words, check=True, capture_output=True, text=True).stdout
sh("ip", "link", "set", "lo", "up")
outside = subprocess.Popen(["unshare", "--net", "sleep", "60"])
there = ("nsenter", "--net", "--target", str(outside.pid))
try:
    sh("ip", "link", "add", "here", "type", "veth", "peer", "name", "there")
    for _ in range(100):  # until it has its namespace
        if sh(*there, "readlink", "/proc/self/ns/net") != sh("readlink", "/proc/self/ns/net"):
            break
        time.sleep(0.05)
    sh("ip", "link", "set", "there", "netns", str(outside.pid))
    for prefix, name, address in [((), "here", "192.0.2.1/24"), (there, "there", "192.0.2.2/24")]:
        sh(*prefix, "ip", "address", "add", address, "dev", name)
        sh(*prefix, "ip", "link", "set", name, "up")
    client = "import socket; print(socket.create_connection(('192.0.2.1', 8000), 10).recv(9))"

    def state():
        with socket.create_server(("0.0.0.0", 8000)) as server:
            with socket.create_connection(("127.0.0.1", 8000), 10):
                server.accept()[0].close()
            asked = subprocess.Popen([*there, sys.executable, "-c", client], stdout=subprocess.PIPE, text=True)
            with server.accept()[0] as connection:
                connection.sendall(b"answer")
            answer = asked.communicate(timeout=20)[0].strip()
        said = []
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            with socket.socket(socket.AF_INET, kind) as leaving:
                leaving.settimeout(10)
                try:
                    leaving.connect(("192.0.2.2", 9))
                    leaving.send(b"x")
                    said.append("sent")
                except OSError as error:
                    said.append(type(error).__name__)
        return answer, said

    open_before = state()
    for _ in range(2):  # loading it again counts anew
        sh("nft", "-f", rules)
    stopped = state()
    counter = json.loads(sh("nft", "--json", "list", "counter", "inet", "vllm_egress", "stopped"))["nftables"]
    print(json.dumps([open_before, stopped, next(row["counter"]["packets"] for row in counter if "counter" in row)]))
finally:
    outside.kill()
"""


def test_egress_rules_stop_what_leaves_and_count_it(out: Path) -> None:
    need("nft", "ip", "nsenter")
    need_namespaces()
    command = ["unshare", "--net", sys.executable, "-c", EGRESS, str(out / "egress.nft")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    before, after, count = yaml.safe_load(done.stdout)
    assert before == ["b'answer'", ["ConnectionRefusedError", "sent"]]  # nothing listens there
    assert after[0] == "b'answer'"
    assert "sent" not in after[1]
    assert count == 2


PACKAGES = {
    "nvidia-driver": ["535.230.02-1", "580.105.08-1", "590.48.01-1", "605.10-1"],
    "libcuda1": ["580.105.08-1", "605.10-1"],
    "cuda-drivers": ["570.1-1", "580.105.08-1", "605.10-1"],
    "nvidia-driver-580": ["580.178.04-0ubuntu1"],
    "nvidia-driver-605": ["605.10-0ubuntu1"],
    "nvidia-open": ["581.1-1", "605.10-1"],
    "nvidia-container-toolkit": ["1.18.0-1"],
    "nvidia-cuda-toolkit": ["12.4.131-1", "13.0.1-1"],
}


def test_apt_keeps_the_driver_on_580(out: Path, tmp_path: Path) -> None:
    need("apt-get", "apt-cache")
    repository = tmp_path / "repository"
    repository.mkdir()
    with (repository / "Packages").open("w") as file:
        for name, versions in PACKAGES.items():
            for version in versions:
                file.write(f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: x <x@example.com>\n")
                file.write(f"Filename: ./x.deb\nSize: 1\nSHA256: {'0' * 64}\nDescription: x\n\n")
    for folder in (
        "etc/apt/apt.conf.d",
        "etc/apt/preferences.d",
        "var/lib/apt/lists/partial",
        "var/lib/dpkg",
        "var/cache/apt/archives/partial",
    ):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "var/lib/dpkg/status").touch()
    (tmp_path / "etc/apt/sources.list").write_text(f"deb [trusted=yes] copy:{repository} ./\n")
    shutil.copy(out / "nvidia-driver.pref", tmp_path / "etc/apt/preferences.d")
    config = tmp_path / "apt.conf"
    config.write_text(
        f'Dir "{tmp_path}"; Dir::State::status "{tmp_path}/var/lib/dpkg/status"; APT::Sandbox::User "";\n'
    )
    environ = os.environ | {"APT_CONFIG": str(config), "LC_ALL": "C"}
    for command in (["apt-get", "--quiet", "update"], ["apt-cache", "policy", *PACKAGES]):
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "preferences" not in done.stderr
        assert "W:" not in done.stderr
    found = dict(re.findall(r"^(\S+):\n  Installed: .*\n  Candidate: (\S+)", done.stdout, flags=re.MULTILINE))
    assert found == {
        "nvidia-driver": "580.105.08-1",
        "libcuda1": "580.105.08-1",
        "cuda-drivers": "580.105.08-1",
        "nvidia-driver-580": "580.178.04-0ubuntu1",
        "nvidia-driver-605": "(none)",
        "nvidia-open": "(none)",  # not even where there is no 580
        "nvidia-container-toolkit": "1.18.0-1",
        "nvidia-cuda-toolkit": "13.0.1-1",
    }


def test_each_alert_asks_for_a_metric_that_there_is(out: Path) -> None:
    groups = yaml.safe_load((out / "alerts.yaml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    known = {stall_watch.BUILD, *stall_watch.GAUGES}
    known |= {f"{nan_metrics.PREFIX}{name}_total" for name in nan_metrics.COUNTERS}
    known |= {f"{encoder_metrics.PREFIX}{name}_total" for name in encoder_metrics.COUNTERS}
    asked = {name for rule in rules for name in re.findall(r"vllm:\w+", rule["expr"])}
    assert len(asked) == 5
    assert asked <= known
    documented = (ROOT / "docs" / "operations.md").read_text()
    assert all(f"`{rule['alert']}`" in documented for rule in rules)
    assert all(rule["labels"]["severity"] in ("critical", "warning") for rule in rules)
