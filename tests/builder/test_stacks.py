# SPDX-License-Identifier: Apache-2.0
"""The stacks of a process that stands still: its own handler prints them, and nobody is signalled who has none."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_ndt import stacks, stall_log

from tests.builder.toy import ROOT

BUSY = """
import sys, time
from vllm_ndt import stacks
{register}
def stands_here():
    print("ready", flush=True)
    time.sleep(600)
stands_here()
"""


@pytest.fixture
def no_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks.shutil, "which", lambda *_, **__: None)


def run(register: str, log: Path) -> Iterator[subprocess.Popen[str]]:
    with log.open("w") as file:
        code = BUSY.format(register=register)
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env={"PYTHONPATH": str(ROOT / "overlay")},
        )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture
def with_handler(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    yield from run("stacks.register()", tmp_path / "log")


@pytest.fixture
def without(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    yield from run("", tmp_path / "log")


def test_a_process_with_the_handler_prints_its_own(
    no_py_spy: None, with_handler: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert stacks.of_process(with_handler.pid) == "printed by itself on stderr (py-spy is not installed)"
    for _ in range(200):
        if "stands_here" in (tmp_path / "log").read_text():
            break
        time.sleep(0.05)
    assert "in stands_here" in (tmp_path / "log").read_text()
    assert with_handler.poll() is None


def test_a_process_without_it_is_left_alone(no_py_spy: None, without: subprocess.Popen[str]) -> None:
    assert stacks.of_process(without.pid) == "none (py-spy is not installed; no handler of signal SIGUSR2)"
    time.sleep(0.2)
    assert without.poll() is None


def test_a_process_that_is_gone_has_none(no_py_spy: None) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert stacks.of_process(gone.pid).startswith("none (")


@pytest.mark.parametrize(("words", "status"), [("Thread 1: stands_here", 0), ("Permission denied", 1)])
def test_py_spy_is_asked_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, without: subprocess.Popen[str], words: str, status: int
) -> None:
    tool = tmp_path / "py-spy"
    tool.write_text(f"#!/bin/sh\n[ {status} = 0 ] && echo '{words}' || echo '{words}' >&2\nexit {status}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(stacks.shutil, "which", lambda *_, **__: str(tool))
    found = stacks.of_process(without.pid)
    assert found.strip() == words if status == 0 else found.startswith("none (py-spy: Permission denied;")


def test_another_hosts_engine_is_not_looked_for_here() -> None:
    assert stacks.of_engine(1, "elsewhere").startswith("Stacks: the engine core runs on elsewhere, process 1;")
    assert "not known" in stacks.of_engine(None, None)


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo '0, 97 %, 123 MiB'", ["0, 97 %, 123 MiB"]),
        ("exit 9", "nvidia-smi failed: "),
        ("sleep 60", "nvidia-smi did not answer in 1 s"),
    ],
)
def test_gpus_are_named_or_why_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, found: str | list[str]
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\nexec sh -c "{script}"\n')
    tool.chmod(0o755)
    monkeypatch.setattr(stall_log, "_GPU", (str(tool),))
    monkeypatch.setattr(stall_log, "_SECONDS", 1.0)
    use = stall_log.gpu_use()
    assert use == found if isinstance(found, list) else use[0].startswith(found)


def test_without_nvidia_smi_there_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stall_log, "_GPU", (str(tmp_path / "nvidia-smi"),))
    assert stall_log.gpu_use() == []
