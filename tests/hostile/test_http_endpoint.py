"""Strangers on the wire: whatever bytes they send, and however slowly, the next peer is served.

Everything here goes over real sockets. After every attack a normal exchange must still work, and
every receiver must have had exactly one end.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papaya.http.exchange import Exchange
from papaya.http.limits import ListenerLimits
from papaya.http.listener import Listener, serve
from papaya.http.routes import Buffered
from papaya.http.server_connection import REQUESTS_PER_TURN
from papaya.http.tls import Tls
from tests.unit.http.loopback import (
    IMPATIENT,
    LOOPS,
    ListTransport,
    Shop,
    a_client,
    a_request,
    a_server,
    a_service,
    responses_of,
    run,
    tls_contexts,
)

both_loops = pytest.mark.parametrize("loop", LOOPS)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The contexts of the server and of the client."""
    return tls_contexts(tmp_path_factory.mktemp("tls"))


@asynccontextmanager
async def under_attack(shop: Shop, limits: ListenerLimits = IMPATIENT) -> AsyncIterator[Listener]:
    """A server that must be as good as new when the attack is over."""
    async with a_server(shop.routes, limits) as server:
        yield server
        async with a_client(server.port) as client:
            assert (await client.ask("POST", "/echo", b"still here")).body == b"still here"
            assert (await client.ask("PUT", "/stream/z", 5000 * b"z")).body == 5000 * b"z"
    assert all(len(receiver.ends) == 1 for receiver in shop.receivers)


def attack(shop: Shop, data: bytes, *, hang_up: bool, loop: str = "uvloop") -> bytes:
    """Sends, and returns what came back until the server closed, or nothing if we close first."""

    async def main() -> bytes:
        async with under_attack(shop) as server, a_client(server.port) as client:
            client.send(data)
            if hang_up:
                return b""
            return await client.rest()

    return run(main(), loop)


VALID = a_request("PUT", "/stream/a", 300 * b"x") + a_request("POST", "/echo", b"hello")
GARBAGE = (
    st.binary(max_size=400)
    | st.tuples(st.integers(0, len(VALID)), st.binary(max_size=20)).map(
        lambda cut: VALID[: cut[0]] + cut[1] + VALID[cut[0] :]
    )
    | st.integers(0, len(VALID)).map(lambda end: VALID[:end])
    | st.tuples(st.integers(0, 120), st.integers(0, 120)).map(
        lambda cut: VALID[: cut[0]] + VALID[cut[0] + cut[1] :]
    )
)


@settings(max_examples=60)
@given(data=GARBAGE)
def test_garbage_and_an_early_hang_up(data: bytes) -> None:
    attack(Shop(), data, hang_up=True)


@settings(max_examples=25)
@given(data=GARBAGE, loop=st.sampled_from(sorted(LOOPS)))
def test_garbage_and_silence(data: bytes, loop: str) -> None:
    """The server ends it, and what it said until then is well-formed."""
    found = responses_of(attack(Shop(), data, hang_up=False, loop=loop))
    assert found or not data, "who says anything is answered"
    for response in found:
        assert response.status in (200, 400, 404, 405, 408, 411, 413, 414, 417, 431, 501, 505)


SMUGGLED = b"POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 8\r\n\r\nsmuggled"


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n", 411),
        (b"Transfer-Encoding: chunked\r\nContent-Length: 6\r\n", 411),
        (b"Transfer-Encoding: identity, chunked\r\n", 501),
        (b"Transfer-Encoding : chunked\r\nContent-Length: 6\r\n", 400),
        (b"Content-Length: 6\r\nContent-Length: 0\r\n", 400),
        (b"Content-Length: 0, 6\r\n", 400),
        (b"Content-Length: 6\r\n\tfolded: x\r\n", 400),
        (b"X: y\nContent-Length: 6\r\n", 400),
        (b"X: y\rContent-Length: 6\r\n", 400),
        (b"X\0: y\r\nContent-Length: 6\r\n", 400),
        (b"Content-Length: 6\r\nHost: other\r\n", 400),
    ],
)
@both_loops
def test_no_second_request_is_smuggled_in(lines: bytes, status: int, loop: str) -> None:
    shop = Shop()
    head = b"POST /echo HTTP/1.1\r\nHost: h\r\n" + lines + b"\r\n"
    (response,) = responses_of(
        attack(shop, head + b"0\r\n\r\n" + SMUGGLED, hang_up=False, loop=loop)
    )
    assert response.status == status
    assert response.headers["connection"] == "close"
    assert [body for _, _, body in shop.seen] == [b"still here"]


