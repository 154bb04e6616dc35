# SPDX-License-Identifier: Apache-2.0
"""The installed CPU wheel serves: over HTTP, offline, to an OpenAI client, and connects to nothing but loopback."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.engine.conftest import environment
from tests.engine.serving import Server, serving

ADDRESS = re.compile(r'inet_addr\("([^"]+)"\)|inet_pton\(AF_INET6, "([^"]+)"')


@pytest.fixture(scope="module")
def server(patched: Path, text_model: Path, strace: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    tracer = [strace, "-f", "--seccomp-bpf", "-e", "trace=%network", "-s", "512", "-o", str(folder / "trace")]
    flags = ["--max-model-len", "512", "--max-num-seqs", "4"]
    with serving(patched, text_model, folder, *flags, tracer=tracer) as served:
        yield served


def addresses(trace: str) -> set[str]:
    """The IP addresses to which a traced process connected or sent."""
    found = set()
    for line in trace.splitlines():
        if re.search(r"\b(connect|sendto|sendmsg|sendmmsg)\(", line):
            found |= {four or six for four, six in ADDRESS.findall(line)}
    return found


def names_asked_for(trace: str) -> set[str]:
    """The names in the queries that a traced process sent to a resolver."""
    resolvers: set[tuple[str, str]] = set()
    names = set()
    for line in trace.splitlines():
        call = re.match(r"(\d+)\s+(connect|sendto|sendmsg|sendmmsg)\((\d+), (.*)", line)
        if not call:
            continue
        process, name, descriptor, rest = call.groups()
        if name == "connect":
            resolvers.discard((process, descriptor))
            if "htons(53)" in rest:
                resolvers.add((process, descriptor))
        elif (process, descriptor) in resolvers:
            # A query has a header of 12 bytes, then the name as labels with their lengths in front.
            for text in re.findall(r'"((?:[^"\\]|\\.)*)"', rest):
                query = text.encode().decode("unicode_escape").encode("latin-1")[12:]
                labels = []
                while query and query[0]:
                    labels.append(query[1 : 1 + query[0]].decode())
                    query = query[1 + query[0] :]
                names.add(".".join(labels))
    return names


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "::ffff:127.0.0.1", "0.0.0.0", "::")  # noqa: S104


def test_openai_client_gets_text(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
    completion = client.completions.create(model="tiny", prompt="hello", max_tokens=8, temperature=0)
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 8
    again = client.completions.create(model="tiny", prompt="hello", max_tokens=8, temperature=0)
    assert again.choices[0].text == completion.choices[0].text
    messages = [{"role": "user", "content": "hello"}]
    stream = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, stream=True)  # type: ignore[call-overload]
    assert [choice.finish_reason for chunk in stream for choice in chunk.choices][-1] == "length"


def test_log_says_once_what_runs(server: Server) -> None:
    lines = [line for line in server.log.read_text().splitlines() if "patched: " in line]
    assert len(lines) == 1
    assert "vLLM 0.27.1+ndt.1.cpu, patched: register-ndt-settings, default-usage-stats-off, " in lines[0]
    assert re.search(r"manifest sha256:[0-9a-f]{64}", lines[0])
    assert "Unknown vLLM environment variable" not in server.log.read_text()


def test_nothing_but_loopback_is_connected_to(server: Server) -> None:
    """PyTorch's store asks the resolver for the name of 127.0.0.1, unless /etc/hosts has it in IPv6 form; no more."""
    trace = (server.folder / "trace").read_text()
    assert names_asked_for(trace) <= {"1.0.0.127.in-addr.arpa"}
    found = addresses("\n".join(line for line in trace.splitlines() if "htons(53)" not in line))
    assert found, "the server's own connections, at least"
    assert not {address for address in found if not is_loopback(address)}


def test_home_has_no_statistics(server: Server) -> None:
    names = {path.name for path in server.home.rglob("*")}
    assert "usage_stats.json" not in names
    assert not (server.home / ".config").exists()


REPORT = """
import threading, time
from vllm.config import VllmConfig, ModelConfig
from vllm.v1.utils import report_usage_stats
import sys
if __name__ == "__main__":
    report_usage_stats(VllmConfig(model_config=ModelConfig(model=sys.argv[1], skip_tokenizer_init=True)))
    time.sleep(8)
    print("done", len(threading.enumerate()))
"""


@pytest.mark.parametrize("tree", ["stock", "patched"])
def test_usage_report_connects_on_stock_only(
    tree: str, request: pytest.FixtureRequest, text_model: Path, strace: str, tmp_path: Path
) -> None:
    """The control: the CPU worker never reports, so the call of the GPU worker is made with a real configuration.

    It runs in a network namespace of its own, so that stock's attempt leaves nothing but a line in the trace.
    """
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        assert not os.environ.get("CI"), "CI must be able to make a network namespace"
        pytest.skip("no right to make a network namespace")
    python = request.getfixturevalue(tree)
    script = tmp_path / "report.py"
    script.write_text(REPORT)
    trace = tmp_path / "trace"
    command = ["unshare", "--net", strace, "-f", "--seccomp-bpf", "-e", "trace=%network", "-o", str(trace)]
    command += [str(python), str(script), str(text_model)]
    # An address for documentation, so that no resolver on loopback hides the attempt.
    home = tmp_path / "home"
    home.mkdir()
    settings = environment(home, VLLM_USAGE_STATS_SERVER="http://192.0.2.1:9")
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "done" in done.stdout, done.stdout + done.stderr
    attempts = {address for address in addresses(trace.read_text()) if not is_loopback(address)}
    written = {path.name for path in home.rglob("usage_stats.json")}
    assert (attempts, written) == (({"192.0.2.1"}, {"usage_stats.json"}) if tree == "stock" else (set(), set()))
