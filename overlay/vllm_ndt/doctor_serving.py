# SPDX-License-Identifier: Apache-2.0
"""The check of the encoder cache and the step's budget, for the flags given: the only one that imports vllm.

It does so in a process of its own, for it takes half a minute and asks the driver for its cards.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_ndt import child, settings
from vllm_ndt.doctor_findings import GOOD, UNCHECKED, WARNING, Finding

LIMIT = 300.0  # seconds
_SMALL_BLOCK, _LARGE_BLOCK = 512, 4096  # between them lie the blocks of hybrid models, in tokens


@dataclass(frozen=True)
class Budget:
    """What the flags ask for: `report` of `vllm-ndt encoder-budget --json` and `warning` of the start log.

    `room`: tokens of a step that are left when every slot decodes, None where no recurrent states are cached;
    `problem`: why there is nothing; `no_device`: that is for want of a device.
    """

    report: Mapping[str, Any] = field(default_factory=dict)
    warning: str = ""
    room: int | None = None
    problem: str = ""
    no_device: bool = False


def budget(facts: Budget | None, environ: Mapping[str, str]) -> list[Finding]:
    """Whether a full batch fits the encoder cache, and a prompt of a hybrid model surely gets its turn."""
    name = "encoder cache"
    if facts is None:
        return [Finding(name, UNCHECKED, "no model given", remedy="vllm-ndt doctor --model MODEL, with your flags")]
    if facts.problem:
        reason = "" if facts.no_device else "vllm serve makes its configuration in the same way"
        remedy = "run it where the engine will run" if facts.no_device else "correct the flags, or see vllm serve's log"
        return [Finding(name, UNCHECKED if facts.no_device else WARNING, facts.problem, reason, remedy)]
    return [_cache(name, facts.report, environ), _step(facts)]


def _step(facts: Budget) -> Finding:
    name, reason = "step budget", "a prompt may wait for as long as others decode"
    remedy = "raise --max-num-batched-tokens, or lower --max-num-seqs"
    if facts.warning:
        return Finding(name, WARNING, facts.warning, reason, remedy)
    if facts.room is None:
        return Finding(name, GOOD, "every prompt gets its turn: no recurrent states are cached")
    text = f"{facts.room} tokens are left for a prompt when all slots decode"
    if facts.room < _SMALL_BLOCK:
        return Finding(name, WARNING, f"{text}, less than a block of recurrent states", reason, remedy)
    if facts.room < _LARGE_BLOCK:
        text += "; the block of recurrent states, decided at start, must not be larger"
        return Finding(name, UNCHECKED, text, reason, f"see the start's log for 'A prompt may have to wait'; {remedy}")
    return Finding(name, GOOD, text)


def _cache(name: str, report: Mapping[str, Any], environ: Mapping[str, str]) -> Finding:
    if report["nothing_to_size"]:
        return Finding(name, GOOD, str(report["nothing_to_size"]))
    demand, cache, advice = report["demand"], report["cache"], report["set"]
    text = f"a full batch asks for {demand} embeddings, upstream's size is {cache}"
    if report["fits"]:
        return Finding(name, GOOD, text)
    try:
        asked = settings.encoder_cache_tokens(environ)
    except settings.SettingError:
        asked = None
    enough = asked == settings.AUTO or (isinstance(asked, int) and asked >= min(demand, advice["number"]))
    if enough:
        return Finding(name, GOOD, f"{text}; {settings.ENCODER_CACHE_TOKENS}={asked}")
    given = f"; {settings.ENCODER_CACHE_TOKENS}={asked}" if asked is not None else ""
    return Finding(
        name,
        WARNING,
        text + given,
        "requests with images wait for each other, and images are encoded again",
        f"export {settings.ENCODER_CACHE_TOKENS}=auto, or ={advice['number']}; see vllm-ndt encoder-budget",
    )


def read_budget(arguments: Sequence[str], limit: float = LIMIT) -> Budget:
    """Make vLLM's configuration of the flags in a process that is given up after `limit` seconds; raises nothing."""
    try:
        found = json.loads(child.call("doctor_serving", arguments, limit))
        return Budget(found["report"], found["warning"], found["room"], found["problem"], found["no_device"])
    except child.GaveUp as error:
        return Budget(problem=f"vLLM's configuration: {error}")
    except (OSError, ValueError, KeyError, TypeError):
        return Budget(problem="expected vLLM's configuration, and the process that makes it ended; see encoder-budget")


def main() -> int:
    """In the process of its own: print a Budget as one JSON object."""
    from vllm_ndt import encoder_budget

    flags = sys.argv[1:]
    answer: dict[str, Any] = {"report": {}, "warning": "", "room": None, "problem": "", "no_device": False}
    try:
        with encoder_budget._silence(os.environ):
            config = encoder_budget._config(flags)
            from vllm_ndt import encoder_engine

            facts = encoder_budget.facts_of(config, encoder_engine.budget_of(config))
            answer["warning"] = encoder_engine.budget_warning(config)
            if encoder_engine.states_cached(config):
                answer["room"] = _room(config)
        answer["report"] = encoder_budget.report(facts).as_dict()
    except Exception as error:
        answer["problem"] = encoder_budget._first_line(error)
        answer["no_device"] = "expected a device of the kind" in answer["problem"]
    print(json.dumps(answer))
    return 0


def _room(config: Any) -> int:
    scheduling = config.scheduler_config
    budget = scheduling.max_num_scheduled_tokens or scheduling.max_num_batched_tokens
    return int(budget - scheduling.max_num_seqs * (1 + config.num_speculative_tokens))
