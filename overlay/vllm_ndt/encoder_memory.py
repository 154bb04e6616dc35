# SPDX-License-Identifier: Apache-2.0
"""The encoder cache's memory: how much a worker leaves free for it, how large `auto` is, and that nothing pins more."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_ndt import settings
from vllm_ndt.encoder_cache import DECIDED, demand_of
from vllm_ndt.encoder_engine import budget_of
from vllm_ndt.encoder_sizing import ASSUMED, GIB, automatic, deepstack_layers

# vLLM sets up the logger "vllm" and what is below it; a name of our own would log nothing
logger = init_logger("vllm.ndt.encoder_memory")

# where a model runner keeps what it saw while memory was profiled
_PROFILE = "ndt_encoder_profile"


@dataclass(frozen=True)
class Profile:
    """Encoder outputs that were alive while memory was profiled: `rows` embeddings of `width` bytes each."""

    rows: int
    width: int


def note_profile(runner: Any, outputs: Iterable[torch.Tensor]) -> None:
    """Keep what the profiling run's encoder outputs measure, on the object that made them.

    `outputs`: tensors of shape (embeddings, width), or one of (items, embeddings, width).
    """
    tensors = list(outputs)
    rows = sum(tensor.shape[0] for tensor in tensors)
    setattr(runner, _PROFILE, Profile(rows, tensors[0].shape[-1] * tensors[0].element_size()))


def owned(output: torch.Tensor) -> torch.Tensor:
    """An encoder output that keeps no more memory alive than itself: a view of its batch's tensor is copied."""
    return output if output.untyped_storage().nbytes() <= output.nbytes else output.clone()


def reserve(worker: Any, kv_bytes: int, explicit: int | None = None) -> int:
    """Decide on the cache's size, and return the bytes that must stay free for it beside the KV cache.

    `kv_bytes`: what the KV cache would get otherwise. `explicit`: the KV size that the operator gave, which is kept:
    then nothing is taken off, and a warning says what may be short. What upstream profiles is not counted again.
    Raises settings.SettingError for a number of embeddings that the KV cache's memory cannot give, unless `explicit`.
    """
    setattr(worker, DECIDED, None)
    asked = settings.encoder_cache_tokens(os.environ)
    budget = _budget(worker) if asked is not None else None
    if budget is None or not budget.encoder_cache_size or kv_bytes <= 0:
        return 0
    profile = _profile(worker)
    upstream = budget.encoder_cache_size
    if asked == settings.AUTO:
        wants = demand_of(budget)
        size, why = automatic(wants.total if wants else upstream, upstream, profile.width, kv_bytes)
        why = f"auto: {why}"
        if wants and wants.assumed:
            why += f"; no limit is set for {' and '.join(wants.assumed)} items, so {ASSUMED} a prompt are assumed"
    else:
        size, why = max(int(asked or 0), upstream), f"{settings.ENCODER_CACHE_TOKENS}={asked}"
    # the outputs of the profiling run are in upstream's figures already
    bytes_beside = max(0, size - profile.rows) * profile.width if size > upstream or not profile.rows else 0
    if asked != settings.AUTO and not explicit and bytes_beside >= kv_bytes:
        raise settings.SettingError(
            settings.ENCODER_CACHE_TOKENS,
            str(asked),
            f"less than the KV cache's memory, {kv_bytes / GIB:.2f} GiB (an embedding takes {profile.width} bytes, "
            f"so at most {profile.rows + (kv_bytes - 1) // profile.width})",
        )
    setattr(worker, DECIDED, size)
    if worker.rank == 0:
        _log(size, why, profile, bytes_beside, explicit)
    return 0 if explicit else bytes_beside


def plan_key(vllm_config: Any) -> list[Any]:
    """What decides on the reservation beside upstream's hash of the configuration: for the startup plan's key."""
    limits = vllm_config.model_config.multimodal_config
    return [
        os.environ.get(settings.ENCODER_CACHE_TOKENS),
        vllm_config.scheduler_config.max_num_seqs,
        repr(limits and limits.limit_per_prompt),
    ]


def agree(executor: Any, vllm_config: Any) -> None:
    """Tell the scheduler, through its configuration, the size that the workers decided on: the smallest of theirs."""
    if settings.encoder_cache_tokens(os.environ) == settings.AUTO:
        sizes = [size for size in executor.collective_rpc(decided) if size is not None]
        setattr(vllm_config, DECIDED, min(sizes, default=None))


def decided(worker: Any) -> int | None:
    """The size that a worker decided on, in embeddings; None without an encoder. Runs in the worker."""
    return getattr(getattr(worker, "worker", worker), DECIDED, None)


def _budget(worker: Any) -> Any:
    """Upstream's MultiModalBudget, or None where no encoder cache of ours is: see encoder_cache.plan."""
    from vllm.distributed.parallel_state import get_pp_group

    config = worker.vllm_config
    if config.model_config.is_encoder_decoder or not get_pp_group().is_first_rank:
        return None
    return getattr(worker.model_runner, "mm_budget", None) or budget_of(config)


def _profile(worker: Any) -> Profile:
    """What was measured; else the width from the model's configuration, and no rows."""
    runner = worker.model_runner
    encoder_runner = getattr(getattr(runner, "model_state", None), "encoder_runner", None)
    for holder in (runner, encoder_runner):
        if found := getattr(holder, _PROFILE, None):
            return found
    model = worker.vllm_config.model_config
    width = model.get_inputs_embeds_size() * (1 + deepstack_layers(model.hf_config))
    return Profile(0, width * torch.empty((), dtype=model.dtype).element_size())


def _log(size: int, why: str, profile: Profile, bytes_beside: int, explicit: int | None) -> None:
    text = f"Encoder cache: {size} embeddings of {profile.width} bytes ({why})"
    mib = bytes_beside / 2**20
    if explicit:
        logger.warning(
            "%s; the KV size that was given is kept, so %.1f MiB more must be free: if memory runs out, give the KV "
            "cache that much less",
            text,
            mib,
        )
    else:
        logger.info("%s; %.1f MiB are left free for it beside the KV cache", text, mib)
