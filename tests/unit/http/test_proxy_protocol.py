"""The header of the PROXY protocol: what it tells, and what is refused."""

from __future__ import annotations

import asyncio
import socket
from ipaddress import ip_address

import pytest

from papaya.http.acceptor import address_key
from papaya.http.errors import HttpError
from papaya.http.proxy_protocol import (
    LOCAL_HEADER,
    LeadsBack,
    ProxiedClient,
    parse_v1,
    parse_v2,
    read_client,
    render_v2,
)
from tests.unit.http.loopback import LOOPS, run

SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
PASSED = b"\xe5\x00\x0dpapaya passed"


def v2(source: str, port: int, command: int = 0x21, extra: bytes = b"") -> bytes:
    address = ip_address(source)
    family = 0x11 if address.version == 4 else 0x21
    ports = port.to_bytes(2, "big") + (443).to_bytes(2, "big")
    rest = address.packed + address.packed + ports + extra
    return SIGNATURE + bytes([command, family]) + len(rest).to_bytes(2, "big") + rest


V1 = b"PROXY TCP4 192.0.2.7 10.0.0.1 4711 443\r\n"


@pytest.mark.parametrize(
    ("header", "client"),
    [
        (V1, ("192.0.2.7", 4711)),
        (b"PROXY TCP6 2001:db8::7 2001:db8::1 4711 443\r\n", ("2001:db8::7", 4711)),
        (b"PROXY UNKNOWN\r\n", None),
        (b"PROXY UNKNOWN ffff::1 ffff::2 65535 65535\r\n", None),
        (v2("192.0.2.7", 4711), ("192.0.2.7", 4711)),
        (v2("192.0.2.7", 4711, extra=b"\x04\x00\x01x"), ("192.0.2.7", 4711)),
        (v2("2001:db8::7", 4711), ("2001:db8::7", 4711)),
        (v2("192.0.2.7", 4711, command=0x20), None),
        (LOCAL_HEADER, None),
    ],
)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("piece_bytes", [1, 1000])
def test_exactly_the_header_is_read(
    header: bytes, client: ProxiedClient | None, loop: str, piece_bytes: int
) -> None:
    """What follows belongs to TLS or HTTP."""

    async def main() -> None:
        near, far = socket.socketpair()
        with near, far:
            far.setblocking(False)
            reading = asyncio.create_task(read_client(far))
            data = header + b"next\n"
            for at in range(0, len(data), piece_bytes):
                near.sendall(data[at : at + piece_bytes])
                await asyncio.sleep(0)
            assert await reading == client
            assert far.recv(100) == b"next\n"

    run(main(), loop)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: h\r\n\r\n",
        b"PROXY " + 200 * b"x",
        V1[:-2] + b"\n" + 200 * b"x",
        SIGNATURE + b"\x21\x11\xff\xff",
    ],
)
def test_what_is_no_header_is_refused(data: bytes) -> None:
    async def main() -> None:
        near, far = socket.socketpair()
        with near, far:
            far.setblocking(False)
            near.sendall(data)
            with pytest.raises(HttpError, match="PROXY header"):
                await read_client(far)

    run(main())


def test_a_header_that_ends_early_is_an_error() -> None:
    async def main() -> None:
        near, far = socket.socketpair()
        with far:
            far.setblocking(False)
            near.sendall(V1[:20])
            near.close()
            with pytest.raises(ConnectionError, match="before the end"):
                await read_client(far)

    run(main())


@pytest.mark.parametrize(
    "line",
    [
        b"PROXY TCP4 2001:db8::7 10.0.0.1 4711 443\r\n",
        b"PROXY TCP6 192.0.2.7 10.0.0.1 4711 443\r\n",
        b"PROXY TCP4 192.0.2.700 10.0.0.1 4711 443\r\n",
        b"PROXY TCP4 192.0.2.7 10.0.0.1 65536 443\r\n",
        b"PROXY TCP4 192.0.2.7 10.0.0.1 4711\r\n",
        b"PROXY TCP4  192.0.2.7 10.0.0.1 4711 443\r\n",
        b"PROXY UDP4 192.0.2.7 10.0.0.1 4711 443\r\n",
        V1[:-2] + b"\n",
    ],
)
def test_malformed_lines(line: bytes) -> None:
    with pytest.raises(HttpError, match="malformed"):
        parse_v1(line)


