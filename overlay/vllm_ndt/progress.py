# SPDX-License-Identifier: Apache-2.0
"""What an engine core tells of its requests' progress, about once a second while it has some.

Progress is a request's: an output, or a position computed for the first time. Tokens that are computed again after a
preemption are none. A report is a map of plain values, for it travels with upstream's SchedulerStats.
"""

from __future__ import annotations

import heapq
import os
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from vllm_ndt import settings, stall, stall_log
from vllm_ndt.stall import PERIOD, Report
from vllm_ndt.start import own_build

NAMED = 5  # requests that a report names, of each kind
CHURNS = 3  # preemptions without progress that are a stall of their own
# reports that a request must have been in before it can be called starved: after a pause of the process all look old
_SIGHTINGS = 3

WAITS = {
    "WAITING": "capacity",
    "PREEMPTED": "capacity",
    "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": "grammar",
    "WAITING_FOR_REMOTE_KVS": "remote KV",
    "WAITING_FOR_STREAMING_REQ": "input",
}
# what a request that waits for it is waiting for is not this engine
OUTSIDE = frozenset({"grammar", "remote KV", "input"})


@dataclass(slots=True)
class _Seen:
    """The furthest that a request got: position in tokens, outputs, and when and at which preemption that was."""

    position: int
    outputs: int
    since: float
    preemptions: int
    sightings: int = 0


class Requests:
    """The progress of a scheduler's requests from look to look; `limit` in seconds."""

    def __init__(self, scheduler: Any, limit: float) -> None:
        self._scheduler, self._limit = scheduler, limit
        self._seen: dict[str, _Seen] = {}
        # with priorities, preempting one request for others is what was asked for
        self._fcfs = str(scheduler.vllm_config.scheduler_config.policy) == "fcfs"

    def look(self, now: float) -> tuple[bool, Report]:
        """Whether any request moved since the last look, and the part of a report that is about requests."""
        seen: dict[str, _Seen] = {}
        waiting: dict[str, int] = {}
        starved, parked, holding = [], [], []
        moved, churning, unfinished, inside = False, "", 0, 0
        for name, request in self._scheduler.requests.items():
            if request.is_finished():
                continue
            unfinished += 1
            position, outputs = request.num_computed_tokens, request.num_output_tokens
            last = self._seen.get(name)
            if last is None:
                last = _Seen(position, outputs, now, request.num_preemptions)
            elif position > last.position or outputs > last.outputs:
                moved = True
                last = _Seen(max(position, last.position), outputs, now, request.num_preemptions)
            seen[name] = last
            last.sightings += 1
            if position:
                holding.append((position, name))
            reason = WAITS.get(request.status.name)
            if reason is not None:
                waiting[reason] = waiting.get(reason, 0) + 1
            if reason in OUTSIDE:
                parked.append((now - last.since, name, reason))
                continue
            inside += 1
            age = now - last.since
            if age < self._limit or last.sightings < _SIGHTINGS:
                continue
            starved.append((age, name, reason or "running"))
            if self._fcfs and request.num_preemptions - last.preemptions >= CHURNS:
                churning = churning or name
        self._seen = seen
        return moved, {
            "unfinished": unfinished,
            "running": len(self._scheduler.running),
            "waiting": waiting,
            "excuse": "" if inside else f"waiting for {', '.join(sorted(waiting))}" if waiting else "",
            "holding": [f"{name} ({position} tokens)" for position, name in heapq.nlargest(NAMED, holding)],
            "starved": len(starved),
            "oldest": _named(starved),
            "parked": _named(parked),
            "churning": churning,
        }


def _named(requests: list[tuple[float, str, str]]) -> list[str]:
    return [f"{name} ({reason}, {age:.0f} s)" for age, name, reason in heapq.nlargest(NAMED, requests)]


