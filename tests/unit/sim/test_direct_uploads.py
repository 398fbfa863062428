"""Simulated devices upload to aggregators themselves, until that fails."""

from __future__ import annotations

from papaya.aggregator.aggregator import Aggregator
from papaya.config import AsyncFL, ServerConfig, TaskConfig
from papaya.messages.base import Message, NodeId
from papaya.messages.participation import Chunk, Complete, Join
from papaya.sim.cluster import Cluster, ClusterConfig
from papaya.sim.observer import Observer

TASK = TaskConfig(
    task="direct",
    concurrency=20,
    model_length=4,
    regime=AsyncFL(aggregation_goal=2),
    participation_gap_s=0.0,
)


class SentToSelectors(Observer):
    """The kinds of messages that selectors got."""

    def __init__(self) -> None:
        self.kinds: set[type[Message]] = set()

    def on_sent(self, source: NodeId, target: NodeId, message: Message) -> None:
        if target.startswith("selector"):
            self.kinds.add(type(message))


def test_chunks_do_not_pass_through_selectors_while_devices_reach_the_aggregator() -> None:
    config = ClusterConfig(
        tasks=(TASK,), aggregators=2, direct_uploads=True, server=ServerConfig(heartbeat_s=1.0)
    )
    sent = SentToSelectors()
    cluster, seen = Cluster(config, seed=1, observers=[sent]), sent.kinds
    cluster.run(120.0)
    [holder] = [
        host
        for host in cluster.hosts.values()
        if isinstance(host.machine, Aggregator) and host.machine.tasks
    ]
    assert isinstance(holder.machine, Aggregator)
    assert holder.machine.tasks[TASK.task].ledger.version > 0
    assert Join in seen
    assert not seen & {Chunk, Complete}
    before = holder.machine.tasks[TASK.task].ledger.version
    cluster.network.partition(frozenset({"device"}), frozenset({holder.node}))
    cluster.run(200.0)
    assert seen >= {Chunk, Complete}
    assert holder.machine.tasks[TASK.task].ledger.version > before
