"""Peers that take connections: every accepted socket counts, and the others are told to wait.

Everything here goes over real sockets. 127.0.0.2 is another client on the same machine. A listener
accepts connections in the order of their arrival: an answer to one shows that it knows the others.
"""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
from msgspec import structs

from papaya.http.acceptor import MAX_REFUSED, address_key
from papaya.http.limits import ListenerLimits
from papaya.http.listener import Listener, serve
from papaya.http.routes import Buffered
from papaya.http.tls import Tls
from papaya.server.open_files import connections_of_one_address
from tests.unit.http.loopback import (
    LOOPS,
    PATIENCE_S,
    PATIENT,
    Response,
    a_client,
    a_request,
    responses_of,
    run,
    tls_contexts,
)

both_loops = pytest.mark.parametrize("loop", LOOPS)
OTHER = ("127.0.0.2", 0)
WHO = [Buffered("GET", "/who", lambda exchange, _: exchange.answer(200, exchange.peer.encode()))]

Contexts = tuple[ssl.SSLContext, ssl.SSLContext]


def limits_of(**changes: Any) -> ListenerLimits:
    """Limits under which a slow machine closes no connection too early, not even a refused one."""
    return structs.replace(PATIENT, **{"linger_s": PATIENCE_S, **changes})


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    """The contexts of the server and of the client."""
    return tls_contexts(tmp_path_factory.mktemp("tls"))


@asynccontextmanager
async def a_listener(
    limits: ListenerLimits, tls: Contexts | None = None, proxies: tuple[str, ...] = ()
) -> AsyncIterator[Listener]:
    own = Tls(tls[0]) if tls is not None else None
    listener = await serve(WHO, "127.0.0.1", 0, limits=limits, tls=own, proxies=proxies)
    try:
        yield listener
    finally:
        await listener.drain(0)


def silent(
    stack: ExitStack, listener: Listener, count: int, source: tuple[str, int] = ("127.0.0.1", 0)
) -> list[socket.socket]:
    """Connections that never send a byte."""
    address = ("127.0.0.1", listener.port)
    return [
        stack.enter_context(socket.create_connection(address, source_address=source))
        for _ in range(count)
    ]


def until_closed(connection: socket.socket) -> None:
    with suppress(ConnectionResetError):
        assert connection.recv(1) == b""


async def told_to_wait(connections: list[socket.socket]) -> int:
    """Wait until each of these is answered or closed, and return how many were answered."""
    pieces = [await asyncio.to_thread(_first_bytes, connection) for connection in connections]
    return sum(piece.startswith(b"HTTP/1.1 503") for piece in pieces)


def _first_bytes(connection: socket.socket) -> bytes:
    with suppress(ConnectionResetError):
        return connection.recv(1 << 10)
    return b""


async def until_accepted(listener: Listener, count: int) -> None:
    while listener.connections != count:
        await asyncio.sleep(0.001)


async def ask(listener: Listener, header: bytes = b"", **options: Any) -> Response:
    async with a_client(listener.port, **options) as client:
        client.send(header + a_request("GET", "/who"))
        return await client.response()


async def served(listener: Listener, **options: Any) -> Response:
    """Ask until there is an answer: under load a handshake may take longer than its time."""
    while True:
        with suppress(OSError, asyncio.IncompleteReadError):
            return await ask(listener, **options)


def is_whole(data: bytes) -> bool:
    head, end, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    return length is not None and bool(end) and len(body) == int(length[1])


def assert_told_to_wait(response: Response) -> None:
    assert response.status == 503
    assert 5 <= int(response.headers["retry-after"]) <= 15
    assert response.headers["connection"] == "close"


@both_loops
def test_connections_count_before_their_tls_handshake(loop: str, tls: Contexts) -> None:
    async def main() -> None:
        limits = limits_of(max_connections=3)
        async with a_listener(limits, tls) as listener:
            with ExitStack() as stack:
                silent(stack, listener, 3)
                await until_accepted(listener, 3)
                assert_told_to_wait(await ask(listener, ssl=tls[1]))
            await until_accepted(listener, 0)
            assert (await ask(listener, ssl=tls[1])).status == 200

    run(main(), loop)


