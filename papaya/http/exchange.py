"""One request and its answer, as a route sees them; and how the head of an answer is written.

A route answers once, now or at any later time on the loop. An exchange whose peer has gone takes an
answer and does nothing, so nobody who holds one has to ask first.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Protocol

from papaya.http.errors import HttpError, MisuseError
from papaya.http.head import RequestHead

log = logging.getLogger("papaya.http")

Headers = Sequence[tuple[str, str]]
Blame = Callable[[Exception], HttpError | None]
"""The refusal that an exception of a route means; None if the server is at fault."""

_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n" for s in HTTPStatus}
_BODILESS = (204, 304)
_PRINTABLE = re.compile(r"[\t\x20-\x7e]*")


class Carrier(Protocol):
    """The connection under an exchange."""

    @property
    def peer(self) -> str: ...

    def send_answer(self, exchange: Exchange, status: int, head: str, body: bytes) -> None: ...

    def send_file(
        self, exchange: Exchange, status: int, head: str, file: int, size: int
    ) -> None: ...

    def send_problem(
        self, exchange: Exchange, status: int, text: str, headers: Headers
    ) -> None: ...

    def hold_body(self, exchange: Exchange, held: bool) -> None: ...


class Exchange:
    """A request that waits for its answer."""

    __slots__ = ("_answered", "_carrier", "_gone", "_on_gone", "captured", "head")

    def __init__(self, carrier: Carrier, head: RequestHead, captured: dict[str, str]) -> None:
        self.head = head
        self.captured = captured
        self._carrier = carrier
        self._answered = False
        self._gone = False
        self._on_gone: list[Callable[[], None]] = []

    @property
    def peer(self) -> str:
        """The peer's address, `host:port`."""
        return self._carrier.peer

    @property
    def is_open(self) -> bool:
        """An answer would still be sent."""
        return not (self._answered or self._gone)

    def answer(
        self,
        status: int,
        body: bytes = b"",
        headers: Headers = (),
        content_type: str = "application/json",
    ) -> None:
        """Sends the answer. If the body of the request is not whole yet, the rest is not taken."""
        if self._may_answer():
            head = render_head(status, len(body), headers, content_type)
            self._answered = True
            self._carrier.send_answer(self, status, head, body)

    def answer_file(
        self,
        path: Path,
        headers: Headers = (),
        content_type: str = "application/octet-stream",
        status: int = 200,
    ) -> None:
        """Sends a file piece by piece, as fast as the peer takes it; 404 where there is none."""
        if not self._may_answer():
            return
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self.answer_problem(404, "there is no such file")
            return
        try:
            size = os.fstat(file).st_size
            head = render_head(status, size, headers, content_type)
        except BaseException:
            os.close(file)
            raise
        self._answered = True
        self._carrier.send_file(self, status, head, file, size)

    def answer_problem(self, status: int, text: str, headers: Headers = ()) -> None:
        """Answers with an error, in the words of this listener's `problem`."""
        if self._may_answer():
            self._answered = True
            self._carrier.send_problem(self, status, text, headers)

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Calls back, once, if the peer hangs up or is cut off before the route has answered."""
        if self._gone:
            callback()
        elif not self._answered:
            self._on_gone.append(callback)

    def pause_reading(self) -> None:
        """Takes no more of the body, so that the peer has to wait. Time stands still for limits."""
        self._carrier.hold_body(self, True)

    def resume_reading(self) -> None:
        self._carrier.hold_body(self, False)

    def lose(self) -> None:
        """For the connection: no answer of the route can be sent any more."""
        if self.is_open:
            self._gone = True
            callbacks, self._on_gone = self._on_gone, []
            for callback in callbacks:
                try:
                    callback()
                except Exception:
                    log.exception("a callback for a lost exchange failed: %s", self.head.path)

    def _may_answer(self) -> bool:
        if self._answered and not self._gone:
            raise MisuseError(f"{self.head.method} {self.head.path} was answered twice")
        return not self._gone


def render_head(status: int, length: int, headers: Headers, content_type: str) -> str:
    """The head of an answer, without what the connection adds, and without the empty line."""
    text = _STATUS_LINES[status]
    if status not in _BODILESS:
        text += f"Content-Type: {content_type}\r\nContent-Length: {length}\r\n"
    for name, value in headers:
        # A line break in a value would be a way to write a whole second answer.
        if _PRINTABLE.fullmatch(value) is None:
            raise MisuseError(f"the value of header {name} cannot be sent")
        text += f"{name}: {value}\r\n"
    return text


def has_body(method: str, status: int) -> bool:
    return method != "HEAD" and status not in _BODILESS


def blames_nobody(error: Exception) -> HttpError | None:
    """Every exception of a route except HttpError is a fault of the server."""
    return None


def as_refusal(error: Exception, blame: Blame = blames_nobody) -> HttpError:
    """What a peer is told of an error: its own fault in words, ours without any."""
    if isinstance(error, HttpError):
        return error
    if (refusal := blame(error)) is not None:
        return refusal
    log.error("a route failed", exc_info=error)
    return HttpError(500, "something went wrong on the server's side")
