# SPDX-License-Identifier: Apache-2.0
"""What the prefix cache must not offer: blocks whose tokens were never computed."""

from typing import Any


def forget_uncomputed(kv_cache_manager: Any, request: Any) -> None:
    """Take blocks beyond the request's computed tokens out of the prefix cache; they stay the request's.

    `request` is preempted in the very step that scheduled it. Upstream caches blocks when it schedules them, and the
    step's tokens will not be computed now: the next request with this prefix would read what the blocks held before.
    """
    for manager in kv_cache_manager.coordinator.single_type_managers:
        computed = request.num_computed_tokens // manager.block_size
        blocks = manager.req_to_blocks.get(request.request_id, [])[computed:]
        kv_cache_manager.block_pool.evict_blocks({block.block_id for block in blocks if not block.is_null})
