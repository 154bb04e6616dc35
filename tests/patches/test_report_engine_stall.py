# SPDX-License-Identifier: Apache-2.0
"""Patch report-engine-stall: /health turns while nothing moves, and only then.

Upstream's real AsyncLLM, health route and scheduler; the engine core behind them is a queue of messages here. Real
processes that stop are in tests/engine.
"""

import asyncio
import contextlib
import logging
from types import SimpleNamespace
from unittest import mock

import pytest
import tiny_models

VARIABLE = "VLLM_NDT_STALL_SECONDS"
LIMIT = 2.0


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        folder = tiny_models.write_text_model(tmp_path_factory.mktemp("text"))
        yield tiny_models.engine_config(folder, enable_prefix_caching=False)


class Core:
    """An engine core's client with nothing behind it: the test puts in what the engine would send."""

    client_index = 0
    core_engine = b"\0\0"
    engine_ranks_managed = (0,)

    def __init__(self, engines=1):
        self.core_engines = [number.to_bytes(2, "little") for number in range(engines)]
        self.reqs_in_flight = {}
        self.resources = SimpleNamespace(engine_dead=False)
        self.messages = asyncio.Queue()
        self.asked = []

    async def get_output_async(self):
        return await self.messages.get()

    async def _call_utility_async(self, method, *given, engine):
        self.asked.append((method, engine))

    def shutdown(self, timeout=None):
        pass


@contextlib.contextmanager
def serving(config, engines=1, limit=LIMIT):
    """A front end in the running loop, and its engine core's client."""
    from vllm.v1.engine import async_llm

    core = Core(engines)
    settings = {"HF_HUB_OFFLINE": "1", VARIABLE: f"{limit:g}"}
    with (
        mock.patch.dict("os.environ", settings),
        mock.patch.object(async_llm.EngineCoreClient, "make_async_mp_client", lambda **_: core),
    ):
        front = async_llm.AsyncLLM(config, executor_class=None, log_stats=False)
        try:
            yield front, core
        finally:
            front.output_handler.cancel()


async def health(front):
    """The status and text of /health."""
    from vllm.entrypoints.serve.instrumentator.health import health as route

    app = SimpleNamespace(state=SimpleNamespace(engine_client=front))
    reply = await route(SimpleNamespace(app=app))
    return reply.status_code, reply.body.decode()


async def until(condition, seconds=30):
    """Whether a condition comes true in time."""
    for _ in range(int(seconds * 20)):
        if await condition():
            return True
        await asyncio.sleep(0.05)
    return False


