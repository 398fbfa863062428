"""Devices that follow the protocol and train nothing, and a book of what servers told them.

They are the real device runtime over real sockets; only training is a stand-in. The book is written
from the answers as they come in, by the session that the request's ticket names.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

from papaya.client.work import Trained
from papaya.config import DeviceConfig
from papaya.device.device import Device
from papaya.device.example_store import ExampleStore
from papaya.device.load import Ask, LoadFleet, LoadProcess
from papaya.device.training import ProtocolTrainer, TrainingRequest
from papaya.device.trust import Trust
from papaya.learning.definition import TaskTerms
from papaya.messages.base import Message, SessionId, TaskId
from papaya.messages.participation import (
    Aborted,
    Chunk,
    ChunkReceived,
    Complete,
    Completed,
    Join,
    Joined,
    Left,
    Refused,
    Request,
)
from papaya.messages.selection import Rejected
from papaya.messages.tickets import claim_of
from papaya.sim.protocol_updates import protocol_update

_CONFIG = DeviceConfig(
    request_timeout_s=2.0,
    check_in_timeout_s=5.0,
    backoff_s=0.02,
    max_backoff_s=0.2,
    give_up_s=240.0,
    participation_floor_s=0.0,
)
_FAILURE_S = 600.0  # a test causes the next failure in this time


class Book:
    """What devices were told. `era` counts the failures that the test has caused so far."""

    def __init__(self) -> None:
        self.era = 0
        self.is_over = False
        self.chunks = 0
        self.rejected = 0
        self.to_lose = 0
        self.lost = 0
        self.joined: dict[SessionId, int] = {}
        self.acknowledged: dict[SessionId, int] = {}
        self.ended: dict[SessionId, str] = {}
        self.task_of: dict[SessionId, str] = {}
        self.asked: dict[str, int] = {}
        self.completing: set[SessionId] = set()
        self.sending: dict[SessionId, set[int]] = {}
        self.held_half_way: set[SessionId] = set()
        self._let_go = asyncio.Event()
        self._changed = asyncio.Event()

    def of(self, task: str) -> set[SessionId]:
        """Acknowledged sessions of one task."""
        return {session for session in self.acknowledged if self.task_of[session] == task}

    @property
    def across_failures(self) -> list[SessionId]:
        """Counted after a failure that came between join and acknowledgement."""
        return [s for s, era in self.acknowledged.items() if era > self.joined[s]]

    @property
    def in_mid_upload(self) -> list[SessionId]:
        return [s for s, chunks in self.sending.items() if chunks and s not in self.ended]

    async def until(self, is_so: Callable[[], bool], seconds: float, what: str) -> None:
        ends_at = time.monotonic() + seconds
        while not is_so():
            self._changed.clear()
            try:
                async with asyncio.timeout(ends_at - time.monotonic()):
                    await self._changed.wait()
            except TimeoutError:
                raise AssertionError(f"not within {seconds:g} s: {what}; {self}") from None

    async def more(self, count: int, seconds: float) -> None:
        wanted = len(self.acknowledged) + count
        what = f"{count} more are counted"
        await self.until(lambda: len(self.acknowledged) >= wanted, seconds, what)

    async def exchange(self, selector: str, message: Message, ask: Ask) -> Message | None:
        await self.pass_half_way(message)
        self.on_request(selector, message)
        answer = await ask()
        if self.loses(answer):
            return None
        self.on_answer(message, answer)
        return answer

    async def pass_half_way(self, message: Message) -> None:
        """Uploads of `held_half_way` send their first chunk and wait until they are let go."""
        if not isinstance(message, Chunk) or message.index == 0:
            return
        if claim_of(message.ticket).session in self.held_half_way:
            await self._let_go.wait()

    def let_go(self) -> None:
        self._let_go.set()

    def next_era(self) -> None:
        self.era += 1
        self._changed.set()

    def last_era(self) -> None:
        """No further failure will come: nobody waits for one."""
        self.is_over = True
        self._changed.set()

    def on_request(self, selector: str, message: Message) -> None:
        self.asked[selector] = self.asked.get(selector, 0) + 1
        if isinstance(message, Complete):
            self.completing.add(claim_of(message.ticket).session)
        self._changed.set()

    def loses(self, answer: Message | None) -> bool:
        """The network eats the next `to_lose` acknowledgements: counted, and nobody knows."""
        if self.to_lose > 0 and answer == Completed():
            self.to_lose -= 1
            self.lost += 1
            self._changed.set()
            return True
        return False

    def on_answer(self, message: Message, answer: Message | None) -> None:
        self.rejected += isinstance(answer, Rejected)
        if isinstance(message, Request) and answer is not None:
            self._note(claim_of(message.ticket).session, message, answer)
        self._changed.set()

    def _note(self, session: SessionId, message: Message, answer: Message) -> None:
        match message, answer:
            case Join(), Joined():
                self.joined.setdefault(session, self.era)
                self.task_of[session] = answer.task
            case Chunk(), ChunkReceived():
                self.chunks += 1
                self.sending.setdefault(session, set()).add(answer.index)
            case _, Completed(discarded=None):
                self.acknowledged.setdefault(session, self.era)
                self._end(session, "counted")
            case _, Completed():
                self._end(session, f"discarded: {answer.discarded}")
            case _, Aborted() | Refused():
                self._end(session, answer.reason)
            case _, Left():
                self._end(session, "left")

    def _end(self, session: SessionId, how: str) -> None:
        self.ended.setdefault(session, how)
        self.completing.discard(session)
        self.sending.pop(session, None)

    def endings(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for how in self.ended.values():
            found[how] = found.get(how, 0) + 1
        return found

    def __repr__(self) -> str:
        return f"era {self.era}, joined {len(self.joined)}, {self.chunks} chunks, {self.endings()}"


class WatchedProcess(LoadProcess):
    """Every answer is in the book before the device hears it."""

    def __init__(
        self,
        book: Book,
        certificates: Path | None,
        trust: Trust | None,
        blobs_hosts: Sequence[str] = (),
        upload_hosts: Sequence[str] = (),
    ) -> None:
        super().__init__(book, certificates, trust, blobs_hosts, upload_hosts)


Work = Callable[[TrainingRequest], Awaitable[None]]
Evaluation = Callable[[TrainingRequest], bytes]
TermsOf = Callable[[TaskId], TaskTerms | None]


class NoTraining(ProtocolTrainer):
    """Waits for `work`, then uploads integers that name the session."""

    def __init__(
        self, work: Work, evaluation: Evaluation | None, terms: TermsOf = lambda task: None
    ) -> None:
        super().__init__(protocol_update, seconds=lambda: 0.0)
        self._work = work
        self._evaluation = evaluation
        self._terms = terms

    def terms(self, program: str) -> TaskTerms | None:
        return self._terms(program)

    async def train(self, assignment: TrainingRequest, store: ExampleStore) -> Trained:
        await self._work(assignment)
        if assignment.evaluates:
            assert self._evaluation is not None
            return Trained(self._evaluation(assignment), 1)
        return await super().train(assignment, store)


class Fleet(LoadFleet):
    """So many devices, each with one visit after the other, until the fleet goes home."""

    def __init__(
        self, book: Book, process: WatchedProcess, devices: Sequence[Device], seed: int
    ) -> None:
        self.book = book
        self.process = process
        super().__init__(devices, Random(seed))

    async def go_home(self, seconds: float) -> None:
        """No further visits; those that have begun come to their own end."""
        self.stop_visits()
        self.book.last_era()
        left = await self.wait(seconds)
        assert not left, f"{left} devices did not come home; {self.book}"


@asynccontextmanager
async def fleet(
    folder: Path,
    selectors: Sequence[str],
    token: str,
    count: int,
    work: Callable[[Book, int], Work],
    *,
    certificates: Path | None = None,
    evaluation: Evaluation | None = None,
    trust: Trust | None = None,
    terms: TermsOf = lambda task: None,
    seed: int = 1,
    blobs_hosts: Sequence[str] = (),
    upload_hosts: Sequence[str] = (),
    book: Book | None = None,
) -> AsyncIterator[Fleet]:
    """`work(book, i)` says what the i-th device does instead of training."""
    book = book or Book()
    folder.mkdir(parents=True, exist_ok=True)
    async with WatchedProcess(book, certificates, trust, blobs_hosts, upload_hosts) as process:
        devices = [
            Device(
                process,
                selectors=selectors,
                store=folder / f"device-{i}.db",
                trainer=NoTraining(work(book, i), evaluation, terms),
                token=token,
                name=f"device-{i}",
                config=_CONFIG,
                rng=Random(seed * 1000 + i),
            )
            for i in range(count)
        ]
        flying = Fleet(book, process, devices, seed)
        try:
            yield flying
        finally:
            await flying.vanish()
            for device in devices:
                device.close()


def briefly(book: Book, index: int) -> Work:
    """Training takes a moment that differs from device to device."""

    async def work(assignment: TrainingRequest) -> None:
        await asyncio.sleep(0.01 * (index % 7))

    return work


def some_across_failures(book: Book, index: int) -> Work:
    """Every third device trains until the next failure is over with; the others are brief."""

    async def work(assignment: TrainingRequest) -> None:
        if index % 3 == 0:
            era = book.era
            await book.until(lambda: book.is_over or book.era > era, _FAILURE_S, "the next failure")
        else:
            await asyncio.sleep(0.01 * (index % 7))

    return work
