"""The server's side of one connection: one exchange at a time, bodies straight to their receivers.

An `asyncio.BufferedProtocol`: the loop asks where the next bytes go and the kernel puts them there.
While a body is received that is the receiver's own buffer, never longer than what is left of the
body, so nothing of a next request can land in it. Everything else comes into the listener's scratch
buffer and waits in `_pending`. Bytes of a pipelined next request wait there until the answer.

Refused: more than the limits allow, and whatever `head.py` does not read. What a route raises ends
in an answer; nothing that a peer sends ends the server.
"""

from __future__ import annotations

import asyncio
import os
from typing import cast

from papaya.http.errors import HttpError, MisuseError
from papaya.http.exchange import Exchange, Headers, as_refusal, has_body, log, render_head
from papaya.http.head import END_OF_HEAD, RequestHead, check_partial, parse_request
from papaya.http.listener_state import UNKNOWN_ROUTE, ListenerState
from papaya.http.outgoing import Outgoing, address_of_peer
from papaya.http.routes import Buffered, Receiver, end_receiver
from papaya.http.timeouts import ConnectionPhase, Seen, Timeouts
from papaya.http.whole_body import WholeBody

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LINGERING_STRANGERS = 64  # of those who are one too many; further ones are cut without a word


class ServerConnection(asyncio.BufferedProtocol):
    """One connection. What it waits for follows from what is set: see `_phase`."""

    _transport: asyncio.Transport
    _out: Outgoing

    def __init__(self, service: ListenerState) -> None:
        self._service = service
        self._patience = Timeouts(service.limits, service.loop.time())
        self._pending = b""  # received, and not yet understood or given to a receiver
        self._scanned = 0  # how much of it is known to hold no end of a head
        self._exchange: Exchange | None = None
        self._receiver: Receiver | None = None
        self._left = 0  # bytes of the body that are still to come
        self._continued = False  # the peer need not be told to send the body
        self._held = False  # a receiver asked us not to read
        self._exchanges = 0
        self._route, self._began_at = UNKNOWN_ROUTE, 0.0
        self._received = 0
        self._linger_until = 0  # bytes received, not time
        self._is_reading = True
        self._is_advancing = self._is_closing = self._is_lingering = False

    # --- What the loop calls --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._out = Outgoing(self._transport)
        service, limits = self._service, self._service.limits
        service.connections.add(self)
        too_many = len(service.connections) - limits.max_connections
        if too_many > _LINGERING_STRANGERS:
            self.abort()
        elif too_many > 0 or not service.is_accepting:
            headers = (("Retry-After", str(limits.retry_after_s)),)
            self._turn_away(503, "too many connections", headers)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._left and self._receiver is not None:
            room = self._room(self._receiver)
            if room is not None:
                return room
        return self._service.scratch

    def buffer_updated(self, nbytes: int) -> None:
        self._received += nbytes
        if self._left and self._receiver is not None:
            self._took(self._receiver, nbytes)
            if self._left:
                return
        else:
            data = bytes(self._service.scratch[:nbytes])
            self._pending = self._pending + data if self._pending else data
        self._advance()

    def eof_received(self) -> None:
        self._is_closing = True
        self._drop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self._drop()
        self._service.left(self)

    def pause_writing(self) -> None:
        self._out.is_full = True

    def resume_writing(self) -> None:
        self._out.is_full = False
        self._service.loop.call_soon(self._advance)

    # --- What the listener calls ----------------------------------------------------------------

    def look_at_the_clock(self, now: float) -> None:
        phase, unsent = self._phase(), self._out.unsent
        flushed = self._out.written - unsent
        seen = Seen(phase, self._exchanges, self._received, self._held, flushed, unsent)
        late = self._patience.exceeded(now, seen)
        if late is None:
            return
        log.debug("%s is cut off: %s", self.peer, late)
        if unsent or self._is_closing:
            self.abort()
        elif self._exchange is not None or (phase is ConnectionPhase.HEAD and self._pending):
            self._drop()
            self._turn_away(408, late)
        else:
            self._close()

    def close_if_idle(self) -> None:
        if self._phase() in (ConnectionPhase.IDLE, ConnectionPhase.HEAD) and not self._pending:
            self._close()

    def abort(self) -> None:
        self._is_closing = True
        self._transport.abort()

    # --- What an exchange calls -----------------------------------------------------------------

    @property
    def peer(self) -> str:
        return address_of_peer(self._transport)

    def send_answer(self, exchange: Exchange, status: int, head: str, body: bytes) -> None:
        self._service.observe(self._route, status, self._service.loop.time() - self._began_at)
        closes = self._must_close(exchange.head)
        body = body if has_body(exchange.head.method, status) else b""
        self._out.answer(self._complete(head, closes), body)
        self._end_exchange(closes)

    def send_file(self, exchange: Exchange, status: int, head: str, file: int, size: int) -> None:
        if not has_body(exchange.head.method, status):
            os.close(file)
            self.send_answer(exchange, status, head, b"")
            return
        self._service.observe(self._route, status, self._service.loop.time() - self._began_at)
        self._out.answer(self._complete(head, self._must_close(exchange.head)), b"")
        self._out.take_file(file, size)
        self._service.loop.call_soon(self._advance)

    def send_problem(
        self, exchange: Exchange, status: int, text: str, headers: Headers = ()
    ) -> None:
        body = self._service.problem(status, text)
        head = render_head(status, len(body), headers, "application/json")
        self.send_answer(exchange, status, head, body)

    def hold_body(self, exchange: Exchange, held: bool) -> None:
        if exchange is self._exchange and self._left:
            self._held = held
            if self._pending and not held:
                self._service.loop.call_soon(self._advance)
            else:
                self._regulate()

    # --- Reading --------------------------------------------------------------------------------

    def _phase(self) -> ConnectionPhase:
        if self._is_lingering:
            return ConnectionPhase.LINGER
        if self._left:
            return ConnectionPhase.BODY
        if self._exchange is not None:
            return ConnectionPhase.ANSWER
        return (
            ConnectionPhase.HEAD if self._pending or not self._exchanges else ConnectionPhase.IDLE
        )

    def _regulate(self) -> None:
        """Reads exactly while there is room for what may come."""
        if self._left and self._receiver is not None:
            wanted = not self._held and not self._pending
        else:
            # Also while a route holds the answer back: else nobody hears the peer hang up.
            wanted = len(self._pending) < self._service.limits.max_head_bytes
        if wanted != self._is_reading and not self._transport.is_closing():
            self._is_reading = wanted
            if wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _advance(self) -> None:
        """Goes as far as what is pending allows. Routes are called from here, never nested."""
        if self._is_advancing:
            return
        self._is_advancing = True
        try:
            while self._step():
                pass
        finally:
            self._is_advancing = False
        self._regulate()

    def _step(self) -> bool:
        if self._is_closing:
            self._pending = b""
            if self._is_lingering and self._received > self._linger_until:
                self.abort()
            return False
        if self._out.has_file:
            return self._send_piece()
        if self._left:
            return self._pour()
        if self._exchange is not None or self._out.is_full or not self._pending:
            return False
        return self._begin()

    def _begin(self) -> bool:
        """Takes one head out of what is pending, and starts its exchange."""
        pending = self._pending
        end = pending.find(END_OF_HEAD, max(0, self._scanned - 3))
        try:
            # Without an end, the head is at least one byte longer than what is there.
            if (len(pending) + 1 if end < 0 else end + 4) > self._service.limits.max_head_bytes:
                raise HttpError(431, "the head is too long")
            if end < 0:
                check_partial(pending, self._scanned)
                self._scanned = len(pending)
                return False
            head = parse_request(pending[: end + 2])
        except HttpError as error:
            self._turn_away(error.status, str(error), error.headers)
            return False
        self._pending = pending[end + 4 :]
        self._scanned = 0
        self._start(head)
        return True

    def _start(self, head: RequestHead) -> None:
        found = self._service.routes.find(head.method, head.path)
        exchange = Exchange(self, head, {} if found is None else found[1])
        self._exchange = exchange
        self._exchanges += 1
        self._route = UNKNOWN_ROUTE if found is None else found[0].path
        self._began_at = self._service.loop.time()
        self._left = head.length
        self._continued = not head.expects_continue
        try:
            if found is None:
                raise self._service.routes.missing(head.path)
            route = found[0]
            if head.length > route.max_body_bytes:
                raise HttpError(413, f"at most {route.max_body_bytes} bytes are taken here")
            if not isinstance(route, Buffered):
                self._receive(exchange, route.receive(exchange))
            elif not route.admits(exchange):
                self._receive(exchange, None)
            elif len(self._pending) >= head.length:
                body, self._pending = self._pending[: head.length], self._pending[head.length :]
                self._left = 0
                route.handle(exchange, body)
            else:
                self._receive(exchange, WholeBody(exchange, route.handle))
        except Exception as error:
            self._failed(exchange, None, error)

    def _receive(self, exchange: Exchange, receiver: Receiver | None) -> None:
        if receiver is None:
            if exchange.is_open:
                raise MisuseError("a route neither answered nor wants the body")
        elif self._exchange is not exchange:
            # It was answered, and yet there is a receiver, which waits for its end.
            self._service.loop.call_soon(end_receiver, receiver, False)
        elif not self._left:
            receiver.finished()
        else:
            self._receiver = receiver
            if not self._continued and not self._pending:
                self._out.write(_CONTINUE)
            self._continued = True

    def _pour(self) -> bool:
        """Gives pending bytes to the body that they belong to."""
        if self._held or not self._pending:
            return False
        receiver = self._receiver
        if receiver is None:
            count = min(self._left, len(self._pending))
            self._left -= count
            self._pending = self._pending[count:]
            return True
        room = self._room(receiver)
        if room is not None:
            count = min(len(room), len(self._pending))
            room[:count] = self._pending[:count]
            self._pending = self._pending[count:]
            self._took(receiver, count)
        return True

    def _room(self, receiver: Receiver) -> memoryview | None:
        try:
            room = receiver.buffer(self._left)
            if not room:
                raise MisuseError("a receiver gave no room and did not pause")
        except Exception as error:
            # Later: a transport must not be closed while it asks for a buffer.
            self._receiver = None
            self._service.loop.call_soon(self._failed, self._exchange, receiver, error)
            return None
        return room[: self._left] if len(room) > self._left else room

    def _took(self, receiver: Receiver, count: int) -> None:
        self._left -= count
        exchange = self._exchange
        try:
            receiver.received(count)
            if not self._left and self._receiver is receiver:
                self._receiver = None
                receiver.finished()
        except Exception as error:
            unfinished, self._receiver = self._receiver, None
            self._failed(exchange, unfinished, error)

    # --- Ending ---------------------------------------------------------------------------------

    def _failed(
        self, exchange: Exchange | None, unfinished: Receiver | None, error: Exception
    ) -> None:
        """A route or a receiver raised: its peer is answered, the server lives on."""
        if unfinished is not None:
            end_receiver(unfinished, False)
        refusal = as_refusal(error, self._service.blame)
        if exchange is not None and exchange.is_open:
            exchange.answer_problem(refusal.status, str(refusal), refusal.headers)

    def _must_close(self, head: RequestHead) -> bool:
        if head.closes or not self._service.is_accepting:
            return True
        # A peer that waits for "100 Continue" may send the body after a refusal or may not:
        # what comes next could be read in two ways, so nothing does.
        return self._left > (self._service.limits.discard_bytes if self._continued else 0)

    def _complete(self, head: str, closes: bool) -> str:
        end = "Connection: close\r\n\r\n" if closes else "\r\n"
        return head + self._service.date + end

    def _send_piece(self) -> bool:
        more = self._out.send_piece()
        if not self._out.has_file and self._exchange is not None:
            self._end_exchange(self._must_close(self._exchange.head))
            return True
        return more

    def _end_exchange(self, closes: bool) -> None:
        receiver, self._receiver = self._receiver, None
        self._exchange, self._held = None, False
        if receiver is not None:
            # Later: it may be the one that has just answered.
            self._service.loop.call_soon(end_receiver, receiver, not self._left)
        if closes and self._left:
            self._linger()
        elif closes:
            self._close()
        elif self._pending and not self._is_advancing:
            self._service.loop.call_soon(self._advance)
        self._regulate()

    def _turn_away(self, status: int, text: str, headers: Headers = ()) -> None:
        """Answers a peer that has no exchange, and closes."""
        body = self._service.problem(status, text)
        head = render_head(status, len(body), headers, "application/json")
        self._out.answer(self._complete(head, True), body)
        self._linger()

    def _linger(self) -> None:
        """Closes our direction, and the other when the peer has read the answer and closes too.

        To close both while the peer still sends would reset the connection, and the peer would
        lose the answer.
        """
        self._is_closing = self._is_lingering = True
        self._pending, self._left = b"", 0
        self._linger_until = self._received + self._service.limits.linger_bytes
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._regulate()

    def _close(self) -> None:
        self._is_closing = True
        self._transport.close()

    def _drop(self) -> None:
        """Nothing more comes from this peer: whoever waits for it is told."""
        exchange, self._exchange = self._exchange, None
        receiver, self._receiver = self._receiver, None
        self._pending, self._left, self._held = b"", 0, False
        self._out.drop_file()
        if receiver is not None:
            end_receiver(receiver, False)
        if exchange is not None:
            exchange.lose()
