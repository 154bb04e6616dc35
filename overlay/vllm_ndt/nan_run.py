# SPDX-License-Identifier: Apache-2.0
"""One engine of `vllm-ndt nan-check`, in a process of its own: a job as JSON on stdin, a result in the file it names.

Its folder is this process' own, and its stdin stays open as long as somebody waits for the result.

The job: `model`, `dtype`, `load_format`, `enforce_eager`, `attention_backend` (or null), `prompts` (texts, or null for
the check's own), `result` (the file). The result: a nan_advice.Run as JSON, or {"error": line}.
"""

import dataclasses
import json
import logging
import math
import os
import shutil
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_ndt import nan_advice
from vllm_ndt.nan_advice import Case, Finding, Run
from vllm_ndt.nan_check import BATCHES, MAX_TOKENS, own_lengths, spread, token_ids


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt as vLLM takes it, and what to call it; an image's placeholders make its `tokens` known only later."""

    name: str
    tokens: int
    given: Any
    image: bool = False


class Collector:
    """Everything that the guard finds, by request: it takes the place of the reporter's `say`, which drops repeats."""

    def __init__(self, steps: Any) -> None:
        self.steps = steps
        self.first: dict[str, tuple[int, Finding]] = {}
        self.logits: dict[str, int] = {}
        self._say = steps.reporter.say
        steps.reporter.say = self.say

    def say(self, step: int, hits: Mapping[str, Any], runner: Any) -> None:
        for request, hit in hits.items():
            self.logits[request] = self.logits.get(request, 0) | hit.logits
            if request not in self.first:
                self.first[request] = step, self._finding(request, hit, runner)
        self._say(step, hits, runner)

    def of(self, request: str) -> tuple[int, Finding | None, int]:
        """A request's first step with a finding, the finding, and its logits' flags, by the id that its answer has.

        vLLM appends a random word to the id that the engine gets.
        """
        for name, (step, finding) in self.first.items():
            if name == request or name.rpartition("-")[0] == request:
                return step, finding, self.logits[name]
        return 0, None, 0

    def _finding(self, request: str, hit: Any, runner: Any) -> Finding:
        from vllm_ndt.nan_guard import NORM
        from vllm_ndt.nan_words import kinds_of

        guard, reporter = self.steps.guard, self.steps.reporter
        text = reporter._where(request, hit, hit.flags, runner)
        if not hit.layer:
            return Finding("", False, {}, 0, 0, nan_advice.LOGITS, text)
        names = guard.kinds[hit.layer]
        tensors = {name: kinds_of(hit.flags >> 2 * at) for at, name in enumerate(names)}
        tensors = {name: kinds for name, kinds in tensors.items() if kinds}
        norm = names is NORM
        first = guard.is_first_attention(hit.layer) and not norm
        origin = self._origin(request, hit, norm, first, runner)
        watched = hit.layer > 1 and (norm or guard.kinds[hit.layer - 1] is NORM)
        after = guard.names[hit.layer - 1] if watched else ""
        return Finding(guard.names[hit.layer], first, tensors, hit.row, 0, origin, text, norm, after)

    def _origin(self, request: str, hit: Any, norm: bool, first: bool, runner: Any) -> str:
        from vllm_ndt.nan_report import _bad_items
        from vllm_ndt.nan_words import bad_inputs

        if not bad_inputs(hit.flags):
            return nan_advice.NORM if norm else nan_advice.KERNEL
        if (hit.layer == 1 or first) and _bad_items(runner, request):
            return nan_advice.ENCODER
        return nan_advice.EMBEDDINGS if hit.layer == 1 else nan_advice.INPUTS


