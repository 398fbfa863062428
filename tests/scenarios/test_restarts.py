"""Clean stops of every server, one after the other, under virtual time: no session is lost."""

from __future__ import annotations

from collections import Counter
from functools import partial

from papaya.client.work import Finish
from papaya.config import AsyncFL, ServerConfig, TaskConfig
from papaya.messages.base import NodeId
from papaya.messages.control import Drain
from papaya.messages.storage import FenceRow
from papaya.sim.checkers import Auditor
from papaya.sim.cluster import Cluster, ClusterConfig
from papaya.sim.devices import SimulatedDevice
from papaya.sim.faults import when_drained
from papaya.sim.observer import Observer
from papaya.sim.population import PopulationConfig

H = 10.0
TASKS = tuple(
    TaskConfig(
        task=f"task-{number}",
        concurrency=30,
        model_length=4,
        regime=AsyncFL(5, max_staleness=1000),
        training_timeout_s=3600.0,
        participation_gap_s=0.0,
    )
    for number in range(3)
)
CONFIG = ClusterConfig(
    tasks=TASKS,
    server=ServerConfig(heartbeat_s=H),
    population=PopulationConfig(size=10_000, dropout=0.0, availability=1.0),
    coordinators=2,
    selectors=2,
    aggregators=3,
)


class Endings(Observer):
    """How the sessions of devices that had joined ended."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def on_departed(self, device: SimulatedDevice, finish: Finish | None) -> None:
        if device.assigned_s is not None and finish is not None:
            self.counts[finish.reason or finish.ending] += 1


def a_settled_cluster() -> tuple[Cluster, Endings]:
    endings = Endings()
    cluster = Cluster(CONFIG, seed=1, observers=(Auditor(), endings))
    cluster.run(40 * H)
    assert endings.counts["counted"] > 90
    return cluster, endings


def end(cluster: Cluster, down_s: float, node: NodeId) -> None:
    host = cluster.hosts[node]
    host.crash()
    cluster.engine.after(down_s, host.start)


def stop(cluster: Cluster, node: NodeId, down_s: float) -> None:
    cluster.hosts[node].deliver(Drain())
    when_drained(cluster, node, 3 * H, partial(end, cluster, down_s))


def test_a_rolling_restart_loses_no_session() -> None:
    cluster, endings = a_settled_cluster()
    for node in list(cluster.hosts):
        before = cluster.engine.now
        stop(cluster, node, down_s=H / 2)
        cluster.run(before + 8 * H)
    cluster.run(cluster.engine.now + 40 * H)
    assert set(endings.counts) == {"counted"}


def test_crashes_of_aggregators_cost_no_session_if_the_leader_lives() -> None:
    """The successor keeps room for as long as a silent client counts as alive."""
    cluster, endings = a_settled_cluster()
    for node in [node for node in cluster.hosts if node.startswith("aggregator")]:
        end(cluster, 5 * H, node)
        cluster.run(cluster.engine.now + 12 * H)
    assert set(endings.counts) == {"counted"}


def test_a_stop_of_all_processes_ends_no_session() -> None:
    """SIGSTOP or a paused virtual machine. When they go on, requests of three heartbeats wait."""
    cluster, endings = a_settled_cluster()
    for host in cluster.hosts.values():
        host.pause()
    cluster.run(cluster.engine.now + 3.2 * H)
    for host in cluster.hosts.values():
        host.resume()
    cluster.run(cluster.engine.now + 20 * H)
    assert set(endings.counts) == {"counted"}


def test_first_tasks_are_placed_within_a_second() -> None:
    """All servers start at once, so aggregators report before a coordinator leads."""
    cluster = Cluster(CONFIG, seed=1, observers=(Auditor(),))
    cluster.run(1.0)
    holders = [row.aggregator for row in cluster.state.rows.values() if isinstance(row, FenceRow)]
    assert sorted(holders) == ["aggregator-0", "aggregator-1", "aggregator-2"]
