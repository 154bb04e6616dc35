# SPDX-License-Identifier: Apache-2.0
"""Check the NaN guard on a GPU, with the patched wheel: the kernel alone, then a small model under full CUDA graphs.

    python check_nan_guard.py [kernel] [on] [off]

Without words: all three, each in a process of its own, 2 to 4 minutes together. `kernel` compares the Triton kernel
with PyTorch, under graph replay too. `on` runs a dense model with dummy weights and full graphs: no line for a clean
run nor for bad padding rows, one line for a weight that goes bad while only graphs are replayed. `off` requires that
the operator is upstream's own; the graphs of `on` then have one node more a layer than those of `off`.

Prints what it finds as it goes, then one JSON object. Exit status: 0 all held, 1 something did not, 2 bad usage.
"""

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
from pathlib import Path
from typing import Any

NAN, INF = float("nan"), float("inf")
MARK = "RESULT "
LAYERS = 4
PAD_TOKEN = 31_999
CONFIG = {
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


# ---- the kernel alone ----


def check_kernel(checks: Checks) -> None:
    import torch
    import vllm._custom_ops  # noqa: F401  (loads the native library that makes the GPU's view of host memory)
    from vllm_ndt.nan_guard import _flags, _real, _Watch
    from vllm_ndt.nan_kernel import FLAGS, check_rows

    device = torch.device("cuda", torch.cuda.current_device())
    checks.note("device", torch.cuda.get_device_name())
    found: list[tuple[int, int]] = []
    watch = _Watch(device, lambda number, flags: found.append((number, flags)))

    def clear() -> None:
        torch.cuda.synchronize()
        watch.state.zero_()
        watch.view.zero_()
        torch.cuda.synchronize()

    def seen() -> tuple[int, int]:
        torch.cuda.synchronize()
        number, *flags = watch._host.tolist()
        return number, sum(1 << bit for bit in range(FLAGS) if flags[bit])

    # The thread must see a finding without any synchronisation. First, because it looks only once.
    tensors = fused(torch, 7, 8, 2, 64, torch.float16)
    slots = torch.arange(7, device=device)
    check_rows(tensors, 7, slots, True, watch.state, watch.view, 5)
    time.sleep(1)
    quiet = list(found)
    tensors[1][3, 1, 9] = NAN
    start = time.monotonic()
    check_rows(tensors, 7, slots, True, watch.state, watch.view, 5)
    while not found and time.monotonic() < start + 5:
        time.sleep(0.01)
    checks.that("thread is quiet on clean values", quiet == [], quiet)
    checks.that("thread sees the host words", found == [(5, 1 << 2)], [found, round(time.monotonic() - start, 2)])

    wrong: list[Any] = []
    launches = 0
    shapes = ((8, 2, 64), (8, 2, 80), (32, 8, 128), (4, 4, 192), (8, 1, 256))
    for dtype, (heads, kv_heads, size), count in itertools.product(
        (torch.float16, torch.bfloat16, torch.float32), shapes, (1, 33, 8192)
    ):
        for by_slot in (True, False) if size in (64, 80) else (True,):
            real = max(1, count - 3)
            if by_slot:
                marks = torch.arange(count, device=device)
                marks[real:] = -1
            else:
                marks = torch.tensor([0, real // 2, real, real], dtype=torch.int32, device=device)
            cases: list[tuple[int | None, list[float]]] = [(None, [])]
            cases += [(place, bad) for place in range(4) for bad in ([NAN], [INF], [-INF, NAN])]
            for place, bad in cases:
                for row in {0, real - 1, count - 1}:
                    tensors = fused(torch, count, heads, kv_heads, size, dtype)
                    if place is not None:
                        for index, value in enumerate(bad):
                            tensors[place][row, index - 1, size - 1 - index] = value
                    expected = _flags(tensors, _real(marks, by_slot, count))
                    clear()
                    check_rows(tensors, count, marks, by_slot, watch.state, watch.view, 9)
                    launches += 1
                    if seen() != ((9, expected) if expected else (0, 0)):
                        wrong.append([str(dtype), heads, size, count, by_slot, place, row, str(bad), seen(), expected])
    checks.that("kernel agrees with PyTorch", not wrong, wrong[:5] or f"{launches} launches")

    # Many rows at once must still give one complete answer.
    tensors = fused(torch, 8192, 8, 2, 128, torch.float16)
    slots = torch.arange(8192, device=device)
    tensors[1][8000], tensors[3][:] = NAN, INF
    clear()
    check_rows(tensors, 8192, slots, True, watch.state, watch.view, 2)
    checks.that("rows of one launch add up", seen() == (2, 1 << 2 | 2 << 6), seen())

    check_replay(torch, checks, watch, clear, seen, check_rows)


def capture(torch: Any, function: Any) -> tuple[Any, int]:
    """The graph of a function's launches, and by how many bytes its capture made the device's memory grow."""
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.memory_allocated()
    with torch.cuda.graph(graph):
        function()
    return graph, torch.cuda.memory_allocated() - before


def check_replay(torch: Any, checks: Checks, watch: Any, clear: Any, seen: Any, check_rows: Any) -> None:
    """Four layers in one captured graph, whose tensors and slot mapping change between replays."""
    layers = [fused(torch, 16, 8, 2, 64, torch.bfloat16) for _ in range(LAYERS)]
    slots = torch.arange(16, device="cuda")
    slots[12:] = -1

    def forward() -> None:
        for number, tensors in enumerate(layers, 1):
            check_rows(tensors, 16, slots, True, watch.state, watch.view, number)

    clear()
    forward()
    # PyTorch allocates the random state that all graphs share with the first, which is kept alive for that.
    first, _ = capture(torch, forward)
    graph, grown = capture(torch, forward)
    checks.that("capture allocates nothing", grown == 0, grown)
    del first

    def replay() -> tuple[int, int]:
        graph.replay()
        found: tuple[int, int] = seen()
        return found

    checks.that("replay of clean values", (found := replay()) == (0, 0), found)
    layers[1][3][13] = NAN
    checks.that("replay with a bad padding row", (found := replay()) == (0, 0), found)
    slots[12:14] = 3
    checks.that("replay after that row became real", (found := replay()) == (2, 1 << 6), found)
    layers[1][0][0], layers[0][0][0], layers[3][2][1] = INF, NAN, NAN
    checks.that("later replays change nothing", (found := replay()) == (2, 1 << 6), found)
    clear()
    checks.that("replay names the first layer of several", (found := replay()) == (1, 1 << 0), found)


def fused(torch: Any, count: int, heads: int, kv_heads: int, size: int, dtype: Any) -> list[Any]:
    """q, k and v as views of one tensor, as the model has them, and the output; each (count, heads, size)."""
    width = (heads + 2 * kv_heads) * size
    qkv = torch.randn(count, width, device="cuda", dtype=dtype)
    q, k, v = qkv.split([heads * size, kv_heads * size, kv_heads * size], dim=-1)
    output = torch.randn(count, heads, size, device="cuda", dtype=dtype)
    return [q.view(-1, heads, size), k.view(-1, kv_heads, size), v.view(-1, kv_heads, size), output]


# ---- a model ----


def check_on(checks: Checks) -> None:
    from vllm_ndt.nan_guard import Guard

    eager_calls: list[str] = []
    check = Guard.check

    def counted(self: Guard, tensors: Any, layer_name: Any) -> None:
        eager_calls.append(str(layer_name))
        check(self, tensors, layer_name)

    Guard.check = counted  # type: ignore[method-assign]
    lines: list[str] = []
    llm, runner = start(lines)
    checks.note("model runner", f"{type(runner).__module__}.{type(runner).__name__}")
    checks.that("one line at start", len(lines) == 1 and f"{LAYERS} attention layers" in lines[0], list(lines))

    tokens = generate(llm)
    time.sleep(1)
    checks.that("clean run, warm-up and capture give no line", findings(lines) == [], findings(lines))
    checks.note("tokens", tokens)
    count_nodes(checks, runner)

    replays = count_replays(runner)
    checks.that("decoding replays full graphs", advance(llm, 3, 12) and replays[0] > 0, replays[0])
    finish(llm)

    check_padding(checks, llm, runner, lines)

    # A weight goes bad while nothing but replayed graphs runs.
    advance(llm, 3, 6)
    eager_calls.clear()
    replays[0] = 0
    llm.apply_model(poison)
    step(llm, 6)
    time.sleep(1)
    found = findings(lines)
    checks.note("after the poison", {"graph replays": replays[0], "eager calls": len(eager_calls)})
    checks.that("only graphs ran", replays[0] > 0 and not eager_calls, [replays[0], eager_calls[:3]])
    checks.that("one line", len(found) == 1, found)
    checks.that("names layer 2", len(found) == 1 and "model.layers.2.self_attn.attn" in found[0], found)
    checks.that("names q alone", len(found) == 1 and "q (NaN)" in found[0] and "k, v clean" in found[0], found)
    finish(llm)
    generate(llm)
    time.sleep(1)
    checks.that("still one line", len(findings(lines)) == 1, findings(lines))


def check_padding(checks: Checks, llm: Any, runner: Any, lines: list[str]) -> None:
    """Three requests in a graph of four rows whose last row reads an embedding of NaN."""
    name = "bad padding rows give no line"
    try:
        ids, hidden = runner.input_buffers.input_ids, runner.cudagraph_manager.hidden_states
    except AttributeError as error:
        checks.note(name, f"skipped: this model runner keeps its buffers elsewhere ({error})")
        return
    advance(llm, 3, 4)
    ids[3:] = PAD_TOKEN
    llm.apply_model(lambda model: model.model.embed_tokens.weight.data[PAD_TOKEN].fill_(NAN).numel())
    outputs = step(llm, 8)
    time.sleep(1)
    bad = [bool(row.isnan().any()) for row in hidden[:4]]
    ids[3:] = 0
    llm.apply_model(lambda model: model.model.embed_tokens.weight.data[PAD_TOKEN].fill_(0).numel())
    finish(llm)
    if any(bad[:3]) or not bad[3] or any(PAD_TOKEN in tokens for tokens in outputs.values()):
        checks.note(name, f"skipped: NaN did not stay in the padding row alone {bad}")
        return
    checks.that(name, findings(lines) == [], findings(lines))


def check_off(checks: Checks) -> None:
    from vllm.model_executor.layers.attention import attention

    lines: list[str] = []
    llm, runner = start(lines)
    function: Any = attention.unified_attention_with_output
    files = []
    while function is not None:
        files.append(inspect.getfile(function))
        function = getattr(function, "__wrapped__", None)
    checks.that("the operator is upstream's own", not any("vllm_ndt" in file for file in files), files)
    checks.note("tokens", generate(llm))
    checks.that("no line", lines == [], lines)
    count_nodes(checks, runner)


def start(lines: list[str]) -> tuple[Any, Any]:
    """An engine in this process, and its model runner; the guard's messages go to `lines`."""
    import torch
    from vllm import LLM

    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm.ndt.nan_guard").addHandler(handler)
    # Kept graphs can be asked for their nodes.
    original = torch.cuda.CUDAGraph
    torch.cuda.CUDAGraph = lambda *_, **__: original(keep_graph=True)
    folder = Path(tempfile.mkdtemp(prefix="nan-guard-"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    begin = time.monotonic()
    llm = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        gpu_memory_utilization=0.2,
        enable_prefix_caching=False,
        attention_backend="TRITON_ATTN",
        compilation_config={"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 2, 4, 8]},
    )
    print(f"note engine started in {time.monotonic() - begin:.0f} s", flush=True)
    return llm, llm.collective_rpc(lambda worker: worker.model_runner)[0]


def parameters(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)


def generate(llm: Any) -> list[list[int]]:
    """The tokens of three requests of different lengths."""
    prompts = [{"prompt_token_ids": list(range(10, 10 + length))} for length in (5, 17, 40)]
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, parameters(32), use_tqdm=False)]


def advance(llm: Any, requests: int, tokens: int) -> bool:
    """Start requests and step until each has `tokens` tokens, so that what follows is decoding."""
    for number in range(requests):
        prompt = {"prompt_token_ids": list(range(100 * number + 10, 100 * number + 20))}
        llm.llm_engine.add_request(f"{time.monotonic_ns()}-{number}", prompt, parameters(200))
    for _ in range(10 * tokens):
        outputs = step(llm, 1)
        if len(outputs) == requests and all(len(out) >= tokens for out in outputs.values()):
            return True
    return False


def step(llm: Any, count: int) -> dict[str, list[int]]:
    """Step the engine; the tokens so far of the requests in the last step."""
    outputs: dict[str, list[int]] = {}
    for _ in range(count):
        for output in llm.llm_engine.step():
            outputs[output.request_id] = list(output.outputs[0].token_ids)
    return outputs


def finish(llm: Any) -> None:
    """Run the requests that are left to their end."""
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()


def poison(model: Any) -> None:
    model.model.layers[2].self_attn.qkv_proj.bias.data[5].fill_(NAN)


def findings(lines: list[str]) -> list[str]:
    return [line for line in lines if "first non-finite" in line]


def count_replays(runner: Any) -> list[int]:
    """A cell that counts the replays of full graphs from now on."""
    manager, cell = runner.cudagraph_manager, [0]
    run: Callable[..., Any] = manager.run_fullgraph

    def counted(desc: Any) -> Any:
        cell[0] += 1
        return run(desc)

    manager.run_fullgraph = counted
    return cell


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

PARTS: dict[str, tuple[Callable[[Checks], None], str]] = {
    "kernel": (check_kernel, "off"),
    "on": (check_on, "report"),
    "off": (check_off, "off"),
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


def run_apart(name: str) -> dict[str, Any]:
    """Run one part in a process of its own, showing what it prints."""
    environ = {**os.environ, **ENVIRON, "VLLM_NDT_NAN_GUARD": PARTS[name][1]}
    print(f"--- {name}", flush=True)
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--here", name],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=180,
        )
        text = done.stdout
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        text += "\ntimed out"
    *rest, last = text.split(MARK)
    shown = [line for line in "".join(rest or [last]).splitlines() if line[:4] in ("ok  ", "FAIL", "note")]
    print("\n".join(shown), flush=True)
    if not rest:
        return {"failed": ["it gave no result"], "tail": text[-3000:]}
    result: dict[str, Any] = json.JSONDecoder().raw_decode(last)[0]
    if result["failed"]:
        result["tail"] = "".join(rest)[-3000:]
    return result


def compare(parts: dict[str, Any]) -> dict[str, Any]:
    """What `on` and `off` say together: one node a layer, the same tokens."""
    on, off = (parts[name].get("results", {}) for name in ("on", "off"))
    nodes, plain = on.get("nodes"), off.get("nodes")
    result: dict[str, Any] = {"same tokens": on.get("tokens") == off.get("tokens"), "failed": []}
    if isinstance(nodes, dict) and isinstance(plain, dict) and nodes:
        more = {size: nodes[size] - plain.get(size, 0) for size in nodes}
        result["nodes more"] = more
        if set(more.values()) != {LAYERS}:
            result["failed"].append("one node a layer")
    else:
        result["nodes more"] = "skipped: no counts"
    return result


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--here"] and len(arguments) == 2 and arguments[1] in PARTS:
        return run_part(arguments[1])
    if any(argument not in PARTS for argument in arguments):
        print(__doc__, file=sys.stderr)
        return 2
    begin = time.monotonic()
    parts = {name: run_apart(name) for name in arguments or PARTS}
    if "on" in parts and "off" in parts:
        parts["on and off"] = compare(parts)
    failed = {name: part["failed"] for name, part in parts.items() if part["failed"]}
    print(json.dumps({"ok": not failed, "failed": failed, "seconds": round(time.monotonic() - begin), **parts}))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
