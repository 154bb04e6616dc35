# SPDX-License-Identifier: Apache-2.0
"""The NaN guard as clients and operators meet it: over HTTP, in the log and in the metrics.

The model has weights of its own. The embedding of one character, BAD, is NaN in them: a request goes bad where that
character is in its prompt, or where a grammar makes it write the character; every other request is sound. The KV cache
is small, so that each block is soon used again.
"""

import concurrent.futures
import contextlib
import json
import os
import re
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engine.conftest import PATCH_TESTS, environment
from tests.engine.serving import Server, serving

BAD = "~"
# Three blocks of 32 tokens and a rest, so that prompts which begin with it share blocks.
GOOD = "hello " * 17
# One block is upstream's own, with no content. Four requests of 256 tokens fit.
BLOCKS = 33
FLAGS = ("--load-format", "auto", "--max-model-len", "256", "--max-num-seqs", "4", "--block-size", "32")
POOL = (*FLAGS, "--num-gpu-blocks-override", str(BLOCKS))
ERROR = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"

# float32 and well separated logits: with others in the batch a greedy request gets the same tokens
WEIGHTS = """
import pathlib, sys, torch, tiny_models
from safetensors.torch import save_file
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

folder, bad = pathlib.Path(sys.argv[1]), sys.argv[2]
tiny_models.write_text_model(folder)
config = Qwen2Config.from_pretrained(folder, dtype="float32", initializer_range=0.1)
config.save_pretrained(folder)
torch.manual_seed(0)
model = Qwen2ForCausalLM(config).float()
[token] = AutoTokenizer.from_pretrained(folder)(bad).input_ids
with torch.no_grad():
    model.model.embed_tokens.weight[token] = float("nan")
    # no sound request writes it of its own accord: the best of 271 other logits is above 0
    model.lm_head.weight[token] = 0
save_file({n: w.contiguous() for n, w in model.state_dict().items()}, folder / "model.safetensors", {"format": "pt"})
"""


