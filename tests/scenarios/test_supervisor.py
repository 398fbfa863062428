"""The supervisor beside real machines under virtual time: history, evaluations, stop rules.

Devices that evaluate upload sums that fall with the version they were given, so the losses that the
supervisor reads back are known exactly.
"""

from __future__ import annotations

from collections.abc import Coroutine, Set
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from papaya.client.work import Train
from papaya.config import AsyncFL, EvaluationPlan, StopRule, TaskConfig
from papaya.learning.evaluation import EvaluationResult, evaluation_vector
from papaya.messages.base import BlobKey, TaskId
from papaya.messages.storage import (
    Changed,
    Outcome,
    PointRow,
    RecordRow,
    Row,
    TaskRow,
    Transaction,
    VersionRow,
)
from papaya.server.admin.history import TaskHistory
from papaya.server.admin.supervisor import REMEMBER_S, Supervisor
from papaya.sim.behaviour import EncodedMessages
from papaya.sim.cluster import Cluster, ClusterConfig
from papaya.sim.devices import SimulatedDevice
from papaya.sim.population import PopulationConfig
from papaya.sim.storage import OWNER
from papaya.store.blobs import Piece
from tests.scenarios.owned import OwnedAuditor

T = TypeVar("T")
EXAMPLES = 10


class EvaluatedAuditor(OwnedAuditor):
    """Does not check the sums of evaluations: their members do not upload what names them."""

    def _check_sum(self, config: TaskConfig, row: RecordRow) -> None:
        if config.evaluates is None:
            super()._check_sum(config, row)


class TrueEvaluations(EncodedMessages):
    """Devices evaluate truly: loss 8 at version 0, falling with the versions."""

    def __init__(self, auditor: OwnedAuditor) -> None:
        self._auditor = auditor

    def train(self, device: SimulatedDevice, work: Train) -> bytes:
        if not work.evaluates:
            return super().train(device, work)
        task = self._auditor.config_of(work.session).task
        loss = loss_at(int(task.rpartition("-")[2]))
        return evaluation_vector(EXAMPLES, EXAMPLES * loss, EXAMPLES).tobytes()


def loss_at(version: int) -> float:
    return 8 / (1 + version)


class Twins:
    """The twins of the stores, as the supervisor awaits them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def read(self, prefixes: tuple[str, ...]) -> dict[str, Row]:
        return self._cluster.state.snapshot(prefixes)

    async def transact(self, transaction: Transaction) -> Outcome:
        return self._cluster.state.apply(OWNER, transaction)

    async def get(self, key: BlobKey) -> bytes:
        return self._cluster.blobs.get(key)

    async def put(self, key: BlobKey, data: Piece) -> None:
        self._cluster.blobs.put(key, bytes(data))

    async def sweep(self, task: TaskId, below_seq: int, keep: Set[BlobKey]) -> None:
        self._cluster.blobs.sweep(task, below_seq, frozenset(keep))

    async def path(self, key: BlobKey) -> Path:
        raise NotImplementedError


def at_once(coroutine: Coroutine[None, None, T]) -> T:
    """Run a coroutine that never has to wait."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("it waits for something")


def a_cluster(task: TaskConfig, seed: int) -> Cluster:
    fleet = PopulationConfig(size=3000, execution_per_example_s=0.2, latency_mean_s=2.0)
    auditor = EvaluatedAuditor()
    return Cluster(
        ClusterConfig(tasks=(task,), population=fleet),
        seed,
        observers=[auditor],
        behaviour=TrueEvaluations(auditor),
    )


def supervised(cluster: Cluster, supervisors: int = 1) -> None:
    """Each takes its turn every second."""

    def changed() -> None:
        cluster.hosts["coordinator-0"].deliver(Changed())

    def turn(supervisor: Supervisor) -> None:
        at_once(supervisor.turn())
        cluster.engine.after(1.0, turn, supervisor)

    for number in range(supervisors):
        twins = Twins(cluster)
        found = Supervisor(
            twins,
            twins,
            TaskHistory(twins),
            cluster.config.server,
            lambda: cluster.engine.now,
            changed,
        )
        cluster.engine.after(1 + number / 3, turn, found)


def a_task(stop: StopRule, plan: EvaluationPlan | None = None) -> TaskConfig:
    return TaskConfig(
        task="next-word",
        concurrency=20,
        model_length=4,
        regime=AsyncFL(aggregation_goal=5),
        participation_gap_s=0.0,
        keep_versions=1,
        training_timeout_s=60.0,
        upload_timeout_s=20.0,
        stop=stop,
        evaluation=plan,
    )


