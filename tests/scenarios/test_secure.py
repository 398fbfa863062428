"""Whole systems under virtual time with secure aggregation: what crashes, what goes on."""

from __future__ import annotations

import pytest

from papaya.aggregator.aggregator import Aggregator
from papaya.config import AsyncFL, SecureAggregation, ServerConfig, SyncFL, TaskConfig
from papaya.sim.behaviour import EncodedMessages
from papaya.sim.checkers import Auditor
from papaya.sim.cluster import Cluster, ClusterConfig
from papaya.sim.population import PopulationConfig

H = 2.0
ASYNC = AsyncFL(5)
SYNC = SyncFL(0.3)


def a_cluster(
    regime: AsyncFL | SyncFL, aggregators: int = 1, seed: int = 1, dropout: float = 0.1
) -> Auditor:
    """Its every step is audited, in whole numbers."""
    task = TaskConfig(
        task="words",
        concurrency=12,
        model_length=6,
        regime=regime,
        clip=64.0,
        secure_aggregation=SecureAggregation(3),
        training_timeout_s=20.0,
        participation_gap_s=0.0,
    )
    config = ClusterConfig(
        tasks=(task,),
        server=ServerConfig(heartbeat_s=H, max_retry_s=30.0),
        population=PopulationConfig(
            size=500,
            examples_median=5,
            execution_per_example_s=0.2,
            latency_mean_s=0.5,
            dropout=dropout,
            availability=1.0,
        ),
        supply=4.0,
        aggregators=aggregators,
    )
    auditor = Auditor()
    Cluster(config, seed, observers=[auditor], behaviour=EncodedMessages())
    return auditor


def holder(auditor: Auditor) -> str:
    [name] = [
        node
        for node, host in auditor.cluster.hosts.items()
        if host.is_alive and "words" in getattr(host.machine, "tasks", {}) and "agg" in node
    ]
    return name


def grow(auditor: Auditor, versions: int, within_s: float = 1000.0) -> None:
    """Run until so many more versions were stepped to."""
    books = auditor.books["words"]
    goal = books.steps + versions
    auditor.cluster.run(auditor.cluster.engine.now + within_s, lambda: books.steps >= goal)
    assert books.steps >= goal, f"{books.steps} of {goal} versions after {within_s} s"


@pytest.mark.parametrize("regime", [ASYNC, SYNC])
def test_versions_are_made_and_nothing_is_dropped(regime: AsyncFL | SyncFL) -> None:
    auditor = a_cluster(regime)
    grow(auditor, 10)
    assert auditor.books["words"].dropped == 0
    auditor.check_acknowledged()


@pytest.mark.parametrize("regime", [ASYNC, SYNC])
@pytest.mark.parametrize("away_s", [0.0, 5 * H])
def test_a_crash_of_the_tsa_costs_the_open_buffers_at_most(
    regime: AsyncFL | SyncFL, away_s: float
) -> None:
    auditor = a_cluster(regime)
    books = auditor.books["words"]
    for crash in (1, 2, 3):
        grow(auditor, 3)
        auditor.cluster.run(auditor.cluster.engine.now + 0.7 * crash)
        auditor.cluster.tsa.crash(away_s)
        grow(auditor, 3)
        assert books.dropped <= 2 * crash
    auditor.check_acknowledged()


@pytest.mark.parametrize("regime", [ASYNC, SYNC])
@pytest.mark.parametrize("fault", ["freeze", "cut_off"])
def test_a_tsa_that_does_not_answer_costs_no_update(regime: AsyncFL | SyncFL, fault: str) -> None:
    """Every client that has trained in time is counted, however often its TSA is away. In SyncFL a
    full round ends without the others.
    """
    auditor = a_cluster(regime, dropout=0.0)
    books, cluster = auditor.books["words"], auditor.cluster
    for away_s in (0.5 * H, 2 * H, 30 * H) * 3:
        grow(auditor, 2)
        getattr(cluster.tsa, fault)(away_s)
        cluster.run(cluster.engine.now + away_s)
    grow(auditor, 2)
    assert books.dropped == 0
    machine = cluster.hosts[holder(auditor)].machine
    assert isinstance(machine, Aggregator)
    counters = machine.tasks["words"].counters
    wasted = {name for name in counters if name.startswith(("aborted", "discarded"))}
    round_over = {"aborted_round_over", "discarded_round_over"} if regime is SYNC else set()
    assert wasted <= {"aborted_left", *round_over}
    assert "gave_up" not in auditor.endings  # so those that left had trained for too long
    auditor.check_acknowledged()


def test_a_crash_of_the_holder_drops_nothing_while_the_tsa_lives() -> None:
    auditor = a_cluster(ASYNC, aggregators=2)
    for _ in range(3):
        grow(auditor, 3)
        node = holder(auditor)
        auditor.cluster.hosts[node].crash()
        grow(auditor, 2)
        auditor.cluster.hosts[node].start()
    assert auditor.books["words"].dropped == 0
    auditor.check_acknowledged()


def test_both_may_crash_and_training_goes_on() -> None:
    auditor = a_cluster(ASYNC, aggregators=2)
    for _ in range(3):
        grow(auditor, 2)
        node = holder(auditor)
        auditor.cluster.tsa.crash(H)
        auditor.cluster.hosts[node].crash()
        grow(auditor, 2)
        auditor.cluster.hosts[node].start()
    assert auditor.books["words"].dropped <= 6
    auditor.check_acknowledged()


def test_the_same_seed_gives_the_same_trace() -> None:
    """Keys, seeds and masks are drawn from it too."""
    traces = []
    for seed in (1, 1, 2):
        auditor = a_cluster(ASYNC, seed=seed)
        grow(auditor, 3)
        auditor.cluster.tsa.crash()
        grow(auditor, 3)
        traces.append(auditor.trace_hash)
    assert traces[0] == traces[1] != traces[2]
