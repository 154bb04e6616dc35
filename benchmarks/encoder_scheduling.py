# SPDX-License-Identifier: Apache-2.0
"""The scheduler's encoder inputs on upstream's real schedulers, without a model: progress, time of a step, repeats.

    PATCHED benchmarks/encoder_scheduling.py loads [--count 20000] [--seed N] [--jobs N]
    python benchmarks/encoder_scheduling.py schedule --stock STOCK --patched PATCHED
    python benchmarks/encoder_scheduling.py chat --python PATCHED

STOCK and PATCHED are Pythons that have upstream's vllm and the patched one. Each command prints a small table and, in
the last line, the same as one JSON object.

`loads` serves random loads and exits with 1 if a patched scheduler fails any of them; `--count 1 --seed S` repeats one.
`schedule` compares the CPU time of schedule() from one run, and exits with 1 if the goal is missed: at most 1.02 times
stock's with 8, 64 and 256 requests. `chat` is an estimate, not an engine: it counts the encoder runs and the steps that
conversations with images cost by the cache's size.
"""

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "patches")]

import loads  # noqa: E402
import tiny_models  # noqa: E402
from loads import Engine, Item, Prompt, Text  # noqa: E402

# equal hashes give equal sets, so that a seed gives the same load again
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONHASHSEED": "0"}
SIZE_SETTING = "VLLM_NDT_ENCODER_CACHE_TOKENS"

STALLED, VIOLATION, CRASHED = "stalled loads", "loads with a violation", "loads that raised another error"
EMPTY, LEFT = "loads with more than three empty steps in a row", "loads that left references"
ERRORS, LATE = "requests that ended with an error", "requests beyond their bound of steps"
FAILURES = (STALLED, VIOLATION, CRASHED, EMPTY, LEFT, ERRORS, LATE)
ZERO = "loads with a request without a token for an item"

ROUNDS, SCHEDULE_GOAL = 9, 1.02
# loads a round by the number of requests: small ones are over too soon to be timed alone
REPEATS = {8: 6, 64: 2, 256: 1}

CLIENTS, TURNS, IMAGE, TURN_TEXT, ANSWER = 8, 10, 1300, 200, 50
# from 190 KV blocks on all conversations stay, and no image but the last of each is read again
CHAT_BLOCKS = 165
UPSTREAM_SIZE, LARGER_SIZE = 4096, 32_768