def test_a_refused_connection_counts_as_answered_at_once() -> None:
    """Not as a request that took as long as the machine is up."""

    async def main() -> None:
        times: list[tuple[int, float]] = []
        loop = asyncio.get_running_loop()
        began = loop.time()
        listener = await serve(
            WHO,
            "127.0.0.1",
            0,
            limits=limits_of(max_connections=1),
            observe=lambda route, status, seconds: times.append((status, seconds)),
        )
        with ExitStack() as stack:
            silent(stack, listener, 1)
            await until_accepted(listener, 1)
            assert_told_to_wait(await ask(listener))
        await listener.drain(0)
        [(status, seconds)] = times
        assert status == 503
        assert 0 <= seconds <= loop.time() - began

    run(main())


@both_loops
def test_a_handshake_that_does_not_end_in_time_gives_its_place_back(
    loop: str, tls: Contexts
) -> None:
    async def main() -> None:
        limits = limits_of(max_connections=3, head_timeout_s=0.3)
        async with a_listener(limits, tls) as listener:
            with ExitStack() as stack:
                for connection in silent(stack, listener, 3):
                    await asyncio.to_thread(until_closed, connection)
                await until_accepted(listener, 0)
                assert (await served(listener, ssl=tls[1])).status == 200

    run(main(), loop)


@both_loops
@pytest.mark.parametrize("is_tls", [False, True])
def test_everybody_above_the_limit_is_told_to_wait(loop: str, is_tls: bool, tls: Contexts) -> None:
    """Also if more come at once than are refused at the same time: nobody gets a bare close."""
    options: dict[str, Any] = {"ssl": tls[1]} if is_tls else {}

    async def main() -> None:
        limits = limits_of(max_connections=1)
        async with (
            a_listener(limits, tls if is_tls else None) as listener,
            a_client(listener.port, **options) as first,
        ):
            assert (await first.ask("GET", "/who")).status == 200
            asking = [ask(listener, **options) for _ in range(3 * MAX_REFUSED)]
            for response in await asyncio.gather(*asking):
                assert_told_to_wait(response)
            assert (await first.ask("GET", "/who")).status == 200

    run(main(), loop)


@both_loops
@pytest.mark.parametrize("is_tls", [False, True])
def test_hundreds_of_one_address_are_told_to_wait(loop: str, is_tls: bool, tls: Contexts) -> None:
    """The phones of a mobile carrier have one address, and all come back after an outage. Before,
    64 of them were answered at a time, and the others were disconnected.
    """
    options: dict[str, Any] = {"ssl": tls[1]} if is_tls else {}

    async def main() -> None:
        limits = limits_of(max_connections=1500, max_connections_per_address=10)
        async with a_listener(limits, tls if is_tls else None) as listener:
            with ExitStack() as stack:
                silent(stack, listener, 10)
                await until_accepted(listener, 10)
                asking = [ask(listener, **options) for _ in range(300)]
                for response in await asyncio.gather(*asking):
                    assert_told_to_wait(response)

    run(main(), loop)


@both_loops
def test_one_address_cannot_take_the_places_of_others(loop: str) -> None:
    async def main() -> None:
        limits = limits_of(max_connections=400, max_connections_per_address=100)
        async with a_listener(limits) as listener:
            with ExitStack() as stack:
                silent(stack, listener, 100)
                await until_accepted(listener, 100)
                assert_told_to_wait(await ask(listener))
                assert (await ask(listener, local_addr=OTHER)).status == 200
                # Not even if it keeps everyone busy who could refuse it.
                told = await told_to_wait(silent(stack, listener, 250))
                assert MAX_REFUSED <= told <= 100
                assert listener.connections <= 200
                assert (await ask(listener, local_addr=OTHER)).status == 200
            await until_accepted(listener, 0)
            assert (await ask(listener)).status == 200

    run(main(), loop)


@both_loops
def test_one_address_cannot_use_up_the_refusals_of_others(loop: str) -> None:
    """Devices behind the address of a carrier are told to wait, whatever other addresses do."""

    async def main() -> None:
        limits = limits_of(max_connections=1000, max_connections_per_address=3)
        async with a_listener(limits) as listener:
            with ExitStack() as stack:
                silent(stack, listener, 3)
                await until_accepted(listener, 3)
                assert await told_to_wait(silent(stack, listener, 400)) < 400
                before = listener.connections
                silent(stack, listener, 3, OTHER)
                await until_accepted(listener, before + 3)
                asking = [ask(listener, local_addr=OTHER) for _ in range(2 * MAX_REFUSED)]
                for response in await asyncio.gather(*asking):
                    assert_told_to_wait(response)
            await until_accepted(listener, 0)
            assert (await ask(listener)).status == 200

    run(main(), loop)


