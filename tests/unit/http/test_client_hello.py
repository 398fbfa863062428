"""The name in a TLS client's first message: whose it is, and that reading it takes nothing away."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.http import client_hello
from papaya.http.client_hello import peek_server_name, server_name
from papaya.http.sockets import until_readable
from tests.unit.http.loopback import LOOPS, run

NAME = "aggregator-1.uploads.example"
RECORD_HEAD_BYTES = 5
MAX_RECORD_BYTES = 16 << 10
PADDING = 21  # an extension with any content

both_loops = pytest.mark.parametrize("loop", LOOPS)


def a_hello(name: str | None = NAME, version: ssl.TLSVersion | None = None) -> bytes:
    """What a real client sends first, with the head of its record."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.set_alpn_protocols(["http/1.1"])
    if version is not None:
        context.minimum_version = context.maximum_version = version
    sent = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname=name).do_handshake()
    return sent.read()


def a_message(name: str | None = NAME) -> bytes:
    return a_hello(name)[RECORD_HEAD_BYTES:]


# -- messages made by hand --------------------------------------------------------------------


def vector(content: bytes, length_bytes: int) -> bytes:
    return len(content).to_bytes(length_bytes, "big") + content


def extension(kind: int, content: bytes) -> bytes:
    return kind.to_bytes(2, "big") + vector(content, 2)


def names(*entries: tuple[int, bytes]) -> bytes:
    """The extension with the names, each with its type."""
    return extension(0, vector(b"".join(bytes([kind]) + vector(n, 2) for kind, n in entries), 2))


def a_made_message(extensions: bytes, kind: int = 1, session: bytes = bytes(32)) -> bytes:
    ciphers, compressions = vector(b"\x13\x01\x13\x02", 2), vector(b"\0", 1)
    content = b"\x03\x03" + bytes(range(32)) + vector(session, 1) + ciphers + compressions
    return bytes([kind]) + vector(content + vector(extensions, 2), 3)


def a_record(message: bytes) -> bytes:
    return b"\x16\x03\x01" + vector(message, 2)


def a_padded_record(length: int) -> bytes:
    """The name stands at the very end."""
    unpadded = len(a_made_message(extension(PADDING, b"") + names((0, NAME.encode()))))
    padding = extension(PADDING, bytes(length - unpadded))
    record = a_record(a_made_message(padding + names((0, NAME.encode()))))
    assert len(record) == RECORD_HEAD_BYTES + length
    return record


