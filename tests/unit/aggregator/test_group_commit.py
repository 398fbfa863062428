"""Buffers and group commits: exactly K, durable before acknowledged, the next fills meanwhile."""

from __future__ import annotations

import math

import pytest

from papaya.aggregator.pipeline import Buffer
from papaya.aggregator.work import DeleteBlobs, Fold, Snapshot, Step
from papaya.errors import InvariantError
from papaya.learning.weighting import WeightedSum
from papaya.machine import Reply, Transact
from papaya.messages.participation import Completed
from papaya.messages.storage import (
    FenceRow,
    Member,
    RecordRow,
    VersionRow,
    fence_key,
    record_key,
)
from tests.unit.aggregator.builders import (
    MODEL_LENGTH,
    ONE_UPLOAD,
    TASK,
    Node,
    World,
    a_task,
    a_world,
    an_async_task,
)


def the_sum(world: World, target: int) -> WeightedSum:
    [record] = [row for row in world.store.all(RecordRow) if row.target == target]
    return WeightedSum.decode(world.blobs[record.sum], MODEL_LENGTH)


def transactions(node: Node) -> int:
    return len(node.did(Transact))


# -- durable before acknowledged --------------------------------------------------------------


def test_nothing_is_acknowledged_before_its_record_is_committed() -> None:
    world, node = a_world()
    [phone] = world.joined(node, 1)
    node.hold(Snapshot, Transact)
    handle = phone.upload(1, 2, 3, 4)
    assert isinstance(node.held_back[0], Snapshot)
    node.release_one()
    assert isinstance(node.held_back[0], Transact)
    assert handle not in world.answers
    assert world.recorded() == []
    node.settle("committed")
    assert world.answers[handle] == Completed()
    assert world.recorded() == [phone.session]


def test_a_record_is_fenced_and_requires_the_row_that_it_replaces() -> None:
    world, node = a_world(an_async_task(3))
    one, other = world.joined(node, 2)
    one.upload_for_good(1)
    [before] = world.store.all(RecordRow)
    node.hold(Transact)
    other.upload(2)
    world.pass_s(1.0)
    transaction = node.settle("committed")
    required = dict(transaction.require)
    assert required[fence_key(TASK)] == FenceRow(1, "agg-1", 1)
    assert required[record_key(TASK, 1)] == before
    [after] = world.store.all(RecordRow)
    assert transaction.put == ((record_key(TASK, 1), after),)
    assert transaction.delete == ()


def test_a_record_names_its_members_in_the_order_of_the_sum() -> None:
    world, node = a_world(an_async_task(4))
    first, second = world.joined(node, 2)
    second.upload(1, examples=5)
    first.upload(2, examples=3)
    world.pass_s(1.0)
    [record] = world.store.all(RecordRow)
    assert [(m.session, m.examples, m.staleness) for m in record.members] == [
        (second.session, 5, 0),
        (first.session, 3, 0),
    ]
    assert record.weight == 8
    assert the_sum(world, 1).vector.tolist() == [5 * 1 + 3 * 2, 0, 0, 0]


def test_a_commit_gathers_what_came_within_its_interval() -> None:
    world, node = a_world(an_async_task(10, concurrency=10, commit_interval_s=0.5))
    phones = world.joined(node, 5)
    handles = [phone.upload(1) for phone in phones]
    assert transactions(node) == 1, "the first goes at once"
    assert [handle in world.answers for handle in handles] == [True, False, False, False, False]
    world.pass_s(0.25)
    assert transactions(node) == 1
    world.pass_s(0.25)
    assert transactions(node) == 2, "the others together, an interval later"
    assert all(world.answers[handle] == Completed() for handle in handles)


