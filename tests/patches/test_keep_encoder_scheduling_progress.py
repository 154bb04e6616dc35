# SPDX-License-Identifier: Apache-2.0
"""Requests with several images never stand still, whatever the cache's size, and the recurrent states stay right.

Upstream's real Scheduler and AsyncScheduler serve the loads; loads.Worker checks what a model runner relies on.
"""

import contextlib
import logging
from types import SimpleNamespace
from unittest import mock

import hypothesis
import loads
import pytest
import tiny_models
from hypothesis import strategies as st
from loads import Engine, Item, Prompt, Text, Violation, parse

# what stock does with each: (engine, requests that come first, requests)
KNOWN_STALLS = {
    "one request, wide block: stands at 4192": (
        Engine(block=2096),
        [],
        ["t104 i:a t11 i:b t13 i:c t10 i:d t19"],
    ),
    "two requests behind a cached prefix: the first runs at 3920, the second waits and holds p0": (
        Engine(block=784),
        ["t104 i:p0 t11"],
        ["t104 i:p0 t11 i:a1 t13 i:a2 t10", "t104 i:p0 t11 i:b1 t13 i:b2 t10"],
    ),
    "two cold requests, both running": (
        Engine(block=784, chunk=2048),
        [],
        ["t104 i:q0 t11 i:a1 t13 i:a2 t10", "t104 i:r0 t11 i:b1 t13 i:b2 t10"],
    ),
    "two cold requests, both running, async": (
        Engine(block=784, chunk=2048, asynchronous=True),
        [],
        ["t104 i:q0 t11 i:a1 t13 i:a2 t10", "t104 i:r0 t11 i:b1 t13 i:b2 t10"],
    ),
    "one request, two items that do not fit together: stands at 3136": (
        Engine(block=784),
        [],
        ["t40 i:a(3300) t9 i:b(3900) t30"],
    ),
    "the same, block 1600: stands at 3200": (Engine(block=1600), [], ["t40 i:a(3300) t9 i:b(3900) t30"]),
    "the same, block 2096: stands at 2096": (Engine(block=2096), [], ["t40 i:a(3300) t9 i:b(3900) t30"]),
    "dense, drafter, items side by side": (
        Engine(block=16, hybrid=False, drafter=True),
        [],
        ["t40 i:a(4096) i:b(4096) t30"],
    ),
    "dense, drafter, items one token apart": (
        Engine(block=16, hybrid=False, drafter=True),
        [],
        ["t40 i:a(4096) t1 i:b(4096) t30"],
    ),
    "hybrid, drafter, items side by side": (Engine(drafter=True), [], ["t40 i:a(3300) i:b(3900) t30"]),
    "a text fills the rest of the block before an item that must not be cut": (
        Engine(block=784, chunked_items=False),
        [],
        ["t40 i:a(3300) t9 i:b(3900) t30"],
    ),
}
# blocks of these sizes and a cache of every size at which the two items fit one by one
SIZES = range(3900, 7211, 10)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("VLLM_NDT_ENCODER_CACHE_TOKENS", raising=False)


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """The tiny hybrid model's configuration, by whether there is a drafter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        folder = tiny_models.write_hybrid_vision_model(tmp_path_factory.mktemp("vision"))
        return {drafter: loads.make_config(folder, drafter=drafter) for drafter in (False, True)}


@pytest.fixture
def serve(configs):
    """Serves prompts with an engine's settings; gives the result and the scheduler."""

    def served(engine, prompts, **options):
        scheduler = loads.make_scheduler(configs[engine.drafter], engine)
        return loads.run(scheduler, engine, prompts, **options), scheduler

    return served


def prompts_of(requests, arrives=0, start="r"):
    return [Prompt(f"{start}{at}", parse(request.split()), arrives=arrives) for at, request in enumerate(requests)]