@pytest.fixture(scope="module")
def model(stock: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 with random weights, in which BAD's embedding is NaN."""
    folder = tmp_path_factory.mktemp("bad_embedding")
    settings = environment(folder, PYTHONPATH=str(PATCH_TESTS))
    subprocess.run([str(stock), "-c", WEIGHTS, str(folder), BAD], check=True, env=settings)
    return folder


@pytest.fixture(scope="module")
def aborting(patched: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(patched, model, tmp_path_factory.mktemp("abort"), *POOL, VLLM_NDT_NAN_GUARD="abort") as served:
        yield served


@pytest.fixture(scope="module")
def reporting(patched: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = {"VLLM_NDT_NAN_GUARD": "report", "VLLM_NDT_NAN_GUARD_LAYERS": "attention,norm"}
    with serving(patched, model, tmp_path_factory.mktemp("report"), *POOL, **settings) as served:
        yield served


class Answer(NamedTuple):
    """An HTTP status and the body."""

    status: int
    text: str

    @property
    def body(self) -> Any:
        return json.loads(self.text, parse_constant=not_json)

    @property
    def events(self) -> list[Any]:
        """The stream's events but the last, which must be its proper end."""
        lines = [line.removeprefix("data: ") for line in self.text.split("\n\n") if line]
        assert lines and lines[-1] == "[DONE]", self
        return [json.loads(line, parse_constant=not_json) for line in lines[:-1]]


def not_json(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def post(server: Server, path: str, first: threading.Event | None = None, **body: Any) -> Answer:
    """Ask the server; sets `first` when the first line of the answer is there."""
    data = json.dumps({"model": "tiny", "temperature": 0, **body}).encode()
    request = urllib.request.Request(f"{server.address}{path}", data, {"Content-Type": "application/json"})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:  # noqa: S310
            start = reply.readline()
            if first:
                first.set()
            return Answer(reply.status, (start + reply.read()).decode())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.read().decode())


def ask(server: Server, path: str, prompt: str, **more: Any) -> Answer:
    """Send a prompt in the way that the path wants it; 8 tokens."""
    if path == COMPLETIONS:
        return post(server, path, **{"prompt": prompt, "max_tokens": 8, **more})
    if path == RESPONSES:
        return post(server, path, **{"input": prompt, "max_output_tokens": 8, **more})
    return post(server, path, **{"messages": [{"role": "user", "content": prompt}], "max_tokens": 8, **more})


def tokens(server: Server, prompt: str, count: int = 24) -> list[int]:
    """The greedy tokens that follow a sound prompt."""
    done = ask(server, COMPLETIONS, prompt, max_tokens=count, ignore_eos=True, return_token_ids=True)
    assert done.status == 200, done
    found: list[int] = done.body["choices"][0]["token_ids"]
    assert len(found) == count
    return found


def counts(server: Server) -> dict[str, float]:
    """The guard's metrics."""
    with urllib.request.urlopen(f"{server.address}/metrics", timeout=30) as reply:  # noqa: S310
        text = reply.read().decode()
    assert "vllm:num_requests_running" in text
    found = re.findall(r'^vllm:ndt_nonfinite_(\w+)_total\{engine="0",model_name="tiny"\} (\S+)$', text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def increase(server: Server, before: dict[str, float]) -> dict[str, float]:
    return {name: value - before[name] for name, value in counts(server).items()}


def findings(log: str) -> list[str]:
    """The guard's lines about NaN, without what vLLM writes before a line."""
    return re.findall(r"NaN guard: (step \d+, request .*)", log)


@contextlib.contextmanager
def log_of(server: Server) -> Iterator[list[str]]:
    """A list that holds, behind the block, what the server wrote meanwhile."""
    begin, found = len(server.log.read_text()), list[str]()
    yield found
    found.append(server.log.read_text()[begin:])


def is_healthy(server: Server) -> bool:
    with urllib.request.urlopen(f"{server.address}/health", timeout=30) as reply:  # noqa: S310
        return bool(reply.status == 200)


# ---- abort ----

LOGPROBS: dict[str, list[dict[str, Any]]] = {
    COMPLETIONS: [{}, {"logprobs": 0}, {"logprobs": 5}, {"prompt_logprobs": 3}, {"echo": True, "logprobs": 1}],
    CHAT: [{}, {"logprobs": True, "top_logprobs": 0}, {"logprobs": True, "top_logprobs": 5}],
    RESPONSES: [{}],
}
# n > 1 needs sampling
CASES = [
    (path, more | several)
    for path, kinds in LOGPROBS.items()
    for more in kinds
    for several in ({}, {"n": 2, "temperature": 1})
    if path != RESPONSES or not several
]


def ways(*paths: str, but: str = "") -> pytest.MarkDecorator:
    """Tests with each way to ask on these paths, but not with the parameter `but`."""
    cases = [(path, more) for path, more in CASES if path in paths and but not in more]
    names = [" ".join([path, *(f"{name}={value}" for name, value in more.items())]) for path, more in cases]
    return pytest.mark.parametrize(("path", "more"), cases, ids=names)


@ways(COMPLETIONS, CHAT, RESPONSES)
def test_a_bad_prompt_gets_an_error_with_a_status(aborting: Server, path: str, more: dict[str, Any]) -> None:
    before = counts(aborting)
    with log_of(aborting) as log:
        done = ask(aborting, path, GOOD + BAD, **more)
    assert (done.status, done.body) == (500, {"error": ERROR})
    assert "Traceback" not in log[0]
    hit = more.get("n", 1)
    found = increase(aborting, before)
    assert (found["requests"], found["aborted"], found["logits"]) == (hit, hit, 0)
    assert 1 <= found["steps"] <= hit


# streams have no prompt_logprobs
@ways(COMPLETIONS, CHAT, but="prompt_logprobs")
def test_a_bad_prompt_ends_a_stream_with_the_same_error(aborting: Server, path: str, more: dict[str, Any]) -> None:
    """vLLM takes an output without a token for a part of the prompt that is done, and would say nothing."""
    with log_of(aborting) as log:
        done = ask(aborting, path, GOOD + BAD, stream=True, **more)
    assert done.status == 200
    assert done.events and done.events[-1] == {"error": ERROR}
    # before it there is the chat's role, and no text
    deltas = [choice["delta"] for event in done.events[:-1] for choice in event["choices"]]
    assert deltas == [{"role": "assistant", "content": ""}] * (more.get("n", 1) if path == CHAT else 0)
    assert "Traceback" not in log[0]


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"use_beam_search": True, "n": 2}])
def test_a_bad_prompt_beside_a_good_one_in_a_request(aborting: Server, more: dict[str, Any]) -> None:
    with log_of(aborting) as log:
        done = post(aborting, COMPLETIONS, prompt=[GOOD, GOOD + BAD], max_tokens=8, **more)
    if "stream" in more:
        assert done.events and done.events[-1] == {"error": ERROR}
    else:
        assert (done.status, done.body) == (500, {"error": ERROR})
    assert "Traceback" not in log[0]


# the grammar makes the model write these four characters; the step that reads the last one goes bad
WRITTEN = "abc" + BAD
DECODING = {"structured_outputs": {"choice": [WRITTEN + "def"]}}


@ways(COMPLETIONS, CHAT)
def test_a_request_that_goes_bad_while_it_writes(aborting: Server, path: str, more: dict[str, Any]) -> None:
    before = counts(aborting)
    with log_of(aborting) as log:
        done = ask(aborting, path, GOOD, **DECODING, **more)
    assert (done.status, done.body) == (500, {"error": ERROR})
    assert "Traceback" not in log[0]
    assert increase(aborting, before)["aborted"] == more.get("n", 1)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_that_goes_bad_while_it_writes(aborting: Server, path: str) -> None:
    """What was written before stays; nothing of the bad step follows."""
    logprobs = {"logprobs": 5} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 5}
    with log_of(aborting) as log:
        done = ask(aborting, path, GOOD, stream=True, **DECODING, **logprobs)
    *events, last = done.events
    assert last == {"error": ERROR}
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices) == WRITTEN
    assert {choice["finish_reason"] for choice in choices} == {None}
    assert "Traceback" not in log[0]