@both_loops
def test_several_addresses_cannot_take_the_places_of_others(loop: str, tls: Contexts) -> None:
    """Before, each address could have 64 silent refusals, so a few took all places."""

    async def main() -> None:
        limits = limits_of(max_connections=200, max_connections_per_address=2)
        async with a_listener(limits, tls) as listener:
            with ExitStack() as stack:
                for last in (3, 4, 5):
                    silent(stack, listener, 100, (f"127.0.0.{last}", 0))
                assert (await ask(listener, ssl=tls[1])).status == 200
                silent(stack, listener, 2, OTHER)
                assert_told_to_wait(await ask(listener, ssl=tls[1], local_addr=OTHER))
                # More addresses do not get more.
                for last in range(6, 20):
                    silent(stack, listener, 12, (f"127.0.0.{last}", 0))
                assert (await ask(listener, ssl=tls[1])).status == 200
            await until_accepted(listener, 0)

    run(main(), loop)


@both_loops
@pytest.mark.parametrize("places", [32, 42, 102])
def test_one_address_takes_half_of_few_places(loop: str, places: int, tls: Contexts) -> None:
    """Before, 64 refusals of one address were possible however few places there were."""

    async def main() -> None:
        each = connections_of_one_address(places)
        limits = limits_of(max_connections=places, max_connections_per_address=each)
        async with a_listener(limits, tls) as listener:
            with ExitStack() as stack:
                silent(stack, listener, places)
                assert (await ask(listener, ssl=tls[1], local_addr=OTHER)).status == 200
                assert each < listener.connections <= places // 2 + 1, "with the one that asked"

    run(main(), loop)


@both_loops
def test_many_silent_refusals_get_less_time_for_their_handshake(loop: str, tls: Contexts) -> None:
    """More than a quarter of the places is taken by refusals only for a short time."""

    async def main() -> None:
        limits = limits_of(max_connections=40, max_connections_per_address=2, linger_s=0.1)
        async with a_listener(limits, tls) as listener:
            with ExitStack() as stack:
                silent(stack, listener, 2 + 10)
                for connection in silent(stack, listener, 2):
                    await asyncio.to_thread(until_closed, connection)
                await until_accepted(listener, 2 + 10)
            await until_accepted(listener, 0)

    run(main(), loop)


@both_loops
@pytest.mark.parametrize("is_tls", [False, True])
def test_behind_a_proxy_clients_count_by_their_own_address(
    loop: str, is_tls: bool, tls: Contexts
) -> None:
    def ask_by_proxy(listener: Listener, client: str) -> Response:
        """The header goes before TLS, so this client is written by hand."""
        with socket.create_connection(("127.0.0.1", listener.port), timeout=60) as plain:
            plain.sendall(f"PROXY TCP4 {client} 10.0.0.1 4711 443\r\n".encode())
            connection = tls[1].wrap_socket(plain, server_hostname="127.0.0.1") if is_tls else plain
            connection.sendall(a_request("GET", "/who", headers=[("Connection", "close")]))
            data = b""
            while not is_whole(data):
                piece = connection.recv(1 << 16)
                assert piece, data
                data += piece
            if is_tls:
                connection.close()
        (response,) = responses_of(data)
        return response

    async def main() -> None:
        limits = limits_of(max_connections_per_address=1)
        context = tls if is_tls else None
        async with a_listener(limits, context, ("192.0.2.0/24", "127.0.0.1")) as listener:
            with socket.create_connection(("127.0.0.1", listener.port)) as holding:
                holding.sendall(b"PROXY TCP4 198.51.100.7 10.0.0.1 4711 443\r\n")
                await until_accepted(listener, 1)
                response = await asyncio.to_thread(ask_by_proxy, listener, "198.51.100.8")
                assert response.body == b"198.51.100.8:4711"
                assert_told_to_wait(await asyncio.to_thread(ask_by_proxy, listener, "198.51.100.7"))

    run(main(), loop)


