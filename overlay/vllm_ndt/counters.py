# SPDX-License-Identifier: Apache-2.0
"""Counts on their way from an engine to /metrics: sent as increases, recorded as Prometheus counters.

As upstream's own counts are: each step's report reaches one API server of several, whose counters Prometheus adds up,
and an engine that starts again starts at zero.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any


class Increases:
    """What counts grew by since they were taken last."""

    def __init__(self) -> None:
        self._taken: Mapping[str, int] = {}

    def take(self, totals: Mapping[str, int]) -> dict[str, int]:
        """The increase of each of `totals`, which only grow."""
        increases = {name: total - self._taken.get(name, 0) for name, total in totals.items()}
        self._taken = totals
        return increases


class Counters:
    """Prometheus counters `prefix` + name, for each engine, with 0 from the start.

    `texts` describes them by name; prometheus_client appends _total. `counter` makes metrics as the class of
    prometheus_client does; `labelvalues` is by engine.
    """

    def __init__(
        self,
        counter: Callable[..., Any],
        prefix: str,
        texts: Mapping[str, str],
        labelnames: Sequence[str],
        labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        self._metrics = {
            name: by_engine(counter(name=prefix + name, documentation=text, labelnames=labelnames), labelvalues)
            for name, text in texts.items()
        }

    def add(self, report: Mapping[str, int], engine: int) -> None:
        """Record the increases of a report, which may hold more than these."""
        for name, metrics in self._metrics.items():
            metrics[engine].inc(report[name])


def by_engine(metric: Any, labelvalues: Mapping[int, Sequence[object]]) -> dict[int, Any]:
    """A metric's children, by engine."""
    return {engine: metric.labels(*values) for engine, values in labelvalues.items()}