@pytest.mark.parametrize(
    ("fixed", "rest"),
    [
        (b"\x11\x11\0\x0c", bytes(12)),  # version 1 in the binary format
        (b"\x22\x11\0\x0c", bytes(12)),  # an unknown command
        (b"\x21\x12\0\x0c", bytes(12)),  # UDP
        (b"\x21\x31\0\xd8", bytes(216)),  # a Unix socket
        (b"\x21\x11\0\x0b", bytes(11)),  # too short
        (b"\x21\x21\0\x0c", bytes(12)),  # too short for IPv6
    ],
)
def test_malformed_binary_headers(fixed: bytes, rest: bytes) -> None:
    with pytest.raises(HttpError, match="TCP connection"):
        parse_v2(fixed, rest)


@pytest.mark.parametrize(
    ("client", "server", "told"),
    [
        (("192.0.2.7", 4711), ("10.0.0.1", 443), "192.0.2.7"),
        (("192.0.2.7", 65535), ("10.0.0.1", 1), "192.0.2.7"),
        (("2001:db8::7", 4711), ("2001:db8::1", 443, 0, 0), "2001:db8::7"),
        (("fe80::7%eth0", 4711), ("fe80::1%eth0", 443, 0, 2), "fe80::7"),
        (("2001:db8::7", 4711), ("10.0.0.1", 443), "2001:db8::7"),
        (("192.0.2.7", 4711), ("2001:db8::1", 443, 0, 0), "::ffff:192.0.2.7"),
        (("::ffff:192.0.2.7", 4711), ("10.0.0.1", 443), "::ffff:192.0.2.7"),
    ],
)
def test_a_header_of_ours_tells_the_client(
    client: ProxiedClient, server: tuple[object, ...], told: str
) -> None:
    header = render_v2(client, server)
    fixed, rest = header[12:16], header[16:]
    assert header.startswith(SIGNATURE)
    assert int.from_bytes(fixed[2:], "big") == len(rest)
    parsed = parse_v2(fixed, rest)
    assert parsed is not None
    assert (ip_address(parsed[0]), parsed[1]) == (ip_address(told), client[1])
    assert address_key(parsed[0]) == address_key(client[0]), "limits count the same client"

    async def main() -> None:
        near, far = socket.socketpair()
        with near, far:
            far.setblocking(False)
            near.sendall(header + b"next")
            assert await read_client(far) == parsed
            assert far.recv(100) == b"next"
            near.sendall(header)
            with pytest.raises(LeadsBack):
                await read_client(far, accepts_passed=False)
            near.sendall(LOCAL_HEADER)
            with pytest.raises(LeadsBack):
                await read_client(far, accepts_passed=False)
            for extra in (b"", b"\x04\x00\x01x", b"\xee\x00\x05\x01\x00\xe5\x00\x0d"):
                near.sendall(v2("192.0.2.7", 4711, extra=extra))
                assert await read_client(far, accepts_passed=False) == ("192.0.2.7", 4711)

    run(main())


@pytest.mark.parametrize(
    ("client", "server", "header"),
    [
        (
            ("192.0.2.7", 4711),
            ("10.0.0.1", 443),
            SIGNATURE + bytes.fromhex("2111001cc00002070a000001126701bb") + PASSED,
        ),
        (
            ("2001:db8::7", 4711),
            ("10.0.0.1", 443),
            SIGNATURE
            + bytes.fromhex("21210034")
            + bytes.fromhex("20010db8000000000000000000000007")
            + bytes.fromhex("00000000000000000000ffff0a000001")
            + bytes.fromhex("126701bb")
            + PASSED,
        ),
    ],
)
def test_the_bytes_of_a_header_of_ours(
    client: ProxiedClient, server: tuple[object, ...], header: bytes
) -> None:
    """Section 2.2 of the specification: both addresses, of one family, both ports, extensions."""
    assert render_v2(client, server) == header
