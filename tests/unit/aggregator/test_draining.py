"""An aggregator that is about to stop records what it has, begins nothing, and waits for heirs."""

from __future__ import annotations

import pytest

from papaya.aggregator import work
from papaya.messages.control import AggregatorOrders, Drain, Placement
from papaya.messages.participation import (
    Alive,
    ChunkReceived,
    Completed,
    Incomplete,
    Joined,
    Retry,
    UploadGranted,
)
from tests.unit.aggregator.builders import Node, Phone, World, a_task, a_world, an_async_task
from tests.unit.aggregator.secure_builders import (
    SecureNode,
    SecurePhone,
    SecureWorld,
    a_secure_task,
    a_secure_world,
)

MOVING = Retry("the task is about to move", 0.5)


def draining(joined: int = 2) -> tuple[World, Node, list[Phone]]:
    world, node = a_world(an_async_task(4))
    phones = world.joined(node, joined)
    node.receive(Drain())
    return world, node, phones


def is_last(node: Node) -> None:
    """The leader says that nobody can take the tasks."""
    tasks = tuple(Placement(held.task, held.fence.seq) for held in node.machine.tasks.values())
    boot = node.machine.boot
    node.receive(AggregatorOrders(1, "coordinator-1", boot, 1000, 0, tasks, is_last=True))


def test_it_tells_the_leader_at_once_and_wants_nobody() -> None:
    _, node, _ = draining()
    assert node.reports[-1].draining
    assert node.last_report().active == 2
    assert node.last_report().demand == 0
    assert node.last_report().drained


def test_nothing_new_begins_and_clients_that_train_go_on() -> None:
    world, node, [phone, _] = draining()
    assert phone.heartbeat() == Alive()
    assert phone.report() == MOVING
    assert world.phone(node).join() == MOVING


def test_an_upload_that_has_begun_may_finish() -> None:
    world, node = a_world(an_async_task(4))
    [phone] = world.joined(node, 1)
    assert isinstance(phone.report(), UploadGranted)
    assert phone.chunk(0, b"\0" * 8) == ChunkReceived("u1", 0)
    assert node.machine.uploads == 1
    node.receive(Drain())
    assert not node.last_report().drained
    assert phone.chunk(1, b"\0" * 8) == ChunkReceived("u1", 1)
    assert world.answers[phone.complete()] == Completed()
    assert node.machine.uploads == 0
    assert node.last_report().drained, "and it is recorded without waiting for others"
    assert world.recorded() == [phone.session]


def test_an_upload_that_takes_too_long_is_sent_again_to_the_successor() -> None:
    world, node = a_world(an_async_task(4))
    [phone] = world.joined(node, 1)
    phone.report()
    phone.chunk(0, b"\0" * 8)
    node.receive(Drain())
    node.receive(Drain(drops_uploads=True))
    assert node.last_report().drained
    assert phone.chunk(1, b"\0" * 8) == MOVING
    node.order([])
    heir = world.start("agg-2")
    world.place(heir, active=1)
    phone.node = heir
    assert world.answers[phone.complete()] == Incomplete((0, 1))
    phone.send(1)
    assert world.answers[phone.complete()] == Completed()


@pytest.mark.parametrize("durability", ["commit", "step"])
def test_what_was_folded_is_recorded_before_the_task_may_move(durability: str) -> None:
    """Also what `durability: step` acknowledged without a record."""
    world, node = a_world(an_async_task(4, durability=durability, commit_interval_s=1000.0))
    first, second = world.joined(node, 2)
    first.upload_for_good(1)
    second.upload_for_good(1)
    node.receive(Drain())
    assert node.last_report().drained
    assert world.recorded() == [first.session, second.session]


def test_it_may_stop_when_its_tasks_have_moved() -> None:
    _, node, _ = draining()
    assert not node.machine.may_stop, "the leader has not moved the task yet"
    node.order([])
    assert node.machine.may_stop


def test_it_may_stop_with_its_tasks_if_nobody_can_take_them() -> None:
    _, node, _ = draining()
    is_last(node)
    assert node.machine.may_stop


def test_it_may_stop_alone_whatever_orders_say() -> None:
    _, node = a_world(an_async_task(4))
    node.receive(Drain(is_alone=True))
    assert node.machine.may_stop
    node.order([Placement("words", 1)])
    assert node.machine.may_stop


def test_it_takes_no_task_any_more() -> None:
    world, node, _ = draining()
    world.submit(a_task(task="late"))
    node.order([Placement("words", 1), Placement("late", 1)])
    assert list(node.machine.tasks) == ["words"]


def test_a_join_under_a_lease_is_served_by_the_successor() -> None:
    world, node, _ = draining()
    assigned = world.phone(node)
    assert assigned.join() == MOVING
    node.order([])
    heir = world.start("agg-2")
    world.place(heir, leases=(assigned.session,), active=2)
    assigned.node = heir
    assert isinstance(assigned.join(), Joined)


def test_a_task_that_is_placed_here_again_is_not_taken() -> None:
    """Its fence has another number now, so nothing more can be recorded under the old one."""
    world, node, [phone, _] = draining()
    world.fence(node)
    assert node.machine.tasks == {}
    assert isinstance(phone.heartbeat(), Retry)
    assert node.machine.may_stop


# --- Places kept for updates that the TSA may have


def with_kept_places() -> tuple[SecureWorld, SecureNode, list[SecurePhone]]:
    """Both buffers wait for a client that the TSA did not answer; a third update waits for room."""
    world, node = a_secure_world(a_secure_task(goal=1))
    phones = world.secure_phones(node, 3)
    for phone in phones:
        phone.granted_and_sealed(1.0)
        phone.send_masked()
    world.tsa.freeze(2.0)
    node.hold(work.Fold)
    phones[0].complete()
    phones[1].complete()
    node.release()
    world.pass_s(4.0)
    return world, node, phones


def test_a_client_whose_place_is_kept_may_send_its_update_again() -> None:
    world, node, [first, second, third] = with_kept_places()
    waiting = third.complete()
    node.receive(Drain())
    assert not node.last_report().drained
    assert first.send_for_good() == second.send_for_good() == Completed()
    assert world.answers[waiting] == Completed()
    assert node.last_report().drained
    assert world.version == 3


def test_a_task_waits_for_kept_places_until_uploads_are_dropped() -> None:
    """A successor does not know them: another client would take the place."""
    world, node, [first, _, third] = with_kept_places()
    third.leave()
    node.receive(Drain())
    world.pass_s(1.0)
    assert not node.held().is_drained
    node.receive(Drain(drops_uploads=True))
    assert node.last_report().drained
    assert world.answers[first.complete()] == MOVING


def test_complete_uploads_that_wait_for_room_are_dropped_too() -> None:
    world, node, [*_, third] = with_kept_places()
    waiting = third.complete()
    node.receive(Drain())
    node.receive(Drain(drops_uploads=True))
    assert isinstance(world.answers[waiting], Incomplete)
    assert node.last_report().drained
