# SPDX-License-Identifier: Apache-2.0
"""Patch end-load-on-signal: a signal that comes while the front end waits for its engine ends the wait."""

import contextlib


def test_an_interrupt_leaves_the_sockets_context() -> None:
    import zmq
    from vllm.utils.network_utils import zmq_socket_ctx

    seen = None
    try:
        with zmq_socket_ctx("inproc://handshake", zmq.ROUTER, bind=True) as socket:
            raise KeyboardInterrupt("terminated")
    except KeyboardInterrupt as stop:
        seen = str(stop)
    assert seen == "terminated"
    assert socket.closed


def test_other_ends_are_as_upstream_has_them() -> None:
    import zmq
    from vllm.utils.network_utils import zmq_socket_ctx

    with zmq_socket_ctx("inproc://handshake", zmq.ROUTER, bind=True) as socket:
        assert not socket.closed
    assert socket.closed
    with contextlib.suppress(RuntimeError), zmq_socket_ctx("inproc://handshake", zmq.ROUTER, bind=True) as socket:
        raise RuntimeError
    assert socket.closed
