"""The server's side of one connection: one exchange at a time, bodies straight to their receivers.

An `asyncio.BufferedProtocol`: the loop asks for a buffer and the kernel writes the next bytes into
it. During a body that is the receiver's own buffer, cut to what is left of the body, so that no
byte of a next request can land in it. Everything else goes through the listener's scratch buffer to
`_pending`. Pipelined requests wait there until the exchange before them is answered.

The states and their transitions are in `connection_state.py`.

Refused: more than the limits allow, and what `head.py` does not accept. If a route raises, its peer
gets an error answer; nothing that a peer sends can stop the server.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import sys
import termios
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from papaya.http.acceptor import Admission
from papaya.http.connection_state import TRANSITIONS, ConnectionState, RequestProgress, Timeouts
from papaya.http.errors import HttpError, MisuseError
from papaya.http.exchange import Exchange, Headers, as_refusal, has_body, log, render_head
from papaya.http.head import END_OF_HEAD, RequestHead, check_partial, parse_request
from papaya.http.limits import spread
from papaya.http.routes import UNKNOWN_ROUTE, Buffered, Receiver, end_receiver
from papaya.http.tls import NO_CERTIFICATE

if TYPE_CHECKING:
    from papaya.http.listener import ListenerState

REQUESTS_PER_TURN = 4  # of one connection, before the loop serves the others

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_FILE_PIECE_BYTES = 256 << 10
_BYTES_PER_TURN = 1 << 20  # written to one connection, before the loop serves the others
_JOINED_BYTES = 64 << 10  # a body up to this size is copied behind its head, to write once
_FIRST_BODY_BYTES = 16 << 10
# Module constants, because Python 3.11 looks up the members of an enum slowly.
_IDLE = ConnectionState.IDLE
_HEAD = ConnectionState.HEAD
_BODY = ConnectionState.BODY
_HELD = ConnectionState.HELD
_DISCARD = ConnectionState.DISCARD
_ANSWER = ConnectionState.ANSWER
_FILE = ConnectionState.FILE
_LINGER = ConnectionState.LINGER
_CLOSED = ConnectionState.CLOSED
# Without a receiver, a route answered in these before it took the body.
_BODY_IS_UNDECIDED = (_BODY, _HELD, _FILE)


class ServerConnection(asyncio.BufferedProtocol):
    """One connection. `_receiver` is set exactly in BODY and HELD, except while a route is called.

    Routes and receivers may answer at any time, also while this class calls them.
    """

    __slots__ = (
        "_admission",
        "_began_at",
        "_exchange",
        "_is_reading",
        "_is_scheduled",
        "_left",
        "_listener",
        "_out",
        "_pending",
        "_received",
        "_receiver",
        "_requests",
        "_route",
        "_scanned",
        "_state",
        "_timeouts",
        "_transport",
        "certificate",
    )

    _transport: asyncio.Transport
    _out: _Outgoing

    def __init__(self, listener: ListenerState, admission: Admission | None = None) -> None:
        self._listener = listener  # shared by all connections of the listener
        self._admission = admission  # its place among the accepted sockets
        self.certificate = NO_CERTIFICATE  # of the peer, if the listener asks for one
        self._timeouts = Timeouts(listener.limits, listener.loop.time())
        self._state = _HEAD
        self._pending = b""  # received, not yet parsed and not yet given to a receiver
        self._scanned = 0  # this many bytes of `_pending` contain no end of a head
        self._exchange: Exchange | None = None  # the request that has no complete answer yet
        self._receiver: Receiver | None = None  # takes the body of that request
        self._left = 0  # bytes of the body still to come; in LINGER, bytes still tolerated
        self._requests = 0  # begun so far; tells the timeouts when a new one begins
        self._route = UNKNOWN_ROUTE  # of the present request, for the metrics
        # When its head was complete, for the metrics; before the first one, when it connected.
        self._began_at = listener.loop.time()
        self._received = 0  # bytes so far, for the timeouts
        self._is_reading = True  # what the transport was told last
        self._is_scheduled = False  # the loop will call `_advance`

    # --- Called by the loop ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._out = _Outgoing(self._transport)
        self._listener.connections.add(self)
        refusal = self._admission.refusal if self._admission is not None else None
        if not self._listener.is_accepting:
            refusal = "the server is stopping"
        if refusal is not None:
            self._observe(503)
            self._refuse_for_now(refusal)
        elif self._listener.tls is not None:
            self.certificate = transport.get_extra_info("peercert") or NO_CERTIFICATE
            if why := self._listener.tls.refusal(self.certificate):
                self._listener.warn_once(self.peer.rpartition(":")[0], why)
                self._observe(503)
                self._refuse_for_now(why)  # not the fault of devices whose requests it passes on

    def get_buffer(self, sizehint: int) -> memoryview:
        receiver = self._receiver
        if receiver is None:
            return self._listener.scratch
        room = self._room(receiver)
        return self._listener.scratch if room is None else room

    def buffer_updated(self, nbytes: int) -> None:
        self._received += nbytes
        if self._receiver is not None:
            self._took(self._receiver, nbytes)
            if self._left:
                return
        elif self._state is _LINGER:
            self._left -= nbytes
            if self._left < 0:
                self.abort()
            return
        elif self._state is not _CLOSED:
            data = bytes(self._listener.scratch[:nbytes])
            self._pending = self._pending + data if self._pending else data
            if self._state is _IDLE:
                self._enter(_HEAD)
        self._advance()

    def eof_received(self) -> None:
        self._drop()
        self._enter(_CLOSED)

    def connection_lost(self, exc: Exception | None) -> None:
        self._drop()
        self._enter(_CLOSED)
        self._listener.left(self)
        if self._admission is not None:
            self._admission.release()

    def pause_writing(self) -> None:
        self._out.is_full = True

    def resume_writing(self) -> None:
        self._out.is_full = False
        self._schedule()

    # --- Called by the listener -----------------------------------------------------------------

    @property
    def idle_since(self) -> float | None:
        """Since when it waits for a further request; None if it has one, or waits for its first."""
        return self._timeouts.waiting_since if self._state is _IDLE else None

    def check_timeouts(self, now: float) -> None:
        unsent = self._out.unsent
        taken = self._out.taken if unsent else self._out.written
        progress = RequestProgress(self._state, self._requests, self._received, taken, unsent)
        late = self._timeouts.exceeded(now, progress)
        if late is None:
            return
        log.debug("closing the connection from %s: %s", self.peer, late)
        if unsent or self._state in (_LINGER, _CLOSED):
            self.abort()
        elif self._exchange is not None or (self._state is _HEAD and self._pending):
            self._drop()
            self._refuse(408, late)
        else:
            self._close()

    def close_if_idle(self) -> None:
        is_waiting = self._state in (_IDLE, _HEAD)
        if is_waiting and not self._pending:
            self._close()

    def abort(self) -> None:
        self._drop()
        self._enter(_CLOSED)
        self._transport.abort()

    # --- Called by an exchange ------------------------------------------------------------------

    @property
    def peer(self) -> str:
        if self._admission is None:
            return "unknown"
        host, port = self._admission.client
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def send_answer(self, exchange: Exchange, status: int, head: str, body: bytes) -> None:
        self._observe(status)
        closes = self._must_close(exchange.head)
        body = body if has_body(exchange.head.method, status) else b""
        self._out.answer(self._complete(head, closes), body)
        self._end_exchange(closes)

    def send_file(self, exchange: Exchange, status: int, head: str, file: int, size: int) -> None:
        if not has_body(exchange.head.method, status):
            os.close(file)
            self.send_answer(exchange, status, head, b"")
            return
        self._observe(status)
        self._out.answer(self._complete(head, self._must_close(exchange.head)), b"")
        self._out.take_file(file, size)
        if self._receiver is not None:
            self._end_receiver(self._receiver)
        self._enter(_FILE)
        self._schedule()

    def send_problem(
        self, exchange: Exchange, status: int, text: str, headers: Headers = ()
    ) -> None:
        retry_s: float | None = None
        if status == 503 and all(name.lower() != "retry-after" for name, _ in headers):
            retry_s = spread(self._listener.limits.retry_soon_s)
            headers = (*headers, ("Retry-After", str(math.ceil(retry_s))))
        body = self._listener.problem(status, text, retry_s)
        head = render_head(status, len(body), headers, "application/json")
        self.send_answer(exchange, status, head, body)

    def hold_body(self, exchange: Exchange, held: bool) -> None:
        now = _BODY if held else _HELD
        if exchange is not self._exchange or self._state is not now or not self._left:
            return
        self._enter(_HELD if held else _BODY)
        if self._pending and not held:
            self._schedule()
        else:
            self._regulate()

    # --- State ----------------------------------------------------------------------------------

    def _enter(self, state: ConnectionState) -> None:
        before, self._state = self._state, state
        if state is not before and state not in TRANSITIONS[before]:
            raise MisuseError(f"a connection went from {before.name} to {state.name}")

    def _regulate(self) -> None:
        """Reads from the socket if there is a use for more bytes, and not otherwise."""
        if self._state is _HEAD:
            # More bytes are useless while `_pending` may contain a whole request.
            wanted = self._scanned == len(self._pending)
        elif self._state is _BODY:
            wanted = not self._pending
        elif self._state is _HELD:
            wanted = False
        else:
            # Also while a route prepares its answer: only reading shows that the peer closed.
            wanted = len(self._pending) < self._listener.limits.max_head_bytes
        if wanted != self._is_reading and not self._transport.is_closing():
            self._is_reading = wanted
            if wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._listener.loop.call_soon(self._scheduled)

    def _scheduled(self) -> None:
        self._is_scheduled = False
        self._advance()

    def _advance(self) -> None:
        """Does what `_pending` and the transport allow. Called by the loop only, never nested.

        A peer that pipelines gets a few answers per turn of the loop, and one that reads as fast as
        we write some of a file, or it would stall the others.
        """
        last = self._requests + REQUESTS_PER_TURN
        enough = self._out.written + _BYTES_PER_TURN
        while self._step():
            is_last = self._requests >= last and self._state is _HEAD
            if is_last or self._out.written >= enough:
                self._schedule()
                break
        self._regulate()

    def _step(self) -> bool:
        """True if there may be another step."""
        state = self._state
        if state is _HEAD:
            return bool(self._pending) and not self._out.is_full and self._begin()
        if state is _BODY:
            return bool(self._pending) and self._pour()
        if state is _DISCARD:
            return self._discard()
        if state is _FILE:
            return self._send_piece()
        if state in (_LINGER, _CLOSED):
            self._pending = b""
        return False

    # --- Requests -------------------------------------------------------------------------------

    def _begin(self) -> bool:
        """Takes one head out of `_pending` and starts its exchange."""
        pending = self._pending
        end = pending.find(END_OF_HEAD, max(0, self._scanned - 3))
        try:
            # Without an end, the head is at least one byte longer than what has arrived.
            if (len(pending) + 1 if end < 0 else end + 4) > self._listener.limits.max_head_bytes:
                raise HttpError(431, "the head is too long")
            if end < 0:
                check_partial(pending, self._scanned)
                self._scanned = len(pending)
                return False
            head = parse_request(pending[: end + 2])
        except HttpError as error:
            self._refuse(error.status, str(error), error.headers)
            return False
        self._pending = pending[end + 4 :]
        self._scanned = 0
        self._start(head)
        return True

    def _start(self, head: RequestHead) -> None:
        found = self._listener.routes.find(head.method, head.path)
        exchange = Exchange(self, head, {} if found is None else found[1])
        self._exchange = exchange
        self._requests += 1
        self._route = UNKNOWN_ROUTE if found is None else found[0].path
        self._began_at = self._listener.loop.time()
        self._left = head.length
        self._enter(_BODY if head.length else _ANSWER)
        try:
            if found is None:
                raise self._listener.routes.missing(head.path)
            route = found[0]
            if head.length > route.max_body_bytes:
                raise HttpError(413, f"the body may have at most {route.max_body_bytes} bytes")
            if not isinstance(route, Buffered):
                self._receive(exchange, route.receive(exchange))
            elif not route.admits(exchange):
                self._receive(exchange, None)
            elif len(self._pending) >= head.length:
                body, self._pending = self._pending[: head.length], self._pending[head.length :]
                self._left = 0
                self._enter(_ANSWER)
                route.handle(exchange, body)
            else:
                self._receive(exchange, _WholeBody(exchange, route.handle))
        except Exception as error:
            self._failed(exchange, None, error)

    def _receive(self, exchange: Exchange, receiver: Receiver | None) -> None:
        if receiver is None:
            if exchange.is_open:
                raise MisuseError("a route neither answered nor took the body")
        elif self._exchange is not exchange:
            # The route answered and returned a receiver all the same, which must get its end.
            self._listener.loop.call_soon(end_receiver, receiver, False)
        elif not self._left:
            receiver.finished()
        else:
            self._receiver = receiver
            if exchange.head.expects_continue and not self._pending:
                self._out.write(_CONTINUE)

    def _pour(self) -> bool:
        """Gives pending bytes to the receiver."""
        receiver = self._receiver
        assert receiver is not None
        room = self._room(receiver)
        if room is not None:
            count = min(len(room), len(self._pending))
            room[:count] = self._pending[:count]
            self._pending = self._pending[count:]
            self._took(receiver, count)
        return True

    def _discard(self) -> bool:
        count = min(self._left, len(self._pending))
        self._left -= count
        self._pending = self._pending[count:]
        if self._left:
            return False
        if self._exchange is not None:
            self._enter(_ANSWER)
            return False
        self._enter(_HEAD if self._pending else _IDLE)
        return True

    def _room(self, receiver: Receiver) -> memoryview | None:
        try:
            room = receiver.buffer(self._left)
            if not room:
                raise MisuseError("a receiver returned an empty buffer and did not pause")
        except Exception as error:
            self._receiver_failed(receiver, error)
            return None
        return room[: self._left] if len(room) > self._left else room

    def _receiver_failed(self, receiver: Receiver, error: Exception) -> None:
        """Answers later: a transport must not be closed while it asks for a buffer."""
        self._receiver = None
        self._enter(_DISCARD)
        self._listener.loop.call_soon(self._failed, self._exchange, receiver, error)

    def _took(self, receiver: Receiver, count: int) -> None:
        self._left -= count
        exchange = self._exchange
        try:
            receiver.received(count)
            if not self._left and self._receiver is receiver:
                self._receiver = None
                self._enter(_ANSWER)
                receiver.finished()
        except Exception as error:
            unfinished, self._receiver = self._receiver, None
            if unfinished is not None:
                self._enter(_DISCARD)
            self._failed(exchange, unfinished, error)

    # --- Answers --------------------------------------------------------------------------------

    def _failed(
        self, exchange: Exchange | None, unfinished: Receiver | None, error: Exception
    ) -> None:
        """Answers the peer of a route or receiver that raised."""
        if unfinished is not None:
            end_receiver(unfinished, False)
        refusal = as_refusal(error, self._listener.blame)
        if exchange is not None and exchange.is_open:
            exchange.answer_problem(refusal.status, str(refusal), refusal.headers)

    def _observe(self, status: int) -> None:
        seconds = self._listener.loop.time() - self._began_at
        self._listener.observe(self._route, status, seconds)

    def _must_close(self, head: RequestHead) -> bool:
        if head.closes or not self._listener.is_accepting:
            return True
        # A peer that waits for "100 Continue" may or may not send the body after a refusal. What
        # comes next could be read in two ways, so it is not read.
        is_undecided = self._receiver is None and self._state in _BODY_IS_UNDECIDED
        discardable = self._listener.limits.discard_bytes
        return self._left > (0 if head.expects_continue and is_undecided else discardable)

    def _complete(self, head: str, closes: bool) -> str:
        end = "Connection: close\r\n\r\n" if closes else "\r\n"
        return head + self._listener.date + end

    def _send_piece(self) -> bool:
        more = self._out.send_piece()
        if self._out.has_file:
            return more
        if self._exchange is not None:
            self._end_exchange(self._must_close(self._exchange.head))
        return True

    def _end_exchange(self, closes: bool) -> None:
        if self._receiver is not None:
            self._end_receiver(self._receiver)
        self._exchange = None
        if closes:
            if self._left:
                self._linger()
            else:
                self._close()
            return
        if self._left:
            self._enter(_DISCARD)
        else:
            self._enter(_HEAD if self._pending else _IDLE)
        if self._pending:
            self._schedule()
        else:
            self._regulate()

    def _end_receiver(self, receiver: Receiver) -> None:
        """Calls `finished` or `broken` later, because the receiver may be the caller."""
        self._receiver = None
        self._listener.loop.call_soon(end_receiver, receiver, not self._left)

    def _refuse(self, status: int, text: str, headers: Headers = ()) -> None:
        """Answers a peer that has no exchange, and closes."""
        self._send_refusal(status, self._listener.problem(status, text, None), headers)

    def _refuse_for_now(self, text: str) -> None:
        """Answers 503."""
        retry_s = math.ceil(spread(self._listener.limits.retry_after_s))
        body = self._listener.problem(503, text, retry_s)
        self._send_refusal(503, body, (("Retry-After", str(retry_s)),))

    def _send_refusal(self, status: int, body: bytes, headers: Headers) -> None:
        head = render_head(status, len(body), headers, "application/json")
        self._out.answer(self._complete(head, True), body)
        self._linger()

    def _linger(self) -> None:
        """Closes our direction; the other one when the peer has read the answer and closes too.

        Closing both while the peer still sends would reset the connection, and the peer would lose
        the answer.
        """
        self._enter(_LINGER)
        self._pending, self._left = b"", self._listener.limits.linger_bytes
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._regulate()

    def _close(self) -> None:
        self._enter(_CLOSED)
        self._transport.close()

    def _drop(self) -> None:
        """Ends the exchange without an answer: the peer closed, or was too slow."""
        exchange, self._exchange = self._exchange, None
        receiver, self._receiver = self._receiver, None
        self._pending, self._left = b"", 0
        self._out.drop_file()
        if receiver is not None:
            end_receiver(receiver, False)
        if exchange is not None:
            exchange.lose()


class _WholeBody:
    """Receives the body of a buffered route and calls the handler with all of it.

    Memory grows with what has arrived, not with the announced length: peers that announce a
    megabyte and send nothing cost nothing.
    """

    def __init__(self, exchange: Exchange, handle: Callable[[Exchange, bytes], None]) -> None:
        self._exchange = exchange
        self._handle = handle
        self._buffer = bytearray(min(exchange.head.length, _FIRST_BODY_BYTES))
        self._filled = 0

    def buffer(self, remaining: int) -> memoryview:
        if self._filled == len(self._buffer):
            # A new buffer: the loop may still hold a view of the old one, which forbids resizing.
            grown = bytearray(min(self._filled + remaining, 2 * self._filled))
            grown[: self._filled] = self._buffer
            self._buffer = grown
        return memoryview(self._buffer)[self._filled :]

    def received(self, count: int) -> None:
        self._filled += count

    def finished(self) -> None:
        self._handle(self._exchange, bytes(self._buffer))

    def broken(self) -> None:
        self._buffer = bytearray()


class _Outgoing:
    """The writing half of a connection. It buffers at most one answer or one piece of a file."""

    __slots__ = (
        "_file",
        "_file_left",
        "_transport",
        "is_full",
        "written",
    )

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.is_full = False  # the transport asked us to stop writing
        self.written = 0  # bytes given to the transport so far
        self._file: int | None = None  # descriptor of the file that is being sent
        self._file_left = 0  # bytes of it still to be read

    @property
    def unsent(self) -> int:
        return self._transport.get_write_buffer_size()

    @property
    def taken(self) -> int:
        """Bytes that the peer has acknowledged.

        Not those that the kernel has taken: it stores megabytes, and asks for more only when a
        third of them is gone. A slow peer that reads all the time would seem to read nothing.
        """
        return self.written - self.unsent - self._unacknowledged()

    def _unacknowledged(self) -> int:
        """Bytes that the kernel has taken and the peer has not."""
        connected = self._transport.get_extra_info("socket")
        if connected is None:
            return 0
        try:
            count = fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, bytes(4))
        except (OSError, ValueError):  # it was closed
            return 0
        return int.from_bytes(count, sys.byteorder)

    @property
    def has_file(self) -> bool:
        return self._file is not None

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self._transport.write(data)

    def answer(self, head: str, body: bytes) -> None:
        data = head.encode("latin-1")
        if len(body) <= _JOINED_BYTES:
            self.write(data + body)
        else:
            self.write(data)
            self.write(body)

    def take_file(self, file: int, size: int) -> None:
        """Takes ownership of the open file; `send_piece` sends `size` bytes and closes it."""
        start = os.lseek(file, 0, os.SEEK_CUR)
        os.posix_fadvise(file, start, size, os.POSIX_FADV_WILLNEED)
        self._file, self._file_left = file, size

    def send_piece(self) -> bool:
        """Sends one piece if there is room. False if there was none, or nothing is left."""
        if self._file is None or self.is_full or self._transport.is_closing():
            return False
        if self._file_left:
            piece = b""
            try:
                piece = os.read(self._file, min(_FILE_PIECE_BYTES, self._file_left))
            except OSError as error:
                log.error("cannot read a file that is being sent: %s", error)
            if not piece:
                # The file is shorter than its Content-Length. Only a reset tells the peer.
                self.drop_file()
                self._transport.abort()
                return False
            self.write(piece)
            self._file_left -= len(piece)
        if not self._file_left:
            self.drop_file()
        return self._file is not None

    def drop_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
