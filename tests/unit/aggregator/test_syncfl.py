"""SyncFL at an aggregator: rounds, replacement, over-selection, and nobody in between."""

from __future__ import annotations

import math

import pytest

from papaya.aggregator.work import Fold, Step
from papaya.machine import Transact
from papaya.messages.participation import (
    Aborted,
    Alive,
    Completed,
    Incomplete,
    Joined,
    Retry,
    UploadGranted,
)
from papaya.messages.storage import ConsumedRow
from tests.unit.aggregator.builders import SERVER, Node, Phone, World, a_sync_task, a_world

H = SERVER.heartbeat_s
A_CHUNK = b"\0" * 8


def a_round(
    concurrency: int, over_selection: float, **changes: object
) -> tuple[World, Node, list[Phone]]:
    world, node = a_world(a_sync_task(concurrency, over_selection, **changes))
    return world, node, world.joined(node, concurrency)


def test_every_client_of_a_round_starts_from_its_version() -> None:
    world, node, phones = a_round(2, 0.0)
    assert [phone.version for phone in phones] == [0, 0]
    for phone in phones:
        phone.upload(1)
    assert [phone.version for phone in world.joined(node, 2)] == [1, 1]


# -- demand -----------------------------------------------------------------------------------


def test_demand_falls_with_completions_and_does_not_rise_again() -> None:
    _, node, phones = a_round(4, 0.0)
    for done, phone in enumerate(phones[:3], start=1):
        phone.upload_for_good(1)
        assert len(node.held().sessions.active) == 4 - done
        assert node.held().slots.client_demand == 0


def test_a_failed_client_is_replaced_in_the_middle_of_the_round() -> None:
    """Unlike cohort-based systems: Device C takes the place of Device E."""
    world, node, phones = a_round(3, 0.0)
    phones[0].upload_for_good(3)
    phones[1].leave()
    world.pass_s(SERVER.min_report_interval_s)
    assert node.last_report().demand == 1
    [replacement] = world.joined(node, 1)
    assert replacement.version == 0
    replacement.upload_for_good(3)
    phones[2].upload_for_good(3)
    assert world.version == 1
    assert world.consumed() == [p.session for p in (phones[0], replacement, phones[2])]


def test_a_silent_client_is_replaced_too() -> None:
    world, node, phones = a_round(2, 0.0)
    world.pass_s(2 * H)
    phones[0].heartbeat()
    world.pass_s(H)
    assert node.held().slots.client_demand == 1
    assert isinstance(world.phone(node).join(), Joined)


@pytest.mark.parametrize("durability", ["commit", "step"])
def test_a_refused_update_is_replaced_and_a_counted_one_is_not(durability: str) -> None:
    _, node, phones = a_round(3, 0.0, durability=durability)
    phones[0].upload_for_good(1)
    assert node.held().slots.client_demand == 0
    phones[1].upload_for_good(math.nan)
    assert node.held().slots.client_demand == 1


# -- without over-selection -------------------------------------------------------------------


def test_without_over_selection_a_round_waits_for_every_client() -> None:
    world, node, phones = a_round(3, 0.0)
    for value, phone in enumerate(phones[:2]):
        phone.upload_for_good(value)
    world.pass_s(2 * H)
    assert world.version == 0
    assert phones[2].heartbeat() == Alive()
    phones[2].upload_for_good(2)
    assert world.version == 1
    assert world.parameters(1) == [1, 0, 0, 0]
    assert node.held().slots.client_demand == 3


# -- over-selection ---------------------------------------------------------------------------


def test_when_k_updates_are_in_the_rest_are_aborted_at_once() -> None:
    world, node, phones = a_round(4, 1.0)
    node.hold(Transact)
    phones[0].upload(1)
    assert phones[3].heartbeat() == Alive()
    phones[1].upload(1)
    assert phones[2].heartbeat() == phones[3].heartbeat() == Aborted("round_over")
    node.release()
    assert world.version == 1
    assert world.consumed() == [phones[0].session, phones[1].session]
    assert node.held().counters["aborted_round_over"] == 2


def test_a_client_in_the_middle_of_its_upload_is_aborted_too() -> None:
    world, node, phones = a_round(3, 0.5)
    assert node.held().ledger.config.aggregation_goal == 2
    late = phones[2]
    late.report()
    late.chunk(0, A_CHUNK)
    for phone in phones[:2]:
        phone.upload(1)
    assert late.chunk(1, A_CHUNK) == Aborted("round_over")
    assert world.answers[late.complete()] == Aborted("round_over")
    assert node.memory_used == 0
    assert node.shards._uploads == {}


def test_a_whole_update_that_finds_no_place_is_discarded() -> None:
    """All three are here; two take the places, and once these are in it is too late."""
    world, node, phones = a_round(3, 0.5)
    node.hold(Fold)
    handles = [phone.upload(1) for phone in phones]
    assert handles[2] not in world.answers
    node.release()
    assert [world.answers[handle] for handle in handles] == [
        Completed(),
        Completed(),
        Completed("round_over"),
    ]
    assert phones[2].heartbeat() == Completed("round_over"), "and it stays discarded"
    assert node.held().counters["trips"] == 3
    assert node.memory_used == 0
    assert node.shards._uploads == {}


