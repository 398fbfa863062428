"""Connections between servers: kept, bounded, replaced once, and never silent about a failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from threading import Thread

import pytest

from papaya.http.client_connection import ClientConnection
from papaya.http.errors import HttpError, PeerUnavailable
from papaya.http.exchange import Exchange
from papaya.http.limits import ListenerLimits, PeerLimits
from papaya.http.pool import ConnectionPool
from papaya.http.routes import Buffered
from tests.unit.http.loopback import LOOPS, PATIENCE_S, PatientPool, Shop, a_server, run

both_loops = pytest.mark.parametrize("loop", LOOPS)

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@asynccontextmanager
async def some_connections(limits: PeerLimits | None = None) -> AsyncIterator[ConnectionPool]:
    connections = PatientPool(limits=limits)
    try:
        yield connections
    finally:
        await connections.close()


@asynccontextmanager
async def a_strange_server(script: Script) -> AsyncIterator[str]:
    """Speaks as the script does; each connection runs it once, then closes."""
    tasks: list[asyncio.Task[None]] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await script(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.create_task(talk(reader, writer)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@both_loops
def test_a_connection_is_used_again(loop: str) -> None:
    peers: list[str] = []

    def echo(exchange: Exchange, body: bytes) -> None:
        peers.append(exchange.peer)
        exchange.answer(201, body)

    async def main() -> None:
        async with (
            a_server([Buffered("POST", "/x", echo, 99)]) as server,
            some_connections() as connections,
        ):
            address = f"127.0.0.1:{server.port}"
            for _ in range(3):
                response = await connections.request(address, "POST", "/x", [("A", "b")], b"body")
                assert (response.status, response.body) == (201, b"body")
                assert response.headers["content-type"] == "application/json"
            head = await connections.request(address, "HEAD", "/nowhere")
            assert (head.status, head.body) == (404, b"")

    run(main(), loop)
    assert len(set(peers)) == 1


@both_loops
def test_a_kept_connection_that_was_closed_is_replaced_once(loop: str) -> None:
    heard: list[int] = []

    async def one_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        heard.append(1)
        writer.write(OK)
        await reader.readuntil(b"\r\n\r\n")  # and closes without a word

    async def main() -> None:
        async with a_strange_server(one_answer) as address, some_connections() as connections:
            for _ in range(3):
                assert (await connections.request(address, "GET", "/")).body == b"ok"

    run(main(), loop)
    assert len(heard) == 3


def test_a_new_connection_that_is_closed_is_not_tried_again() -> None:
    heard: list[int] = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        heard.append(1)

    async def main() -> None:
        async with a_strange_server(silent) as address, some_connections() as connections:
            with pytest.raises(PeerUnavailable, match="without an answer"):
                await connections.request(address, "GET", "/")

    run(main())
    assert len(heard) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + 20_000 * b"x",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nfour",
        b"HTTP/1.1 200",
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
)
def test_an_answer_that_is_none(answer: bytes) -> None:
    async def strange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()

    async def main() -> None:
        limits = PeerLimits(max_response_bytes=1000)
        async with a_strange_server(strange) as address, some_connections(limits) as connections:
            with pytest.raises(HttpError) as refused:
                await connections.request(address, "GET", "/")
            assert refused.value.status in (502, 503)

    run(main())


def test_what_follows_an_answer_unasked_ends_the_connection() -> None:
    connected: list[int] = []

    async def talkative(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.append(1)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + OK)
        await reader.read()

    async def main() -> None:
        async with a_strange_server(talkative) as address, some_connections() as connections:
            for _ in range(2):
                assert (await connections.request(address, "GET", "/")).body == b"ok"

    run(main())
    assert len(connected) == 2


def test_a_server_that_does_not_answer_in_time() -> None:
    shop = Shop()

    async def main() -> None:
        async with a_server(shop.routes) as server, some_connections() as connections:
            address = f"127.0.0.1:{server.port}"
            with pytest.raises(PeerUnavailable, match=r"did not answer within 0\.05 s"):
                await connections.request(address, "POST", "/hold", timeout_s=0.05)
            assert (await connections.request(address, "POST", "/echo", (), b"x")).body == b"x"

    run(main())


def test_nobody_listens() -> None:
    async def main() -> None:
        # One place and no queue: whoever fails must leave the place to the next.
        limits = PeerLimits(max_connections=1, max_waiting=0)
        async with a_server([]) as server, some_connections(limits) as connections:
            address = f"127.0.0.1:{server.port}"
            await server.drain(0)
            with pytest.raises(PeerUnavailable, match=f"cannot connect to {address}"):
                await connections.request(address, "GET", "/")
            upload = connections.open_upload(address, "PUT", "/", (), 4, PATIENCE_S)
            upload.write(b"data")
            with pytest.raises(PeerUnavailable, match="cannot connect"):
                await upload.answer

    run(main())


def test_a_name_cannot_be_looked_up_at_a_limit_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The callers answer devices that wait, as for any server that cannot be reached."""

    def refuse(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        limits = PeerLimits(max_connections=1, max_waiting=0)
        async with a_server([]) as server, some_connections(limits) as connections:
            address = f"localhost:{server.port}"
            # Without a thread that is idle since the listener looked up its own address.
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())
            with monkeypatch.context() as limit:
                limit.setattr(Thread, "start", refuse)
                for _ in range(2):
                    with pytest.raises(PeerUnavailable, match="can't start new thread"):
                        await connections.request(address, "GET", "/")
            assert (await connections.request(address, "GET", "/")).status == 404

    run(main(), "asyncio")