class FaultLines(logging.Handler):
    """What the guard logs of the fault that it was asked for: that it put it in, or why it did not."""

    PUT_IN, NOT = "NaN guard: injecting ", "NaN guard: nothing injected: "

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.injected = self.not_injected = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line if it is one of these."""
        line = record.getMessage()
        if line.startswith(self.PUT_IN):
            self.injected = line.removeprefix(self.PUT_IN).removesuffix(", as asked for.")
        elif line.startswith(self.NOT):
            self.not_injected = line.removeprefix(self.NOT).removesuffix(".")


def run(job: Mapping[str, Any]) -> Run:
    """Start the job's engine and give it the prompts; raises whatever vLLM does, or ValueError for a job in vain."""
    from vllm import LLM

    from vllm_ndt import nan_guard, nan_step

    faults = FaultLines()
    nan_guard.logger.addHandler(faults)
    if not nan_guard.logger.isEnabledFor(faults.level):  # by VLLM_LOGGING_LEVEL
        nan_guard.logger.setLevel(faults.level)
    more = {"attention_backend": job["attention_backend"]} if job["attention_backend"] else {}
    llm = LLM(
        job["model"],
        dtype=job["dtype"],
        load_format=job["load_format"],
        enforce_eager=job["enforce_eager"],
        tensor_parallel_size=1,
        max_model_len=-1,  # what the memory allows: a long context must not stop a check of short prompts
        max_num_seqs=max(BATCHES),
        enable_prefix_caching=False,
        seed=0,
        **more,
    )
    steps = nan_step._steps
    if steps is None:
        raise ValueError("expected the NaN guard in vLLM, found none; run vllm-ndt verify")
    steps.guard.full_rows = sys.maxsize  # each value of each prompt
    config = llm.llm_engine.vllm_config
    collector = Collector(steps)
    prompts, untested = _prompts(llm, config.model_config, job["prompts"])
    cases = []
    for prompt in prompts:
        try:
            cases += _generate(llm, config, collector, [prompt])
        except Exception as error:
            if not prompt.image:
                raise
            untested.append(_no_image(error))
            prompts = [other for other in prompts if other is not prompt]
    for size in BATCHES:
        cases += _generate(llm, config, collector, spread(prompts, size))
    return Run(
        device=str(steps.runner.device.type),
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        backends=tuple(sorted(_backends(steps))),
        quantization=config.model_config.quantization or "",
        layers=tuple(steps.guard.names[1:]),
        peaks=steps.reporter.peaks(),
        cases=tuple(cases),
        untested=(*untested, *_unwatched(steps)),
        own_dtype=_own_dtype(config.model_config),
        injected=faults.injected,
        not_injected=faults.not_injected,
    )


def _generate(llm: Any, config: Any, collector: Collector, prompts: Sequence[Prompt]) -> list[Case]:
    import torch
    from vllm import SamplingParams

    from vllm_ndt.nan_blocks import zero_blocks

    # with an end of text in between, runs would differ in what they tested
    params = SamplingParams(temperature=0, top_p=1, max_tokens=MAX_TOKENS, logprobs=1, ignore_eos=True)
    before = collector.steps.step
    answers = llm.generate([prompt.given for prompt in prompts], params, use_tqdm=False)
    if collector.steps.runner.device.type == "cuda":
        torch.cuda.synchronize()
    collector.steps.read_what_is_over()
    lengths = [len(answer.prompt_token_ids) for answer in answers]
    # the step that made the first token of a prompt that came in chunks
    first = before + math.ceil(sum(lengths) / config.scheduler_config.max_num_batched_tokens)
    cases = []
    for prompt, answer, length in zip(prompts, answers, lengths, strict=True):
        step, finding, logits = collector.of(answer.request_id)
        if finding:
            finding = dataclasses.replace(finding, token=max(0, step - first))
        cases.append(_case(prompt, len(prompts), length, finding, logits, answer.outputs[0]))
    if any(case.finding for case in cases):
        # what it left in the KV cache must not be found in the next prompt
        zero_blocks(collector.steps.runner, range(config.cache_config.num_gpu_blocks))
    return cases


def _case(prompt: Prompt, batch: int, tokens: int, finding: Finding | None, logits: int, answer: Any) -> Case:
    from vllm_ndt.nan_words import kinds_of

    ids = tuple(int(token) for token in answer.token_ids)
    bad = 0
    for token, found in zip(ids, answer.logprobs or (), strict=False):
        bad += token in found and math.isnan(found[token].logprob)
    return Case(prompt.name, batch, tokens, prompt.image, finding, kinds_of(logits), ids, bad)


def _prompts(llm: Any, model: Any, texts: Sequence[str] | None) -> tuple[list[Prompt], list[str]]:
    """What to run, and what not, and why; raises ValueError if nothing is left."""
    tokenizer, room = llm.get_tokenizer(), model.max_model_len - MAX_TOKENS
    prompts, untested = [], []
    if texts is not None:
        for number, text in enumerate(texts, 1):
            ids = list(tokenizer.encode(text))
            if 0 < len(ids) <= room:
                prompts.append(Prompt(f"prompt {number}", len(ids), {"prompt_token_ids": ids}))
            else:
                untested.append(f"prompt {number}: {len(ids)} tokens, of 1 to {room} that fit")
    else:
        usable = _usable(tokenizer, model)
        lengths, missing = own_lengths(room)
        untested += missing
        for length in lengths:
            name = f"{length} token{'s' if length > 1 else ''}"
            prompts.append(Prompt(name, length, {"prompt_token_ids": token_ids(length, usable)}))
    if not prompts:
        raise ValueError(f"expected a prompt of 1 to {room} tokens, which is what the engine takes, found none")
    if model.is_multimodal_model:
        untested += _add_image(prompts, model, texts is None)
    return prompts, untested