def test_an_update_that_waited_takes_the_place_of_a_refused_one() -> None:
    world, node, phones = a_round(3, 0.5)
    node.hold(Fold)
    handles = [phone.upload(value) for phone, value in zip(phones, (math.nan, 4, 6), strict=True)]
    node.release()
    assert [world.answers[handle] for handle in handles] == [
        Completed("not_finite"),
        Completed(),
        Completed(),
    ]
    assert world.parameters(1)[0] == 5


def test_discarded_and_aborted_clients_are_in_no_version() -> None:
    world, node = a_world(a_sync_task(4, 1.0))
    rounds: list[list[Phone]] = []
    for _ in range(3):
        phones = world.joined(node, 4)
        rounds.append(phones)
        for phone in phones:
            if isinstance(phone.report(), UploadGranted):
                phone.send(1)
                phone.complete()
    assert world.version == 3
    for row, phones in zip(world.store.all(ConsumedRow), rounds, strict=True):
        assert [member.session for member in row.members] == [p.session for p in phones[:2]]
        assert {member.version for member in row.members} == {row.version - 1}


def test_a_round_is_over_even_if_a_snapshot_told_of_its_last_update_first() -> None:
    """The cut holds both updates, the message of the second fold comes after the version."""
    world, node, phones = a_round(4, 1.0)
    uploading, training = phones[2], phones[3]
    uploading.report()
    uploading.chunk(0, A_CHUNK)
    node.hold(Fold)
    phones[0].upload(1)
    phones[1].upload(1)
    first, second = node.held_back
    assert isinstance(first, Fold)
    assert isinstance(second, Fold)
    node.held_back.clear()
    node.hold()
    folded = [node.shards.fold(first), node.shards.fold(second)]
    node.receive(folded[0])
    node.receive(folded[1])
    assert world.version == 1
    assert node.held().sessions.active == {}, "whoever is left of the round has no use any more"
    assert training.heartbeat() == Aborted("round_over")
    assert uploading.chunk(1, A_CHUNK) == Aborted("round_over")


# -- between rounds ---------------------------------------------------------------------------


def test_nobody_joins_while_a_round_closes() -> None:
    world, node, phones = a_round(4, 1.0)
    early = world.phone(node)
    node.hold(Step)
    phones[0].upload(1)
    phones[1].upload(1)
    answer = early.join()
    assert isinstance(answer, Retry)
    assert answer.after_s > 0
    assert node.held().slots.client_demand == 0
    node.release()
    joined = early.join()
    assert isinstance(joined, Joined)
    assert joined.version == 1


def test_a_new_round_wants_everybody_at_once() -> None:
    world, node, phones = a_round(4, 1.0)
    world.pass_s(H)
    assert node.last_report().demand == 0
    phones[0].upload(1)
    phones[1].upload(1)
    world.pass_s(SERVER.min_report_interval_s)
    assert node.last_report().demand == 4


def test_a_client_of_the_last_round_cannot_take_part_in_this_one() -> None:
    _, node, phones = a_round(4, 1.0)
    phones[0].upload(1)
    phones[1].upload(1)
    late = phones[3]
    assert late.report() == Aborted("round_over")
    assert late.heartbeat() == Aborted("round_over")
    assert node.held().sessions.active == {}


# -- unknown outcomes and take-over -----------------------------------------------------------


def test_a_full_round_whose_record_was_lost_is_filled_again() -> None:
    world, node, phones = a_round(4, 1.0)
    node.hold(Transact)
    handle = phones[0].upload(2)
    node.settle("committed")
    assert world.answers[handle] == Completed()
    handle = phones[1].upload(4)
    world.pass_s(1.0)
    node.settle("lost")
    assert world.answers[handle] == Incomplete((0, 1))
    node.release()
    assert node.held().slots.client_demand == 4 - 1 - 1
    phones[1].send(4)
    again = phones[1].complete()
    world.pass_s(1.0)
    assert world.answers[again] == Completed()
    assert world.version == 1
    assert world.parameters(1)[0] == 3


def test_a_successor_goes_on_with_the_round() -> None:
    world, node, phones = a_round(3, 0.0)
    phones[0].upload_for_good(1)
    world.crash(node)
    successor = world.start("agg-2")
    world.place(successor)
    for phone in phones:
        phone.node = successor
    assert phones[1].heartbeat() == Alive()
    world.pass_s(2 * H)
    assert phones[1].heartbeat() == Alive()
    world.pass_s(H)
    assert successor.last_report().demand == 3 - 1 - 1
    [replacement] = world.joined(successor, 1)
    phones[1].upload_for_good(1)
    replacement.upload_for_good(1)
    assert world.version == 1
    assert world.consumed() == [p.session for p in (phones[0], phones[1], replacement)]


def test_over_selection_of_the_paper() -> None:
    """1300 clients at 30 % over-selection: a round needs 1000."""
    assert a_sync_task(1300, 0.3).aggregation_goal == 1000
