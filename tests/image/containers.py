# SPDX-License-Identifier: Apache-2.0
"""Containers of the tests' images."""

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.image.conftest import Store

# a random user id, nothing writable but /tmp, no right left: what the specs ask for, and OpenShift gives
STRICT = (
    "--user=1000800000:0",
    "--read-only",
    "--read-only-tmpfs=false",
    "--tmpfs=/tmp:exec",
    "--cap-drop=all",
    "--security-opt=no-new-privileges",
)
START_LIMIT = 400
FLAGS = ("--load-format", "dummy", "--enforce-eager", "--served-model-name", "tiny", "--max-num-batched-tokens", "4096")


@dataclass
class Container:
    """A container of the tests' store."""

    name: str
    store: Store

    def podman(self, *words: str) -> str:
        done = self.store.run("podman", *words)
        return done.stdout + done.stderr

    def execute(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.store.run("podman", "exec", self.name, *words, check=False)

    @property
    def log(self) -> str:
        return self.podman("logs", self.name)

    @property
    def running(self) -> bool:
        return "true" in self.podman("inspect", self.name, "--format", "{{.State.Running}}")

    @property
    def exit_code(self) -> int:
        return int(self.store.run("podman", "inspect", self.name, "--format", "{{.State.ExitCode}}").stdout)

    def wait_until_healthy(self) -> None:
        end = time.monotonic() + START_LIMIT
        while time.monotonic() < end and self.running:
            if self.execute("vllm-ndt", "health").returncode == 0:
                return
            time.sleep(1)
        pytest.fail(f"not healthy:\n{self.log[-5000:]}")

    def wait_for(self, text: str, *, times: int = 1) -> None:
        """Wait until the log has a text so many times, or the container stands still."""
        end = time.monotonic() + START_LIMIT
        while time.monotonic() < end and self.log.count(text) < times and (self.running or times > 1):
            time.sleep(0.2)
        assert self.log.count(text) >= times, self.log[-3000:]


@contextlib.contextmanager
def running(
    store: Store, image: str, model: Path, *flags: str, options: tuple[str, ...] = (), network: str = "host"
) -> Iterator[Container]:
    """A container of an image with the closure and a model, until the block ends."""
    model.chmod(0o755)  # the container's user is another one
    words = ["podman", "run", "--detach", f"--network={network}", "--shm-size=1g", "--env=VLLM_CPU_KVCACHE_SPACE=1"]
    words += ["--env=HF_HUB_OFFLINE=1", "--env=VLLM_HOST_IP=127.0.0.1", f"--volume={store.closure}:/closure:ro"]
    words += [f"--volume={model}:/model:ro", *options, image, "/model", *FLAGS, *flags]
    name = store.run(*words).stdout.split()[-1]
    try:
        yield Container(name, store)
    finally:
        store.run("podman", "rm", "--force", "--time", "0", name, check=False)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
