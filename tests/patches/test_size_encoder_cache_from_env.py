# SPDX-License-Identifier: Apache-2.0
"""The scheduler's encoder cache follows VLLM_NDT_ENCODER_CACHE_TOKENS; the input limit does not."""

import logging
from types import SimpleNamespace

import pytest
import tiny_models

VARIABLE = "VLLM_NDT_ENCODER_CACHE_TOKENS"
LOGGER = "vllm.v1.core.sched.scheduler"
# max_num_batched_tokens of the tiny models' configuration, which upstream takes as the cache's size too
UPSTREAM = 4096


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    return tiny_models.write_hybrid_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def config(vision):
    """Eight requests of up to four images (2,048 embeddings each) a prompt: 65,536 in all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.delenv(VARIABLE, raising=False)
        return tiny_models.engine_config(vision, max_model_len=16_384, limit_mm_per_prompt={"image": 4, "video": 0})


class Recorder(logging.Handler):
    """Keeps what one logger says, whether or not upstream lets it propagate."""

    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        self.found.append((record.levelno, record.getMessage()))


@pytest.fixture
def lines():
    """Starts a scheduler for a configuration; gives it and what it logs about its cache, as (level, text)."""
    logger, recorder = logging.getLogger(LOGGER), Recorder()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(recorder)

    def start(config):
        recorder.found.clear()
        scheduler = tiny_models.scheduler(config)
        return scheduler, [line for line in recorder.found if "ncoder cache" in line[1] or VARIABLE in line[1]]

    yield start
    logger.removeHandler(recorder)
    logger.setLevel(level)


@pytest.mark.parametrize("value", ["32768", " 32768 ", "0032768"])
def test_the_scheduler_takes_the_larger_size(monkeypatch, config, value):
    monkeypatch.setenv(VARIABLE, value)
    manager = tiny_models.scheduler(config).encoder_cache_manager
    assert (manager.cache_size, manager.num_free_slots, manager.num_freeable_slots) == (32_768,) * 3


def test_limits_and_budgets_stay_upstreams(monkeypatch, config):
    """A higher limit would let in an item that never fits the compute budget: it would wait for ever."""
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget
    from vllm.v1.engine.input_processor import InputProcessor

    monkeypatch.setenv(VARIABLE, "32768")
    scheduler = tiny_models.scheduler(config)
    budget = MultiModalBudget(config, MULTIMODAL_REGISTRY)
    assert scheduler.encoder_cache_manager.cache_size == 32_768
    assert scheduler.max_num_encoder_input_tokens == UPSTREAM
    assert (budget.get_encoder_budget(), budget.encoder_cache_size) == (UPSTREAM, UPSTREAM)
    assert config.scheduler_config.encoder_cache_size == UPSTREAM
    assert InputProcessor(config).mm_encoder_cache_size == UPSTREAM


def test_more_images_are_scheduled_at_once(monkeypatch, config):
    """Three requests with one large image each: upstream's cache holds two of them, the larger one all."""
    held = {}
    for value in (None, "32768"):
        if value:
            monkeypatch.setenv(VARIABLE, value)
        manager = tiny_models.scheduler(config).encoder_cache_manager
        requests = [_request(f"r{number}", 2048) for number in range(3)]
        held[value] = 0
        for request in requests:
            if manager.can_allocate(request, 0, UPSTREAM, 0):
                manager.allocate(request, 0)
                held[value] += 1
    assert held == {None: 2, "32768": 3}


def _request(name, embeddings):
    feature = SimpleNamespace(identifier=name)
    return SimpleNamespace(request_id=name, mm_features=[feature], get_num_encoder_embeds=lambda _: embeddings)


def test_unset_keeps_upstreams_size_and_says_what_fits(config, lines):
    scheduler, found = lines(config)
    assert scheduler.encoder_cache_manager.cache_size == UPSTREAM
    [(level, text)] = found
    assert level == logging.WARNING
    assert "Encoder cache: 4096 embeddings; 2 of the largest items fit (image, 2048 embeddings)" in text
    assert "8 requests of up to 4 image items need 65536 embeddings, which do not fit" in text
    assert "stock vLLM can stand still" in text and "lower max_num_seqs or limit_mm_per_prompt" in text


def test_the_line_names_both_sizes_and_the_variable(monkeypatch, config, lines):
    monkeypatch.setenv(VARIABLE, "65535")
    _, [(level, text)] = lines(config)
    assert level == logging.WARNING
    assert f"65535 embeddings (upstream's size is 4096, raised by {VARIABLE}=65535); 31 of the largest" in text

    monkeypatch.setenv(VARIABLE, "65536")
    _, [(level, text)] = lines(config)
    assert level == logging.INFO
    assert "65536 embeddings" in text and text.endswith("need 65536 embeddings, which fit")


def test_a_smaller_value_keeps_upstreams_size_and_says_so(monkeypatch, config, lines):
    monkeypatch.setenv(VARIABLE, "1000")
    scheduler, [(_, text)] = lines(config)
    assert scheduler.encoder_cache_manager.cache_size == UPSTREAM
    assert f"4096 embeddings (upstream's size, which is kept: {VARIABLE}=1000 is less)" in text


@pytest.mark.parametrize("value", ["0", "-1", "1e4", "1_000", "", " ", "automatic", "4096.0", "٣", "9" * 5000])
def test_a_bad_value_stops_the_scheduler(monkeypatch, config, value):
    monkeypatch.setenv(VARIABLE, value)
    error = None
    try:
        tiny_models.scheduler(config)
    except Exception as found:
        error = found
    assert type(error).__name__ == "SettingError"
    for part in (VARIABLE, repr(value), "a whole number of embeddings from 1 up", "or auto"):
        assert part in str(error)