@pytest.mark.parametrize("name", KNOWN_STALLS)
def test_the_known_stalls_finish(serve, name):
    engine, first, requests = KNOWN_STALLS[name]
    prompts = prompts_of(first, start="first") + prompts_of(requests, arrives=40 if first else 0)
    result, scheduler = serve(engine, prompts)
    assert not result.stalled, result.schedules[-60:-45]
    assert set(result.finished.values()) == {"length"}
    assert result.longest_standstill <= 3
    loads.check_end(scheduler)


@pytest.mark.parametrize("block", [784, 1600, 2096])
def test_two_items_end_at_every_size_of_the_cache(serve, block):
    for cache in SIZES:
        result, scheduler = serve(Engine(block=block, cache=cache), prompts_of(["t40 i:a(3300) t9 i:b(3900) t30"]))
        assert result.finished == {"r0": "length"}, cache
        assert result.longest_standstill <= 3, cache
        loads.check_end(scheduler)


@pytest.mark.parametrize("gap", ["", "t1"])
def test_two_items_end_at_every_size_with_a_drafter(serve, gap):
    request = f"t40 i:a(3300) {gap} i:b(3900) t30"
    for cache in SIZES[::5]:
        for block in (784, 2096):
            result, scheduler = serve(Engine(block=block, cache=cache, drafter=True), prompts_of([request]))
            assert result.finished == {"r0": "length"}, (cache, block)
            loads.check_end(scheduler)


