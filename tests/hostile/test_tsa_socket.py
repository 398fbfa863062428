"""Strangers at the TSA's socket: nothing they send ends it, holds it up or tells them."""

from __future__ import annotations

import socket
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import replace
from threading import Event

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from papaya.tsa import endpoint, wire
from papaya.tsa.errors import RefusalReason, TsaRefused, Unavailable
from papaya.tsa.process import (
    ADMISSIONS_PER_TURN,
    MAX_CONNECTIONS,
    MAX_STRANGERS,
    REQUESTS_PER_TURN,
)
from papaya.tsa.service import NOT_PROVED, ReplyParts, TsaService, TsaSession
from papaya.tsa.tsa import TSA, TsaStatus
from tests.unit.secagg.builders import NOW, Deployment, a_task, entropy, with_byte_changed
from tests.unit.tsa.running import (
    CLUSTER,
    PATIENCE_S,
    a_client,
    authenticated,
    received,
    running,
    serving,
)

DONE = wire.frame(wire.DONE)


@given(st.binary(max_size=300))
def test_any_bytes_get_a_refusal(body: bytes) -> None:
    deployment = Deployment()
    session = serving(deployment.tsa, deployment.parameters)
    for operation in (*wire.Operation, 0, 77, 255):
        [answer, *_] = session.answer(bytes((operation,)) + body, NOW)
        expected = operation == wire.Operation.IDENTITY and not body
        assert (answer[4] == wire.DONE) == expected
        assert answer[4] != RefusalReason.INTERNAL
    deployment.tsa.check()


def test_a_changed_byte_in_any_request_breaks_nothing() -> None:
    deployment = Deployment()
    session = serving(deployment.tsa, deployment.parameters)
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
            [answer, *_] = session.answer(with_byte_changed(request, position)[4:], NOW)
            assert answer[4] != RefusalReason.INTERNAL
            deployment.tsa.check()


def test_a_bug_is_answered_and_tells_nothing() -> None:
    def broken(_: bytes) -> bytes:
        raise RuntimeError("the seed is 0123456789abcdef")

    deployment = Deployment()
    session = serving(deployment.tsa, deployment.parameters, broken)
    request = wire.task_request(wire.Operation.EVIDENCE, deployment.hash)
    [answer] = session.answer(request[4:], NOW)
    assert answer[4] == RefusalReason.INTERNAL
    assert b"0123456789abcdef" not in bytes(answer)


STRANGER = Ed25519PrivateKey.from_private_bytes(bytes(32))


def _requests_about(deployment: Deployment, index: int, sealed: bytes) -> list[bytes]:
    return [
        wire.offers_request(deployment.hash, 3),
        wire.accept_request(index, 0, sealed),
        wire.release_request(deployment.hash, 0, [index]),
        wire.group_request(wire.Operation.DROP, deployment.hash, 0),
        wire.task_request(wire.Operation.FORGET, deployment.hash),
        wire.task_request(wire.Operation.STATUS, deployment.hash),
        wire.task_request(wire.Operation.EVIDENCE, deployment.hash),
    ]


def _asked(peer: socket.socket, request: bytes) -> bytes:
    """The answer, without its length prefix."""
    peer.sendall(request)
    return received(peer, int.from_bytes(received(peer, 4)))


def _authenticate(peer: socket.socket, key: Ed25519PrivateKey) -> None:
    identity = _asked(peer, wire.identity_request())[2:]
    proof = key.sign(wire.proof_of(identity[:32], identity[32:]))
    request = wire.authenticate_request(key.public_key().public_bytes_raw(), proof)
    assert _asked(peer, request) == DONE[4:]


def _held(peer: socket.socket, deployment: Deployment) -> TsaStatus:
    """The status of the task without `waiting_seeds`: the TSA adds them up whenever it is idle."""
    answer = _asked(peer, wire.task_request(wire.Operation.STATUS, deployment.hash))
    assert answer[0] == wire.DONE
    return replace(wire.decode_status(answer[1:]), waiting_seeds=0)