def test_a_body_that_looks_like_a_request_is_a_body() -> None:
    shop = Shop()

    async def main() -> None:
        async with under_attack(shop) as server, a_client(server.port) as client:
            for method, path in (("POST", "/echo"), ("PUT", "/stream/a"), ("POST", "/nowhere")):
                response = await client.ask(method, path, SMUGGLED)
                assert response.status in (200, 404)

    run(main())
    bodies = [body for _, _, body in shop.seen]
    assert bodies == [SMUGGLED, b"still here"]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: h\r\nX: " + 100_000 * b"x", 431),
        (b"GET / HTTP/1.1\r\nHost: h\r\n" + 5000 * b"a: b\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: h\r\n" + 70 * b"a: b\r\n" + b"\r\n", 431),
        (b"GET /" + 100_000 * b"x", 431),
        (b"POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 999999999999\r\n\r\nx", 413),
        (b"PUT /stream/a HTTP/1.1\r\nHost: h\r\nContent-Length: 999999999999\r\n\r\nx", 413),
        (b"GET / HTTP/1.1\nHost: h\n\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    ],
)
@both_loops
def test_too_much_of_anything_is_refused_at_once(data: bytes, status: int, loop: str) -> None:
    (response,) = responses_of(attack(Shop(), data, hang_up=False, loop=loop))
    assert response.status == status


@pytest.mark.parametrize(
    ("beginning", "drip", "status"),
    [
        (b"", b"", None),
        (b"POST /echo HT", b"", 408),
        (b"POST /echo HTTP/1.1\r\nX: ", b"x", 408),
        (b"POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 99999\r\n\r\n", b"", 408),
        (b"PUT /stream/a HTTP/1.1\r\nHost: h\r\nContent-Length: 99999\r\n\r\n", b"", 408),
        (b"PUT /stream/a HTTP/1.1\r\nHost: h\r\nContent-Length: 99999\r\n\r\n", b"x", 408),
        (b"POST /nowhere HTTP/1.1\r\nHost: h\r\nContent-Length: 9999\r\n\r\n", b"x", 404),
    ],
)
@both_loops
def test_slow_peers_are_cut_off(
    beginning: bytes, drip: bytes, status: int | None, loop: str
) -> None:
    """Slow loris: a byte now and then, to hold a connection for ever."""
    shop = Shop()

    async def main() -> bytes:
        async with under_attack(shop) as server, a_client(server.port) as client:
            client.send(beginning)
            answer = asyncio.create_task(client.rest())
            while drip and not (answer.done() or client.writer.is_closing()):
                client.send(drip)
                await asyncio.sleep(0.01)
            return await answer

    found = [response.status for response in responses_of(run(main(), loop))]
    assert found == ([] if status is None else [status])
    assert [receiver.ends for receiver in shop.receivers[:-1]] in ([], [["broken"]])


def test_an_idle_connection_is_closed_and_a_held_answer_is_not() -> None:
    shop = Shop()

    async def main() -> None:
        async with (
            under_attack(shop) as server,
            a_client(server.port) as idle,
            a_client(server.port) as held,
        ):
            held.send(a_request("POST", "/hold"))
            await idle.ask("GET", "/echo")
            assert await idle.rest() == b""
            shop.held[0].answer(200, b"worth waiting for")
            assert (await held.response()).body == b"worth waiting for"

    run(main())


