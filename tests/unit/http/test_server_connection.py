"""The endpoint over real sockets: what a route sees, what its peer gets, on both event loops."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from papaya.http.errors import HttpError, ListenError, MisuseError
from papaya.http.exchange import Exchange
from papaya.http.limits import ListenerLimits
from papaya.http.listener import serve
from papaya.http.routes import Buffered, HttpRoute
from tests.unit.http.loopback import (
    LOOPS,
    PATIENCE_S,
    PATIENT,
    ListTransport,
    PeerMistake,
    Response,
    Shop,
    a_client,
    a_request,
    a_server,
    a_service,
    answers,
    responses_of,
    run,
)

both_loops = pytest.mark.parametrize("loop", LOOPS)
BIG = bytes(range(256)) * 4096


@both_loops
def test_exchanges_follow_each_other_on_one_connection(loop: str) -> None:
    shop = Shop()
    found = answers(
        shop.routes,
        a_request("POST", "/echo", b"hello"),
        a_request("POST", "/echo", 50_000 * b"x"),
        a_request("PUT", "/stream/a", BIG),
        a_request("GET", "/echo"),
        loop=loop,
    )
    assert [response.status for response in found] == [200] * 4
    assert [response.body for response in found] == [b"hello", 50_000 * b"x", BIG, b""]
    assert found[0].headers["content-type"] == "application/json"
    assert "date" in found[0].headers


def test_a_route_sees_head_captures_and_peer() -> None:
    seen: list[tuple[str, dict[str, str], str]] = []

    def handle(exchange: Exchange, body: bytes) -> None:
        seen.append((exchange.head.query, exchange.captured, exchange.peer))
        exchange.answer(204, headers=[("X-Key", "value")])

    (response,) = answers([Buffered("GET", "/a/{b}", handle)], a_request("GET", "/a/c?d=e"))
    assert response.status == 204
    assert response.headers["x-key"] == "value"
    assert "content-length" not in response.headers
    ((query, captured, peer),) = seen
    assert (query, captured) == ("d=e", {"b": "c"})
    assert peer.startswith("127.0.0.1:")


def test_head_gets_the_head_of_get() -> None:
    routes: list[HttpRoute] = [
        Buffered("GET", "/a", lambda exchange, _: exchange.answer(200, b"12345"))
    ]
    head, get = answers(routes, a_request("HEAD", "/a"), a_request("GET", "/a"))
    assert (head.headers["content-length"], head.body) == ("5", b"")
    assert get.body == b"12345"


@pytest.mark.parametrize(
    ("request_line", "status"),
    [("GET /nowhere", 404), ("DELETE /echo", 405), ("POST /echo", 413), ("PUT /stream/x", 413)],
)
def test_what_no_route_takes_is_refused(request_line: str, status: int) -> None:
    shop = Shop()
    head = f"{request_line} HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999\r\n\r\n"

    async def main() -> Response:
        async with a_server(shop.routes) as server, a_client(server.port) as client:
            client.send(head.encode())
            response = await client.response()
            assert await client.rest() == b""
            return response

    response = run(main())
    assert response.status == status
    assert response.headers["connection"] == "close"
    assert b'"problem":' in response.body
    assert not shop.seen
    assert not shop.receivers


def failing(error: Exception) -> Callable[[Exchange, bytes], None]:
    def handle(exchange: Exchange, body: bytes) -> None:
        raise error

    return handle


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ValueError("secret of the server"), 500, "internal server error"),
        (MisuseError("secret of the server"), 500, "internal server error"),
        (PeerMistake("the crc is wrong"), 400, "the crc is wrong"),
        (HttpError(403, "not you"), 403, "not you"),
    ],
)
def test_a_route_that_raises(
    error: Exception, status: int, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "papaya.http"):
        found = answers(
            [Buffered("POST", "/bad", failing(error), 10), *Shop().routes],
            a_request("POST", "/bad", b"x"),
            a_request("POST", "/echo", b"still here"),
        )
    assert [response.status for response in found] == [status, 200]
    assert text in found[0].body.decode()
    assert b"secret" not in found[0].body
    assert ("secret of the server" in caplog.text) == (status == 500)


EXPECTING = b"Host: h\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"


@pytest.mark.parametrize("line", [b"POST /echo", b"PUT /stream/x"])
def test_a_peer_that_asks_first_is_told_to_go_on(line: bytes) -> None:
    async def main() -> None:
        async with a_server(Shop().routes) as server, a_client(server.port) as client:
            client.send(line + b" HTTP/1.1\r\n" + EXPECTING)
            assert (await client.response()).status == 100
            client.send(b"hello")
            assert (await client.response()).body == b"hello"

    run(main())


def test_a_peer_that_asks_first_is_refused_before_it_sends() -> None:
    async def main() -> None:
        async with a_server(Shop().routes) as server, a_client(server.port) as client:
            client.send(b"PUT /nowhere HTTP/1.1\r\n" + EXPECTING)
            response = await client.response()
            # Five bytes of a body or the next request could follow: nobody can tell.
            assert (response.status, response.headers["connection"]) == (404, "close")
            assert await client.rest() == b""

    run(main())


@both_loops
def test_an_answer_may_be_held_back_and_a_pipelined_request_waits_for_it(loop: str) -> None:
    shop = Shop()

    async def main() -> None:
        async with a_server(shop.routes) as server, a_client(server.port) as client:
            client.send(a_request("POST", "/hold") + a_request("POST", "/echo", b"second"))
            async with a_client(server.port) as other:
                await other.ask("GET", "/echo")
            while not shop.held:  # the kernel may deliver what was sent second first
                await asyncio.sleep(0)
            assert shop.seen == [("GET", "/echo", b"")]
            shop.held[0].answer(200, b"first")
            assert (await client.response()).body == b"first"
            assert (await client.response()).body == b"second"

    run(main(), loop)


@both_loops
def test_a_route_hears_that_its_peer_has_hung_up(loop: str) -> None:
    async def main() -> list[str]:
        calls: list[str] = []
        gone = asyncio.Event()

        def hold(exchange: Exchange, body: bytes) -> None:
            exchange.on_gone(lambda: calls.append("gone"))
            exchange.on_gone(gone.set)
            held.append(exchange)

        held: list[Exchange] = []
        async with a_server([Buffered("POST", "/hold", hold)]) as server:
            async with a_client(server.port) as client:
                client.send(a_request("POST", "/hold"))
                while not held:  # until the server has it
                    await asyncio.sleep(0)
            await gone.wait()
            assert not held[0].is_open
            held[0].answer(200, b"nobody listens")
            held[0].on_gone(lambda: calls.append("at once"))
        return calls

    assert run(main(), loop) == ["gone", "at once"]


def test_an_exchange_is_answered_once() -> None:
    problems: list[MisuseError] = []

    def twice(exchange: Exchange, body: bytes) -> None:
        exchange.on_gone(lambda: problems.append(MisuseError("it was answered")))
        exchange.answer(200, b"one")
        try:
            exchange.answer(200, b"two")
        except MisuseError as error:
            problems.append(error)

    found = answers([Buffered("GET", "/x", twice)], *[a_request("GET", "/x")] * 2)
    assert [response.body for response in found] == [b"one", b"one"]
    assert len(problems) == 2


def test_a_header_cannot_smuggle_a_second_answer() -> None:
    def split(exchange: Exchange, body: bytes) -> None:
        exchange.answer(200, b"", [("X-Name", "a\r\nX-Evil: b")])

    (response,) = answers([Buffered("GET", "/x", split)], a_request("GET", "/x"))
    assert response.status == 500
    assert "x-evil" not in response.headers


@both_loops
def test_a_file_is_sent_whole(loop: str, tmp_path: Path) -> None:
    big, empty = tmp_path / "big", tmp_path / "empty"
    big.write_bytes(5 * BIG)
    empty.write_bytes(b"")
    routes: list[HttpRoute] = [
        Buffered("GET", "/big", lambda e, _: e.answer_file(big, [("ETag", '"x"')])),
        Buffered("GET", "/empty", lambda e, _: e.answer_file(empty)),
        Buffered("GET", "/missing", lambda e, _: e.answer_file(tmp_path / "missing")),
    ]
    requests = [("HEAD", "/big"), ("GET", "/big"), ("GET", "/empty"), ("GET", "/missing")]
    head, whole, nothing, missing = answers(
        routes, *[a_request(method, path) for method, path in requests], loop=loop
    )
    assert (head.headers["content-length"], head.body) == (str(5 * len(BIG)), b"")
    assert whole.body == 5 * BIG
    assert (whole.headers["etag"], whole.headers["content-type"]) == (
        '"x"',
        "application/octet-stream",
    )
    assert (nothing.status, nothing.body) == (200, b"")
    assert missing.status == 404


class Narrow(ListTransport):
    """Takes little at a time, as a transport does whose peer reads slowly."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        super().write(data)
        if len(data) > 1000:
            self.endpoint.pause_writing()


