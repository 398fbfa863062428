"""Simulated devices upload to aggregators themselves, until that fails."""

from __future__ import annotations

from papaya.aggregator.aggregator import Aggregator
from papaya.config import AsyncFL, ServerConfig, TaskConfig
from papaya.machine import Handle
from papaya.messages.base import Message
from papaya.messages.participation import Chunk, Complete, Join
from papaya.sim.cluster import Cluster, ClusterConfig

TASK = TaskConfig(
    task="direct",
    concurrency=20,
    model_length=4,
    regime=AsyncFL(aggregation_goal=2),
    participation_gap_s=0.0,
)


def test_chunks_do_not_pass_through_selectors_while_devices_reach_the_aggregator() -> None:
    config = ClusterConfig(
        tasks=(TASK,), aggregators=2, direct_uploads=True, server=ServerConfig(heartbeat_s=1.0)
    )
    cluster = Cluster(config, seed=1)
    selector, seen = cluster.hosts["selector-0"], set[type[Message]]()
    deliver = selector.deliver

    def watched(message: Message, reply_to: Handle = None) -> None:
        seen.add(type(message))
        deliver(message, reply_to)

    selector.deliver = watched  # type: ignore[method-assign]
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
