"""Uploads to the aggregators themselves, over TLS: they count exactly once, whatever fails."""

from __future__ import annotations

import asyncio
import signal
import ssl
from pathlib import Path

from papaya.device.limits import DeviceLimits
from papaya.device.load import Ask
from papaya.device.selectors import Selectors, open_session
from papaya.messages.base import Message, SessionId
from papaya.messages.participation import Chunk, Complete, Completed
from papaya.messages.tickets import claim_of
from tests.system.fleet import Book, briefly, fleet, some_across_failures
from tests.system.oracle import Books
from tests.system.processes import Installation, Toml
from tests.system.test_roles_apart import CONFIG, Apart
from tests.system.tls import Certificates, make_certificates

_STEP_S = 240.0
_GOAL = CONFIG.aggregation_goal


class BothWays(Book):
    """Sends some requests of an upload to the aggregator and through a selector at the same time,
    and loses some answers of aggregators.
    """

    def __init__(self, selector: str, selectors: Selectors) -> None:
        super().__init__()
        self._selector = selector
        self._selectors = selectors
        self.direct: list[str] = []  # servers other than selectors, as they were asked
        self.twice: list[tuple[Message | None, Message | None]] = []

    async def exchange(self, selector: str, message: Message, ask: Ask) -> Message | None:
        if selector == self._selector:
            return await super().exchange(selector, message, ask)
        assert isinstance(message, Chunk | Complete)
        self.direct.append(selector)
        index = message.index if isinstance(message, Chunk) else None
        if index in (None, 3):
            copy = self._selectors.ask(self._selector, None, message, 2.0)
            through, answer = await asyncio.gather(copy, super().exchange(selector, message, ask))
            self.twice.append((through, answer))
        else:
            answer = await super().exchange(selector, message, ask)
        lost = (None, 5, -1)[int(claim_of(message.ticket).session, 16) % 3]
        return None if index == lost else answer


def test_direct_uploads_count_once_across_lost_answers_copies_and_a_kill(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "tls")
    with Installation(tmp_path) as installation:
        apart = Apart(
            installation, selectors=1, aggregators=2, shared=made.listeners(), direct="https"
        )
        apart.start()
        tls = ssl.create_default_context(cafile=str(made.authority))
        apart.admin(tls).submit(CONFIG)
        book = asyncio.run(_upload_both_ways(apart, made))
        assert set(apart.stop().values()) == {0}
        Books(installation.data, CONFIG.task).check(book.acknowledged)
        assert set(book.direct) == set(apart.upload_urls)
        assert (Completed(), Completed()) in book.twice


async def _upload_both_ways(apart: Apart, made: Certificates) -> BothWays:
    folder, token = apart.installation.folder / "devices", apart.installation.secret("device.token")
    async with open_session(made.authority) as session:
        [selector] = apart.urls("https")
        book = BothWays(selector, Selectors(session, DeviceLimits(), lambda *_: None))
        async with fleet(
            folder,
            [selector],
            token,
            12,
            some_across_failures,
            certificates=made.authority,
            upload_hosts=["127.0.0.1:*"],
            book=book,
        ) as flying:
            await book.more(3 * _GOAL, _STEP_S)
            servers = dict(zip(apart.upload_urls, apart.aggregators, strict=True))
            before, asked = book.direct[-1], len(book.direct)
            servers[before].kill()
            book.next_era()
            await book.until(
                lambda: any(url != before for url in book.direct[asked:]),
                _STEP_S,
                "uploads to the successor",
            )
            await book.more(3 * _GOAL, _STEP_S)
            await book.until(
                lambda: (Completed(), Completed()) in book.twice, _STEP_S, "both ways count"
            )
            await flying.go_home(_STEP_S)
    return book


# -- SIGTERM ---------------------------------------------------------------------------------------


class HalfWay(Book):
    """Direct uploads send their first chunk and wait. Every second one may go on when its
    aggregator is told to stop, the others when it has ended.
    """

    def __init__(self, selector: str) -> None:
        super().__init__()
        self._selector = selector
        self.early: set[SessionId] = set()
        self.late: set[SessionId] = set()
        self._stopping, self._ended = asyncio.Event(), asyncio.Event()
        self.direct: list[str] = []  # aggregators, as they were asked

    async def exchange(self, selector: str, message: Message, ask: Ask) -> Message | None:
        if selector != self._selector:
            assert isinstance(message, Chunk | Complete)
            self.direct.append(selector)
            if isinstance(message, Chunk) and message.index == 1:
                await self._wait(claim_of(message.ticket).session)
        return await super().exchange(selector, message, ask)

    async def _wait(self, session: SessionId) -> None:
        if self._ended.is_set():
            return
        is_early = len(self.early) <= len(self.late)
        (self.early if is_early else self.late).add(session)
        self._changed.set()
        await (self._stopping if is_early else self._ended).wait()

    def on_stopping(self) -> None:
        self._stopping.set()

    def on_ended(self) -> None:
        self.next_era()
        self._ended.set()


def test_sigterm_in_the_middle_of_direct_uploads_loses_and_doubles_nothing(tmp_path: Path) -> None:
    with Installation(tmp_path) as installation:
        shared: dict[str, Toml] = {"drain_s": 1.0}
        # No session may end for silence while the aggregator that holds the task stops.
        calm: dict[str, Toml] = {"heartbeat_s": 10.0}
        apart = Apart(
            installation, selectors=1, aggregators=2, shared=shared, server=calm, direct="http"
        )
        apart.start()
        apart.admin().submit(CONFIG)
        book = asyncio.run(_stop_half_way(apart))
        assert set(apart.stop().values()) == {0}
        Books(installation.data, CONFIG.task).check(book.acknowledged)
        for half_way in (book.early, book.late):
            assert half_way & set(book.acknowledged), (half_way, book.endings())


async def _stop_half_way(apart: Apart) -> HalfWay:
    folder, token = apart.installation.folder / "devices", apart.installation.secret("device.token")
    [selector] = apart.urls()
    book = HalfWay(selector)
    async with fleet(
        folder, [selector], token, 8, briefly, upload_hosts=["127.0.0.1:*"], book=book
    ) as flying:
        await book.until(lambda: len(book.late) >= 3, _STEP_S, "six uploads are half-way")
        before, asked = book.direct[-1], len(book.direct)
        holder = apart.aggregators[apart.upload_urls.index(before)]
        holder.send(signal.SIGTERM)
        book.on_stopping()
        assert await asyncio.to_thread(holder.process.wait, _STEP_S) == 0
        book.on_ended()
        await book.until(
            lambda: any(url != before for url in book.direct[asked:]),
            _STEP_S,
            "direct uploads to the successor",
        )
        await book.more(2 * _GOAL, _STEP_S)
        await flying.go_home(_STEP_S)
    return book
