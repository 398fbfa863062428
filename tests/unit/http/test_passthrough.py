"""Connections that a listener passes through to another server without decrypting them.

Everything goes over real sockets: `outer` is the listener that clients connect to, `inner` the
server that they ask for. They have certificates of different authorities, so a client that trusts
only the inner one's shows that the outer one decrypts nothing.
"""

from __future__ import annotations

import asyncio
import fcntl
import select
import socket
import ssl
import struct
import termios
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from papaya.http import acceptor, lookups, sockets
from papaya.http import passthrough as passthrough_module
from papaya.http.errors import PeerUnavailable
from papaya.http.limits import ListenerLimits
from papaya.http.listener import Listener, serve
from papaya.http.passthrough import PassedConnection, Passthrough
from papaya.http.proxy_protocol import read_client
from papaya.http.routes import Buffered, HttpRoute
from papaya.http.sockets import Address
from papaya.http.tls import Tls
from tests.system.tls import Authority, Certificates
from tests.unit.http.loopback import (
    LOOPS,
    PATIENCE_S,
    Response,
    Shop,
    a_client,
    a_request,
    responses_of,
    run,
)

NAME = "aggregator-1.uploads.test"
OTHER_NAME = "selector.test"
BIG = bytes(range(251)) * 12_000
# A busy machine may take long for a handshake. No test here waits for one of these to pass.
PATIENT = ListenerLimits(
    head_timeout_s=PATIENCE_S,
    body_timeout_s=PATIENCE_S,
    write_timeout_s=PATIENCE_S,
    linger_s=PATIENCE_S,
)

