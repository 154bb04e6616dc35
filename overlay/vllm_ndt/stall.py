# SPDX-License-Identifier: Apache-2.0
"""When an engine stands still: the judgement alone, without a clock, processes or messages.

An engine is judged by what it reports about once a second (see `progress`) and by what it answers. It stands still when
something waits for it and nothing has moved for the limit. Time counts only while somebody looks: a judge that was
stopped itself, a suspended machine or a clock that jumps adds nothing.
"""

from dataclasses import dataclass, field
from typing import Any

PERIOD = 1.0  # seconds between reports, and between looks
# a late look counts as this at most: then the judge was late, not the engine
_LONGEST = 2 * PERIOD

Report = dict[str, Any]


@dataclass
class Engine:
    """One engine, judged with a limit in seconds; `report` is the last one, or empty.

    `stalled` says that it stands still.
    """

    limit: float
    report: Report = field(default_factory=dict)
    stalled: bool = False
    silent: float = 0.0
    """Seconds for which it was waited for and nothing moved."""
    waited_for: int = 0
    _rest: float = 0.0
    _moved: bool = False

    def hear(self, report: Report) -> None:
        """Take a report; one that counts further than the last is progress."""
        self._moved |= report["moves"] > self.report.get("moves", 0)
        self.report = report

    def answer(self) -> None:
        """Take note that it answered a request, which is progress."""
        self._moved = True

    def look(self, elapsed: float, waited_for: int) -> None:
        """Judge again, `elapsed` seconds after the last look; `waited_for`: how many requests the caller has there.

        Time at rest (idle, paused, asleep, or waiting for something outside) does not count and forgives nothing
        until it has lasted for the limit: else clients that give up and try again would hide a stall.
        """
        elapsed, self.waited_for = min(elapsed, _LONGEST), waited_for
        if self._moved:
            self.silent = self._rest = 0.0
        elif (waited_for or self.report.get("unfinished")) and not self.report.get("excuse"):
            self.silent += elapsed
            self._rest = 0.0
        else:
            self._rest += elapsed
            if self._rest >= self.limit:
                self.silent = 0.0
        self._moved = False
        self.stalled = self.silent >= self.limit or bool(self.report.get("churning"))

    def why(self) -> str:
        """One clause that says why it counts as stalled."""
        if self.silent >= self.limit:
            return f"no progress for {self.silent:.0f} s"
        return f"request {self.report['churning']} is prefilled again and again"
