"""What the admin side reads off each role."""

from __future__ import annotations

from random import Random

from papaya.aggregator.aggregator import Aggregator
from papaya.aggregator.work import Delayed, Restore
from papaya.config import AsyncFL, ServerConfig, TaskConfig
from papaya.coordinator.coordinator import Coordinator
from papaya.messages.storage import TaskRow, task_key
from papaya.selector.selector import Selector
from papaya.server.admin.live import CoordinatorLive, LiveTask, RoleLive
from papaya.sim.cluster import Cluster, ClusterConfig
from tests.unit.aggregator.builders import World, a_task
from tests.unit.aggregator.secure_builders import a_secure_world

DEAD_S = ServerConfig().dead_after_s
TASK = TaskConfig(task="next-word", concurrency=20, model_length=4, regime=AsyncFL(5))


def test_a_leader_knows_who_is_active_and_who_was_heard() -> None:
    cluster = Cluster(ClusterConfig(tasks=(TASK,), selectors=2), 1)
    cluster.run(120)
    machine = cluster.hosts["coordinator-0"].machine
    assert isinstance(machine, Coordinator)
    live = CoordinatorLive(machine, lambda: cluster.engine.now, ("coordinator",), DEAD_S)
    row = cluster.state.rows[task_key("next-word")]
    assert isinstance(row, TaskRow)
    found = live.task(row)
    assert found is not None
    assert found.holder == "aggregator-0"
    assert 15 <= found.active <= 20
    assert (found.demand >= 0, found.held >= 0, found.halted) == (True, True, "")
    assert [server.node for server in live.selectors()] == ["selector-0", "selector-1"]
    assert [(server.node, server.tasks) for server in live.aggregators()] == [("aggregator-0", 1)]
    assert live.leads()
    assert not live.recovers()


def test_a_leader_knows_how_old_the_numbers_of_a_silent_holder_are() -> None:
    cluster = Cluster(ClusterConfig(tasks=(TASK,)), 1)
    cluster.run(120)
    machine = cluster.hosts["coordinator-0"].machine
    assert isinstance(machine, Coordinator)
    row = cluster.state.rows[task_key("next-word")]
    assert isinstance(row, TaskRow)
    now = cluster.engine.now
    live = CoordinatorLive(machine, lambda: now, ("coordinator",), DEAD_S)
    for age_s, silent_s in ((10.5, 0.0), (25.0, 25.0)):
        machine.fleet.aggregators["aggregator-0"].heard_at = now - age_s
        found = live.task(row)
        assert found is not None
        assert found.silent_s == silent_s


def test_a_lease_that_is_not_renewed_means_that_nobody_leads() -> None:
    """A full disk, for one: the row still names the last leader."""
    cluster = Cluster(ClusterConfig(tasks=(TASK,), coordinators=2), 1)
    cluster.run(120)
    now = cluster.engine.now
    late = now + 2 * ServerConfig().leader_lease_s
    for node in ("coordinator-0", "coordinator-1"):
        machine = cluster.hosts[node].machine
        assert isinstance(machine, Coordinator)
        assert CoordinatorLive(machine, lambda: now, ("coordinator",), DEAD_S).is_led()
        live = CoordinatorLive(machine, lambda: late, ("coordinator",), DEAD_S)
        assert not live.leads()
        assert not live.is_led()


def test_a_candidate_that_heard_nobody_knows_nothing() -> None:
    machine = Coordinator("coordinator-1", 1, 0.0, ServerConfig(), Random(1))
    live = CoordinatorLive(machine, lambda: 5.0, ("coordinator",), DEAD_S)
    assert not live.leads()
    assert not live.is_led()
    assert live.task(TaskRow(TASK)) is None
    assert live.selectors() == ()
    assert live.aggregators() == ()
    assert live.clocks() == ()


