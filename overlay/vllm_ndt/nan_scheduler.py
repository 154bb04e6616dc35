# SPDX-License-Identifier: Apache-2.0
"""The NaN guard in the scheduler: counts what steps found and, in mode abort, keeps it from everybody.

A request that was hit ends with an error before a token of that step leaves. Its blocks leave the prefix cache at once,
and each is zeroed before it is used again, whoever held it until then: a block may be shared, or be freed already. The
blocks of a step are noted when it is scheduled, for when its findings come, the request may have lost them.
"""

import os
from typing import Any

from vllm_ndt import settings
from vllm_ndt.counters import Increases
from vllm_ndt.encoder_manager import Manager
from vllm_ndt.nan_metrics import COUNTERS
from vllm_ndt.nan_step import LOGITS, findings_of
from vllm_ndt.prefix_cache import block_ids


class Nonfinite:
    """One scheduler's side of the guard; nothing while it is off.

    `steps`, `requests`, `logits` and `aborted` only grow: steps with a finding, requests hit in a step (one counts once
    a step), those hit in the logits alone, and requests that ended for it.
    """

    def __init__(self, scheduler: Any) -> None:
        self.mode = settings.nan_guard(os.environ)
        self.steps = self.requests = self.logits = self.aborted = 0
        self._scheduler = scheduler
        self._blocks: dict[int, dict[str, set[int]]] = {}  # step's output -> request -> the blocks that it writes
        self._copies: dict[int, list[tuple[int, int]]] = {}  # step's output -> blocks that it copies first, from and to
        self._dirty: set[int] = set()
        self._to_zero: set[int] = set()
        self._increases = Increases()
        if self.mode == "abort":
            pool = scheduler.kv_cache_manager.block_pool
            self._get_new_blocks = pool.get_new_blocks
            pool.get_new_blocks = self._watch_new_blocks

    def end_schedule(self, output: Any) -> None:
        """Complete a step that was scheduled: blocks to zero before it, and a note of the blocks that it writes."""
        if self.mode != "abort":
            return
        if self._to_zero:
            output.ndt_block_ids_to_zero = sorted(self._to_zero)
            self._to_zero = set()
        if output.total_num_scheduled_tokens:
            written = output.num_scheduled_tokens.items()
            self._blocks[id(output)] = {name: self._blocks_of(name, count) for name, count in written}
            if output.kv_cache_block_copies:
                self._copies[id(output)] = [(copy[0], copy[1]) for copy in output.kv_cache_block_copies]

    def take(self, output: Any, made: Any) -> set[str]:
        """Count a step's findings; gives the requests that must end with an error now, of which none gets a token."""
        if self.mode == "off":
            return set()
        written = self._blocks.pop(id(output), {})
        self._copies.pop(id(output), None)
        found = findings_of(made)
        if found is None:
            return set()
        self.steps += 1
        self.requests += len(found.requests)
        self.logits += sum(where == LOGITS for where in found.requests.values())
        if self.mode != "abort":
            return set()
        for name in found.requests:
            dirty = written.get(name, set()) | self._blocks_of(name)
            # steps that are in flight read and write what this one left
            for later in self._blocks.values():
                dirty |= later.get(name, set())
            # and copy it, for a prefix that is kept
            for copies in self._copies.values():
                dirty |= {to for source, to in copies if source in dirty}
            self._scheduler.kv_cache_manager.block_pool.evict_blocks(dirty)
            self._dirty |= dirty
            self._drop_items(name)
        ended = {name for name in found.requests if self._goes_on(name)}
        self.aborted += len(ended)
        return ended

    def leave_to_load(self, request: Any) -> None:
        """Zero none of a request's blocks now: a KV connector is about to write them beside the steps."""
        taken = self._to_zero & self._blocks_of(request.request_id) if self._to_zero else set()
        self._to_zero -= taken
        self._dirty |= taken

    def report(self) -> dict[str, int] | None:
        """What was counted since the last report, by nan_metrics.COUNTERS; None while the guard is off."""
        if self.mode == "off":
            return None
        return self._increases.take({name: getattr(self, name) for name in COUNTERS})

    def _goes_on(self, name: str) -> bool:
        request = self._scheduler.requests.get(name)
        return request is not None and not request.is_finished()

    def _blocks_of(self, name: str, written: int | None = None) -> set[int]:
        """A request's blocks, or those alone that hold the last `written` of its scheduled tokens."""
        request = self._scheduler.requests.get(name)
        first = 0
        if written is not None and request is not None:
            # drafts in flight may be rejected, and the step then writes further ahead
            first = max(0, request.num_computed_tokens - written - request.num_output_placeholders)
        return block_ids(self._scheduler.kv_cache_manager, name, first)

    def _drop_items(self, name: str) -> None:
        request = self._scheduler.requests.get(name)
        manager = self._scheduler.encoder_cache_manager
        if request is not None and isinstance(manager, Manager):
            manager.taint(request)

    def _watch_new_blocks(self, *args: Any, **kwargs: Any) -> Any:
        blocks = self._get_new_blocks(*args, **kwargs)
        if self._dirty:
            taken = self._dirty.intersection(block.block_id for block in blocks)
            self._dirty -= taken
            self._to_zero |= taken
        return blocks
