"""A commit whose outcome is unknown is read back: nothing is lost, nothing is counted twice."""

from __future__ import annotations

import pytest

from papaya.aggregator.work import Drop, Restore, Step
from papaya.machine import Read, Transact
from papaya.messages.participation import (
    Aborted,
    Alive,
    Completed,
    Incomplete,
    Joined,
    Retry,
)
from papaya.messages.storage import (
    FenceRow,
    RecordRow,
    Transaction,
    fence_key,
)
from tests.unit.aggregator.builders import (
    SERVER,
    TASK,
    Node,
    Phone,
    World,
    a_world,
    an_async_task,
    make_version,
)


def a_held_record(goal: int = 2) -> tuple[World, Node, Phone, int]:
    """One update is folded; the transaction with its record is on its way."""
    world, node = a_world(an_async_task(goal))
    [phone] = world.joined(node, 1)
    node.hold(Transact)
    handle = phone.upload(5)
    return world, node, phone, handle


def a_held_version() -> tuple[World, Node, Phone, int]:
    """The record is committed; the transaction with version 1 is on its way."""
    world, node = a_world(an_async_task(2, concurrency=8))
    first, phone = world.joined(node, 2)
    assert first.upload_for_good(5) == Completed()
    node.hold(Transact)
    handle = phone.upload(5)
    node.settle("committed")
    assert world.version == 0
    return world, node, phone, handle


# -- a record ---------------------------------------------------------------------------------


def test_a_record_that_was_applied_unseen_is_acknowledged_after_reading_it_back() -> None:
    world, node, phone, handle = a_held_record()
    node.settle("applied")
    assert world.answers[handle] == Completed()
    assert world.recorded() == [phone.session]
    assert node.held().counters["counted"] == 1


def test_a_record_that_was_lost_is_not_acknowledged_and_its_update_is_sent_again() -> None:
    world, node, phone, handle = a_held_record()
    node.settle("lost")
    assert world.answers[handle] == Incomplete((0, 1))
    node.release()
    phone.send(5)
    again = phone.complete()
    world.pass_s(1.0)
    assert world.answers[again] == Completed()
    assert world.recorded() == [phone.session]


def test_no_client_is_served_until_the_rows_are_read_back() -> None:
    world, node, phone, _ = a_held_record()
    node.hold(Read)
    node.settle("lost")
    assert isinstance(phone.heartbeat(), Retry)
    assert isinstance(world.phone(node).join(), Retry)
    node.release()
    assert phone.heartbeat() == Alive()


@pytest.mark.parametrize("fate", ["applied", "lost"])
def test_clients_that_still_train_are_not_disturbed(fate: str) -> None:
    world, node, _, _ = a_held_record()
    [training] = world.joined(node, 1)
    node.settle("applied" if fate == "applied" else "lost")
    node.release()
    assert training.heartbeat() == Alive()
    assert training.upload_for_good(1) == Completed()


def test_the_memory_of_an_upload_that_must_be_sent_again_is_given_back() -> None:
    """Its slot is free, so its bytes must be too, even if the client never returns."""
    world, node, _, _ = a_held_record()
    [other] = world.joined(node, 1)
    other.report()
    other.chunk(0, b"\0" * 8)
    node.settle("lost")
    assert node.memory_used == 0
    assert node.shards._uploads == {}
    assert Drop(TASK, 1, other.session) in node.log


def test_what_was_folded_meanwhile_is_not_in_the_sum_after_reading_back() -> None:
    """Another update was folded while the lost transaction was on its way: both are sent again."""
    world, node, phone, _ = a_held_record(goal=4)
    [other] = world.joined(node, 1)
    handle = other.upload(7)
    node.settle("lost")
    assert world.answers[handle] == Incomplete((0, 1))
    node.release()
    other.send(7)
    phone.send(5)
    other.complete()
    phone.complete()
    world.pass_s(1.0)
    [record] = world.store.all(RecordRow)
    assert [member.session for member in record.members] == [other.session, phone.session]
    assert record.weight == 2


