"""The process was stopped for some heartbeats. When it goes on, requests wait to be read."""

from __future__ import annotations

import pytest

from papaya.messages.participation import Aborted, Alive, Incomplete
from tests.unit.aggregator.builders import SERVER, Node, Phone, World, a_task, a_world

H = SERVER.heartbeat_s
A_MOMENT_S = 2.0**-10


def stopped(world: World, seconds: float) -> None:
    """Nothing is called meanwhile, not even a timer."""
    world.now += seconds


@pytest.mark.parametrize("first", ["a timer", "a request"])
def test_clients_whose_requests_wait_are_not_silent(first: str) -> None:
    world, node = a_world()
    phones = world.joined(node, 3)
    world.pass_s(H)
    stopped(world, 3 * H)
    if first == "a timer":
        node.wake()
    assert [phone.heartbeat() for phone in phones] == 3 * [Alive()]


def test_silence_begins_again_when_the_process_goes_on() -> None:
    world, node = a_world()
    [phone] = world.joined(node, 1)
    stopped(world, 10 * H)
    node.wake()
    world.pass_s(3 * H - A_MOMENT_S)
    assert len(node.held().sessions.active) == 1
    world.pass_s(A_MOMENT_S)
    assert phone.heartbeat() == Aborted("silent")


def test_a_timer_that_is_a_little_late_excuses_no_silence() -> None:
    world, node = a_world()
    [phone] = world.joined(node, 1)
    world.pass_s(2 * H)
    stopped(world, 1.5 * H)
    assert phone.heartbeat() == Aborted("silent")


def test_tickets_end_by_the_clock() -> None:
    """Other servers and the device rely on it."""
    world, node = a_world(a_task(training_timeout_s=H))
    [phone] = world.joined(node, 1)
    stopped(world, 3 * H)
    assert phone.heartbeat() == Aborted("timed_out")


def two_uploads() -> tuple[World, Node, Phone, Phone]:
    """There is memory for one upload only, and the first phone has sent half of its own."""
    world, node = a_world(upload_bytes=32)
    first, second = world.joined(node, 2)
    for phone in (first, second):
        phone.report()
    first.chunk(0, b"12345678")
    return world, node, first, second


def test_an_upload_that_could_not_be_read_is_not_slow() -> None:
    world, _, first, second = two_uploads()
    stopped(world, 4 * H)
    second.chunk(0, b"12345678")
    assert world.answers[first.complete()] == Incomplete((1,)), "its first chunk is kept"


def test_a_successor_keeps_room_for_clients_that_it_could_not_hear() -> None:
    world, node = a_world()
    phones = world.joined(node, 3)
    world.crash(node)
    successor = world.start("agg-2")
    world.place(successor, active=3)
    stopped(world, 4 * H)
    successor.wake()
    assert successor.last_report().demand == 4 - 3
    for phone in phones:
        phone.node = successor
    assert [phone.heartbeat() for phone in phones] == 3 * [Alive()]
    world.pass_s(3 * H)
    assert successor.last_report().awaited == 0
