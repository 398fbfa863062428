"""Strangers at the TSA's socket: nothing they send ends it, holds it up or tells them."""

from __future__ import annotations

import socket
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.tsa import endpoint, wire
from papaya.tsa.client import TsaClient
from papaya.tsa.errors import RefusalReason
from papaya.tsa.process import MAX_CONNECTIONS
from papaya.tsa.service import TsaService
from tests.unit.secagg.builders import NOW, Deployment, a_task, with_byte_changed
from tests.unit.tsa.running import received, running


@given(st.binary(max_size=300))
def test_any_bytes_get_a_refusal(body: bytes) -> None:
    deployment = Deployment()
    service = TsaService(deployment.tsa)
    for operation in (*wire.Operation, 0, 77, 255):
        [answer, *_] = service.answer(bytes((operation,)) + body, NOW)
        expected = operation == wire.Operation.IDENTITY and not body
        assert (answer[4] == wire.DONE) == expected
        assert answer[4] != RefusalReason.INTERNAL
    deployment.tsa.check()


def test_a_changed_byte_in_any_request_breaks_nothing() -> None:
    deployment = Deployment()
    service = TsaService(deployment.tsa)
    update = deployment.any_sealed()
    requests = [
        wire.register_request(deployment.parameters.encode()),
        wire.offers_request(deployment.hash, 3),
        wire.accept_request(update.index, 0, update.sealed),
        wire.release_request(deployment.hash, 0, [update.index]),
        wire.group_request(wire.Operation.DROP, deployment.hash, 0),
        wire.task_request(wire.Operation.STATUS, deployment.hash),
    ]
    for request in requests:
        for position in range(4, len(request)):
            [answer, *_] = service.answer(with_byte_changed(request, position)[4:], NOW)
            assert answer[4] != RefusalReason.INTERNAL
            deployment.tsa.check()


def test_a_bug_is_answered_and_tells_nothing() -> None:
    def broken(_: bytes) -> bytes:
        raise RuntimeError("the seed is 0123456789abcdef")

    deployment = Deployment()
    service = TsaService(deployment.tsa, broken)
    request = wire.task_request(wire.Operation.EVIDENCE, deployment.hash)
    [answer] = service.answer(request[4:], NOW)
    assert answer[4] == RefusalReason.INTERNAL
    assert b"0123456789abcdef" not in bytes(answer)


@pytest.mark.parametrize(
    "sent",
    [
        b"\0\0\0\0",
        b"\xff\xff\xff\xff",
        b"\0\x10\0\1",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_a_length_that_no_request_has_ends_the_connection(sent: bytes) -> None:
    with running() as where, TsaClient(where) as client:
        with endpoint.connect(where, 30) as stranger:
            stranger.sendall(sent)
            assert stranger.recv(1) == b""
        assert client.register(a_task())


def test_a_stranger_who_stops_in_the_middle_holds_up_nobody() -> None:
    with running() as where, endpoint.connect(where, 30) as stranger:
        stranger.sendall(wire.register_request(a_task().encode())[:-1])
        with TsaClient(where) as client:
            assert client.register(a_task())
        stranger.sendall(b"}")
        assert received(stranger, 37) == wire.frame(wire.DONE, a_task().digest())


def test_a_stranger_who_never_reads_holds_up_nobody() -> None:
    """Its requests stay in its own socket once its answers fill the other direction."""
    with running() as where, endpoint.connect(where, 30) as stranger:
        stranger.setblocking(False)
        flood = wire.task_request(wire.Operation.STATUS, bytes(32)) * 20_000
        sent = 0
        with suppress(BlockingIOError):
            while sent < 100 * len(flood):
                sent += stranger.send(flood)
        assert sent < 100 * len(flood)
        with TsaClient(where) as client:
            assert client.register(a_task())


def test_requests_that_come_together_are_answered_in_order() -> None:
    with running() as where, endpoint.connect(where, 30) as peer:
        register = wire.register_request(a_task().encode())
        peer.sendall(register + wire.identity_request() + register)
        expected = wire.frame(wire.DONE, a_task().digest())
        assert received(peer, 37) == expected
        assert received(peer, 38)[4:6] == bytes((wire.DONE, wire.VERSION))
        assert received(peer, 37) == expected


def test_a_crowd_of_silent_strangers_keeps_nobody_out() -> None:
    with running() as where:
        crowd: list[socket.socket] = []
        try:
            crowd.extend(endpoint.connect(where, 30) for _ in range(MAX_CONNECTIONS))
            with TsaClient(where) as client:
                assert client.register(a_task())
            assert crowd[0].recv(1) == b""
        finally:
            for stranger in crowd:
                stranger.close()