def report(moves, **more):
    """A message as the engine core sends it."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats

    common = {"unfinished": 1, "excuse": "", "churning": "", "starved": 0, "manifests": [], "oldest": []}
    return EngineCoreOutputs(scheduler_stats=SchedulerStats(ndt_progress={"moves": moves} | common | more))


def test_health_turns_when_nothing_moves(config):
    """A request waits, and its engine says nothing at all, as one does that hangs."""

    async def run():
        with serving(config) as (front, core):
            assert await health(front) == (200, "")
            front.output_processor.request_states["waits"] = None

            async def bad():
                return (await health(front))[0] == 503

            turned = await until(bad, 10)
            text = (await health(front))[1]
            if turned:
                core.messages.put_nowait(report(1))
                assert await until(lambda: _good(front))
            return turned, text

    turned, text = asyncio.run(run())
    assert turned, "still 200"
    assert text.startswith("engine 0 stands still: no progress for ")


async def _good(front):
    return await health(front) == (200, "")


def test_an_engine_that_moves_rests_or_waits_for_others_is_healthy(config):
    async def run():
        seen = []
        with serving(config) as (front, core):
            front.output_processor.request_states["waits"] = None
            kinds = [
                lambda at: report(at),
                lambda at: report(9, excuse="paused"),
                lambda at: report(9, excuse="waiting for remote KV"),
            ]
            for kind in kinds:
                for at in range(10):
                    core.messages.put_nowait(kind(at))
                    await asyncio.sleep(0.4)
                    seen.append((await health(front))[0])
            front.output_processor.request_states.clear()
            core.messages.put_nowait(report(9, unfinished=0))
            for _ in range(10):
                await asyncio.sleep(0.4)
                seen.append((await health(front))[0])
        return seen

    assert set(asyncio.run(run())) == {200}


def test_reports_reach_no_statistics_and_answers_do(config):
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats

    async def run():
        with serving(config) as (front, core):
            logger = mock.Mock()
            front._logger_ref[0] = logger
            core.messages.put_nowait(report(1))
            core.messages.put_nowait(EngineCoreOutputs(scheduler_stats=SchedulerStats(num_running_reqs=3)))

            async def logged():
                return logger.record.called

            assert await until(logged)
            (call,) = logger.record.call_args_list
            assert call.kwargs["scheduler_stats"].num_running_reqs == 3
            assert core.asked == [("ndt_ask_progress", b"\0\0")]

    asyncio.run(run())


def test_one_engine_of_two_is_named(config):
    async def run():
        with serving(config, engines=2) as (front, core):
            core.reqs_in_flight = {"a": b"\1\0"}

            async def bad():
                return (await health(front))[0] == 503

            assert await until(bad, 10)
            assert {engine for _, engine in core.asked} == {b"\0\0", b"\1\0"}
            return (await health(front))[1]

    assert asyncio.run(run()).startswith("engine 1 stands still")


def test_off_looks_at_nothing(config):
    async def run():
        with serving(config, limit=0) as (front, core):
            front.output_processor.request_states["waits"] = None
            await asyncio.sleep(2)
            return await health(front), core.asked

    assert asyncio.run(run()) == ((200, ""), [])


def test_another_build_behind_it_is_warned_of_once(config):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("vllm.ndt").addHandler(handler)

    async def run():
        with serving(config) as (_, core):
            core.messages.put_nowait(report(1, manifests=["sha256:other"]))
            core.messages.put_nowait(report(2, manifests=["sha256:other"]))

            async def empty():
                return core.messages.empty()

            assert await until(empty)

    asyncio.run(run())
    logging.getLogger("vllm.ndt").removeHandler(handler)
    (line,) = [line for line in lines if "not of one build" in line]
    assert "sha256:other" in line and "vllm-ndt verify" in line


class TestJudge:
    """The judgement alone, by a clock of the test."""

    def engine(self, limit=150.0, **first):
        from vllm_ndt import stall

        engine = stall.Engine(limit)
        if first:
            engine.hear(self.told(**first))
        engine.look(1, waited_for=1)
        return engine

    def told(self, moves=1, unfinished=1, **more):
        return {"moves": moves, "unfinished": unfinished, "excuse": "", "churning": "", "starved": 0} | more

    def wait(self, engine, seconds, waited_for=1):
        for _ in range(seconds):
            engine.look(1, int(waited_for))
        return engine.stalled

    def test_a_step_within_the_limit_is_none_and_one_longer_is_until_it_ends(self):
        engine = self.engine(moves=1)
        assert not self.wait(engine, 100)
        engine.hear(self.told(moves=2))
        assert not self.wait(engine, 149)
        assert self.wait(engine, 60)
        engine.answer()
        assert not self.wait(engine, 1)

    def test_it_is_named_only_from_the_limit_on(self):
        engine = self.engine(limit=60)
        assert not self.wait(engine, 58)
        assert self.wait(engine, 2)
        assert engine.why() == "no progress for 61 s"

    def test_time_in_which_nobody_looked_does_not_count(self):
        engine = self.engine(moves=1)
        engine.look(3600, waited_for=1)
        engine.look(-3600, waited_for=1)
        engine.look(3600, waited_for=1)
        assert not engine.stalled

    def test_a_silent_engine_that_had_requests_of_others_counts(self):
        engine = self.engine(moves=1)
        assert self.wait(engine, 160, waited_for=0)

    def test_clients_that_give_up_and_try_again_hide_nothing(self):
        engine = self.engine()
        for _ in range(4):
            self.wait(engine, 40)
            self.wait(engine, 10, waited_for=0)
        assert engine.stalled

    def test_a_long_rest_forgives(self):
        engine = self.engine()
        self.wait(engine, 140)
        self.wait(engine, 160, waited_for=0)
        assert not self.wait(engine, 100)

    @pytest.mark.parametrize("excuse", ["paused", "asleep", "waiting for grammar"])
    def test_what_waits_for_something_else_is_none(self, excuse):
        engine = self.engine(moves=1)
        engine.hear(self.told(moves=1, excuse=excuse))
        assert not self.wait(engine, 500)
        engine.hear(self.told(moves=1))
        assert self.wait(engine, 160)

    def test_a_request_that_is_prefilled_again_and_again_turns_it_though_others_move(self):
        engine = self.engine(moves=1)
        engine.hear(self.told(moves=2, churning="r1", starved=1))
        assert self.wait(engine, 1)
        assert engine.why() == "request r1 is prefilled again and again"
        engine.hear(self.told(moves=3))
        assert not self.wait(engine, 1)


class TestRequests:
    """What a scheduler's requests did between two looks: upstream's scheduler and requests, a clock of the test."""

    @pytest.fixture
    def scheduler(self, config):
        with mock.patch.dict("os.environ", {"HF_HUB_OFFLINE": "1"}):
            yield tiny_models.scheduler(config, blocks=200)

    def requests(self, scheduler, limit=150.0):
        from vllm_ndt.progress import Requests

        return Requests(scheduler, limit)

    def add(self, scheduler, name, tokens=100):
        from vllm import SamplingParams
        from vllm.v1.request import Request

        request = Request(name, list(range(1, tokens + 1)), SamplingParams(max_tokens=10), None)
        scheduler.add_request(request)
        return request

    def test_an_arrival_is_no_progress_and_a_first_computed_token_is(self, scheduler):
        looks = self.requests(scheduler)
        self.add(scheduler, "a")
        assert looks.look(0)[0] is False
        assert looks.look(1)[0] is False
        scheduler.schedule()
        moved, about = looks.look(2)
        assert moved is True
        assert (about["unfinished"], about["running"], about["waiting"]) == (1, 1, {})
        assert about["holding"] == ["a (100 tokens)"]
        assert looks.look(3)[0] is False

    def test_tokens_that_are_computed_again_are_none(self, scheduler):
        looks = self.requests(scheduler)
        request = self.add(scheduler, "a")
        scheduler.schedule()
        looks.look(0)
        assert looks.look(1)[0] is False
        for at in range(2, 6):
            # what upstream's _preempt_request does to these, and the prefill behind it
            request.num_computed_tokens, request.num_preemptions = 0, request.num_preemptions + 1
            assert looks.look(at)[0] is False
            request.num_computed_tokens = 100
            assert looks.look(at)[0] is False
        about = looks.look(200)[1]
        assert about["churning"] == "a"
        assert about["oldest"] == ["a (running, 200 s)"]

    def test_with_priorities_preemption_is_what_was_asked_for(self, scheduler):
        with mock.patch.object(scheduler.vllm_config.scheduler_config, "policy", "priority"):
            looks = self.requests(scheduler)
        request = self.add(scheduler, "a")
        for at in range(4):
            looks.look(at)
        request.num_preemptions += 10
        about = looks.look(200)[1]
        assert (about["starved"], about["churning"]) == (1, "")

    def test_one_that_waits_long_is_starved_while_others_move(self, scheduler):
        looks = self.requests(scheduler)
        busy = self.add(scheduler, "busy", 10)
        scheduler.schedule()
        self.add(scheduler, "starved")
        for at in range(0, 200, 50):
            busy.append_output_token_ids(5)
            looks.look(at)
        busy.append_output_token_ids(5)
        moved, about = looks.look(200)
        assert moved is True
        assert (about["starved"], about["oldest"]) == (1, ["starved (capacity, 200 s)"])

    def test_a_pause_of_the_process_starves_nobody(self, scheduler):
        looks = self.requests(scheduler)
        self.add(scheduler, "a")
        looks.look(0)
        assert looks.look(1000)[1]["starved"] == 0

    @pytest.mark.parametrize(
        ("status", "reason"),
        [
            ("WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", "grammar"),
            ("WAITING_FOR_REMOTE_KVS", "remote KV"),
            ("WAITING_FOR_STREAMING_REQ", "input"),
        ],
    )
    def test_parked_requests_are_named_and_excused_unless_another_waits_behind_them(self, scheduler, status, reason):
        from vllm.v1.request import RequestStatus

        looks = self.requests(scheduler)
        self.add(scheduler, "parked").status = RequestStatus[status]
        for at in range(0, 200, 40):
            about = looks.look(at)[1]
        assert about["excuse"] == f"waiting for {reason}"
        assert (about["starved"], about["parked"]) == (0, [f"parked ({reason}, 160 s)"])
        self.add(scheduler, "behind")
        for at in range(200, 500, 40):
            about = looks.look(at)[1]
        assert about["excuse"] == ""
        assert about["starved"] == 1 and about["oldest"][0].startswith("behind (capacity")
        assert about["waiting"] == {reason: 1, "capacity": 1}


@pytest.mark.parametrize("value", ["-1", "1.5", "x", "1e3", "9999999", "२"])
def test_a_bad_limit_stops_the_start(value):
    from vllm_ndt import settings

    with pytest.raises(settings.SettingError, match=f"{VARIABLE}: expected a whole number of seconds"):
        settings.check({VARIABLE: value})


def test_the_limit_is_150_unless_set():
    from vllm_ndt import settings

    assert [settings.stall_seconds({VARIABLE: value}) for value in ("", " 60 ", "0")] == [150, 60, 0]
    assert settings.stall_seconds({}) == 150
