"""Random work on threads gives what a slow sequential reference gives.

Updates are small integers, so that sums are exact in any order and the key of every blob can be
foretold. Work is given all at once; blobs fail to be written now and then.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papaya.aggregator.shards import blob_key
from papaya.aggregator.work import (
    Delayed,
    DeleteBlobs,
    Drop,
    Fold,
    Folded,
    Lost,
    Restore,
    Restored,
    Snapshot,
    Snapshotted,
    Step,
    Stepped,
    Sum,
)
from papaya.errors import OperatorError
from papaya.learning import parameters
from papaya.learning.parameters import FLOAT32, Vector
from papaya.learning.weighting import WeightedSum
from papaya.messages.base import BlobKey, Message, SessionId, TaskId
from papaya.messages.storage import Member, RecordRow, VersionRow
from papaya.server.workers import HeavyWork
from tests.unit.server.worker_builders import LENGTH, Driver, MemoryBlobs, a_task, run

TASKS = ["one", "two"]
CONFIGS = {task: a_task(task) for task in TASKS}

Members = dict[SessionId, tuple[tuple[int, ...], int]]
Expected = list[frozenset[Folded] | Message]


class Plan(NamedTuple):
    """What to do with one task."""

    kind: str
    task: TaskId
    target: int = 1
    values: tuple[int, ...] = ()
    examples: int = 1


class Reference:
    """One task, one thing after the other. Says what will be told, and which work says it."""

    def __init__(self, task: TaskId, first: list[BlobKey]) -> None:
        self.config = CONFIGS[task]
        self.task = task
        self.first = first
        self.buffers: dict[int, Members] = {}
        self.durable: dict[int, tuple[BlobKey, Members]] = {}
        self.stepped: set[int] = set()
        self.told: Expected = [frozenset()]

    def tell(self, message: Message) -> None:
        self.told += [message, frozenset()]

    def may_fold(self, target: int) -> bool:
        """A holder folds nothing into a version that it has begun to make: a step and such a fold
        may run at the same time. Only rows that are read again open the version again.
        """
        return target not in self.stepped

    def fold(self, session: SessionId, plan: Plan, is_whole: bool) -> HeavyWork:
        if is_whole:
            members = self.buffers.setdefault(plan.target, {})
            members[session] = (plan.values, plan.examples)
        refused = None if is_whole else "wrong_size"
        folded = Folded(self.task, 1, plan.target, session, refused)  # type: ignore[arg-type]
        last = self.told[-1]
        assert isinstance(last, frozenset)
        self.told[-1] = last | {folded}
        return Fold(self.config, 1, plan.target, session, plan.examples, 0)

    def snapshot(self) -> HeavyWork | None:
        if not self.buffers:
            return None
        sums = []
        for target, members in self.buffers.items():
            vector = np.zeros(LENGTH, FLOAT32)
            for values, examples in members.values():
                vector += examples * np.array(values, FLOAT32)
            weight = float(sum(examples for _, examples in members.values()))
            encoded = WeightedSum(vector, weight).encode()
            key = blob_key(self.task, 1, f"sum-{target}-{len(members)}", encoded)
            self.durable[target] = (key, dict(members))
            sums.append(Sum(target, key, tuple(members), weight))
        self.tell(Snapshotted(self.task, 1, tuple(sums)))
        return Snapshot(self.task, 1, tuple(self.buffers))

    def restore(self) -> HeavyWork:
        self.buffers = {target: dict(members) for target, (_, members) in self.durable.items()}
        self.stepped.clear()
        self.tell(Restored(self.task, 1))
        return Restore(self.config, 1, tuple(map(self._record, self.durable)), tuple(self.first))

    def step(self, target: int) -> HeavyWork | None:
        if target not in self.durable:
            return None
        version, state = self.first
        work = Step(self.config, 1, VersionRow(0, version, 0, 0.0), state, self._record(target))
        members = self.durable[target][1].values()
        total: Vector = np.zeros(LENGTH, FLOAT32)
        for values, examples in members:
            total += examples * np.array(values, FLOAT32)
        mean = (total / sum(examples for _, examples in members)).astype(FLOAT32)
        encoded = parameters.encode(mean, {"task": self.task, "version": str(target)})
        key = blob_key(self.task, 1, f"version-{target}", encoded)
        self.buffers.pop(target, None)
        del self.durable[target]
        self.stepped.add(target)
        self.tell(Stepped(self.task, 1, target, key, "not compared"))
        return work

    def drop(self) -> HeavyWork:
        self.buffers = {}
        return Drop(self.task, 1)

    def delete(self, target: int) -> HeavyWork | None:
        if target not in self.durable:
            return None
        return DeleteBlobs((self.durable.pop(target)[0],))

    def _record(self, target: int) -> RecordRow:
        key, members = self.durable[target]
        found = tuple(Member(s, 0, 0, examples, 0.0) for s, (_, examples) in members.items())
        return RecordRow(target, key, found, float(sum(m.examples for m in found)))


def agrees(expected: Expected, told: list[Message]) -> None:
    """Folds are told in any order, but before a snapshot or restore that was given later."""
    told = [message for message in told if not isinstance(message, Delayed)]
    others = [message for message in told if not isinstance(message, Folded)]
    results = [part for part in expected if not isinstance(part, frozenset)]
    assert list(map(_comparable, others)) == list(map(_comparable, results))
    folds = [message for message in told if isinstance(message, Folded)]
    given = [part for part in expected if isinstance(part, frozenset)]
    assert len(folds) == sum(map(len, given))
    assert frozenset(folds) == frozenset().union(*given)
    place_of = {message: place for place, message in enumerate(told) if message in folds}
    places = [place for place, message in enumerate(told) if not isinstance(message, Folded)]
    for number, place in enumerate(places, 1):
        if not isinstance(told[place], Stepped):  # a step touches no sum that is being folded into
            before = frozenset().union(*given[:number])
            assert all(place_of[folded] < place for folded in before)
        if isinstance(told[place], Restored):
            after = frozenset().union(*given[number:])
            assert all(place_of[folded] > place for folded in after)


def _comparable(message: Message) -> object:
    if isinstance(message, Snapshotted):
        return [(s.target, s.blob, sorted(s.sessions), s.weight) for s in message.sums]
    return (message.version, message.parameters) if isinstance(message, Stepped) else message


target = st.integers(1, 2)
plans = st.one_of(
    st.builds(
        Plan,
        st.sampled_from(["fold", "fold", "fold", "half", "left"]),
        st.sampled_from(TASKS),
        target,
        st.tuples(*[st.integers(-9, 9)] * LENGTH),
        st.integers(1, 5),
    ),
    st.builds(
        Plan,
        st.sampled_from(["snapshot", "snapshot", "restore", "step", "drop", "delete"]),
        st.sampled_from(TASKS),
        target,
    ),
)


@pytest.mark.parametrize("threads", [1, 2, 4])
@given(
    plan=st.lists(plans, max_size=60),
    failures=st.lists(
        st.sampled_from([None, OSError(28, "full"), OperatorError("full")]), max_size=4
    ),
)
@settings(max_examples=200, deadline=None)
def test_every_sum_holds_exactly_its_sessions(
    threads: int, plan: list[Plan], failures: list[Exception | None]
) -> None:
    blobs = MemoryBlobs(*CONFIGS.values())
    blobs.failures = failures
    references = {task: Reference(task, blobs.first[task]) for task in TASKS}

    async def test(driver: Driver) -> None:
        for number, each in enumerate(plan):
            work = _given(driver, references[each.task], each, f"s{number}")
            if work is not None:
                driver.workers.perform(work)
        await driver.workers.drain()
        for task in TASKS:
            driver.workers.perform(Drop(task, 1))

    driver = run(test, blobs, threads)
    assert driver.of(Lost) == []
    assert driver.pool.free == driver.pool.count
    for task, reference in references.items():
        told = [message for message in driver.told if message.task == task]  # type: ignore[attr-defined]
        agrees(reference.told, told)
        assert all(key in blobs.blobs for key, _ in reference.durable.values())


def _given(
    driver: Driver, reference: Reference, plan: Plan, session: SessionId
) -> HeavyWork | None:
    match plan.kind:
        case "fold" | "half" if not reference.may_fold(plan.target):
            return None
        case "fold":
            driver.upload(plan.task, session, list(plan.values))
            return reference.fold(session, plan, is_whole=True)
        case "half":
            driver.upload(plan.task, session, list(plan.values[:2]))
            return reference.fold(session, plan, is_whole=False)
        case "left":
            driver.upload(plan.task, session, list(plan.values))
            return Drop(plan.task, 1, session)
        case "snapshot":
            return reference.snapshot()
        case "restore":
            return reference.restore()
        case "step":
            return reference.step(plan.target)
        case "drop":
            return reference.drop()
        case _:
            return reference.delete(plan.target)
