"""Shortcuts of the simulator: requests that nobody looks at are handled with less work."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from papaya.aggregator.aggregator import Aggregator
from papaya.client.client import Client
from papaya.config import (
    Aggregation,
    AsyncFL,
    Privacy,
    Requirements,
    SecureAggregation,
    SyncFL,
    TaskConfig,
    Weighting,
)
from papaya.messages.selection import Capabilities
from papaya.sim.cluster import Cluster, ClusterConfig, DeviceKind
from papaya.sim.hosts import SimulatedHost
from papaya.sim.observer import Observer
from papaya.sim.population import Arrivals, Population, PopulationConfig, Visit
from papaya.sim.swarm import run_seed
from papaya.study.trace import Recorder

TASKS: dict[str, dict[str, Any]] = {
    "AsyncFL": {},
    "SyncFL": {"regime": SyncFL(0.3)},
    "secure": {"secure_aggregation": SecureAggregation(), "clip": 100.0},
    "private": {
        "privacy": Privacy(clip=100.0, noise_multiplier=1.0, delta=1e-6, max_participations=8),
        "participation_gap_s": 1.0,
    },
    "16 bits": {"requirements": Requirements(upload_bits=16)},
    "median": {"weighting": Weighting("equal"), "aggregation": Aggregation("median")},
    "refused for their norm": {"clip": 8.0, "over_clip": "refuse"},
}


class Watcher(Observer):
    """Looks at servers after each event, so that nothing may be left out."""

    def __init__(self) -> None:
        self.seen = 0

    def after_event(self, host: SimulatedHost) -> None:
        self.seen += 1


def run_with_faults(cluster: Cluster) -> None:
    """A selector restarts, and the aggregator stops for some seconds."""
    selector, aggregator = cluster.hosts["selector-1"], cluster.hosts["aggregator-0"]
    cluster.run(60.0)
    selector.crash()
    cluster.run(62.0)
    selector.start()
    aggregator.pause()
    cluster.run(66.0)
    aggregator.resume()
    cluster.run(150.0)


@pytest.mark.parametrize("kind", TASKS)
def test_a_run_that_nobody_checks_is_the_same_run(kind: str) -> None:
    settings = {"regime": AsyncFL(5)} | TASKS[kind]
    task = TaskConfig(task="words", concurrency=40, model_length=4, **settings)
    config = ClusterConfig(
        tasks=(task,),
        population=PopulationConfig(size=100_000),
        kinds=(DeviceKind(1.0, Capabilities(upload_bits=16)),),
        selectors=2,
    )
    recorder, checked, watcher = Recorder(), Recorder(), Watcher()
    short = Cluster(config, 3, observers=[recorder])
    long = Cluster(config, 3, observers=[checked, watcher])
    assert short.may_shorten
    assert not long.may_shorten
    for cluster in (short, long):
        run_with_faults(cluster)
    assert watcher.seen > 0
    assert recorder.counted == checked.counted >= 10
    assert recorder.since(0, 0) == checked.since(0, 0)
    assert short.state.rows == long.state.rows
    # What is left out counts at once as an event, and not when it would arrive.
    assert 0 <= short.engine.events - long.engine.events < 10


@pytest.mark.parametrize("seed", [1, 4])
def test_the_shortcut_of_heartbeats_changes_no_message(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A swarm with faults, in which checkers look at every message and row."""
    short = run_seed(seed).trace_hash
    monkeypatch.setattr(Aggregator, "touch", lambda aggregator, now, heartbeat: False)
    assert run_seed(seed).trace_hash == short


@pytest.mark.parametrize("shortcut", ["heartbeats", "availability"])
def test_a_recording_is_the_same_without_the_shortcut(
    shortcut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = TaskConfig(task="words", concurrency=40, model_length=4, regime=AsyncFL(5))
    config = ClusterConfig(tasks=(task,), population=PopulationConfig(size=100_000), selectors=2)

    def run() -> tuple[object, object, int]:
        recorder = Recorder()
        cluster = Cluster(config, 3, observers=[recorder])
        run_with_faults(cluster)
        assert recorder.counted >= 10
        return recorder.since(0, 0), cluster.state.rows, cluster.engine.events

    short = run()
    match shortcut:
        case "heartbeats":
            monkeypatch.setattr(Client, "beat", lambda client, now: None)
        case "availability":
            monkeypatch.setattr(Arrivals, "is_available", look_up)
    assert run() == short


def look_up(arrivals: Arrivals, visit: Visit, now: float) -> bool:
    return arrivals.population.is_available(visit.device, now)


def test_availability_is_known_for_a_block_until_it_changes() -> None:
    """Devices change at different times; a block lasts for hours here."""
    population = Population(PopulationConfig(size=10**6, availability_swing=0.5), 7)
    arrivals, changes = Arrivals(population), 0
    for number, visit in enumerate(islice(arrivals, 6000)):
        now = 5.0 * number
        found = arrivals.is_available(visit, now)
        assert found is population.is_available(visit.device, now)
        changes += found is not population.is_available(visit.device, 0.0)
    assert changes > 1000
