# SPDX-License-Identifier: Apache-2.0
"""Loads for upstream's real schedulers, and a worker without a model that checks what a real one relies on.

The worker keeps what a model runner keeps (encoder outputs by item, recurrent states by block) and samples one fixed
token. A check that fails raises Violation; a load that stands still gives Result.stalled.
"""

import os
import random
import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import tiny_models

TOKEN = 7
# tokens of text and images; upstream's hashes tell them apart by the item, so that any id will do
TEXT_TOKEN, IMAGE_TOKEN = 11, tiny_models.token_id("<|image_pad|>")


class Violation(AssertionError):
    """What a real worker could not do, or would do wrong."""


@dataclass(frozen=True)
class Item:
    """An image: its name (equal names are one cache entry) and its size in embeddings."""

    name: str
    size: int


@dataclass(frozen=True)
class Text:
    """Tokens of text; `name` tells texts of different content apart."""

    size: int
    name: str = ""


Segment = Item | Text


@dataclass(frozen=True)
class Prompt:
    """One request: its segments, how many tokens it generates, when it arrives and is aborted (steps; None: never)."""

    name: str
    segments: tuple[Segment, ...]
    max_tokens: int = 1
    arrives: int = 0
    aborted: int | None = None
    priority: int = 0

    @property
    def size(self) -> int:
        """Tokens of the prompt."""
        return sum(segment.size for segment in self.segments)


@dataclass(frozen=True)
class Engine:
    """A scheduler's settings: block size and cache sizes in tokens, embeddings and KV blocks."""

    block: int = 784
    hybrid: bool = True
    drafter: bool = False
    asynchronous: bool = False
    priority: bool = False
    cache: int = 4096
    budget: int = 4096
    slots: int = 8
    blocks: int = 2000
    prefix_caching: bool = True
    chunked_items: bool = True
    chunk: int = 0  # --long-prefill-token-threshold; 0: none


@dataclass
class Result:
    """What a load did."""

    finished: dict[str, str] = field(default_factory=dict)  # request -> finish reason
    steps: dict[str, int] = field(default_factory=dict)  # request -> the step that finished it
    schedules: list[dict[str, int]] = field(default_factory=list)  # tokens by request, a step each
    longest_standstill: int = 0  # steps in a row without a token, with work and nothing in flight
    stalled: bool = False
    zero_for_items: bool = False  # whether a request got no token after its items were looked at
    encoder_runs: int = 0


def parse(words: Iterable[str]) -> tuple[Segment, ...]:
    """Segments from words: `t104` is text, `i:a` an image of 2,048 embeddings, `i:a(3300)` one of 3,300."""
    segments: list[Segment] = []
    for word in words:
        if match := re.fullmatch(r"t([0-9]+)", word):
            segments.append(Text(int(match[1])))
        elif match := re.fullmatch(r"i:([a-z0-9]+)(?:\(([0-9]+)\))?", word):
            segments.append(Item(match[1], int(match[2] or 2048)))
        else:
            raise ValueError(f"expected tN, i:NAME or i:NAME(N), found {word!r}")
    return tuple(segments)


