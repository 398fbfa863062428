"""A request whose body is sent while it is still arriving from someone else: the cut-through.

    upload.write(view)          sends at once, copies what the socket does not take
    upload.pull(socket, n)      the same without a copy, where the kernel can
    if upload.is_full: pause    until `on_room` is called
    upload.answer               may come early: a refusal before the body is read

It is not repeated: the bytes are gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from papaya.http.client_connection import ClientConnection, Response
from papaya.http.errors import PeerUnavailable
from papaya.http.exchange import Headers
from papaya.http.splice import Pipe


class Pool(Protocol):
    """Where connections come from."""

    address: str

    def kept(self) -> ClientConnection | None: ...

    def check_room(self) -> None: ...

    async def lend(self) -> ClientConnection: ...

    def give_back(self, link: ClientConnection) -> None: ...


class StreamedRequest:
    """One body on its way. Until there is a connection it is full.

    `answer` is the far side's, or PeerUnavailable; what is not sent by then never will be. Time
    runs from the last piece of the body: a body may be slow, the far side may not.
    """

    def __init__(
        self,
        pool: Pool,
        method: str,
        path: str,
        headers: Headers,
        length: int,
        timeout_s: float,
        on_room: Callable[[], None],
        pipe: Pipe | None = None,
    ) -> None:
        self._pool = pool
        self._pipe = pipe
        self._head = (method, path, headers, length)
        self._on_room = on_room
        self._early = bytearray()  # written before there was a connection
        self._link: ClientConnection | None = None
        self._is_over = False
        self._loop = asyncio.get_running_loop()
        self._moved_at = self._loop.time()
        self._timeout_s = timeout_s
        self.answer: asyncio.Future[Response] = self._loop.create_future()
        self._opening: asyncio.Task[None] | None = None
        if (link := pool.kept()) is not None:
            self._use(link)
        else:
            pool.check_room()
            self._opening = asyncio.create_task(self._open())
        self._timer = self._loop.call_later(timeout_s, self._look_at_the_clock)

    @property
    def is_full(self) -> bool:
        """Nothing should be written now. Never once the answer is there: writing does nothing."""
        return not self._is_over and (self._link is None or self._link.is_full)

    def write(self, data: bytes | memoryview) -> None:
        """The next bytes of the body. `data` may be used again when this returns."""
        if self._is_over:
            return
        self._moved_at = self._loop.time()
        if self._link is None:
            self._early += data
        else:
            self._link.send(data, more_follows=self._pipe is not None)

    def pull(self, source: int, count: int) -> int:
        """The next bytes of the body straight from a socket, if that is possible; how many."""
        if self._is_over or self._link is None or self._pipe is None:
            return 0
        self._moved_at = self._loop.time()
        return self._link.pull(self._pipe, source, count)

    def abort(self) -> None:
        """Ends it; a connection that is in the middle of a body is cut."""
        if self._is_over:
            return
        self._is_over = True
        self._timer.cancel()
        self._early.clear()
        if self._opening is not None:
            self._opening.cancel()
        if self._link is not None:
            self._pool.give_back(self._link)
        if not self.answer.done():
            self.answer.cancel()

    async def _open(self) -> None:
        try:
            self._use(await self._pool.lend())
        except Exception as error:
            self._opening = None
            self._fail(error)
        else:
            self._opening = None
            self._on_room()

    def _use(self, link: ClientConnection) -> None:
        self._link = link
        link.on_room = self._on_room
        link.begin(*self._head).add_done_callback(self._answered)
        link.send(bytes(self._early))
        self._early.clear()

    def _answered(self, answer: asyncio.Future[Response]) -> None:
        if answer.cancelled():
            return
        if (error := answer.exception()) is not None:
            self._fail(error)
        elif not self._is_over:
            self.answer.set_result(answer.result())
            self._end()

    def _look_at_the_clock(self) -> None:
        left_s = self._moved_at + self._timeout_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look_at_the_clock)
        else:
            waited = f"did not answer in {self._timeout_s:g} s"
            self._fail(PeerUnavailable(f"{self._pool.address} {waited}"))

    def _fail(self, error: BaseException) -> None:
        if not self._is_over:
            self.answer.set_exception(error)
            self.answer.exception()  # Nobody has to ask.
            self._end()

    def _end(self) -> None:
        self.abort()
        self._on_room()
