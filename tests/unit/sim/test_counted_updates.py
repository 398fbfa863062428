"""Runs whose model nobody looks at: the protocol does the same without arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from papaya.aggregator.work import Fold, Snapshot
from papaya.config import (
    Aggregation,
    AsyncFL,
    EvaluationPlan,
    Requirements,
    SecureAggregation,
    SyncFL,
    TaskConfig,
    Weighting,
)
from papaya.messages.selection import Capabilities
from papaya.sim.behaviour import Behaviour
from papaya.sim.cluster import Cluster, ClusterConfig, DeviceKind
from papaya.sim.counted_updates import CountedUpdates, WithoutModel, behaviour_without_model
from papaya.sim.population import PopulationConfig
from papaya.study.trace import Recorder


def a_task(regime: AsyncFL | SyncFL = AsyncFL(10), **settings: Any) -> TaskConfig:  # noqa: B008
    return TaskConfig(task="words", concurrency=40, model_length=4, regime=regime, **settings)


def recorded(task: TaskConfig, behaviour: Behaviour) -> tuple[list[bytes], list[bytes]]:
    """The trace of a run in which the aggregator fails once."""
    kinds = (DeviceKind(1.0, Capabilities(upload_bits=16)),)
    population = PopulationConfig(size=100_000)
    config = ClusterConfig(tasks=(task,), population=population, kinds=kinds)
    recorder = Recorder()
    cluster = Cluster(config, 5, observers=[recorder], behaviour=behaviour)
    cluster.run(120.0)
    host = cluster.hosts["aggregator-0"]
    host.crash()
    host.start()
    cluster.run(300.0)
    assert recorder.version >= 2
    return recorder.since(0, 0)


@pytest.mark.parametrize(
    "task",
    [
        a_task(AsyncFL(10)),
        a_task(SyncFL(0.3)),
        a_task(requirements=Requirements(upload_bits=16)),
        a_task(weighting=Weighting("equal"), durability="step"),
    ],
)
def test_the_trace_is_that_of_a_run_with_arithmetic(task: TaskConfig) -> None:
    assert isinstance(behaviour_without_model((task,)), WithoutModel)
    assert recorded(task, WithoutModel()) == recorded(task, Behaviour())


def test_a_snapshot_of_updates_that_were_never_folded_fails() -> None:
    """It would be a bug of the machine, so a recording must not go on with an empty sum."""
    shards = CountedUpdates()
    with pytest.raises(KeyError):
        shards.snapshot(Snapshot("words", 1, (7,)))
    shards.fold(Fold(a_task(), 1, 7, "a", 20, 0))
    snapshotted, _ = shards.snapshot(Snapshot("words", 1, (7,)))
    assert [(each.sessions, each.weight) for each in snapshotted.sums] == [(("a",), 20.0)]
    with pytest.raises(KeyError):
        shards.snapshot(Snapshot("words", 1, (7, 8)))


def test_arithmetic_is_left_out_only_if_servers_do_not_look_at_numbers() -> None:
    plain, clipped = a_task(), a_task(clip=8.0)
    secure = a_task(clip=8.0, secure_aggregation=SecureAggregation())
    evaluated = a_task(evaluation=EvaluationPlan(every_versions=2))
    median = a_task(weighting=Weighting("equal"), aggregation=Aggregation("median"))
    assert isinstance(behaviour_without_model((plain, plain)), WithoutModel)
    for task in (clipped, secure, evaluated, median):
        assert not isinstance(behaviour_without_model((plain, task)), WithoutModel)
