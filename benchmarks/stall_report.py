# SPDX-License-Identifier: Apache-2.0
"""What report-engine-stall costs a step of the engine core: the time in it against the time of the CPU engine's steps.

    python stall_report.py [--requests N] [--seconds S]

A tiny model, so that a step is short and the share is a large one; a GPU's steps are longer. Prints one JSON object:
`step` (mean seconds without it), `cost` (the share that it takes more: goal 0.005 at most), `longest` (seconds, the
longest that one step was held up). Exit status 0, or 1 where the goal is missed.
"""

import argparse
import json
import os
import queue
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "patches"))

GOAL = 0.005


def engine(requests: int) -> Any:
    """An engine core in this process, on a tiny model."""
    import tiny_models
    from vllm import LLM

    folder = tiny_models.write_text_model(Path(tempfile.mkdtemp(prefix="stall-report-")))
    return LLM(str(folder), load_format="dummy", enforce_eager=True, max_model_len=8192, max_num_seqs=requests, seed=0)


def fill(llm: Any, requests: int) -> None:
    """Have as many requests decode as asked for."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=8000, ignore_eos=True, temperature=0)
    for number in range(requests):
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": [11 + number % 200] * 8}, sampling)
    for _ in range(5):
        llm.llm_engine.engine_core.engine_core.step_fn()


def measure(core: Any, progress: Any, seconds: float) -> tuple[int, float, float, float]:
    """Steps for a time: how many, seconds in them, seconds in the report, and the most of the latter in one step."""
    steps, inside, longest = 0, 0.0, 0.0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        first = time.perf_counter()
        progress.begin()
        second = time.perf_counter()
        outputs, executed = core.step_fn()
        third = time.perf_counter()
        progress.end(outputs, executed)
        own = second - first + time.perf_counter() - third
        steps, inside, longest = steps + 1, inside + own, max(longest, own)
    return steps, time.perf_counter() - began - inside, inside, longest


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    llm = engine(options.requests)
    fill(llm, options.requests)
    core = llm.llm_engine.engine_core.engine_core
    # what an engine core in a process of its own has
    core.output_queue, core.engine_index = queue.SimpleQueue(), 0
    from vllm_ndt.progress import Progress

    progress = Progress(core, 150.0)
    progress.ask(0)
    steps, outside, inside, longest = measure(core, progress, options.seconds)
    cost = inside / outside
    print(json.dumps({"requests": options.requests, "step": outside / steps, "cost": cost, "longest": longest}))
    return 1 if cost > GOAL else 0


if __name__ == "__main__":
    sys.exit(main())
