"""Uploads to the aggregators themselves, over TLS: they count exactly once, whatever fails."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

from papaya.device.limits import DeviceLimits
from papaya.device.load import Ask
from papaya.device.selectors import Selectors, open_session
from papaya.messages.base import Message
from papaya.messages.participation import Chunk, Complete, Completed
from papaya.messages.tickets import claim_of
from tests.system.fleet import Book, fleet, some_across_failures
from tests.system.oracle import Books
from tests.system.processes import Installation
from tests.system.test_roles_apart import CONFIG, Apart
from tests.system.tls import Certificates, make_certificates

_STEP_S = 120.0
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
