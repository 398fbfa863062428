"""A coordinator over a store in memory, hearing from servers that are only names."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from random import Random
from typing import Any, Literal, TypeVar

from papaya.config import Requirements, ServerConfig, TaskConfig
from papaya.coordinator.coordinator import Coordinator
from papaya.machine import Effect, Effects, Log, Read, Send, Transact
from papaya.messages.base import Message, NodeId, SessionId, TaskId
from papaya.messages.control import (
    AggregatorOrders,
    AggregatorReport,
    Assignment,
    Held,
    SelectorOrders,
    SelectorReport,
    TaskReport,
)
from papaya.messages.events import ServerEvent
from papaya.messages.selection import Capabilities, DeviceClass
from papaya.messages.storage import (
    FenceRow,
    Outcome,
    Row,
    Rows,
    Transacted,
    Transaction,
    fence_key,
    submission,
)
from tests.unit.aggregator.store import Store

SERVER = ServerConfig(heartbeat_s=10.0)
H = SERVER.heartbeat_s
PHONE = DeviceClass(Capabilities())
A_MOMENT_S = 2.0**-10

O = TypeVar("O", AggregatorOrders, SelectorOrders)  # noqa: E741


def a_task(task: TaskId = "words", concurrency: int = 4, **changes: Any) -> TaskConfig:
    settings: dict[str, Any] = {"task": task, "concurrency": concurrency, "model_length": 10}
    return TaskConfig(**{**settings, **changes})


def needing(task: TaskId, concurrency: int = 4, **requirements: Any) -> TaskConfig:
    return a_task(task, concurrency, requirements=Requirements(**requirements))


def on(
    task: TaskId,
    seq: int,
    *,
    demand: int,
    active: int = 0,
    ended: int = 0,
    joined: tuple[SessionId, ...] = (),
    version: int = 0,
) -> TaskReport:
    """What an aggregator reports on one task."""
    return TaskReport(task, seq, active, demand, ended, joined, version=version)


class Office:
    """One boot of one coordinator. `hold` keeps storage effects until the test lets them go."""

    def __init__(
        self,
        *tasks: TaskConfig,
        node: NodeId = "c-1",
        store: Store | None = None,
        boot: int = 0,
        now: float = 0.0,
        seed: int = 1,
    ) -> None:
        self.now = now
        self.store = Store() if store is None else store
        for config in tasks:
            self.store.apply(submission(config, f"{config.task}-p", f"{config.task}-o", now))
        self.machine = Coordinator(node, boot, now, SERVER, Random(seed))
        self.sent: list[Send] = []
        self.log: list[Effect] = []
        self.events: list[ServerEvent] = []
        self.held_back: deque[Effect] = deque()
        self._hold: tuple[type[Effect], ...] = ()
        self._numbers: dict[NodeId, int] = {}
        self._queue: deque[Effect] = deque()
        self._is_running = False

    # -- running the machine ------------------------------------------------------------------

    def receive(self, message: Message) -> list[Send]:
        """What it sends in answer, storage included."""
        return self._perform(self.machine.receive(self.now, message))

    def wake(self) -> list[Send]:
        return self._perform(self.machine.wake(self.now))

    def pass_s(self, seconds: float) -> list[Send]:
        before, until = len(self.sent), self.now + seconds
        while self.machine.next_wake() <= until:
            self.now = self.machine.next_wake()
            self.wake()
        self.now = until
        return self.sent[before:]

    def _perform(self, effects: Effects) -> list[Send]:
        self.machine.check()
        before = len(self.sent)
        self._queue.extend(effects)
        if not self._is_running:
            self._is_running = True
            try:
                while self._queue:
                    self._take(self._queue.popleft())
            finally:
                self._is_running = False
        return self.sent[before:]

    def _take(self, effect: Effect) -> None:
        self.log.append(effect)
        if isinstance(effect, Send):
            self.sent.append(effect)
        elif isinstance(effect, Log):
            self.events.append(effect.event)
        elif isinstance(effect, self._hold):
            self.held_back.append(effect)
        else:
            self._store(effect)

    def _store(self, effect: Effect) -> None:
        match effect:
            case Transact(token, transaction):
                self.receive(Transacted(token, self.store.apply(transaction)))
            case Read(token, prefixes):
                self.receive(Rows(token, self.store.snapshot(prefixes)))
            case _:
                raise AssertionError(effect)

    def receive_rows(self, read: Read, rows: tuple[tuple[str, Row], ...]) -> list[Send]:
        """The answer to a read held back, as the store was at some moment."""
        return self.receive(Rows(read.token, rows))

    # -- holding back -------------------------------------------------------------------------

    def hold(self, *kinds: type[Effect]) -> None:
        self._hold = kinds

    def release(self) -> None:
        self._hold = ()
        while self.held_back:
            self._store(self.held_back.popleft())

    def release_reads(self) -> None:
        """Answer the reads held back so far, and go on holding."""
        for effect in [effect for effect in self.held_back if isinstance(effect, Read)]:
            self.held_back.remove(effect)
            self._store(effect)

    def settle(
        self, fate: Literal["committed", "applied", "lost"], of: type[Row] = Row
    ) -> Transaction:
        """Finish the oldest transaction held back: seen, applied unseen, or not applied.

        FenceRow means a placement, LeaderRow a claim or renewal of the lease.
        """
        found = (e for e in self.held_back if isinstance(e, Transact))
        effect = next(e for e in found if isinstance(e.transaction.put[0][1], of))
        self.held_back.remove(effect)
        outcome: Outcome = "unknown"
        if fate != "lost":
            applied = self.store.apply(effect.transaction)
            outcome = applied if fate == "committed" else "unknown"
        self.receive(Transacted(effect.token, outcome))
        return effect.transaction

    # -- reports ------------------------------------------------------------------------------

    def aggregator(
        self,
        node: NodeId,
        *tasks: TaskReport,
        boot: int = 0,
        heartbeat: bool = True,
        load: float = 0.0,
        number: int | None = None,
        at: float | None = None,
        draining: bool = False,
        epoch: int | None = None,
    ) -> list[Send]:
        """A report. Without `epoch`, its sender follows this leader."""
        report = AggregatorReport(
            node=node,
            boot=boot,
            number=self._number(node) if number is None else number,
            at=self.now if at is None else at,
            epoch=self.machine.leadership.epoch if epoch is None else epoch,
            load=load,
            heartbeat=heartbeat,
            tasks=tasks,
            draining=draining,
        )
        return self.receive(report)

    def selector(
        self,
        node: NodeId,
        held: Mapping[DeviceClass, int] | int = 0,
        unfilled: tuple[SessionId, ...] = (),
        acked: int = 0,
        boot: int = 0,
        number: int | None = None,
        at: float | None = None,
        epoch: int | None = None,
    ) -> list[Send]:
        counts = {PHONE: held} if isinstance(held, int) else held
        report = SelectorReport(
            node=node,
            boot=boot,
            number=self._number(node) if number is None else number,
            epoch=self.machine.leadership.epoch if epoch is None else epoch,
            acked=acked,
            held=tuple(Held(kind, count) for kind, count in counts.items()),
            unfilled=unfilled,
            at=self.now if at is None else at,
        )
        return self.receive(report)

    def _number(self, node: NodeId) -> int:
        self._numbers[node] = self._numbers.get(node, 0) + 1
        return self._numbers[node]

    # -- what is so ---------------------------------------------------------------------------

    def fence(self, task: TaskId = "words") -> FenceRow:
        row = self.store.rows[fence_key(task)]
        assert isinstance(row, FenceRow)
        return row

    def transactions(self) -> list[Transaction]:
        """Placements: everything but the lease."""
        found = [effect.transaction for effect in self.log if isinstance(effect, Transact)]
        return [t for t in found if isinstance(t.put[0][1], FenceRow)]

    @property
    def leads(self) -> bool:
        return self.machine.leadership.leads(self.now)


def orders_in(sends: list[Send], kind: type[O], to: NodeId | None = None) -> list[O]:
    return [
        send.message for send in sends if isinstance(send.message, kind) and to in (None, send.to)
    ]


def assigned(sends: list[Send]) -> list[Assignment]:
    return [a for orders in orders_in(sends, SelectorOrders) for a in orders.assignments]


def sessions_in(sends: list[Send]) -> list[SessionId]:
    return [session for assignment in assigned(sends) for session in assignment.sessions]


def an_office(*tasks: TaskConfig, seed: int = 1) -> Office:
    """The first leader there ever was: it needs no recovery, only a heartbeat to hear everyone."""
    office = Office(*tasks, seed=seed)
    office.wake()
    office.pass_s(H)
    assert office.leads
    return office


def a_served_office(*tasks: TaskConfig, demand: int = 4, seed: int = 1) -> Office:
    """Every task is held by agg-1, which wants clients for each."""
    office = an_office(*tasks, seed=seed)
    office.aggregator("agg-1")
    office.aggregator("agg-1", *(on(config.task, 1, demand=demand) for config in tasks))
    return office
