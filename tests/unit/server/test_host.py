"""The asyncio driver: timers, effects, answers, and machines that raise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from papaya.clock import Clock
from papaya.errors import ProtocolError
from papaya.machine import Effects, Forward, Handle, Read, Reply, Send, Transact
from papaya.messages.base import Message
from papaya.messages.participation import Alive, Left, Refused, Retry
from papaya.messages.storage import EpochRow, Outcome, Row, Rows, Transacted, Transaction
from papaya.server import host as host_module
from papaya.server.host import Host

T = TypeVar("T")


class Machine:
    """Does what the test says."""

    node, boot = "machine", 0

    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.woken: list[float] = []
        self.due = float("inf")
        self.answer: Effects | Exception = []

    def receive(self, now: float, message: Message, reply_to: Handle = None) -> Effects:
        self.heard.append(message)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def wake(self, now: float) -> Effects:
        self.woken.append(now)
        self.due = float("inf")
        return []

    def next_wake(self) -> float:
        return self.due

    def check(self) -> None:
        pass


class Waiting:
    def __init__(self) -> None:
        self.answers: list[Message] = []

    def answer(self, message: Message) -> None:
        self.answers.append(message)


class State:
    def __init__(self) -> None:
        self.outcome: Outcome = "committed"
        self.transactions: list[Transaction] = []

    def transact(self, transaction: Transaction) -> asyncio.Future[Outcome]:
        self.transactions.append(transaction)
        return done(self.outcome)

    def read(self, prefixes: tuple[str, ...]) -> asyncio.Future[dict[str, Row]]:
        rows: dict[str, Row] = {prefix: EpochRow(1) for prefix in prefixes}
        return done(rows)


def done(result: T) -> asyncio.Future[T]:
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    future.set_result(result)
    return future


async def delivered() -> None:
    """Let the callbacks of completed futures run."""
    await asyncio.sleep(0)


class Post:
    def __init__(self) -> None:
        self.carried: list[tuple[Any, ...]] = []

    def send(self, to: str, message: Message) -> None:
        self.carried.append(("send", to, message))

    def forward(self, request: Handle, to: str, message: Message) -> None:
        self.carried.append(("forward", request, to, message))


class Bench:
    """A host and everything around it."""

    def __init__(self) -> None:
        self.machine, self.state, self.post = Machine(), State(), Post()
        self.time = 100.0
        self.host = Host(self.machine, self._clock(), self.state, self.post)

    def _clock(self) -> Clock:
        return Clock(wall=lambda: self.time, monotonic=lambda: self.time)


def on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def test_every_effect_is_carried_out() -> None:
    async def run() -> None:
        bench, waiting = Bench(), Waiting()
        change = Transaction(put=(("epoch", EpochRow(1)),))
        bench.host.perform(
            [
                Send("coordinator", Alive()),
                Reply(waiting, Left()),
                Reply(None, Left()),
                Forward(waiting, "aggregator", Alive()),
                Transact(7, change),
                Read(8, ("a", "b")),
            ]
        )
        await delivered()
        assert bench.post.carried == [
            ("send", "coordinator", Alive()),
            ("forward", waiting, "aggregator", Alive()),
        ]
        assert waiting.answers == [Left()]
        assert bench.state.transactions == [change]
        assert bench.machine.heard == [
            Transacted(7, "committed"),
            Rows(8, (("a", EpochRow(1)), ("b", EpochRow(1)))),
        ]

    on_a_loop(run)


def test_a_peer_that_breaks_the_protocol_is_answered_with_the_reason() -> None:
    async def run() -> None:
        bench, waiting = Bench(), Waiting()
        bench.machine.answer = ProtocolError("no such thing", hint="look again")
        bench.host.deliver(Alive(), waiting)
        assert waiting.answers == [Refused("no such thing", "look again")]

    on_a_loop(run)


def test_a_bug_is_answered_without_its_details_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        bench, waiting = Bench(), Waiting()
        bench.machine.answer = ZeroDivisionError("secret detail")
        bench.host.deliver(Alive(), waiting)
        [answer] = waiting.answers
        assert isinstance(answer, Retry)
        assert "secret" not in answer.reason
        bench.machine.answer = []
        bench.host.deliver(Left())
        assert bench.machine.heard == [Alive(), Left()]

    on_a_loop(run)
    assert "failed on Alive" in caplog.text


def test_it_wakes_the_machine_when_it_is_due_and_not_before() -> None:
    async def run() -> None:
        bench = Bench()
        bench.machine.due = 100.01
        bench.host.start()
        await asyncio.sleep(0)
        assert bench.machine.woken == []
        bench.time = 100.02
        while not bench.machine.woken:
            await asyncio.sleep(0.001)
        assert bench.machine.woken == [100.02]

    on_a_loop(run)


def test_an_earlier_deadline_replaces_a_later_one() -> None:
    async def run() -> None:
        bench = Bench()
        bench.machine.due = 1e9
        bench.host.start()
        bench.machine.due = 100.0
        bench.host.deliver(Alive())
        while not bench.machine.woken:
            await asyncio.sleep(0.001)
        assert bench.machine.woken == [100.0]

    on_a_loop(run)


def test_an_unknown_outcome_comes_after_a_breath(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "_UNKNOWN_DELAY_S", 0.001)

    async def run() -> None:
        bench = Bench()
        bench.state.outcome = "unknown"
        bench.host.perform([Transact(1, Transaction())])
        await delivered()
        assert bench.machine.heard == [], "a store that fails is not asked again at once"
        while not bench.machine.heard:
            await asyncio.sleep(0.001)
        assert bench.machine.heard == [Transacted(1, "unknown")]

    on_a_loop(run)


def test_a_stopped_machine_hears_and_does_nothing_more() -> None:
    async def run() -> None:
        bench = Bench()
        bench.machine.due = 100.0
        bench.host.start()
        bench.host.stop()
        bench.host.deliver(Alive())
        await asyncio.sleep(0.01)
        assert (bench.machine.heard, bench.machine.woken) == ([], [])

    on_a_loop(run)


def test_an_effect_that_fails_does_not_take_the_others_with_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Waiting):
        def answer(self, message: Message) -> None:
            raise ZeroDivisionError

    async def run() -> None:
        bench, waiting = Bench(), Waiting()
        bench.machine.answer = [Reply(Broken(), Left()), Reply(waiting, Left())]
        bench.machine.due = 100.0
        bench.host.deliver(Alive())
        assert waiting.answers == [Left()]
        while not bench.machine.woken:
            await asyncio.sleep(0.001)

    on_a_loop(run)
    assert "effect Reply failed" in caplog.text
