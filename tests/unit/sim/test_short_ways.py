"""Short ways of the simulator: requests that nobody looks at are handled with less work."""

from __future__ import annotations

from papaya.config import AsyncFL, TaskConfig
from papaya.sim.cluster import Cluster, ClusterConfig
from papaya.sim.hosts import SimulatedHost
from papaya.sim.observer import Observer
from papaya.sim.population import PopulationConfig
from papaya.study.trace import Recorder

CONFIG = ClusterConfig(
    tasks=(TaskConfig(task="words", concurrency=40, model_length=4, regime=AsyncFL(5)),),
    population=PopulationConfig(size=100_000),
    selectors=2,
)


class Watcher(Observer):
    """Looks at servers after each event, so that nothing may be left out."""

    def __init__(self) -> None:
        self.seen = 0

    def after_event(self, host: SimulatedHost) -> None:
        self.seen += 1


def test_a_run_that_nobody_checks_is_the_same_run() -> None:
    recorder, checked, watcher = Recorder(), Recorder(), Watcher()
    short = Cluster(CONFIG, 3, observers=[recorder])
    long = Cluster(CONFIG, 3, observers=[checked, watcher])
    assert short.may_shorten
    assert not long.may_shorten
    for cluster in (short, long):
        cluster.run(300.0)
    assert watcher.seen > 0
    assert recorder.counted == checked.counted > 50
    assert recorder.since(0, 0) == checked.since(0, 0)
    assert short.engine.events == long.engine.events
    assert short.state.rows == long.state.rows