def test_others_in_the_same_steps_get_what_they_get_alone(aborting: Server) -> None:
    """Three requests run for long; bad ones come and go in the fourth place, in each step that they take."""
    prompts = [GOOD, "0123456789", "abc " * 9]
    alone = [tokens(aborting, prompt, 140) for prompt in prompts]
    before = counts(aborting)
    more = {"max_tokens": 140, "ignore_eos": True, "return_token_ids": True, "stream": True}
    begun = [threading.Event() for _ in prompts]
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        runs = [
            pool.submit(post, aborting, COMPLETIONS, first, prompt=prompt, **more)
            for prompt, first in zip(prompts, begun, strict=True)
        ]
        assert all(first.wait(60) for first in begun)
        bad = [ask(aborting, COMPLETIONS, BAD + prompt).status for prompt in prompts]
        bad.append(ask(aborting, COMPLETIONS, "hello " * 10, **DECODING).status)
        beside = [not run.done() for run in runs]
        events = [run.result().events for run in runs]
    assert beside == [True] * 3, "the good requests were over before the bad ones: nothing was shown"
    assert bad == [500] * 4
    found = [
        [token for event in each for choice in event["choices"] for token in choice["token_ids"]] for each in events
    ]
    assert found == alone
    assert increase(aborting, before)["aborted"] == 4


