# SPDX-License-Identifier: Apache-2.0
"""The installed CPU wheel says over HTTP that its engine stands still: processes that are stopped, and none that work."""

import asyncio
import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from tests.engine.serving import Server, serving
from tests.engine.test_vision_serve import ask as picture
from tests.engine.test_vision_serve import client_of

LIMIT = 6
LENGTH = 16_384
CLIENTS = 1000
# takes some ten seconds or more
TOKENS = 3000
# steps of 16 tokens, so that one prompt takes long and is never at rest
FLAGS = ("--max-model-len", str(LENGTH), "--max-num-seqs", "64", "--max-num-batched-tokens", "64")
SERVER = {"VLLM_NDT_STALL_SECONDS": str(LIMIT), "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}


@pytest.fixture(scope="module")
def server(patched: Path, text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tmp_path_factory.mktemp("long")
    for path in text_model.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LENGTH}))
    with serving(patched, model, tmp_path_factory.mktemp("stall"), *FLAGS, **SERVER) as served:
        yield served


def health(server: Server) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{server.address}/health", timeout=2) as reply:  # noqa: S310
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def gauge(server: Server, name: str, engine: int = 0) -> float:
    with urllib.request.urlopen(f"{server.address}/metrics", timeout=30) as reply:  # noqa: S310
        text = reply.read().decode()
    found = re.search(rf'^vllm:{name}{{engine="{engine}",[^}}]*}} (\S+)$', text, re.MULTILINE)
    assert found, name
    return float(found[1])


def ask(server: Server, prompt: str | list[int] = "hello", tokens: int = 5) -> int:
    """The tokens that an answer has."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    with httpx.Client(timeout=600) as client:
        answer = client.post(f"{server.address}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["completion_tokens"])


def processes(server: Server, title: str) -> list[int]:
    """The ids of the server's processes whose title begins so, such as VLLM::EngineCore."""
    commands = {int(path.name): _command(path) for path in Path("/proc").iterdir() if path.name.isdecimal()}
    port = server.address.rpartition(":")[2]
    session = next(os.getsid(pid) for pid, command in commands.items() if f"--port {port} " in command)
    found = [pid for pid, command in commands.items() if command.startswith(title) and os.getsid(pid) == session]
    assert found, title
    return found


def _command(process: Path) -> str:
    try:
        return process.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def until(condition: Callable[[], bool], seconds: float = 120) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.2)
    return False


@pytest.mark.parametrize("title", ["VLLM::EngineCore", "VLLM::Worker"])
def test_a_stopped_process_turns_health_and_it_turns_back(server: Server, title: str) -> None:
    log = len(server.log.read_text())
    (process,) = processes(server, title)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, server, "hello", TOKENS)
        assert until(lambda: gauge(server, "num_requests_running") == 1)
        # long enough for a report of it
        time.sleep(2.5)
        assert not answer.done()
        os.kill(process, signal.SIGSTOP)
        try:
            assert until(lambda: health(server)[0] == 503)
            status, text = health(server)
            assert (status, text.partition(":")[0]) == (503, "engine 0 stands still")
            assert until(lambda: gauge(server, "ndt_engine_stalled") == 1)
        finally:
            os.kill(process, signal.SIGCONT)
        assert answer.result() == TOKENS
    assert until(lambda: health(server) == (200, "") and gauge(server, "ndt_engine_stalled") == 0)
    assert until(lambda: "moves again" in server.log.read_text()[log:])
    text = server.log.read_text()[log:]
    (line,) = [line for line in text.splitlines() if "stands still" in line and "ERROR" in line]
    details = json.loads(line[line.index("{") :])
    assert (details["requests_here"], details["running"], details["waiting"]) == (1, 1, {})
    assert len(details["holding"]) == 1
    assert {"kv_cache_usage", "holding", "empty_steps", "gpus"} <= set(details)
    assert f"Stacks of process {process} ({title}, state T)" in text
    # of the core and its worker, by py-spy or by themselves once they run again
    for name in ("worker_busy_loop", "run_busy_loop"):
        assert until(lambda name=name: name in server.log.read_text()[log:]), name


def test_a_prefill_of_many_steps_is_no_stall(server: Server) -> None:
    """Longer than the limit in all, with each step far below it."""
    seen = set()
    began = time.monotonic()
    prompt = [11] * (LENGTH - 10)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answers = [pool.submit(ask, server, prompt, 1)]
        while not all(answer.done() for answer in answers):
            seen.add(health(server)[0])
            time.sleep(0.2)
            if answers[-1].done() and time.monotonic() - began < 3 * LIMIT:
                # another prompt, until it took long enough to tell
                prompt = [len(answers) + 11] * (LENGTH - 10)
                answers.append(pool.submit(ask, server, prompt, 1))
    assert [answer.result() for answer in answers] == [1] * len(answers)
    assert time.monotonic() - began > LIMIT
    assert seen == {200}


def test_idle_paused_and_asleep_are_no_stalls(server: Server) -> None:
    with httpx.Client(base_url=server.address, timeout=60) as client, concurrent.futures.ThreadPoolExecutor(1) as pool:
        time.sleep(LIMIT + 3)
        assert health(server) == (200, "")
        assert client.post("/pause", params={"mode": "keep"}).status_code == 200
        answer = pool.submit(ask, server)
        end = time.monotonic() + LIMIT + 4
        seen = set()
        while time.monotonic() < end:
            seen.add(health(server)[0])
            time.sleep(0.5)
        assert not answer.done()
        assert client.post("/resume").status_code == 200
        assert answer.result() == 5
        assert seen == {200}
    assert gauge(server, "ndt_stalled_requests") == 0


