"""The paper's sentences on model versions and staleness."""

from __future__ import annotations

import math

import pytest

from papaya.messages.participation import Aborted, Alive, Completed, UploadGranted
from papaya.messages.storage import ConsumedRow, VersionRow
from tests.unit.aggregator.builders import (
    SERVER,
    Node,
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


def test_versions_are_natural_numbers_incremented_with_every_model() -> None:
    """Handling Staleness: "The server model is identified by a model version---a non-negative
    natural number that is incremented every time a new server model is generated."
    """
    world, node = a_world(an_async_task(1))
    for _ in range(4):
        make_version(world, node)
    assert [row.version for row in world.store.all(VersionRow)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("goal", [1, 2, 5])
def test_a_new_model_is_generated_when_k_updates_have_been_aggregated(goal: int) -> None:
    """Handling Staleness: "A new server model is generated when K client updates have been
    aggregated."
    """
    world, node = a_world(an_async_task(goal, concurrency=4))
    for count in range(1, 2 * goal + 1):
        [phone] = world.joined(node, 1)
        phone.upload_for_good(1)
        assert world.version == count // goal


def test_a_client_may_upload_to_another_version_than_it_downloaded() -> None:
    """Handling Staleness: "clients can download a model with an initial version, but upload results
    when the server model has moved to a different final version."
    """
    world, node = a_world(an_async_task(1))
    [phone] = world.joined(node, 1)
    make_version(world, node)
    assert phone.version == 0
    granted = phone.report()
    assert isinstance(granted, UploadGranted)
    assert granted.version == 1


def test_the_aggregator_records_the_initial_version_of_each_client() -> None:
    """Handling Staleness: "For each client, the aggregator records initial model version to track
    staleness."
    """
    world, node = a_world(an_async_task(1, concurrency=5))
    phones = []
    for _ in range(3):
        phones += world.joined(node, 1)
        make_version(world, node)
    active = node.held().sessions.active
    assert [active[phone.session].version for phone in phones] == [0, 1, 2]


@pytest.mark.parametrize("updates", [0, 1, 4])
def test_staleness_is_final_minus_initial_version(updates: int) -> None:
    """Handling Staleness: "Let s_i be the staleness of client i with initial version V_initial and
    final version V_final; thus s_i = V_final - V_initial."
    """
    world, node = a_world(an_async_task(1))
    make_version(world, node)
    [phone] = world.joined(node, 1)
    for _ in range(updates):
        make_version(world, node)
    assert phone.upload_for_good(1) == Completed()
    assert staleness_of(world, phone) == updates


def test_staleness_is_measured_when_the_client_uploads() -> None:
    """AsyncFL Algorithm: "the difference between the model version that a client uses to start
    local training and the server model version at the time when a client uploads its model
    update." The upload starts with the report; versions made while it lasts do not count.
    """
    world, node = a_world(an_async_task(1))
    [phone] = world.joined(node, 1)
    make_version(world, node)
    phone.report()
    make_version(world, node)
    phone.send(1)
    make_version(world, node)
    phone.complete()
    assert staleness_of(world, phone) == 1


def test_the_papers_example() -> None:
    """AsyncFL Algorithm: "Figure 4 shows FedBuff with 4 concurrent users and an aggregation goal of
    2. Device A's update has a staleness of 1 since the server model was updated once while Device A
    was training."
    """
    world, node = a_world(an_async_task(goal=2, concurrency=4))
    a, b, c, d = world.joined(node, 4)
    b.upload_for_good(1)
    c.upload_for_good(1)
    assert world.version == 1
    a.upload_for_good(1)
    d.upload_for_good(1)
    assert world.version == 2
    assert [staleness_of(world, phone) for phone in (a, b, c, d)] == [1, 0, 0, 1]


@pytest.mark.parametrize("staleness", [0, 1, 3, 8, 15])
def test_a_stale_update_is_down_weighted(staleness: int) -> None:
    """Handling Staleness: "let w_i be the weight of client i whose staleness is s_i, then
    w_i := 1 / sqrt(1 + s_i)."
    """
    world, node = a_world(an_async_task(1))
    [phone] = world.joined(node, 1)
    for _ in range(staleness):
        make_version(world, node)
    before = world.parameters(world.version)[1]
    phone.upload_for_good(0, 1)
    moved = world.parameters(world.version)[1] - before
    assert moved == pytest.approx(1 / math.sqrt(1 + staleness), rel=1e-6)


def test_a_client_past_maximum_staleness_is_aborted() -> None:
    """Handling Staleness: "to bound staleness, the aggregator abort clients whose staleness is
    larger than a configurable parameter, maximum staleness." Equal is not larger.
    """
    for limit in (0, 1, 3):
        world, node = a_world(an_async_task(1, max_staleness=limit))
        in_time, late = world.joined(node, 2)
        for _ in range(limit):
            make_version(world, node)
        assert in_time.upload_for_good(1) == Completed()
        assert staleness_of(world, in_time) == limit
        assert late.report() == Aborted("stale")


def test_clients_are_aborted_after_every_server_model_update() -> None:
    """Handling Staleness: "After every server model update, the aggregator aborts clients whose
    staleness is larger than a configurable parameter, maximum staleness." It does not wait for
    their reports: the slots are free at once.
    """
    world, node = a_world(an_async_task(1, concurrency=4, max_staleness=1))
    slow = world.joined(node, 2)
    make_version(world, node)
    assert [phone.heartbeat() for phone in slow] == [Alive(), Alive()]
    [newer] = world.joined(node, 1)
    make_version(world, node)
    assert list(node.held().sessions.active) == [newer.session]
    assert [phone.heartbeat() for phone in slow] == [Aborted("stale"), Aborted("stale")]
    assert newer.heartbeat() == Alive()


def mean_staleness(world: World, node: Node, goal: int, updates: int) -> float:
    """Four clients, always the one that began first uploads next."""
    phones, done = world.joined(node, 4), []
    for _ in range(updates):
        phone = phones.pop(0)
        phone.upload_for_good(1)
        done.append(phone)
        phones += world.joined(node, 1)
    counted = [staleness_of(world, phone) for phone in done[: updates // goal * goal]]
    return sum(counted) / len(counted)


def test_a_greater_aggregation_goal_makes_clients_less_stale() -> None:
    """Figure 4: "staleness can be controlled by increasing the aggregation goal"."""
    found = []
    for goal in (1, 2, 4):
        world, node = a_world(an_async_task(goal, concurrency=4))
        found.append(mean_staleness(world, node, goal, updates=24))
    assert found[0] > found[1] > found[2]
