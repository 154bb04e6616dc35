# SPDX-License-Identifier: Apache-2.0
"""Conversations with images on a real engine, by the encoder cache's size: encoder runs and total time, in one run.

    PATCHED benchmarks/encoder_chat.py [--clients 4] [--turns 4]

PATCHED is a Python that has the patched vllm, on a CPU or a GPU. A tiny dense vision model with random weights serves
clients that add an image and some text each turn and send the whole conversation again. Prefix caching is on, and the
KV cache holds about one conversation, so that images are read again whenever another client came between: that is
where the encoder cache's size shows. Each size has an engine in a process of its own.

Prints a table and, in the last line, one JSON object; the times are also ratios to upstream's size.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / "patches")]

MARK = "RESULT "
VARIABLE = "VLLM_NDT_ENCODER_CACHE_TOKENS"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "PYTHONHASHSEED": "0",
}
SIZES = {"upstream's": None, "32768": "32768", "auto": "auto"}
BLOCK, MODEL_LEN = 128, 6144


def serve(clients: int, turns: int) -> dict[str, Any]:
    """All clients' turns, one turn after the other."""
    import tiny_models
    from PIL import Image
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(tiny_models.write_dense_vision_model(Path(tempfile.mkdtemp()))),
        load_format="dummy",
        enforce_eager=True,
        max_model_len=MODEL_LEN,
        max_num_seqs=clients,
        max_num_batched_tokens=4096,
        block_size=BLOCK,
        num_gpu_blocks_override=MODEL_LEN // BLOCK + 4,
        enable_prefix_caching=True,
        limit_mm_per_prompt={"image": turns, "video": 0},
        seed=0,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    manager = scheduler.encoder_cache_manager
    runs = {"all": 0}
    schedule = scheduler.schedule

    def counted(*given: Any, **named: Any) -> Any:
        output = schedule(*given, **named)
        runs["all"] += sum(map(len, output.scheduled_encoder_inputs.values()))
        return output

    scheduler.schedule = counted
    chance = random.Random(0)
    images = [
        [Image.new("RGB", (1280, 800), tuple(chance.randrange(256) for _ in range(3))) for _ in range(turns)]  # type: ignore[arg-type]
        for _ in range(clients)
    ]
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    started = time.perf_counter()
    for turn in range(1, turns + 1):
        prompts: Any = [
            {
                "prompt": "".join(f"{tiny_models.IMAGE} what is {at} of {client}? " for at in range(turn)),
                "multi_modal_data": {"image": images[client][:turn]},
            }
            for client in range(clients)
        ]
        llm.generate(prompts, sampling, use_tqdm=False)
    return {
        "cache": manager.cache_size,
        "encoder_runs": runs["all"],
        "repeated": manager.repeats,
        "seconds": round(time.perf_counter() - started, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        print(MARK + json.dumps(serve(options.clients, options.turns)), flush=True)
        return 0
    numbers = ["--clients", str(options.clients), "--turns", str(options.turns)]
    rows: dict[str, Any] = {}
    for name, size in SIZES.items():
        environ = {key: value for key, value in os.environ.items() if key != VARIABLE} | ENVIRONMENT
        if size:
            environ[VARIABLE] = size
        command = [sys.executable, __file__, "--serve", *numbers]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        found = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
        if not found:
            print(f"{name}: expected a result, found none:\n{(done.stdout + done.stderr)[-3000:]}", file=sys.stderr)
            return 2
        row = rows[name] = json.loads(found[-1][len(MARK) :])
        row["ratio"] = round(row["seconds"] / rows["upstream's"]["seconds"], 3)
        print(
            f"{name:<10} {row['cache']:>7} embeddings  encoder runs {row['encoder_runs']:>4}  "
            f"repeated {row['repeated']:>4}  {row['seconds']:7.2f} s  x {row['ratio']:.2f}",
            flush=True,
        )
    print(json.dumps({"images": options.clients * options.turns, "sizes": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