def test_many_streaming_clients_turn_nothing(server: Server) -> None:
    """Health is asked each second and must answer within two, while a thousand clients stream."""

    async def stream(client: httpx.AsyncClient) -> int:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "ignore_eos": True, "stream": True}
        events = 0
        async with client.stream("POST", f"{server.address}/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                events += line.startswith("data: {")
        return events

    async def run() -> list[int]:
        limits = httpx.Limits(max_connections=CLIENTS)
        async with httpx.AsyncClient(timeout=600, limits=limits) as client:
            return await asyncio.gather(*(stream(client) for _ in range(CLIENTS)))

    seen: list[Any] = []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        events = pool.submit(lambda: asyncio.run(run()))
        while not events.done():
            # in a process of its own: this one is as busy as the server
            seen.append(_probe(server))
            time.sleep(1)
        assert len(events.result()) == CLIENTS
        assert all(events.result())
    assert set(seen) == {"200"}


def _probe(server: Server) -> str:
    code = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=2).status)"
    done = subprocess.run(
        [sys.executable, "-c", code, f"{server.address}/health"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or done.stderr[-200:]


def test_one_line_names_version_and_manifest(server: Server) -> None:
    with urllib.request.urlopen(f"{server.address}/metrics", timeout=30) as reply:  # noqa: S310
        text = reply.read().decode()
    found = re.search(r'^vllm:ndt_build_info\{manifest="(sha256:[0-9a-f]{64})",version="([^"]+)"\} 1.0$', text, re.M)
    assert found
    assert found[1] in server.log.read_text() and found[2] in server.log.read_text()


# a scheduler that stops short of the end of a request's first image, which it holds, as stock does in a stall
STUCK = """
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

class Stuck(AsyncScheduler):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        progress = self.encoder_progress
        upstream, progress.end_step = progress._ask, lambda tokens: None

        def schedule_inputs(request, computed, wanted, budget):
            place = request.mm_features[0].mm_position
            end = place.offset + place.length - 1
            if computed >= end:
                return [], 0, budget, []
            return upstream(request, computed, min(wanted, end - computed), budget, 0)

        progress.schedule_inputs = schedule_inputs
"""


def test_an_engine_of_empty_steps_names_who_holds_what(patched: Path, deepstack_model: Path, tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    flags = ["--max-num-batched-tokens", "4096", "--max-model-len", "8192", "--scheduler-cls", "stuck.Stuck"]
    with serving(patched, deepstack_model, tmp_path, *flags, **SERVER, PYTHONPATH=str(tmp_path)) as stuck:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(picture, client_of(stuck), [at], timeout=30) for at in (1, 5)]
            assert until(lambda: health(stuck)[0] == 503, 25)
            for answer in answers:
                with pytest.raises(openai.APITimeoutError):
                    answer.result()
        assert until(lambda: "stands still" in stuck.log.read_text())
        line = next(line for line in stuck.log.read_text().splitlines() if "stands still" in line)
        details = json.loads(line[line.index("{") :])
        assert details["empty_steps"] > 100
        assert details["running"] == 2
        assert len(details["encoder_cache"]["holders"]) == 2
        assert {name.partition(" ")[0] for name in details["holding"]} == set(details["encoder_cache"]["holders"])
        assert 0 < details["encoder_cache"]["held"] < details["encoder_cache"]["size"]


def test_of_two_engines_the_stopped_one_is_named(patched: Path, text_model: Path, tmp_path: Path) -> None:
    # one API server, which then has requests at both: each judges by its own requests
    flags = ["--max-model-len", "4096", "--data-parallel-size", "2", "--api-server-count", "1"]
    with serving(patched, text_model, tmp_path, *flags, **SERVER | {"VLLM_CPU_KVCACHE_SPACE": "1"}) as two:
        (process,) = processes(two, "VLLM::EngineCore_DP1")
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            # so that no engine's first step, which may take long, is among those judged
            assert list(pool.map(ask, [two] * 4)) == [5] * 4
            os.kill(process, signal.SIGSTOP)
            try:
                answers = [pool.submit(ask, two) for _ in range(4)]
                assert until(lambda: health(two)[0] == 503)
                assert health(two)[1].startswith("engine 1 stands still")
                assert (gauge(two, "ndt_engine_stalled", 0), gauge(two, "ndt_engine_stalled", 1)) == (0, 1)
            finally:
                os.kill(process, signal.SIGCONT)
            assert [answer.result() for answer in answers] == [5] * 4
        assert until(lambda: health(two) == (200, ""))


def test_a_killed_worker_ends_the_server(server: Server) -> None:
    """The last test of this server."""
    (worker,) = processes(server, "VLLM::Worker")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, server, "hello", 5000)
        time.sleep(1)
        os.kill(worker, signal.SIGKILL)
        assert until(lambda: _gone_or(server, 503), 30)
        with pytest.raises((AssertionError, httpx.HTTPError)):
            answer.result()


def _gone_or(server: Server, status: int) -> bool:
    try:
        return health(server)[0] == status
    except OSError:
        return True