def fill(server: Server) -> list[list[int]]:
    """The tokens of sound requests that take each block of the cache, one after the other: seven each.

    The last one of a request is not full. What lies behind its end is masked, which NaN survives.
    """
    return [tokens(server, chr(ord("A") + at) + " again" * 32 + "." * at, 16) for at in range(BLOCKS // 7 + 2)]


def spoil(server: Server) -> None:
    """Leave what bad requests leave in each block of the cache; all that follows BAD is NaN."""
    for at in range(BLOCKS // 7 + 2):
        ask(server, COMPLETIONS, BAD + f"{at:02d}" + GOOD * 2)


def test_what_a_bad_request_leaves_reaches_nobody(aborting: Server) -> None:
    """Neither by a prefix that a good prompt shares with it, nor by its blocks, which others get."""
    shared = [tokens(aborting, GOOD), tokens(aborting, GOOD + "there")]
    alone = fill(aborting)
    for _ in range(2):
        assert tokens(aborting, GOOD) == shared[0]
        assert ask(aborting, COMPLETIONS, GOOD + BAD).status == 500
        assert tokens(aborting, GOOD) == shared[0]
        assert ask(aborting, COMPLETIONS, GOOD + "there" + BAD * 3).status == 500
        assert tokens(aborting, GOOD + "there") == shared[1]
        spoil(aborting)
        assert fill(aborting) == alone


def test_the_server_goes_on_and_says_once_what_happened(aborting: Server) -> None:
    assert ask(aborting, COMPLETIONS, GOOD + BAD).status == 500
    assert is_healthy(aborting)
    lines = findings(aborting.log.read_text())
    firsts = {line.partition(" in layer ")[2].partition(",")[0] for line in lines}
    assert firsts == {"model.layers.0.self_attn.attn"}
    assert len(lines) == len({re.sub(r"^step \d+, request \S+|row \d+|[\d.]+\.", "", line) for line in lines}), lines
    assert "q (NaN), k (NaN), v (NaN), output (NaN): before this layer's attention: the first one" in lines[0]
    assert "The first of its kind; the request ends with an error." in lines[0]


# ---- abort, of a model that makes vectors ----


@pytest.fixture(scope="module")
def pooling(patched: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = [*FLAGS, "--runner", "pooling"]
    with serving(patched, model, tmp_path_factory.mktemp("pool"), *flags, VLLM_NDT_NAN_GUARD="abort") as served:
        yield served


def test_a_bad_text_gets_no_vector_and_the_server_goes_on(pooling: Server) -> None:
    """An output without text and vector must not end the task that hands out everybody's outputs."""

    def embed(text: str) -> Answer:
        return post(pooling, "/v1/embeddings", input=text)

    good = embed(GOOD)
    assert good.status == 200
    bad = embed(GOOD + BAD)
    assert (bad.status, bad.body) == (500, {"error": ERROR})
    again = embed(GOOD)
    assert (again.status, again.body["data"]) == (200, good.body["data"])
    assert is_healthy(pooling)
    assert counts(pooling) == {"steps": 1, "requests": 1, "logits": 0, "aborted": 1}
    assert "Traceback" not in pooling.log.read_text()


# ---- the control: stock, which has no guard ----


@pytest.fixture(scope="module")
def bare(stock: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(stock, model, tmp_path_factory.mktemp("stock"), *POOL) as served:
        yield served


def test_stock_answers_a_bad_prompt_with_the_first_token_or_blames_the_client(bare: Server) -> None:
    done = ask(bare, COMPLETIONS, GOOD + BAD, ignore_eos=True)
    assert done.status == 200
    # token 0, over and over
    assert done.body["choices"][0]["text"] == "!" * 8
    done = ask(bare, COMPLETIONS, GOOD + BAD, logprobs=5)
    assert done.status == 400
    assert "Out of range float values" in done.body["error"]["message"]
    done = ask(bare, COMPLETIONS, GOOD + BAD, stream=True, logprobs=5, ignore_eos=True)
    assert [event["choices"][0]["finish_reason"] for event in done.events][-1] == "length"
    assert {event["choices"][0]["logprobs"]["token_logprobs"][0] for event in done.events} == {None}


def test_on_stock_others_get_what_a_bad_request_left(bare: Server) -> None:
    """By a prefix that they share, and by blocks that they get afterwards."""
    prompt = "shared " * 16
    alone, shared = fill(bare), tokens(bare, prompt)
    # whatever is cached goes
    fill(bare)
    ask(bare, COMPLETIONS, prompt + BAD)
    assert tokens(bare, prompt) != shared
    spoil(bare)
    after = fill(bare)
    assert after != alone
    assert any(set(found) == {0} for found in after)


# ---- report ----


def test_report_counts_and_lets_a_request_go_on(reporting: Server) -> None:
    """The first norm comes before the first attention layer, and gets the bad embedding."""
    before = counts(reporting)
    assert before == dict.fromkeys(("steps", "requests", "logits", "aborted"), 0)
    assert ask(reporting, COMPLETIONS, GOOD).status == 200
    assert counts(reporting) == before
    assert findings(reporting.log.read_text()) == []
    done = ask(reporting, COMPLETIONS, GOOD + BAD, ignore_eos=True)
    assert done.status == 200
    assert (done.body["usage"]["completion_tokens"], done.body["choices"][0]["finish_reason"]) == (8, "length")
    lines = findings(reporting.log.read_text())
    assert len(lines) == 1, lines
    assert "layer model.layers.0.input_layernorm" in lines[0] and ": before this norm" in lines[0]
    assert "The first of its kind; it goes on." in lines[0]
    # each of its steps reads what the first one left
    assert counts(reporting) == {"steps": 8, "requests": 8, "logits": 0, "aborted": 0}
    assert is_healthy(reporting)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_report_counts_though_the_answer_cannot_be_written(reporting: Server, path: str, stream: bool) -> None:
    """As on stock: NaN is no JSON."""
    before = counts(reporting)
    logprobs = {"logprobs": 5} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 5}
    done = ask(reporting, path, GOOD + BAD, stream=stream, ignore_eos=True, **logprobs)
    assert done.status == (200 if stream else 400)
    found = increase(reporting, before)
    assert found["steps"] > 0 and found["aborted"] == 0
    assert is_healthy(reporting)


def test_report_says_in_the_log_what_it_watches(reporting: Server) -> None:
    [line] = re.findall(r"NaN guard: report, watching (.*)", reporting.log.read_text())
    # two norms a layer, and the last one
    assert line == "4 attention layers and 9 norms and the logits."


# ---- the start ----


@pytest.mark.parametrize(
    ("name", "value", "allowed", "more"),
    [
        ("VLLM_NDT_NAN_GUARD", "sometimes", "off, report or abort", {}),
        (
            "VLLM_NDT_NAN_GUARD_LAYERS",
            "attention,norm",
            "attention, or --enforce-eager with attention,norm",
            {"VLLM_NDT_NAN_GUARD": "report"},
        ),
    ],
)
def test_a_start_is_refused_with_one_last_line(
    patched: Path, model: Path, tmp_path: Path, name: str, value: str, allowed: str, more: dict[str, str]
) -> None:
    """How it ends for an operator; tests/patches has the other values. Without the refusal it would serve for ever."""
    command = [str(patched.parent / "vllm"), "serve", str(model), "--load-format", "dummy"]
    settings = environment(tmp_path, **more, **{name: value})
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=600)
    assert done.returncode == 1
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.endswith(f"{name}: expected {allowed}, found {value!r}; correct the variable or unset it")


# ---- two ranks ----


@pytest.fixture(scope="module")
def two_ranks(patched: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two ranks that wait for each other on one core take minutes")
    settings = {
        "VLLM_NDT_NAN_GUARD": "abort",
        "VLLM_NDT_NAN_INJECT": "layer=2,tensor=output,step=5,row=0,value=nan",
        # upstream binds ranks to NUMA nodes of their own, and small machines have one
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    flags = [*FLAGS, "--tensor-parallel-size", "2"]
    with serving(patched, model, tmp_path_factory.mktemp("ranks"), *flags, **settings) as served:
        yield served


def test_each_rank_names_an_injected_fault_and_the_stream_ends(two_ranks: Server) -> None:
    """The fault is in the first request's fifth step: four tokens leave before it."""
    done = ask(two_ranks, COMPLETIONS, GOOD, stream=True, return_token_ids=True, ignore_eos=True)
    *events, last = done.events
    assert last == {"error": ERROR}
    written = [token for event in events for choice in event["choices"] for token in choice["token_ids"]]
    # the rank whose outputs nobody reads looks at a step's findings in its next one
    assert written == tokens(two_ranks, GOOD, 8)[:4]
    log = two_ranks.log.read_text()
    for rank in ("TP0", "TP1"):
        found = re.findall(rf"Worker_{rank}.*NaN guard: (.*)", log)
        assert len(found) == 3, found
        assert found[0].startswith("abort, watching 4 attention layers")
        assert found[1] == "injecting nan into output of layer 2, row 0, in step 5, as asked for."
        assert re.match(
            r"step 5, .* in layer model\.layers\.2\.self_attn\.attn, .*: output \(NaN\); q, k, v clean", found[2]
        )
    assert counts(two_ranks) == {"steps": 1, "requests": 1, "logits": 0, "aborted": 1}
    assert "Traceback" not in log
