# SPDX-License-Identifier: Apache-2.0
"""Check the NaN guard on a GPU, with the patched wheel: the kernels alone, then small models under full CUDA graphs.

    python check_nan_guard.py [--stock SITE] [NAME ...]

Without names all parts, each in a process of its own and all at the same time, in 4 to 9 minutes:
`kernel` compares the Triton kernels with PyTorch, under graph replay too. `v2` and `v1` run a dense model on both model
runners: nothing for a clean run nor for bad padding rows; a fault that is injected while only graphs are replayed is
named exactly, with its request; so is a weight that goes bad. `abort` ends the request that was hit and leaves the
others' tokens and the next ones with the same prefix as they were. `hybrid` does so where recurrent states go bad, until
each block was used again. `mla` does as `v2` with latent attention. `off` requires that the operator is upstream's own;
its graphs have as many nodes as those of `stock` (SITE: a folder with a stock vllm to import there), and those of `v2`
one more for each layer.

Prints what it finds, then one JSON object. Exit status: 0 all held, 1 something did not, 2 bad usage.
"""

import argparse
import ctypes
import inspect
import itertools
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "patches"))

NAN, INF = float("nan"), float("inf")
MARK = "RESULT "
LAYERS = 6
PAD_TOKEN = 31_999
DENSE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
LATENT = DENSE | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": LAYERS,
    "n_routed_experts": 8,
    "moe_intermediate_size": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
}
ENVIRON = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