@pytest.mark.parametrize("version", [None, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_the_name_of_a_real_client(version: ssl.TLSVersion | None) -> None:
    assert server_name(a_hello(NAME, version)[RECORD_HEAD_BYTES:]) == NAME
    assert server_name(a_hello(None, version)[RECORD_HEAD_BYTES:]) == ""
    assert server_name(a_hello("127.0.0.1", version)[RECORD_HEAD_BYTES:]) == "", "not for addresses"


def test_the_name_is_in_lower_case() -> None:
    message = a_message("Aggregator-1.UPLOADS.Example")
    assert b"Aggregator-1.UPLOADS.Example" in message
    assert server_name(message) == NAME


@pytest.mark.parametrize("session", [b"", bytes(32)])
@pytest.mark.parametrize("before", [b"", extension(PADDING, bytes(300)) + extension(16, b"")])
def test_the_name_is_found_among_other_extensions(session: bytes, before: bytes) -> None:
    extensions = before + names((0, NAME.encode())) + extension(PADDING, b"\0\0")
    assert server_name(a_made_message(extensions, session=session)) == NAME


def test_every_strict_prefix_has_no_name() -> None:
    message = a_message()
    found = {server_name(message[:length]) for length in range(len(message))}
    assert found == {""}


@pytest.mark.parametrize(
    "message",
    [
        a_made_message(b""),
        a_made_message(names()),
        a_made_message(extension(0, b"")),
        a_made_message(names((0, b""))),
        a_made_message(extension(0, b"\xff\xff\0" + vector(NAME.encode(), 2))),
        a_made_message(extension(0, vector(b"\0" + vector(NAME.encode(), 2)[:-1], 2))),
        a_made_message(names((0, NAME.encode()))[:-1]),
        a_made_message(b"\0"),
        a_made_message(names((0, NAME.encode())), kind=2),
        a_made_message(names((1, NAME.encode()))),
        a_made_message(names((0, "aggregator-ü.uploads.example".encode()))),
        a_made_message(names((0, b"aggregator-\xff.uploads.example"))),
        a_made_message(names((0, NAME.encode()))).replace(
            vector(bytes(32), 1), b"\xff" + bytes(32)
        ),
        b"\x01\xff\xff\xff" + a_made_message(names((0, NAME.encode())))[4:],
        a_made_message(b"")[:-2],
    ],
    ids=[
        "no extension",
        "an empty list of names",
        "no list of names",
        "an empty name",
        "a list that is longer than its extension",
        "a name that is longer than its list",
        "an extension that is longer than the message",
        "half a type of an extension",
        "another message of the handshake",
        "a name of another type",
        "UTF-8",
        "not ASCII",
        "a session that is longer than the message",
        "a message that is longer than its record",
        "no extensions at all",
    ],
)
def test_a_message_without_a_valid_name(message: bytes) -> None:
    assert server_name(message) == ""


def assert_sound(message: bytes) -> None:
    """Whatever it is, the name was in the message."""
    name = server_name(message)
    assert name == name.lower()
    assert name.encode("ascii") in message.lower()


MADE = a_made_message(extension(PADDING, bytes(3)) + names((0, NAME.encode())), session=b"1234")


@given(st.binary(max_size=200))
def test_any_bytes_have_a_name_or_none(data: bytes) -> None:
    assert_sound(data)
    assert_sound(b"\x01" + vector(data, 3))
    assert_sound(a_made_message(data))
    assert_sound(a_made_message(extension(0, data)))


@given(st.lists(st.tuples(st.integers(0, len(MADE) - 1), st.integers(0, 255)), max_size=4))
def test_a_changed_message_has_a_name_or_none(changes: list[tuple[int, int]]) -> None:
    changed = bytearray(MADE)
    for at, value in changes:
        changed[at] = value
    assert_sound(bytes(changed))


def test_each_changed_byte_of_a_real_message_gives_a_name_or_none() -> None:
    message = a_message()
    for at in range(len(message)):
        for value in (0, 0xFF, message[at] ^ 1, message[at] ^ 0x80):
            assert_sound(message[:at] + bytes([value]) + message[at + 1 :])


# -- in a socket ------------------------------------------------------------------------------


@contextmanager
def a_connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The client's end and the server's, over TCP: the kernel ignores SO_RCVLOWAT elsewhere."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname())
        server, _ = listening.accept()
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server.setblocking(False)
    with client, server:
        yield client, server


async def all_bytes(connection: socket.socket) -> bytes:
    """Until the peer closes."""
    loop = asyncio.get_running_loop()
    data = b""
    while piece := await loop.sock_recv(connection, 1 << 16):
        data += piece
    return data


async def turns(count: int) -> None:
    """Let the loop look `count` times for what it can do."""
    for _ in range(count):
        await asyncio.sleep(0)


class Peeks:
    """Counts how often the socket is looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._peek_now = client_hello._peek_now
        monkeypatch.setattr(client_hello, "_peek_now", self._counted)
        monkeypatch.setattr(client_hello, "_RETRY_S", 0.0)  # a pause would hide a busy loop

    def _counted(self, connection: socket.socket, count: int) -> bytes:
        self.count += 1
        return self._peek_now(connection, count)


@both_loops
@pytest.mark.parametrize(
    ("data", "name"),
    [
        (a_hello(), NAME),
        (a_hello(None), ""),
        (a_padded_record(MAX_RECORD_BYTES), NAME),
        (a_padded_record(MAX_RECORD_BYTES + 1), ""),
        (a_record(b""), ""),
        (b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", ""),
        (b"PROXY TCP4 192.0.2.7 10.0.0.1 4711 443\r\n" + a_hello(), ""),
        (b"\x17" + a_hello()[1:], ""),
    ],
    ids=[
        "a name",
        "no name",
        "the largest record",
        "a larger record",
        "an empty record",
        "HTTP",
        "PROXY",
        "another record",
    ],
)
def test_every_byte_stays_in_the_socket(loop: str, data: bytes, name: str) -> None:
    async def main() -> None:
        with a_connection() as (client, server):
            client.sendall(data + b"what follows")
            assert await peek_server_name(server) == name
            assert server.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
            client.shutdown(socket.SHUT_WR)
            assert await all_bytes(server) == data + b"what follows"

    run(main(), loop)


@both_loops
@pytest.mark.parametrize("first", [0, 1, RECORD_HEAD_BYTES, RECORD_HEAD_BYTES + 1])
def test_a_message_that_comes_byte_by_byte_does_not_keep_the_loop_busy(
    loop: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports the socket when the head of the record is complete, and then when the
    record is. Otherwise a few clients that send single bytes could occupy the server.
    """
    peeks, data = Peeks(monkeypatch), a_hello()

    async def main() -> None:
        with a_connection() as (client, server):
            client.sendall(data[:first])
            peeking = asyncio.create_task(peek_server_name(server))
            for at in range(first, len(data)):
                await turns(3)
                assert not peeking.done()
                client.sendall(data[at : at + 1])
            assert await peeking == NAME
            assert peeks.count <= 4
            client.shutdown(socket.SHUT_WR)
            assert await all_bytes(server) == data

    run(main(), loop)


@both_loops
@pytest.mark.parametrize("length", [0, 3, RECORD_HEAD_BYTES, 100])
def test_a_peer_that_waits_does_not_keep_the_loop_busy(
    loop: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    peeks = Peeks(monkeypatch)

    async def main() -> None:
        with a_connection() as (client, server):
            client.sendall(a_hello()[:length])
            peeking = asyncio.create_task(peek_server_name(server))
            await turns(1000)
            assert not peeking.done()
            assert peeks.count <= 3
            peeking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await peeking
            assert server.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1

    run(main(), loop)


@both_loops
@pytest.mark.parametrize("length", [0, 3, RECORD_HEAD_BYTES, 100])
@pytest.mark.parametrize("waits", [False, True])
def test_a_peer_that_closes_in_the_middle_has_no_name(loop: str, length: int, waits: bool) -> None:
    data = a_hello()[:length]

    async def main() -> None:
        with a_connection() as (client, server):
            client.sendall(data)
            peeking = asyncio.create_task(peek_server_name(server))
            await turns(10 * waits)
            client.shutdown(socket.SHUT_WR)
            assert await peeking == ""
            assert await all_bytes(server) == data

    run(main(), loop)


@both_loops
def test_a_reset_connection_is_an_error(loop: str) -> None:
    async def main() -> None:
        with a_connection() as (client, server):
            peeking = asyncio.create_task(peek_server_name(server))
            await turns(10)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            with pytest.raises(ConnectionResetError):
                await peeking

    run(main(), loop)


@both_loops
def test_a_socket_that_is_reported_too_early_is_waited_for(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel does this if it lacks memory."""
    reported: list[int] = []

    async def main() -> None:
        data, ready = a_hello(), until_readable
        with a_connection() as (client, server):

            async def early(connection: socket.socket) -> None:
                reported.append(len(reported))
                if len(reported) == 3:
                    client.sendall(data[100:])
                if len(reported) >= 3:
                    await ready(connection)

            monkeypatch.setattr(client_hello, "until_readable", early)
            client.sendall(data[:100])
            assert await peek_server_name(server) == NAME

    run(main(), loop)
    assert len(reported) == 3


def test_a_message_with_thousands_of_extensions_has_no_name() -> None:
    """To look at all of them would take milliseconds."""
    few, many = (extension(PADDING, b"") * count for count in (20, 4000))
    assert server_name(a_made_message(few + names((0, NAME.encode())))) == NAME
    assert server_name(a_made_message(many + names((0, NAME.encode())))) == ""
