"""The PROXY protocol, versions 1 and 2: how whoever is in front tells the client's address.

The header comes before anything else, also before TLS. A proxy that is configured to send it must
send it; a missing or malformed header closes the connection, because guessing would let clients
choose their own address. Specification: haproxy.org/download/2.9/doc/proxy-protocol.txt
"""

from __future__ import annotations

import asyncio
import re
import socket
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from papaya.http.errors import HttpError

_SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
_V1_MAX_BYTES = 107
_V2_MAX_BYTES = 2048  # of addresses and extensions; the specification expects less than 512
_V1 = re.compile(rb"PROXY TCP([46]) ([0-9a-fA-F.:]+) [0-9a-fA-F.:]+ (\d{1,5}) \d{1,5}\r\n")
_LOCAL, _PROXIED = 0x20, 0x21
# An extension for private use: one of our servers has passed the connection through.
_PASSED = b"\xe5\x00\x0dpapaya passed"
_UNSPECIFIED = 0x00  # the family of a connection whose client the proxy does not tell

LOCAL_HEADER = _SIGNATURE + bytes([_LOCAL, _UNSPECIFIED, 0, len(_PASSED)]) + _PASSED
"""Of a connection that we make ourselves, to check where connections are passed through to."""

ProxiedClient = tuple[str, int]


async def read_client(
    connection: socket.socket, *, accepts_passed: bool = True
) -> ProxiedClient | None:
    """Reads exactly the header. None: the proxy itself is the client, as in health checks.

    `accepts_passed`: False refuses connections that a server of ours has passed through.
    """
    start = await _exactly(connection, len(_SIGNATURE))
    if start == _SIGNATURE:
        fixed = await _exactly(connection, 4)
        length = int.from_bytes(fixed[2:], "big")
        if length > _V2_MAX_BYTES:
            raise HttpError(400, "the PROXY header is too long")
        rest = await _exactly(connection, length)
        if not accepts_passed and rest.endswith(_PASSED):
            raise LeadsBack("its upload_routes lead to this selector, not to an aggregator")
        return parse_v2(fixed, rest)
    if not start.startswith(b"PROXY "):
        raise HttpError(400, "the PROXY header is missing")
    return parse_v1(await _line(connection, start))


class LeadsBack(ConnectionAbortedError):
    """A server of ours passed a connection through that this server would pass through again."""


class UnexpectedProxyHeader(ConnectionAbortedError):
    """A peer that is not configured as a proxy sends the header."""


def refuse_header(connection: socket.socket) -> None:
    """Raises UnexpectedProxyHeader if a header is the next to be read. Reads nothing."""
    start = b""
    with suppress(OSError):  # there may be nothing to read
        # Not the method of a subclass, which may not allow flags.
        start = socket.socket.recv(connection, len(_SIGNATURE), socket.MSG_PEEK)
    if start.startswith((b"PROXY ", _SIGNATURE)):
        raise UnexpectedProxyHeader("the PROXY header is not expected")


def parse_v1(line: bytes) -> ProxiedClient | None:
    """`line` ends with its CRLF."""
    if line.startswith(b"PROXY UNKNOWN") and line.endswith(b"\r\n"):
        return None
    found = _V1.fullmatch(line)
    if found is None:
        raise HttpError(400, "the PROXY header is malformed")
    return _client(found[2].decode(), int(found[3]), int(found[1]))


def parse_v2(fixed: bytes, rest: bytes) -> ProxiedClient | None:
    """`fixed`: the four bytes after the signature. `rest`: as many as they announce."""
    command, family = fixed[0], fixed[1]
    if command == _LOCAL or (command == _PROXIED and family == _UNSPECIFIED):
        return None
    if command == _PROXIED and family == 0x11 and len(rest) >= 12:
        return str(IPv4Address(rest[:4])), int.from_bytes(rest[8:10], "big")
    if command == _PROXIED and family == 0x21 and len(rest) >= 36:
        return str(IPv6Address(rest[:16])), int.from_bytes(rest[32:34], "big")
    raise HttpError(400, "the PROXY header is not of a TCP connection")


def render_v2(client: ProxiedClient, server: tuple[Any, ...]) -> bytes:
    """For a connection of `client` that we pass through. `server`: our address for the client."""
    source, target = _plain(client[0]), _plain(server[0])
    if source.version != target.version:  # the protocol has one family for both
        source, target = _as_v6(source), _as_v6(target)
    family = 0x11 if source.version == 4 else 0x21
    ports = client[1].to_bytes(2, "big") + int(server[1]).to_bytes(2, "big")
    rest = source.packed + target.packed + ports + _PASSED
    return _SIGNATURE + bytes([_PROXIED, family]) + len(rest).to_bytes(2, "big") + rest


def _plain(host: str) -> IPv4Address | IPv6Address:
    return ip_address(host.partition("%")[0])


def _as_v6(address: IPv4Address | IPv6Address) -> IPv6Address:
    return IPv6Address(f"::ffff:{address}") if address.version == 4 else IPv6Address(address)


def _client(host: str, port: int, version: int) -> ProxiedClient:
    try:
        address = ip_address(host)
    except ValueError:
        raise HttpError(400, "the PROXY header has a malformed address") from None
    if address.version != version or port > 65535:
        raise HttpError(400, "the PROXY header has a malformed address")
    return str(address), port


async def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = await asyncio.get_running_loop().sock_recv(connection, count - len(data))
        if not piece:
            raise ConnectionAbortedError("closed before the end of the PROXY header")
        data += piece
    return data


async def _line(connection: socket.socket, start: bytes) -> bytes:
    """The rest of the line. What follows it belongs to TLS or HTTP and must stay in the socket."""
    line = start
    while not line.endswith(b"\n"):
        if len(line) >= _V1_MAX_BYTES:
            raise HttpError(400, "the PROXY header is too long")
        line += await _exactly(connection, 1)
        if not line.endswith(b"\n"):
            with suppress(BlockingIOError, InterruptedError):
                waiting = connection.recv(_V1_MAX_BYTES - len(line), socket.MSG_PEEK)
                line += connection.recv(waiting.find(b"\n") + 1)
    return line