class Checks:
    """Named checks of one part: what held, what was found, what was skipped and why."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}
        self.failed: list[str] = []

    def that(self, name: str, held: bool, found: Any = None) -> None:
        print(f"{'ok  ' if held else 'FAIL'} {name}: {found}", flush=True)
        self.results[name] = {"held": bool(held), "found": found}
        if not held:
            self.failed.append(name)

    def note(self, name: str, found: Any) -> None:
        print(f"note {name}: {found}", flush=True)
        self.results[name] = found


# ---- the kernels alone ----


def check_kernel(checks: Checks) -> None:
    import torch
    from vllm_ndt.nan_guard import FULL_ROWS, Memory, _check, _real
    from vllm_ndt.nan_kernel import SAMPLE, check_rows

    cuda = torch.device("cuda", torch.cuda.current_device())
    checks.note("device", torch.cuda.get_device_name())
    memory = Memory(cuda, 8192, 16)
    wrong: list[Any] = []
    launches = 0
    shapes = ((8, 2, 64), (8, 2, 80), (32, 8, 128), (4, 4, 192), (8, 1, 256))
    for dtype, (heads, kv_heads, size), count in itertools.product(
        (torch.float16, torch.bfloat16, torch.float32), shapes, (1, 33, 8192)
    ):
        for by_slot in (True, False):
            real = max(1, count - 3)
            marks = torch.arange(count, device=cuda) if by_slot else torch.tensor([0, real], device=cuda)
            if by_slot:
                marks[real:] = -1
            for place, bad in itertools.product((None, 0, 1, 2, 3), (NAN, INF, -INF)):
                layers = [fused(torch, count, heads, kv_heads, size, dtype) for _ in range(4)]
                full = count <= FULL_ROWS
                # rows whose inputs are read by any of the four layers; a real one and one of padding
                row = next(row for row in range(count) if full or (row + 4) % SAMPLE == 0)
                for at in (row, count - 1):
                    if place is not None:
                        # of a large batch not every value is read
                        layers[1][place][(at, -1, -1) if full else at] = bad
                        layers[2][3][(at, 0, 0) if full else at] = NAN
                memory.words.zero_()
                memory.peaks.zero_()
                for number, layer in enumerate(layers, 3):
                    check_rows(layer, number, count, marks, by_slot, memory.words, memory.peaks, full=full)
                launches += 1
                expected = Memory(cuda, 8192, 16)
                mask = _real(marks, by_slot, count)
                for number, layer in enumerate(layers, 3):
                    _check(layer, number, mask, expected)
                same = torch.equal(memory.words, expected.words)
                peaks = not full or torch.equal(memory.peaks, expected.peaks)
                if not same or not peaks:
                    wrong.append([str(dtype), heads, size, count, by_slot, place, str(bad), same, peaks])
    checks.that("check_rows agrees with PyTorch", not wrong, wrong[:5] or f"{launches} launches")
    # while programs raise the peaks beside each other, none may take that for a finding
    false, at_all = [], 0
    memory.words.zero_()
    for count in (512, 8192):
        layers = [fused(torch, count, 32, 8, 128, torch.float16) for _ in range(4)]
        for layer in layers:
            for tensor in layer:
                tensor.nan_to_num_(0, 0, 0)
        marks = torch.arange(count, device=cuda)
        for _ in range(2000):
            memory.peaks.zero_()
            for number, layer in enumerate(layers, 1):
                check_rows(layer, number, count, marks, True, memory.words, memory.peaks, full=count == 512)
            at_all += len(layers)
            if bool(memory.words.any()):
                false.append([count, memory.words[memory.words.nonzero()[:3, 0]].tolist()])
                memory.words.zero_()
    checks.that("no false finding while peaks rise", not false, false[:5] or f"{at_all} launches")
    check_collect(torch, checks, cuda)
    check_replay(torch, checks, memory)


def check_collect(torch: Any, checks: Checks, cuda: Any) -> None:
    from vllm_ndt.nan_kernel import FOUND, collect
    from vllm_ndt.nan_step import _collect
    from vllm_ndt.nan_words import word

    wrong = []
    for lengths, drafts, dtype in itertools.product(
        ([1], [1, 1, 1], [3000, 1, 5000, 17]), (0, 2), (torch.float16, torch.float32)
    ):
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        logit_starts = torch.arange(len(lengths) + 1, dtype=torch.int32) * (1 + drafts)
        words = torch.zeros(8192, dtype=torch.int32)
        logits = torch.randn(int(logit_starts[-1]), 32_003).to(dtype)
        words[starts[1] - 1] = word(4, 0b1000)
        if len(lengths) > 3:
            words[3010], words[4500], words[7999] = word(9, 1), word(2, 0b10), word(2, 0b100)
        logits[-1, 32_002], logits[0, 9000], logits[0, 1] = NAN, INF, -INF
        found = torch.zeros(len(lengths), FOUND, dtype=torch.int32, device=cuda)
        own = words.to(cuda)
        collect(own, starts.to(cuda), len(lengths), logits.to(cuda), logit_starts.to(cuda), found)
        expected = _collect(words, starts, len(lengths), logits, logit_starts)
        seen = found.cpu()
        both = seen[:, 2:].amax(1)
        for at in range(FOUND - 2):
            both |= seen[:, 2 + at]
        if not (torch.equal(seen[:, :2], expected[:, :2]) and torch.equal(both, expected[:, 2]) and not own.any()):
            wrong.append([lengths, drafts, str(dtype), seen.tolist(), expected.tolist()])
    checks.that("collect agrees with PyTorch", not wrong, wrong[:2])


def check_replay(torch: Any, checks: Checks, memory: Any) -> None:
    """Four layers in one captured graph, whose tensors and slot mapping change between replays."""
    from vllm_ndt.nan_kernel import check_rows
    from vllm_ndt.nan_words import word

    layers = [fused(torch, 16, 8, 2, 64, torch.bfloat16) for _ in range(4)]
    slots = torch.arange(16, device="cuda")
    slots[12:] = -1

    def forward() -> None:
        for number, layer in enumerate(layers, 1):
            check_rows(layer, number, 16, slots, True, memory.words, memory.peaks)

    memory.words.zero_()
    forward()
    # PyTorch allocates the random state that all graphs share with the first, which is kept alive for that.
    first, _ = capture(torch, forward)
    graph, grown = capture(torch, forward)
    checks.that("capture allocates nothing", grown == 0, grown)
    del first

    def replay() -> dict[int, int]:
        graph.replay()
        found = {row: value for row, value in enumerate(memory.words.tolist()) if value}
        memory.words.zero_()
        return found

    checks.that("replay of clean values", (found := replay()) == {}, found)
    layers[1][3][13] = NAN
    checks.that("replay with a bad padding row", (found := replay()) == {}, found)
    slots[12:14] = 3
    checks.that("replay after that row became real", (found := replay()) == {13: word(2, 1 << 6)}, found)
    layers[1][0][0], layers[0][0][0], layers[3][2][1] = INF, NAN, NAN
    expected = {0: word(1, 1), 1: word(4, 1 << 4), 13: word(2, 1 << 6)}
    checks.that("replay names the first layer of each row", (found := replay()) == expected, found)


def capture(torch: Any, function: Any) -> tuple[Any, int]:
    """The graph of a function's launches, and by how many bytes its capture made the device's memory grow."""
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.memory_allocated()
    with torch.cuda.graph(graph):
        function()
    return graph, torch.cuda.memory_allocated() - before


def fused(torch: Any, count: int, heads: int, kv_heads: int, size: int, dtype: Any) -> list[Any]:
    """q, k and v as views of one tensor, as the model has them, and the output; each (count, heads, size)."""
    width = (heads + 2 * kv_heads) * size
    qkv = torch.randn(count, width, device="cuda", dtype=dtype)
    q, k, v = qkv.split([heads * size, kv_heads * size, kv_heads * size], dim=-1)
    output = torch.randn(count, heads, size, device="cuda", dtype=dtype)
    return [q.view(-1, heads, size), k.view(-1, kv_heads, size), v.view(-1, kv_heads, size), output]


# ---- a model ----


class Model:
    """A running engine, its model runner, and what the guard found and logged."""

    def __init__(self, config: dict[str, Any] | Path, **arguments: Any) -> None:
        import torch
        from vllm import LLM

        self.lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("vllm.ndt.nan_guard").addHandler(handler)
        # Kept graphs can be asked for their nodes.
        original = torch.cuda.CUDAGraph
        torch.cuda.CUDAGraph = lambda *_, **__: original(keep_graph=True)
        folder = config if isinstance(config, Path) else Path(tempfile.mkdtemp(prefix="nan-guard-"))
        if not isinstance(config, Path):
            (folder / "config.json").write_text(json.dumps(config))
        graphs = {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 2, 4, 8]}
        usual: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 1024,
            "gpu_memory_utilization": 0.05,
            "kv_cache_memory_bytes": 2**29,
            "compilation_config": graphs,
        }
        self.llm = LLM(str(folder), **usual | arguments)
        self.runner = self.llm.collective_rpc(lambda worker: worker.model_runner)[0]

    def generate(self) -> list[list[int]]:
        """The tokens of three requests of different lengths."""
        prompts = [{"prompt_token_ids": list(range(10, 10 + length))} for length in (5, 17, 40)]
        return [list(out.outputs[0].token_ids) for out in self.llm.generate(prompts, parameters(32), use_tqdm=False)]

    def advance(self, requests: int, tokens: int, name: str = "r", length: int = 10) -> bool:
        """Start requests and step until each has `tokens` tokens, so that what follows is decoding."""
        for number in range(requests):
            prompt = {"prompt_token_ids": [(100 * number + 10 + at) % 290 for at in range(length)]}
            self.llm.llm_engine.add_request(f"{name}{number}", prompt, parameters(200))
        for _ in range(10 * tokens):
            outputs = self.step(1)
            if len(outputs) == requests and all(len(out) >= tokens for out in outputs.values()):
                return True
        return False

    def step(self, count: int) -> dict[str, list[int]]:
        """Step the engine; the tokens so far of the requests in the last step."""
        outputs: dict[str, list[int]] = {}
        for _ in range(count):
            for output in self.llm.llm_engine.step():
                outputs[output.request_id] = list(output.outputs[0].token_ids)
        return outputs

    def finish(self) -> dict[str, str]:
        """Run the requests that are left to their end; how each ended."""
        ends = {}
        while self.llm.llm_engine.has_unfinished_requests():
            for output in self.llm.llm_engine.step():
                if output.finished:
                    ends[output.request_id] = str(output.outputs[0].finish_reason)
        return ends

    def run_out(self) -> tuple[dict[str, list[int]], dict[str, str]]:
        """Run what was started to its end; the tokens and ends of the requests, by the last character of their names."""
        tokens: dict[str, list[int]] = {}
        ends: dict[str, str] = {}
        while self.llm.llm_engine.has_unfinished_requests():
            for output in self.llm.llm_engine.step():
                tokens[output.request_id[-1]] = list(output.outputs[0].token_ids)
                if output.finished:
                    ends[output.request_id[-1]] = str(output.outputs[0].finish_reason)
        return tokens, ends

    def findings(self) -> list[str]:
        return [line for line in self.lines if "non-finite" in line or "in the logits" in line]

    def inject_next(self, after: int) -> None:
        """Have the fault of the environment put in `after` steps from now; its place was fixed with the graphs."""
        from vllm_ndt import nan_step
        from vllm_ndt.nan_guard import process_guard

        guard = process_guard()
        steps = nan_step._steps
        assert guard
        assert guard.injection
        assert steps
        guard.injection = guard.injection._replace(step=steps.step + after)


def parameters(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)


def check_report(checks: Checks, config: dict[str, Any], tensors: str, **arguments: Any) -> Model:
    """Clean runs, graphs' nodes, an injected fault while graphs replay, padding."""
    from vllm_ndt.nan_guard import Guard

    eager: list[str] = []
    check = Guard.check

    def counted(self: Guard, name: str, *rest: Any) -> None:
        eager.append(name)
        check(self, name, *rest)

    Guard.check = counted  # type: ignore[method-assign]
    model = Model(config, **arguments)
    checks.note("model runner", type(model.runner).__module__)
    checks.that("one line at start", len(model.lines) == 1 and f"{LAYERS} attention layers" in model.lines[0], model.lines)  # fmt: skip
    checks.note("tokens", model.generate())
    checks.that("clean run, warm-up and capture give no line", model.findings() == [], model.findings())
    count_nodes(checks, model.runner)

    checks.that("three requests decode", model.advance(3, 6))
    eager.clear()
    model.inject_next(2)
    model.step(5)
    found = model.findings()
    checks.that("only graphs ran", not eager, eager[:3])
    checks.that("one finding", len(found) == 1, found)
    checks.that("names layer 2", len(found) == 1 and "layer model.layers.2.self_attn" in found[0], found)
    checks.that("names its tensors", len(found) == 1 and tensors in found[0], found)
    checks.that("names the second request", len(found) == 1 and "request r1" in found[0] and " more" not in found[0], found)  # fmt: skip
    model.finish()
    return model