def test_updates_that_come_during_a_commit_go_with_the_next() -> None:
    world, node = a_world(an_async_task(10, concurrency=10))
    one, other = world.joined(node, 2)
    node.hold(Transact)
    first = one.upload(1)
    second = other.upload(2)
    world.pass_s(5.0)
    assert len(node.held_back) == 1, "one storage operation at a time"
    node.settle("committed")
    assert first in world.answers
    assert second not in world.answers
    node.release()
    assert world.answers[second] == Completed()
    assert world.recorded() == [one.session, other.session]


def test_a_snapshot_may_tell_of_a_fold_first() -> None:
    """Threads race: the cut holds an update whose own message is still on its way."""
    world, node = a_world(an_async_task(4))
    early, late = world.joined(node, 2)
    node.hold(Fold, Transact)
    early.upload(1)
    handle = late.upload(2)
    first, second = node.held_back
    assert isinstance(first, Fold)
    assert isinstance(second, Fold)
    node.held_back.clear()
    folded = [node.shards.fold(first), node.shards.fold(second)]
    node.receive(folded[0])
    node.settle("committed")
    assert world.answers[handle] == Completed()
    node.receive(folded[1])
    node.release()
    world.pass_s(1.0)
    assert world.recorded() == [early.session, late.session]
    assert the_sum(world, 1).vector.tolist() == [3, 0, 0, 0]
    assert node.held().counters["counted"] == 2
    assert node.memory_used == 0


def test_the_sum_that_a_record_replaces_is_deleted_after_the_row() -> None:
    world, node = a_world(an_async_task(4))
    one, other = world.joined(node, 2)
    one.upload_for_good(1)
    [before] = world.store.all(RecordRow)
    node.hold(Transact)
    other.upload(2)
    world.pass_s(1.0)
    assert before.sum in world.blobs, "its row still names it"
    node.settle("committed")
    assert before.sum not in world.blobs
    [after] = world.store.all(RecordRow)
    assert after.sum in world.blobs


# -- exactly K ------------------------------------------------------------------------------


def test_a_buffer_holds_exactly_k_and_the_next_upload_opens_the_next() -> None:
    world, node = a_world(an_async_task(2))
    phones = world.joined(node, 3)
    for phone in phones:
        phone.upload(1)
    world.pass_s(1.0)
    assert world.version == 1
    assert world.consumed() == [phone.session for phone in phones[:2]]
    assert world.recorded() == [phones[2].session]


def test_uploads_being_folded_take_their_place_in_the_buffer() -> None:
    """Five arrive at once; the places in the sum are given before the folding is done."""
    world, node = a_world(an_async_task(2, concurrency=5))
    phones = world.joined(node, 4)
    node.hold(Fold)
    for phone in phones:
        phone.upload(1)
    targets = [effect.target for effect in node.held_back if isinstance(effect, Fold)]
    assert targets == [1, 1, 2, 2]
    node.release()
    world.pass_s(1.0)
    assert world.version == 2
    assert world.parameters(2) == [2, 0, 0, 0]


def test_the_goal_may_be_above_the_concurrency() -> None:
    world, node = a_world(an_async_task(5, concurrency=2))
    counted = []
    for turn in range(5):
        assert world.version == 0
        [phone] = world.joined(node, 1)
        assert phone.upload_for_good(turn) == Completed()
        counted.append(phone.session)
    assert world.version == 1
    assert world.consumed() == counted
    assert world.parameters(1) == [2, 0, 0, 0]


def test_the_next_buffer_fills_while_a_version_is_written() -> None:
    world, node = a_world(an_async_task(2, concurrency=8), upload_bytes=4 * ONE_UPLOAD)
    phones = world.joined(node, 5)
    node.hold(Step)
    handles = [phone.upload(1) for phone in phones]
    world.pass_s(1.0)
    assert len(node.held_back) == 1
    assert [handle in world.answers for handle in handles] == [True, True, False, False, False]
    assert node.memory_used == 1 / 4, "two are folded already, the last one waits"
    node.release()
    world.pass_s(1.0)
    assert all(world.answers[handle] == Completed() for handle in handles)
    assert world.version == 2
    assert world.recorded() == [phones[4].session]