def test_a_lost_record_that_is_applied_late_is_found_by_the_next_commit() -> None:
    world, node, phone, _ = a_held_record(goal=4)
    late = node.settle("lost")
    [other] = world.joined(node, 1)
    handle = other.upload(7)
    world.pass_s(1.0)
    assert world.store.apply(late) == "committed"
    node.settle("committed")  # refused: the record is not what it was
    assert world.answers[handle] == Incomplete((0, 1))
    assert phone.heartbeat() == Completed()
    node.release()
    other.send(7)
    other.complete()
    world.pass_s(1.0)
    assert world.recorded() == [phone.session, other.session]


def test_a_lost_record_changes_nothing_when_it_comes_after_its_repetition() -> None:
    world, node, phone, _ = a_held_record(goal=4)
    late = node.settle("lost")
    node.release()
    phone.send(5)
    phone.complete()
    world.pass_s(1.0)
    before = dict(world.store.rows)
    assert world.store.apply(late) == "refused"
    assert world.store.rows == before


def test_a_lost_record_changes_nothing_when_it_comes_after_its_version() -> None:
    """The record's row is gone again by then, as it was when the lost transaction was sent."""
    world, node, phone, _ = a_held_record(goal=2)
    late = node.settle("lost")
    node.release()
    [other] = world.joined(node, 1)
    for each in (phone, other):
        each.report()
        each.send(5)
        each.complete()
    world.pass_s(1.0)
    assert world.version == 1
    assert world.consumed() == [phone.session, other.session]
    world.store.apply(late)
    assert world.recorded() == [], "counted in version 1 and recorded once more"


def test_a_successor_starts_although_a_lost_record_came_after_its_version() -> None:
    world, node, phone, _ = a_held_record(goal=2)
    late = node.settle("lost")
    node.release()
    [other] = world.joined(node, 1)
    for each in (phone, other):
        each.report()
        each.send(5)
        each.complete()
    world.pass_s(1.0)
    assert world.version == 1
    world.store.apply(late)
    world.crash(node)
    successor = world.start("agg-2")
    world.place(successor)
    world.pass_s(SERVER.heartbeat_s)
    make_version(world, successor)
    assert world.version == 2


# -- a version --------------------------------------------------------------------------------


@pytest.mark.parametrize("fate", ["applied", "lost"])
def test_a_version_with_unknown_outcome_is_made_exactly_once(fate: str) -> None:
    world, node, phone, handle = a_held_version()
    assert world.answers[handle] == Completed()
    node.settle("applied" if fate == "applied" else "lost")
    node.release()
    assert world.version == 1
    assert world.parameters(1) == [5, 0, 0, 0]
    assert world.consumed() == ["s1", phone.session]
    assert world.recorded() == []


def test_a_lost_version_that_is_applied_late_is_found_by_its_repetition() -> None:
    world, node, phone, _ = a_held_version()
    late = node.settle("lost")
    assert world.store.apply(late) == "committed"
    node.release()
    assert world.version == 1
    assert node.held().ledger.version == 1
    assert world.parameters(1) == [5, 0, 0, 0]
    assert world.consumed() == ["s1", phone.session]


def test_a_lost_version_changes_nothing_when_it_comes_after_its_repetition() -> None:
    world, node, _, _ = a_held_version()
    late = node.settle("lost")
    node.release()
    make_version(world, node)
    before = dict(world.store.rows)
    assert world.store.apply(late) == "refused"
    assert world.store.rows == before


def test_a_version_that_was_applied_unseen_aborts_the_stale_like_any_other() -> None:
    """ "After every server model update, the aggregator aborts clients whose staleness is larger
    than [...] maximum staleness": also when the update was found by reading back.
    """
    world, node = a_world(an_async_task(1, max_staleness=0))
    slow, quick = world.joined(node, 2)
    node.hold(Transact)
    quick.upload(1)
    node.settle("applied")
    node.release()
    assert node.held().ledger.version == 1
    assert list(node.held().sessions.active) == []
    assert slow.heartbeat() == Aborted("stale")


