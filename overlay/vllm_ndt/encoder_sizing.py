# SPDX-License-Identifier: Apache-2.0
"""How large an encoder cache ought to be: what a full batch can ask for, and what memory allows. No vLLM needed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# upstream's limit for a modality whose --limit-mm-per-prompt is not given
UNLIMITED = 999
# items a prompt that are assumed then
ASSUMED = 4
GIB = 2**30
MOST_BYTES = 2 * GIB
MOST_SHARE = 0.05


@dataclass(frozen=True)
class Demand:
    """What a full batch can ask of the cache.

    `sizes`: embeddings of the largest item, by modality, largest first; `items`: items a prompt, by modality;
    `assumed`: the modalities without a limit, for which ASSUMED was taken; `per_prompt` and `total` in embeddings.
    """

    slots: int
    sizes: dict[str, int]
    items: dict[str, int]
    assumed: tuple[str, ...]
    per_prompt: int
    total: int


def demand(sizes: Mapping[str, int], limits: Mapping[str, int], slots: int, max_model_len: int) -> Demand | None:
    """The demand of `slots` prompts with `limits` items of `sizes` embeddings each, by modality; None without items.

    A prompt may hold every modality at once, but no more than it is long (and at least one item).
    """
    used = [name for name in sizes if sizes[name] > 0 and limits.get(name, 0) > 0]
    order = sorted(used, key=lambda name: (-sizes[name], name))
    if not order:
        return None
    assumed = tuple(name for name in order if limits[name] >= UNLIMITED)
    items = {}
    for name in order:
        allowed = ASSUMED if name in assumed else limits[name]
        items[name] = max(1, min(allowed, max_model_len // sizes[name]))
    largest = sizes[order[0]]
    per_prompt = min(sum(items[name] * sizes[name] for name in order), max(max_model_len, largest))
    return Demand(slots, {name: sizes[name] for name in order}, items, assumed, per_prompt, slots * per_prompt)


def automatic(wanted: int, upstream: int, width_bytes: int, kv_bytes: int) -> tuple[int, str]:
    """`wanted` embeddings as far as memory allows, but never less than `upstream`; and what decided.

    `width_bytes`: bytes of one embedding; `kv_bytes`: memory for the KV cache before anything is taken off it.
    """
    by_size = MOST_BYTES // width_bytes
    by_share = int(kv_bytes * MOST_SHARE) // width_bytes
    size = min(wanted, by_size, by_share)
    if size <= upstream:
        return (
            upstream,
            "upstream's size is enough" if wanted <= upstream else "memory allows no more than upstream's size",
        )
    if size == wanted:
        return size, "enough for every slot"
    return size, f"{MOST_BYTES // GIB} GiB" if by_size <= by_share else f"{MOST_SHARE:.0%} of the KV cache's memory"


def at_risk(size: int, total: int, *, states_cached: bool, look_ahead: bool) -> bool:
    """Whether stock's rules can bring all requests to a standstill.

    They can if the batch asks for more than there is, and a chunk must end where recurrent states are cached or before
    a drafter's look-ahead.
    """
    return total > size and (states_cached or look_ahead)


def deepstack_layers(hf_config: Any) -> int:
    """How many vision layers add a vector of the hidden size to each embedding, as in Qwen3-VL."""
    for holder in (hf_config, getattr(hf_config, "thinker_config", None)):
        vision = getattr(holder, "vision_config", None)
        if indexes := getattr(vision, "deepstack_visual_indexes", None):
            return len(indexes)
    return 0
