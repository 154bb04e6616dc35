# SPDX-License-Identifier: Apache-2.0
"""Check the encoder cache on a GPU: a real hybrid vision engine under multi-image load, on both model runners.

    python check_encoder_cache.py [--stock SITE] [NAME ...]

Runs with the patched wheel; `--stock` names a folder with a stock vllm to import instead, for the control: it must
stand still. A tiny Qwen3.5 with random weights serves batches of several images; answers with prefix caching on and off
must agree but for rounding, during the load and for requests that come after it with the same prefixes. With a larger
cache the KV cache gets smaller by its bytes, and the bytes alive never exceed what was left free. Without names: all
parts, each in a process of its own: those that serve loads at the same time, then those that measure memory one after
the other. About eight minutes.

Prints what it finds as it goes, then one JSON object. Exit status: 0 all held, 1 something did not, 2 bad usage.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "patches"))

MARK = "RESULT "
VARIABLE = "VLLM_NDT_ENCODER_CACHE_TOKENS"
ENVIRON = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "PYTHONHASHSEED": "0",
}
# part -> settings of its engine; the parts of a group are compared with each other and run together
LOADS: dict[str, dict[str, Any]] = {
    "v2": {"runner": "1"},
    "v2-uncached": {"runner": "1", "prefix_caching": False},
    "v1": {"runner": "0"},
    "v1-uncached": {"runner": "0", "prefix_caching": False},
    "v2-drafter": {"runner": "1", "drafter": True},
    "v2-broken": {"runner": "1", "broken": True},
    "v2-large": {"runner": "1", "tokens": "65536"},
    "v2-long": {"runner": "1", "batches": 200, "aborts": True},
}
MEMORY: dict[str, dict[str, Any]] = {
    "v2-memory": {"runner": "1", "batches": 4, "measured": True},
    "v2-memory-large": {"runner": "1", "batches": 4, "measured": True, "tokens": "65536"},
    "v2-memory-auto": {"runner": "1", "batches": 4, "measured": True, "tokens": "auto"},
    "v1-memory": {"runner": "0", "batches": 4, "measured": True},
    "v1-memory-large": {"runner": "0", "batches": 4, "measured": True, "tokens": "65536"},
}
PARTS = LOADS | MEMORY
# bytes of one embedding: 128 numbers of two bytes
WIDTH = 256
BATCHES = 24
# engines that serve loads at the same time on one card
AT_ONCE = 9
PATIENCE = 200
# a run whose answers are further from the reference than this many times the rounding's noise is another model
NEAR = 1.4


def part(name: str) -> dict[str, Any]:
    """Serve the load with the engine of a part; gives the first tokens' log probabilities and what was measured."""
    settings = PARTS[name]
    import tiny_models
    import torch
    from PIL import Image
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    folder = tiny_models.write_hybrid_vision_model(Path(tempfile.mkdtemp()))
    arguments: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "enforce_eager": True,
        "max_num_batched_tokens": 4096,
        "max_num_seqs": 8,
        "max_model_len": 16_384,
        "enable_prefix_caching": settings.get("prefix_caching", True),
        "attention_backend": "TRITON_ATTN",
        "mm_encoder_attn_backend": "TORCH_SDPA",
        "gdn_prefill_backend": "triton",
        "limit_mm_per_prompt": {"image": 4, "video": 0},
        "gpu_memory_utilization": 0.1,
        "seed": 0,
        "disable_log_stats": True,
    }
    if not settings.get("measured"):
        # engines that start beside each other would measure each other's memory
        arguments["kv_cache_memory_bytes"] = 4 * 2**30
    if settings.get("drafter"):
        arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 1}
    if settings.get("broken"):
        from vllm.v1.core.sched.scheduler import Scheduler

        Scheduler._mamba_block_aligned_split = lambda self, request, tokens, *rest, **named: tokens
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    core = engine.engine_core.engine_core
    print(f"{name} engine is up", file=sys.stderr, flush=True)
    core.model_executor.collective_rpc(_weights)
    scheduler = core.scheduler
    worker = core.model_executor.driver_worker
    worker = getattr(worker, "worker", worker)
    cache = _worker_cache(worker)
    manager = scheduler.encoder_cache_manager
    found: dict[str, Any] = {
        "block": scheduler.cache_config.block_size,
        "mode": scheduler.cache_config.mamba_cache_mode,
        "size": manager.cache_size,
        "kv_bytes": getattr(worker, "available_kv_cache_memory_bytes", None),
        "look_ahead": scheduler.use_eagle,
        "runner": type(worker.model_runner).__module__,
    }
    empty = {"now": 0, "most": 0, "pinned_bytes": 0}
    schedule = scheduler.schedule

    def watched(*given: Any, **named: Any) -> Any:
        output = schedule(*given, **named)
        still = not output.total_num_scheduled_tokens and scheduler.get_num_unfinished_requests() > 0
        empty["now"] = empty["now"] + 1 if still else 0
        empty["most"] = max(empty["most"], empty["now"])
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in cache.values()}
        empty["pinned_bytes"] = max(empty["pinned_bytes"], sum(storages.values()))
        return output

    scheduler.schedule = watched
    choose = random.Random(1)
    images = []
    for at in range(10):
        generator = torch.Generator().manual_seed(at)
        pixels = torch.randint(0, 256, (44, 46, 3), generator=generator, dtype=torch.uint8).numpy()
        images.append(Image.fromarray(pixels).resize((1472, 1408)))

    sampling = SamplingParams(max_tokens=6, temperature=0.0, logprobs=1, ignore_eos=True)
    firsts: dict[str, float] = {}

    def serve(prompts: dict[str, tuple[str, list[int]]], aborted: str | None = None) -> bool:
        for request, (text, chosen) in prompts.items():
            engine.add_request(
                request, {"prompt": text, "multi_modal_data": {"image": [images[at] for at in chosen]}}, sampling
            )
        steps = 0
        while engine.has_unfinished_requests():
            steps += 1
            if aborted and steps == 3:
                engine.abort_request([aborted])
            for output in engine.step():
                if output.finished:
                    [completion] = output.outputs
                    firsts[output.request_id] = max(found.logprob for found in completion.logprobs[0].values())
            if empty["now"] >= PATIENCE:
                return False
        return True

    def prompt() -> tuple[str, list[int]]:
        chosen = choose.choices(range(10), k=choose.randint(2, 4))
        gaps = ["x" * choose.choice([0, 1, 9, 40]) for _ in chosen]
        return "s" * choose.choice([5, 100, 400]) + "".join(tiny_models.IMAGE + gap for gap in gaps) + "?", chosen

    started = time.monotonic()
    history = []
    found["stalled_at"] = None
    for batch in range(settings.get("batches", BATCHES)):
        prompts = {f"{batch}-{at}": prompt() for at in range(choose.randint(4, 8))}
        aborted = choose.choice(list(prompts)) if settings.get("aborts") else None
        history += list(prompts.values())
        print(f"{name} batch {batch}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
        if not serve(prompts, aborted):
            found["stalled_at"] = batch
            break
    if found["stalled_at"] is None:
        # what the load left in the caches, for requests with the same prefixes
        for at, (text, chosen) in enumerate(choose.sample(history, 12)):
            if not serve({f"after-{at}": (text + " and more", chosen)}):
                found["stalled_at"] = f"after-{at}"
                break
        found["left"] = {item: sorted(names) for item, names in manager.cached.items() if names}
        core.reset_encoder_cache()
        found["entries_after_reset"] = len(cache)
    found["seconds"] = round(time.monotonic() - started, 1)
    found["preemptions"] = getattr(getattr(scheduler, "encoder_progress", None), "preemptions", None)
    found["repeats"] = getattr(manager, "repeats", None)
    return found | {
        "empty_steps": empty["most"],
        "pinned_bytes": empty["pinned_bytes"],
        "firsts": firsts,
    }


def _weights(worker: Any) -> None:
    """Random weights large enough that tokens differ by more than rounding; the same in each process."""
    import torch

    model = getattr(worker, "worker", worker).model_runner.model
    generator = torch.Generator(device="cpu").manual_seed(3)
    for name, weight in sorted(model.named_parameters()):
        if not weight.is_floating_point():
            continue
        if name.endswith("A_log"):
            # states that forget slowly, so that a wrong one is seen thousands of tokens later
            values = torch.full(weight.shape, -6.0)
        elif weight.dim() < 2:
            # norms, biases and the recurrences' own parameters: near what a trained model has
            values = torch.rand(weight.shape, generator=generator) * 0.5 + (0.75 if "norm" in name else -0.25)
        else:
            values = torch.randn(weight.shape, generator=generator) * (1.5 / weight.shape[-1] ** 0.5)
        weight.data.copy_(values.to(weight.dtype))


def _worker_cache(worker: Any) -> dict[str, Any]:
    cache = worker.model_runner.encoder_cache
    return getattr(cache, "encoder_outputs", cache)


def run_part(name: str, stock: str | None) -> dict[str, Any]:
    """A part in a process of its own."""
    settings = PARTS[name]
    environ = os.environ | ENVIRON | {"VLLM_USE_V2_MODEL_RUNNER": settings["runner"]}
    environ.pop(VARIABLE, None)
    if "tokens" in settings:
        environ[VARIABLE] = settings["tokens"]
    if stock:
        environ["PYTHONPATH"] = stock
    done = subprocess.run(
        [sys.executable, __file__, "--part", name], env=environ, capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        return {"error": (done.stdout + done.stderr)[-3000:]}
    result: dict[str, Any] = json.loads(lines[-1][len(MARK) :])
    return result


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """How far two runs' first tokens are apart: the 90th percentile of the best log probabilities' differences."""
    shared = one["firsts"].keys() & other["firsts"].keys()
    apart = sorted(abs(one["firsts"][request] - other["firsts"][request]) for request in shared)
    return apart[len(apart) * 9 // 10]


def judge(results: dict[str, dict[str, Any]], stock: dict[str, Any] | None) -> list[str]:
    """What does not hold; a part that did not run is not judged, and said."""
    wrong = [f"{name}: {found['error']}" for name, found in results.items() if "error" in found]
    good = {name: found for name, found in results.items() if "error" not in found}

    def that(name: str, held: bool, found: Any) -> None:
        print(f"{'ok  ' if held else 'FAIL'} {name}: {found}", flush=True)
        if not held:
            wrong.append(name)

    def have(what: str, *names: str) -> bool:
        missing = [name for name in names if name not in good]
        if missing:
            print(f"not judged: {what}, for want of {' and '.join(missing)}", flush=True)
        return not missing

    if stock is not None:
        that("stock stands still", stock.get("stalled_at") is not None, stock.get("stalled_at", stock.get("error")))
    for name, found in good.items():
        if name == "v2-broken":
            continue
        that(f"{name} finishes", found["stalled_at"] is None, (found["seconds"], found["empty_steps"]))
        that(f"{name} leaves nothing", not found.get("left") and found.get("entries_after_reset") == 0, "")
        that(f"{name} empty steps", found["empty_steps"] <= 3, found["empty_steps"])
    # Chunks of other sizes round otherwise. How much that is shows where no chunk is cut short before an item.
    if have("answers", "v2-large", "v2-uncached"):
        noise = distance(good["v2-large"], good["v2-uncached"])
        for name in ("v2", "v1", "v2-drafter"):
            reference = f"{name.partition('-')[0]}-uncached"
            if have(f"answers of {name}", name, reference):
                found = distance(good[name], good[reference])
                that(f"{name} answers as {reference} does", found <= NEAR * noise, (found, noise))
        if have("states under another boundary", "v2-broken"):
            found = distance(good["v2-broken"], good["v2-uncached"])
            that("states under another boundary would show", found > NEAR * noise, (found, noise))
    for name in ("v2-memory-large", "v2-memory-auto", "v1-memory-large"):
        base = name.rpartition("-")[0]
        if have(f"memory of {name}", name, base):
            smaller = good[base]["kv_bytes"] - good[name]["kv_bytes"]
            expected = (good[name]["size"] - good[base]["size"]) * WIDTH
            # free memory itself is measured, and is not the same to the byte in two processes
            that(f"{name} KV cache is smaller by its bytes", abs(smaller - expected) < 2**21, (smaller, expected))
            most = good[name]["size"] * WIDTH
            pinned = good[name]["pinned_bytes"]
            that(f"{name} keeps no more bytes alive", pinned <= most, (pinned, most))
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--stock", metavar="SITE", help="a folder with a stock vllm, for the control")
    parser.add_argument("--save", metavar="FILE", help="write everything that was found there")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(MARK + json.dumps(part(options.part)))
        return 0
    unknown = [name for name in options.names if name not in PARTS]
    if unknown:
        parser.error(f"no part is called {', '.join(unknown)}: the parts are {', '.join(PARTS)}")
    chosen = options.names or list(PARTS)
    results: dict[str, dict[str, Any]] = {}

    def keep(name: str, found: dict[str, Any]) -> None:
        print(f"{name}: {str(found)[:300]}", flush=True)
        results[name] = found
        if options.save:
            Path(options.save).write_text(json.dumps(results))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        control = pool.submit(run_part, "v2", options.stock) if options.stock else None
        served = {pool.submit(run_part, name, None): name for name in LOADS if name in chosen}
        for done in as_completed(served):
            keep(served[done], done.result())
        stock = control.result() if control else None
    if not served and any(name in chosen for name in MEMORY):
        # the first engine of all builds kernels and finds less memory free than those after it
        run_part("v2-memory", None)
    for name in MEMORY:
        if name in chosen:
            keep(name, run_part(name, None))
    wrong = judge(results, stock)
    short = {name: {k: v for k, v in found.items() if k != "firsts"} for name, found in results.items()}
    print(json.dumps({"wrong": wrong, "parts": short, "stock": stock and stock.get("stalled_at")}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
