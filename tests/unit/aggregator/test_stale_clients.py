"""Staleness at an aggregator: frozen at the report, damped, bounded for those who still train."""

from __future__ import annotations

import math

import numpy as np
import pytest

from papaya.messages.participation import Aborted, Alive, Completed, Report, UploadGranted
from papaya.messages.storage import ConsumedRow
from papaya.messages.tickets import UploadTicket
from tests.unit.aggregator.builders import (
    KEYRING,
    SERVER,
    Phone,
    World,
    a_world,
    an_async_task,
    make_version,
)

H = SERVER.heartbeat_s


def staleness_of(world: World, phone: Phone) -> int:
    members = [m for row in world.store.all(ConsumedRow) for m in row.members]
    [found] = [member for member in members if member.session == phone.session]
    return found.staleness


@pytest.mark.parametrize("updates", [0, 1, 3])
def test_staleness_is_the_versions_made_since_the_join(updates: int) -> None:
    world, node = a_world(an_async_task(1))
    [phone] = world.joined(node, 1)
    for _ in range(updates):
        make_version(world, node)
    assert phone.upload_for_good(1) == Completed()
    assert staleness_of(world, phone) == updates
    assert node.held().endings.staleness[updates] >= 1


def test_staleness_is_frozen_when_the_report_arrives() -> None:
    world, node = a_world(an_async_task(1))
    [phone] = world.joined(node, 1)
    make_version(world, node)
    granted = phone.report()
    assert isinstance(granted, UploadGranted)
    assert granted.version == 1
    for _ in range(5):
        make_version(world, node)
    phone.send(1)
    phone.complete()
    assert staleness_of(world, phone) == 1


def test_a_repeated_report_keeps_the_staleness_of_the_first() -> None:
    world, node = a_world(an_async_task(1))
    [phone] = world.joined(node, 1)
    before = phone.ticket
    first = phone.ask(Report(before, 1))
    make_version(world, node)
    assert phone.ask(Report(before, 1)) == first
    assert isinstance(first, UploadGranted)
    assert KEYRING.open(first.ticket, UploadTicket).staleness == 0


@pytest.mark.parametrize("staleness", [1, 3, 8])
def test_a_stale_update_is_damped(staleness: int) -> None:
    world, node = a_world(an_async_task(1))
    [phone] = world.joined(node, 1)
    for _ in range(staleness):
        make_version(world, node)
    before = world.parameters(world.version)
    phone.upload_for_good(1)
    moved = np.array(world.parameters(world.version)) - before
    assert moved[0] == pytest.approx(1 / math.sqrt(1 + staleness), rel=1e-6)


def test_damping_is_not_divided_out_again() -> None:
    """Two clients, n = 1, update = 1, staleness 3: the step is 0.5, not 1."""
    world, node = a_world(an_async_task(2))
    slow = world.joined(node, 2)
    for _ in range(3):
        make_version(world, node)
    before = world.parameters(3)[0]
    for phone in slow:
        phone.upload_for_good(1)
    assert world.parameters(4)[0] - before == 0.5


def test_a_client_past_the_limit_is_aborted_by_the_very_version_that_makes_it_so() -> None:
    world, node = a_world(an_async_task(1, max_staleness=2))
    [phone] = world.joined(node, 1)
    for _ in range(2):
        make_version(world, node)
        assert phone.heartbeat() == Alive()
    active = len(node.held().sessions.active)
    make_version(world, node)
    assert len(node.held().sessions.active) == active - 1, "its slot is free at once"
    assert phone.heartbeat() == Aborted("stale")
    assert phone.report() == Aborted("stale")
    assert node.held().counters["aborted_stale"] == 1


def test_only_clients_past_the_limit_are_aborted() -> None:
    world, node = a_world(an_async_task(1, concurrency=6, max_staleness=1))
    [oldest] = world.joined(node, 1)
    make_version(world, node)
    [middle] = world.joined(node, 1)
    make_version(world, node)
    [newest] = world.joined(node, 1)
    assert oldest.heartbeat() == Aborted("stale")
    assert middle.heartbeat() == newest.heartbeat() == Alive()
    make_version(world, node)
    assert middle.heartbeat() == Aborted("stale")
    assert newest.heartbeat() == Alive()


def test_a_limit_of_zero_keeps_only_clients_of_the_current_version() -> None:
    world, node = a_world(an_async_task(1, max_staleness=0))
    [phone] = world.joined(node, 1)
    make_version(world, node)
    assert phone.heartbeat() == Aborted("stale")


@pytest.mark.parametrize("sent", ["nothing", "a chunk", "all"])
def test_after_the_report_nobody_is_aborted_for_staleness(sent: str) -> None:
    world, node = a_world(an_async_task(1, max_staleness=1))
    [phone] = world.joined(node, 1)
    make_version(world, node)
    phone.report()
    if sent != "nothing":
        phone.chunk(0, b"\0" * 8)
    if sent == "all":
        phone.chunk(1, b"\0" * 8)
    for _ in range(4):
        make_version(world, node)
    assert phone.heartbeat() == Alive()
    phone.send(1)
    phone.complete()
    assert staleness_of(world, phone) == 1


def test_a_report_is_compared_with_the_limit_even_if_no_abort_came_first() -> None:
    """A successor adopts by ticket: the ticket may be older than the limit allows."""
    world, node = a_world(an_async_task(1, max_staleness=1))
    [phone] = world.joined(node, 1)
    make_version_elsewhere(world, phone, versions=2)
    assert phone.report() == Aborted("stale")
    assert phone.session not in phone.node.held().sessions.active


def make_version_elsewhere(world: World, phone: Phone, versions: int) -> None:
    """A successor makes versions, then a third holder has the task."""
    for turn in range(versions):
        world.crash(world.nodes[0])
        phone.node = world.start(f"next-{turn}")
        world.place(phone.node)
        world.pass_s(H)
        make_version(world, phone.node)
    world.crash(world.nodes[0])
    phone.node = world.start("last")
    world.place(phone.node)


def test_an_abort_frees_a_place_that_is_reported_at_once() -> None:
    world, node = a_world(an_async_task(1, concurrency=2, max_staleness=0))
    world.joined(node, 2)
    world.pass_s(H)
    assert node.last_report().demand == 0
    [first, _] = node.held().sessions.active.values()
    quick = Phone(world, node, first.id, "words")
    quick.ticket = first.sealed
    quick.upload(1)
    world.pass_s(SERVER.min_report_interval_s)
    assert world.version == 1
    assert node.last_report().demand == 2, "the one that completed and the one that is stale"
