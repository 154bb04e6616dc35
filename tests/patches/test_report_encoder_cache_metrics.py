# SPDX-License-Identifier: Apache-2.0
"""The encoder cache's counts reach /metrics: from upstream's real Scheduler, over the wire, to its real logger."""

import functools
import json
import subprocess
import sys
from types import SimpleNamespace

import loads
import pytest
import tiny_models
from loads import Engine, Item, Prompt, Text, parse

NAMES = ("size", "used", "pinned", "empty_steps", "evictions_total", "repeated_runs_total", "preemptions_total")
# two items fit, and an item is prefilled in two steps
ENGINE = Engine(block=16, hybrid=False, cache=4096, budget=4096, prefix_caching=False)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("VLLM_NDT_ENCODER_CACHE_TOKENS", raising=False)
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        return loads.make_config(tiny_models.write_hybrid_vision_model(tmp_path_factory.mktemp("vision")))


@pytest.fixture
def make_scheduler(config, monkeypatch):
    """A scheduler that makes statistics, as an engine's does."""
    from vllm.v1.core.sched import async_scheduler, scheduler

    assert issubclass(async_scheduler.AsyncScheduler, scheduler.Scheduler)
    monkeypatch.setattr(scheduler, "Scheduler", functools.partial(scheduler.Scheduler, log_stats=True))
    return lambda: loads.make_scheduler(config, ENGINE)


@pytest.fixture
def logger(config):
    """Upstream's logger for the engines 0 and 1, in the real registry."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    yield PrometheusStatLogger(config, [0, 1])
    unregister_vllm_metrics()


def metrics(model_name, engine=0, registry=None):
    """What a scrape shows of the encoder cache for one engine, without the common prefix of the names."""
    from prometheus_client import generate_latest
    from prometheus_client.parser import text_string_to_metric_families
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    text = generate_latest(registry or get_prometheus_registry()).decode()
    prefix = "vllm:ndt_encoder_cache_"
    return {
        sample.name.removeprefix(prefix): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(prefix)
        and not sample.name.endswith("_created")
        and sample.labels == {"model_name": model_name, "engine": str(engine)}
    }


def over_the_wire(outputs):
    """What the API server gets of an engine's EngineCoreOutputs."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    return MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs))


def serve(scheduler, requests, logger, engine=0):
    """Serve requests one after the other; gives the items evicted, the encoder runs and the scrapes after each step."""
    model_name = logger.vllm_config.model_config.served_model_name
    schedule, update = scheduler.schedule, scheduler.update_from_output
    evicted, scrapes = [], []

    def scheduled():
        output = schedule()
        evicted.extend(output.free_encoder_mm_hashes)
        return output

    def updated(*arguments):
        made = update(*arguments)
        for outputs in made.values():
            outputs.engine_index = engine
            got = over_the_wire(outputs)
            logger.record(got.scheduler_stats, None, engine_idx=got.engine_index)
        scrapes.append(metrics(model_name, engine))
        return made

    scheduler.schedule, scheduler.update_from_output = scheduled, updated
    prompts = [Prompt(f"r{at}", parse(words.split()), arrives=10 * at) for at, words in enumerate(requests)]
    result = loads.run(scheduler, ENGINE, prompts)
    assert not result.stalled
    return evicted, result.encoder_runs, scrapes


def test_a_scrape_shows_the_encoder_cache(make_scheduler, logger):
    """Two of three items fit, so those asked for again are encoded again; all of it is upstream's doing."""
    items = ["a", "b", "c", "a", "b"]
    evicted, runs, scrapes = serve(make_scheduler(), [f"t3000 i:{item} t9" for item in items], logger)
    assert evicted == ["a", "b", "c"] and runs == 5
    assert scrapes[-1] == {
        "size": 4096,
        "used": 4096,
        "pinned": 0,
        "empty_steps": 0,
        "evictions_total": 3,
        "repeated_runs_total": 2,
        "preemptions_total": 0,
    }
    # the first item alone, while its request is between two chunks
    assert (scrapes[0]["used"], scrapes[0]["pinned"]) == (2048, 2048)
    assert (scrapes[1]["used"], scrapes[1]["pinned"]) == (2048, 0)


def test_the_metrics_are_there_before_the_first_step(config, logger):
    for engine in (0, 1):
        shown = metrics(config.model_config.served_model_name, engine)
        assert shown == dict.fromkeys(NAMES, 0)


def test_preemptions_and_empty_steps_are_shown(config, make_scheduler, logger):
    """Two requests hold the whole cache and are not asked, which no load brings about; the third waits for it."""
    model_name, scheduler = config.model_config.served_model_name, make_scheduler()
    for name in ("h0", "h1"):
        scheduler.add_request(loads.make_request(scheduler, Prompt(name, (Text(5), Item(name, 2048), Text(9)))))
    scheduler.schedule()
    for request in scheduler.running:
        request.num_in_flight_tokens, request.next_decode_eligible_step = 0, 10**9
    logger.record(scheduler.make_stats(), None)
    shown = metrics(model_name)
    assert (shown["preemptions_total"], shown["empty_steps"], shown["pinned"]) == (0, 0, 4096)
    scheduler.add_request(loads.make_request(scheduler, Prompt("w", (Item("w", 2048), Text(9)))))
    assert not scheduler.schedule().num_scheduled_tokens
    logger.record(scheduler.make_stats(), None)
    shown = metrics(model_name)
    assert (shown["preemptions_total"], shown["empty_steps"], shown["pinned"]) == (1, 1, 2048)


