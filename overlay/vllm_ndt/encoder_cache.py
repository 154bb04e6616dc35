# SPDX-License-Identifier: Apache-2.0
"""The scheduler's encoder cache: its size, and the start log's line about it."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from vllm_ndt import settings


class Budget(Protocol):
    """What is read of upstream's MultiModalBudget; sizes in embeddings, keys are modalities."""

    encoder_cache_size: int
    max_model_len: int
    max_num_reqs: int
    mm_max_toks_per_item: Mapping[str, int]
    mm_max_items_per_prompt: Mapping[str, int]


@dataclass(frozen=True)
class Plan:
    """The cache's size in embeddings, and a line for the log (empty: none) with its level."""

    size: int
    text: str = ""
    level: int = logging.INFO


def plan(environ: Mapping[str, str], budget: Budget | None, encoder_decoder: bool) -> Plan:
    """The larger of upstream's size and VLLM_NDT_ENCODER_CACHE_TOKENS; `budget` is None for a text-only model.

    Encoder-decoder models, text-only models and those whose modalities are all disabled keep upstream's size.
    Raises settings.SettingError on a bad value.
    """
    asked = settings.encoder_cache_tokens(environ)
    upstream = budget.encoder_cache_size if budget else 0
    if encoder_decoder:
        return Plan(upstream, _ignored(asked, "an encoder-decoder model does not use this cache"))
    if budget is None or upstream == 0:
        return Plan(upstream, _ignored(asked, "the model takes no multimodal input, or all of it is disabled"))
    size = max(upstream, asked or 0)
    room, level = _room(size, budget)
    return Plan(size, f"Encoder cache: {size} embeddings{_origin(asked, upstream)}{room}", level)


def _ignored(asked: int | None, why: str) -> str:
    return "" if asked is None else f"{settings.ENCODER_CACHE_TOKENS}={asked} is ignored: {why}"


def _origin(asked: int | None, upstream: int) -> str:
    if asked is None or asked == upstream:
        return ""
    if asked < upstream:
        return f" (upstream's size, which is kept: {settings.ENCODER_CACHE_TOKENS}={asked} is less)"
    return f" (upstream's size is {upstream}, raised by {settings.ENCODER_CACHE_TOKENS})"


def _room(size: int, budget: Budget) -> tuple[str, int]:
    """How many of the largest items fit, and whether a full batch can ask for more; with the log level."""
    sizes = {modality: tokens for modality, tokens in budget.mm_max_toks_per_item.items() if tokens > 0}
    if not sizes:
        # precomputed embeddings only: upstream gives no items a prompt for them
        return "", logging.INFO
    order = sorted(sizes, key=lambda modality: (-sizes[modality], modality))
    largest = sizes[order[0]]
    fit = f"; {size // largest} of the largest items fit ({order[0]}, {largest} embeddings)"

    # A prompt may hold every modality at once, so their shares add up, but to no more than a prompt is long.
    counts = {modality: budget.mm_max_items_per_prompt[modality] for modality in order}
    in_prompt = sum(count * sizes[modality] for modality, count in counts.items())
    if len(order) > 1:
        in_prompt = min(in_prompt, max(budget.max_model_len, largest))
    needed = budget.max_num_reqs * in_prompt
    items = " + ".join(f"{count} {modality}" for modality, count in counts.items())
    demand = f"{budget.max_num_reqs} requests of up to {items} items need {needed} embeddings"
    if needed <= size:
        return f"{fit}; {demand}, which fit", logging.INFO
    advice = f"lower max_num_seqs or limit_mm_per_prompt, or raise {settings.ENCODER_CACHE_TOKENS}"
    return f"{fit}; {demand}, which do not fit, so requests may wait for each other: {advice}", logging.WARNING