@both_loops
def test_connections_and_the_queue_for_them_are_bounded(loop: str) -> None:
    shop = Shop()

    async def main() -> None:
        limits = PeerLimits(max_connections=2, max_waiting=1)
        async with a_server(shop.routes) as server, some_connections(limits) as connections:
            address = f"127.0.0.1:{server.port}"
            requests = [
                asyncio.create_task(connections.request(address, "POST", "/hold")) for _ in range(3)
            ]
            while len(shop.held) < 2:
                await asyncio.sleep(0)
            with pytest.raises(PeerUnavailable, match="too many"):
                await connections.request(address, "POST", "/hold")
            with pytest.raises(PeerUnavailable, match="too many"):
                connections.open_upload(address, "PUT", "/stream/a", (), 1, PATIENCE_S)
            assert server.connections == 2
            shop.held[0].answer(200, b"0")
            while len(shop.held) < 3:
                await asyncio.sleep(0)
            for number in (1, 2):
                shop.held[number].answer(200, b"%d" % number)
            found = [(await request).body for request in requests]
            assert sorted(found) == [b"0", b"1", b"2"]
            assert server.connections == 2

    run(main(), loop)


@both_loops
def test_few_connections_are_kept_after_a_rush(loop: str) -> None:
    shop = Shop()

    async def main() -> None:
        limits = PeerLimits(max_connections=5, max_idle=2)
        async with a_server(shop.routes) as server, some_connections(limits) as connections:
            address = f"127.0.0.1:{server.port}"
            requests = [
                asyncio.create_task(connections.request(address, "POST", "/hold")) for _ in range(5)
            ]
            while len(shop.held) < 5:
                await asyncio.sleep(0)
            for exchange in shop.held:
                exchange.answer(200, b"done")
            assert {(await request).body for request in requests} == {b"done"}
            while server.connections > 2:
                await asyncio.sleep(0)
            assert (await connections.request(address, "POST", "/echo", (), b"x")).body == b"x"
            assert server.connections == 2

    run(main(), loop)


def test_one_who_waited_takes_the_place_of_a_connection_that_died() -> None:
    shop = Shop()

    async def main() -> None:
        limits = PeerLimits(max_connections=1)
        async with a_server(shop.routes) as server, some_connections(limits) as connections:
            address = f"127.0.0.1:{server.port}"
            slow = asyncio.create_task(connections.request(address, "POST", "/hold"))
            while not shop.held:
                await asyncio.sleep(0)
            gives_up = asyncio.create_task(connections.request(address, "GET", "/echo"))
            waits = asyncio.create_task(connections.request(address, "POST", "/echo", (), b"x"))
            await asyncio.sleep(0)
            gives_up.cancel()
            slow.cancel()
            assert (await waits).body == b"x"
            await asyncio.gather(slow, gives_up, return_exceptions=True)

    run(main())


