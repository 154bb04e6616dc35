# SPDX-License-Identifier: Apache-2.0
"""Patch answer-failed-requests: upstream's front end on a request that ends with an error and without a token."""

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

ERROR = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}


def failed() -> Any:
    from vllm.outputs import CompletionOutput, RequestOutput

    output = CompletionOutput(
        index=0, text="", token_ids=[], cumulative_logprob=None, logprobs=[], finish_reason="error"
    )
    return RequestOutput("r", "a", [1], None, [output], finished=True)


def completions() -> AsyncIterator[str]:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    async def results() -> AsyncIterator[Any]:
        yield 0, failed()

    server = bare(OpenAIServingCompletion)
    request = CompletionRequest(model="tiny", prompt="a", stream=True, max_tokens=5)
    made: AsyncIterator[str] = server.completion_stream_generator(
        request, [], results(), "r", 0, "tiny", 1, None, SimpleNamespace()
    )
    return made


def chat() -> AsyncIterator[str]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

    async def results() -> AsyncIterator[Any]:
        yield failed()

    server = bare(OpenAIServingChat)
    server.parser_cls = None
    server.response_role = "assistant"
    request = ChatCompletionRequest(model="tiny", messages=[{"role": "user", "content": "a"}], stream=True)
    made: AsyncIterator[str] = server.chat_completion_stream_generator(
        request, results(), "r", "tiny", [], SimpleNamespace(), SimpleNamespace()
    )
    return made


def bare(kind: type) -> Any:
    """A server of upstream's without the engine that its constructor asks for."""
    server = object.__new__(kind)
    vars(server).update(
        enable_force_include_usage=False,
        enable_prompt_tokens_details=False,
        enable_per_request_metrics=False,
        enable_log_outputs=False,
        request_logger=None,
        system_fingerprint=None,
    )
    return server


def vectors() -> AsyncIterator[str]:
    """A pooling request's queue in upstream's output processor, as a stream of the API's."""
    from vllm import PoolingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

    params = PoolingParams(task="embed")
    request = EngineCoreRequest(
        request_id="r",
        external_req_id="r",
        prompt_token_ids=[1],
        mm_features=None,
        sampling_params=None,
        pooling_params=params,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    processor = OutputProcessor(None, log_stats=False)
    queue = RequestOutputCollector(params.output_kind, request_id="r")
    processor.add_request(request, "a", queue=queue)

    async def stream() -> AsyncIterator[str]:
        try:
            processor.process_outputs([EngineCoreOutput("r", [], finish_reason=FinishReason.ERROR)])
            await queue.get()
        except Exception as error:
            code = getattr(error, "status_code", None)
            found = {"message": str(error), "type": "InternalServerError", "param": None, "code": code}
            assert not processor.request_states
            yield f"data: {json.dumps({'error': found})}\n\n"

    return stream()


@pytest.mark.parametrize("kind", [completions, chat, vectors])
def test_a_failed_request_gets_its_error(kind: Any) -> None:
    async def read() -> list[str]:
        return [event async for event in kind()]

    events = [event.removeprefix("data: ").strip() for event in asyncio.run(read())]
    errors = [json.loads(event)["error"] for event in events if event != "[DONE]" and "error" in json.loads(event)]
    assert errors == [ERROR], events
