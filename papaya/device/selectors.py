"""A device's requests over HTTP: one message out, and one message or nothing back.

    POST /v1/check-in | join | heartbeat | report | complete | leave     the message as JSON
    PUT  /v1/uploads/{upload}/chunks/{index}     raw bytes; Papaya-Ticket, Papaya-Crc32

Anything except a message of `wire.to_device` counts as no answer: garbage, a proxy's page, a body
over the limit, a broken stream, silence. Answers are bounded by `DeviceLimits` before the machine
sees them. Redirects are not followed, cookies not kept, bodies not decompressed, and the token is
sent only to the configured servers.
"""

from __future__ import annotations

import asyncio
import socket
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias
from urllib.parse import quote, urlsplit

import aiohttp

from papaya import __version__
from papaya.credentials.tls import client_context, explain, explain_connecting
from papaya.credentials.token_files import Secret
from papaya.device.limits import DeviceLimits
from papaya.errors import ConfigError, ProtocolError
from papaya.messages import wire
from papaya.messages.base import Message
from papaya.messages.participation import Chunk
from papaya.messages.paths import CHUNK_PATH, CRC32_HEADER, PATHS, TICKET_HEADER
from papaya.messages.selection import CheckIn

# The longest answer is a grant with its offer: 256 KiB collateral, 16 KiB quote, in base64.
MAX_ANSWER_BYTES = 512 << 10
_SILENT = 3
_NO_TIMEOUT = aiohttp.ClientTimeout()
_PIECE_BYTES = 64 << 10
_SEND_BUFFER_BYTES = 128 << 10
_TELLS_PER_TIMEOUT = 4
# The errors that a peer, the network or the name service can cause.
BROKEN = (aiohttp.ClientError, TimeoutError, OSError, ValueError, EOFError)


Failed: TypeAlias = Callable[[str, str], None]


def check_url(url: str) -> str:
    """A server's address as `http://host:port`, without a trailing slash."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ConfigError.of("server", url, "is not an address", "write http://127.0.0.1:8750")
    return url.rstrip("/")


def check_urls(urls: Sequence[str]) -> tuple[str, ...]:
    if not urls:
        raise ConfigError.of("server", urls, "no server is given", "--server http://127.0.0.1:8750")
    return tuple(check_url(url) for url in urls)


def open_session(
    certificates: Path | None = None, proxy: str | None = None
) -> aiohttp.ClientSession:
    """One pool of connections for all devices of a process. Call it inside a running loop."""
    tls = client_context(None if certificates is None else str(certificates))
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=tls, socket_factory=_socket),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        headers={"User-Agent": f"papaya/{__version__}", "Accept-Encoding": "identity"},
        proxy=proxy,
    )


async def read_bounded(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The body, or ProtocolError as soon as it is longer than `limit`."""
    body = bytearray()
    await read_into(body, response, limit)
    return bytes(body)


class PartOfBody(Protocol):
    """What has arrived of a body, in memory or on disk."""

    def __len__(self) -> int: ...

    def extend(self, piece: bytes, /) -> object: ...


async def read_into(body: PartOfBody, response: aiohttp.ClientResponse, limit: int) -> None:
    """Append what arrives, or ProtocolError as soon as all of it is longer than `limit`."""
    declared = len(body) + (response.content_length or 0)
    if declared > limit:
        raise ProtocolError(f"a body of {declared} bytes is over the limit of {limit}")
    while piece := await response.content.readany():
        body.extend(piece)
        if len(body) > limit:
            raise ProtocolError(f"a body is over the limit of {limit} bytes")


class Selectors:
    """The selectors of one process's devices. `told` gets changes of reachability."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        limits: DeviceLimits,
        on_reachable: Callable[[str, str | None, str], None],
    ) -> None:
        self._session = session
        self._limits = limits
        self._on_reachable = on_reachable
        self._failures: dict[str, int] = {}

    async def ask(
        self,
        selector: str,
        token: Secret | None,
        message: Message,
        timeout_s: float,
        moving: Callable[[], None] = lambda: None,
        *,
        failed: Failed | None = None,
    ) -> Message | None:
        """Send a message. Returns None without a valid answer.

        A long body has `timeout_s` for each piece, and `moving` is called a few times in that time.
        `failed`: given if `selector` is the `upload_url` of an aggregator. It gets the problem and
        a hint, and reachability is not reported, because the selectors are asked instead.
        """
        mark = partial(self._mark, selector) if failed is None else partial(_tell, failed)
        method, path, headers, body = _http(message)
        if token is not None and isinstance(message, CheckIn):  # later requests have tickets
            headers["Authorization"] = f"Bearer {token.reveal()}"
        try:
            async with (
                asyncio.timeout(timeout_s) as patience,
                self._session.request(
                    method,
                    selector + path,
                    data=_in_pieces(body, patience, timeout_s, moving),
                    headers=headers | {"Content-Length": str(len(body))},
                    allow_redirects=False,
                    timeout=_NO_TIMEOUT,
                ) as response,
            ):
                answer = wire.to_device.parse(await read_bounded(response, MAX_ANSWER_BYTES))
        except ProtocolError as error:
            mark(f"it answered, but the answer is invalid: {error}")
            return None
        except BROKEN as error:
            # aiohttp wraps the error that says why it could not connect.
            cause = getattr(error, "certificate_error", None) or getattr(error, "os_error", None)
            why = explain if cause is None else explain_connecting
            mark(*why(cause or error, selector))
            return None
        mark(None)
        return self._limits.bounded(answer)

    def _mark(self, selector: str, problem: str | None, hint: str = "") -> None:
        """Report a server as silent if it never answered, or failed three times in a row."""
        before = self._failures.get(selector, _SILENT - 1)
        after = 0 if problem is None else min(before + 1, _SILENT)
        self._failures[selector] = after
        if (before == _SILENT) != (after == _SILENT):
            self._on_reachable(selector, problem, hint)


def _tell(failed: Failed, problem: str | None, hint: str = "") -> None:
    if problem is not None:
        failed(problem, hint)


def _in_pieces(
    body: bytes, patience: asyncio.Timeout, timeout_s: float, moving: Callable[[], None]
) -> bytes | AsyncIterator[memoryview]:
    """Send a body in pieces, so that a slow connection has enough time."""
    if len(body) <= _PIECE_BYTES:
        return body

    async def pieces() -> AsyncIterator[memoryview]:
        loop = asyncio.get_running_loop()
        told_at, view = loop.time(), memoryview(body)
        for start in range(0, len(body), _PIECE_BYTES):
            yield view[start : start + _PIECE_BYTES]
            now = loop.time()
            patience.reschedule(now + timeout_s)
            if now - told_at >= timeout_s / _TELLS_PER_TIMEOUT:
                told_at = now
                moving()

    return pieces()


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket with a small send buffer, so that what it accepts is nearly delivered."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    return made


def _http(message: Message) -> tuple[str, str, dict[str, str], bytes]:
    if isinstance(message, Chunk):
        headers = {
            TICKET_HEADER: b64encode(message.ticket).decode(),
            CRC32_HEADER: f"{message.crc32:08x}",
            "Content-Type": "application/octet-stream",
        }
        upload = quote(message.upload, safe="")
        path = CHUNK_PATH.format(upload=upload, index=message.index)
        return "PUT", path, headers, message.data
    headers = {"Content-Type": "application/json"}
    return "POST", PATHS[type(message)], headers, wire.encode(message)
