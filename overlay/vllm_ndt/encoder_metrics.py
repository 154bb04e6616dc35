# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the scheduler's encoder cache: its report, made in the engine, and its record in the server.

A report is a map of plain integers, for it travels with upstream's SchedulerStats; see `counters` for what only grows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_ndt.counters import Counters, Increases, by_engine

if TYPE_CHECKING:
    from vllm_ndt.encoder_progress import EncoderProgress

PREFIX = "vllm:ndt_encoder_cache_"
GAUGES = {
    "size": "Embeddings that the scheduler's encoder cache can hold.",
    "used": "Embeddings in the scheduler's encoder cache, referenced or not.",
    "pinned": "Embeddings in the scheduler's encoder cache that requests reference, which cannot be evicted.",
    "empty_steps": "Steps in a row that scheduled no token although requests wait and none is in flight.",
}
COUNTERS = {
    "evictions": "Items evicted from the scheduler's encoder cache.",
    "repeated_runs": "Encoder runs for an item that was evicted from the encoder cache before.",
    "preemptions": "Requests preempted because none could go on for want of encoder cache.",
}


class EncoderCacheReport:
    """Reports of one scheduler's encoder cache."""

    def __init__(self, progress: EncoderProgress) -> None:
        self._progress = progress
        self._increases = Increases()

    def take(self) -> dict[str, int] | None:
        """The GAUGES as they are, and the COUNTERS' increase since the last report; the former in embeddings or steps.

        None where the manager is not ours (see EncoderProgress), and for a model without an encoder cache.
        """
        manager = self._progress.manager
        if manager is None or not manager.cache_size:
            return None
        totals = {
            "evictions": manager.evictions,
            "repeated_runs": manager.repeats,
            "preemptions": self._progress.preemptions,
        }
        return {
            "size": manager.cache_size,
            "used": manager.used,
            "pinned": manager.pinned,
            "empty_steps": self._progress.empty_steps,
            **self._increases.take(totals),
        }


class EncoderCacheProm:
    """The metrics, for each engine.

    As upstream's metrics of optional features they are there from the start, with 0, or not at all: for multimodal
    models, but for encoder-decoder ones. They stay 0 until an engine's first step, if all modalities are disabled,
    and with a manager of `--ec-manager-config`.

    `gauge` and `counter` make metrics as the classes of prometheus_client do; `labelvalues` is by engine.
    """

    def __init__(
        self,
        model_config: Any,
        gauge: Callable[..., Any],
        counter: Callable[..., Any],
        labelnames: Sequence[str],
        labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        self._gauges: dict[str, dict[int, Any]] = {}
        self._counters: Counters | None = None
        if not model_config.is_multimodal_model or model_config.is_encoder_decoder:
            return
        for name, text in GAUGES.items():
            # of several API servers the one that heard last from the engine is right
            metric = gauge(
                name=PREFIX + name, documentation=text, multiprocess_mode="mostrecent", labelnames=labelnames
            )
            self._gauges[name] = by_engine(metric, labelvalues)
        self._counters = Counters(counter, PREFIX, COUNTERS, labelnames, labelvalues)

    def observe(self, report: Mapping[str, int] | None, engine: int) -> None:
        """Record a report of EncoderCacheReport, or nothing if there is none."""
        if report is None or self._counters is None:
            return
        for name, metrics in self._gauges.items():
            metrics[engine].set(report[name])
        self._counters.add(report, engine)