def test_clocks_that_differ_by_a_heartbeat_are_shown_and_by_three_refused() -> None:
    cluster = Cluster(ClusterConfig(tasks=(TASK,), aggregators=3), 1)
    cluster.run(60)
    heartbeat_s = ServerConfig().heartbeat_s
    for node, ahead_s in (("aggregator-1", -1.5 * heartbeat_s), ("aggregator-2", 3600.0)):
        cluster.hosts[node].crash()
        cluster.hosts[node].start(ahead_s)
    cluster.run(120)
    machine = cluster.hosts["coordinator-0"].machine
    assert isinstance(machine, Coordinator)
    live = CoordinatorLive(machine, lambda: cluster.engine.now, ("coordinator",), DEAD_S)
    behind, ahead = live.clocks()
    assert (behind.node, behind.is_refused) == ("aggregator-1", False)
    assert str(behind).startswith("the clock of aggregator-1 is 15 s behind the leader's")
    assert (ahead.node, ahead.is_refused) == ("aggregator-2", True)
    assert str(ahead).startswith("the clock of aggregator-2 is 3600 s ahead of the leader's")
    assert [server.node for server in live.aggregators()] == ["aggregator-0", "aggregator-1"]


def test_a_standby_knows_who_reports_and_who_has_stopped_to() -> None:
    cluster = Cluster(ClusterConfig(tasks=(TASK,), coordinators=2), 1)
    cluster.run(120)
    machines = [cluster.hosts[node].machine for node in ("coordinator-0", "coordinator-1")]
    lives = [
        CoordinatorLive(machine, lambda: cluster.engine.now, ("coordinator",), DEAD_S)
        for machine in machines
        if isinstance(machine, Coordinator)
    ]
    [standby] = [live for live in lives if not live.leads()]
    assert standby.is_led()
    assert [server.node for server in standby.selectors()] == ["selector-0"]
    assert [(server.node, server.tasks) for server in standby.aggregators()] == [
        ("aggregator-0", 1)
    ]
    cluster.hosts["aggregator-0"].crash()
    cluster.run(120 + 2 * DEAD_S)
    assert [server.node for server in standby.selectors()] == ["selector-0"]
    assert standby.aggregators() == ()


def test_a_selector_and_an_aggregator_know_themselves_and_whether_they_are_led() -> None:
    cluster = Cluster(ClusterConfig(tasks=(TASK,)), 1)
    cluster.run(120)
    lives = {}
    for role in ("selector", "aggregator"):
        machine = cluster.hosts[f"{role}-0"].machine
        assert isinstance(machine, Selector | Aggregator)
        lives[role] = RoleLive(machine, lambda: cluster.engine.now, (role,), ServerConfig())
    assert [live.is_led() for live in lives.values()] == [True, True]
    assert [server.node for server in lives["selector"].selectors()] == ["selector-0"]
    assert lives["selector"].aggregators() == ()
    assert [server.tasks for server in lives["aggregator"].aggregators()] == [1]
    row = cluster.state.rows[task_key("next-word")]
    assert isinstance(row, TaskRow)
    found = lives["aggregator"].task(row)
    assert found is not None
    assert (found.holder, 15 <= found.active <= 20) == ("aggregator-0", True)
    assert lives["selector"].task(row) is None
    cluster.hosts["coordinator-0"].crash()
    cluster.run(120 + 2 * ServerConfig().leader_lease_s)
    assert [live.is_led() for live in lives.values()] == [False, False]


def test_an_aggregator_reports_that_it_cannot_load_a_task() -> None:
    world = World(a_task())
    node = world.start()
    node.hold(Restore)
    world.place(node)
    live = RoleLive(node.machine, lambda: world.now, ("aggregator",), ServerConfig())
    row = world.store.rows[task_key("words")]
    assert isinstance(row, TaskRow)
    assert live.task(row) is None
    node.receive(Delayed("words", 1, "blobs cannot be read: the token is expired"))
    assert live.task(row) == LiveTask(
        "agg-1", 0, 0, 0, "blobs cannot be read: the token is expired"
    )


def test_an_aggregator_tells_why_its_task_waits_for_the_tsa() -> None:
    world, node = a_secure_world()
    [phone] = world.secure_phones(node, 1)
    live = RoleLive(node.machine, lambda: world.now, ("aggregator",), ServerConfig())
    row = world.store.rows[task_key(world.config.task)]
    assert isinstance(row, TaskRow)
    found = live.task(row)
    assert found is not None
    assert found.halted == ""
    world.tsa.cut_off(60.0)
    phone.upload(1.0)
    found = live.task(row)
    assert found is not None
    assert "TSA" in found.halted
