"""A buffer that is full before its first record: the version itself makes its members durable."""

from __future__ import annotations

from typing import Literal

import pytest
from msgspec.structs import replace

from papaya.aggregator.shards import Shards
from papaya.aggregator.work import Fold, Snapshot, Step
from papaya.config import OptimizerConfig
from papaya.errors import InvariantError
from papaya.machine import Transact
from papaya.messages.participation import Completed, Incomplete
from papaya.messages.storage import RecordRow, record_key
from tests.unit.aggregator.builders import TASK, a_world, an_async_task

FEDAVG = OptimizerConfig(kind="fedavg", rate=1.0)


def test_no_sum_is_written_and_nothing_is_acknowledged_before_the_version() -> None:
    world, node = a_world(an_async_task(1, optimizer=FEDAVG))
    [phone] = world.joined(node, 1)
    node.hold(Transact)
    handle = phone.upload(1, 2, 3, 4)
    assert handle not in world.answers
    transaction = node.settle("committed")
    assert dict(transaction.require)[record_key(TASK, 1)] is None
    assert record_key(TASK, 1) not in transaction.delete
    assert world.answers[handle] == Completed()
    assert (world.version, world.parameters(1)) == (1, [1, 2, 3, 4])
    assert world.consumed() == [phone.session]
    assert node.did(Snapshot) == []
    assert not [key for key in world.blobs if "/sum-" in key]


def test_members_within_one_commit_interval_need_no_record() -> None:
    world, node = a_world(an_async_task(2, concurrency=8, optimizer=FEDAVG, commit_interval_s=5.0))
    first, second, *others = world.joined(node, 4)
    first.upload_for_good(1)  # committed at once: the interval begins
    second.upload_for_good(3)
    assert (world.version, len(node.did(Snapshot))) == (1, 2)
    handles = [phone.upload(2) for phone in others]
    assert all(world.answers.get(handle) == Completed() for handle in handles)
    assert (world.version, len(node.did(Snapshot))) == (2, 2)


def test_a_buffer_with_a_record_is_recorded_again_before_its_step() -> None:
    world, node = a_world(an_async_task(2))
    one, other = world.joined(node, 2)
    one.upload_for_good(1)
    assert len(world.store.all(RecordRow)) == 1
    node.hold(Step)
    handle = other.upload(2)
    world.pass_s(1.0)
    assert world.answers[handle] == Completed()
    [step] = node.held_back
    assert isinstance(step, Step)
    assert step.record.sum


@pytest.mark.parametrize("fate", ["applied", "lost"])
def test_an_unknown_outcome_is_looked_up(fate: Literal["applied", "lost"]) -> None:
    world, node = a_world(an_async_task(1))
    [phone] = world.joined(node, 1)
    node.hold(Transact)
    handle = phone.upload(1)
    node.settle(fate)
    node.release()
    answer = world.answers[handle]
    if fate == "applied":
        assert answer == Completed()
    else:
        assert isinstance(answer, Incomplete), answer
        assert world.consumed() == []
        phone.send(1)
        again = phone.complete()
        assert world.answers[again] == Completed()
    assert world.consumed() == [phone.session]


def test_a_lost_version_that_is_applied_late_is_not_made_again() -> None:
    world, node = a_world(an_async_task(1))
    [phone] = world.joined(node, 1)
    node.hold(Transact)
    phone.upload(5)
    late = node.settle("lost")
    assert world.store.apply(late) == "committed"
    phone.send(5)
    handle = phone.complete()
    node.release()  # refused: the version is there
    assert world.answers[handle] == Completed()
    assert (world.version, world.consumed()) == (1, [phone.session])


def test_a_late_record_of_the_next_buffer_is_not_counted_beside_the_version() -> None:
    """The session was in the second buffer; after an unknown outcome it is in the first one."""
    world, node = a_world(an_async_task(1))
    slow, phone = world.joined(node, 2)
    node.hold(Fold, Transact)
    slow.upload(1)  # takes the place in the first buffer
    phone.upload(5)
    node.held_back.rotate(1)
    node.release_one()  # the second buffer is folded first
    node.release_one()
    late = node.settle("lost")
    assert [key for key, _ in late.put] == [record_key(TASK, 2)]
    node.hold(Transact)
    phone.send(5)
    handle = phone.complete()
    assert world.store.apply(late) == "committed"
    node.release()
    assert world.answers[handle] == Completed()
    slow.send(1)
    slow.complete()
    world.pass_s(1.0)
    assert sorted(world.consumed() + world.recorded()) == [slow.session, phone.session]


def test_a_crash_before_the_version_loses_nothing_that_was_acknowledged() -> None:
    world, node = a_world(an_async_task(1))
    [phone] = world.joined(node, 1)
    node.hold(Transact)
    handle = phone.upload(5)
    world.crash(node)
    heir = world.start("agg-2")
    world.place(heir, active=1)
    assert handle not in world.answers
    phone.node = heir
    phone.send(5)
    assert world.answers[phone.complete()] == Completed()
    assert world.consumed() == [phone.session]


def test_a_step_whose_sum_has_other_members_is_not_made() -> None:
    world, node = a_world(an_async_task(1))
    [phone] = world.joined(node, 1)
    node.hold(Step)
    phone.upload(1)
    [step] = node.held_back
    assert isinstance(step, Step)
    stranger = replace(step.record.members[0], session="stranger")
    wrong = replace(step, record=replace(step.record, members=(stranger,)))
    shards: Shards = node.shards
    with pytest.raises(InvariantError, match="other members"):
        shards.step(wrong, world.read_blob)
    node.release()  # the sum is still there
    assert world.consumed() == [phone.session]