def check_v2(checks: Checks) -> None:
    model = check_report(checks, DENSE, "output (NaN); q, k, v clean", attention_backend="TRITON_ATTN", enable_prefix_caching=False)  # fmt: skip
    check_padding(checks, model)
    # A weight goes bad while nothing but replayed graphs runs.
    before = len(model.findings())
    model.advance(3, 6, "w")
    model.llm.apply_model(poison)
    model.step(4)
    found = model.findings()[before:]
    checks.that("a bad weight", len(found) == 1 and "model.layers.2" in found[0] and "q (NaN)" in found[0] and "k, v clean" in found[0], found)  # fmt: skip
    model.finish()
    checks.that("and no more", len(model.findings()) == before + 1, model.findings())


def check_v1(checks: Checks) -> None:
    check_report(checks, DENSE, "output (NaN); q, k, v clean", attention_backend="TRITON_ATTN", enable_prefix_caching=False)  # fmt: skip


def check_mla(checks: Checks) -> None:
    """Where FlashAttention's library does not load, PyTorch does the prefill; the graphs of decoding need none of it."""
    import torch
    from vllm.v1.attention.backends.mla.prefill.flash_attn import FlashAttnPrefillBackend

    def prefill(self: Any, q: Any, k: Any, v: Any, cu_seqlens_q: Any, softmax_scale: float, causal: bool, out: Any = None, **_: Any) -> Any:  # fmt: skip
        made = q.new_empty(*q.shape[:2], v.shape[2])
        for begin, end in itertools.pairwise(cu_seqlens_q.tolist()):
            parts = (tensor[begin:end].transpose(0, 1)[None] for tensor in (q, k, v))
            own = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=causal, scale=softmax_scale)
            made[begin:end] = own[0].transpose(0, 1)
        return made if out is None else out.copy_(made.view_as(out))

    if not hasattr(torch.ops._vllm_fa2_C, "varlen_fwd"):
        FlashAttnPrefillBackend._flash_attn_varlen_diff_headdims = prefill
    check_report(checks, LATENT, "output (NaN); q, kv_c, k_pe clean", attention_backend="TRITON_MLA", enable_prefix_caching=False)  # fmt: skip


