# SPDX-License-Identifier: Apache-2.0
"""A real engine on the CPU with faults put into it, for the tests of the NaN guard's patches; a script.

    python nan_engine.py names|abort|pooled FOLDER

Prints what happened as one JSON object, behind MARK. On stock no fault can be put in, and nothing is found.
"""

import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

MARK = "RESULT "
LAYERS = 4
TENSORS = ("q", "k", "v", "output")
KINDS = {"NaN": math.nan, "Inf": math.inf}
LENGTHS = (3, 7, 20)
# a row of the second request's prefill, and the row that it has when all three decode
PREFILL_ROW, DECODE_ROW = LENGTHS[0] + 2, 1


def outcome(word: str, folder: Path, mode: str) -> Any:
    """What this file, run as a script with the guard in `mode`, found in a folder with the tiny text model."""
    environ = {
        "VLLM_NDT_NAN_GUARD": mode,
        # which turns on what puts faults in; a step that is never reached
        "VLLM_NDT_NAN_INJECT": "layer=0,tensor=v,step=999999999,row=0,value=nan",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, __file__, word, str(folder)],
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads(done.stdout.split(MARK)[1].splitlines()[0])


class Engine:
    """An engine in this process, and the lines that the guard logs."""

    def __init__(self, folder: str, **arguments: Any) -> None:
        from vllm import LLM

        self.lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("vllm.ndt.nan_guard").addHandler(handler)
        self.llm = LLM(
            folder,
            load_format="dummy",
            **{
                "skip_tokenizer_init": True,
                "dtype": "float32",
                "enforce_eager": True,
                "max_model_len": 256,
                "max_num_seqs": 4,
            }
            | arguments,
        )
        self.served = 0

    def generate(self, prompts: list[list[int]], tokens: int = 6) -> list[tuple[list[int], str | None]]:
        """Greedy tokens and finish reason of each prompt, served together."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        self.served += len(prompts)
        made = self.llm.generate(given, sampling, use_tqdm=False)
        return [(list(out.outputs[0].token_ids), out.outputs[0].finish_reason) for out in made]

    def inject(self, layer: int, tensor: str, value: float, *, prefill: bool) -> None:
        """Put a fault into the second request of what is served next: in its prefill, or in its second token's step."""
        try:
            from vllm_ndt import nan_step, settings
            from vllm_ndt.nan_guard import process_guard
        except ImportError:
            return
        guard, steps = process_guard(), nan_step._steps
        assert guard is not None
        assert steps is not None
        steps.reporter._said.clear()
        step, row = (1, PREFILL_ROW) if prefill else (2, DECODE_ROW)
        guard.injection = settings.Injection(layer, tensor, steps.step + step, row, value)

    def findings(self) -> list[str]:
        """The lines about NaN and Inf since the last call."""
        found = [line for line in self.lines if "non-finite" in line or "in no attention layer" in line]
        self.lines.clear()
        return found


def prompts(first: int = 0) -> list[list[int]]:
    return [[(first + 31 * at + place) % 250 for place in range(length)] for at, length in enumerate(LENGTHS)]


def names(folder: str) -> dict[str, Any]:
    """A thousand clean prompts, each fault alone, and NaN that no attention layer sees."""
    engine = Engine(folder)
    start = list(engine.lines)
    for first in range(0, 1000, 100):
        engine.generate([[(first + at + place) % 250 for place in range(1 + at % 40)] for at in range(100)], 1)
    result: dict[str, Any] = {"start": start, "clean": engine.findings(), "served": engine.served, "faults": []}
    for layer in range(LAYERS):
        for tensor in TENSORS:
            for kind, value in KINDS.items():
                for prefill in (True, False):
                    engine.inject(layer, tensor, value, prefill=prefill)
                    request = f"request {engine.served + 1}-"
                    engine.generate(prompts(engine.served), 3)
                    found = engine.findings()
                    # in mode report nobody cleans what a fault leaves, and the next request reads it
                    for cache in _caches(engine):
                        cache.zero_()
                    result["faults"].append([layer, tensor, kind, prefill, request, found])
    engine.llm.apply_model(_poison_head)
    engine.generate(prompts())
    return result | {"logits": engine.findings()}


def _poison_head(model: Any) -> None:
    model.model.norm.weight.data[3] = math.nan


def pooled(folder: str) -> dict[str, Any]:
    """What is found when a model that pools goes bad behind its last attention layer."""
    engine = Engine(folder, runner="pooling", skip_tokenizer_init=False)
    given: Any = [{"prompt_token_ids": prompt} for prompt in prompts()]
    engine.llm.embed(given, use_tqdm=False)
    clean = engine.findings()
    engine.llm.apply_model(_poison_head)
    engine.llm.embed(given, use_tqdm=False)
    return {"clean": clean, "bad": engine.findings()}


def abort(folder: str) -> dict[str, Any]:
    """Faults in a small pool of blocks; then requests until each block was used again."""
    engine = Engine(folder, block_size=32, num_gpu_blocks_override=16, enable_prefix_caching=True)
    clean = engine.generate(prompts(), 4)
    long = [[(at * 17 + place) % 250 for place in range(200)] for at in range(4)]
    clean_long = [engine.generate([prompt], 2)[0] for prompt in long]
    faults = []
    for layer, tensor, prefill in ((0, "v", True), (1, "k", False), (2, "output", True), (3, "q", False)):
        for value in KINDS.values():
            engine.inject(layer, tensor, value, prefill=prefill)
            hit = engine.generate(prompts(), 4)
            # the same prefix, and others, until nothing of the pool is as the fault left it
            later = engine.generate(prompts(), 4) == clean
            reused = [engine.generate([prompt], 2)[0] for prompt in long] == clean_long
            finite = all(bool(cache.isfinite().all()) for cache in _caches(engine))
            faults.append([layer, tensor, prefill, hit, later, reused, finite, len(engine.findings())])
    return {"clean": clean, "faults": faults}


def _caches(engine: Engine) -> list[Any]:
    [runner] = engine.llm.collective_rpc(lambda worker: worker.model_runner)
    return list(runner.kv_caches)


if __name__ == "__main__":
    found = {"names": names, "abort": abort, "pooled": pooled}[sys.argv[1]](sys.argv[2])
    print(f"\n{MARK}{json.dumps(found)}", flush=True)
