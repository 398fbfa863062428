"""Clocks decide when rows are deleted, never whether an update is counted twice.

A node reads its clock when it starts, so a wrong clock lasts as long as the process. In each test
one holder counts an update, a holder with another clock deletes what proves it, and a third one
believes that the tickets are still valid.
"""

from __future__ import annotations

import msgspec

from papaya.messages import wire
from papaya.messages.base import Message
from papaya.messages.participation import Aborted, Completed
from papaya.messages.storage import OptimizerRow, VersionRow, version_key
from tests.unit.aggregator.builders import (
    TASK,
    Node,
    Phone,
    World,
    a_world,
    an_async_task,
)

HOUR_S = 3600.0
# An hour is longer than any ticket of this task is valid.
CONFIG = an_async_task(1, training_timeout_s=300.0, upload_timeout_s=100.0)
CONFIG_OF_ONE_VERSION = msgspec.structs.replace(CONFIG, keep_versions=1)


def restarted(world: World, node: Node, clock_moves_s: float = 0.0) -> Node:
    """The holder's process ends. Another one starts, with its clock this far from the last."""
    world.crash(node)
    world.now += clock_moves_s
    successor = world.start(node.name)
    world.place(successor)
    return successor


def versions(world: World, node: Node, count: int) -> None:
    for _ in range(count):
        [phone] = world.joined(node, 1)
        assert phone.upload_for_good(1.0) == Completed()


def replayed(phone: Phone, node: Node) -> Message | None:
    """Everything that the client sent for its upload, again."""
    phone.node = node
    phone.send(1.0)
    handle = phone.complete()
    phone.world.pass_s(1.0)
    return phone.world.answers.get(handle)


def test_a_holder_whose_clock_is_an_hour_ahead_makes_no_replay_count() -> None:
    world, node = a_world(CONFIG)
    [phone] = world.joined(node, 1)
    assert phone.upload_for_good(1.0) == Completed()
    versions(world, node, 2)
    node = restarted(world, node, +HOUR_S)
    versions(world, node, 1)
    assert phone.session not in world.consumed(), "otherwise this test proves nothing"
    node = restarted(world, node, -HOUR_S)
    assert replayed(phone, node) != Completed()
    assert world.version == 4


def test_a_holder_whose_clock_is_an_hour_behind_makes_no_replay_count() -> None:
    """Its tickets have long expired by the right clock, which deletes their rows, and are valid
    again by the wrong one.
    """
    world, node = a_world(CONFIG)
    world.now += HOUR_S
    node = restarted(world, node, -HOUR_S)
    [phone] = world.joined(node, 1)
    assert phone.upload_for_good(1.0) == Completed()
    versions(world, node, 2)
    node = restarted(world, node, +HOUR_S)
    versions(world, node, 1)
    assert phone.session not in world.consumed(), "otherwise this test proves nothing"
    node = restarted(world, node, -HOUR_S)
    assert replayed(phone, node) != Completed()
    assert world.version == 4


def test_a_holder_that_was_suspended_makes_no_replay_count() -> None:
    """Its clock stood still for an hour while another one held the task."""
    world, node = a_world(CONFIG)
    [phone] = world.joined(node, 1)
    assert phone.upload_for_good(1.0) == Completed()
    versions(world, node, 2)
    suspended_at = world.now
    other = world.start("agg-2")
    world.nodes.remove(node)
    world.now += HOUR_S
    world.place(other)
    versions(world, other, 1)
    assert phone.session not in world.consumed(), "otherwise this test proves nothing"
    world.nodes = [node]
    world.now = suspended_at
    world.place(node)
    assert replayed(phone, node) != Completed()
    assert world.version == 4


def test_a_session_cannot_join_again_after_its_update_was_forgotten() -> None:
    """The assignment ticket names a version too. Otherwise one session could train twice."""
    world, node = a_world(CONFIG)
    [phone] = world.joined(node, 1)
    assert phone.upload_for_good(1.0) == Completed()
    versions(world, node, 2)
    node = restarted(world, node, +HOUR_S)
    versions(world, node, 1)
    node = restarted(world, node, -HOUR_S)
    phone.node = node
    assert phone.join() == Aborted("stale")
    assert world.phone(node).join() != Aborted("stale"), "a new client may"


def test_an_ended_answer_that_the_clock_dropped_is_still_in_the_rows() -> None:
    """A process whose clock jumps ahead drops its answers early; the rows count the update."""
    world, node = a_world(CONFIG)
    [phone] = world.joined(node, 1)
    assert phone.upload_for_good(1.0) == Completed()
    node.held().sessions.forget(world.now + HOUR_S)
    assert replayed(phone, node) == Completed()
    assert world.version == 1


def test_a_report_names_the_newest_version() -> None:
    world, node = a_world(CONFIG)
    versions(world, node, 2)
    world.pass_s(10.0)
    assert node.last_report().version == 2


def test_parameters_are_deleted_only_below_settled() -> None:
    """Whatever the clock says: a client that may still upload must also find its parameters."""
    world, node = a_world(CONFIG_OF_ONE_VERSION)
    versions(world, node, 4)
    node = restarted(world, node, +HOUR_S)
    versions(world, node, 1)
    [optimizer] = world.store.all(OptimizerRow)
    assert optimizer.settled == 3, "version 4 has no successor, so version 3 may have clients"
    assert [row.version for row in world.store.all(VersionRow)] == [3, 4, 5]


def test_a_database_of_an_earlier_papaya_is_settled_too() -> None:
    """It may lack the version after a consumed one, and its optimizer row has no `settled`."""
    world, node = a_world(CONFIG)
    versions(world, node, 3)
    del world.store.rows[version_key(TASK, 2)]
    node = restarted(world, node, +HOUR_S)
    versions(world, node, 1)
    [optimizer] = world.store.all(OptimizerRow)
    assert optimizer.settled == 2
    assert (
        wire.encode_row(OptimizerRow(1, "o")) == b'{"type":"OptimizerRow","version":1,"state":"o"}'
    )