def check_abort(checks: Checks) -> None:
    """A request that is hit while graphs replay ends; the others' tokens, and later ones, are as without it."""
    model = Model(DENSE, attention_backend="TRITON_ATTN", enable_prefix_caching=True)

    def serve(fault: bool, name: str) -> tuple[dict[str, list[int]], dict[str, str]]:
        model.advance(3, 6, name)
        if fault:
            model.inject_next(3)
        return model.run_out()

    clean, ends = serve(False, "c")
    checks.that("all end by length", set(ends.values()) == {"length"}, ends)
    hit, ends = serve(True, "h")
    checks.that("the second ends with an error", ends == {"0": "length", "1": "error", "2": "length"}, ends)
    checks.that("the others' tokens are the same", hit["0"] == clean["0"] and hit["2"] == clean["2"], None)
    checks.that("what left before it is right", hit["1"] == clean["1"][: len(hit["1"])], len(hit["1"]))
    wrong = sum(serve(False, f"l{at}")[0] != clean for at in range(4))
    # by then every block of the small pool was used again, with the same prefix and without
    tokens = [model.generate() for _ in range(2)]
    checks.that("later requests are as before", not wrong and tokens[0] == tokens[1], wrong)
    checks.that("one line", len(model.findings()) == 1, model.findings())


