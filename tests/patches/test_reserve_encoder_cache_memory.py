# SPDX-License-Identifier: Apache-2.0
"""The bytes of the enlarged encoder cache stay free, `auto` is decided by the workers, and no view pins a batch.

Upstream's real CPU worker measures and decides here; the GPU's is in tests/gpu.
"""

import copy
import logging
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import tiny_models

VARIABLE = "VLLM_NDT_ENCODER_CACHE_TOKENS"
UPSTREAM = 4096
# the tiny model's: 128 in bfloat16
WIDTH = 256
GIB = 2**30
LIMITS = {"image": 4, "video": 0}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        folder = tiny_models.write_hybrid_vision_model(tmp_path_factory.mktemp("vision"))
        return tiny_models.engine_config(folder, max_model_len=16_384, limit_mm_per_prompt=LIMITS)


@pytest.fixture(scope="module", autouse=True)
def first_rank():
    """The pipeline group that a running worker has."""
    with mock.patch("vllm.distributed.parallel_state.get_pp_group", lambda: SimpleNamespace(is_first_rank=True)):
        yield


@pytest.fixture
def worker(config):
    """Upstream's CPU worker as it is when it sizes the KV cache; `requested` bytes, of which it uses none."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    def made(requested=GIB, given=None):
        made = CPUWorker.__new__(CPUWorker)
        made.vllm_config, made.rank = config, 0
        made.cache_config = SimpleNamespace(kv_cache_memory_bytes=given)
        made.model_runner = mock.Mock(spec=["warming_up_model"])
        made.requested_cpu_memory = requested
        return made

    return made


def kv_bytes(worker):
    """What the worker gives to the KV cache."""
    memory = SimpleNamespace(available_memory=100 * GIB, total_memory=100 * GIB)
    with (
        mock.patch("vllm.v1.worker.cpu_worker.get_memory_node_info", return_value=memory),
        mock.patch(
            "vllm.v1.worker.cpu_worker.psutil.Process", return_value=mock.Mock(**{"memory_info.return_value.rss": 0})
        ),
    ):
        return worker.determine_available_memory()


@pytest.mark.parametrize(("value", "embeddings"), [("32768", 32_768), ("100000", 100_000)])
def test_the_kv_cache_shrinks_by_the_bytes_of_the_enlarged_cache(monkeypatch, worker, value, embeddings):
    """Nothing was profiled on a CPU, so all of the cache counts."""
    monkeypatch.setenv(VARIABLE, value)
    assert kv_bytes(worker()) == GIB - embeddings * WIDTH


@pytest.mark.parametrize("value", [None, "1", "4096"])
def test_upstreams_size_takes_what_upstream_takes(monkeypatch, worker, value):
    from vllm_ndt import encoder_memory

    if value:
        monkeypatch.setenv(VARIABLE, value)
    made = worker()
    made.model_runner.ndt_encoder_profile = encoder_memory.Profile(UPSTREAM, WIDTH)
    assert kv_bytes(made) == GIB


def test_what_upstream_profiled_is_not_counted_again(monkeypatch, worker):
    """The width is the measured one: four times the model's, as with deepstack outputs."""
    import torch
    from vllm_ndt import encoder_memory

    monkeypatch.setenv(VARIABLE, "32768")
    made = worker()
    encoder_memory.note_profile(made.model_runner, [torch.zeros(2048, 512, dtype=torch.bfloat16)] * 2)
    assert kv_bytes(made) == GIB - (32_768 - UPSTREAM) * 4 * WIDTH


def test_a_given_size_is_kept_with_a_warning(monkeypatch, worker, caplog):
    monkeypatch.setenv(VARIABLE, "32768")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    assert kv_bytes(worker(given=GIB)) == GIB
    [(level, text)] = {(r.levelno, r.getMessage()) for r in caplog.records if r.name == "vllm.ndt.encoder_memory"}
    assert level == logging.WARNING
    assert "8.0 MiB more must be free" in text


