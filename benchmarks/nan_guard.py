# SPDX-License-Identifier: Apache-2.0
"""What the NaN guard costs on a GPU: report and abort in one engine with and without, off beside stock.

    python benchmarks/nan_guard.py [--stock SITE] [--rounds 5] [--layers 32]

Runs with the patched wheel; SITE is a folder with a stock vllm to import instead. Five engines of the same dense model
(8B class at 32 layers, float16, random weights, TRITON_ATTN, torch.compile, full and piecewise CUDA graphs) are on the
card at once, about 110 GB, and take turns, one load at a time; without --stock the guarded one alone.

Two processes of the same code differ by about a percent, so the guard is weighed inside one: an engine in mode abort
captures its CUDA graphs a second time without the guard, and switches between graphs, and between what the worker and
the scheduler do a step, from turn to turn: plain, report, abort, plain again. `off` runs in two processes, and so does
stock; what the two of stock differ by is the noise. Three loads: decoding at batch 1 and 32, and prefill of 16 prompts
of 4,096 tokens.

Prints a table of medians, then one JSON object. Exit status: 0 within the goals (decoding 1.0 %, prefill 0.2 %, off
within the noise), 1 not, 2 bad usage or an engine that did not start.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

MARK = "RESULT "
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
PROCESSES = ("stock", "off", "guarded", "stock again", "off again")
TURNS = ("plain", "report", "abort", "plain again")  # of the guarded engine
# load -> requests, tokens in, tokens out, and the most that the guard may cost
LOADS = {"decode 1": (1, 16, 256, 0.010), "decode 32": (32, 64, 256, 0.010), "prefill": (16, 4096, 1, 0.002)}


def start(layers: int) -> Any:
    """An engine with the model of the benchmark."""
    from vllm import LLM

    folder = Path(tempfile.mkdtemp())
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "torch_dtype": "float16",
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=8192,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=0.16,
        # a few of the longest prompts: each ends with its prefill
        kv_cache_memory_bytes=(6 * 4096 + 2048) * layers * 2 * 8 * 128 * 2,
        enable_prefix_caching=False,
        attention_backend="TRITON_ATTN",
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]},
    )


def run(llm: Any, load: str) -> float:
    """Seconds for a load."""
    import torch
    from vllm import SamplingParams

    requests, given, made, _ = LOADS[load]
    prompts = [
        {"prompt_token_ids": [10 + (at * 7 + place) % 30_000 for place in range(given)]} for at in range(requests)
    ]
    sampling = SamplingParams(max_tokens=made, temperature=0.0, ignore_eos=True, detokenize=False)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - begin


def switch(llm: Any) -> Callable[[str], None]:
    """A function that turns an engine of mode abort into one of another mode, graphs included."""
    from vllm_ndt import nan_step
    from vllm_ndt.nan_guard import process_guard

    guard, steps = process_guard(), nan_step._steps
    runner = llm.collective_rpc(lambda worker: worker.model_runner)[0]
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert guard and steps and scheduler.nonfinite.mode == "abort"
    manager, memory, guarded = runner.cudagraph_manager, guard.memory, runner.cudagraph_manager.graphs

    def turn(mode: str) -> None:
        on = mode in ("report", "abort")
        guard.memory = memory if on else None
        nan_step._steps = steps if on else None
        manager.graphs = guarded if on else plain
        scheduler.nonfinite.mode = mode if on else "off"

    plain: dict[Any, Any] = {}
    turn("plain")
    runner.capture_model()
    assert plain.keys() == guarded.keys()
    return turn


def serve(layers: int) -> None:
    """Start an engine, then run each load that a line of the input names, after a turn, and print its time."""
    import torch

    llm = start(layers)
    turn = switch(llm) if os.environ.get("VLLM_NDT_NAN_GUARD") == "abort" else None
    for mode in TURNS if turn else ("",):
        if turn:
            turn(mode)
        for load in LOADS:
            run(llm, load)
    versions = {"torch": torch.__version__, "card": torch.cuda.get_device_name()}
    print(MARK + json.dumps(versions), flush=True)
    for line in sys.stdin:
        load, _, mode = line.strip().partition("/")
        if turn:
            turn(mode)
        print(MARK + json.dumps(run(llm, load)), flush=True)


class Engine:
    """An engine in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self._process, self._log = process, log

    def answer(self) -> Any:
        """What it says next."""
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        print(self._log.read_text()[-3000:], file=sys.stderr)
        print("an engine ended; its log is above", file=sys.stderr)
        raise SystemExit(2)

    def run(self, load: str, turn: str = "") -> float:
        """Seconds for a load."""
        assert self._process.stdin
        self._process.stdin.write(f"{load}/{turn}\n")
        self._process.stdin.flush()
        return float(self.answer())


