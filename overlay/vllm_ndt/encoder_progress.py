# SPDX-License-Identifier: Apache-2.0
"""Scheduling of encoder inputs that never stands still.

Upstream's schedule is kept as long as it gives tokens to each request whose items it looks at. Where a request would
get none because its next item has no place in the encoder cache, four rules of this module apply:

- who gets no token for want of a place holds nothing: it gives its references back and asks once more
  (`schedule_inputs`);
- the drafter's look-ahead cannot end a chunk before it begins: the model runners draft from the token's embedding
  where an item is missing (`schedule_inputs`);
- requests behind the one that waits for space take no more of it (Manager.door_open), so none is starved;
- if all of it does not help, one request is preempted, or one that cannot fit alone ends with an error (`end_step`).

And an encoder run is not lost with the request that asked for it (`hand_over`).
"""

import time
from collections.abc import Iterable
from typing import Any, Protocol

from vllm.logger import init_logger
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request

from vllm_ndt.encoder_engine import budget_warning
from vllm_ndt.encoder_manager import Manager, Refusal

# vLLM sets up the logger "vllm" and what is below it; a name of our own would log nothing
logger = init_logger("vllm.ndt.encoder_progress")

LOG_SECONDS = 60.0

# as upstream returns it: inputs to encode, tokens to schedule, compute budget left, inputs to load from elsewhere
Found = tuple[list[int], int, int, list[int]]


class Scheduler(Protocol):
    """What is used of upstream's Scheduler."""

    vllm_config: Any
    encoder_cache_manager: Any
    max_num_encoder_input_tokens: int
    policy: SchedulingPolicy
    requests: dict[str, Request]
    running: list[Request]
    waiting: Any
    use_eagle: bool
    is_encoder_decoder: bool
    grammar_compile_error_reqs: set[str]

    def _try_schedule_encoder_inputs(
        self, request: Request, computed: int, wanted: int, compute_budget: int, shift_computed_tokens: int
    ) -> Found: ...

    def _preempt_request(self, request: Request, timestamp: float) -> None: ...

    def get_num_unfinished_requests(self) -> int: ...


