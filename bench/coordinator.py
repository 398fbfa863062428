"""Claim: the leader of a fleet for 10⁸ devices needs less than one core for its decisions.

The real Coordinator under virtual time, with 100 selectors and 1,000 aggregators that are as simple
as possible: each aggregator holds one task of C = 230, clients end after 80 s on average, and an
assigned client joins after one second. So 2,875 clients end and join per second, and selectors hold
check-ins all the time. Reports are sent at the intervals that real servers keep.

It counts the CPU that the leader's process spends on its machine: parse each report, receive it,
encode each message that it sends, and decode the rows that it reads every heartbeat. HTTP is not
included: the numbers of messages are given, and `scaling.py` counts each like a rejected check-in.
Cores are CPU seconds per virtual second. It is asserted that 90 % of the slots are busy. Run as
`python bench/coordinator.py`; takes about a minute and prints one JSON line.
"""

from __future__ import annotations

import time
from collections import Counter
from heapq import heappop, heappush
from random import Random

from _servers import report, require

from papaya.config import AsyncFL, ServerConfig, TaskConfig
from papaya.coordinator.coordinator import Coordinator
from papaya.machine import Effects, Read, Send, Transact
from papaya.messages import wire
from papaya.messages.base import Message
from papaya.messages.control import (
    AggregatorOrders,
    AggregatorReport,
    Held,
    SelectorOrders,
    SelectorReport,
    TaskReport,
)
from papaya.messages.selection import Capabilities, DeviceClass
from papaya.messages.storage import Row, Rows, Transacted, submission

SELECTORS, AGGREGATORS, CONCURRENCY, CLASSES = 100, 1_000, 230, 8
SESSION_S, JOINS_AFTER_S, HELD_EACH = 80.0, 1.0, 160
SERVER = ServerConfig()
WARM_UP_S, MEASURED_S = 25.0, 3.0
CORES, UTILIZATION = 1.0, 0.9


class Store:
    """Rows as bytes: the leader's process decodes what it reads."""

    def __init__(self) -> None:
        self.rows: dict[str, bytes] = {}

    def apply(self, effect: Transact) -> Transacted:
        for key, row in effect.transaction.put:
            self.rows[key] = wire.encode_row(row)
        return Transacted(effect.token, "committed")

    def read(self, effect: Read) -> Rows:
        found: list[tuple[str, Row]] = [
            (key, wire.decode_row(row))
            for key, row in sorted(self.rows.items())
            if key.startswith(effect.prefixes)
        ]
        return Rows(effect.token, tuple(found))


class Aggregator:
    """One task. Its clients end at random; those that were assigned join."""

    def __init__(self, index: int, concurrency: int) -> None:
        self.node = f"aggregator@10.0.{index // 250}.{index % 250}:8752"
        self.task = ""  # which one it holds
        self.concurrency = concurrency
        self.active = self.ended = self.number = self.seq = 0
        self.joined: dict[int, tuple[str, ...]] = {}
        self.new: list[str] = []
        self.epoch = 0
        self.reported_at = -1.0
        self.is_due = False

    def report(self, now: float, *, is_beat: bool) -> AggregatorReport:
        self.number += 1
        self.joined[self.number], self.new = tuple(self.new), []
        joined = tuple(session for each in self.joined.values() for session in each)
        tasks: tuple[TaskReport, ...] = ()
        if self.task:
            demand = self.concurrency - self.active
            tasks = (TaskReport(self.task, self.seq, self.active, demand, self.ended, joined),)
        return AggregatorReport(self.node, 1, self.number, now, self.epoch, 0.1, is_beat, tasks)

    def ordered(self, orders: AggregatorOrders) -> None:
        self.epoch = orders.epoch
        self.joined = {n: s for n, s in self.joined.items() if n > orders.acked}
        for placement in orders.tasks:
            self.task, self.seq = placement.task, placement.seq


class Selector:
    """Always holds the same number of devices."""

    def __init__(self, index: int) -> None:
        self.node = f"selector@10.1.0.{index}:8752"
        self.number = self.epoch = self.acked = self.catalogue = 0

    def report(self, now: float, held: tuple[Held, ...]) -> SelectorReport:
        self.number += 1
        known = (self.epoch, self.acked, held, (), now, self.catalogue)
        return SelectorReport(self.node, 1, self.number, *known)