def test_joins_go_on_while_a_version_is_written_and_get_the_old_one() -> None:
    world, node = a_world(an_async_task(1))
    [phone] = world.joined(node, 1)
    node.hold(Step)
    phone.upload(1)
    [meanwhile] = world.joined(node, 1)
    node.release()
    [after] = world.joined(node, 1)
    assert (meanwhile.version, after.version) == (0, 1)


def test_a_broken_buffer_breaks_the_invariant() -> None:
    buffer = Buffer(1, goal=1)
    member = Member("a", 0, 0, 1, 0.0)
    buffer.folding["a"] = member
    assert not buffer.has_room
    buffer.check()
    buffer.folding["b"] = member
    with pytest.raises(InvariantError, match="goal 1"):
        buffer.check()
    buffer.folding.clear()
    buffer.durable = 1
    with pytest.raises(InvariantError, match="1 durable"):
        buffer.check()


# -- discarded ------------------------------------------------------------------------------


def test_a_discarded_update_is_never_answered_complete() -> None:
    """Not by the fold, not by the commit that follows, not by a repetition."""
    world, node = a_world(an_async_task(2))
    bad, *good = world.joined(node, 3)
    node.hold(Fold)
    handles = [bad.upload(math.nan), bad.complete()]
    for phone in good:
        phone.upload(1)
    node.release()
    world.pass_s(1.0)
    handles.append(bad.complete())
    assert [world.answers[handle] for handle in handles] == 3 * [Completed("not_finite")]
    assert bad.session not in world.consumed()


# -- durability: step -----------------------------------------------------------------------


def test_durability_step_acknowledges_what_is_folded() -> None:
    """The paper's behaviour: fast, and an open buffer dies with its aggregator."""
    world, node = a_world(an_async_task(3, durability="step"))
    one, other = world.joined(node, 2)
    node.hold(Transact)
    handles = [one.upload(1), other.upload(2)]
    assert [world.answers[handle] for handle in handles] == [Completed(), Completed()]
    world.pass_s(30.0)
    assert transactions(node) == 0, "an open buffer is not written"
    world.crash(node)
    successor = world.start("agg-2")
    world.place(successor)
    assert world.recorded() == world.consumed() == []


def test_durability_step_still_writes_a_full_buffer_before_its_version() -> None:
    world, node = a_world(an_async_task(2, durability="step"))
    phones = world.joined(node, 2)
    node.hold(Step)
    for phone in phones:
        phone.upload(3)
    assert world.recorded() == [phone.session for phone in phones]
    node.release()
    assert world.version == 1
    assert world.parameters(1) == [3, 0, 0, 0]
    assert world.consumed() == [phone.session for phone in phones]


def test_durability_step_frees_the_place_of_a_folded_client() -> None:
    world, node = a_world(a_task(concurrency=1, durability="step"))
    [phone] = world.joined(node, 1)
    phone.upload(1)
    assert node.held().slots.client_demand == 1
    assert phone.heartbeat() == Completed()


# -- the log tells the order ------------------------------------------------------------------


def test_blobs_then_row_then_answer_and_deletion() -> None:
    world, node = a_world(an_async_task(2))
    one, other = world.joined(node, 2)
    one.upload_for_good(1)
    start = len(node.log)
    handle = other.upload(1)
    order = [
        type(effect).__name__
        for effect in node.log[start:]
        if isinstance(effect, Snapshot | Transact | Step | DeleteBlobs)
        or (isinstance(effect, Reply) and effect.to == handle)
    ]
    assert order[:2] == ["Snapshot", "Transact"]
    assert sorted(order[2:4]) == ["DeleteBlobs", "Reply"]
    assert order[4:] == ["Step", "Transact", "DeleteBlobs"]
    assert [row.version for row in world.store.all(VersionRow)] == [0, 1]
