# SPDX-License-Identifier: Apache-2.0
"""Errors of one request, for requests whose outputs have no finish reason to carry one."""

from typing import Any


def fail(queue: Any) -> None:
    """Give whoever waits for a request at upstream's RequestOutputCollector the error that the API answers with 500.

    Raises it at once where nobody waits (`queue` is None): upstream's synchronous engine has one caller.
    """
    from vllm.entrypoints.openai.engine.protocol import GenerationError

    error = GenerationError()
    if queue is None:
        raise error
    queue.put(error)


def is_request_error(error: BaseException) -> bool:
    """Whether it is such an error."""
    from vllm.entrypoints.openai.engine.protocol import GenerationError

    return isinstance(error, GenerationError)
