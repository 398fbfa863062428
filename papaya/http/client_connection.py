"""The client's side of one connection to another server: one exchange at a time, read strictly.

Our own servers are the only peers here, so an answer has a Content-Length or is refused.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import NamedTuple, cast

from papaya.http.errors import HttpError, MisuseError, PeerUnavailable
from papaya.http.exchange import Headers, has_body
from papaya.http.head import END_OF_HEAD, ResponseHead, parse_response
from papaya.http.limits import MAX_HEAD_BYTES, PeerLimits
from papaya.http.splice import MAX_AHEAD_BYTES, Pipe, TargetBroken


class Response(NamedTuple):
    """An answer. Header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class ClientConnection(asyncio.Protocol):
    """One connection to `address`. Its pool lends it to one exchange after the other."""

    _transport: asyncio.Transport

    def __init__(
        self,
        address: str,
        limits: PeerLimits,
        on_lost: Callable[[ClientConnection], None],
        is_plain: bool,
    ) -> None:
        self.address = address
        self.is_used = False  # it has carried an exchange before
        self.is_full = False
        self.is_lost = False
        self.idle_since = 0.0
        self.on_room: Callable[[], None] = lambda: None
        self._limits = limits
        self._on_lost = on_lost
        self._is_plain = is_plain
        self._loop = asyncio.get_running_loop()
        self._file = -1
        self._answer: asyncio.Future[Response] | None = None
        self._method = ""
        self._data = bytearray()
        self._head: ResponseHead | None = None
        self._held_head = b""  # waits, for one turn of the loop, for the first bytes of its body
        self._unsent = 0  # of the request's body, not yet given to us
        self._is_clean = True  # fit for a further exchange

    @property
    def can_be_used(self) -> bool:
        return self._is_clean and self._answer is None and not self._transport.is_closing()

    @property
    def has_heard(self) -> bool:
        """At least one byte of the answer has come."""
        return bool(self._data) or self._head is not None

    def begin(
        self, method: str, path: str, headers: Headers, length: int
    ) -> asyncio.Future[Response]:
        """Sends a head. `length` bytes follow through `send`; the answer may come before them.

        A body that is there already goes out with the head, which spares the far side a wake-up.
        """
        if not self.can_be_used:
            raise MisuseError(f"a second exchange began on a connection to {self.address}")
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

    def send(self, data: bytes | memoryview, more_follows: bool = False) -> None:
        """Sends at once. What the socket does not take is copied, so `data` may be used again.

        If more is about to follow, a short beginning waits for it together with the head.
        """
        if len(data) > self._unsent:
            raise MisuseError(f"more was sent to {self.address} than was announced")
        self._unsent -= len(data)
        waits = more_follows and self._unsent > 0 and self._held_head != b""
        if waits and len(self._held_head) + len(data) <= MAX_AHEAD_BYTES:
            self._held_head += data
        elif data:
            self._put(data)

    def pull(self, pipe: Pipe, source: int, count: int) -> int:
        """Sends up to `count` bytes that have come to the socket `source`; how many, maybe none.

        If the far side is gone they are taken from `source` in vain, and count as any others.
        """
        if (
            self._file < 0
            or len(self._held_head) > MAX_AHEAD_BYTES
            or not self._is_clean
            or self._transport.is_closing()
            or self._transport.get_write_buffer_size()
        ):
            return 0
        if count > self._unsent:
            raise MisuseError(f"more was sent to {self.address} than was announced")
        ahead, self._held_head = self._held_head, b""
        sent = 0
        rest = b""
        while sent < count and not rest:
            try:
                came, rest = pipe.move(source, self._file, count - sent, ahead)
                ahead = b""
            except TargetBroken as broken:
                self._is_clean = False  # As in `_put`.
                self._unsent -= broken.came
                return sent + broken.came
            if not came:
                break
            self._unsent -= came
            sent += came
        if rest:
            self._transport.write(rest)
        return sent

    def _flush_head(self) -> None:
        if self._held_head:
            self._put(b"")

    def _put(self, data: bytes | memoryview) -> None:
        head, self._held_head = self._held_head, b""
        if not self._is_clean or self._transport.is_closing():
            return
        if self._file >= 0 and not self._transport.get_write_buffer_size():
            # Not through the transport: uvloop would keep a view of a buffer that is used again.
            try:
                sent = os.writev(self._file, (head, data)) if head else os.write(self._file, data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                # The far side has closed. It may have answered before, so we go on reading.
                self._is_clean = False
                return
            data = memoryview(data)[max(0, sent - len(head)) :]
            head = head[sent:]
        if head or data:
            self._transport.write(head + bytes(data))

    def end(self) -> bool:
        """The exchange is over, answered or not. True if the connection is fit for another."""
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

    # --- What the loop calls --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # Full as soon as the socket is: who sends waits, instead of piling up here. One byte, not
        # none: a TLS transport is full when it holds as much as the limit, so at 0 it always is.
        self._transport.set_write_buffer_limits(high=1, low=0)
        if self._is_plain:
            self._file = self._transport.get_extra_info("socket").fileno()

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.abort()  # Nobody asked.
            return
        self._data += data
        try:
            while self._read():
                pass
        except HttpError as error:
            message = f"{self.address} does not answer as it should: {error}"
            self._answer.set_exception(HttpError(502, message))
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._file = -1
        self.is_lost = True
        self._is_clean = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(
                PeerUnavailable(f"{self.address} closed the connection without an answer")
            )
        self._on_lost(self)
        self.on_room()

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self.on_room()

    def _read(self) -> bool:
        """Takes one head, or the whole body, out of what came; False when more must come."""
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
            raise HttpError(502, "an answer without a Content-Length")
        if head.length > self._limits.max_response_bytes:
            raise HttpError(502, f"an answer of {head.length} bytes is too long")
        return head.length
