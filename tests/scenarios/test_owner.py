"""Owners pause, resume, mark, roll back, evaluate and cancel in the middle of faults.

The owner reads rows and writes a moment later, so its transactions meet every state of a commit;
some are refused. Every promise that the checkers know holds throughout; a buffer that a roll-back
gives up is the exception that it documents: its members stay consumed and reach no version.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from papaya.aggregator.shards import blob_key, initial_blobs
from papaya.config import AsyncFL, EvaluationPlan, TaskConfig
from papaya.errors import OperatorError
from papaya.learning import parameters
from papaya.learning.evaluation import EVALUATION_LENGTH
from papaya.learning.parameters import FLOAT32
from papaya.learning.server_optimizer import server_optimizer
from papaya.messages import owner
from papaya.messages.base import TaskId
from papaya.messages.storage import (
    Changed,
    TaskRow,
    TaskState,
    Transaction,
    VersionRow,
    task_key,
)
from papaya.sim.cluster import ClusterConfig
from papaya.sim.faults import Faults
from papaya.sim.storage import OWNER
from papaya.sim.swarm import liveness_bound_s, random_cluster
from tests.scenarios.owned import OwnedAuditor, owned_cluster


class Owner:
    """Acts at random moments: reads, thinks for a while, writes."""

    def __init__(self, auditor: OwnedAuditor, rng: Random, until: float) -> None:
        self.done: dict[str, int] = {}
        self.refused = 0
        self._auditor = auditor
        self._cluster = auditor.cluster
        self._rng = rng
        self._until = until
        self._next()

    def _next(self) -> None:
        delay_s = self._rng.expovariate(1 / (2 * self._cluster.config.server.heartbeat_s))
        if self._cluster.engine.now + delay_s < self._until:
            self._cluster.engine.after(delay_s, self._act)

    def _act(self) -> None:
        task = self._rng.choice([task.task for task in self._cluster.config.tasks])
        acts = (self.roll_back, self.roll_back, self.mark, self.evaluate, self.pause, self.resume)
        act = self._rng.choice(acts)
        try:
            change = act(task)
        except OperatorError:
            change = None  # not in this state: the next one
        if change is not None:
            thinks_s = self._rng.choice((0.0, 0.01, 0.1, 1.0))
            self._cluster.engine.after(thinks_s, self._write, act.__name__, task, change)
        self._next()

    def _write(self, act: str, task: TaskId, change: Transaction) -> None:
        if self._cluster.state.apply(OWNER, change) == "refused":
            self.refused += 1
            return
        self.done[act] = self.done.get(act, 0) + 1
        if self._rng.random() < 0.7:
            self.tell()

    def tell(self) -> None:
        for node, host in self._cluster.hosts.items():
            if node.startswith("coordinator"):
                host.deliver(Changed())

    def state(self, task: TaskId, state: TaskState) -> Transaction:
        row = self._auditor.rows_of(task).row
        return owner.change_state(row, state, self._cluster.engine.now)

    def pause(self, task: TaskId) -> Transaction:
        return self.state(task, "paused")

    def resume(self, task: TaskId) -> Transaction:
        return self.state(task, "running")

    def cancel(self, task: TaskId) -> None:
        self._write("cancel", task, self.state(task, "cancelled"))

    def mark(self, task: TaskId) -> Transaction:
        rows = self._auditor.rows_of(task)
        version = self._rng.choice(list(rows.versions))
        return owner.mark(task, rows.versions[version], self._rng.random() < 0.5)

    def roll_back(self, task: TaskId) -> Transaction:
        rows = self._auditor.rows_of(task)
        config = rows.row.config
        optimizer = server_optimizer(config.optimizer)
        state = optimizer.encode_state(optimizer.initial_state(config.model_length))
        key = blob_key(task, rows.fence.seq, f"optimizer-{rows.newest.version + 1}", state)
        self._cluster.blobs.put(key, state)
        to_version = self._rng.choice(list(rows.versions))
        return owner.rollback(rows, to_version, key, self._cluster.engine.now)

    def evaluate(self, task: TaskId) -> Transaction:
        rows = self._auditor.rows_of(task)
        plan = EvaluationPlan(clients=2)
        config = owner.evaluation_config(rows.row.config, rows.newest, plan, EVALUATION_LENGTH)
        blobs = initial_blobs(config, np.zeros(EVALUATION_LENGTH, FLOAT32))
        for key, data in blobs:
            self._cluster.blobs.put(key, data)
        now = self._cluster.engine.now
        kept_until = now + 1e6  # nobody ends these evaluations
        keys = (blobs[0][0], blobs[1][0])
        return owner.evaluate(rows.row, config, rows.newest, *keys, now, kept_until)


def run_until_live(auditor: OwnedAuditor, tasks: list[TaskId]) -> None:
    goals = {task: auditor.books[task].version + 2 for task in tasks}

    def live() -> bool:
        return all(auditor.books[task].version >= goal for task, goal in goals.items())

    # Evaluations that nobody ends take clients too.
    cluster = auditor.cluster
    cluster.run(
        cluster.engine.now + 3 * liveness_bound_s(cluster.config.server, cluster.config.tasks), live
    )
    assert live(), {task: (auditor.books[task].version, goal) for task, goal in goals.items()}


@pytest.mark.parametrize("seed", range(10))
def test_owners_in_the_middle_of_faults_break_no_promise(seed: int) -> None:
    rng = Random(f"owner/{seed}")
    auditor = owned_cluster(random_cluster(rng), seed)
    cluster = auditor.cluster
    until = 60 * cluster.config.server.heartbeat_s
    Faults(cluster, rng, until, mean_gap_s=5 * cluster.config.server.heartbeat_s)
    someone = Owner(auditor, rng, until)
    cluster.run(until + 1)  # the last thought is written by then
    tasks = [task.task for task in cluster.config.tasks]
    for task in tasks:
        if auditor.rows_of(task).row.state == "paused":
            cluster.state.apply(OWNER, someone.resume(task))
    someone.cancel(tasks[0])
    run_until_live(auditor, tasks[1:])
    auditor.check_acknowledged()
    assert someone.done.get("roll_back", 0) + someone.done.get("evaluate", 0) > 0


def test_the_seeds_above_give_up_open_buffers_and_meet_refusals() -> None:
    """A scenario that never does what it is for proves nothing."""
    given_up = refused = 0
    for seed in range(4):
        rng = Random(f"owner/{seed}")
        auditor = owned_cluster(random_cluster(rng), seed)
        cluster = auditor.cluster
        someone = Owner(auditor, rng, 60 * cluster.config.server.heartbeat_s)
        cluster.run(60 * cluster.config.server.heartbeat_s)
        given_up += auditor.given_up
        refused += someone.refused
    assert given_up > 0
    assert refused > 0


# -- one task, no faults -----------------------------------------------------------------------


def a_cluster(seed: int = 1) -> OwnedAuditor:
    task = TaskConfig(
        task="next-word",
        concurrency=20,
        model_length=4,
        regime=AsyncFL(aggregation_goal=5),
        participation_gap_s=0.0,
    )
    return owned_cluster(ClusterConfig(tasks=(task,)), seed)


def test_training_goes_on_from_the_old_parameters_and_the_branch_is_aborted() -> None:
    auditor = a_cluster()
    cluster = auditor.cluster
    someone = Owner(auditor, Random(0), until=0.0)
    cluster.run(3600, lambda: auditor.books["next-word"].version >= 6)
    before = auditor.rows_of("next-word")
    old = before.versions[3]
    change = someone.roll_back("next-word")
    while (old.parameters, True) not in [
        (r.parameters, r.restarts) for _, r in change.put if isinstance(r, VersionRow)
    ]:
        change = someone.roll_back("next-word")
    training = [
        device.machine.joined.session
        for device in cluster.devices.values()
        if device.machine.joined is not None
    ]
    someone._write("roll_back", "next-word", change)
    someone.tell()
    head = auditor.books["next-word"].version
    assert head == before.newest.version + 1
    aborted = auditor.endings.get("aborted", 0)
    cluster.run(cluster.engine.now + 600, lambda: auditor.books["next-word"].version > head)

    # The checkers saw it: the first new version is one step from the old parameters, with a fresh
    # optimizer, and no member of it trained on the branch that was given up.
    rows = auditor.rows_of("next-word")
    assert rows.versions[head].parameters == old.parameters
    assert rows.newest.version == head + 1
    assert rows.fence.seq == before.fence.seq + 2
    counted = auditor.books["next-word"].counted
    assert not [session for session in training if counted.get(session) == head + 1]
    assert auditor.endings.get("aborted", 0) > aborted
    first = parameters.decode(cluster.blobs.get(rows.newest.parameters), 4)
    start = parameters.decode(cluster.blobs.get(old.parameters), 4)
    assert np.abs(first - start).max() < 0.01  # Adam's first step, not its seventh


def test_a_paused_task_gets_no_new_clients_and_goes_on_when_resumed() -> None:
    auditor = a_cluster()
    cluster = auditor.cluster
    someone = Owner(auditor, Random(0), until=0.0)
    cluster.run(3600, lambda: auditor.books["next-word"].version >= 2)
    someone._write("pause", "next-word", someone.pause("next-word"))
    someone.tell()
    cluster.run(cluster.engine.now + 300)
    assigned = len(auditor.books["next-word"].assigned)
    version = auditor.books["next-word"].version
    cluster.run(cluster.engine.now + 300)
    assert len(auditor.books["next-word"].assigned) == assigned
    assert auditor.books["next-word"].version == version
    someone._write("resume", "next-word", someone.resume("next-word"))
    someone.tell()
    cluster.run(cluster.engine.now + 600)
    assert auditor.books["next-word"].version > version


def test_a_cancelled_task_loses_its_clients_and_its_holder() -> None:
    auditor = a_cluster()
    cluster = auditor.cluster
    someone = Owner(auditor, Random(0), until=0.0)
    cluster.run(3600, lambda: auditor.books["next-word"].version >= 2)
    someone.cancel("next-word")
    someone.tell()
    cluster.run(cluster.engine.now + 600)
    version = auditor.books["next-word"].version
    cluster.run(cluster.engine.now + 300)
    assert auditor.books["next-word"].version == version
    row = cluster.state.rows[task_key("next-word")]
    assert isinstance(row, TaskRow)
    assert (row.state, row.ended > 0) == ("cancelled", True)
    assert not [d for d in cluster.devices.values() if d.machine.joined is not None]