@both_loops
def test_only_a_configured_proxy_may_name_another_address(loop: str) -> None:
    header = b"PROXY TCP4 198.51.100.8 10.0.0.1 4711 443\r\n"

    async def main() -> None:
        async with a_listener(limits_of(), proxies=("127.0.0.2",)) as listener:
            assert (await ask(listener, header)).status == 400
            assert (await ask(listener)).body.startswith(b"127.0.0.1:")
            response = await ask(listener, header, local_addr=OTHER)
            assert response.body == b"198.51.100.8:4711"
            async with a_client(listener.port, local_addr=OTHER) as proxy:
                proxy.send(a_request("GET", "/who"))
                assert await proxy.rest() == b"", "a proxy must send the header"

    run(main(), loop)


def test_operators_are_told_if_a_server_and_its_load_balancer_disagree(
    tls: Contexts, caplog: pytest.LogCaptureFixture
) -> None:
    """Every device behind it is cut off then. Other peers cause no warning, whatever they send."""

    def connect(listener: Listener, first: bytes) -> None:
        with socket.create_connection(("127.0.0.1", listener.port), timeout=60) as plain:
            plain.sendall(first)
            with suppress(ConnectionError):
                if plain.recv(1 << 16):
                    raise AssertionError("it was answered")

    async def main(first: bytes, proxies: tuple[str, ...]) -> str:
        caplog.clear()
        async with a_listener(limits_of(), tls, proxies) as listener:
            for _ in range(3):
                await asyncio.to_thread(connect, listener, first)
        return "\n".join(each.message for each in caplog.records if each.levelname == "WARNING")

    headers = (b"PROXY TCP4 198.51.100.8 10.0.0.1 4711 443\r\n", b"\r\n\r\n\0\r\nQUIT\n\x21\x11")
    for header in headers:
        told = run(main(header, ()))
        assert told.count("127.0.0.1 sends the PROXY protocol") == 1
        assert "add its address to proxies" in told
    twice = b"PROXY TCP4 198.51.100.8 10.0.0.1 4711 443\r\n"
    assert run(main(twice + twice, ("127.0.0.1",))) == "", "the second one is of a device"
    told = run(main(b"\x16\x03\x01" + bytes(60), ("127.0.0.1",)))
    assert told.count("proxy 127.0.0.1 are closed: the PROXY header is missing") == 1
    assert "send-proxy-v2" in told
    assert run(main(b"GET / HTTP/1.1\r\n\r\n", ())) == ""


def test_peers_that_only_connect_cause_no_warning(
    tls: Contexts, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor if the listener asks for certificates, where failed handshakes are reported."""

    async def main(proxies: tuple[str, ...]) -> None:
        async with a_listener(limits_of(), tls, proxies) as listener:
            with ExitStack() as stack:
                silent(stack, listener, 3)
                await until_accepted(listener, 3)
            await until_accepted(listener, 0)

    mode, tls[0].verify_mode = tls[0].verify_mode, ssl.CERT_REQUIRED
    try:
        for proxies in ((), ("127.0.0.1",)):
            run(main(proxies))
    finally:
        tls[0].verify_mode = mode
    assert [each for each in caplog.records if each.levelname == "WARNING"] == []


def test_without_free_descriptors_accepting_waits_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("papaya.http.acceptor._RETRY_S", 0.01)
    failures = [OSError(errno.EMFILE, "Too many open files")] * 3
    accept = socket.socket.accept

    def no_descriptors(listening: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return accept(listening)

    async def main() -> None:
        async with a_listener(limits_of()) as listener:
            monkeypatch.setattr(socket.socket, "accept", no_descriptors)
            assert (await ask(listener)).status == 200

    run(main())
    assert not failures
    assert "cannot accept connections" in caplog.text


def test_what_counts_as_one_address() -> None:
    assert address_key("192.0.2.7") != address_key("192.0.2.8")
    assert address_key("2001:db8:1:2::7") == address_key("2001:db8:1:2:ffff::8")
    assert address_key("2001:db8:1:2::7") != address_key("2001:db8:1:3::7")
    assert address_key("::ffff:192.0.2.7") == address_key("192.0.2.7")
    assert address_key("fe80::1%eth0") == address_key("fe80::2%eth0")