class EncoderProgress:
    """One scheduler's encoder inputs: see the module. `preemptions` only grows; `empty_steps` counts those in a row.

    With a manager that is not ours (an encoder-decoder model's, or one of `--ec-manager-config`) nothing is changed
    but the drafter's look-ahead.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        manager = scheduler.encoder_cache_manager
        self.manager = manager if isinstance(manager, Manager) else None
        self.preemptions = 0
        self.empty_steps = 0
        # the first request of this step that got no token for want of space
        self._blocked: Request | None = None
        # where a request stood when it was preempted here: (computed tokens, tokens)
        self._marks: dict[str, tuple[int, int]] = {}
        self._logged = -LOG_SECONDS
        self._logged_preemptions = 0
        if text := budget_warning(scheduler.vllm_config):
            logger.warning("%s", text)

    def start_step(self) -> None:
        """Open the door."""
        self._blocked = None
        if self.manager:
            self.manager.door_open = True

    def schedule_inputs(self, request: Request, computed: int, wanted: int, compute_budget: int) -> Found:
        """Upstream's answer for up to `wanted` tokens from position `computed`, unless that is no token at all.

        `compute_budget` is in embeddings.
        """
        last = request.mm_features[-1].mm_position
        if last.offset + last.length <= computed and not self.scheduler.is_encoder_decoder:
            # what upstream would find out with more work, for each request that decodes, in each step
            return [], wanted, compute_budget, []
        look_ahead = 1 if self.scheduler.use_eagle else 0
        found = self._ask(request, computed, wanted, compute_budget, look_ahead)
        if found[1] or not wanted:
            return found
        self.give_back(request)
        found = self._ask(request, computed, wanted, compute_budget, look_ahead)
        if look_ahead and not found[1]:
            found = self._ask(request, computed, wanted, compute_budget, 0)
        if not found[1] and self._over_budget_together(compute_budget):
            inputs, tokens, _, loaded = self._ask(
                request, computed, 1, self.scheduler.encoder_cache_manager.cache_size, 0
            )
            found = inputs, tokens, 0, loaded
        if not found[1]:
            self.give_back(request)
            if self.manager:
                self._note_blocked(self.manager, request)
        return found

    def give_back(self, request: Request) -> None:
        """Drop a request's references, for it is not scheduled; the entries stay until their place is needed.

        What a step in flight reads is safe: workers evict with a later step's output. An encoder-decoder model's
        manager counts places instead, and none was taken yet.
        """
        if request.has_encoder_inputs and not self.scheduler.is_encoder_decoder:
            self.scheduler.encoder_cache_manager.free(request)

    def hand_over(
        self,
        preempted: Request,
        inputs: Iterable[int],
        encoder_inputs: dict[str, list[int]],
        scheduled: Iterable[str],
        current: Request,
        current_inputs: list[int] | None,
    ) -> list[int]:
        """Call off the encoder runs of a request that is preempted in the step that scheduled them; they are returned.

        Others may rely on their outputs by now: a request of `scheduled`, or `current`, which is being scheduled and
        for which `current_inputs` will be encoded. The item is encoded for that one.
        """
        if self.manager is None:
            return list(inputs)
        called_off = []
        for input_id in inputs:
            item = preempted.mm_features[input_id].identifier
            heirs = self.manager.cached.get(item, set()) - {preempted.request_id}
            heir = next((name for name in scheduled if name in heirs), None)
            if heir is not None:
                encoder_inputs.setdefault(heir, []).append(_input_of(self.scheduler.requests[heir], item))
                continue
            called_off.append(input_id)
            self.manager.forget(preempted, input_id)
            if current.request_id in heirs and current_inputs is not None:
                current_inputs.append(_input_of(current, item))
        return called_off

    def end_step(self, num_scheduled_tokens: int) -> None:
        """Count empty steps, and preempt one request if all stand still for want of space."""
        if num_scheduled_tokens or not self.scheduler.get_num_unfinished_requests():
            self.empty_steps = 0
        elif not self._in_flight():
            self.empty_steps += 1
            if self.manager and self._blocked:
                self._make_room(self.manager, self._blocked)

    def _ask(self, request: Request, computed: int, wanted: int, compute_budget: int, look_ahead: int) -> Found:
        if self.manager:
            self.manager.refusal = None
        return self.scheduler._try_schedule_encoder_inputs(
            request, computed, wanted, compute_budget, shift_computed_tokens=look_ahead
        )

    def _over_budget_together(self, compute_budget: int) -> bool:
        """Whether items at one place, as sound inside a video, are within a whole step's budget one by one only.

        Upstream never encodes them then. It encodes each kind as a batch of its own, so that no batch is above the
        budget if they are encoded in one step.
        """
        limit = self.scheduler.max_num_encoder_input_tokens
        manager = self.manager
        if manager is None or manager.refusal is not Refusal.COMPUTE:
            return False
        return compute_budget >= limit and manager.refused <= limit

    def _note_blocked(self, manager: Manager, request: Request) -> None:
        """Close the door behind a request that lacks space, and end one that lacks it with everything at its hands."""
        hopeless = {
            Refusal.COMPUTE: manager.refused > self.scheduler.max_num_encoder_input_tokens,
            Refusal.SPACE: not manager.pinned,
        }
        if manager.refusal and hopeless.get(manager.refusal):
            self._end(request, manager)
        elif manager.refusal is Refusal.SPACE:
            self._blocked = request
            manager.door_open = False

    def _make_room(self, manager: Manager, waits: Request) -> None:
        """Everybody stands still, and somebody holds what `waits` needs: the least of them lets go.

        Whoever is not running gives back first; a session that waits for input may hold an item at its prompt's end.
        """
        idle = [r for r in self.scheduler.requests.values() if r not in self.scheduler.running and manager.pinned_by(r)]
        for request in idle:
            self.give_back(request)
        if idle:
            return
        by_priority = self.scheduler.policy == SchedulingPolicy.PRIORITY
        holders = [request for request in self.scheduler.running if manager.pinned_by(request)]
        holders.sort(
            key=lambda r: (r.priority if by_priority else 0, r.arrival_time, manager.pinned_by(r)), reverse=True
        )
        victim = next((request for request in holders if self._may_preempt(request)), None)
        if victim:
            self._preempt(manager, victim, waits)
        elif holders:
            self._end(holders[0], manager)

    def _may_preempt(self, request: Request) -> bool:
        """Only if it came further since it was preempted here last."""
        computed, tokens = self._marks.get(request.request_id, (-1, -1))
        return request.num_computed_tokens > computed or request.num_tokens > tokens

    def _preempt(self, manager: Manager, request: Request, waits: Request) -> None:
        now = time.monotonic()
        self.preemptions += 1
        self._log(now, manager, request, waits)
        self._marks = {name: mark for name, mark in self._marks.items() if name in self.scheduler.requests}
        self._marks[request.request_id] = (request.num_computed_tokens, request.num_tokens)
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, now)
        if waits is not request and waits in self.scheduler.waiting:
            # upstream puts a preempted request in front, where it would take its items again
            self.scheduler.waiting.remove_request(waits)
            self.scheduler.waiting.prepend_request(waits)

    def _end(self, request: Request, manager: Manager) -> None:
        """Upstream ends the requests of this set with an error, with the step's output."""
        if request.request_id in self.scheduler.grammar_compile_error_reqs:
            return
        self.scheduler.grammar_compile_error_reqs.add(request.request_id)
        logger.error(
            "Request %s ends with an error: with an item of %d embeddings it cannot go on even alone; "
            "the encoder cache has %d, a step's encoder budget %d (--max-num-batched-tokens raises both)",
            request.request_id,
            manager.refused,
            manager.cache_size,
            self.scheduler.max_num_encoder_input_tokens,
        )

    def _in_flight(self) -> bool:
        return any(request.num_in_flight_tokens for request in self.scheduler.running)

    def _log(self, now: float, manager: Manager, request: Request, waits: Request) -> None:
        if now - self._logged < LOG_SECONDS:
            return
        logger.warning(
            "No request could go on for want of encoder cache (%d of %d embeddings referenced): preempted request %s, "
            "which holds %d, so that request %s can; %d such preemptions since the last line",
            manager.pinned,
            manager.cache_size,
            request.request_id,
            manager.pinned_by(request),
            waits.request_id,
            self.preemptions - self._logged_preemptions,
        )
        self._logged = now
        self._logged_preemptions = self.preemptions


def _input_of(request: Request, item: str) -> int:
    return next(at for at, feature in enumerate(request.mm_features) if feature.identifier == item)
