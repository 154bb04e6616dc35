# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the NaN guard, made and sent as those of the encoder cache (see encoder_metrics)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_ndt import settings
from vllm_ndt.encoder_metrics import by_engine

if TYPE_CHECKING:
    from vllm_ndt.nan_scheduler import Nonfinite

PREFIX = "vllm:ndt_nonfinite_"
# prometheus_client appends _total
COUNTERS = {
    "steps": "Steps in which the NaN guard found NaN or Inf.",
    "requests": "Requests with NaN or Inf in a step, counted once a step.",
    "logits": "Of those, the ones with it in the logits and in no attention layer.",
    "aborted": "Requests that ended with an error for NaN or Inf.",
}


def take(nonfinite: Nonfinite, reported: dict[str, int]) -> dict[str, int] | None:
    """The COUNTERS' increase since `reported`, which is brought up to date; None while the guard is off."""
    if nonfinite.mode == "off":
        return None
    totals = {name: getattr(nonfinite, name) for name in COUNTERS}
    increase = {name: total - reported.get(name, 0) for name, total in totals.items()}
    reported.update(totals)
    return increase


class NonfiniteProm:
    """The metrics, for each engine: there from the start with 0, or not at all while the guard is off.

    `counter` makes metrics as the class of prometheus_client does; `labelvalues` is by engine.
    """

    def __init__(
        self, counter: Callable[..., Any], labelnames: Sequence[str], labelvalues: Mapping[int, Sequence[object]]
    ) -> None:
        self._counters: dict[str, dict[int, Any]] = {}
        if settings.nan_guard(os.environ) == "off":
            return
        for name, text in COUNTERS.items():
            metric = counter(name=PREFIX + name, documentation=text, labelnames=labelnames)
            self._counters[name] = by_engine(metric, labelvalues)

    def observe(self, report: Mapping[str, int] | None, engine: int) -> None:
        """Record a report of `take`, or nothing if there is none."""
        if report is None:
            return
        for name, metrics in self._counters.items():
            metrics[engine].inc(report[name])