def test_each_engine_has_its_own_values(config, make_scheduler, logger):
    model_name = config.model_config.served_model_name
    serve(make_scheduler(), [f"t3000 i:{item} t9" for item in "abca"], logger, engine=1)
    serve(make_scheduler(), ["t3000 i:a t9"], logger, engine=0)
    first, second = metrics(model_name, 0), metrics(model_name, 1)
    assert (first["used"], first["evictions_total"], first["repeated_runs_total"]) == (2048, 0, 0)
    assert (second["used"], second["evictions_total"], second["repeated_runs_total"]) == (4096, 2, 1)


def test_an_engine_that_starts_again_adds_to_the_counters(make_scheduler, logger):
    before = 0.0
    for total in (1, 2, 3):
        *_, scrapes = serve(make_scheduler(), [f"t3000 i:{item} t9" for item in "abc"], logger)
        counts = [before] + [scrape["evictions_total"] for scrape in scrapes]
        assert counts == sorted(counts)
        before = counts[-1]
        assert before == total


def test_a_report_survives_the_wire_unchanged(make_scheduler):
    """As plain integers by name; without one, the field is None."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats

    stats = make_scheduler().make_stats()
    assert stats.ndt_encoder_cache["size"] == 4096
    got = over_the_wire(EngineCoreOutputs(scheduler_stats=stats)).scheduler_stats
    assert got == stats
    assert over_the_wire(EngineCoreOutputs(scheduler_stats=SchedulerStats())).scheduler_stats.ndt_encoder_cache is None


def test_several_api_servers_count_each_event_once(tmp_path):
    """Each step's report reaches one of two processes, and a scrape adds up what both of them counted."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector
    from vllm_ndt.encoder_metrics import EncoderCacheReport

    manager = SimpleNamespace(cache_size=4096, used=0, pinned=0, evictions=0, repeats=0)
    report = EncoderCacheReport(SimpleNamespace(manager=manager, preemptions=0, empty_steps=0))
    reports = []
    for step in range(1, 8):
        manager.evictions, manager.repeats, manager.used = 3 * step, step, 100 * step
        reports.append(report.take())
    server = """if True:
        import json, sys
        from types import SimpleNamespace
        from prometheus_client import Counter, Gauge
        from vllm_ndt.encoder_metrics import EncoderCacheProm

        model = SimpleNamespace(is_multimodal_model=True, is_encoder_decoder=False)
        prom = EncoderCacheProm(model, Gauge, Counter, ["model_name", "engine"], {0: ["m", "0"]})
        for report in json.loads(sys.argv[1]):
            prom.observe(report, 0)
        """
    # the one that heard last from the engine has the gauges
    for share in (reports[1::2], reports[0::2]):
        subprocess.run(
            [sys.executable, "-c", server, json.dumps(share)],
            check=True,
            env={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        )
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))
    shown = metrics("m", registry=registry)
    assert (shown["evictions_total"], shown["repeated_runs_total"], shown["used"]) == (21, 7, 700)


@pytest.mark.parametrize("write", [tiny_models.write_text_model, tiny_models.write_encoder_decoder_model])
def test_a_model_without_this_cache_has_no_such_metrics(tmp_path, write):
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    config = tiny_models.engine_config(write(tmp_path / "model"), enable_prefix_caching=False)
    scheduler = tiny_models.scheduler(config, scheduler_class=functools.partial(Scheduler, log_stats=True))
    stats = scheduler.make_stats()
    assert stats.ndt_encoder_cache is None
    logger = PrometheusStatLogger(config, [0])
    logger.record(stats, None)
    assert not metrics(config.model_config.served_model_name)
    unregister_vllm_metrics()


def test_rays_metrics_are_used_under_ray(config, monkeypatch, make_scheduler):
    """Ray is not installed here, so its metrics are stood in for."""
    from vllm.v1.metrics import ray_wrappers

    recorded = {}

    class Metric:
        def __init__(self, name, description, tag_keys, boundaries=None):
            self.name, self._tag_keys = name, tag_keys

        def set(self, value, tags):
            recorded[self.name, tags["engine"]] = value

        def inc(self, value, tags):
            recorded[self.name, tags["engine"]] = recorded.get((self.name, tags["engine"]), 0) + value

    monkeypatch.setattr(ray_wrappers, "ray_metrics", SimpleNamespace(Gauge=Metric, Counter=Metric, Histogram=Metric))
    monkeypatch.setattr(ray_wrappers, "_get_replica_id", lambda: "replica")
    logger = ray_wrappers.RayPrometheusStatLogger(config, [0, 1])
    scheduler = make_scheduler()
    scheduler.encoder_cache_manager.evictions = 5
    for _ in range(2):
        logger.record(scheduler.make_stats(), None, engine_idx=1)
    assert recorded["vllm_ndt_encoder_cache_size", "1"] == 4096
    assert recorded["vllm_ndt_encoder_cache_evictions", "1"] == 5
    assert ("vllm_ndt_encoder_cache_size", "0") not in recorded