def check_hybrid(checks: Checks) -> None:
    """States of linear attention that go bad end their request, and are clean when others get them."""
    from check_encoder_cache import _weights
    from tiny_models import write_hybrid_vision_model

    folder = write_hybrid_vision_model(Path(tempfile.mkdtemp(prefix="nan-guard-")))
    model = Model(
        folder,
        attention_backend="TRITON_ATTN",
        mm_encoder_attn_backend="TORCH_SDPA",
        gdn_prefill_backend="triton",
        limit_mm_per_prompt={"image": 0, "video": 0},
        max_model_len=4096,
        max_num_batched_tokens=4096,
        num_gpu_blocks_override=60,
        enable_prefix_caching=True,
    )
    model.llm.collective_rpc(_weights)
    scheduler = model.llm.llm_engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    layers = model.runner.compilation_config.static_forward_context
    states = [layer.kv_cache for name, layer in layers.items() if "linear_attn" in name]
    checks.note("states", [[list(cache.shape) for cache in layer] for layer in states])
    length = 2 * scheduler.cache_config.block_size + 100
    for name in ("c", "d"):  # the second has its prefix cached, as all that come later
        model.advance(3, 6, name, length)
        clean, ends = model.run_out()
        checks.that(f"all end by length ({name})", set(ends.values()) == {"length"}, ends)
    model.advance(3, 6, "h", length)
    own = next(name for name in scheduler.requests if name.startswith("h1"))
    blocks = [block for group in scheduler.kv_cache_manager.get_block_ids(own) for block in group if block]
    for layer in states:
        for cache in layer:
            cache[blocks] = NAN
    tokens, ends = model.run_out()
    checks.that("its request alone ends with an error", ends == {"0": "length", "1": "error", "2": "length"}, ends)
    checks.that("the others' tokens are the same", tokens["0"] == clean["0"] and tokens["2"] == clean["2"], None)
    found = model.findings()
    checks.that("one line, which names the layer behind", len(found) == 1 and "layers.3.self_attn" in found[0], found)
    given: set[int] = set()
    get = pool.get_new_blocks

    def watched(*arguments: Any, **named: Any) -> Any:
        new = get(*arguments, **named)
        given.update(block.block_id for block in new)
        return new

    pool.get_new_blocks = watched
    every = set(range(1, pool.num_gpu_blocks))
    for at in range(120):
        model.advance(3, 2, f"l{at}-", length if at == 0 else length + 17 * at)
        tokens, ends = model.run_out()
        if at == 0:
            checks.note("the same prompts give the same tokens", tokens == clean)
        if set(ends.values()) != {"length"} or given >= every:
            break
    checks.that(
        "each block was used again", given >= every, f"{len(given)} of {len(every)} after {3 * at + 3} requests"
    )
    checks.that("later requests end by length", set(ends.values()) == {"length"}, ends)
    checks.that("and no more lines", len(model.findings()) == 1, model.findings())