class Progress:
    """Counts an engine core's progress and reports it to the front ends that asked for it.

    While nobody asks (front ends that are not Python, offline use), a thread of the engine core looks and logs.
    """

    def __init__(self, core: Any, limit: float) -> None:
        self._core, self._limit = core, limit
        self._requests = Requests(core.scheduler, limit)
        self._clients: list[int] = []
        self._moves = self._empty_steps = 0
        self._told = 0.0
        self._resting = True
        # what every report has; without a limit there are none, and nobody is asked
        self._same: Report = {}
        if limit:
            self._same = {"pid": os.getpid(), "host": socket.gethostname(), "manifests": _manifests(core)}
        self.report: Report = {}
        if limit:
            threading.Thread(target=self._watch, name="ndt-stall", daemon=True).start()

    def ask(self, client: int) -> None:
        """Report to the front end with this index from now on."""
        if client not in self._clients:
            self._clients.append(client)
        self._tell(time.monotonic())

    def begin(self) -> None:
        """Take note that a step begins, and report if it is time: a step that hangs reports no more."""
        now = time.monotonic()
        if self._resting or now - self._told >= PERIOD:
            self._resting = False
            self._tell(now)

    def end(self, outputs: Any, executed: bool) -> None:
        """Take note of what a step gave: its outputs by front end, or None, and whether the model ran."""
        self._empty_steps = 0 if executed else self._empty_steps + 1
        if outputs and any(one.outputs for one in outputs.values()):
            self._moves += 1

    def rest(self) -> None:
        """Take note that there is nothing to step: idle, paused or asleep."""
        self._resting = True
        self._tell(time.monotonic())

    def _tell(self, now: float) -> None:
        if not self._limit:
            return
        self._told = now
        moved, about = self._requests.look(now)
        self._moves += moved
        scheduler = self._core.scheduler
        self.report = {
            "moves": self._moves,
            **about,
            "excuse": self._asleep() or about["excuse"],
            "kv_cache_usage": round(scheduler.get_kv_cache_usage(), 4),
            "encoder_cache": _encoder_cache(scheduler),
            "empty_steps": self._empty_steps,
            **self._same,
        }
        for client in self._clients:
            self._core.output_queue.put_nowait((client, _message(self.report)))

    def _asleep(self) -> str:
        if self._core.model_executor.is_sleeping:
            return "asleep"
        paused = self._core.is_scheduler_paused() and not self._core.scheduler.get_num_unfinished_requests()
        return "paused" if paused else ""

    def _watch(self) -> None:
        engine, log = stall.Engine(self._limit), stall_log.Log(self._core.engine_index, self._limit)
        last = time.monotonic()
        while not self._clients:
            time.sleep(PERIOD)
            if self.report:
                engine.hear(self.report)
            now = time.monotonic()
            engine.look(now - last, waited_for=len(self._core.scheduler.requests))
            last = now
            log.note(engine)


def start(core: Any) -> Progress:
    """The progress of an engine core, as VLLM_NDT_STALL_SECONDS wants it."""
    return Progress(core, settings.stall_seconds(os.environ))


def _message(report: Report) -> Any:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats

    return EngineCoreOutputs(scheduler_stats=SchedulerStats(ndt_progress=report))


def _encoder_cache(scheduler: Any) -> Report:
    """Size and use in embeddings, and the requests that hold entries."""
    manager = scheduler.encoder_cache_manager
    holders = sorted({name for names in getattr(manager, "cached", {}).values() for name in names})
    size = getattr(manager, "cache_size", 0)
    if not size:
        return {}
    return {"size": size, "held": size - manager.num_freeable_slots, "holders": holders[:NAMED]}


def _manifests(core: Any) -> list[str]:
    """The builds of this engine and its workers, maybe on other nodes, by their manifests' digests."""
    digests = {own_build()[1]}
    if core.vllm_config.parallel_config.world_size > 1:
        digests |= set(core.model_executor.collective_rpc(_workers_digest))
    return sorted(digests)


def _workers_digest(_worker: Any) -> str:
    return own_build()[1]
