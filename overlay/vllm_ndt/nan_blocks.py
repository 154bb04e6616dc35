# SPDX-License-Identifier: Apache-2.0
"""Zeroes KV-cache blocks and recurrent states that held NaN or Inf, in a worker.

Attention masks by multiplication here and there, and 0 times NaN is NaN: what a bad request leaves behind in a block
would reach the next one that gets it.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.logger import init_logger

# vLLM sets up the logger "vllm" and what is below it; a name of our own would log nothing
logger = init_logger("vllm.ndt.nan_guard")


def zero_blocks(runner: Any, block_ids: Iterable[int]) -> None:
    """Write 0 to the blocks with these ids, as the scheduler counts them, in each layer's cache of a model runner."""
    ids = sorted(block_ids)
    seen: set[tuple[int, int]] = set()
    by_ratio: dict[tuple[torch.device, int], torch.Tensor] = {}
    for cache, dim, ratio in _caches(runner):
        key = (cache.data_ptr(), cache.numel() * cache.element_size())
        if key in seen:
            continue
        seen.add(key)
        places = by_ratio.get((cache.device, ratio))
        if places is None:
            host = torch.tensor(
                [block * ratio + at for block in ids for at in range(ratio)], pin_memory=cache.device.type == "cuda"
            )
            places = by_ratio[cache.device, ratio] = host.to(cache.device, non_blocking=True)
        if cache.element_size() == 1:  # types of one byte cannot all be filled, and 0 is 0 in all of them
            cache = cache.view(torch.uint8)
        cache.index_fill_(dim, places, 0)


def _caches(runner: Any) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Each layer's cache tensors, the dimension that counts blocks, and how many of those the scheduler's block is."""
    from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec

    layers = runner.compilation_config.static_forward_context
    sizes = getattr(runner, "kernel_block_sizes", None) or runner._kernel_block_sizes
    for group in (group for groups in runner.attn_groups for group in groups):
        spec = group.kv_cache_spec
        for name in group.layer_names:
            layer = layers.get(name)
            caches = getattr(layer, "kv_cache", None)
            if caches is None:
                continue
            if isinstance(spec, MambaSpec):
                yield from ((cache, 0, 1) for cache in caches)
            elif isinstance(spec, AttentionSpec) and isinstance(caches, torch.Tensor):
                if not caches.numel():
                    continue
                size = sizes[group.kv_cache_group_id]
                dim = group.backend.get_kv_cache_block_dim(
                    size, spec.num_kv_heads, spec.head_size, cache_dtype_str=runner.cache_config.cache_dtype
                )
                yield caches, dim, spec.block_size // size
            else:
                logger.warning_once("NaN guard: cannot zero the cache of %s, which has another form.", name)