@both_loops
def test_a_connection_that_dies_between_two_hands_is_replaced(loop: str) -> None:
    """The far side closes just when the next in line is given its turn."""
    shop = Shop()

    async def main() -> None:
        limits = PeerLimits(max_connections=1)
        async with a_server(shop.routes) as server, some_connections(limits) as connections:
            address = f"127.0.0.1:{server.port}"
            first = asyncio.create_task(connections.request(address, "POST", "/hold"))
            while not shop.held:
                await asyncio.sleep(0)
            upload = connections.open_upload(address, "PUT", "/stream/a", (), 4, PATIENCE_S)
            upload.write(b"data")
            second = asyncio.create_task(connections.request(address, "POST", "/echo", (), b"x"))
            await asyncio.sleep(0)
            pool = connections._pool(address)
            pass_on = pool._pass_on

            def pass_on_and_cut(connection: ClientConnection | None) -> None:
                pool._pass_on = pass_on  # type: ignore[method-assign]
                pass_on(connection)
                assert connection is not None
                connection.abort()

            pool._pass_on = pass_on_and_cut  # type: ignore[method-assign]
            shop.held[0].answer(200, b"0")
            assert (await first).body == b"0"
            assert (await upload.answer).status == 200
            assert (await second).body == b"x"
            assert server.connections == 1

    run(main(), loop)


def test_the_time_for_an_answer_runs_from_the_last_piece_of_the_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slow device is not the far side's silence."""
    shop = Shop()

    async def main() -> None:
        loop, passed_s = asyncio.get_running_loop(), 0.0
        async with a_server(shop.routes) as server, some_connections() as connections:
            address = f"127.0.0.1:{server.port}"
            with monkeypatch.context() as patch:
                began_at = loop.time()
                patch.setattr(loop, "time", lambda: began_at + passed_s)
                upload = connections.open_upload(address, "PUT", "/stream/a", (), 30, 1.0)
                for _ in range(30):
                    passed_s += 0.05
                    await asyncio.sleep(0)  # timers that are due run
                    upload.write(b"x")
                assert (await upload.answer).status == 200
            silent = connections.open_upload(address, "PUT", "/stream/a", (), 8, 0.1)
            silent.write(b"x")
            with pytest.raises(PeerUnavailable, match=r"did not answer within 0\.1 s"):
                await silent.answer

    run(main(), "asyncio")


@both_loops
def test_an_upload_is_answered_early_and_goes_no_further(loop: str) -> None:
    shop = Shop()
    room = asyncio.Event()

    async def main() -> None:
        async with (
            a_server(shop.routes, ListenerLimits(discard_bytes=0)) as server,
            some_connections() as connections,
        ):
            address = f"127.0.0.1:{server.port}"
            upload = connections.open_upload(
                address, "PUT", "/no", (), 1 << 20, PATIENCE_S, room.set
            )
            assert upload.is_full
            response = await upload.answer
            assert response.status == 404
            assert not upload.is_full
            upload.write(b"into the void")
            assert (await connections.request(address, "POST", "/echo", (), b"x")).body == b"x"

    run(main(), loop)


def test_an_upload_that_is_given_up_breaks_the_far_side() -> None:
    shop = Shop()

    async def main() -> None:
        async with a_server(shop.routes) as server, some_connections() as connections:
            address = f"127.0.0.1:{server.port}"
            upload = connections.open_upload(address, "PUT", "/stream/a", (), 10, PATIENCE_S)
            upload.write(b"half")
            while not shop.receivers:
                await asyncio.sleep(0)
            upload.abort()
            while not shop.receivers[0].ends:
                await asyncio.sleep(0)
            assert shop.receivers[0].ends == ["broken"]
            never = connections.open_upload(address, "PUT", "/stream/a", (), 10, PATIENCE_S)
            never.abort()

    run(main())


def test_after_closing_nothing_is_sent() -> None:
    async def main() -> None:
        connections = ConnectionPool()
        await connections.close()
        with pytest.raises(PeerUnavailable, match="is stopping"):
            await connections.request("127.0.0.1:1", "GET", "/")

    run(main())


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "host:0", "host:http", "h:70000"])
def test_an_address_is_host_and_port(address: str) -> None:
    async def main() -> None:
        with pytest.raises(PeerUnavailable, match="host:port"):
            await ConnectionPool().request(address, "GET", "/")

    run(main())