@contextmanager
def engine(name: str, stock: str, layers: int) -> Iterator[Engine]:
    """An engine that is starting, one of PROCESSES."""
    kind = name.split()[0]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_NDT_")} | ENVIRONMENT
    if kind == "stock":
        environ["PYTHONPATH"] = stock
    if kind == "guarded":
        environ["VLLM_NDT_NAN_GUARD"] = "abort"
    log = Path(tempfile.mkdtemp()) / "log"
    command = [sys.executable, __file__, "--serve", "--layers", str(layers)]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        yield Engine(process, log)
    finally:
        process.kill()
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", metavar="SITE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.layers)
        return 0
    names = PROCESSES if options.stock else ("guarded",)
    with ExitStack() as stack:
        begin = time.monotonic()
        engines = {name: stack.enter_context(engine(name, options.stock, options.layers)) for name in names}
        answers = [one.answer() for one in engines.values()]
        versions = answers[0]
        print(f"{versions['card']}, PyTorch {versions['torch']}; started in {time.monotonic() - begin:.0f} s", flush=True)  # noqa: E501  # fmt: skip
        times, ratios, missed = {}, {}, []
        for load in LOADS:
            turns = times[load] = measure(engines, load, options.rounds)
            row = ratios[load] = compare(turns)
            words = "  ".join(f"{name} {ratio:+.2%}" for name, ratio in row.items())
            print(f"{load:10} {statistics.median(turns['plain']):.4f} s  {words}", flush=True)
            missed += misses(load, row)
    print(json.dumps({"missed": missed, "ratios": ratios, "times": times, **versions}))
    return 1 if missed else 0


def measure(engines: dict[str, Engine], load: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each turn, by round: one turn of each process, but the guarded engine's own."""
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, one in engines.items():
            for turn in TURNS if name == "guarded" else ("",):
                times.setdefault(turn or name, []).append(one.run(load, turn))
    return times


def against(turns: dict[str, list[float]], name: str, base: str) -> float:
    """The median over rounds of a turn's time by the mean of both turns of `base` in its round, less 1."""
    both = [(a + b) / 2 for a, b in zip(turns[base], turns[f"{base} again"], strict=True)]
    return statistics.median(seconds / mean for seconds, mean in zip(turns[name], both, strict=True)) - 1


def compare(turns: dict[str, list[float]]) -> dict[str, float]:
    """What each turn takes more than its base: the same engine without the guard, or stock."""
    row = {turn: against(turns, turn, "plain") for turn in TURNS}
    return row | {name: against(turns, name, "stock") for name in PROCESSES if name in turns}


def misses(load: str, row: dict[str, float]) -> list[str]:
    """Which goals a row of `compare` does not reach."""
    found = [f"{load}, {mode}: {row[mode]:+.2%}" for mode in ("report", "abort") if row[mode] > LOADS[load][3]]
    if "stock" in row:
        off, noise = (row["off"] + row["off again"]) / 2, max(0.005, abs(row["stock again"] - row["stock"]))
        found += [f"{load}, off: {off:+.2%}, noise {noise:.2%}"] if off > noise else []
    return found


if __name__ == "__main__":
    sys.exit(main())
