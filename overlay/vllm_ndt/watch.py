# SPDX-License-Identifier: Apache-2.0
"""Ends a server that is no longer well, so that what started it starts it anew.

Docker and compose call such a container unhealthy and let it run. A process beside the server asks for its health; when
that fails, it ends the server with SIGTERM, and if need be with SIGKILL.
"""

import contextlib
import os
import select
import signal
import sys
import time

from vllm_ndt import health

PERIOD = 5.0  # seconds between questions
FAILURES = 3  # in a row, after it was well once
START = 1800.0  # seconds until it must have been well once
GRACE = 10.0  # seconds between SIGTERM and SIGKILL


def watch_beside(where: health.Address) -> None:
    """Start to watch this process, which is about to become a server, from a process of its own."""
    server = os.pidfd_open(os.getpid())
    if os.fork() == 0:
        try:
            os.setsid()
            _watch(server, where)
        finally:
            os._exit(0)
    os.close(server)


def _watch(server: int, where: health.Address) -> None:
    began, well, failures = time.monotonic(), False, 0
    while not _ends(server, PERIOD):
        problem = health.ask(where)
        well = well or not problem
        failures = failures + 1 if problem and well else 0
        if failures < FAILURES and (well or time.monotonic() - began < START):
            continue
        what = f"{failures} times in a row" if well else f"not once in {START:.0f} s"
        with contextlib.suppress(OSError):  # nobody may read the log any more
            print(f"vllm-ndt: not healthy, {what} ({problem}): ending the server", file=sys.stderr, flush=True)
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                signal.pidfd_send_signal(server, number)
            except ProcessLookupError:
                return
            if _ends(server, GRACE):
                return


def _ends(server: int, seconds: float) -> bool:
    """Whether the server ends within a time."""
    return bool(select.select([server], [], [], seconds)[0])
