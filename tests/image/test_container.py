# SPDX-License-Identifier: Apache-2.0
"""The image as it runs: answers, health, signals, a server that hangs, an unfriendly user and file system."""

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engine.test_vision_serve import png
from tests.image.conftest import BASE, Store
from tests.image.containers import STRICT, Container, free_port, running


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(store: Store, built: dict[str, Any], deepstack_model: Path, port: int) -> Iterator[Container]:
    """The image with a vision model, as hostile as the specs make it."""
    flags = (
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--limit-mm-per-prompt",
        '{"image": 4, "video": 1}',
        "--api-key",
        "secret",
    )
    require = ("--require", built["version"], "--expect", built["manifest"])
    with running(store, built["name"], deepstack_model, *flags, *require, options=STRICT) as container:
        container.wait_until_healthy()
        yield container


@pytest.fixture(scope="module")
def client(server: Container, port: int) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret", max_retries=0, timeout=300)


def test_it_says_what_runs(server: Container, built: dict[str, Any]) -> None:
    line = f"vllm {built['version']}, verified: manifest {built['manifest']}, patches: register-ndt-settings, "
    assert any(text.startswith(line) for text in server.log.splitlines())


def test_it_answers_an_openai_client(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=4)
    assert answer.usage
    assert answer.usage.completion_tokens == 4
    assert client.completions.create(model="tiny", prompt="hello", max_tokens=4).choices[0].text
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}}},
    }
    made = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=4, response_format=schema
    )  # type: ignore[call-overload]
    assert made.choices[0].message.content.startswith("{")


def test_the_fifth_image_gets_400(client: openai.OpenAI) -> None:
    def ask(count: int) -> Any:
        content: Any = [{"type": "image_url", "image_url": {"url": png(64, 64, 200)}}] * count
        return client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": content}], max_tokens=2
        )

    assert ask(4).usage.completion_tokens == 2
    with pytest.raises(openai.BadRequestError, match="At most 4 image"):
        ask(5)


def test_the_images_own_health_check_passes(server: Container) -> None:
    assert server.store.run("podman", "healthcheck", "run", server.name, check=False).returncode == 0
    done = server.execute("vllm-ndt", "health")
    assert (done.returncode, done.stdout.strip()) == (0, "healthy")


def test_verify_needs_no_home_and_writes_nothing(server: Container) -> None:
    listing = ("sh", "-c", "find /tmp /dev/shm -printf '%p %s %T@\\n' | sort")  # what can be written
    before = server.execute(*listing).stdout
    assert "/vllm-ndt-1000800000" in before
    done = server.execute("vllm-ndt", "verify", "--json")
    assert json.loads(done.stdout)["verdict"] == "patched"
    assert server.execute(*listing).stdout == before


def test_caches_are_in_a_home_of_its_own(server: Container) -> None:
    environment = server.execute("sh", "-c", "ls -ld /tmp/vllm-ndt-1000800000").stdout
    assert re.match(r"drwx------ \d+ 1000800000 ", environment)
    assert "Permission denied" not in server.log
    assert "Read-only file system" not in server.log


# ---- signals ----


@pytest.mark.parametrize(
    ("moment", "init"),
    [
        ("verified: manifest", False),
        ("non-default args", False),
        ("Initializing a V1 LLM engine", False),
        ("Initializing a V1 LLM engine", True),
    ],
)
def test_sigterm_ends_a_server_in_time(
    store: Store, built: dict[str, Any], text_model: Path, moment: str, init: bool
) -> None:
    """At its first moment, while it imports, while the engine loads; as the container's first process, and with init."""
    flags = ("--host", "127.0.0.1", "--port", str(free_port()))
    options = (*STRICT, "--init") if init else STRICT
    with running(store, built["name"], text_model, *flags, options=options) as container:
        container.wait_for(moment)
        begin = time.monotonic()
        container.podman("stop", "--time", "60", container.name)
        assert time.monotonic() - begin < 50, container.log[-3000:]
        assert container.exit_code in (0, 143), container.log[-3000:]


def test_a_stream_ends_properly_when_it_is_told_to_stop(store: Store, built: dict[str, Any], text_model: Path) -> None:
    port = free_port()
    flags = ("--host", "127.0.0.1", "--port", str(port), "--shutdown-timeout", "30")
    with running(store, built["name"], text_model, *flags, options=(*STRICT, "--init")) as container:
        container.wait_until_healthy()
        talk = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120)
        stream = talk.completions.create(
            model="tiny", prompt="hello", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
        )
        pieces = [next(stream)]
        stop = subprocess.Popen(
            ["podman", "stop", "--time", "60", container.name],
            env=store.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        pieces += list(stream)
        assert stop.wait(90) == 0
        assert pieces[-1].choices[0].finish_reason == "length"
        assert container.exit_code in (0, 143)


# ---- refusals ----


def test_a_spec_on_the_stock_image_fails_at_once_and_names_the_command(store: Store) -> None:
    done = store.run(
        "podman",
        "run",
        "--rm",
        "--network=none",
        "--entrypoint",
        '["vllm-ndt", "serve"]',
        BASE,
        "--require=0.27.1+ndt.1",
        "/model",
        check=False,
    )
    assert done.returncode == 127
    assert "vllm-ndt" in done.stderr
    assert "not found" in done.stderr


REFUSALS = {
    "another version": (["--require", "0.27.1+ndt.7"], 1, "expected vllm 0.27.1+ndt.7 (--require), found "),
    "another build": (["--expect", "sha256:" + "0" * 64], 1, "another build: expected manifest sha256:0000"),
    "no digest": (["--expect", "latest"], 3, "expected a digest of 64 hexadecimal digits"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_another_build_is_refused(store: Store, built: dict[str, Any], kind: str) -> None:
    words, status, text = REFUSALS[kind]
    done = store.run("podman", "run", "--rm", "--network=none", *STRICT, built["name"], "/model", *words, check=False)
    assert done.returncode == status, done.stderr
    assert "not started" in done.stderr
    assert text in done.stderr


def test_an_edited_file_is_refused(store: Store, built: dict[str, Any], tmp_path: Path) -> None:
    """As a volume may put one there."""
    (tmp_path / "envs.py").write_text("")
    volume = f"--volume={tmp_path}/envs.py:/usr/local/lib/python3.11/dist-packages/vllm/envs.py:ro"
    done = store.run("podman", "run", "--rm", "--network=none", volume, built["name"], "/model", check=False)
    assert done.returncode == 1
    assert "vllm/envs.py: changed" in done.stderr


# ---- a server that is not well ends ----


def test_a_server_that_hangs_is_ended_and_started_anew(store: Store, built: dict[str, Any], text_model: Path) -> None:
    """With the flag of the compose file; its policy then starts the container again."""
    flags = ("--host", "127.0.0.1", "--port", str(free_port()), "--exit-when-unhealthy")
    with running(store, built["name"], text_model, *flags, options=("--init", "--restart=on-failure:1")) as container:
        container.wait_until_healthy()
        time.sleep(6)  # it has asked once
        stop = "for p in /proc/[0-9]*; do grep -q 'launch[.]py' $p/cmdline && kill -STOP ${p#/proc/}; done"
        container.execute("sh", "-c", stop)
        container.wait_for("not healthy, 3 times in a row")
        container.wait_for("verified: manifest", times=2)
        assert container.podman("inspect", container.name, "--format", "{{.RestartCount}}").split()[0] == "1"
        container.wait_until_healthy()
