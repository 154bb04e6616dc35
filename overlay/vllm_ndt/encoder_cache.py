# SPDX-License-Identifier: Apache-2.0
"""The scheduler's encoder cache: its size, and the start log's line about it."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from vllm_ndt import settings
from vllm_ndt.encoder_sizing import Demand, at_risk, demand

# where the workers' decision about `auto` stands: on each worker, and on the configuration that the scheduler reads
DECIDED = "ndt_encoder_cache_tokens"


class Budget(Protocol):
    """What is read of upstream's MultiModalBudget; sizes in embeddings, keys are modalities."""

    encoder_cache_size: int
    max_model_len: int
    max_num_reqs: int
    mm_max_toks_per_item: Mapping[str, int]
    mm_limits: Mapping[str, int]


@dataclass(frozen=True)
class Plan:
    """The cache's size in embeddings, and a line for the log (empty: none) with its level."""

    size: int
    text: str = ""
    level: int = logging.INFO


@dataclass(frozen=True)
class Engine:
    """What decides on the size beside the budget.

    `decided`: what the workers made of `auto`, None if they were not asked; `block`: the tokens of a block at whose
    ends recurrent states are cached, None if none are; `look_ahead`: whether a drafter reads one token ahead.
    """

    encoder_decoder: bool = False
    decided: int | None = None
    block: int | None = None
    look_ahead: bool = False


def plan(environ: Mapping[str, str], budget: Budget | None, engine: Engine) -> Plan:
    """The larger of upstream's size and VLLM_NDT_ENCODER_CACHE_TOKENS; `budget` is None for a text-only model.

    Encoder-decoder models, text-only models and those whose modalities are all disabled keep upstream's size.
    Raises settings.SettingError on a bad value.
    """
    asked = settings.encoder_cache_tokens(environ)
    upstream = budget.encoder_cache_size if budget else 0
    if engine.encoder_decoder:
        return Plan(upstream, _ignored(asked, "an encoder-decoder model does not use this cache"))
    if budget is None or upstream == 0:
        return Plan(upstream, _ignored(asked, "the model takes no multimodal input, or all of it is disabled"))
    least = engine.decided if asked == settings.AUTO else asked
    size = max(upstream, int(least or 0))
    wants = demand_of(budget)
    head = f"Encoder cache: {size} embeddings{_origin(asked, engine.decided, upstream)}"
    if wants is None:
        # precomputed embeddings only: upstream knows no size of an item for them
        return Plan(size, head)
    risky = at_risk(size, wants.total, states_cached=engine.block is not None, look_ahead=engine.look_ahead)
    return Plan(size, f"{head}{_room(size, wants, risky)}", logging.WARNING if risky else logging.INFO)


def demand_of(budget: Budget) -> Demand | None:
    """What a full batch can ask of the cache; see encoder_sizing.demand."""
    return demand(budget.mm_max_toks_per_item, budget.mm_limits, budget.max_num_reqs, budget.max_model_len)


def _ignored(asked: int | str | None, why: str) -> str:
    return "" if asked is None else f"{settings.ENCODER_CACHE_TOKENS}={asked} is ignored: {why}"


def _origin(asked: int | str | None, decided: int | None, upstream: int) -> str:
    if asked is None or asked == upstream:
        return ""
    if asked == settings.AUTO and decided is None:
        return f" (upstream's size, which is kept: no worker decided on {settings.ENCODER_CACHE_TOKENS}=auto)"
    size = decided if decided is not None else int(asked)
    if size < upstream:
        return f" (upstream's size, which is kept: {settings.ENCODER_CACHE_TOKENS}={asked} is less)"
    if size == upstream:
        return f" (upstream's size, on which {settings.ENCODER_CACHE_TOKENS}={asked} decided)"
    return f" (upstream's size is {upstream}, raised by {settings.ENCODER_CACHE_TOKENS}={asked})"


def _room(size: int, wants: Demand, risky: bool) -> str:
    """How many of the largest items fit, and whether a full batch can ask for more."""
    modality, largest = next(iter(wants.sizes.items()))
    items = " + ".join(f"{count} {name}" for name, count in wants.items.items())
    if wants.assumed:
        items += f" (assumed: no limit is set for {' and '.join(wants.assumed)})"
    text = (
        f"; {size // largest} of the largest items fit ({modality}, {largest} embeddings); {wants.slots} requests of "
        f"up to {items} items need {wants.total} embeddings, "
    )
    if wants.total <= size:
        return text + "which fit"
    text += "which do not fit, so that requests may wait for space"
    if not risky:
        return text
    return (
        f"{text}; stock vLLM can stand still with these settings, and this build is slower than it could be: set "
        f"{settings.ENCODER_CACHE_TOKENS}=auto, or lower max_num_seqs or limit_mm_per_prompt"
    )


def unsafe_budget(block: int | None, slots: int, tokens_each: int, budget: int) -> str:
    """A line for the log if decoding requests can keep a prompt from starting; empty if they cannot.

    Where recurrent states are cached at the ends of `block` tokens (None: they are not), a chunk shorter than a block
    is not scheduled, and `slots` requests that decode `tokens_each` tokens leave that little of `budget`. That is
    upstream's rule, for text as well (vllm-project/vllm#45414).
    """
    if block is None or block > budget or block + slots * tokens_each <= budget:
        return ""
    return (
        f"A prompt may have to wait for as long as others decode: a block of {block} tokens and {slots} requests of "
        f"{tokens_each} need {block + slots * tokens_each} tokens a step, and there are {budget}: raise "
        "max_num_batched_tokens or lower max_num_seqs"
    )
