"""Acknowledged means counted exactly once, whatever happens to commits, answers and holders.

Clients upload small integers; commits end as committed, applied unseen, lost, or applied late;
heavy work is slow; the task moves at any moment, and the holder before may live on without knowing.
After every step: every acknowledged session is in exactly one version or record, no session is in
two, and every sum and every version is, bit for bit, what its members make it.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from papaya.aggregator.work import Drop, Fold, Keep, Restore, Snapshot, Step
from papaya.config import Aggregation, OptimizerConfig, TaskConfig, Weighting
from papaya.learning import parameters
from papaya.learning.parameters import FLOAT32, Vector
from papaya.learning.server_optimizer import server_optimizer
from papaya.learning.weighting import WeightedSum
from papaya.machine import Effect, Read, Transact
from papaya.messages.base import Message, SessionId
from papaya.messages.participation import (
    Aborted,
    Completed,
    Incomplete,
    Joined,
    Refused,
    UploadGranted,
)
from papaya.messages.storage import ConsumedRow, Member, RecordRow, Transaction, VersionRow
from tests.unit.aggregator.builders import (
    MODEL_LENGTH,
    SERVER,
    Node,
    Phone,
    World,
    a_sync_task,
    an_async_task,
)

WORK: tuple[type[Effect], ...] = (Keep, Drop, Fold, Snapshot, Step, Restore)
STORAGE: tuple[type[Effect], ...] = (Transact, Read)
Fate = Literal["committed", "applied", "lost"]
FATES = st.sampled_from(["committed", "committed", "applied", "lost"])
# Consumed ids must outlive every run, or the oracle forgets with the holder.
LONG_S = 100_000.0


def update_of(session: SessionId) -> tuple[int, ...]:
    number = int(session[1:])
    return (number, 1, number % 3, -number)


def examples_of(session: SessionId) -> int:
    return 1 + int(session[1:]) % 4


class Client:
    """Does one thing at each turn, and does it again when it is told to or hears nothing."""

    def __init__(self, phone: Phone) -> None:
        self.phone = phone
        self.stage: Literal["join", "report", "send", "complete", "over"] = "join"
        self._asked: list[int] = []
        self._waiting: list[int] = []

    @property
    def is_acknowledged(self) -> bool:
        """Was it ever told so? The answer may have been lost on its way."""
        answers = self.phone.world.answers
        return any(answers.get(handle) == Completed() for handle in self._asked)

    def turn(self, node: Node) -> None:
        self.phone.node = node
        self.listen()
        match self.stage:
            case "join":
                self._hear(self.phone.join())
            case "report":
                self._hear(self.phone.report(examples_of(self.phone.session)))
            case "send":
                self.stage = "complete"
                for answer in self.phone.send(*update_of(self.phone.session)):
                    self._hear(answer)
            case "complete":
                handle = self.phone.complete()
                self._asked.append(handle)
                self._waiting.append(handle)

    def listen(self) -> None:
        """Answers to completions may have come meanwhile."""
        answers = self.phone.world.answers
        for handle in [handle for handle in self._waiting if handle in answers]:
            self._waiting.remove(handle)
            self._hear(answers[handle])

    def lose_answers(self) -> None:
        self._waiting.clear()

    def _hear(self, answer: Message | None) -> None:
        match answer:
            case Completed(discarded=reason):
                assert reason in (None, "round_over"), "every update here is a good one"
                self.stage = "over"
            case Aborted() | Refused():
                self.stage = "over"
            case Joined() if self.stage == "join":
                self.stage = "report"
            case UploadGranted() if self.stage == "report":
                self.stage = "send"
            case Incomplete() if self.stage == "complete":
                self.stage = "send"


class Life(RuleBasedStateMachine):
    """One task, one holder after the other. Nothing is finished unless a rule finishes it."""

    config: TaskConfig

    @initialize()
    def begin(self) -> None:
        self.world = World(self.config)
        self.clients: list[Client] = []
        self.late: list[Transaction] = []
        self.holder = self._start()
        self._load()

    def _start(self) -> Node:
        node = self.world.start(f"agg-{len(self.world.nodes)}-{self.world.now}")
        node.hold(*WORK, *STORAGE)
        self.world.place(node)
        return node

    def _load(self) -> None:
        """The holder reads the rows and restores its sums."""
        self._answer(self.holder, "committed")
        self._work(self.holder)

    # -- clients ------------------------------------------------------------------------------

    @rule(count=st.integers(1, 4), turns=st.sampled_from([2, 4, 4]))
    def clients_come(self, count: int, turns: int) -> None:
        """Four turns bring a client from join to the end of its upload, if nothing is wrong."""
        if self.holder.machine.tasks:
            for _ in range(count):
                client = Client(self.world.phone(self.holder))
                self.clients.append(client)
                for _ in range(turns):
                    client.turn(self.holder)

    @rule(which=st.integers(0, 7), turns=st.integers(1, 4))
    def a_client_goes_on(self, which: int, turns: int) -> None:
        going = [client for client in self.clients if client.stage != "over"]
        for _ in range(turns if going else 0):
            going[which % len(going)].turn(self.holder)

    @rule(turns=st.integers(1, 3))
    def all_clients_go_on(self, turns: int) -> None:
        for _ in range(turns):
            for client in self.clients:
                client.turn(self.holder)

    @rule()
    def answers_are_lost(self) -> None:
        for client in self.clients:
            client.lose_answers()

    # -- work, commits, time --------------------------------------------------------------------

    def _first(self, node: Node, kinds: tuple[type[Effect], ...]) -> Effect | None:
        """Work is done in the order given, storage beside it."""
        found = next((effect for effect in node.held_back if isinstance(effect, kinds)), None)
        if found is not None:
            node.held_back.remove(found)
        return found

    def _work(self, node: Node, at_most: int = 1000) -> None:
        for _ in range(at_most):
            if (effect := self._first(node, WORK)) is None:
                break
            node._carry_out(effect)

    @rule(which=st.integers(0, 2), count=st.integers(1, 12))
    def some_work_is_done(self, which: int, count: int) -> None:
        self._work(self.world.nodes[which % len(self.world.nodes)], count)

    @rule(which=st.sampled_from([-1, -1, 0, 1]), fates=st.lists(FATES, min_size=1, max_size=4))
    def storage_answers(self, which: int, fates: list[Fate]) -> None:
        node = self.world.nodes[which % len(self.world.nodes)]
        for fate in fates:
            self._work(node)
            self._answer(node, fate)

    def _answer(self, node: Node, fate: Fate) -> None:
        effect = self._first(node, STORAGE)
        if isinstance(effect, Transact):
            node.held_back.appendleft(effect)
            transaction = node.settle(fate)
            if fate == "lost":
                self.late.append(transaction)
        elif effect is not None:
            node._carry_out(effect)

    @rule(times=st.integers(1, 6))
    def all_goes_well_for_a_while(self, times: int) -> None:
        for _ in range(times):
            self._work(self.holder)
            self._answer(self.holder, "committed")

    @precondition(lambda self: self.late)
    @rule(which=st.integers(0, 7))
    def a_lost_commit_arrives_late(self, which: int) -> None:
        self.world.store.apply(self.late.pop(which % len(self.late)))

    @rule(seconds=st.sampled_from([0.1, 0.3, 2.0, SERVER.heartbeat_s]))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_s(seconds)

    # -- the task moves -------------------------------------------------------------------------

    @rule(how=st.sampled_from(["not", "not", "not", "crash", "unknowing", "regained"]))
    def the_task_moves(self, how: str) -> None:
        if how == "regained":
            self.world.place(self.holder)
        if how in ("crash", "unknowing"):
            self._succeed(crash=how == "crash")
            self._load()

    def _succeed(self, *, crash: bool) -> None:
        if crash or len(self.world.nodes) > 2:
            self.world.crash(self.holder)
        self.holder = self._start()

    # -- what must hold ---------------------------------------------------------------------------

    @invariant()
    def acknowledged_is_counted_exactly_once(self) -> None:
        if not hasattr(self, "world"):
            return
        counted = self.world.consumed() + self.world.recorded()
        assert len(counted) == len(set(counted)), "a session is counted twice"
        for client in self.clients:
            if client.is_acknowledged:
                assert client.phone.session in counted, "an acknowledged session is lost"

    @invariant()
    def every_sum_is_what_its_members_make_it(self) -> None:
        if hasattr(self, "world"):
            for record in self.world.store.all(RecordRow):
                assert len(record.members) <= self.config.aggregation_goal
                assert record.target > self.world.version
                self._check_blobs(record)
            self._check_versions()

    def _check_blobs(self, record: RecordRow) -> None:
        if self.config.aggregation.is_mean:
            blob = self.world.blobs[record.sum]
            assert WeightedSum.decode(blob, MODEL_LENGTH) == total_of(record.members)
            return
        blobs = [self.world.blobs[key] for key in record.updates or ()]
        assert [np.frombuffer(blob, FLOAT32).tolist() for blob in blobs] == [
            damped_update(member).tolist() for member in record.members
        ]

    def _check_versions(self) -> None:
        consumed = {row.version: row.members for row in self.world.store.all(ConsumedRow)}
        before = np.zeros(MODEL_LENGTH, FLOAT32)
        optimizer = server_optimizer(self.config.optimizer)
        state = optimizer.initial_state(MODEL_LENGTH)
        for row in self.world.store.all(VersionRow):
            if row.version > 0:
                members = consumed[row.version]
                assert len(members) == self.config.aggregation_goal
                before, state = optimizer.step(before, step_of(self.config, members), state)
            found = parameters.decode(self.world.blobs[row.parameters], MODEL_LENGTH)
            assert found.tolist() == before.tolist()

    def teardown(self) -> None:
        """Heal everything: every client comes to an end, at this holder and at the next."""
        if not hasattr(self, "world"):
            return
        self._heal()
        for transaction in self.late:
            self.world.store.apply(transaction)
        self._succeed(crash=True)
        self._load()
        self.world.pass_s(SERVER.heartbeat_s)
        before = self.world.version
        for _ in range(2 * self.config.aggregation_goal):
            self.clients_come(1, 4)
            self._heal()
        assert self.world.version > before, "nothing moves"

    def _heal(self) -> None:
        for _ in range(20):
            self.all_goes_well_for_a_while(6)
            self.world.pass_s(1.0)
            self.all_clients_go_on(1)
            if all(client.stage == "over" for client in self.clients):
                break
        assert all(client.stage == "over" for client in self.clients), "somebody waits for ever"
        self.acknowledged_is_counted_exactly_once()
        self.every_sum_is_what_its_members_make_it()


def step_of(config: TaskConfig, members: tuple[Member, ...]) -> Vector:
    if config.aggregation.is_mean:
        return total_of(members).mean()
    return np.median([damped_update(member) for member in members], axis=0).astype(FLOAT32)


def damped_update(member: Member) -> Vector:
    assert member.examples == 1, "a median counts all updates the same"
    factor = np.float32(1 / math.sqrt(1 + member.staleness))
    return np.array(update_of(member.session), FLOAT32) * factor


def total_of(members: tuple[Member, ...]) -> WeightedSum:
    """The slow way: every member's update again, in the order of the record."""
    total = WeightedSum.zero(MODEL_LENGTH)
    for member in members:
        update = np.array(update_of(member.session), FLOAT32)
        assert member.examples == examples_of(member.session)
        total.add(update, member.examples, member.staleness)
    return total


# With momentum a version depends on the optimizer's state, so that a wrong one shows.
COMMON: dict[str, Any] = {
    "training_timeout_s": LONG_S,
    "optimizer": OptimizerConfig(kind="fedavg", momentum=0.5),
}
MEDIAN: dict[str, Any] = {"aggregation": Aggregation("median"), "weighting": Weighting("equal")}
TASKS = {
    "async": an_async_task(2, concurrency=4, **COMMON),
    "one update a version": an_async_task(1, concurrency=3, **COMMON),
    "goal above concurrency": an_async_task(5, concurrency=3, **COMMON),
    "sync": a_sync_task(3, 0.0, **COMMON),
    "over-selection": a_sync_task(4, 1.0, **COMMON),
    "median": an_async_task(3, concurrency=4, **COMMON, **MEDIAN),
}


@pytest.mark.parametrize("name", TASKS)
def test_acknowledged_means_counted_exactly_once(name: str) -> None:
    class OfThisTask(Life):
        config = TASKS[name]

    run_state_machine_as_test(
        OfThisTask, settings=settings(max_examples=80, stateful_step_count=40)
    )