@hypothesis.settings(
    max_examples=200,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(st.randoms(use_true_random=False))
def test_random_loads_end_and_leave_nothing_behind(configs, choices):
    engine, prompts = loads.random_load(choices)
    scheduler = loads.make_scheduler(configs[engine.drafter], engine)
    result = loads.run(scheduler, engine, prompts)
    assert not result.stalled
    assert "error" not in result.finished.values()
    assert result.longest_standstill <= 3
    bounds = loads.bounded_steps(engine, prompts)
    assert {name: step for name, step in result.steps.items() if step > bounds[name]} == {}
    loads.check_end(scheduler)


def test_a_state_under_another_boundary_would_be_found(serve):
    """The worker's check can fail: without the alignment the same loads store states where they do not belong."""
    from vllm.v1.core.sched.scheduler import Scheduler

    def unaligned(self, request, tokens, *positions, **options):
        return tokens

    prompts = prompts_of(["t104 i:a t11 i:b t13 i:c t10 i:d t19", "t90 i:a t7 i:b t19"])
    with mock.patch.object(Scheduler, "_mamba_block_aligned_split", unaligned), pytest.raises(Violation, match="state"):
        serve(Engine(block=784, chunk=1000), prompts)


def test_a_request_that_waits_holds_nothing(configs):
    """It found its prefix's item in the cache, and got no token: stock keeps the reference."""
    engine = Engine(block=784)
    scheduler = loads.make_scheduler(configs[False], engine)
    loads.run(scheduler, engine, prompts_of(["t104 i:p0 t11"], start="first"))
    for prompt in prompts_of(["t104 i:a t11 i:b t30", "t300 i:p0 i:c t30"]):
        scheduler.add_request(loads.make_request(scheduler, prompt))
    output = scheduler.schedule()
    assert list(output.num_scheduled_tokens) == ["r0"]
    assert "r1" not in scheduler.encoder_cache_manager.request_cached_ids


def test_a_large_item_is_not_starved_by_a_stream_of_small_ones(serve):
    """It needs the whole cache; small requests, one a step, would hold a part of it for ever."""
    engine = Engine(block=16, hybrid=False, cache=2048, budget=4096, slots=8)
    small = [
        Prompt(f"s{at:03}", (Text(20), Item(f"small{at}", 900), Text(5, f"e{at}")), max_tokens=3, arrives=at // 2)
        for at in range(300)
    ]
    large = Prompt("large", (Text(3000, "before"), Item("large", 2048), Text(9)), arrives=10)
    result, scheduler = serve(engine, [*small, large])
    assert set(result.finished.values()) == {"length"}
    assert result.steps["large"] <= 10 + 20
    loads.check_end(scheduler)


def test_a_popular_item_does_not_starve_another(serve):
    """Everybody asks for one small item, so that it is never without a reference."""
    engine = Engine(block=16, hybrid=False, cache=2048, budget=4096, slots=8, prefix_caching=False)
    crowd = [
        Prompt(f"s{at:03}", (Text(20, f"b{at}"), Item("popular", 300), Text(4000, f"e{at}")), arrives=at // 2)
        for at in range(100)
    ]
    large = Prompt("large", (Text(3000, "before"), Item("large", 2048), Text(9)), arrives=10)
    result, scheduler = serve(engine, [*crowd, large])
    assert set(result.finished.values()) == {"length"}
    ahead = [name for name in result.steps if name != "large" and result.steps[name] < result.steps["large"]]
    assert len(ahead) <= 10 * 2 + 8
    loads.check_end(scheduler)


def test_an_encoder_run_is_not_lost_with_a_preempted_request(serve):
    """Short of KV blocks, a step gives up a request it has just scheduled, and others found its item in the cache."""
    engine = Engine(block=128, hybrid=False, priority=True, cache=2024, budget=8192, slots=4, blocks=58)
    requests = {
        "r1": "t40 i:i2(900) t2 i:i0(300) t11 i:i0(300) t11 i:i2(900) t200 i:i4(2024) i:i5(300) t202",
        "r3": "t122",
        "r4": "t104 i:i1(4) t2 i:i3(1500) t11",
        "r9": "t40 i:i3(1500) i:i5(300) t216",
    }
    tokens = {"r9": 40}
    prompts = [
        Prompt(name, parse(request.split()), max_tokens=tokens.get(name, 1), priority=2 if name == "r3" else 0)
        for name, request in requests.items()
    ]
    scheduler_result, scheduler = serve(engine, prompts)
    assert set(scheduler_result.finished.values()) == {"length"}
    loads.check_end(scheduler)


def test_an_item_that_cannot_fit_alone_ends_with_an_error(serve):
    """The API refuses it; other ways into the engine do not."""
    requests = ["t40 i:a(900) t30", "t40 i:b(5000) t30", "t40 i:c(900) t30"]
    for engine in (Engine(cache=4096), Engine(cache=8192), Engine(cache=4096, asynchronous=True)):
        result, scheduler = serve(engine, prompts_of(requests))
        assert result.finished == {"r0": "length", "r1": "error", "r2": "length"}
        loads.check_end(scheduler)


@contextlib.contextmanager
def recorded(name):
    logger, handler = logging.getLogger(name), logging.Handler()
    handler.found = []
    handler.emit = lambda record: handler.found.append(record.getMessage())
    logger.addHandler(handler)
    try:
        yield handler.found
    finally:
        logger.removeHandler(handler)


@pytest.fixture
def deadlock(configs):
    """Two running requests that hold the whole cache and are asked for nothing, and one that waits for it.

    No load brings the patched scheduler here, so the holders are kept from being asked.
    """

    def made(priority=False, priorities=(0, 0), sizes=(2048, 2048)):
        engine = Engine(block=16, hybrid=False, cache=4096, priority=priority)
        scheduler = loads.make_scheduler(configs[False], engine)
        prompts = [
            Prompt(f"h{at}", (Text(5), Item(f"h{at}", size), Text(9)), priority=priorities[at], arrives=at)
            for at, size in enumerate(sizes)
        ]
        for prompt in prompts:
            scheduler.add_request(loads.make_request(scheduler, prompt))
        output = scheduler.schedule()
        assert len(output.num_scheduled_tokens) == 2
        for name in ("h0", "h1"):
            request = scheduler.requests[name]
            request.num_in_flight_tokens = 0
            # as if a step to come were not due yet
            request.next_decode_eligible_step = 10**9
        waiting = Prompt("w", (Item("w", 2048), Text(9)), arrives=5, priority=9)
        scheduler.add_request(loads.make_request(scheduler, waiting))
        return scheduler

    return made


def test_the_backstop_preempts_the_latest(deadlock):
    scheduler = deadlock()
    with recorded("vllm.ndt.encoder_progress") as lines:
        assert scheduler.schedule().preempted_req_ids == {"h1"}
        assert scheduler.encoder_progress.preemptions == 1
        assert list(scheduler.schedule().num_scheduled_tokens) == ["w"]
    [line] = lines
    assert "preempted request h1, which holds 2048, so that request w can" in line
    assert [request.request_id for request in scheduler.running] == ["h0", "w"]


def test_the_backstop_preempts_the_lowest_priority(deadlock):
    scheduler = deadlock(priority=True, priorities=(7, 3))
    assert scheduler.schedule().preempted_req_ids == {"h0"}


def test_the_backstop_waits_for_output_in_flight_and_for_a_pause(deadlock):
    from vllm.v1.core.sched.interface import PauseState

    scheduler = deadlock()
    scheduler.requests["h0"].num_in_flight_tokens = 1
    assert not scheduler.schedule().preempted_req_ids
    scheduler.requests["h0"].num_in_flight_tokens = 0
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert not scheduler.schedule().preempted_req_ids
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert scheduler.schedule().preempted_req_ids == {"h1"}


def test_no_request_is_preempted_twice_without_progress(deadlock):
    scheduler = deadlock()
    progress = scheduler.encoder_progress
    for name in ("h0", "h1"):
        request = scheduler.requests[name]
        progress._marks[name] = (request.num_computed_tokens, request.num_tokens)
    output = scheduler.schedule()
    assert not output.preempted_req_ids and progress.preemptions == 0
    # somebody must let go: the one that would have been preempted ends
    assert scheduler.grammar_compile_error_reqs == {"h1"}
    scheduler.grammar_compile_error_reqs.clear()
    scheduler.requests["h0"].num_computed_tokens += 1
    assert scheduler.schedule().preempted_req_ids == {"h0"}


def test_the_backstop_logs_once_a_minute(deadlock, monkeypatch):
    import vllm_ndt.encoder_progress as module

    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    scheduler = deadlock()
    progress, request = scheduler.encoder_progress, scheduler.requests["h1"]
    with recorded("vllm.ndt.encoder_progress") as lines:
        for seconds in (0, 59, 1, 61):
            now[0] += seconds
            progress.preemptions += 1
            progress._log(now[0], progress.manager, request, request)
    assert len(lines) == 3
    assert lines[1].endswith("2 such preemptions since the last line")


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (Engine(block=2048, budget=2048, slots=1), "2048 tokens and 1 requests of 1 need 2049 tokens a step"),
        (Engine(block=1600, budget=2048, slots=512), "1600 tokens and 512 requests of 1 need 2112 tokens a step"),
        (Engine(block=1600, budget=2048, slots=448), None),
        (Engine(block=2096, budget=2048, slots=512), None),
        (Engine(block=1600, budget=2048, slots=512, prefix_caching=False), None),
        (Engine(block=1600, budget=2048, slots=512, hybrid=False), None),
        (Engine(block=1600, budget=2048, slots=256, drafter=True), "256 requests of 2 need 2112"),
    ],
)
def test_a_budget_that_keeps_prompts_from_starting_is_named(configs, engine, said):
    with recorded("vllm.ndt.encoder_progress") as lines:
        loads.make_scheduler(configs[engine.drafter], engine)
    if said is None:
        assert lines == []
    else:
        [line] = lines
        assert said in line and "raise max_num_batched_tokens or lower max_num_seqs" in line


def test_a_session_that_waits_for_input_lets_go(configs):
    """With a drafter it keeps the item at its prompt's end, and it is not running, so nobody could preempt it."""
    engine = Engine(block=16, hybrid=False, drafter=True)
    scheduler = loads.make_scheduler(configs[True], engine)
    first, second = prompts_of(["t40 i:a(3000)", "t40 i:b(3000) t5"])
    session = loads.make_request(scheduler, first)
    session.resumable, session.streaming_queue = True, None
    scheduler.add_request(session)
    worker = loads.Worker(scheduler, engine, {first.name: first, second.name: second})
    finished = {}
    for step in range(12):
        if step == 4:
            assert scheduler.encoder_cache_manager.pinned == 3000
            scheduler.add_request(loads.make_request(scheduler, second))
        output = scheduler.schedule()
        made = worker.execute(output)()
        for outputs in scheduler.update_from_output(output, made).values():
            finished |= {one.request_id: str(one.finish_reason) for one in outputs.outputs if one.finish_reason}
    assert finished["r1"] == "length"


@pytest.mark.parametrize("hybrid", [False, True])
def test_items_at_one_place_are_encoded_whatever_the_prefix_cache_holds(configs, hybrid):
    """Sound inside a video: 3,000 and 2,500 embeddings among the same placeholders, and 4,096 a step."""
    import torch
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    engine = Engine(block=16, hybrid=hybrid, cache=8192)
    for size in (0, 48):
        scheduler = loads.make_scheduler(configs[False], engine)
        before = Prompt("before", (Text(48), Text(5, "other")))
        prompt = Prompt("both", (*((Text(48),) if size else ()), Item("video", 6000), Text(5)))
        worker = loads.Worker(scheduler, engine, {"before": before, "both": prompt})
        scheduler.add_request(loads.make_request(scheduler, before))
        while scheduler.has_requests():
            output = scheduler.schedule()
            scheduler.update_from_output(output, worker.execute(output)())
        request = loads.make_request(scheduler, prompt)
        turns = torch.arange(6000) % 12
        request.mm_features = [
            MultiModalFeatureSpec(None, kind, kind, PlaceholderRange(offset=size, length=6000, is_embed=mask))
            for kind, mask in (("video", turns < 6), ("audio", turns >= 7))
        ]
        scheduler.add_request(request)
        finished, encoded = {}, set()
        for _ in range(8):
            output = scheduler.schedule()
            encoded |= {at for inputs in output.scheduled_encoder_inputs.values() for at in inputs}
            for outputs in scheduler.update_from_output(output, worker.execute(output)()).values():
                finished |= {one.request_id: str(one.finish_reason) for one in outputs.outputs if one.finish_reason}
        assert (finished, encoded) == ({"both": "length"}, {0, 1})
        loads.check_end(scheduler)


def test_empty_steps_are_counted_only_with_work(deadlock, configs):
    scheduler = deadlock()
    for step in range(1, 3):
        scheduler.encoder_progress.end_step(0)
        assert scheduler.encoder_progress.empty_steps == step
    scheduler.encoder_progress.end_step(1)
    assert scheduler.encoder_progress.empty_steps == 0
    idle = loads.make_scheduler(configs[False], Engine())
    idle.schedule()
    assert idle.encoder_progress.empty_steps == 0


@hypothesis.settings(
    max_examples=100, deadline=None, database=None, derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)  # fmt: skip
@hypothesis.given(st.randoms(use_true_random=False))
def test_evictions_and_repeats_are_counted(configs, choices):
    """Against the worker's own record of what was encoded and dropped."""
    engine, prompts = loads.random_load(choices)
    scheduler = loads.make_scheduler(configs[engine.drafter], engine)
    encoded, dropped, repeats = set(), 0, 0
    execute = loads.Worker.execute

    def watched(self, output):
        nonlocal dropped, repeats
        dropped += len(output.free_encoder_mm_hashes)
        for name, inputs in output.scheduled_encoder_inputs.items():
            for at in inputs:
                item = scheduler.requests[name].mm_features[at].identifier
                repeats += item in encoded
                encoded.add(item)
        return execute(self, output)

    with mock.patch.object(loads.Worker, "execute", watched):
        loads.run(scheduler, engine, prompts)
    manager = scheduler.encoder_cache_manager
    assert (manager.evictions, manager.repeats) == (dropped, repeats)
    assert manager.used == sum(
        next(f.mm_position.length for p in prompts for f in _features(p, item)) for item in manager.cached
    )
    assert manager.pinned == 0


def _features(prompt, item):
    return [
        SimpleNamespace(mm_position=SimpleNamespace(length=segment.size))
        for segment in prompt.segments
        if isinstance(segment, Item) and segment.name == item
    ]