def test_clients_join_the_version_that_was_applied_unseen() -> None:
    world, node, _, _ = a_held_version()
    node.settle("applied")
    node.release()
    joined = world.phone(node).join()
    assert isinstance(joined, Joined)
    assert joined.version == 1


def test_an_update_of_the_next_buffer_survives_an_unknown_version() -> None:
    world, node, _, _ = a_held_version()
    [other] = world.joined(node, 1)
    handle = other.upload(9)
    node.settle("lost")
    assert world.answers[handle] == Incomplete((0, 1))
    node.release()
    other.send(9)
    again = other.complete()
    world.pass_s(1.0)
    assert world.answers[again] == Completed()
    assert (world.version, world.recorded()) == (1, [other.session])


def test_an_update_that_waited_for_a_place_is_sent_again() -> None:
    """Buffers 1 and 2 are full, a third update waits, the version's outcome is unknown."""
    world, node, _, _ = a_held_version()
    phones = world.joined(node, 3)
    handles = [phone.upload(2) for phone in phones]
    node.settle("lost")
    assert [world.answers[handle] for handle in handles] == 3 * [Incomplete((0, 1))]
    node.release()
    for phone in phones:
        phone.send(2)
        phone.complete()
    world.pass_s(2.0)
    assert (world.version, world.recorded()) == (2, [phones[-1].session])
    assert world.parameters(2) == [5 + 2, 0, 0, 0]


# -- deposed ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fate", ["committed", "lost"])
def test_a_deposed_holder_stops_when_it_reads_the_row(fate: str) -> None:
    world, node, phone, handle = a_held_record()
    world.store.rows[fence_key(TASK)] = FenceRow(2, "agg-2", 0)
    transaction = node.settle("committed" if fate == "committed" else "lost")
    assert isinstance(transaction, Transaction)
    assert TASK not in node.machine.tasks
    assert isinstance(world.answers[handle], Retry), "the client is sent to find the new holder"
    assert world.recorded() == []
    assert node.shards._uploads == {}
    assert node.memory_used == 0
    answer = phone.heartbeat()
    assert isinstance(answer, Retry)


def test_a_commit_delayed_past_a_take_over_changes_nothing() -> None:
    world, node, phone, handle = a_held_record()
    successor = world.start("agg-2")
    world.place(successor)
    node.settle("committed")
    assert isinstance(world.answers[handle], Retry)
    assert world.recorded() == []
    phone.node = successor
    phone.send(5)
    again = phone.complete()
    assert world.answers[again] == Completed()
    assert world.recorded() == [phone.session]


@pytest.mark.parametrize("reading", [Restore, Step])
def test_a_deposed_holder_that_finds_its_blobs_gone_does_no_harm(
    reading: type[Restore] | type[Step],
) -> None:
    """It read the rows, its successor made a version and deleted the sum, then it reads the sum."""
    world, node = a_world(an_async_task(2))
    first, second = world.joined(node, 2)
    first.upload_for_good(5)
    node.hold(Transact)
    second.upload(5)
    node.hold(reading)
    node.settle("applied" if reading is Restore else "committed")
    successor = world.start("agg-2")
    world.place(successor)
    assert world.version == 1
    assert len(node.held_back) == 1
    assert isinstance(node.held_back[0], reading)
    before = dict(world.store.rows)
    node.release()
    world.pass_s(3 * SERVER.heartbeat_s)
    assert world.store.rows == before
    node.order([])
    assert node.machine.tasks == {}


def test_a_blob_missing_from_fresh_rows_halts_the_task() -> None:
    """A disaster in the store is for the owner to mend: nothing is written over it."""
    world, node, _, _ = a_held_record(goal=4)
    node.settle("committed")
    [record] = world.store.all(RecordRow)
    del world.blobs[record.sum]
    world.crash(node)
    successor = world.start("agg-2")
    world.place(successor)
    before = dict(world.store.rows)
    world.pass_s(3 * SERVER.heartbeat_s)
    assert isinstance(world.phone(successor).join(), Retry)
    assert all(task.demand == 0 for task in successor.reports[-1].tasks)
    assert world.store.rows == before
