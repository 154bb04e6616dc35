# SPDX-License-Identifier: Apache-2.0
"""What the log says of an engine that stands still, or that leaves requests behind."""

import json
import threading
from typing import Any

from vllm_ndt import child, stacks
from vllm_ndt.stall import Engine, Report

_SECONDS = 5.0  # for nvidia-smi, which hangs where a GPU is lost
_GPU = ("nvidia-smi", "--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader")


class Log:
    """The log of one engine, judged with `limit` in seconds; `with_stacks`: also its processes' stacks."""

    def __init__(self, index: int, limit: float, with_stacks: bool = True) -> None:
        from vllm.logger import init_logger

        # vLLM sets up the logger "vllm" and what is below it; a name of our own would log nothing
        self._logger: Any = init_logger("vllm.ndt")
        self._index, self._limit, self._with_stacks = index, limit, with_stacks
        self._stalled = self._starving = False
        self._worst = 0.0

    def note(self, engine: Engine) -> None:
        """Log what changed since the last look; does not wait for GPUs or stacks."""
        starving = bool(engine.report.get("starved"))
        self._worst = max(self._worst, engine.silent) if engine.stalled else self._worst
        if engine.stalled and not self._stalled:
            head = f"Engine {self._index} stands still: {engine.why()} (VLLM_NDT_STALL_SECONDS={self._limit:g})."
            report = {"requests_here": engine.waited_for, **engine.report}
            threading.Thread(target=self._tell, args=(head, report), name="ndt-stacks", daemon=True).start()
        elif self._stalled and not engine.stalled:
            self._logger.warning("Engine %d moves again, or is idle, after %.0f s.", self._index, self._worst)
            self._worst = 0.0
        elif starving and not self._starving and not engine.stalled:
            self._logger.warning(
                "Engine %d goes on, but %d requests have made no progress for %g s. %s",
                *(self._index, engine.report["starved"], self._limit, details(engine.report)),
            )
        self._stalled, self._starving = engine.stalled, starving

    def _tell(self, head: str, report: Report) -> None:
        self._logger.error("%s %s", head, details({**report, "gpus": gpu_use()}))
        if self._with_stacks:
            self._logger.error("%s", stacks.of_engine(report.get("pid"), report.get("host")))


def details(report: Report) -> str:
    """A report as one line of JSON, without what only the judge needs."""
    left_out = {"moves", "unfinished", "manifests"}
    return json.dumps({name: value for name, value in report.items() if name not in left_out})


def gpu_use() -> list[str]:
    """Each GPU's index, use and memory in nvidia-smi's words, or one word about why there is none."""
    try:
        status, text = child.run(_GPU, _SECONDS)
    except FileNotFoundError:
        return []
    except child.GaveUp:
        return [f"nvidia-smi did not answer in {_SECONDS:.0f} s"]
    except OSError as error:
        return [f"nvidia-smi failed: {error}"]
    return [f"nvidia-smi failed: exit status {status}"] if status else text.splitlines()


def front_end_of_its_own(name: str, logs_itself: bool) -> None:
    """Say at start what a front end lacks that serves health itself; `logs_itself`: it judges its engines even so."""
    from vllm.logger import init_logger

    init_logger("vllm.ndt").warning(
        "The %s front end serves health itself: it does not turn when an engine stands still, and there is no metric "
        "vllm:ndt_engine_stalled. A stall is logged by %s.",
        *(name, "this process" if logs_itself else "the engine core"),
    )