@both_loops
def test_a_peer_that_does_not_read_is_cut_off(loop: str) -> None:
    shop = Shop()
    gone: list[str] = []

    def much(exchange: Exchange, body: bytes) -> None:
        exchange.answer(200, bytes(20 << 20))

    shop.routes.append(Buffered("GET", "/much", much))

    async def main() -> None:
        async with under_attack(shop) as server:
            with socket.create_connection(("127.0.0.1", server.port)) as peer:
                peer.sendall(a_request("GET", "/much"))
                while server.connections < 1:
                    await asyncio.sleep(0.001)
                while server.connections:
                    await asyncio.sleep(0.001)
                gone.append("cut off")

    run(main(), loop)
    assert gone


@both_loops
def test_one_connection_too_many(loop: str) -> None:
    async def main() -> None:
        limits = msgspec.structs.replace(IMPATIENT, max_connections=2, idle_timeout_s=60)
        async with under_attack(Shop(), limits) as server:
            async with a_client(server.port) as one, a_client(server.port) as two:
                await one.ask("GET", "/echo")
                await two.ask("GET", "/echo")
                async with a_client(server.port) as three:
                    three.send(a_request("POST", "/echo", b"x"))
                    response = await three.response()
                    assert response.status == 503
                    assert 5 <= int(response.headers["retry-after"]) <= 15
                    assert await three.rest() == b""
                assert (await one.ask("POST", "/echo", b"first in")).body == b"first in"
            while server.connections:
                await asyncio.sleep(0.001)

    run(main(), loop)


@both_loops
def test_a_thousand_pipelined_requests_are_answered_in_order(loop: str) -> None:
    shop = Shop()
    bodies = [b"%d" % number for number in range(1000)]

    async def main() -> None:
        async with under_attack(shop) as server, a_client(server.port) as client:
            client.send(b"".join(a_request("POST", "/echo", body) for body in bodies))
            for body in bodies:
                assert (await client.response()).body == body

    run(main(), loop)


@both_loops
@pytest.mark.parametrize("is_tls", [False, True])
def test_a_connection_that_pipelines_lets_others_go_first(
    loop: str, is_tls: bool, tls: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    """One that pipelines 404s got 5,187 answers in one turn of the loop; everybody else waited."""
    answered: list[int] = []  # the turn of the loop in which each request was answered

    async def main() -> None:
        turn = 0

        def count_turns() -> None:
            nonlocal turn
            turn += 1
            counting[0] = asyncio.get_running_loop().call_soon(count_turns)

        counting = [asyncio.get_running_loop().call_soon(count_turns)]
        server = await serve(
            [],
            "127.0.0.1",
            0,
            observe=lambda route, status, seconds: answered.append(turn),
            tls=Tls(tls[0]) if is_tls else None,
        )
        async with a_client(server.port, ssl=tls[1] if is_tls else None) as greedy:
            greedy.send(5000 * a_request("GET", "/nowhere"))
            for _ in range(5000):
                assert (await greedy.response()).status == 404
        counting[0].cancel()
        await server.drain(0)

    run(main(), loop)
    # A turn may begin with requests that were left over, and read new ones at its end.
    assert max(Counter(answered).values()) <= 2 * REQUESTS_PER_TURN


def test_what_is_pipelined_behind_a_held_answer_stays_in_the_peers_memory() -> None:
    shop = Shop()

    async def main() -> None:
        async with a_service(shop.routes) as service:
            transport = ListTransport(service)
            transport.feed(a_request("POST", "/hold"))
            transport.feed(a_request("POST", "/echo", b"x") * 10_000)
            assert transport.is_paused
            taken = 10_000 * len(a_request("POST", "/echo", b"x")) - len(transport.waiting)
            assert taken <= 2 * service.limits.max_head_bytes
            shop.held[0].answer(200)
            while len(shop.seen) < 10_000:
                await asyncio.sleep(0)
            assert not transport.waiting

    run(main(), "asyncio")


@both_loops
def test_a_flood_of_connections_that_die_at_once(loop: str) -> None:
    shop = Shop()

    async def main() -> None:
        async with under_attack(shop) as server:
            for number in range(200):
                with socket.create_connection(("127.0.0.1", server.port)) as peer:
                    peer.sendall(VALID[: number * 2])
                await asyncio.sleep(0)
            while server.connections:
                await asyncio.sleep(0.001)

    run(main(), loop)
