# SPDX-License-Identifier: Apache-2.0
"""Patch forget-uncomputed-blocks: what was scheduled and then preempted in one step is no prefix that others may use.

Driven as in test_keep_encoder_scheduling_progress: upstream's real scheduler, with a worker that only books what it
would compute.
"""

import random
from pathlib import Path
from typing import Any

import pytest
from loads import Engine, Prompt, Text, Violation, make_config, make_scheduler, random_load, run
from tiny_models import write_hybrid_vision_model

CHUNK = 1000
FOUND = 20278973


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_config(write_hybrid_vision_model(Path(tmp_path_factory.mktemp("model"))))


def test_a_request_that_comes_back_computes_what_it_never_computed(config: Any) -> None:
    """`low` is scheduled first in its third step, and then `high` needs its blocks."""
    engine = Engine(block=16, hybrid=False, priority=True, chunk=CHUNK, blocks=300)
    scheduler = make_scheduler(config, engine)
    starts: list[int] = []
    schedule = scheduler.schedule

    def watched() -> Any:
        output = schedule()
        if "low" in output.num_scheduled_tokens:
            starts.append(scheduler.requests["low"].num_computed_tokens - output.num_scheduled_tokens["low"])
        return output

    scheduler.schedule = watched
    low = Prompt(name="low", segments=(Text(4000, "low"),), max_tokens=1, arrives=0, priority=2)
    high = Prompt(name="high", segments=(Text(2050, "high"),), max_tokens=1, arrives=2, priority=0)

    result, wrong = outcome(scheduler, engine, [low, high])

    assert wrong is None
    assert set(result.finished) == {"low", "high"}
    assert starts[:2] == [0, CHUNK]
    # two steps were computed, and what is left of them is used again
    assert 0 < starts[2] <= 2 * CHUNK


def test_a_recurrent_state_is_no_hit_before_it_was_computed(config: Any) -> None:
    """A load found by the random ones: r3 came back behind a state that nobody had written."""
    engine, prompts = random_load(random.Random(FOUND))
    assert engine.hybrid
    assert engine.priority
    assert outcome(make_scheduler(config, engine), engine, prompts, seed=FOUND)[1] is None


def outcome(*load: Any, **more: Any) -> tuple[Any, str | None]:
    """What a load did, and what a worker would have done wrong, if anything."""
    try:
        return run(*load, **more), None
    except Violation as wrong:
        return None, str(wrong)