both_loops = pytest.mark.parametrize("loop", LOOPS)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends in these tests ends because of a peer, not because time has passed."""
    for name in ("_CONNECT_S", "_LAST_S", "_SILENT_S"):
        monkeypatch.setattr(passthrough_module, name, 10 * PATIENCE_S)
    monkeypatch.setattr(lookups, "_LOOKUP_S", 10 * PATIENCE_S)
    monkeypatch.setattr(acceptor, "_WARN_S", 10 * PATIENCE_S)


class Contexts(NamedTuple):
    """Of TLS. A client trusts one of the servers only."""

    outer: ssl.SSLContext
    inner: ssl.SSLContext
    trusts_outer: ssl.SSLContext
    trusts_inner: ssl.SSLContext


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    folder = tmp_path_factory.mktemp("tls")
    outer = Authority(folder / "outer").issue("outer", hosts=[OTHER_NAME, "127.0.0.1"])
    inner = Authority(folder / "inner").issue("inner", hosts=[NAME])

    def of_server(made: Certificates) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(made.certificate, made.key)
        return context

    def of_client(authority: Path) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(authority))

    clients = of_client(outer.authority), of_client(inner.authority)
    return Contexts(of_server(outer), of_server(inner), *clients)


def routes(who: str) -> list[HttpRoute]:
    """They tell which server has answered, and what it knows of the client."""
    answer = lambda exchange, _: exchange.answer(200, f"{who} {exchange.peer}".encode())  # noqa: E731
    return [Buffered("GET", "/who", answer), *Shop(room_bytes=70_000).routes]


@asynccontextmanager
async def an_outer(
    tls: Contexts,
    passthrough: Passthrough,
    limits: ListenerLimits = PATIENT,
    proxies: tuple[str, ...] = (),
) -> AsyncIterator[Listener]:
    listener = await serve(
        routes("outer"),
        "127.0.0.1",
        0,
        limits=limits,
        tls=Tls(tls.outer),
        proxies=proxies,
        passthrough=passthrough,
    )
    try:
        yield listener
    finally:
        await listener.drain(0)


class Both(NamedTuple):
    outer: Listener
    inner: Listener
    passthrough: Passthrough


@asynccontextmanager
async def both(tls: Contexts, limits: ListenerLimits = PATIENT) -> AsyncIterator[Both]:
    inner = await serve(
        routes("inner"),
        "127.0.0.1",
        0,
        limits=PATIENT,
        tls=Tls(tls.inner),
        proxies=("127.0.0.1",),
    )
    passthrough = Passthrough({NAME: ("127.0.0.1", inner.port)}.get)
    try:
        async with an_outer(tls, passthrough, limits) as outer:
            yield Both(outer, inner, passthrough)
    finally:
        await inner.drain(0)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def ask(listener: Listener, **options: Any) -> Response:
    async with a_client(listener.port, **options) as client:
        return await client.ask("GET", "/who")


# -- clients of TLS ---------------------------------------------------------------------------


@both_loops
def test_bodies_go_both_ways_and_the_outer_server_decrypts_nothing(
    loop: str, tls: Contexts
) -> None:
    async def exchange(outer: Listener, number: int) -> None:
        body = bytes([number]) + BIG
        async with a_client(outer.port, ssl=tls.trusts_inner, server_hostname=NAME) as client:
            stream = a_request("PUT", "/stream/a", body) + a_request("POST", "/echo", b"next")
            client.send(stream)
            assert (await client.response()).body == body
            assert (await client.response()).body == b"next"

    async def main() -> None:
        async with both(tls) as (outer, inner, passthrough):
            await asyncio.gather(*(exchange(outer, number) for number in range(4)))
            await until(lambda: outer.connections == inner.connections == 0)
            assert (passthrough.passed, passthrough.unreachable) == (4, 0)

    run(main(), loop)


@both_loops
@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2"])
def test_the_server_knows_the_address_of_the_client(loop: str, source: str, tls: Contexts) -> None:
    async def main() -> None:
        options = {"ssl": tls.trusts_inner, "server_hostname": NAME, "local_addr": (source, 0)}
        async with both(tls) as (outer, _, _), a_client(outer.port, **options) as client:
            host, port = client.writer.get_extra_info("sockname")
            assert host == source
            assert (await client.ask("GET", "/who")).body == f"inner {host}:{port}".encode()

    run(main(), loop)


@both_loops
@pytest.mark.parametrize("name", [OTHER_NAME, "127.0.0.1"])
def test_an_unknown_name_and_none_are_served_here(loop: str, name: str, tls: Contexts) -> None:
    """Clients send no name if they connect to an address."""

    async def main() -> None:
        async with both(tls) as (outer, inner, passthrough):
            response = await ask(outer, ssl=tls.trusts_outer, server_hostname=name)
            assert response.body.startswith(b"outer 127.0.0.1:")
            assert (passthrough.passed, inner.connections) == (0, 0)

    run(main(), loop)


@both_loops
@pytest.mark.parametrize("limit", ["max_connections", "max_connections_per_address"])
def test_a_connection_over_a_limit_is_closed(loop: str, limit: str, tls: Contexts) -> None:
    """An answer of this server would have another name in its certificate. Connections that are
    passed through count, and those that are refused take nothing from the other server.
    """
    limits = ListenerLimits(head_timeout_s=PATIENCE_S, linger_s=PATIENCE_S, **{limit: 1})
    passed = {"ssl": tls.trusts_inner, "server_hostname": NAME}

    async def main() -> None:
        async with both(tls, limits) as (outer, inner, passthrough):
            async with a_client(outer.port, **passed) as client:
                assert (await client.ask("GET", "/who")).body.startswith(b"inner ")
                with pytest.raises(ConnectionError):
                    await ask(outer, **passed)
                refused = await ask(outer, ssl=tls.trusts_outer, server_hostname=OTHER_NAME)
                assert refused.status == 503
                assert (passthrough.passed, inner.connections) == (1, 1)
                if limit == "max_connections_per_address":
                    other = await ask(outer, **passed, local_addr=("127.0.0.2", 0))
                    assert other.body.startswith(b"inner 127.0.0.2:")
            await until(lambda: outer.connections == 0)
            assert (await ask(outer, **passed)).body.startswith(b"inner ")

    run(main(), loop)


@both_loops
def test_a_server_that_closes_after_its_answer(loop: str, tls: Contexts) -> None:
    def everything(port: int) -> bytes:
        """In a thread: a client on uvloop loses the end of an answer if the server closes."""
        address = ("127.0.0.1", port)
        with (
            socket.create_connection(address, timeout=PATIENCE_S) as plain,
            tls.trusts_inner.wrap_socket(plain, server_hostname=NAME) as client,
        ):
            client.sendall(a_request("PUT", "/stream/a", BIG, [("Connection", "close")]))
            return b"".join(iter(lambda: client.recv(1 << 16), b""))

    async def main() -> None:
        async with both(tls) as (outer, inner, _):
            [response] = responses_of(await asyncio.to_thread(everything, outer.port))
            assert response.body == BIG
            await until(lambda: outer.connections == inner.connections == 0)

    run(main(), loop)


@both_loops
def test_a_client_that_closes(loop: str, tls: Contexts) -> None:
    async def main() -> None:
        options = {"ssl": tls.trusts_inner, "server_hostname": NAME}
        async with both(tls) as (outer, inner, _):
            async with a_client(outer.port, **options) as client:
                assert (await client.ask("GET", "/who")).status == 200
                assert outer.connections == inner.connections == 1
            await until(lambda: outer.connections == inner.connections == 0)

    run(main(), loop)


# -- clients and servers without TLS: what is passed on is not looked at ------------------------


def a_hello(name: str = NAME) -> bytes:
    """What a client sends first."""
    sent = ssl.MemoryBIO()
    context = ssl.create_default_context()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname=name).do_handshake()
    return sent.read()


async def exactly(connection: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < count:
        piece = await loop.sock_recv(connection, min(count - len(data), 1 << 16))
        assert piece, f"closed after {len(data)} bytes of {count}"
        data += piece
    return bytes(data)


async def until_closed(connection: socket.socket) -> None:
    """Nothing more arrives before."""
    with suppress(ConnectionResetError):
        assert await asyncio.get_running_loop().sock_recv(connection, 1) == b""


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def a_small_socket() -> socket.socket:
    """The kernel holds little for it, and for what it accepts."""
    made = socket.socket()
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        made.setsockopt(socket.SOL_SOCKET, buffer, 64 << 10)
    return made


@contextmanager
def listening() -> Iterator[socket.socket]:
    with a_small_socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.setblocking(False)
        yield server


@contextmanager
def connecting(port: int) -> Iterator[socket.socket]:
    with a_small_socket() as client:
        client.connect(("127.0.0.1", port))
        client.setblocking(False)
        yield client


class Raw(NamedTuple):
    client: socket.socket
    server: socket.socket
    outer: Listener


@asynccontextmanager
async def raw_ends(tls: Contexts) -> AsyncIterator[Raw]:
    """Both ends of one connection; the server has read what came first."""
    loop, hello = asyncio.get_running_loop(), a_hello()
    with listening() as waiting:
        passthrough = Passthrough({NAME: waiting.getsockname()}.get)
        async with an_outer(tls, passthrough) as outer:
            with connecting(outer.port) as client:
                await loop.sock_sendall(client, hello)
                server, _ = await loop.sock_accept(waiting)
                with server:
                    assert await read_client(server) == client.getsockname()
                    assert await exactly(server, len(hello)) == hello
                    yield Raw(client, server, outer)


@both_loops
def test_both_directions_at_once(loop: str, tls: Contexts) -> None:
    """More than the kernel holds, so each of them is often full."""

    async def main() -> None:
        running = asyncio.get_running_loop()
        async with raw_ends(tls) as (client, server, _):
            up, down = BIG * 3, BIG[::-1] * 3
            _, _, got_up, got_down = await asyncio.gather(
                running.sock_sendall(client, up),
                running.sock_sendall(server, down),
                exactly(server, len(up)),
                exactly(client, len(down)),
            )
            assert got_up == up
            assert got_down == down

    run(main(), loop)


@both_loops
def test_a_client_that_has_sent_everything_still_gets_its_answer(loop: str, tls: Contexts) -> None:
    async def main() -> None:
        running = asyncio.get_running_loop()
        async with raw_ends(tls) as (client, server, outer):
            await running.sock_sendall(client, b"last")
            client.shutdown(socket.SHUT_WR)
            assert await exactly(server, 4) == b"last"
            await until_closed(server)
            assert outer.connections == 1
            sending = asyncio.create_task(running.sock_sendall(server, BIG))
            assert await exactly(client, len(BIG)) == BIG
            await sending
            server.close()
            await until_closed(client)
            await until(lambda: outer.connections == 0)

    run(main(), loop)


@both_loops
def test_a_server_that_has_sent_everything_still_gets_the_rest(loop: str, tls: Contexts) -> None:
    """As when it answers before the end of a body that it refuses."""

    async def main() -> None:
        running = asyncio.get_running_loop()
        async with raw_ends(tls) as (client, server, outer):
            await running.sock_sendall(server, b"answer")
            server.shutdown(socket.SHUT_WR)
            assert await exactly(client, 6) == b"answer"
            await until_closed(client)
            sending = asyncio.create_task(running.sock_sendall(client, BIG))
            assert await exactly(server, len(BIG)) == BIG
            await sending
            client.close()
            await until_closed(server)
            await until(lambda: outer.connections == 0)

    run(main(), loop)


@both_loops
@pytest.mark.parametrize("who", ["client", "server"])
def test_a_peer_that_is_gone_ends_the_other_connection(loop: str, who: str, tls: Contexts) -> None:
    async def main() -> None:
        async with raw_ends(tls) as (client, server, outer):
            gone, other = (client, server) if who == "client" else (server, client)
            reset(gone)
            await until_closed(other)
            # It may notice only when it sends.
            with suppress(ConnectionError):
                while outer.connections:
                    await asyncio.get_running_loop().sock_sendall(other, b"more")
                    await asyncio.sleep(0.001)
            await until(lambda: outer.connections == 0)

    run(main(), loop)


@both_loops
def test_a_silent_connection_ends(
    loop: str, tls: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passthrough_module, "_SILENT_S", 0.1)

    async def main() -> None:
        running = asyncio.get_running_loop()
        with listening() as waiting:
            passthrough = Passthrough({NAME: waiting.getsockname()}.get)
            async with an_outer(tls, passthrough) as outer:
                with connecting(outer.port) as client:
                    await running.sock_sendall(client, a_hello())
                    await until_closed(client)
                    await until(lambda: outer.connections == 0)
                    assert passthrough.passed == 1
                    server, _ = await running.sock_accept(waiting)
                    with server, suppress(ConnectionResetError):
                        while await running.sock_recv(server, 1 << 16):
                            pass

    run(main(), loop)


@pytest.mark.parametrize("limit", ["_SILENT_S", "_LAST_S"])
@pytest.mark.parametrize("who", ["client", "server"])
def test_a_connection_is_silent_from_its_last_byte_on(
    who: str, limit: str, tls: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the loop jumps. Also if the other direction has ended: answers may be long."""
    monkeypatch.setattr(passthrough_module, limit, 120.0)
    jumps = (75.0, 75.0)

    async def main() -> None:
        running = asyncio.get_running_loop()
        real, ahead = running.time, 0.0
        monkeypatch.setattr(running, "time", lambda: real() + ahead)
        async with raw_ends(tls) as (client, server, outer):
            one, other = (client, server) if who == "client" else (server, client)
            if limit == "_LAST_S":
                other.shutdown(socket.SHUT_WR)
                await until_closed(one)
            for jump in jumps:
                ahead += jump
                await running.sock_sendall(one, b"x")
                assert await exactly(other, 1) == b"x"
            assert outer.connections == 1

    with asyncio.Runner() as runner:
        runner.run(asyncio.wait_for(main(), sum(jumps) + PATIENCE_S))


