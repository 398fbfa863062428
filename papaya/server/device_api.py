"""The HTTP API for devices: passes requests to the selector and sends its answers.

A device shows its token when it checks in; after that its tickets say what it may do. The selector
gets the identity that the token shows. Parameters are public under their hash, immutable, and can
be cached. Sums and optimizer state are not served. If the blob store has URLs, a device may ask for
that of its parameters and download them without the selector.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import msgspec

from papaya.errors import MissingBlob, OperatorError, ProtocolError
from papaya.http.exchange import Exchange, as_refusal
from papaya.http.routes import Buffered, HttpRoute
from papaya.messages import wire
from papaya.messages.base import BlobKey, Message
from papaya.messages.events import CredentialsRejected
from papaya.messages.participation import Join, Refused, Retry
from papaya.messages.paths import PARAMETERS_PATH, PATHS, URLS_PATH
from papaya.messages.selection import CheckIn, Gone, IdentifiedCheckIn, JoinDecided, Located
from papaya.server.auth import UNDECIDED, DeviceAuth
from papaya.server.device_openapi import device_document
from papaya.server.host import Host
from papaya.server.logs import log
from papaya.server.metrics import DriverMetrics
from papaya.server.replies import (
    BAD_REQUEST,
    NOT_FOUND,
    NOT_MODIFIED,
    UNAUTHORIZED,
    WaitingDevice,
    answer,
    blame_peer,
)
from papaya.store.blobs import PUBLIC_KEY, Blobs

logger = logging.getLogger("papaya.server")

MAX_REQUEST_BYTES = 64 << 10
_TOKEN_HINT = "send the header Authorization: Bearer <device token>"
_FETCHES_AT_ONCE = 8
_FETCH_AGAIN_S = 1.0
_FOREVER = "public, max-age=31536000, immutable"


TICKETED: tuple[type[Message], ...] = tuple(kind for kind in PATHS if kind is not CheckIn)
"""Small requests that carry a ticket."""
_PASSED_ON = tuple(kind for kind in TICKETED if kind is not Join)


def participation_routes(
    deliver: Callable[[Message, WaitingDevice], None],
    count: Callable[[Message], None] | None = None,
    kinds: tuple[type[Message], ...] = TICKETED,
) -> list[HttpRoute]:
    """Routes of requests that carry a ticket, at a selector and at an aggregator."""
    return [
        Buffered("POST", PATHS[kind], partial(_on_request, kind, deliver, count), MAX_REQUEST_BYTES)
        for kind in kinds
    ]


def _on_request(
    kind: type[Message],
    deliver: Callable[[Message, WaitingDevice], None],
    count: Callable[[Message], None] | None,
    exchange: Exchange,
    body: bytes,
) -> None:
    message = parse(kind, exchange, body)
    if message is not None:
        deliver(message, WaitingDevice(exchange, count))


def parse(kind: type[Message], exchange: Exchange, body: bytes) -> Message | None:
    """The message, or None after answering that it is invalid."""
    try:
        message = wire.from_device.parse(body)
    except ProtocolError as error:
        answer(exchange, Refused(str(error)[:128], error.hint[:128]), BAD_REQUEST)
        return None
    if type(message) is not kind:
        reason = f"{type(message).__name__} was sent to the path of {kind.__name__}"
        answer(exchange, Refused(reason), BAD_REQUEST)
        return None
    return message


_DELETED = "these parameters have been deleted"
_Fetched = TypeVar("_Fetched")


@cache
def _openapi() -> bytes:
    return msgspec.json.encode(device_document())


_MAX_SEEN = 20_000


class Door:
    """Check-ins, and parameters by key."""

    def __init__(
        self,
        selector: Host,
        auth: DeviceAuth,
        blobs: Blobs,
        metrics: DriverMetrics,
        locate: Callable[[BlobKey], str] | None = None,
    ) -> None:
        """`locate` returns the URL of a public blob and may block; None if there are no URLs."""
        self._selector = selector
        self._auth = auth
        self._blobs = blobs
        self._metrics = metrics
        self._locate = locate
        # A slow blob store holds up these threads and nothing else.
        self._fetching = ThreadPoolExecutor(_FETCHES_AT_ONCE, "papaya-fetch")
        self._verifying: set[asyncio.Task[None]] = set()
        self._seen: dict[str, None] = {}  # identities, the oldest first

    def has_seen(self, device: str) -> bool:
        """Has the device checked in recently, since this process started?"""
        return device in self._seen

    def routes(self) -> list[HttpRoute]:
        return [
            Buffered("POST", PATHS[CheckIn], self._on_check_in, MAX_REQUEST_BYTES),
            Buffered("GET", PARAMETERS_PATH, self._on_parameters),
            Buffered("GET", URLS_PATH, self._on_url),
            Buffered("GET", "/v1/openapi.json", self._on_openapi),
            Buffered("POST", PATHS[Join], self._on_join, MAX_REQUEST_BYTES),
            *participation_routes(self._selector.deliver, self._count_answer, _PASSED_ON),
        ]

    def _count_answer(self, message: Message) -> None:
        self._metrics.answers.labels(type(message).__name__).inc()

    def _on_openapi(self, exchange: Exchange, body: bytes) -> None:
        exchange.answer(200, _openapi())

    # -- check-in ---------------------------------------------------------------------------

    def _on_check_in(self, exchange: Exchange, body: bytes) -> None:
        identity = self._auth.verify_now(exchange.head.headers.get("authorization"))
        if identity is UNDECIDED:
            task = asyncio.get_running_loop().create_task(self._verify(exchange, body))
            self._verifying.add(task)
            task.add_done_callback(self._verifying.discard)
        else:
            self._admit(exchange, body, identity)

    async def _verify(self, exchange: Exchange, body: bytes) -> None:
        try:
            identity = await self._auth.verify(exchange.head.headers.get("authorization"))
            self._admit(exchange, body, identity)
        except Exception as error:
            refusal = as_refusal(error, blame_peer)
            if exchange.is_open:
                exchange.answer_problem(refusal.status, str(refusal))

    def _admit(self, exchange: Exchange, body: bytes, identity: str | None) -> None:
        if not exchange.is_open:
            return  # it disconnected during verification
        if identity is None:
            refused = Refused("the device token is missing or not valid", _TOKEN_HINT)
            answer(exchange, refused, UNAUTHORIZED)
            log(CredentialsRejected("devices", ""))
            return
        message = parse(CheckIn, exchange, body)
        if not isinstance(message, CheckIn):
            return  # it was answered
        self._metrics.check_ins.inc()
        if identity:
            self._seen.pop(identity, None)
            self._seen[identity] = None
            while len(self._seen) > _MAX_SEEN:
                del self._seen[next(iter(self._seen))]
        self._hold(exchange, IdentifiedCheckIn(identity, message) if identity else message)

    def _hold(self, exchange: Exchange, message: Message) -> None:
        waiting = WaitingDevice(exchange, self._count_answer)
        exchange.on_gone(partial(self._selector.deliver, Gone(), waiting))
        self._selector.deliver(message, waiting)

    def _on_join(self, exchange: Exchange, body: bytes) -> None:
        """Also tell the selector when the aggregator has decided."""
        join = parse(Join, exchange, body)
        if isinstance(join, Join):
            decided = partial(self._selector.deliver, JoinDecided(join.ticket))
            self._selector.deliver(join, WaitingDevice(exchange, self._count_answer, decided))

    # -- parameters -------------------------------------------------------------------------

    def _on_parameters(self, exchange: Exchange, body: bytes) -> None:
        key = exchange.captured["key"]
        found = PUBLIC_KEY.fullmatch(key)
        if found is None:
            answer(exchange, Refused("there are no parameters under this key"), NOT_FOUND)
            return
        tag = f'"{found["hash"]}"'
        headers = (("ETag", tag), ("Cache-Control", _FOREVER))
        if exchange.head.headers.get("if-none-match") == tag:
            exchange.answer(NOT_MODIFIED, b"", headers)
            return

        def send(path: Path) -> None:
            exchange.answer_file(path, headers)

        if self._blobs.is_remote:
            self._fetch(exchange, partial(self._blobs.path, key), send)
            return
        try:
            path = self._blobs.path(key)
        except MissingBlob:
            answer(exchange, Refused(_DELETED), NOT_FOUND)
        else:
            send(path)

    def _on_url(self, exchange: Exchange, body: bytes) -> None:
        key = exchange.captured["key"]
        if self._locate is None or PUBLIC_KEY.fullmatch(key) is None:
            answer(exchange, Refused("there is no URL of this key"), NOT_FOUND)
            return

        def send(url: str) -> None:
            exchange.answer(200, wire.encode(Located(url)), (("Cache-Control", "no-store"),))

        self._fetch(exchange, partial(self._locate, key), send)

    def _fetch(
        self, exchange: Exchange, get: Callable[[], _Fetched], send: Callable[[_Fetched], None]
    ) -> None:
        """Call `get` on a thread and answer with the result, unless the device has gone."""
        loop = asyncio.get_running_loop()
        fetched = loop.run_in_executor(self._fetching, get)

        def done(fetched: asyncio.Future[_Fetched]) -> None:
            error = fetched.exception()
            if not exchange.is_open:
                return
            if error is None:
                try:
                    send(fetched.result())
                except Exception as failure:  # no free file descriptor, for example
                    refusal = as_refusal(failure)
                    if exchange.is_open:
                        exchange.answer_problem(refusal.status, str(refusal))
            elif isinstance(error, MissingBlob):
                answer(exchange, Refused(_DELETED), NOT_FOUND)
            elif isinstance(error, OperatorError):
                logger.warning("%s (hint: %s)", error, error.hint)
                answer(exchange, Retry("the blob store does not answer", after_s=_FETCH_AGAIN_S))
            else:
                logger.error("cannot read the blob store", exc_info=error)
                exchange.answer_problem(500, "internal server error")

        fetched.add_done_callback(done)
