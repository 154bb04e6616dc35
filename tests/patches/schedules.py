# SPDX-License-Identifier: Apache-2.0
"""Prints what a tree's scheduler does with random loads, a JSON object a line; run by test_schedules.py.

usage: schedules.py FIRST_SEED COUNT
"""

import json
import random
import sys
import tempfile
from pathlib import Path

import loads
import tiny_models


def main(first: int, count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_models.write_hybrid_vision_model(Path(folder))
        configs = {drafter: loads.make_config(model, drafter=drafter) for drafter in (False, True)}
    for seed in range(first, first + count):
        engine, prompts = loads.random_load(random.Random(seed))
        scheduler = loads.make_scheduler(configs[engine.drafter], engine)
        try:
            result = loads.run(scheduler, engine, prompts, seed=seed)
        except (loads.Violation, AssertionError) as error:
            print(json.dumps({"seed": seed, "broken": str(error)}))
            continue
        answer = {"zero": result.zero_for_items, "stalled": result.stalled, "schedules": result.schedules}
        print(json.dumps({"seed": seed} | answer))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