def rows_of(cluster: Cluster, kind: type[Row], task: str = "next-word") -> list[Row]:
    return [
        row
        for key, row in sorted(cluster.state.rows.items())
        if type(row) is kind and key.split("/")[1] == task
    ]


def task_row(cluster: Cluster) -> TaskRow:
    [row] = rows_of(cluster, TaskRow)
    assert isinstance(row, TaskRow)
    return row


def points(cluster: Cluster) -> list[PointRow]:
    return [row for row in rows_of(cluster, PointRow) if isinstance(row, PointRow)]


def is_over(cluster: Cluster) -> bool:
    return task_row(cluster).is_over


@pytest.mark.parametrize("supervisors", [1, 3])
def test_a_task_is_evaluated_by_plan_and_ends_at_its_last_version(supervisors: int) -> None:
    plan = EvaluationPlan(every_versions=4, clients=6)
    task = a_task(StopRule(versions=12), plan)
    cluster = a_cluster(task, 5)
    supervised(cluster, supervisors)
    cluster.run(3600, lambda: is_over(cluster))
    assert task_row(cluster).state == "completed"
    assert task_row(cluster).why == "version 12 is reached"

    # The last version is evaluated although the task is over.
    cluster.run(cluster.engine.now + 600)
    history = points(cluster)
    assert [point.version for point in history] == list(range(13))
    assert all(point.members == 5 and point.examples > 0 for point in history[1:])
    evaluated = {point.version: point for point in history if point.evaluated}
    assert 0 in evaluated
    assert max(evaluated) == 12
    for version, point in evaluated.items():
        assert point.loss == pytest.approx(loss_at(version), rel=1e-5)
        result = msgspec.json.decode(point.evaluated, type=EvaluationResult)
        assert result.all.clients == pytest.approx(6, rel=1e-5)
        assert result.all.examples == pytest.approx(60, rel=1e-5)
    # Versions that were kept for an evaluation may go again.
    assert not any(row.marked for row in rows_of(cluster, VersionRow) if type(row) is VersionRow)


def test_evaluations_that_are_long_over_leave_nothing_but_their_points() -> None:
    task = a_task(StopRule(versions=3), EvaluationPlan(every_versions=2, clients=4))
    cluster = a_cluster(task, 2)
    supervised(cluster)
    cluster.run(1800, lambda: is_over(cluster))
    cluster.run(cluster.engine.now + 300)
    assert [key for key in cluster.state.rows if "-eval-" in key]
    cluster.run(cluster.engine.now + REMEMBER_S + 60)
    assert [key for key in cluster.state.rows if "-eval-" in key] == []
    assert [key for key in cluster.blobs.blobs if "-eval-" in key] == []
    assert [point.version for point in points(cluster) if point.loss is not None] == [0, 2, 3]
    assert len(points(cluster)) == 4


def test_a_task_ends_when_its_loss_is_low_enough() -> None:
    task = a_task(StopRule(target_loss=1.0), EvaluationPlan(every_versions=3, clients=4))
    cluster = a_cluster(task, 3)
    supervised(cluster)
    cluster.run(3600, lambda: is_over(cluster))
    row = task_row(cluster)
    assert row.state == "completed"
    assert "target" in row.why
    assert [p.loss for p in points(cluster) if p.loss is not None and p.loss <= 1.0] != []


def test_an_evaluation_without_enough_clients_is_given_up_and_training_goes_on() -> None:
    plan = EvaluationPlan(every_versions=1000, clients=500, timeout_s=120)
    cluster = a_cluster(a_task(StopRule(), plan), 4)
    supervised(cluster)
    cluster.run(110)
    [evaluation] = rows_of(cluster, TaskRow, "next-word-eval-0")
    assert isinstance(evaluation, TaskRow)
    assert evaluation.state == "running"
    cluster.run(130)
    [evaluation] = rows_of(cluster, TaskRow, "next-word-eval-0")
    assert isinstance(evaluation, TaskRow)
    assert evaluation.state == "cancelled"
    assert "500 clients" in evaluation.why
    [auditor] = cluster.observers
    assert isinstance(auditor, OwnedAuditor)
    version = auditor.books["next-word"].version
    cluster.run(400)
    assert auditor.books["next-word"].version > version