def test_prompts_that_mix_modalities_count_together(monkeypatch, vision, lines):
    """Two images and one video: neither kind alone fills 5,120 embeddings, a prompt with both does."""
    limits = {"image": 2, "video": 1}
    config = tiny_models.engine_config(vision, max_num_seqs=1, max_model_len=16_384, limit_mm_per_prompt=limits)
    monkeypatch.setenv(VARIABLE, "4500")
    _, [(level, text)] = lines(config)
    assert level == logging.WARNING
    assert "1 requests of up to 2 image + 1 video items need 5120 embeddings, which do not fit" in text
    monkeypatch.setenv(VARIABLE, "5120")
    _, [(level, _)] = lines(config)
    assert level == logging.INFO


def test_without_a_limit_four_items_are_assumed(vision, lines):
    """Upstream's limit of 999 would need a cache that nobody has."""
    _, [(_, text)] = lines(tiny_models.engine_config(vision, max_model_len=65_536))
    assert "up to 4 image + 4 video (assumed: no limit is set for image and video) items need 98304" in text


def test_a_prompt_needs_no_more_than_its_length(vision, lines):
    """Images and videos together would count a prompt twice."""
    limits = {"image": 16, "video": 16}
    _, [(_, text)] = lines(tiny_models.engine_config(vision, max_model_len=16_384, limit_mm_per_prompt=limits))
    assert "8 requests of up to 8 image + 16 video items need 131072 embeddings" in text


def test_only_what_stock_can_stand_still_with_is_a_warning(vision, lines):
    """Without prefix caching no chunk must end at a state's block: requests wait, and go on."""
    limits = {"image": 4, "video": 0}
    _, [(level, text)] = lines(
        tiny_models.engine_config(vision, limit_mm_per_prompt=limits, enable_prefix_caching=False)
    )
    assert level == logging.INFO and text.endswith("so that requests may wait for space")


def test_a_dense_model_has_no_states_to_align(tmp_path, lines):
    """Whatever the mode of a cache says that it does not have."""
    config = tiny_models.engine_config(
        tiny_models.write_dense_vision_model(tmp_path), limit_mm_per_prompt={"image": 4, "video": 0}
    )
    config.cache_config.mamba_cache_mode = "align"
    _, [(level, text)] = lines(config)
    assert level == logging.INFO and text.endswith("so that requests may wait for space")


@pytest.mark.parametrize("value", ["auto", " AUTO "])
def test_auto_takes_what_the_workers_decided(monkeypatch, vision, lines, value):
    monkeypatch.setenv(VARIABLE, value)
    config = tiny_models.engine_config(vision, limit_mm_per_prompt={"image": 4, "video": 0})
    scheduler, [(_, text)] = lines(config)
    assert scheduler.encoder_cache_manager.cache_size == UPSTREAM
    assert f"no worker decided on {VARIABLE}=auto" in text
    config.ndt_encoder_cache_tokens = UPSTREAM
    _, [(_, text)] = lines(config)
    assert f"4096 embeddings (upstream's size, on which {VARIABLE}=auto decided)" in text
    config.ndt_encoder_cache_tokens = 20_000
    scheduler, [(_, text)] = lines(config)
    assert scheduler.encoder_cache_manager.cache_size == 20_000
    assert f"20000 embeddings (upstream's size is 4096, raised by {VARIABLE}=auto)" in text


@pytest.mark.parametrize("value", [None, "32768"])
def test_disabled_modalities_keep_an_empty_cache(monkeypatch, vision, lines, value):
    limits = {"image": 0, "video": 0}
    _stays_as_it_is(monkeypatch, lines, value, tiny_models.engine_config(vision, limit_mm_per_prompt=limits), 0)


@pytest.mark.parametrize("value", [None, "32768"])
def test_text_only_models_keep_an_empty_cache(monkeypatch, tmp_path, lines, value):
    _stays_as_it_is(monkeypatch, lines, value, tiny_models.engine_config(tiny_models.write_text_model(tmp_path)), 0)


@pytest.mark.parametrize("value", [None, "32768"])
def test_encoder_decoder_models_keep_their_size(monkeypatch, tmp_path, lines, value):
    folder = tiny_models.write_encoder_decoder_model(tmp_path)
    _stays_as_it_is(monkeypatch, lines, value, tiny_models.engine_config(folder), UPSTREAM)


def _stays_as_it_is(monkeypatch, lines, value, config, size):
    """The cache has `size`, and one line says that the variable is ignored if it is set."""
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    scheduler, found = lines(config)
    assert scheduler.encoder_cache_manager.cache_size == size
    if value is None:
        assert found == []
    else:
        [(level, text)] = found
        assert level == logging.INFO and text.startswith(f"{VARIABLE}={value} is ignored: ")


def test_precomputed_embeddings_alone_get_the_size_without_items(monkeypatch, vision, lines):
    """Upstream gives no items a prompt for modalities that skip the encoder, but caches them."""
    limits = {"image": 0, "video": 0}
    monkeypatch.setenv(VARIABLE, "32768")
    config = tiny_models.engine_config(vision, limit_mm_per_prompt=limits, enable_mm_embeds=True)
    scheduler, [(level, text)] = lines(config)
    assert scheduler.encoder_cache_manager.cache_size == 32_768
    assert level == logging.INFO and text.endswith(f"raised by {VARIABLE}=32768)")
