# SPDX-License-Identifier: Apache-2.0
"""A real hybrid vision engine on a CPU, over HTTP: stock stands still, the patched build serves on and answers right.

The linear attention's CPU kernels need AMX; the GPU's are checked by tests/gpu/check_encoder_cache.py.
"""

import concurrent.futures
import random
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.engine.serving import Server, serving
from tests.engine.test_vision_serve import FLAGS as LIMITS
from tests.engine.test_vision_serve import client_of, metrics, png

pytestmark = pytest.mark.skipif(
    "amx_bf16" not in Path("/proc/cpuinfo").read_text(), reason="the hybrid model's CPU kernels need AMX"
)
FLAGS = (*LIMITS, "--max-model-len", "16384", "--max-num-seqs", "8")
# 1472 x 1408 pixels: 2,024 embeddings, two of which fill upstream's cache
SIZE = (1472, 1408)
POOL = 10
# a batch of up to eight requests takes a few seconds
PATIENCE = 120


@pytest.fixture(scope="module")
def cached(patched: Path, vision_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(patched, vision_model, tmp_path_factory.mktemp("cached"), *FLAGS, "--enable-prefix-caching") as served:
        yield served


def chat(client: openai.OpenAI, shades: list[int], text: str, patience: float = PATIENCE) -> str:
    """The answer to pictures of one colour each, with text behind them."""
    pictures = [{"type": "image_url", "image_url": {"url": png(*SIZE, 10 + 20 * shade)}} for shade in shades]
    messages = [{"role": "user", "content": [*pictures, {"type": "text", "text": text}]}]
    done = client.chat.completions.create(  # type: ignore[call-overload]
        model="tiny", messages=messages, max_tokens=6, temperature=0, timeout=patience
    )
    return str(done.choices[0].message.content)


def batches(number: int) -> Iterator[list[tuple[list[int], str]]]:
    """Batches of four to eight requests of two to four images from a pool of ten."""
    choose = random.Random(1)
    for _ in range(number):
        yield [
            (choose.choices(range(POOL), k=choose.randint(2, 4)), "x" * choose.choice([1, 40, 300]))
            for _ in range(choose.randint(4, 8))
        ]


def ends(client: openai.OpenAI, batch: list[tuple[list[int], str]], given_up: int | None = None) -> bool:
    """Whether all requests of a batch end; one client gives up early if asked to."""

    def one(at: int) -> bool:
        try:
            chat(client, *batch[at], patience=0.5 if at == given_up else PATIENCE)
        except openai.APITimeoutError:
            return at == given_up
        return True

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return all(pool.map(one, range(len(batch))))


def test_stock_stands_still(stock: Path, vision_model: Path, tmp_path: Path) -> None:
    with serving(stock, vision_model, tmp_path, *FLAGS, "--enable-prefix-caching") as served:
        client = client_of(served)
        assert not all(ends(client, batch) for batch in batches(10))


def test_two_hundred_batches_end_with_clients_giving_up_among_them(cached: Server) -> None:
    client = client_of(cached)
    for at, batch in enumerate(batches(200)):
        assert ends(client, batch, given_up=0 if at % 4 == 3 else None), f"batch {at}"
    assert chat(client, [0], "once more")
    found = metrics(cached)
    assert (found["size"], found["pinned"], found["empty_steps"]) == (4096, 0, 0)


def test_an_agent_that_adds_screenshots_gets_the_answers_of_an_engine_without_prefix_caching(
    cached: Server, patched: Path, vision_model: Path, tmp_path: Path
) -> None:
    """Text that differs from turn to turn, a new picture each time up to four, and the prefixes of the load before."""
    with serving(patched, vision_model, tmp_path, *FLAGS, "--no-enable-prefix-caching") as plain:
        clients = [client_of(cached), client_of(plain)]
        for turn in range(12):
            shades = list(range(turn, turn + 1 + turn % 4))
            answers = [chat(client, [shade % POOL for shade in shades], "history " * 25 * turn) for client in clients]
            assert answers[0] == answers[1], turn
