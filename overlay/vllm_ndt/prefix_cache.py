# SPDX-License-Identifier: Apache-2.0
"""A request's blocks, and what the prefix cache must not offer of them: tokens that were never computed."""

from typing import Any


def forget_uncomputed(kv_cache_manager: Any, request: Any) -> None:
    """Take blocks beyond the request's computed tokens out of the prefix cache; they stay the request's.

    `request` is preempted in the very step that scheduled it. Upstream caches blocks when it schedules them, and the
    step's tokens will not be computed now: the next request with this prefix would read what the blocks held before.
    """
    blocks = block_ids(kv_cache_manager, request.request_id, request.num_computed_tokens)
    kv_cache_manager.block_pool.evict_blocks(blocks)


def block_ids(kv_cache_manager: Any, request_id: str, first_token: int = 0) -> set[int]:
    """The ids of a request's blocks, of each kind of cache, from the one with the token at `first_token` on."""
    ids: set[int] = set()
    for manager in kv_cache_manager.coordinator.single_type_managers:
        blocks = manager.req_to_blocks.get(request_id, ())[first_token // manager.block_size :]
        ids.update(block.block_id for block in blocks if not block.is_null)
    return ids