def _add_image(prompts: list[Prompt], model: Any, wanted: bool) -> list[str]:
    """Append a prompt with an image if the model takes images; gives what is not tested."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    try:
        processor = MULTIMODAL_REGISTRY.create_processor(model)
        modalities = [name for name, most in processor.info.get_supported_mm_limits().items() if most != 0]
        untested = [f"{name} inputs" for name in modalities if name != "image"]
        if "image" in modalities and wanted:
            text = processor.dummy_inputs.get_dummy_text({"image": 1})
            given = {"prompt": text, "multi_modal_data": {"image": _image()}}
            prompts.append(Prompt("image", 0, given, image=True))
        elif "image" in modalities:
            untested.append("the vision path: your prompts are text; the check's own have an image")
        return untested
    except Exception as error:  # whatever a model's processor does
        return [_no_image(error)]


def _no_image(error: Exception) -> str:
    from vllm_ndt.encoder_budget import _first_line

    return f"the vision path: no image prompt could be run ({_first_line(error)})"


def _image() -> Any:
    """224 x 224 pixels of every brightness in each colour."""
    from PIL import Image  # type: ignore[import-not-found,unused-ignore]

    image = Image.new("RGB", (224, 224))
    image.putdata([(x * 255 // 223, y * 255 // 223, (x * y) % 256) for y in range(224) for x in range(224)])
    return image


def _usable(tokenizer: Any, model: Any) -> list[int]:
    """The ids of ordinary tokens: what has a meaning of its own (ends, images) may change what is tested."""
    special = set(getattr(tokenizer, "all_special_ids", None) or ())
    added = getattr(tokenizer, "get_added_vocab", None)
    special |= set(added().values()) if added else set()
    for config in (model.hf_config, model.hf_text_config):
        for name, value in vars(config).items():
            if name.endswith(("_token_id", "_token_index")):
                special |= {one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int)}
    known = set(tokenizer.get_vocab().values())
    size = model.get_vocab_size()
    return [token for token in sorted(known) if 0 <= token < size and token not in special] or list(range(size))


def _own_dtype(model: Any) -> str:
    """What the model's config says, or ""."""
    configs = (model.hf_config, model.hf_text_config)
    found = (getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) for config in configs)
    return str(next((dtype for dtype in found if dtype), "")).removeprefix("torch.")


def _layers(steps: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = steps.runner.compilation_config.static_forward_context
    return found


def _backends(steps: Any) -> set[str]:
    """The attention backends of the layers that the guard saw."""
    layers: list[Any] = [_layers(steps).get(name) for name in steps.guard.names[1:]]
    return {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}


def _unwatched(steps: Any) -> list[str]:
    """Layers and tensors that the guard could not look at."""
    guard, said = steps.guard, []
    states = [name for name, layer in _layers(steps).items() if hasattr(layer, "kv_cache") and not guard.watches(name)]
    if states:
        said.append(f"{len(states)} layers that are not attention, or a drafter's, such as {states[0]}")
    missed: dict[str, int] = {}
    for number, seen in guard.checked.items():
        names = [name for name, was in zip(guard.kinds[number], seen, strict=False) if name and not was]
        if names:
            missed[", ".join(names)] = missed.get(", ".join(names), 0) + 1
    said += [f"{names} of {count} layers: of a type or shape that the guard does not read" for names, count in missed.items()]  # noqa: E501  # fmt: skip
    if not guard.names[1:]:
        said.append("activations: no attention layer ran under the guard, only logits were looked at")
    return said


def _end_with_parent(folder: Path) -> None:
    """Once nobody holds the other end of stdin, end this process and what it started, and remove their folder."""
    os.read(0, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    """Do the job on stdin, a line, as long as that stays open; returns 0, or 1 with an error in the result."""
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, args=[Path(job["result"]).parent], daemon=True).start()
    try:
        result: dict[str, Any] = dataclasses.asdict(run(job))
    except Exception as error:
        import traceback

        from vllm_ndt.encoder_budget import _first_line

        traceback.print_exc()  # into the log
        result = {"error": _first_line(error)}
    whole = Path(job["result"])
    part = whole.with_suffix(".part")
    part.write_text(json.dumps(result), encoding="utf-8")
    part.replace(whole)
    return 1 if "error" in result else 0
