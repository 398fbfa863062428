"""One request and its answer, as a route sees them; and the head of an answer.

A route answers once, now or at any later time on the loop. If the peer has closed the connection,
an answer does nothing, so callers need not check first.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Protocol

from papaya.http.errors import HttpError, MisuseError
from papaya.http.head import RequestHead
from papaya.http.ranges import requested_range
from papaya.http.tls import PeerCertificate

log = logging.getLogger("papaya.http")

Headers = Sequence[tuple[str, str]]
Blame = Callable[[Exception], HttpError | None]
"""Translates an exception of a route to the peer's fault; None if the server is at fault."""

_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n" for s in HTTPStatus}
_BODILESS = (204, 304)
_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
_PRINTABLE = re.compile(r"[\t\x20-\x7e]*")


class Carrier(Protocol):
    """The connection under an exchange."""

    @property
    def peer(self) -> str: ...

    @property
    def certificate(self) -> PeerCertificate: ...

    def send_answer(self, exchange: Exchange, status: int, head: str, body: bytes) -> None: ...

    def send_file(
        self, exchange: Exchange, status: int, head: str, file: int, size: int
    ) -> None: ...

    def send_problem(
        self, exchange: Exchange, status: int, text: str, headers: Headers
    ) -> None: ...

    def hold_body(self, exchange: Exchange, held: bool) -> None: ...


class Exchange:
    """A request and its answer."""

    __slots__ = ("_answered", "_carrier", "_gone", "_on_gone", "captured", "head")

    def __init__(self, carrier: Carrier, head: RequestHead, captured: dict[str, str]) -> None:
        self.head = head
        self.captured = captured  # the values of the route's placeholders
        self._carrier = carrier
        self._answered = False
        self._gone = False  # the peer closed, or was cut off, before the answer
        self._on_gone: list[Callable[[], None]] = []

    @property
    def peer(self) -> str:
        """The peer's address, `host:port`."""
        return self._carrier.peer

    @property
    def certificate(self) -> PeerCertificate:
        """The peer's certificate, if the listener asks for one."""
        return self._carrier.certificate

    @property
    def is_open(self) -> bool:
        """No answer has been given, and the peer is still there."""
        return not (self._answered or self._gone)

    def answer(
        self,
        status: int,
        body: bytes = b"",
        headers: Headers = (),
        content_type: str = "application/json",
    ) -> None:
        """Sends the answer. If part of the request body is missing, it is not received any more."""
        if self._may_answer():
            head = render_head(status, len(body), headers, content_type)
            self._answered = True
            self._carrier.send_answer(self, status, head, body)

    def answer_file(
        self,
        path: Path,
        headers: Headers = (),
        content_type: str = "application/octet-stream",
    ) -> None:
        """Sends a file, or the range of it that the request asks for, as fast as the peer reads.

        404 if there is no such file. An `If-Range` is compared with the `ETag` in `headers`.
        """
        if not self._may_answer():
            return
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in _NO_SUCH_FILE:
                raise
            self.answer_problem(404, "no such file")
            return
        try:
            head, status, part = self._head_of_file(os.fstat(file), headers, content_type)
            os.lseek(file, part.start, os.SEEK_SET)
        except HttpError as error:
            os.close(file)
            self.answer_problem(error.status, str(error), error.headers)
            return
        except BaseException:
            os.close(file)
            raise
        self._answered = True
        self._carrier.send_file(self, status, head, file, len(part))

    def _head_of_file(
        self, found: os.stat_result, headers: Headers, content_type: str
    ) -> tuple[str, int, range]:
        if not stat.S_ISREG(found.st_mode):
            raise HttpError(404, "no such file")
        size = found.st_size
        part = requested_range(self.head, size, dict(headers).get("ETag"))
        headers = (*headers, ("Accept-Ranges", "bytes"))
        if part is None:
            return render_head(200, size, headers, content_type), 200, range(size)
        where = f"bytes {part.start}-{part.stop - 1}/{size}"
        headers = (*headers, ("Content-Range", where))
        return render_head(206, len(part), headers, content_type), 206, part

    def answer_problem(self, status: int, text: str, headers: Headers = ()) -> None:
        """Answers with an error, whose body the listener's `problem` makes from `text`."""
        if self._may_answer():
            self._answered = True
            self._carrier.send_problem(self, status, text, headers)

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Calls back, once, if the peer closes or is cut off before the route has answered."""
        if self._gone:
            callback()
        elif not self._answered:
            self._on_gone.append(callback)

    def pause_reading(self) -> None:
        """Stops receiving the body, so that the peer has to wait. Timeouts stop meanwhile."""
        self._carrier.hold_body(self, True)

    def resume_reading(self) -> None:
        self._carrier.hold_body(self, False)

    def lose(self) -> None:
        """Called by the connection when an answer cannot be sent any more."""
        if self.is_open:
            self._gone = True
            callbacks, self._on_gone = self._on_gone, []
            for callback in callbacks:
                try:
                    callback()
                except Exception:
                    log.exception("an on_gone callback failed for %s", self.head.path)

    def _may_answer(self) -> bool:
        if self._answered and not self._gone:
            raise MisuseError(f"{self.head.method} {self.head.path} was answered twice")
        return not self._gone


def render_head(status: int, length: int, headers: Headers, content_type: str) -> str:
    """The head of an answer, without the connection's own headers and the empty line."""
    text = _STATUS_LINES[status]
    if status not in _BODILESS:
        text += f"Content-Type: {content_type}\r\nContent-Length: {length}\r\n"
    for name, value in headers:
        # A line break in a value could start a second, forged answer.
        if _PRINTABLE.fullmatch(value) is None:
            raise MisuseError(f"the value of header {name} contains characters that cannot be sent")
        text += f"{name}: {value}\r\n"
    return text


def has_body(method: str, status: int) -> bool:
    return method != "HEAD" and status not in _BODILESS


def blames_nobody(error: Exception) -> HttpError | None:
    """Treats every exception of a route except HttpError as the server's fault."""
    return None


def as_refusal(error: Exception, blame: Blame = blames_nobody) -> HttpError:
    """The error answer for an exception. A fault of the server is logged and not explained."""
    if isinstance(error, HttpError):
        return error
    if (refusal := blame(error)) is not None:
        return refusal
    log.error("a route failed", exc_info=error)
    return HttpError(500, "internal server error")
