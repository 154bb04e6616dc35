# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the NaN guard."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_ndt import settings
from vllm_ndt.counters import Counters

PREFIX = "vllm:ndt_nonfinite_"
COUNTERS = {
    "steps": "Steps in which the NaN guard found NaN or Inf.",
    "requests": "Requests with NaN or Inf in a step, counted once a step.",
    "logits": "Of those, the ones with it in the logits and in no attention layer.",
    "aborted": "Requests that ended with an error for NaN or Inf.",
}


class NonfiniteProm:
    """The metrics, for each engine: there from the start with 0, or not at all while the guard is off.

    `counter`, `labelnames` and `labelvalues` are as of Counters.
    """

    def __init__(
        self, counter: Callable[..., Any], labelnames: Sequence[str], labelvalues: Mapping[int, Sequence[object]]
    ) -> None:
        self._counters: Counters | None = None
        if settings.nan_guard(os.environ) != "off":
            self._counters = Counters(counter, PREFIX, COUNTERS, labelnames, labelvalues)

    def observe(self, report: Mapping[str, int] | None, engine: int) -> None:
        """Record a report of Nonfinite, or nothing if there is none."""
        if report is not None and self._counters is not None:
            self._counters.add(report, engine)
