# SPDX-License-Identifier: Apache-2.0
"""Patch report-nonfinite-metrics: the scheduler's counts reach /metrics, from upstream's Scheduler to its logger."""

import functools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loads import Engine, make_config, make_scheduler
from tiny_models import write_hybrid_vision_model

NAMES = ("steps_total", "requests_total", "logits_total", "aborted_total")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        return make_config(write_hybrid_vision_model(Path(tmp_path_factory.mktemp("model"))))


@pytest.fixture
def scrape(config: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Upstream's logger, fed by a scheduler in the mode of the test's parameter: what a scrape shows of its reports."""
    from prometheus_client import generate_latest
    from prometheus_client.parser import text_string_to_metric_families
    from vllm.v1.core.sched import async_scheduler  # noqa: F401  (derives from the class itself)
    from vllm.v1.core.sched import scheduler as upstream
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.prometheus import get_prometheus_registry, unregister_vllm_metrics

    monkeypatch.setenv("VLLM_NDT_NAN_GUARD", request.param)
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    logger = PrometheusStatLogger(config, [0])
    # one that makes statistics, as an engine's does
    monkeypatch.setattr(upstream, "Scheduler", functools.partial(upstream.Scheduler, log_stats=True))
    scheduler = make_scheduler(config, Engine(block=16, hybrid=False))

    def after(*steps: Any) -> dict[str, float]:
        """What a scrape shows once these steps' findings were taken."""
        for found in steps:
            if hasattr(scheduler, "nonfinite"):
                scheduler.nonfinite.take(object(), SimpleNamespace(ndt_nonfinite=found))
            logger.record(scheduler.make_stats(), None, engine_idx=0)
        text = generate_latest(get_prometheus_registry()).decode()
        prefix = "vllm:ndt_nonfinite_"
        return {
            sample.name.removeprefix(prefix): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith(prefix) and not sample.name.endswith("_created")
        }

    yield after
    unregister_vllm_metrics()


def findings(**requests: str) -> Any:
    """A step's findings: where each request was hit first."""
    try:
        from vllm_ndt.nan_step import Findings
    except ImportError:
        return None
    return Findings(7, requests)


@pytest.mark.parametrize("scrape", ["report", "abort"], indirect=True)
def test_a_scrape_shows_what_was_found(scrape: Any) -> None:
    assert scrape(None) == dict.fromkeys(NAMES, 0)
    assert scrape(findings(a="layer", b="logits"), None, findings(a="layer")) == {
        "steps_total": 2,
        "requests_total": 3,
        "logits_total": 1,
        # of requests that the scheduler still has; these it never had
        "aborted_total": 0,
    }


@pytest.mark.parametrize("scrape", ["off"], indirect=True)
def test_off_shows_none(scrape: Any) -> None:
    assert scrape(None) == {}