def check_padding(checks: Checks, model: Model) -> None:
    """Three requests in a graph of four rows whose last row reads an embedding of NaN."""
    name = "bad padding rows give no line"
    try:
        ids, hidden = model.runner.input_buffers.input_ids, model.runner.cudagraph_manager.hidden_states
    except AttributeError as error:
        checks.note(name, f"skipped: this model runner keeps its buffers elsewhere ({error})")
        return
    before = len(model.findings())
    model.advance(3, 4, "p")
    ids[3:] = PAD_TOKEN
    model.llm.apply_model(lambda inner: inner.model.embed_tokens.weight.data[PAD_TOKEN].fill_(NAN).numel())
    outputs = model.step(8)
    bad = [bool(row.isnan().any()) for row in hidden[:4]]
    ids[3:] = 0
    model.llm.apply_model(lambda inner: inner.model.embed_tokens.weight.data[PAD_TOKEN].fill_(0).numel())
    model.finish()
    if any(bad[:3]) or not bad[3] or any(PAD_TOKEN in tokens for tokens in outputs.values()):
        checks.note(name, f"skipped: NaN did not stay in the padding row alone {bad}")
        return
    checks.that(name, len(model.findings()) == before, model.findings())


def check_off(checks: Checks) -> None:
    from vllm.model_executor.layers.attention import attention

    model = Model(DENSE, attention_backend="TRITON_ATTN", enable_prefix_caching=False)
    function: Any = attention.unified_attention_with_output
    files = []
    while function is not None:
        files.append(inspect.getfile(function))
        function = getattr(function, "__wrapped__", None)
    checks.that("the operator is upstream's own", not any("vllm_ndt" in file for file in files), files)
    checks.note("tokens", model.generate())
    checks.that("no line", model.lines == [], model.lines)
    count_nodes(checks, model.runner)


def check_stock(checks: Checks) -> None:
    model = Model(DENSE, attention_backend="TRITON_ATTN", enable_prefix_caching=False)
    checks.note("tokens", model.generate())
    count_nodes(checks, model.runner)


def poison(model: Any) -> None:
    model.model.layers[2].self_attn.qkv_proj.bias.data[5].fill_(NAN)


def count_nodes(checks: Checks, runner: Any) -> None:
    """Note the number of nodes of each full graph, by its number of tokens."""
    try:
        maps = Path("/proc/self/maps").read_text().split()
        runtime = ctypes.CDLL(next(path for path in maps if "libcudart" in path))
        nodes = {}
        for desc, graph in runner.cudagraph_manager.graphs.items():
            count = ctypes.c_size_t()
            status = runtime.cudaGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
            if status:
                raise RuntimeError(f"cudaGraphGetNodes gave {status}")
            nodes[str(desc.num_tokens)] = count.value
        checks.note("nodes", nodes)
    except Exception as error:
        checks.note("nodes", f"skipped: {error!r}")


# ---- all ----

