# SPDX-License-Identifier: Apache-2.0
"""What the NaN guard costs on a GPU: stock, the guard off, report and abort, in one run.

    python benchmarks/nan_guard.py --stock SITE [--rounds 5] [--layers 32]

Runs with the patched wheel; SITE is a folder with a stock vllm to import instead. Four engines of the same dense model
(8B class at 32 layers, float16, random weights, TRITON_ATTN, torch.compile, full and piecewise CUDA graphs) are on the
card at once, about 100 GB, and take turns, one load at a time, with stock first and last in each round: so nothing
but the guard differs, and the two turns of stock show the noise. Three loads: decoding at batch 1 and 32, and prefill
of 16 prompts of 4,096 tokens.

Prints a table of medians relative to stock, then one JSON object. Exit status: 0 within the goals (decoding 1.0 %,
prefill 0.2 %, off within the noise), 1 not, 2 bad usage or an engine that did not start.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
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
MODES = ("stock", "off", "report", "abort")
# load -> requests, tokens in, tokens out, and the most that the guard may cost
LOADS = {"decode 1": (1, 16, 256, 0.010), "decode 32": (32, 64, 256, 0.010), "prefill": (16, 4096, 1, 0.002)}


def serve(layers: int) -> None:
    """Start an engine, then run each load that a line of the input names and print how long it took, in seconds."""
    import torch
    from vllm import LLM, SamplingParams

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
    llm = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=8192,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=0.18,
        # all prompts of the largest load, and what is left over does not matter
        kv_cache_memory_bytes=(16 * 4096 + 2048) * layers * 2 * 8 * 128 * 2,
        enable_prefix_caching=False,
        attention_backend="TRITON_ATTN",
    )

    def run(name: str) -> float:
        requests, given, made, _ = LOADS[name]
        prompts = [{"prompt_token_ids": [10 + (at * 7 + place) % 30_000 for place in range(given)]} for at in range(requests)]  # noqa: E501  # fmt: skip
        sampling = SamplingParams(max_tokens=made, temperature=0.0, ignore_eos=True, detokenize=False)
        torch.cuda.synchronize()
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    for name in LOADS:
        run(name)
    versions = {"torch": torch.__version__, "card": torch.cuda.get_device_name()}
    print(MARK + json.dumps(versions), flush=True)
    for line in sys.stdin:
        print(MARK + json.dumps(run(line.strip())), flush=True)


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

    def run(self, load: str) -> float:
        """Seconds for a load."""
        assert self._process.stdin
        self._process.stdin.write(load + "\n")
        self._process.stdin.flush()
        return float(self.answer())


@contextmanager
def engine(mode: str, stock: str, layers: int) -> Iterator[Engine]:
    """An engine that is starting; stock, or patched with the guard in that mode."""
    environ = os.environ | ENVIRONMENT | {"VLLM_NDT_NAN_GUARD": "off" if mode == "stock" else mode}
    if mode == "stock":
        environ["PYTHONPATH"] = stock
        del environ["VLLM_NDT_NAN_GUARD"]
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
    if not options.stock:
        parser.error("--stock is missing: the folder of a stock vllm, to compare with")
    times: dict[str, dict[str, list[float]]] = {load: {} for load in LOADS}
    with ExitStack() as stack:
        begin = time.monotonic()
        engines = {mode: stack.enter_context(engine(mode, options.stock, options.layers)) for mode in MODES}
        answers = [one.answer() for one in engines.values()]
        versions = answers[0]
        print(f"{versions['card']}, PyTorch {versions['torch']}; started in {time.monotonic() - begin:.0f} s", flush=True)  # noqa: E501  # fmt: skip
        for load in LOADS:
            for _ in range(options.rounds):
                for mode, turn in (("stock", "stock"), *((m, m) for m in MODES[1:]), ("stock", "stock again")):
                    times[load].setdefault(turn, []).append(engines[mode].run(load))
    return report(times, versions)


def report(times: dict[str, dict[str, list[float]]], versions: dict[str, str]) -> int:
    """Print the table and the JSON; gives the exit status."""
    missed = []
    medians: dict[str, dict[str, float]] = {}
    for load, turns in times.items():
        medians[load] = {turn: statistics.median(seconds) for turn, seconds in turns.items()}
        # each turn against the two of stock around it in its round, so that a drift of the card's clock cancels out
        both = [(a + b) / 2 for a, b in zip(turns["stock"], turns["stock again"], strict=True)]
        ratios = {
            turn: statistics.median(s / base for s, base in zip(seconds, both, strict=True)) - 1
            for turn, seconds in turns.items()
        }
        noise = abs(ratios["stock again"] - ratios["stock"])
        words = "  ".join(f"{turn} {ratio:+.2%}" for turn, ratio in ratios.items())
        print(f"{load:10} {medians[load]['stock']:.4f} s  {words}", flush=True)
        goal = LOADS[load][3]
        missed += [f"{load}, {mode}: {ratios[mode]:+.2%}" for mode in ("report", "abort") if ratios[mode] > goal]
        if ratios["off"] > max(noise, 0.005):
            missed.append(f"{load}, off: {ratios['off']:+.2%}, noise {noise:.2%}")
    print(json.dumps({"missed": missed, "medians": medians, "times": times, **versions}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
