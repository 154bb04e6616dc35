# SPDX-License-Identifier: Apache-2.0
"""A running `vllm serve` of one of the environments, for the tests that ask it over HTTP."""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engine.conftest import environment

START_LIMIT = 600  # seconds; a cold start on two cores compiles everything that it imports


@dataclass
class Server:
    """A running `vllm serve`: its address, and its folder with log and home."""

    address: str
    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def home(self) -> Path:
        return self.folder / "home"


@contextlib.contextmanager
def serving(
    python: Path, model: Path, folder: Path, *flags: str, tracer: Sequence[str] = (), **settings: str
) -> Iterator[Server]:
    """Serve `model` as "tiny" without weights until the block ends; `settings` go to its environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    served = Server(f"http://127.0.0.1:{port}", folder)
    served.home.mkdir()
    command = [*tracer, str(python.parent / "vllm"), "serve", str(model), "--served-model-name", "tiny"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy", "--enforce-eager", *flags]
    with served.log.open("w") as log:
        run = subprocess.Popen(
            command,
            env=environment(served.home, **settings),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=folder,
        )
    try:
        wait_until_healthy(served, run)
        yield served
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()


def wait_until_healthy(served: Server, run: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_LIMIT
    while time.monotonic() < end and run.poll() is None:
        try:
            with urllib.request.urlopen(f"{served.address}/health", timeout=5) as reply:  # noqa: S310
                if reply.status == 200:
                    return
        except OSError:
            time.sleep(1)
    pytest.fail(f"the server did not start:\n{served.log.read_text()[-5000:]}")