def test_a_file_waits_for_a_peer_that_reads_slowly(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(BIG)

    async def main() -> None:
        route = Buffered("GET", "/file", lambda e, _: e.answer_file(file))
        async with a_service([route]) as service:
            transport = Narrow(service)
            transport.feed(a_request("GET", "/file") * 2)
            sent = []
            while len(transport.sent) < 2 * len(BIG):
                for _ in range(5):
                    await asyncio.sleep(0)
                sent.append(len(transport.sent))
                transport.endpoint.resume_writing()
            assert all(after - before < len(BIG) / 2 for before, after in pairwise([0, *sent]))
            assert [response.body for response in responses_of(transport.sent)] == [BIG, BIG]

    run(main())


def test_connection_close_is_honoured() -> None:
    async def main() -> None:
        async with a_server(Shop().routes) as server, a_client(server.port) as client:
            client.send(a_request("POST", "/echo", b"x", [("Connection", "close")]))
            assert (await client.response()).headers["connection"] == "close"
            assert await client.rest() == b""

    run(main())


def test_draining_waits_for_the_open_exchange_and_turns_others_away() -> None:
    shop = Shop()

    async def main() -> None:
        server = await serve(shop.routes, "127.0.0.1", 0, limits=PATIENT)
        async with a_client(server.port) as client, a_client(server.port) as idle:
            await idle.ask("GET", "/echo")
            client.send(a_request("POST", "/hold"))
            while not shop.held:  # until the server has it
                await asyncio.sleep(0)
            draining = asyncio.create_task(server.drain(PATIENCE_S))
            assert await idle.rest() == b""
            with pytest.raises(OSError, match="refused"):
                await asyncio.open_connection("127.0.0.1", server.port)
            assert not draining.done()
            shop.held[0].answer(200, b"last")
            response = await client.response()
            assert (response.body, response.headers["connection"]) == (b"last", "close")
            await draining

    run(main())


def test_draining_cuts_off_who_does_not_end_in_time() -> None:
    shop = Shop()

    async def main() -> None:
        server = await serve(shop.routes, "127.0.0.1", 0)
        async with a_client(server.port) as client:
            client.send(a_request("POST", "/hold"))
            while not shop.held:  # until the server has it
                await asyncio.sleep(0)
            await server.drain(0.01)
            assert await client.rest() == b""
            assert not shop.held[0].is_open
            assert server.connections == 0

    run(main())


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_cannot_be_listened_on_is_an_error(host: str) -> None:
    async def main() -> bool:
        async with a_server([]) as server:
            with pytest.raises(ListenError, match=host) as refused:
                await serve([], host, server.port)
            return refused.value.is_in_use

    assert run(main()) == (host == "127.0.0.1")


@both_loops
def test_who_is_not_admitted_is_answered_before_the_body(loop: str) -> None:
    handled: list[bytes] = []

    def handle(exchange: Exchange, body: bytes) -> None:
        handled.append(body)
        exchange.answer(200)

    def admits(exchange: Exchange) -> bool:
        if exchange.head.headers.get("token") == "right":
            return True
        exchange.answer(401)
        return False

    async def main() -> None:
        async with a_server([Buffered("POST", "/x", handle, 1 << 20, admits)]) as server:
            async with a_client(server.port) as client:
                client.send(a_request("POST", "/x", 1000 * b"x")[:-1])
                assert (await client.response()).status == 401, "and its last byte never came"
            async with a_client(server.port) as client:
                client.send(a_request("POST", "/x", b"whole"))
                assert (await client.response()).status == 401
                client.send(a_request("POST", "/x", b"mine", [("Token", "right")]))
                assert (await client.response()).status == 200

    run(main(), loop)
    assert handled == [b"mine"]


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_file_does_not_hold_the_loop_if_the_socket_takes_everything(
    is_lost: bool, tmp_path: Path
) -> None:
    """`is_lost`: the first write finds a closed socket. Then no more of the file is read."""

    class Losing(ListTransport):
        def write(self, data: bytes | bytearray | memoryview) -> None:
            super().write(data)
            self.close()

    file = tmp_path / "file"
    file.write_bytes(8 * BIG)

    async def main() -> None:
        route = Buffered("GET", "/file", lambda e, _: e.answer_file(file))
        async with a_service([route]) as service:
            transport = (Losing if is_lost else ListTransport)(service)
            transport.feed(a_request("GET", "/file"))
            sent = [0, len(transport.sent)]
            while sent[-1] != sent[-2] or len(sent) < 5:
                await asyncio.sleep(0)
                sent.append(len(transport.sent))
            assert all(after - before < 2 * len(BIG) for before, after in pairwise(sent))
            assert sent[-1] < len(BIG) if is_lost else sent[-1] > 8 * len(BIG)

    run(main())


@both_loops
def test_a_slow_peer_that_reads_all_the_time_keeps_its_download(loop: str, tmp_path: Path) -> None:
    """The kernel stores megabytes of an answer, and takes more only when a third is gone."""
    size, piece, window = 64 << 20, 96 << 10, 32 << 10
    (tmp_path / "model").write_bytes(bytes(size))
    route = Buffered("GET", "/model", lambda exchange, _: exchange.answer_file(tmp_path / "model"))
    limits = ListenerLimits(sweep_s=3600)  # the test checks the timeouts, at times of its own

    async def main(peer: socket.socket) -> None:
        peer.setblocking(False)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        here = asyncio.get_running_loop()

        async def read(count: int) -> None:
            while count:
                count -= len(await here.sock_recv(peer, count))

        async with a_server([route], limits) as server:
            await here.sock_connect(peer, ("127.0.0.1", server.port))
            await here.sock_sendall(peer, a_request("GET", "/model"))
            await read(piece)
            [connection] = server._state.connections
            now = here.time()

            async def check() -> bool:
                """Is the connection still open after the next check?"""
                nonlocal now
                while not connection._out.unsent:
                    await asyncio.sleep(0)
                now += 0.9 * limits.answer_pause_s
                connection.check_timeouts(now)
                return not connection._transport.is_closing()

            for _ in range(10):
                assert await check()
                # More than fits into its window, so what it got before was acknowledged.
                await read(piece)
            # It reads no more. An acknowledgement may arrive late, and then counts at that check.
            open_after = [await check() for _ in range(2)]
            while open_after[-1] and len(open_after) < 5:
                open_after.append(await check())
            assert open_after[0]
            assert not open_after[-1]

    with socket.socket() as peer:
        run(main(peer), loop)