INJECT = "layer=2,tensor=output,step=100000000,row=1,value=nan"
PARTS: dict[str, tuple[Callable[[Checks], None], dict[str, str]]] = {
    "kernel": (check_kernel, {}),
    "off": (check_off, {"VLLM_USE_V2_MODEL_RUNNER": "1"}),
    "stock": (check_stock, {"VLLM_USE_V2_MODEL_RUNNER": "1"}),
    "v2": (check_v2, {"VLLM_NDT_NAN_GUARD": "report", "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_NDT_NAN_INJECT": INJECT}),
    "v1": (check_v1, {"VLLM_NDT_NAN_GUARD": "report", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_NDT_NAN_INJECT": INJECT}),
    "abort": (
        check_abort,
        {"VLLM_NDT_NAN_GUARD": "abort", "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_NDT_NAN_INJECT": INJECT},
    ),
    "hybrid": (
        check_hybrid,
        {"VLLM_NDT_NAN_GUARD": "abort", "VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONHASHSEED": "0"},
    ),
    "mla": (
        check_mla,
        {"VLLM_NDT_NAN_GUARD": "report", "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_NDT_NAN_INJECT": INJECT},
    ),
}


def run_part(name: str) -> int:
    """Run one part here and print its result as the last line."""
    checks = Checks()
    try:
        PARTS[name][0](checks)
    except Exception:
        checks.failed.append("it ended with an exception")
        checks.results["exception"] = traceback.format_exc()[-3000:]
        print(checks.results["exception"], flush=True)
    print(MARK + json.dumps({"failed": checks.failed, "results": checks.results}), flush=True)
    return int(bool(checks.failed))


def run_apart(name: str, stock: str | None) -> dict[str, Any]:
    """Run one part in a process of its own, showing what it prints."""
    environ = {**os.environ, **ENVIRON, **PARTS[name][1]}
    if name == "stock":
        environ["PYTHONPATH"] = str(stock)
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--here", name],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=570,
        )
        text = done.stdout
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        text += "\ntimed out"
    *rest, last = text.split(MARK)
    shown = [line for line in "".join(rest or [last]).splitlines() if line[:4] in ("ok  ", "FAIL", "note")]
    print("\n".join([f"--- {name}", *shown]), flush=True)
    if not rest:
        return {"failed": ["it gave no result"], "tail": text[-3000:]}
    result: dict[str, Any] = json.JSONDecoder().raw_decode(last)[0]
    if result["failed"]:
        result["tail"] = "".join(rest)[-3000:]
    return result


def compare(parts: dict[str, Any]) -> dict[str, Any]:
    """What `v2` and `off` say together: the fault's node and one a layer, the same tokens."""
    on, off, stock = (parts.get(name, {}).get("results", {}) for name in ("v2", "off", "stock"))
    nodes, plain = on.get("nodes"), off.get("nodes")
    result: dict[str, Any] = {"same tokens": on.get("tokens") == off.get("tokens"), "failed": []}
    if not result["same tokens"]:
        result["failed"].append("same tokens")
    if stock:
        result["off is as stock"] = [stock.get("nodes"), stock.get("tokens")] == [plain, off.get("tokens")]
        if not isinstance(plain, dict) or not result["off is as stock"]:
            result["failed"].append("off is as stock")
    if isinstance(nodes, dict) and isinstance(plain, dict) and nodes:
        more = {size: nodes[size] - plain.get(size, 0) for size in nodes}
        result["nodes more"] = more
        # a fault's kernel is in the graphs that have its row
        if {count - (int(size) > 1) for size, count in more.items()} != {LAYERS}:
            result["failed"].append("one node a layer")
    else:
        result["nodes more"] = "skipped: no counts"
    return result


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--here"] and len(arguments) == 2 and arguments[1] in PARTS:
        return run_part(arguments[1])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", metavar="SITE")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PARTS))
    options = parser.parse_args(arguments)
    names = options.names or [name for name in PARTS if options.stock or name != "stock"]
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if "stock" in names and not options.stock:
        parser.error("the part stock needs --stock: a folder with a stock vllm")
    begin = time.monotonic()
    with ThreadPoolExecutor(len(names)) as pool:
        parts = dict(zip(names, pool.map(lambda name: run_apart(name, options.stock), names), strict=True))
    if "v2" in parts and "off" in parts:
        parts["v2 and off"] = compare(parts)
    failed = {name: part["failed"] for name, part in parts.items() if part["failed"]}
    print(json.dumps({"ok": not failed, "failed": failed, "seconds": round(time.monotonic() - begin), **parts}))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
