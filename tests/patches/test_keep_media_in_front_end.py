# SPDX-License-Identifier: Apache-2.0
"""Patch keep-media-in-front-end: whatever becomes of a request, the next one with its image has the image's data.

Upstream's real renderer, input processor, serialization and engine core's reception, without a model's weights.
"""

from types import SimpleNamespace
from unittest import mock

import pytest
import tiny_models

LIMITS = {"image": 4, "video": 0}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        folder = tiny_models.write_hybrid_vision_model(tmp_path_factory.mktemp("vision"))
        yield tiny_models.engine_config(folder, max_model_len=8192, limit_mm_per_prompt=LIMITS)


class Server:
    """A front end and the part of its engine core that receives requests."""

    def __init__(self, config):
        from vllm.multimodal import MULTIMODAL_REGISTRY
        from vllm.renderers import renderer_from_config
        from vllm.v1.engine.input_processor import InputProcessor

        self.renderer = renderer_from_config(config)
        self.inputs = InputProcessor(config, self.renderer)
        cache = MULTIMODAL_REGISTRY.engine_receiver_cache_from_config(config)
        self.core = SimpleNamespace(mm_receiver_cache=cache, request_block_hasher=None, structured_output_manager=None)
        self.number = 0

    def render(self, *shades):
        """A prompt with an image of 64 x 64 for each shade, processed."""
        from PIL import Image

        text = tiny_models.IMAGE * len(shades) + "what?"
        images = [Image.new("RGB", (64, 64), (shade, 0, 0)) for shade in shades]
        tokens = self.renderer.get_tokenizer().encode(text)
        prompt = {"prompt_token_ids": tokens, "multi_modal_data": {"image": images}}
        return self.renderer.render_cmpl([prompt])[0]

    def send(self, prompt, **sampling):
        """Whether each image of the request has its data once the engine core has it."""
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        self.number += 1
        params = SamplingParams(max_tokens=3, **sampling)
        request = self.inputs.process_inputs(str(self.number), prompt, params, ("generate",))
        frames = [bytes(frame) for frame in MsgpackEncoder().encode(request)]
        received = MsgpackDecoder(EngineCoreRequest).decode(frames)
        EngineCore.preprocess_add_request(self.core, received)
        return [feature.data is not None for feature in received.mm_features]

    def ask(self, *shades, **sampling):
        return self.send(self.render(*shades), **sampling)


@pytest.fixture
def server(config):
    with mock.patch.dict("os.environ", {"HF_HUB_OFFLINE": "1"}):
        return Server(config)


def reply(call, *given, **named):
    """What a call gives, or its error as text."""
    try:
        return call(*given, **named)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


def test_images_that_come_again_keep_their_data(server):
    assert server.ask(1) == [True]
    assert server.ask(1) == [True]
    assert server.ask(2, 1, 2) == [True, True, True]


def test_a_refused_request_leaves_its_image_usable(server):
    refused = reply(server.ask, 2, logit_bias={99_999_999: 1})
    assert "99999999" in refused
    assert reply(server.ask, 2) == [True]


def test_a_request_that_was_never_sent_leaves_its_image_usable(server):
    server.render(3)
    assert reply(server.ask, 3) == [True]
    # and a stranger's that came with it
    server.render(4)
    assert reply(server.ask, 4, 5) == [True, True]
    assert reply(server.ask, 5) == [True]


def test_requests_that_overtake_each_other_arrive_whole(server):
    first, second = server.render(6), server.render(6)
    assert reply(server.send, second) == [True]
    assert reply(server.send, first) == [True]


def test_an_image_that_comes_again_is_not_processed_again(server):
    for _ in range(3):
        server.ask(7)
    found = server.renderer.mm_processor.cache.make_stats()
    assert (found.total, found.hits) == (3, 2)
