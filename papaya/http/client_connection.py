"""The client's side of one connection to another server: one exchange at a time, parsed strictly.

The other side is always one of our servers, so an answer without a Content-Length is an error.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from ssl import SSLContext
from typing import NamedTuple, cast

from papaya.http.errors import HttpError, MisuseError, PeerUnavailable
from papaya.http.exchange import Headers, has_body
from papaya.http.head import END_OF_HEAD, ResponseHead, parse_response
from papaya.http.limits import MAX_HEAD_BYTES, PeerLimits
from papaya.http.tls import NO_CERTIFICATE

_FIRST_BYTES = 8 << 10


class Response(NamedTuple):
    """An answer. Header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class ClientConnection(asyncio.BufferedProtocol):
    """One connection to `address`. Its pool lends it to one exchange after another."""

    _transport: asyncio.Transport

    def __init__(
        self,
        address: str,
        limits: PeerLimits,
        on_lost: Callable[[ClientConnection], None],
        context: SSLContext | None,
        scratch: memoryview,
    ) -> None:
        """`scratch`: where bytes arrive; all connections of a loop may share it."""
        self.address = address
        self.context = context  # of TLS; None without
        self.certificate = NO_CERTIFICATE  # of the other server, with TLS
        self.is_used = False  # it has carried an exchange before
        self.is_full = False  # the transport asked us to stop writing
        self.is_lost = False  # the loop reported the end of the connection
        self.idle_since = 0.0  # when the last exchange ended
        self.on_room: Callable[[], None] = lambda: None  # called when `is_full` becomes false
        self._limits = limits
        self._scratch = scratch
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._file = -1  # descriptor of the socket, without TLS: bytes may go there directly
        self._answer: asyncio.Future[Response] | None = None  # of the present exchange
        self._method = ""  # of the present request
        self._data = bytearray()  # received, not yet parsed
        self._head: ResponseHead | None = None  # of the answer whose body is being received
        self._held_head = b""  # a head that waits, for one turn of the loop, for its body
        self._unsent = 0  # bytes of the request's body that the caller has not given yet
        self._is_clean = True  # usable for a further exchange

    @property
    def can_be_used(self) -> bool:
        return self._is_clean and self._answer is None and not self._transport.is_closing()

    @property
    def has_heard(self) -> bool:
        """At least one byte of the answer has arrived."""
        return bool(self._data) or self._head is not None

    def begin(
        self, method: str, path: str, headers: Headers, length: int
    ) -> asyncio.Future[Response]:
        """Sends a head. `length` bytes must follow through `send`; the answer may come earlier.

        The head waits for one turn of the loop, so that a body that is ready goes into the same
        packet and wakes the other server once.
        """
        if not self.can_be_used:
            raise MisuseError(f"the connection to {self.address} is already in use")
        self._answer = self._loop.create_future()
        self._method = method
        self._unsent = length
        text = f"{method} {path} HTTP/1.1\r\nHost: {self.address}\r\nContent-Length: {length}\r\n"
        text += "".join(f"{name}: {value}\r\n" for name, value in headers)
        self._held_head = f"{text}\r\n".encode("latin-1")
        if length:
            self._loop.call_soon(self._flush_head)
        else:
            self._flush_head()
        return self._answer

    def send(self, data: bytes | memoryview) -> None:
        """Sends at once. What the socket does not take is copied, so `data` may be reused."""
        if len(data) > self._unsent:
            raise MisuseError(f"the body for {self.address} is longer than its Content-Length")
        self._unsent -= len(data)
        if data:
            self._put(data)

    def _flush_head(self) -> None:
        if self._held_head:
            self._put(b"")

    def _put(self, data: bytes | memoryview) -> None:
        head, self._held_head = self._held_head, b""
        if not self._is_clean or self._transport.is_closing():
            return
        if self._file >= 0 and not self._transport.get_write_buffer_size():
            # Not through the transport: uvloop would keep a view of a buffer that is reused.
            try:
                sent = os.writev(self._file, (head, data)) if head else os.write(self._file, data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                # The other server has closed. It may have answered before, so keep reading.
                self._is_clean = False
                return
            data = memoryview(data)[max(0, sent - len(head)) :]
            head = head[sent:]
        if self.context is not None:
            # Our transport for TLS keeps no views. The head shares a record with what follows.
            self._transport.write(head + bytes(data[:_FIRST_BYTES]) if head else data)
            if head and len(data) > _FIRST_BYTES:
                self._transport.write(memoryview(data)[_FIRST_BYTES:])
        elif head or data:
            self._transport.write(head + bytes(data))

    def end(self) -> bool:
        """Ends the exchange, answered or not. True if the connection can carry another one."""
        answer, self._answer = self._answer, None
        answered = answer is not None and answer.done() and not answer.cancelled()
        if answer is not None and not answer.done():
            answer.cancel()
        clean = (
            answered
            and self._is_clean
            and not (self._data or self._unsent or self._transport.get_write_buffer_size())
            and not self._transport.is_closing()
        )
        self._head, self._held_head = None, b""
        self.on_room = lambda: None
        if not clean:
            self.abort()
        self.is_used = True
        return clean

    def abort(self) -> None:
        self._is_clean = False
        self._transport.abort()

    # --- Called by the loop ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # Full as soon as the socket is, so that bodies wait at their source and not here.
        self._transport.set_write_buffer_limits(high=0, low=0)
        self.certificate = self._transport.get_extra_info("peercert") or NO_CERTIFICATE
        if self.context is None:
            self._file = self._transport.get_extra_info("socket").fileno()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        if self._answer is None or self._answer.done():
            self.abort()  # Bytes that belong to no request.
            return
        self._data += self._scratch[:nbytes]
        try:
            while self._read():
                pass
        except HttpError as error:
            message = f"{self.address} sent an invalid response: {error}"
            self._answer.set_exception(HttpError(502, message))
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._file = -1
        self.is_lost = True
        self._is_clean = False
        if self._answer is not None and not self._answer.done():
            why = f": {exc}" if exc is not None else ""
            lost = PeerUnavailable(f"{self.address} closed the connection without an answer{why}")
            lost.__cause__ = exc
            self._answer.set_exception(lost)
        self._on_lost(self)
        self.on_room()

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self.on_room()

    def _read(self) -> bool:
        """Parses one head or one whole body; False if more bytes are needed."""
        if self._head is None:
            end = self._data.find(END_OF_HEAD)
            if (len(self._data) if end < 0 else end) > MAX_HEAD_BYTES:
                raise HttpError(502, "the head is too long")
            if end < 0:
                return False
            head = parse_response(bytes(self._data[: end + 2]))
            del self._data[: end + 4]
            if head.status >= 200:
                self._head = head
            return bool(self._data) or self._head is not None
        length = self._body_length(self._head)
        if len(self._data) < length:
            return False
        body = bytes(self._data[:length])
        del self._data[:length]
        self._is_clean = self._is_clean and not self._head.closes
        if self._answer is not None:
            self._answer.set_result(Response(self._head.status, self._head.headers, body))
        return False

    def _body_length(self, head: ResponseHead) -> int:
        if not has_body(self._method, head.status):
            return 0
        if head.length is None:
            raise HttpError(502, "the response has no Content-Length")
        if head.length > self._limits.max_response_bytes:
            raise HttpError(502, f"a response of {head.length} bytes is too long")
        return head.length
