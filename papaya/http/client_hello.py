"""Peeks at the server name (SNI, RFC 6066) in the first message of a TLS client.

The message stays in the socket for whoever serves the connection. Only the name is read. A message
that is malformed or spread over several records is treated as having no name.
"""

from __future__ import annotations

import asyncio
import select
import socket

from papaya.http.sockets import until_readable

_RECORD_HEAD_BYTES = 5
_MAX_RECORD_BYTES = 1 << 14
_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0
_RANDOM_BYTES = 32
_MAX_EXTENSIONS = 64  # clients send about 20; thousands of empty ones would take milliseconds
_RETRY_S = 0.05


async def peek_server_name(connection: socket.socket) -> str:
    """The name in lower case; empty if there is none. Raises OSError. Has no timeout of its own."""
    head = await _peek(connection, _RECORD_HEAD_BYTES)
    length = int.from_bytes(head[3:], "big")
    if len(head) < _RECORD_HEAD_BYTES or head[0] != _HANDSHAKE or length > _MAX_RECORD_BYTES:
        return ""
    record = await _peek(connection, _RECORD_HEAD_BYTES + length)
    return server_name(record[_RECORD_HEAD_BYTES:])


def server_name(message: bytes) -> str:
    """The name in a ClientHello, without the head of its record."""
    try:
        return _server_name(message)
    except (IndexError, UnicodeDecodeError):
        return ""


def _server_name(message: bytes) -> str:
    if message[0] != _CLIENT_HELLO:
        return ""
    hello, _ = _vector(message[1:], 3)
    rest = hello[2 + _RANDOM_BYTES :]
    for length_bytes in (1, 2, 1):  # session id, cipher suites, compression methods
        _, rest = _vector(rest, length_bytes)
    extensions, _ = _vector(rest, 2)
    for _ in range(_MAX_EXTENSIONS):
        if not extensions:
            break
        kind = int.from_bytes(extensions[:2], "big")
        content, extensions = _vector(extensions[2:], 2)
        if kind == _SERVER_NAME:
            names, _ = _vector(content, 2)
            if names[0] != _HOST_NAME:
                return ""
            name, _ = _vector(names[1:], 2)
            return name.decode("ascii").lower()
    return ""


def _vector(data: bytes, length_bytes: int) -> tuple[bytes, bytes]:
    """A vector with its length in front, and the rest. Raises IndexError if it is longer."""
    end = length_bytes + int.from_bytes(data[:length_bytes], "big")
    if len(data) < max(end, length_bytes):
        raise IndexError("the message ends early")
    return data[length_bytes:end], data[end:]


async def _peek(connection: socket.socket, count: int) -> bytes:
    """Fewer bytes than `count` if the peer has closed."""
    # The kernel reports the socket as readable when this many bytes are there. Otherwise a peer
    # that sends one byte would keep the loop busy.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
    try:
        found = _peek_now(connection, count)
        while len(found) < count and not _has_ended(connection):
            await until_readable(connection)
            found = _peek_now(connection, count)
            if len(found) < count:  # the peer has closed, or the kernel lacks memory
                await asyncio.sleep(_RETRY_S)
        return found
    finally:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


def _has_ended(connection: socket.socket) -> bool:
    """The peer sends nothing more."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))


def _peek_now(connection: socket.socket, count: int) -> bytes:
    try:
        return connection.recv(count, socket.MSG_PEEK)
    except (BlockingIOError, InterruptedError):
        return b""