class Fleet:
    """Events under virtual time. `cpu_s` is what the leader's process has used."""

    def __init__(self, concurrency: int) -> None:
        self.now, self.cpu_s = 1_000.0, 0.0
        self.messages: Counter[str] = Counter()
        self.sent_bytes = 0
        self._rng = Random(7)
        self._heap: list[tuple[float, int, str, object]] = []
        self._count = 0
        self._store = Store()
        self.aggregators = [Aggregator(i, concurrency) for i in range(AGGREGATORS)]
        self._by_node = {each.node: each for each in self.aggregators}
        self._by_task: dict[str, Aggregator] = {}
        self._selectors = {each.node: each for each in map(Selector, range(SELECTORS))}
        for index in range(AGGREGATORS):
            self._submit(f"task-{index}", concurrency)
        classes = [
            DeviceClass(Capabilities("torch", ("ab12",), 512 * (i + 1), ("eu",)))
            for i in range(CLASSES)
        ]
        self._held = tuple(Held(each, HELD_EACH // CLASSES) for each in classes)
        self.leader = Coordinator("coordinator@10.2.0.1:8752", 1, self.now, SERVER, Random(3))
        for index, each in enumerate(self.aggregators):
            self._at(self.now + SERVER.heartbeat_s * index / AGGREGATORS, "beat", each)
        for index, selector in enumerate(self._selectors.values()):
            at = self.now + SERVER.held_report_interval_s * index / SELECTORS
            self._at(at, "held", selector)
        self._at(self.now, "wake", None)

    def _submit(self, task: str, concurrency: int) -> None:
        config = TaskConfig(
            task=task, concurrency=concurrency, model_length=5_242_880, regime=AsyncFL(50)
        )
        for key, row in submission(config, f"{task}/0/version-0", f"{task}/0/opt", 0.0).put:
            self._store.rows[key] = wire.encode_row(row)

    def _at(self, when: float, what: str, of: object) -> None:
        self._count += 1
        heappush(self._heap, (when, self._count, what, of))

    def run(self, seconds: float) -> None:
        ends_at = self.now + seconds
        while self._heap[0][0] < ends_at:
            self.now, _, what, of = heappop(self._heap)
            match what, of:
                case "wake", _:
                    self._charged(None)
                    self._at(max(self.leader.next_wake(), self.now + 0.001), "wake", None)
                case "beat", Aggregator():
                    self._tell(of.report(self.now, is_beat=True))
                    self._at(self.now + SERVER.heartbeat_s, "beat", of)
                case "report", Aggregator():
                    of.is_due, of.reported_at = False, self.now
                    self._tell(of.report(self.now, is_beat=False))
                case "held", Selector():
                    self._tell(of.report(self.now, self._held))
                    self._at(self.now + SERVER.held_report_interval_s, "held", of)
                case "end", Aggregator():
                    of.active -= 1
                    of.ended += 1
                    self._changed(of)
                case "join", (Aggregator() as aggregator, str(session)):
                    aggregator.active += 1
                    aggregator.new.append(session)
                    self._at(self.now + self._rng.expovariate(1 / SESSION_S), "end", aggregator)
                    self._changed(aggregator)
        self.now = ends_at

    def _fill(self, aggregator: Aggregator) -> None:
        """All slots are busy from the start."""
        aggregator.active = aggregator.concurrency
        for _ in range(aggregator.concurrency):
            self._at(self.now + self._rng.expovariate(1 / SESSION_S), "end", aggregator)
        self._changed(aggregator)

    def _changed(self, aggregator: Aggregator) -> None:
        if not aggregator.is_due:
            aggregator.is_due = True
            due = max(self.now, aggregator.reported_at + SERVER.min_report_interval_s)
            self._at(due, "report", aggregator)

    def _tell(self, message: Message) -> None:
        self.messages[type(message).__name__] += 1
        self._charged(wire.encode(message))

    def _charged(self, data: bytes | None) -> None:
        """What the process of the leader does with a message, or when it wakes."""
        began_s, sent = time.thread_time(), []
        leader = self.leader
        effects: Effects
        if data is None:
            effects = leader.wake(self.now)
        else:
            effects = leader.receive(self.now, wire.between_servers.parse(data))
        while effects:
            effect = effects.pop(0)
            match effect:
                case Send():
                    sent.append((effect.to, wire.encode(effect.message)))
                case Transact():
                    effects += leader.receive(self.now, self._store.apply(effect))
                case Read():
                    effects += leader.receive(self.now, self._store.read(effect))
        self.cpu_s += time.thread_time() - began_s
        for to, encoded in sent:
            self.sent_bytes += len(encoded)
            self._deliver(to, wire.between_servers.parse(encoded))

    def _deliver(self, to: str, message: Message) -> None:
        self.messages[type(message).__name__] += 1
        match message:
            case AggregatorOrders():
                aggregator = self._by_node[to]
                is_new = not aggregator.task
                aggregator.ordered(message)
                self._by_task[aggregator.task] = aggregator
                if is_new and aggregator.task:
                    self._fill(aggregator)
            case SelectorOrders():
                selector = self._selectors[to]
                selector.epoch, selector.acked = message.epoch, message.number
                selector.catalogue = message.catalogue
                for assignment in message.assignments:
                    aggregator = self._by_task[assignment.task]
                    for session in assignment.sessions:
                        self._at(self.now + JOINS_AFTER_S, "join", (aggregator, session))


def main() -> None:
    fleet = Fleet(CONCURRENCY)
    fleet.run(WARM_UP_S)
    before = fleet.cpu_s, fleet.sent_bytes, fleet.messages.copy()
    fleet.run(MEASURED_S)
    cores = (fleet.cpu_s - before[0]) / MEASURED_S
    active = sum(each.active for each in fleet.aggregators)
    utilization = active / (AGGREGATORS * CONCURRENCY)
    require(utilization >= UTILIZATION, f"utilization is only {utilization:.2f}")
    more = {
        "utilization": round(utilization, 3),
        "sent_mb_per_s": round((fleet.sent_bytes - before[1]) / MEASURED_S / 1e6, 1),
    }
    for kind, count in (fleet.messages - before[2]).items():
        more[f"{kind}_per_s"] = round(count / MEASURED_S)
    case = f"cores of the leader, {AGGREGATORS} aggregators, {SELECTORS} selectors"
    report("coordinator", case, cores, CORES, cores <= CORES, **more)


if __name__ == "__main__":
    main()
