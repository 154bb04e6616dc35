# SPDX-License-Identifier: Apache-2.0
"""The image in a network namespace that counts what would leave: nothing, and in the stock image something."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.image.conftest import BASE, Store
from tests.image.containers import STRICT, running


@dataclass
class Namespace:
    """A network namespace with default routes, in which a rule counts and rejects all that is not loopback."""

    name: str

    def packets(self) -> int:
        done = subprocess.run(
            ["ip", "netns", "exec", self.name, "nft", "list", "counter", "inet", "egress", "leaving"],
            capture_output=True,
            text=True,
            check=True,
        )
        return int(re.search(r"packets (\d+)", done.stdout)[1])  # type: ignore[index]


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    if missing := [tool for tool in ("ip", "nft") if not shutil.which(tool)]:
        assert not os.environ.get("CI"), f"CI must have {missing}"
        pytest.skip(f"not installed: {missing}")
    name = f"egress{os.getpid()}"
    inside = ["ip", "netns", "exec", name]
    # neighbour discovery is the kernel's own, as soon as there is a device
    kernel = "icmpv6 type { nd-router-solicit, nd-neighbor-solicit, nd-neighbor-advert, mld2-listener-report } accept;"
    chain = f"type filter hook output priority 0; oifname lo accept; {kernel} counter name leaving reject;"
    rules = f"table inet egress {{ counter leaving {{ }}; chain out {{ {chain} }}; }}"
    steps = [
        ["ip", "netns", "add", name],
        ["ip", "link", "add", f"v{os.getpid()}", "type", "veth", "peer", "name", "uplink", "netns", name],
        ["ip", "link", "set", f"v{os.getpid()}", "up"],
        [*inside, "ip", "link", "set", "lo", "up"],
        [*inside, "ip", "link", "set", "uplink", "up"],
        [*inside, "ip", "address", "add", "192.0.2.2/24", "dev", "uplink"],
        [*inside, "ip", "address", "add", "2001:db8::2/64", "dev", "uplink", "nodad"],
        [*inside, "ip", "route", "add", "default", "via", "192.0.2.1"],
        [*inside, "ip", "-6", "route", "add", "default", "via", "2001:db8::1"],
        [*inside, "nft", rules],
    ]
    try:
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True, check=False)
            if done.returncode:
                assert not os.environ.get("CI"), done.stderr
                pytest.skip(f"{' '.join(step)}: {done.stderr}")
        yield Namespace(name)
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False)


ASK = """
import json, urllib.request
def ask(path, body=None):
    data, kind = json.dumps(body).encode() if body else None, {"Content-Type": "application/json"}
    request = urllib.request.Request("http://127.0.0.1:8000" + path, data, kind)
    return urllib.request.urlopen(request, timeout=300).status
message = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
print(ask("/v1/models"), ask("/v1/chat/completions", message), ask("/v1/chat/completions", message | {"stream": True}),
    ask("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 2, "logprobs": 1}),
    ask("/v1/chat/completions", message | {"response_format": {"type": "json_object"}}),
    ask("/v1/chat/completions", message | {"tools": [tool], "tool_choice": "none"}),
    ask("/v1/responses", {"model": "tiny", "input": "hello", "max_output_tokens": 2}),
    ask("/tokenize", {"model": "tiny", "prompt": "a"}), ask("/metrics"), ask("/health"))
"""
REPORT = """
import time
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.utils import report_usage_stats
config = EngineArgs("/model", load_format="dummy", skip_tokenizer_init=True).create_engine_config()
report_usage_stats(config, UsageContext.OPENAI_API_SERVER)
time.sleep(10)
print("called")
"""


# what container engines write into /etc/hosts, and podman does not in a namespace that is there already; the last one
# because PyTorch asks for the name of 127.0.0.1 in IPv6's form, see docs/deploying.md
HOSTS = ("--hostname=engine", "--add-host=engine:127.0.0.1", "--add-host=localhost:::ffff:127.0.0.1")


def test_no_packet_leaves(store: Store, built: dict[str, Any], text_model: Path, namespace: Namespace) -> None:
    """Through the first request of each kind of API, and while the function that would report is called."""
    network = f"ns:/run/netns/{namespace.name}"
    with running(store, built["name"], text_model, options=(*STRICT, *HOSTS), network=network) as container:
        container.wait_until_healthy()
        done = container.execute("python3", "-c", ASK)
        assert done.stdout.split() == ["200"] * 10, done.stderr[-2000:]
        done = container.execute("env", "HOME=/tmp", "python3", "-c", REPORT)
        assert done.stdout.strip().endswith("called"), done.stderr[-2000:]
        assert namespace.packets() == 0


def test_the_same_call_in_the_stock_image_is_counted(store: Store, text_model: Path, namespace: Namespace) -> None:
    """The control of the test above: upstream would send, and the counter would see it."""
    words = ["podman", "run", "--rm", f"--network=ns:/run/netns/{namespace.name}", "--shm-size=1g"]
    words += [f"--volume={store.closure}:/closure:ro", f"--volume={text_model}:/model:ro", "--entrypoint=python3"]
    words += ["--env=HF_HUB_OFFLINE=1", "--env=VLLM_HOST_IP=127.0.0.1", *HOSTS]
    done = store.run(*words, BASE, "-c", REPORT)
    assert done.stdout.strip().endswith("called")
    assert namespace.packets() > 0