def main() -> int:
    if sys.argv[1:] == ["worker"]:
        return work()
    parser = argparse.ArgumentParser(description="Measure how encoder inputs are scheduled.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("loads", help="random loads on the schedulers of this Python's vllm")
    command.add_argument("--count", type=int, default=20_000)
    command.add_argument("--seed", type=int)
    command.add_argument("--jobs", type=int, default=os.cpu_count())
    command = commands.add_parser("schedule", help="the time of schedule(), patched against stock")
    command.add_argument("--stock", required=True, metavar="PYTHON")
    command.add_argument("--patched", required=True, metavar="PYTHON")
    command = commands.add_parser("chat", help="encoder runs of conversations with images, by the cache's size")
    command.add_argument("--python", required=True, metavar="PYTHON")
    arguments = parser.parse_args()
    if arguments.command == "loads":
        if os.environ != environment():
            os.execve(sys.executable, [sys.executable, *sys.argv], environment())  # noqa: S606
        seed = random.randrange(2**32) if arguments.seed is None else arguments.seed
        return random_loads(arguments.count, seed, arguments.jobs)
    if arguments.command == "schedule":
        return schedule_times(arguments.stock, arguments.patched)
    return chat(arguments.python)


def environment() -> dict[str, str]:
    """The environment of everything that imports vllm."""
    return {name: value for name, value in (os.environ | ENVIRONMENT).items() if name != SIZE_SETTING}


# random loads


@dataclass(frozen=True)
class Outcome:
    """What one load did: its failures by kind, and whether a request got no token for an item."""

    seed: int
    engine: Engine
    failures: Counter[str]
    reason: str
    zero_for_items: bool
    patched: bool


# by whether there is a drafter; made before the processes are forked, which then need not import vllm again
CONFIGS: dict[bool, Any] = {}


def random_loads(count: int, seed: int, jobs: int) -> int:
    print(f"seed {seed}", flush=True)
    started = time.monotonic()
    totals: Counter[str] = Counter()
    patched = False
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        make_configs(Path(folder))
        seeds = range(seed, seed + count)
        outcomes: Iterable[Outcome] = map(try_load, seeds)
        if jobs > 1:
            pool = stack.enter_context(multiprocessing.get_context("fork").Pool(jobs))
            outcomes = pool.imap(try_load, seeds, chunksize=10)
        for outcome in outcomes:
            patched |= outcome.patched
            totals += outcome.failures
            totals[ZERO] += outcome.zero_for_items
            if outcome.failures:
                what = ", ".join(outcome.failures)
                print(f"failed: seed {outcome.seed}: {what}{outcome.reason}; {outcome.engine}", flush=True)
    print(f"{'loads, ' + ('patched' if patched else 'stock'):<55} {count:>8}")
    for name in (*FAILURES, ZERO):
        print(f"{name:<55} {totals[name]:>8}")
    found: dict[str, Any] = {"seed": seed, "loads": count, "patched": patched}
    found |= {name: totals[name] for name in (*FAILURES, ZERO)}
    print(json.dumps(found | {"seconds": round(time.monotonic() - started, 1)}))
    return 1 if patched and any(totals[name] for name in FAILURES) else 0


def make_configs(folder: Path) -> None:
    model = tiny_models.write_hybrid_vision_model(folder / "model")
    CONFIGS.update({drafter: loads.make_config(model, drafter=drafter) for drafter in (False, True)})


def try_load(seed: int) -> Outcome:
    engine, prompts = loads.random_load(random.Random(seed))
    scheduler = loads.make_scheduler(CONFIGS[engine.drafter], engine)
    failures: Counter[str] = Counter()
    reason, zero = "", False
    try:
        result = loads.run(scheduler, engine, prompts, seed=seed)
    except loads.Violation as error:
        failures[VIOLATION] += 1
        reason = f" ({error})"
    # stock may fail in any way, and the other loads are still of interest
    except Exception as error:
        failures[CRASHED] += 1
        reason = f" ({type(error).__name__}: {error})"
    else:
        zero = result.zero_for_items
        bounds = loads.bounded_steps(engine, prompts)
        failures[STALLED] += result.stalled
        failures[EMPTY] += result.longest_standstill > 3
        failures[ERRORS] += sum(why == "error" for why in result.finished.values())
        failures[LATE] += sum(step > bounds[name] for name, step in result.steps.items())
        if not result.stalled:
            try:
                loads.check_end(scheduler)
            except loads.Violation as error:
                failures[LEFT] += 1
                reason = f" ({error})"
    return Outcome(seed, engine, +failures, reason, zero, hasattr(scheduler, "encoder_progress"))


# the time of schedule()


def schedule_times(stock: str, patched: str) -> int:
    with contextlib.ExitStack() as stack:
        # the second stock worker shows what a ratio of equals looks like here
        ask = {
            name: stack.enter_context(worker(python))
            for name, python in {"stock": stock, "patched": patched, "again": stock}.items()
        }
        expected = {"stock": False, "patched": True, "again": False}
        print(f"schedule(), CPU time: the least of each step in {ROUNDS} rounds", flush=True)
        rows = {}
        for slots in REPEATS:
            least: dict[str, list[float]] = {}
            for at in range(ROUNDS):
                # each round in the opposite order of the last, so that a drift favours nobody
                order = list(ask)[:: -1 if at % 2 else 1]
                answers = {name: ask[name]({"part": "schedule", "slots": slots}) for name in order}
                for name, answer in answers.items():
                    if answer["patched"] != expected[name]:
                        raise SystemExit(f"expected a {name} vllm, found the other kind: check --stock and --patched")
                    # every load has the same steps, so the least time of each is free of what else ran here
                    least[name] = [*map(min, answer["steps"], least.get(name, answer["steps"]))]
            quiet = {name: sum(steps) for name, steps in least.items()}
            rows[slots] = {
                "patched/stock": quiet["patched"] / quiet["stock"],
                "stock/stock": quiet["again"] / quiet["stock"],
                "stock_us": 1e6 * quiet["stock"] / len(least["stock"]),
                "patched_us": 1e6 * quiet["patched"] / len(least["patched"]),
            }
            print(describe(slots, rows[slots]), flush=True)
    rounded = {slots: {name: round(value, 4) for name, value in row.items()} for slots, row in rows.items()}
    print(json.dumps({"rounds": ROUNDS, "goal": SCHEDULE_GOAL, "requests": rounded}))
    return 0 if all(row["patched/stock"] <= SCHEDULE_GOAL for row in rows.values()) else 1


def describe(slots: int, row: dict[str, float]) -> str:
    """A line of the table."""
    reached = "reached" if row["patched/stock"] <= SCHEDULE_GOAL else "MISSED"
    return (
        f"{slots:>4} requests  stock {row['stock_us']:7.1f} us a step  patched/stock {row['patched/stock']:.3f}  "
        f"stock/stock {row['stock/stock']:.3f}  goal at most {SCHEDULE_GOAL}: {reached}"
    )


def time_schedule(slots: int) -> dict[str, Any]:
    """CPU seconds in schedule() for REPEATS loads in which stock has a place for every item; and the least by step."""
    engine = Engine(block=16, hybrid=False, cache=slots * 1000, budget=8192, slots=slots, blocks=slots * 120)
    prompts = {
        f"r{at}": Prompt(f"r{at}", (Text(300, f"b{at}"), Item(f"i{at}", 900), Text(300, f"e{at}")), max_tokens=100)
        for at in range(slots)
    }
    times: list[list[float]] = []
    patched = False
    for _ in range(REPEATS[slots]):
        scheduler = loads.make_scheduler(CONFIGS[False], engine)
        patched = hasattr(scheduler, "encoder_progress")
        serving = loads.Worker(scheduler, engine, prompts)
        for prompt in prompts.values():
            scheduler.add_request(loads.make_request(scheduler, prompt))
        # a collection would hit one step or another
        gc.collect()
        gc.disable()
        times.append([])
        while scheduler.has_requests():
            before = time.thread_time()
            output = scheduler.schedule()
            times[-1].append(time.thread_time() - before)
            scheduler.update_from_output(output, serving.execute(output)())
        gc.enable()
        loads.check_end(scheduler)
    steps = [min(step) for step in zip(*times, strict=True)]
    return {"seconds": sum(map(sum, times)), "steps": steps, "patched": patched}


# conversations with images


def chat(python: str) -> int:
    sys.path.insert(0, str(ROOT / "overlay"))
    from vllm_ndt import encoder_sizing

    wants = encoder_sizing.demand({"image": 2048}, {"image": 4}, slots=CLIENTS, max_model_len=60_000)
    assert wants is not None
    automatic, _ = encoder_sizing.automatic(wants.total, UPSTREAM_SIZE, width_bytes=256, kv_bytes=24 * 2**30)
    sizes = {"upstream's": UPSTREAM_SIZE, "larger": LARGER_SIZE, "auto": automatic}
    with worker(python) as ask:
        rows = {name: ask({"part": "chat", "cache": size}) for name, size in sizes.items()}
    kind = "patched" if rows["auto"]["patched"] else "stock"
    print(f"an estimate, no engine: {CLIENTS} clients, {TURNS} turns, {CLIENTS * TURNS} images of {IMAGE}; {kind}")
    for name, row in rows.items():
        print(
            f"{name:<10} {sizes[name]:>7} embeddings  encoder runs {row['encoder_runs']:>5}  steps {row['steps']:>5}  "
            f"tokens {row['tokens']:>8}  CPU s {row['seconds']:6.2f}{'  STALLED' if row['stalled'] else ''}"
        )
    table = {name: {"cache": sizes[name]} | row for name, row in rows.items()}
    print(json.dumps({"clients": CLIENTS, "turns": TURNS, "images": CLIENTS * TURNS, "sizes": table}))
    return 0


def serve_chat(cache: int) -> dict[str, Any]:
    """All clients' turns, one turn after the other; a turn repeats the conversation and adds an image and text.

    CPU seconds are those of scheduler and model-less worker.
    """
    engine = Engine(block=784, cache=cache, slots=CLIENTS, blocks=CHAT_BLOCKS)
    scheduler = loads.make_scheduler(CONFIGS[False], engine)
    # what the worker holds outlives a turn, as a model runner does
    items: dict[str, int] = {}
    states: dict[int, tuple[Any, ...]] = {}

    class Lasting(loads.Worker):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.items, self.states = items, states

    results = []
    started = time.thread_time()
    with mock.patch.object(loads, "Worker", Lasting):
        for turn in range(TURNS):
            prompts = [conversation(client, turn) for client in range(CLIENTS)]
            results.append(loads.run(scheduler, engine, prompts))
            if results[-1].stalled:
                break
    return {
        "encoder_runs": sum(result.encoder_runs for result in results),
        "steps": sum(len(result.schedules) for result in results),
        "tokens": sum(sum(step.values()) for result in results for step in result.schedules),
        "seconds": round(time.thread_time() - started, 3),
        "stalled": results[-1].stalled,
        "patched": hasattr(scheduler, "encoder_progress"),
    }


def conversation(client: int, turn: int) -> Prompt:
    """The prompt of a turn. Former answers are read as text: a few tokens that no cache has."""
    segments: list[Item | Text] = []
    for past in range(turn + 1):
        if past:
            segments.append(Text(ANSWER, f"answer {client} {past}"))
        segments += [Text(TURN_TEXT, f"asks {client} {past}"), Item(f"image {client} {past}", IMAGE)]
    segments.append(Text(4, "go"))
    return Prompt(f"c{client}t{turn}", tuple(segments), max_tokens=ANSWER)


# workers: this script under another Python, asked over a pipe so that several can be measured in turns

PARTS: dict[str, Callable[..., dict[str, Any]]] = {"schedule": time_schedule, "chat": serve_chat}


@contextlib.contextmanager
def worker(python: str) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """Starts a worker, and gives what asks it; it ends with the context."""
    command = [python, str(Path(__file__).resolve()), "worker"]
    with subprocess.Popen(
        command, env=environment(), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asks, answers = process.stdin, process.stdout

        def ask(question: dict[str, Any]) -> dict[str, Any]:
            print(json.dumps(question), file=asks, flush=True)
            line = answers.readline()
            if not line:
                raise SystemExit(f"expected an answer of {python}, found its end: see its error above")
            found: dict[str, Any] = json.loads(line)
            return found

        yield ask


def work() -> int:
    """Answers questions, a line of JSON each, until there are no more."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    # whatever else is printed must not come between
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with tempfile.TemporaryDirectory() as folder:
        make_configs(Path(folder))
        # vllm's own objects take a second to look through each time
        gc.collect()
        gc.freeze()
        for line in sys.stdin:
            question = json.loads(line)
            answer = PARTS[question.pop("part")](**question)
            print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
