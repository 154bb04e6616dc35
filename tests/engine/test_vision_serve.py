# SPDX-License-Identifier: Apache-2.0
"""The installed CPU wheel serves requests with several images over HTTP, with the limits that the docs recommend."""

import base64
import concurrent.futures
import random
import re
import struct
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.engine.serving import Server, serving

TOKENS = 8192
# 128 in bfloat16, and three more of the kind for deepstack
WIDTH = 4 * 128 * 2


# the limits that the docs recommend
FLAGS = ("--max-num-batched-tokens", "4096", "--limit-mm-per-prompt", '{"image": 4, "video": 1}')


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=300)


@pytest.fixture(scope="module")
def server(patched: Path, deepstack_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = [*FLAGS, "--max-model-len", "8192", "--max-num-seqs", "4"]
    settings = {"VLLM_NDT_ENCODER_CACHE_TOKENS": str(TOKENS)}
    with serving(patched, deepstack_model, tmp_path_factory.mktemp("serve"), *flags, **settings) as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return client_of(server)


def png(width: int, height: int, shade: int) -> str:
    """A picture of one colour, as the data URL that clients send."""
    rows = (b"\0" + bytes([shade, 255 - shade, 7]) * width) * height

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(data).decode()


def ask(client: openai.OpenAI, shades: list[int], **more: object) -> str:
    """A chat with one picture of 1,000 embeddings (1280 x 800) for each shade."""
    pictures = [{"type": "image_url", "image_url": {"url": png(1280, 800, shade)}} for shade in shades]
    messages = [{"role": "user", "content": [*pictures, {"type": "text", "text": "what is this?"}]}]
    done = client.chat.completions.create(model="tiny", messages=messages, max_tokens=3, temperature=0, **more)  # type: ignore[call-overload]
    return str(done.choices[0].finish_reason)


def metrics(server: Server) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.address}/metrics", timeout=30) as reply:  # noqa: S310
        text = reply.read().decode()
    found = re.findall(r"^vllm:ndt_encoder_cache_(\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found if not name.endswith("_created")}


def test_four_images_pass_and_the_fifth_is_refused_at_once(client: openai.OpenAI) -> None:
    assert ask(client, [1, 2, 3, 4]) == "length"
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, [1, 2, 3, 4, 5])
    assert refused.value.status_code == 400
    assert "4 image" in str(refused.value)


def test_a_request_that_is_refused_costs_no_later_one_its_image(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        ask(client, [5], logit_bias={"99999999": 1})
    assert ask(client, [5]) == "length"


def test_many_requests_with_images_end_with_clients_giving_up_among_them(server: Server, client: openai.OpenAI) -> None:
    """More images at once than the cache holds, and a client in five that does not wait for its answer."""
    choose = random.Random(0)

    def one(at: int) -> str:
        shades = [10 + at % 12, *choose.choices(range(10, 24), k=choose.randint(1, 3))]
        if at % 5 == 4:
            try:
                return ask(client, shades, timeout=0.3)
            except openai.APITimeoutError:
                return "given up"
        return ask(client, shades)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, range(40)))
    assert set(answers) <= {"length", "given up"}
    assert answers.count("length") >= 32
    # what is left is asked for once more, so that the last step's statistics are in
    assert ask(client, [1]) == "length"
    found = metrics(server)
    assert (found["size"], found["pinned"], found["empty_steps"]) == (TOKENS, 0, 0)
    assert 0 < found["used"] <= TOKENS
    assert found["evictions_total"] > 0 and found["repeated_runs_total"] > 0
    assert found["preemptions_total"] == 0


def test_the_log_says_what_the_cache_takes(server: Server) -> None:
    text = server.log.read_text()
    mib = TOKENS * WIDTH / 2**20
    assert f"Encoder cache: {TOKENS} embeddings of {WIDTH} bytes (VLLM_NDT_ENCODER_CACHE_TOKENS={TOKENS})" in text
    assert f"{mib:.1f} MiB more must be free" in text
    assert f"Encoder cache: {TOKENS} embeddings (upstream's size is 4096" in text
