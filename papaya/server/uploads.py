"""Chunks: received straight into pooled buffers, or passed through to the task's aggregator.

    device ── PUT ──▶ SELECTOR ── offer: where? ──▶ same process: into a pooled buffer
                                                 ▶ other server: cut through, piece by piece

Paper, "Participation": "the client uploads the model in chunks". Only
the aggregator reads the bytes. A body is refused before it is read if the machine does not want it,
if two bodies of the same upload are being received already, or if no buffer is free. A machine gets
complete chunks only; while a slow one is being received, it is told so.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Callable

from papaya.aggregator.upload import STARTER_BYTES, Owner
from papaya.aggregator.work import Arriving, Growing
from papaya.clock import Clock
from papaya.config.server import MAX_CHUNK_BYTES
from papaya.errors import ProtocolError
from papaya.http.client_connection import Response
from papaya.http.exchange import Exchange
from papaya.http.limits import ListenerLimits, spread
from papaya.http.relay import Relays
from papaya.http.routes import Receiver, Streamed
from papaya.machine import Forward, Reply
from papaya.messages.base import NodeId
from papaya.messages.participation import MAX_CHUNKS, Chunk, ChunkOffer, Refused, Retry
from papaya.messages.paths import CHUNK_PATH, CRC32_HEADER, TICKET_HEADER
from papaya.messages.tickets import claim_of
from papaya.selector.selector import Selector
from papaya.server.host import AggregatorHost
from papaya.server.metrics import DriverMetrics
from papaya.server.peers import Peers, address_of
from papaya.server.replies import STARTING, WaitingDevice, answer

_UPLOAD_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_INDEX = re.compile(r"0|[1-9][0-9]{0,3}")
_CRC32 = re.compile(r"[0-9a-f]{8}")
_MAX_TICKET_CHARS = 1368
_BUSY_RETRY_S = 0.5
_ANSWER_TIMEOUT_S = 30.0


class ArrivingChunk:
    """A chunk whose body is being received into pooled buffers.

    While nothing of its upload has arrived, the first bytes go to a short buffer, because a device
    that announces a chunk may send it slowly, or not at all.
    """

    def __init__(
        self,
        host: AggregatorHost,
        owner: Owner,
        buffer: memoryview,
        offer: ChunkOffer,
        crc32: int,
        waiting: WaitingDevice,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """`ended` is called once, when nothing more is received."""
        self._host = host
        self._owner = owner
        # Where the next bytes go. Shorter than the chunk until it has grown.
        self._buffer = buffer
        self._offer = offer
        self._crc32 = crc32
        self._waiting = waiting
        self._ended = ended
        # Bytes received so far, those that the machine knows of, and when it was told.
        self._count = 0
        self._told = 0
        self._told_at = host.now()
        self._is_broken_off = False
        host.arrivals.add(owner, self)

    def buffer(self, remaining: int) -> memoryview:
        return self._buffer[self._count : self._count + remaining]

    def received(self, count: int) -> None:
        self._count += count
        now = self._host.now()
        if now - self._told_at >= self._host.tell_arriving_s:
            self._tell(now)
        if self._count == len(self._buffer) < self._offer.length and not self._is_broken_off:
            self._grow(now)

    def _tell(self, now: float) -> None:
        untold, self._told = self._count - self._told, self._count
        self._told_at = now
        self._host.deliver(Arriving(*self._owner, untold))

    def _grow(self, now: float) -> None:
        """Go on in a whole buffer, if the machine has memory for this upload."""
        self._tell(now)
        self._host.deliver(Growing(*self._owner))
        if self._is_broken_off:
            return
        whole = self._host.pool.take(self._offer.length)
        if whole is None:
            self.break_off()
            return
        whole[: self._count] = self._buffer
        starter, self._buffer = self._buffer, whole
        self._host.pool.give_back(starter)

    def finished(self) -> None:
        self._ended()
        self._host.arrivals.remove(self._owner, self)
        offer = self._offer
        data = self._buffer[: offer.length]
        # A machine uses only its length and checksum, and passes it on to be kept.
        chunk = Chunk(offer.ticket, offer.upload, offer.index, self._crc32, data)  # type: ignore[arg-type]
        self._host.take(chunk, self._buffer, self._waiting)

    def broken(self) -> None:
        self._ended()
        self._host.arrivals.remove(self._owner, self)
        self._host.pool.give_back(self._buffer)

    def break_off(self) -> None:
        """Answer the device, once. The endpoint calls `broken` afterwards."""
        if self._is_broken_off:
            return
        self._is_broken_off = True
        self._waiting.answer(
            Retry("the memory of this upload is needed for other uploads", _BUSY_RETRY_S)
        )


class Uploads:
    """The chunk route of a listener. `selector` is None on an aggregator's own listener.

    `limits`: those of the aggregator's listener for servers, which receives chunks over at most
    three quarters of its connections. The rest is for messages: without orders and reports, an
    aggregator that slow devices keep busy would be declared dead. None: no limit.
    """

    def __init__(
        self,
        clock: Clock,
        peers: Peers,
        selector: Selector | None,
        aggregators: Callable[[], dict[NodeId, AggregatorHost]],
        metrics: DriverMetrics,
        limits: ListenerLimits | None = None,
    ) -> None:
        self._clock = clock
        self._peers = peers
        self._relays = Relays(peers.relays)
        self._selector = selector
        self._aggregators = aggregators
        self._bytes = metrics.upload_bytes
        self._limits = limits
        self._arriving = 0  # chunks that are being received into buffers

    def route(self) -> Streamed:
        return Streamed("PUT", CHUNK_PATH, self.receive, MAX_CHUNK_BYTES)

    def receive(self, exchange: Exchange) -> Receiver | None:
        try:
            offer, crc32 = parse_offer(exchange)
        except ProtocolError as error:
            answer(exchange, Refused(str(error)[:128], error.hint[:128]), 400)
            return None
        waiting = WaitingDevice(exchange)
        to = self._destination(offer, waiting)
        if to is None:
            return None
        host = self._aggregators().get(to)
        if host is None:
            self._bytes.labels("passed_on").inc(offer.length)
            return self._pass_on(exchange, to, waiting)
        return self._take_in(host, offer, crc32, waiting)

    def _destination(self, offer: ChunkOffer, waiting: WaitingDevice) -> NodeId | None:
        """Where the chunk goes; None if the device was answered instead."""
        if self._selector is None:
            own = next(iter(self._aggregators()), None)
            if own is None:
                waiting.answer(STARTING)
            return own
        for effect in self._selector.receive(self._clock.now(), offer, waiting):
            match effect:
                case Forward():
                    return effect.to
                case Reply():
                    waiting.answer(effect.message)
        return None

    def _take_in(
        self, host: AggregatorHost, offer: ChunkOffer, crc32: int, waiting: WaitingDevice
    ) -> Receiver | None:
        limits = self._limits
        if limits is not None and self._arriving >= max(1, limits.max_connections * 3 // 4):
            # Ask for a long delay: this answer ends the selector's connection, and the next chunk
            # needs a new one, with a TLS handshake.
            after_s = spread(limits.retry_after_s)
            waiting.answer(Retry("too many chunks are being received", after_s))
            return None
        if not host.wants(offer, waiting):
            return None
        claim = claim_of(offer.ticket)  # the machine has verified the ticket
        owner = (claim.task, claim.session)
        if not host.arrivals.has_room(owner):
            waiting.answer(Retry("chunks of this upload are already being received", _BUSY_RETRY_S))
            return None
        is_short = not host.has_grown(owner)
        buffer = host.pool.take(min(offer.length, STARTER_BYTES) if is_short else offer.length)
        if buffer is None:
            waiting.answer(Retry("all upload buffers are in use", _BUSY_RETRY_S))
            return None
        self._bytes.labels("taken_in").inc(offer.length)
        self._arriving += 1
        return ArrivingChunk(host, owner, buffer, offer, crc32, waiting, self._on_ended)

    def _on_ended(self) -> None:
        self._arriving -= 1

    def _pass_on(self, exchange: Exchange, to: NodeId, waiting: WaitingDevice) -> Receiver:
        head = exchange.head
        kept = ((name, head.headers[name]) for name in (TICKET_HEADER, CRC32_HEADER))
        headers = (*self._peers.headers, *kept)

        def answered(exchange: Exchange, response: Response) -> None:
            self._peers.pass_back(waiting, to, response)

        return self._relays.relay(
            exchange, address_of(to), head.path, headers, _ANSWER_TIMEOUT_S, answered
        )


def parse_offer(exchange: Exchange) -> tuple[ChunkOffer, int]:
    """Read the head of a chunk request, or raise ProtocolError."""
    headers, captured = exchange.head.headers, exchange.captured
    upload, index = captured["upload"], captured["index"]
    crc32 = headers.get(CRC32_HEADER, "")
    if _UPLOAD_ID.fullmatch(upload) is None:
        raise ProtocolError("an upload id has 1 to 64 characters of A-Z, a-z, 0-9, '-' and '_'")
    if _INDEX.fullmatch(index) is None or int(index) >= MAX_CHUNKS:
        raise ProtocolError(f"chunks are numbered from 0 to {MAX_CHUNKS - 1}")
    if _CRC32.fullmatch(crc32) is None:
        raise ProtocolError(
            "the chunk has no valid checksum",
            hint=f"send its crc32 as 8 lower-case hex digits in the header {CRC32_HEADER}",
        )
    if exchange.head.length == 0:
        raise ProtocolError("the chunk is empty")
    ticket = _ticket(headers.get(TICKET_HEADER, ""))
    return ChunkOffer(ticket, upload, int(index), exchange.head.length), int(crc32, 16)


def _ticket(text: str) -> bytes:
    try:
        if not 0 < len(text) <= _MAX_TICKET_CHARS:
            raise ValueError(f"{len(text)} characters")
        return binascii.a2b_base64(text.encode("ascii"), strict_mode=True)
    except (ValueError, binascii.Error) as error:
        raise ProtocolError(
            "the chunk has no valid ticket",
            hint=f"send the upload ticket as base64 in the header {TICKET_HEADER}",
        ) from error