@pytest.mark.parametrize(
    ("requested", "embeddings", "why"),
    [
        # 8 slots x 4 images x 2,048, and 5 % of the memory
        (GIB, 65_536, "enough for every slot"),
        (GIB // 8, int(GIB // 8 * 0.05) // WIDTH, "5% of the KV cache's memory"),
        (GIB // 64, UPSTREAM, "memory allows no more than upstream's size"),
    ],
)
def test_auto_is_enough_for_every_slot_as_far_as_memory_allows(monkeypatch, worker, caplog, requested, embeddings, why):
    from vllm_ndt.encoder_memory import decided

    monkeypatch.setenv(VARIABLE, "auto")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    made = worker(requested)
    assert kv_bytes(made) == requested - embeddings * WIDTH
    assert decided(made) == embeddings
    text = next(r.getMessage() for r in caplog.records if r.name == "vllm.ndt.encoder_memory")
    assert f"Encoder cache: {embeddings} embeddings of 256 bytes (auto: {why})" in text


def test_auto_is_two_gib_at_most():
    from vllm_ndt.encoder_sizing import automatic

    assert automatic(10**9, UPSTREAM, 10_240, 400 * GIB) == (2 * GIB // 10_240, "2 GiB")


def test_the_workers_smallest_size_reaches_the_scheduler(monkeypatch):
    from vllm_ndt.encoder_memory import agree

    workers = [SimpleNamespace(ndt_encoder_cache_tokens=size) for size in (9000, 8000, None)]
    executor = SimpleNamespace(collective_rpc=lambda call: [call(worker) for worker in workers])
    config = SimpleNamespace()
    monkeypatch.setenv(VARIABLE, "auto")
    agree(executor, config)
    assert config.ndt_encoder_cache_tokens == 8000


def test_more_than_the_memory_stops_the_start(monkeypatch, worker):
    from vllm_ndt.settings import SettingError

    monkeypatch.setenv(VARIABLE, str(GIB // WIDTH))
    with pytest.raises(SettingError) as error:
        kv_bytes(worker())
    for part in (VARIABLE, str(GIB // WIDTH), "less than the KV cache's memory, 1.00 GiB"):
        assert part in str(error.value)
    most = re.search(r"so at most ([0-9]+)", str(error.value))[1]
    monkeypatch.setenv(VARIABLE, most)
    assert kv_bytes(worker()) == WIDTH
    monkeypatch.setenv(VARIABLE, str(int(most) + 1))
    with pytest.raises(SettingError):
        kv_bytes(worker())
    assert kv_bytes(worker(given=GIB)) == GIB


def test_the_startup_plan_is_another_with_another_cache(monkeypatch, config):
    """A plan made without the reservation would bring the whole memory back."""
    from vllm.v1.worker.startup_plan import compute_plan_fingerprint

    found = set()
    with mock.patch("vllm.v1.worker.startup_plan.current_platform") as platform:
        platform.get_device_name.return_value = "device"
        platform.get_device_total_memory.return_value = GIB
        for value in (None, "32768", "auto"):
            if value:
                monkeypatch.setenv(VARIABLE, value)
            found.add(compute_plan_fingerprint(config, 0, 1))
        assert len(found) == 3
        # what auto decides on depends on these
        more_slots, more_items = copy.deepcopy(config), copy.deepcopy(config)
        more_slots.scheduler_config.max_num_seqs = 64
        more_items.model_config.multimodal_config.limit_per_prompt["image"].count = 16
        found |= {compute_plan_fingerprint(other, 0, 1) for other in (more_slots, more_items)}
    assert len(found) == 5


def test_a_kept_output_pins_its_own_bytes_only():
    """The V1 runner's cache: a batch of four images, of which one is kept. V2's is checked on the GPU."""
    import torch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    batch = torch.randn(4 * 100, 128)
    runner = GPUModelRunner.__new__(GPUModelRunner)
    runner.encoder_cache = {}
    runner.maybe_save_ec_to_connector = lambda *_: None
    for at, output in enumerate(batch.split(100)):
        runner._cache_encoder_output(f"i{at}", output, None, [])
    kept = runner.encoder_cache["i2"]
    assert torch.equal(kept, batch[200:300])
    assert kept.untyped_storage().nbytes() == 100 * 128 * 4


def test_a_whole_output_is_not_copied():
    import torch
    from vllm_ndt.encoder_memory import owned

    output = torch.randn(100, 128)
    assert owned(output) is output


def test_the_scheduler_forgets_everything_at_a_reset(config):
    """Sleeping pauses with clear_cache, which resets workers and scheduler."""
    scheduler = tiny_models.scheduler(config)
    manager = scheduler.encoder_cache_manager
    feature = SimpleNamespace(identifier="i")
    request = SimpleNamespace(request_id="r", mm_features=[feature], get_num_encoder_embeds=lambda _: 900)
    assert manager.can_allocate(request, 0, UPSTREAM, 0)
    manager.allocate(request, 0)
    assert (manager.used, manager.pinned) == (900, 900)
    scheduler.reset_encoder_cache()
    assert (manager.used, manager.pinned, manager.cached) == (0, 0, {})