@both_loops
@pytest.mark.parametrize("who", ["client", "server"])
def test_a_direction_that_stays_open_after_the_other_is_cut(
    loop: str, who: str, tls: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with raw_ends(tls) as (client, server, outer):
            monkeypatch.setattr(passthrough_module, "_LAST_S", 0.1)
            ended, open_ = (client, server) if who == "client" else (server, client)
            ended.shutdown(socket.SHUT_WR)
            await until_closed(open_)
            await until_closed(ended)
            await until(lambda: outer.connections == 0)

    run(main(), loop)


@both_loops
def test_a_client_behind_a_load_balancer_is_told_on(loop: str, tls: Contexts) -> None:
    """Also one whose family is not that of our own address."""

    async def main() -> None:
        running = asyncio.get_running_loop()
        with listening() as waiting:
            passthrough = Passthrough({NAME: waiting.getsockname()}.get)
            async with an_outer(tls, passthrough, proxies=("127.0.0.1",)) as outer:
                for family, address in (("TCP4", "198.51.100.7"), ("TCP6", "2001:db8::7")):
                    header = f"PROXY {family} {address} {address} 4711 443\r\n"
                    with connecting(outer.port) as client:
                        await running.sock_sendall(client, header.encode() + a_hello())
                        server, _ = await running.sock_accept(waiting)
                        with server:
                            assert await read_client(server) == (address, 4711)

    run(main(), loop)


@both_loops
def test_a_client_that_does_not_finish_its_first_message_gives_its_place_back(
    loop: str, tls: Contexts
) -> None:
    async def main() -> None:
        passthrough = Passthrough({NAME: ("127.0.0.1", 1)}.get)
        async with an_outer(tls, passthrough, ListenerLimits(head_timeout_s=0.1)) as outer:
            for length in (0, 3, 100):
                with connecting(outer.port) as client:
                    await asyncio.get_running_loop().sock_sendall(client, a_hello()[:length])
                    await until_closed(client)
                await until(lambda: outer.connections == 0)
        assert (passthrough.passed, passthrough.unreachable) == (0, 0)

    run(main(), loop)


@both_loops
@pytest.mark.parametrize("who", ["client", "server"])
def test_data_that_a_reset_follows_ends_the_other_connection_at_once(
    loop: str, who: str, tls: Contexts
) -> None:
    """Both arrive together, and the other end sends nothing. uvloop reports this only once."""

    async def main() -> None:
        async with raw_ends(tls) as (client, server, outer):
            gone, other = (client, server) if who == "client" else (server, client)
            gone.send(b"last words")
            reset(gone)
            with suppress(ConnectionResetError):
                while await asyncio.get_running_loop().sock_recv(other, 100):
                    pass
            other.close()
            await until(lambda: outer.connections == 0)

    run(main(), loop)


@both_loops
def test_a_route_that_leads_back_is_refused(
    loop: str, tls: Contexts, caplog: pytest.LogCaptureFixture
) -> None:
    """One connection would otherwise be passed through again and again."""

    async def main() -> None:
        where: list[Address] = []
        passthrough = Passthrough(lambda name: where[0])
        async with an_outer(tls, passthrough, proxies=("127.0.0.1",)) as outer:
            where.append(("127.0.0.1", outer.port))
            with connecting(outer.port) as client:
                header = b"PROXY TCP4 198.51.100.7 198.51.100.1 4711 443\r\n"
                await asyncio.get_running_loop().sock_sendall(client, header + a_hello())
                await until_closed(client)
            await until(lambda: outer.connections == 0)
            assert passthrough.passed == 1

    run(main(), loop)
    assert "its upload_routes lead to this selector" in caplog.text


# -- a server that does not read --------------------------------------------------------------


class Watched(socket.socket):
    """Counts how often somebody wants to receive from it."""

    looks = 0

    def recv_into(self, *arguments: Any) -> int:
        self.looks += 1
        return super().recv_into(*arguments)


def a_small_pair() -> tuple[socket.socket, Watched]:
    """Both ends of a TCP connection."""
    with listening() as waiting:
        one = a_small_socket()
        one.connect(waiting.getsockname())
        other, _ = waiting.accept()
    one.setblocking(False)
    watched = Watched(fileno=other.detach())
    watched.setblocking(False)
    return one, watched


def queued(connection: socket.socket, request: int) -> int:
    """Bytes that the kernel holds: FIONREAD, those to receive; TIOCOUTQ, those on their way."""
    return int(struct.unpack("i", fcntl.ioctl(connection, request, bytes(4)))[0])


async def until_it_rests(connection: Watched) -> None:
    """The loop has time for others: it turns many times before it looks at this socket again."""
    looks, turns = connection.looks, 0
    while turns < 200:
        await asyncio.sleep(0)
        turns += 1
        if connection.looks != looks:
            looks, turns = connection.looks, 0


def is_full(connection: socket.socket) -> bool:
    return not select.select([], [connection], [], 0)[1]


@both_loops
@pytest.mark.parametrize("room_bytes", [1000, 256 << 10])
def test_nothing_is_stored_for_a_server_that_does_not_read(loop: str, room_bytes: int) -> None:
    """The client has to stop sending, and all bytes that it has sent are in the kernel."""
    data = BIG

    async def main() -> None:
        running = asyncio.get_running_loop()
        client, clients_end = a_small_pair()
        server, servers_end = a_small_pair()
        with client, server, ExitStack() as stack:
            ends: list[str] = []
            room = memoryview(bytearray(room_bytes))
            passed = PassedConnection(clients_end, servers_end, room, lambda: ends.append("ended"))
            stack.callback(passed.close)
            sent = 0
            while sent < len(data):
                try:
                    sent += client.send(data[sent : sent + (1 << 16)])
                except BlockingIOError:
                    if is_full(servers_end):
                        break
                await asyncio.sleep(0)
            assert sent < len(data), "the client could send as much as it wanted"
            # From the client on: what moves in the meantime counts twice.
            held = queued(client, termios.TIOCOUTQ) + queued(clients_end, termios.FIONREAD)
            held += queued(servers_end, termios.TIOCOUTQ) + queued(server, termios.FIONREAD)
            assert held >= sent
            await until_it_rests(clients_end)

            sending = asyncio.create_task(running.sock_sendall(client, data[sent:]))
            assert await exactly(server, len(data)) == data
            await sending
            assert ends == []
            passed.close()
            passed.close()
            assert ends == ["ended"]
            await until_closed(client)
            await until_closed(server)

    run(main(), loop)


@both_loops
def test_many_pieces_that_a_reset_follows_all_arrive(loop: str) -> None:
    """More than are sent in one turn of the loop."""

    async def main() -> None:
        client, clients_end = a_small_pair()
        server, servers_end = a_small_pair()
        with server:
            ends: list[str] = []
            client.send(b"x" * 1000)
            reset(client)
            room = memoryview(bytearray(100))
            PassedConnection(clients_end, servers_end, room, lambda: ends.append("ended"))
            assert await exactly(server, 1000) == b"x" * 1000
            await until_closed(server)
            server.close()
            await until(lambda: ends == ["ended"])

    run(main(), loop)


# -- servers that cannot be reached -----------------------------------------------------------


@pytest.fixture
def deaf() -> Iterator[Address]:
    """An address that refuses connections, and that nobody else gets in the meantime."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()


@both_loops
def test_a_server_that_cannot_be_reached(
    loop: str, deaf: Address, tls: Contexts, caplog: pytest.LogCaptureFixture
) -> None:
    """Devices then upload through this server: they must notice at once."""

    async def main() -> None:
        passthrough = Passthrough({NAME: deaf}.get)
        async with an_outer(tls, passthrough) as outer:
            for _ in range(3):
                with connecting(outer.port) as client:
                    await asyncio.get_running_loop().sock_sendall(client, a_hello())
                    await until_closed(client)
                await until(lambda: outer.connections == 0)
            assert (passthrough.passed, passthrough.unreachable) == (0, 3)
            response = await ask(outer, ssl=tls.trusts_outer, server_hostname=OTHER_NAME)
            assert response.status == 200

    run(main(), loop)
    [warning] = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert f"a connection for {NAME} was closed" in warning
    assert f"127.0.0.1:{deaf[1]} cannot be reached: " in warning
    assert "Errno 111" in warning


@pytest.fixture
def silent() -> Iterator[Address]:
    """An address that does not answer: its queue is full, so the kernel drops what arrives."""
    with socket.socket() as server, socket.socket() as first:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        first.connect(server.getsockname())
        assert select.select([server], [], [], PATIENCE_S)[0]  # `first` is in the queue
        yield server.getsockname()


@both_loops
def test_a_server_that_does_not_answer_is_given_up(
    loop: str, silent: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passthrough_module, "_CONNECT_S", 0.1)

    async def main() -> None:
        async with opening() as opened:
            with pytest.raises(PeerUnavailable, match=rf":{silent[1]} .* within 0\.1 s"):
                await opened.open(*silent)
            assert (opened.passthrough.passed, opened.passthrough.unreachable) == (0, 1)

    run(main(), loop)


@both_loops
def test_a_server_is_tried_again(loop: str, deaf: Address, tls: Contexts) -> None:
    """A failure is not remembered."""

    async def main() -> None:
        running = asyncio.get_running_loop()
        where = deaf
        passthrough = Passthrough(lambda name: where)
        async with an_outer(tls, passthrough) as outer:
            with connecting(outer.port) as client:
                await running.sock_sendall(client, a_hello())
                await until_closed(client)
            with listening() as waiting, connecting(outer.port) as client:
                where = waiting.getsockname()
                await running.sock_sendall(client, a_hello())
                server, _ = await running.sock_accept(waiting)
                with server:
                    assert await read_client(server) == client.getsockname()
            assert (passthrough.passed, passthrough.unreachable) == (1, 1)

    run(main(), loop)


# -- addresses of names ----------------------------------------------------------------------


class Opened:
    """Connections that are handed to `Passthrough`, without a listener. `where`: a server."""

    def __init__(self, stack: ExitStack) -> None:
        self.passthrough = Passthrough(lambda name: None)
        self.where: Address = stack.enter_context(listening()).getsockname()
        self._stack = stack

    async def open(self, host: str, port: int = 1) -> None:
        """A connection to this server. The client's end stays open."""
        ours, theirs = a_small_pair()
        self._stack.enter_context(ours)
        self._stack.enter_context(theirs)
        await self.passthrough.open(theirs, ("192.0.2.7", 4711), (host, port), lambda: None)


@asynccontextmanager
async def opening() -> AsyncIterator[Opened]:
    with ExitStack() as stack:
        opened = Opened(stack)
        try:
            yield opened
        finally:
            await opened.passthrough.empty(0)


@both_loops
def test_the_next_address_of_a_name_is_tried(
    loop: str, deaf: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = lookups._addresses

    async def main() -> None:
        async with opening() as opened:

            def several(where: Address, flags: int = 0) -> list[tuple[Any, ...]]:
                return real(where, flags) if flags else [*real(deaf), *real(opened.where)]

            monkeypatch.setattr(lookups, "_addresses", several)
            await opened.open("a.internal")
            assert opened.passthrough.passed == 1

    run(main(), loop)


def test_an_address_that_does_not_answer_leaves_time_for_the_next(
    silent: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the loop jumps while the first address is tried."""
    monkeypatch.setattr(passthrough_module, "_CONNECT_S", 100.0)
    real = lookups._addresses

    async def main() -> None:
        running = asyncio.get_running_loop()
        now, ahead, connect = running.time, 0.0, sockets._connect
        tried: list[Address] = []

        async def noted(connection: socket.socket, address: Address) -> None:
            tried.append(address)
            await connect(connection, address)

        monkeypatch.setattr(running, "time", lambda: now() + ahead)
        monkeypatch.setattr(sockets, "_connect", noted)
        async with opening() as opened:

            def several(where: Address, flags: int = 0) -> list[tuple[Any, ...]]:
                return real(where, flags) if flags else [*real(silent), *real(opened.where)]

            monkeypatch.setattr(lookups, "_addresses", several)
            task = asyncio.create_task(opened.open("a.internal"))
            await until(lambda: bool(tried))
            ahead = 60.0
            await task
            assert tried == [silent, opened.where]
            assert opened.passthrough.passed == 1

    run(main(), "asyncio")


# -- the end of a listener --------------------------------------------------------------------


@both_loops
def test_draining_ends_connections(loop: str, tls: Contexts) -> None:
    async def main() -> None:
        async with raw_ends(tls) as (client, server, outer):
            await outer.drain(0)
            assert outer.connections == 0
            await until_closed(client)
            await until_closed(server)

    run(main(), loop)


@both_loops
def test_draining_waits_for_connections(loop: str, tls: Contexts) -> None:
    async def main() -> None:
        async with raw_ends(tls) as (client, server, outer):
            draining = asyncio.create_task(outer.drain(10 * PATIENCE_S))
            for _ in range(100):  # it has time to do what it must not do
                await asyncio.sleep(0)
            await asyncio.get_running_loop().sock_sendall(client, BIG[:1000])
            assert await exactly(server, 1000) == BIG[:1000]
            assert not draining.done()
            client.close()
            await until_closed(server)
            server.close()
            await draining
            assert outer.connections == 0

    run(main(), loop)


@both_loops
def test_draining_gives_up_connections_whose_server_is_looked_up(
    loop: str, tls: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, is_asked, may_answer = lookups._addresses, threading.Event(), threading.Event()

    def hangs(where: Address, flags: int = 0) -> list[tuple[Any, ...]]:
        if flags:  # an IP address?
            return real(where, flags)
        is_asked.set()
        may_answer.wait()
        raise socket.gaierror(socket.EAI_NONAME, "nobody waits for this")

    monkeypatch.setattr(lookups, "_addresses", hangs)

    async def main() -> None:
        passthrough = Passthrough(lambda name: ("a.internal", 1))
        async with an_outer(tls, passthrough) as outer:
            with connecting(outer.port) as client:
                await asyncio.get_running_loop().sock_sendall(client, a_hello())
                await until(is_asked.is_set)
                await outer.drain(0)
                await until_closed(client)
                await until(lambda: outer.connections == 0)
        assert passthrough.passed == 0

    try:
        run(main(), loop)
    finally:
        may_answer.set()  # the thread ends