@pytest.mark.parametrize("key", [None, STRANGER], ids=["no key", "another key"])
@pytest.mark.parametrize("address", [None, "tcp:127.0.0.1:0"], ids=["unix", "tcp"])
def test_a_stranger_who_knows_the_public_parameters_can_do_nothing(
    address: str | None, key: Ed25519PrivateKey | None
) -> None:
    """Before, any local user could send FORGET, and acknowledged updates were gone."""
    deployment = Deployment()
    taken, offered = deployment.any_sealed(), deployment.any_sealed()
    register = wire.register_request(deployment.parameters.encode())
    service = TsaService(deployment.tsa, lambda bound: b"a quote")
    with (
        running(address, service=service) as where,
        endpoint.connect(where, PATIENCE_S) as ours,
        endpoint.connect(where, PATIENCE_S) as theirs,
    ):
        _authenticate(ours, CLUSTER)
        assert _asked(ours, register)[0] == wire.DONE
        assert _asked(ours, wire.accept_request(taken.index, 0, taken.sealed)) == DONE[4:]
        before = _held(ours, deployment)

        if key is not None:
            _authenticate(theirs, key)
        for update in (taken, offered):
            for request in _requests_about(deployment, update.index, update.sealed):
                answer = _asked(theirs, request)
                assert answer[0] != wire.DONE, wire.Operation(request[4])
        refused = (RefusalReason.NOT_AUTHENTICATED, RefusalReason.OTHER_CLUSTER)
        assert _asked(theirs, register)[0] in refused
        assert _held(ours, deployment) == before
        assert _asked(ours, wire.accept_request(offered.index, 0, offered.sealed)) == DONE[4:]


def test_a_proof_is_good_for_one_connection_and_one_key() -> None:
    service = TsaService(Deployment().tsa)
    sessions = [service.session(), service.session()]
    identities = [bytes(s.answer(wire.identity_request()[4:], NOW)[0][6:]) for s in sessions]
    assert identities[0] != identities[1], "the challenge differs"
    proof = wire.proof_of(identities[0][:32], identities[0][32:])
    public = CLUSTER.public_key().public_bytes_raw()
    good = wire.authenticate_request(public, CLUSTER.sign(proof))[4:]
    stolen = wire.authenticate_request(public, STRANGER.sign(proof))[4:]
    no_key = wire.authenticate_request(b"\xff" * 32, CLUSTER.sign(proof))[4:]
    for session, request in ((sessions[1], good), (sessions[0], stolen), (sessions[0], no_key)):
        [answer] = session.answer(request, NOW)
        assert answer[4] == RefusalReason.NOT_AUTHENTICATED
    assert sessions[0].answer(good, NOW) == [DONE]


def test_whoever_forgets_a_task_may_leave_it_to_others() -> None:
    deployment = Deployment()
    service = TsaService(deployment.tsa)
    ours, theirs = authenticated(service), authenticated(service, STRANGER)
    register = wire.register_request(deployment.parameters.encode())[4:]
    forget = wire.task_request(wire.Operation.FORGET, deployment.hash)[4:]
    for session in (ours, theirs):
        assert session.answer(register, NOW)[0][4] == wire.DONE
        assert session.answer(forget, NOW)[0][4] == wire.DONE


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
    with running() as where, a_client(where) as client:
        with endpoint.connect(where, PATIENCE_S) as stranger:
            stranger.sendall(sent)
            assert stranger.recv(1) == b""
        assert client.register(a_task())


def test_a_stranger_who_stops_in_the_middle_holds_up_nobody() -> None:
    with running() as where, endpoint.connect(where, PATIENCE_S) as stranger:
        stranger.sendall(wire.register_request(a_task().encode())[:-1])
        with a_client(where) as client:
            assert client.register(a_task())
        stranger.sendall(b"}")
        assert received(stranger, 5)[4] == RefusalReason.NOT_AUTHENTICATED


def test_a_stranger_who_never_reads_holds_up_nobody() -> None:
    """Its requests stay in its own socket once its answers fill the other direction."""
    with running() as where, endpoint.connect(where, PATIENCE_S) as stranger:
        stranger.setblocking(False)
        flood = wire.task_request(wire.Operation.STATUS, bytes(32)) * 20_000
        sent = 0
        with suppress(BlockingIOError):
            while sent < 100 * len(flood):
                sent += stranger.send(flood)
        assert sent < 100 * len(flood)
        with a_client(where) as client:
            assert client.register(a_task())


def test_requests_that_come_together_are_answered_in_order() -> None:
    with running() as where, endpoint.connect(where, PATIENCE_S) as peer:
        public = CLUSTER.public_key().public_bytes_raw()
        refused = wire.authenticate_request(public, bytes(64))
        peer.sendall(refused + wire.identity_request() + refused)
        expected = wire.encode_refusal(TsaRefused(RefusalReason.NOT_AUTHENTICATED, NOT_PROVED))
        assert received(peer, len(expected)) == expected
        assert received(peer, 70)[4:6] == bytes((wire.DONE, wire.VERSION))
        assert received(peer, len(expected)) == expected