def make_config(folder: Any, *, drafter: bool = False, **overrides: Any) -> Any:
    """The tiny hybrid model's configuration, with its own MTP head as drafter if asked for; can be used by many."""
    if drafter:
        overrides["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 1}
    arguments = {"max_model_len": 60_000, "limit_mm_per_prompt": {"image": 16, "video": 0}}
    return tiny_models.engine_config(folder, **(arguments | overrides))


def make_scheduler(config: Any, engine: Engine) -> Any:
    """Upstream's Scheduler or AsyncScheduler, hybrid (full attention and recurrent states) or dense."""
    import torch
    from vllm.config.scheduler import SchedulerConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
    from vllm.v1.structured_output import StructuredOutputManager

    scheduling: SchedulerConfig = config.scheduler_config
    scheduling.max_num_seqs = engine.slots
    scheduling.max_num_batched_tokens = engine.budget
    scheduling.max_num_scheduled_tokens = engine.budget
    scheduling.max_num_encoder_input_tokens = engine.budget
    scheduling.encoder_cache_size = engine.cache
    scheduling.policy = "priority" if engine.priority else "fcfs"
    scheduling.async_scheduling = engine.asynchronous
    scheduling.long_prefill_token_threshold = engine.chunk
    scheduling.disable_chunked_mm_input = not engine.chunked_items
    config.cache_config.block_size = engine.block
    config.cache_config.num_gpu_blocks = engine.blocks
    config.cache_config.enable_prefix_caching = engine.prefix_caching
    align = engine.hybrid and engine.prefix_caching
    config.cache_config.mamba_cache_mode = "align" if align else "none"
    groups = [
        KVCacheGroupSpec(
            ["attention"],
            FullAttentionSpec(block_size=engine.block, num_kv_heads=2, head_size=64, dtype=torch.bfloat16),
        )
    ]
    if engine.hybrid:
        state = MambaSpec(
            block_size=engine.block if align else config.model_config.max_model_len,
            shapes=((8, 8),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align" if align else "none",
            num_speculative_blocks=1 if engine.drafter else 0,
        )
        groups.append(KVCacheGroupSpec(["state"], state))
    kv_cache = KVCacheConfig(num_blocks=engine.blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    scheduler_block, hash_block = resolve_kv_cache_block_sizes(kv_cache, config)
    # the model's largest item would set a floor of 2,048 embeddings, and reading it takes a second each time
    budget = mock.Mock(
        encoder_compute_budget=engine.budget,
        encoder_cache_size=engine.cache,
        mm_max_toks_per_item={},
        mm_max_items_per_prompt={},
        max_model_len=config.model_config.max_model_len,
        max_num_reqs=engine.slots,
    )
    with mock.patch("vllm.v1.core.sched.scheduler.MultiModalBudget", return_value=budget):
        scheduler = (AsyncScheduler if engine.asynchronous else Scheduler)(
            vllm_config=config,
            kv_cache_config=kv_cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=scheduler_block,
            hash_block_size=hash_block,
        )
    assert scheduler.need_mamba_block_aligned_split == align
    assert scheduler.use_eagle == engine.drafter
    return scheduler


def make_request(scheduler: Any, prompt: Prompt) -> Any:
    """Upstream's Request for a prompt."""
    from vllm import SamplingParams
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    hash_function = get_hash_fn_by_name("sha256_cbor")
    # one start of the chain for all requests, without which none shares a prefix with another
    with mock.patch.dict(os.environ, {"PYTHONHASHSEED": "0"}):
        init_none_hash(hash_function)
    tokens: list[int] = []
    features = []
    for segment in prompt.segments:
        if isinstance(segment, Item):
            features.append(
                MultiModalFeatureSpec(
                    data=None,
                    modality="image",
                    identifier=segment.name,
                    mm_position=PlaceholderRange(offset=len(tokens), length=segment.size),
                )
            )
            tokens += [IMAGE_TOKEN] * segment.size
        else:
            tokens += [TEXT_TOKEN + sum(segment.name.encode()) % 200] * segment.size
    return Request(
        request_id=prompt.name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=prompt.max_tokens, ignore_eos=True),
        pooling_params=None,
        arrival_time=float(prompt.arrives),
        mm_features=features,
        priority=prompt.priority,
        block_hasher=get_request_block_hasher(scheduler.hash_block_size, hash_function),
    )


class Worker:
    """What a model runner does with a scheduler's output, but for the numbers."""

    def __init__(self, scheduler: Any, engine: Engine, prompts: dict[str, Prompt], seed: int = 0) -> None:
        self.scheduler, self.engine, self.prompts = scheduler, engine, prompts
        self.items: dict[str, int] = {}
        self.states: dict[int, tuple[Any, ...]] = {}
        self.prompts_kv: dict[int, Any] = {}  # block of attention -> the prompt that its tokens end, as its hash
        self.runs = 0
        self.random = random.Random(seed)

    def execute(self, output: Any) -> Callable[[], Any]:
        """Checks and does a step; gives what makes its ModelRunnerOutput, to be called when the step is over."""
        for item in output.free_encoder_mm_hashes:
            self.items.pop(item, None)
        for name, inputs in output.scheduled_encoder_inputs.items():
            for at in inputs:
                if name not in output.num_scheduled_tokens:
                    raise Violation(f"{name} has encoder inputs and no tokens")
                feature = self.scheduler.requests[name].mm_features[at]
                self.items[feature.identifier] = feature.mm_position.get_num_embeds()
                self.runs += 1
        if sum(self.items.values()) > self.scheduler.encoder_cache_manager.cache_size:
            raise Violation(f"{sum(self.items.values())} embeddings are alive")
        samples = {}
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            end = request.num_computed_tokens
            start = end - count
            self._need_items(request, start, end)
            self._fill_blocks(request, start, end)
            if self.scheduler.has_mamba_layers and self.engine.prefix_caching:
                self._move_state(request, start, end)
            if not request.is_prefill_chunk:
                samples[name] = len(output.scheduled_spec_decode_tokens.get(name, ()))
        names = list(output.num_scheduled_tokens)
        return lambda: self._result(names, samples)

    def _result(self, names: list[str], samples: dict[str, int]) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        tokens = [[TOKEN] * (1 + self.random.randint(0, samples[name])) if name in samples else [] for name in names]
        return ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)}, sampled_token_ids=tokens
        )

    def _need_items(self, request: Any, start: int, end: int) -> None:
        for feature in request.mm_features:
            position = feature.mm_position
            if position.offset >= end or position.offset + position.length <= start:
                continue
            first, last = position.get_embeds_indices_in_range(
                max(start - position.offset, 0), min(end - position.offset, position.length)
            )
            if first < last and feature.identifier not in self.items:
                raise Violation(f"{request.request_id} needs {feature.identifier} at {start} to {end}")

    def _fill_blocks(self, request: Any, start: int, end: int) -> None:
        """Reads the prompt's full blocks of attention before `start`, and writes those that end in this step."""
        blocks = self.scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks[request.request_id]
        size, prompt = self.engine.block, request.num_prompt_tokens
        for at in range(min(end, prompt) // size):
            if (at + 1) * size > start:
                self.prompts_kv[blocks[at].block_id] = request.block_hashes[at]
            elif self.prompts_kv.get(blocks[at].block_id) != request.block_hashes[at]:
                raise Violation(f"{request.request_id} goes on at {start} without the keys before {(at + 1) * size}")

    def _prefix(self, request: Any, end: int) -> tuple[Any, ...]:
        """What a state after `end` tokens stands for: the segments, the last one cut, and the generated tokens."""
        prefix: list[Any] = []
        at = 0
        for segment in self.prompts[request.request_id].segments:
            if at >= end:
                break
            size = min(segment.size, end - at)
            # runs of text of one kind are one text, wherever a request cuts it
            if prefix and isinstance(segment, Text) and prefix[-1][0] == "text" and prefix[-1][1] == segment.name:
                size += prefix.pop()[2]
                at -= size - min(segment.size, end - at)
            kind = "image" if isinstance(segment, Item) else "text"
            prefix.append((kind, segment.name, size))
            at = sum(part[2] for part in prefix)
        if end > at:
            prefix.append(("generated", end - at))
        return tuple(prefix)

    def _move_state(self, request: Any, start: int, end: int) -> None:
        """Reads the state at `start`, writes the one at `end` into the last block, and checks the cached ones."""
        block = self.engine.block
        manager = self.scheduler.kv_cache_manager.coordinator.single_type_managers[1]
        blocks = manager.req_to_blocks[request.request_id]
        prefilling = start < request.num_prompt_tokens
        if start and prefilling and not self.engine.drafter:
            source = blocks[(start - 1) // block]
            if self.states.get(source.block_id) != self._prefix(request, start) and not source.is_null:
                raise Violation(f"{request.request_id} goes on at {start} from another state")
        if not prefilling:
            # decode passes a boundary token by token, and drafts are rolled back to it
            for boundary in range(start // block + 1, end // block + 1):
                self._write(request, blocks, boundary * block)
        self._write(request, blocks, end)
        for at, held in enumerate(blocks):
            if held.is_null or held.block_hash is None:
                continue
            if self.states.get(held.block_id) != self._prefix(request, (at + 1) * block):
                raise Violation(f"{request.request_id}: the state cached for {(at + 1) * block} is another one")

    def _write(self, request: Any, blocks: list[Any], end: int) -> None:
        held = blocks[(end - 1) // self.engine.block]
        if not held.is_null:
            self.states[held.block_id] = self._prefix(request, end)


def run(
    scheduler: Any, engine: Engine, prompts: Iterable[Prompt], *, seed: int = 0, patience: int = 50, limit: int = 5_000
) -> Result:
    """Serve all prompts, as the engine core does; stops after `patience` steps without a token, or `limit` steps."""
    everything = {prompt.name: prompt for prompt in prompts}
    worker = Worker(scheduler, engine, everything, seed)
    arrivals = deque(sorted(everything.values(), key=lambda prompt: prompt.arrives))
    result = Result()
    queue: deque[tuple[Any, Callable[[], Any]]] = deque()
    depth = 2 if engine.asynchronous else 1
    standstill = step = 0
    watch = mock.patch.object(type(scheduler), "_try_schedule_encoder_inputs", _watching(type(scheduler), result))
    with watch:
        while (arrivals or scheduler.has_requests() or queue) and step < limit:
            step += 1
            while arrivals and arrivals[0].arrives <= step:
                scheduler.add_request(make_request(scheduler, arrivals.popleft()))
            if not scheduler.has_requests() and not queue:
                continue
            output = scheduler.schedule()
            result.schedules.append(dict(output.num_scheduled_tokens))
            if output.total_num_scheduled_tokens:
                standstill = 0
            elif scheduler.get_num_unfinished_requests() and not any(o.total_num_scheduled_tokens for o, _ in queue):
                standstill += 1
                result.longest_standstill = max(result.longest_standstill, standstill)
                if standstill >= patience:
                    result.stalled = True
                    break
            queue.append((output, worker.execute(output)))
            while len(queue) >= depth or (queue and not scheduler.has_unfinished_requests()):
                _update(scheduler, *queue.popleft(), result, step)
                if not output.total_num_scheduled_tokens:
                    break
            gone = [p.name for p in everything.values() if p.aborted is not None and p.aborted <= step]
            _abort(scheduler, gone, result, step)
            _check_counts(scheduler.encoder_cache_manager)
        while queue:
            _update(scheduler, *queue.popleft(), result, step)
    result.stalled |= len(result.finished) < len(everything)
    result.encoder_runs = worker.runs
    return result


def _watching(scheduler_class: type, result: Result) -> Callable[..., Any]:
    ask = scheduler_class._try_schedule_encoder_inputs

    def watched(self: Any, request: Any, computed: int, wanted: int, *rest: Any, **named: Any) -> Any:
        found = ask(self, request, computed, wanted, *rest, **named)
        tokens = found[1]
        if tokens and self.need_mamba_block_aligned_split:
            local = computed - request.num_computed_tokens
            tokens = self._mamba_block_aligned_split(request, tokens, local, 0)
        result.zero_for_items |= wanted > 0 and tokens == 0
        return found

    return watched


def _update(scheduler: Any, output: Any, finish: Callable[[], Any], result: Result, step: int) -> None:
    from vllm.v1.outputs import DraftTokenIds

    made = finish()
    for outputs in scheduler.update_from_output(output, made).values():
        for one in outputs.outputs:
            if one.finish_reason is not None:
                result.finished[one.request_id] = str(one.finish_reason)
                result.steps[one.request_id] = step
    if scheduler.num_spec_tokens and not scheduler.scheduler_config.async_scheduling:
        names = made.req_ids
        scheduler.update_draft_token_ids(DraftTokenIds(names, [[TOKEN] * scheduler.num_spec_tokens for _ in names]))


def _abort(scheduler: Any, names: list[str], result: Result, step: int) -> None:
    from vllm.v1.request import RequestStatus

    for name in names:
        if name in scheduler.requests and name not in result.finished:
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            result.finished[name] = "abort"
            result.steps[name] = step


def _check_counts(manager: Any) -> None:
    """The counts are in range, and agree with the entries."""
    if not 0 <= manager.num_free_slots <= manager.num_freeable_slots <= manager.cache_size:
        raise Violation(f"free {manager.num_free_slots}, freeable {manager.num_freeable_slots}")
    if set(manager.freeable) != {item for item, names in manager.cached.items() if not names}:
        raise Violation("an entry without references cannot be evicted, or one with references can")
    if manager.num_freeable_slots - manager.num_free_slots != sum(manager.freeable.values()):
        raise Violation("the entries without references are miscounted")


def check_end(scheduler: Any) -> None:
    """At the end no reference is left, everything can be freed, and no KV block is held."""
    manager = scheduler.encoder_cache_manager
    if any(manager.cached.values()) or manager.request_cached_ids:
        raise Violation(f"references are left: {manager.cached}, {manager.request_cached_ids}")
    if manager.num_freeable_slots != manager.cache_size:
        raise Violation(f"{manager.num_freeable_slots} of {manager.cache_size} can be freed")
    if scheduler.kv_cache_manager.usage:
        raise Violation(f"{scheduler.kv_cache_manager.usage:.0%} of the KV cache is held")


def random_load(random: random.Random) -> tuple[Engine, list[Prompt]]:
    """An engine and 2 to 12 prompts for it, each of which fits alone; drawn from `random`, which may be hypothesis'."""
    budget = random.choice([2048, 4096, 8192])
    hybrid = random.random() < 0.75
    block = random.choice([16, 128, 544, 640, 784, 1056, 2096] if hybrid else [16, 128])
    pool = [Item(f"i{at}", random.choice([1, 4, 300, 900, 1500, 2024, 2048, budget])) for at in range(6)]
    texts = [Text(random.choice([1, 40, 104, 700, 3000]), f"p{at}") for at in range(3)]
    prompts = []
    for at in range(random.randint(2, 12)):
        segments: list[Segment] = [random.choice(texts)]
        for _ in range(random.choice([0, 1, 2, 3, 4, 6])):
            segments += [random.choice(pool), Text(random.choice([0, 1, 2, 11, 200]), "between")]
        segments.append(Text(random.randint(1, 30), f"end{at}"))
        prompts.append(
            Prompt(
                name=f"r{at}",
                segments=tuple(segment for segment in segments if segment.size),
                max_tokens=random.choice([1, 3, 40]),
                arrives=random.choice([0, 0, 1, 2, 10, 30]),
                aborted=random.randint(0, 40) if random.random() < 0.1 else None,
                priority=random.randint(0, 2),
            )
        )
    largest = max(item.size for item in pool)
    longest = max(prompt.size + prompt.max_tokens for prompt in prompts)
    # attention's blocks, the recurrent state's (running, previous, speculative), and the null block
    alone = -(-longest // block) + 6
    return (
        Engine(
            block=block,
            hybrid=hybrid,
            drafter=random.random() < 0.4,
            asynchronous=random.random() < 0.4,
            priority=random.random() < 0.3,
            cache=random.choice([largest, largest + 1, largest + random.randint(1, 4096), 2 * budget]),
            budget=budget,
            slots=random.choice([1, 2, 4, 8, 64]),
            blocks=random.choice([alone, 2 * alone, 20 * alone]),
            chunked_items=random.random() < 0.9,
            chunk=random.choice([0, 0, 0, 1000]),
        ),
        prompts,
    )


def bounded_steps(engine: Engine, prompts: Iterable[Prompt]) -> dict[str, int]:
    """How many steps each request may take at most: four times what it and all that may go before it need alone."""
    everything = list(prompts)
    bounds = {}
    for prompt in everything:
        ahead = [p for p in everything if engine.priority or p.arrives <= prompt.arrives + 40]
        bounds[prompt.name] = 20 + prompt.arrives + 4 * sum(_steps_alone(engine, p) for p in ahead)
    return bounds


def _steps_alone(engine: Engine, prompt: Prompt) -> int:
    chunk = min(engine.budget, engine.chunk or engine.budget)
    stops = 3 * sum(isinstance(segment, Item) for segment in prompt.segments) + prompt.size // engine.block
    return prompt.size // chunk + 3 + stops + 2 * prompt.max_tokens
