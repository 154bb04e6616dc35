# SPDX-License-Identifier: Apache-2.0
"""The API process's look at its engines: asks them for reports, judges, and tells /health, /metrics and the log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from typing import Any

from vllm_ndt import settings, stall, stall_log
from vllm_ndt.stall import PERIOD
from vllm_ndt.start import own_build

GAUGES = {
    "vllm:ndt_engine_stalled": "Whether the engine stands still: requests wait and nothing has moved for the limit.",
    "vllm:ndt_stalled_requests": "Requests without progress for the limit, of an engine that may go on with others.",
}
BUILD = "vllm:ndt_build_info"

_made: dict[str, Any] = {}


class Watch:
    """Watches the engines of one AsyncLLM. Without VLLM_NDT_STALL_SECONDS (0) it judges nothing."""

    def __init__(self, engine_core: Any, output_processor: Any, model_name: str) -> None:
        self._core, self._requests = engine_core, output_processor
        self._limit = settings.stall_seconds(os.environ)
        self._engines: dict[int, stall.Engine] = {}
        self._logs: dict[int, stall_log.Log] = {}
        self._asked: set[bytes] = set()
        self._odd: set[int] = set()
        self._model = model_name
        self._gauges = {name: _gauge(name, text, ["model_name", "engine"]) for name, text in GAUGES.items()}
        build = _gauge(BUILD, "Version and manifest digest of this build; always 1.", ["version", "manifest"])
        build.labels(*own_build()).set(1)
        self._task: asyncio.Task[None] | None = None

    def follow(self, handler: asyncio.Task[Any]) -> None:
        """Watch until the task that handles the engines' outputs ends."""
        if self._limit:
            self._task = asyncio.create_task(self._run(handler))

    def heard(self, outputs: Any) -> bool:
        """Take note of a message from an engine; whether it was a report and nothing else."""
        stats = outputs.scheduler_stats
        report = stats.ndt_progress if stats is not None else None
        if report is None:
            if outputs.outputs:
                self._engine(outputs.engine_index).answer()
            return False
        self._compare(outputs.engine_index, report)
        self._engine(outputs.engine_index).hear(report)
        return True

    def problem(self) -> str:
        """One line about the engines that stand still; empty if none does."""
        stalled = {index: engine for index, engine in self._engines.items() if engine.stalled}
        return "; ".join(f"engine {index} stands still: {engine.why()}" for index, engine in sorted(stalled.items()))

    def check(self) -> None:
        """Raise upstream's error of a dead engine, which /health answers with 503, while an engine stands still."""
        if problem := self.problem():
            from vllm.v1.engine.exceptions import EngineDeadError

            error = EngineDeadError()
            error.args = (problem,)
            raise error

    async def _run(self, handler: asyncio.Task[Any]) -> None:
        last = time.monotonic()
        asking: set[asyncio.Task[Any]] = set()
        while not handler.done():
            for engine in set(self._core.core_engines) - self._asked:
                # an engine that hangs from the start does not answer: nobody waits for that
                asking.add(asyncio.create_task(self._ask(engine)))
                self._asked.add(engine)
            await asyncio.wait({handler}, timeout=PERIOD)
            now = time.monotonic()
            self._look(now - last)
            last = now
        for task in asking:
            task.cancel()

    async def _ask(self, engine: bytes) -> None:
        # a server that stops, or an engine that died, is upstream's to tell
        with contextlib.suppress(Exception):
            await self._core._call_utility_async("ndt_ask_progress", self._core.client_index, engine=engine)

    def _look(self, elapsed: float) -> None:
        waited_for = self._waited_for()
        for index in {*waited_for, *self._engines}:
            engine = self._engine(index)
            engine.look(elapsed, waited_for[index])
            self._logs[index].note(engine)
            labels = (self._model, str(index))
            self._gauges["vllm:ndt_engine_stalled"].labels(*labels).set(engine.stalled)
            self._gauges["vllm:ndt_stalled_requests"].labels(*labels).set(engine.report.get("starved", 0))

    def _waited_for(self) -> Counter[int]:
        """How many requests of this process each engine has; upstream's client knows which of several took one."""
        if len(self._core.core_engines) == 1:
            (engine,) = self._core.core_engines
            return Counter({_index(engine): self._requests.get_num_unfinished_requests()})
        return Counter(_index(engine) for engine in getattr(self._core, "reqs_in_flight", {}).values())

    def _engine(self, index: int) -> stall.Engine:
        if index not in self._engines:
            self._engines[index] = stall.Engine(self._limit)
            self._logs[index] = stall_log.Log(index, self._limit, with_stacks=self._core.client_index == 0)
        return self._engines[index]

    def _compare(self, index: int, report: stall.Report) -> None:
        """Warn once of an engine that is another build, or whose workers are."""
        others = set(report["manifests"]) - {own_build()[1]}
        if others and index not in self._odd:
            self._odd.add(index)
            from vllm.logger import init_logger

            init_logger("vllm.ndt").warning(
                "Engine %d is not of one build: this process has %s, the engine or one of its workers %s. "
                "Run `vllm-ndt verify` on each node.",
                *(index, own_build()[1], ", ".join(sorted(others))),
            )


def _index(engine: bytes) -> int:
    return int.from_bytes(engine, "little")


def _gauge(name: str, text: str, labels: list[str]) -> Any:
    """A gauge in the default registry, in place of one that an earlier engine of this process left there."""
    from prometheus_client import REGISTRY, Gauge

    if name in _made:
        with contextlib.suppress(KeyError):
            REGISTRY.unregister(_made[name])
    # of several API servers one that sees a stall is enough
    _made[name] = Gauge(name, text, labels, multiprocess_mode="max")
    return _made[name]