class Watched(TsaService):
    """`answered` has the number of the connection of each request. All wait for `may_go_on`."""

    def __init__(self) -> None:
        super().__init__(TSA(entropy("TSA")))
        self.answered: list[int] = []
        self.sessions = 0
        self.may_go_on = Event()

    def session(self) -> TsaSession:
        self.sessions += 1
        return WatchedSession(self, self.sessions)


class WatchedSession(TsaSession):
    def __init__(self, watched: Watched, number: int) -> None:
        super().__init__(watched, bytes(wire.CHALLENGE_BYTES))
        self._watched = watched
        self._number = number

    def answer(self, request: bytes, now: float) -> ReplyParts:
        assert self._watched.may_go_on.wait(PATIENCE_S)
        self._watched.answered.append(self._number)
        return super().answer(request, now)


def test_strangers_with_many_requests_hold_up_nobody() -> None:
    """Before, each got some 650 answers in a turn of the loop, and one connection was accepted."""
    service, public = Watched(), CLUSTER.public_key().public_bytes_raw()
    flood = 600 * wire.authenticate_request(public, bytes(64))
    refusal = wire.encode_refusal(TsaRefused(RefusalReason.NOT_AUTHENTICATED, NOT_PROVED))
    with running(service=service) as where, ExitStack() as stack:
        crowd: list[socket.socket] = []
        for _ in range(MAX_STRANGERS - 1):
            crowd.append(stack.enter_context(endpoint.connect(where, PATIENCE_S)))
            crowd[-1].sendall(flood)
        newcomer = stack.enter_context(endpoint.connect(where, PATIENCE_S))
        newcomer.sendall(wire.identity_request())
        service.may_go_on.set()
        assert received(newcomer, 70)[4] == wire.DONE
        before = service.answered[: service.answered.index(MAX_STRANGERS)]
        # It is answered in the turn after the one that accepts it.
        turns = 2 + MAX_STRANGERS // ADMISSIONS_PER_TURN
        assert max(Counter(before).values()) <= turns * REQUESTS_PER_TURN
        for stranger in crowd:
            assert received(stranger, 600 * len(refusal)) == 600 * refusal


def test_strangers_who_talk_do_not_cut_off_one_who_is_about_to_authenticate() -> None:
    """Before, the stranger that was silent longest was closed. Aggregators need a moment to sign,
    and strangers do not.
    """

    def identity(peer: socket.socket) -> bytes:
        peer.sendall(wire.identity_request())
        return received(peer, 70)[6:]

    with running() as where, ExitStack() as stack:
        peers = [
            stack.enter_context(endpoint.connect(where, PATIENCE_S)) for _ in range(MAX_STRANGERS)
        ]
        *crowd, newcomer = peers
        theirs = identity(newcomer)
        for stranger in crowd:
            identity(stranger)
        identity(stack.enter_context(endpoint.connect(where, PATIENCE_S)))  # one too many
        proof = CLUSTER.sign(wire.proof_of(theirs[:32], theirs[32:]))
        newcomer.sendall(wire.authenticate_request(CLUSTER.public_key().public_bytes_raw(), proof))
        assert received(newcomer, len(DONE)) == DONE
        assert crowd[0].recv(1) == b""


def test_a_crowd_of_silent_strangers_keeps_nobody_out() -> None:
    with running() as where:
        crowd: list[socket.socket] = []
        try:
            crowd.extend(endpoint.connect(where, PATIENCE_S) for _ in range(MAX_STRANGERS))
            with a_client(where) as client:
                assert client.register(a_task())
            assert crowd[0].recv(1) == b""
        finally:
            for stranger in crowd:
                stranger.close()


def test_strangers_do_not_cut_off_an_authenticated_connection() -> None:
    """Before, the connection that was silent longest was closed, whosever it was."""
    with running() as where, a_client(where) as client, ExitStack() as crowd:
        for _ in range(2 * MAX_CONNECTIONS):
            crowd.enter_context(endpoint.connect(where, PATIENCE_S))
        with a_client(where) as other:  # accepted after the whole crowd
            assert other.register(a_task())
        assert client.register(a_task())


def test_too_many_authenticated_connections_close_the_oldest() -> None:
    with running() as where, ExitStack() as stack:
        clients = [stack.enter_context(a_client(where)) for _ in range(MAX_CONNECTIONS + 1)]
        assert clients[-1].register(a_task())
        with pytest.raises(Unavailable):
            clients[0].register(a_task())
