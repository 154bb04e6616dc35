# SPDX-License-Identifier: Apache-2.0
"""The NVIDIA cards and their driver, asked of NVML in a process that is given up after five seconds."""

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_ndt import child

LIMIT = 5.0  # seconds
READ, ABSENT, FAILED, HUNG = "read", "absent", "failed", "hung"
# of NVML: the driver is not loaded, its library is not there
_NO_DRIVER = (9, 12)


@dataclass(frozen=True)
class Gpu:
    """A card: its number, its name, its memory in bytes and its compute capability, such as (7, 0)."""

    index: int
    name: str
    memory: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Answer:
    """What NVML said: READ with `driver` and `gpus`; ABSENT: no driver or no library; FAILED; HUNG. `why`, if not READ.

    `lost`: a line for each card that NVML counts and does not answer for.
    """

    state: str
    why: str = ""
    driver: str = ""
    gpus: tuple[Gpu, ...] = ()
    lost: tuple[str, ...] = ()


def read(limit: float = LIMIT, source: Path | None = None) -> Answer:
    """Ask NVML, for `limit` seconds at most; no card and no library are an answer. Raises nothing.

    `source`: the file of a module like pynvml; else vllm's own is taken, or an installed one.
    """
    source = source or _of_vllm()
    try:
        found = json.loads(child.call("nvml", [str(source)] if source else [], limit))
        gpus = tuple(Gpu(one["index"], one["name"], one["memory"], tuple(one["capability"])) for one in found["gpus"])
        return Answer(found["state"], found["why"], found["driver"], gpus, tuple(found["lost"]))
    except child.GaveUp as error:
        return Answer(HUNG, str(error))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Answer(FAILED, f"no answer that can be read ({type(error).__name__})")


def main(arguments: Sequence[str] | None = None) -> int:
    """In the process of its own: print an answer as one JSON object."""
    given = sys.argv[1:] if arguments is None else arguments
    answer: dict[str, Any] = {"state": READ, "why": "", "driver": "", "gpus": [], "lost": []}
    real = os.dup(1)
    os.dup2(2, 1)  # nothing but the answer
    try:
        _ask(_load(given[0] if given else None), answer)
    except ImportError:
        answer |= {"state": ABSENT, "why": "no Python module for NVML (pynvml)"}
    except Exception as error:
        absent = getattr(error, "value", None) in _NO_DRIVER
        answer |= {"state": ABSENT if absent else FAILED, "why": str(error)}
    with os.fdopen(real, "w", encoding="utf-8") as stream:
        stream.write(json.dumps(answer))
    return 0


def _ask(module: Any, answer: dict[str, Any]) -> None:
    module.nvmlInit()
    answer["driver"] = _text(module.nvmlSystemGetDriverVersion())
    for index in range(module.nvmlDeviceGetCount()):
        try:
            handle = module.nvmlDeviceGetHandleByIndex(index)
            card = {
                "index": index,
                "name": _text(module.nvmlDeviceGetName(handle)),
                "memory": int(module.nvmlDeviceGetMemoryInfo(handle).total),
                "capability": [int(number) for number in module.nvmlDeviceGetCudaComputeCapability(handle)],
            }
        except module.NVMLError as error:
            answer["lost"].append(f"GPU {index}: {error}")
        else:
            answer["gpus"].append(card)


def _load(path: str | None) -> Any:
    # by its path: importing vllm would take torch with it
    spec = importlib.util.spec_from_file_location("pynvml", path) if path else None
    if spec is None or spec.loader is None:
        return importlib.import_module("pynvml")
    module = importlib.util.module_from_spec(spec)
    sys.modules["pynvml"] = module  # it asks for itself
    spec.loader.exec_module(module)
    return module


def _of_vllm() -> Path | None:
    """The module that vllm carries."""
    spec = importlib.util.find_spec("vllm")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return next((path for folder in folders if (path := Path(folder, "third_party", "pynvml.py")).is_file()), None)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
