# SPDX-License-Identifier: Apache-2.0
"""Errors of one request, for requests whose outputs have no finish reason to carry one."""

from typing import Any


def fail(state: Any) -> list[Any]:
    """Give whoever waits for a pooling request the error that the API answers with 500; `state` is upstream's.

    Upstream's synchronous engine has nobody who waits, only outputs to return, one a request: there it is an output
    with an empty vector, and a line in the log.
    """
    import torch
    from vllm.entrypoints.openai.engine.protocol import GenerationError
    from vllm.logger import init_logger
    from vllm.outputs import PoolingOutput

    if state.queue is not None:
        state.queue.put(GenerationError())
        return []
    # vLLM sets up the logger "vllm" and what is below it; a name of our own would log nothing
    init_logger("vllm.ndt.request_errors").error(
        "Request %s ended with an error: its output is empty", state.external_req_id
    )
    return [state._new_request_output(state.external_req_id, [PoolingOutput(data=torch.empty(0))], True)]


def is_request_error(error: BaseException) -> bool:
    """Whether it is such an error."""
    from vllm.entrypoints.openai.engine.protocol import GenerationError

    return isinstance(error, GenerationError)
