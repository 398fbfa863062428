"""The fence: written before anyone is told, under the leader's epoch; read back when in doubt."""

from __future__ import annotations

import pytest

from papaya.machine import Read, Transact
from papaya.messages.control import AggregatorOrders, Placement, Route, SelectorOrders
from papaya.messages.storage import (
    EPOCH_KEY,
    MAINTENANCE_KEY,
    EpochRow,
    FenceRow,
    LeaderRow,
    fence_key,
)
from tests.unit.coordinator.builders import (
    SERVER,
    H,
    Office,
    a_served_office,
    a_task,
    an_office,
    on,
    orders_in,
    sessions_in,
)


def a_failed_aggregator() -> Office:
    """agg-1 held the task and is silent for too long, agg-2 lives: the move is on its way."""
    office = a_served_office(a_task())
    office.selector("sel-1")
    office.aggregator("agg-2")
    for _ in range(2):
        office.pass_s(H)
        office.aggregator("agg-2")
        office.selector("sel-1")
    office.hold(Transact)
    office.pass_s(H)
    office.settle("committed", LeaderRow)
    return office


# -- fence first ------------------------------------------------------------------------------


def test_nobody_is_told_before_the_row_names_the_new_holder() -> None:
    office = a_failed_aggregator()
    before = len(office.sent)
    office.aggregator("agg-2")
    assert len(office.held_back) == 1
    placements = [o.tasks for o in orders_in(office.sent[before:], AggregatorOrders)]
    assert placements == [()], "its heartbeat is answered, without the task"
    assert office.fence() == FenceRow(1, "agg-1", 0)
    office.selector("sel-1")
    [orders] = orders_in(office.sent[before:], SelectorOrders)
    assert orders.routes == (Route("words", "agg-1", 1),)
    told = len(office.sent)
    office.settle("committed")
    assert office.fence() == FenceRow(2, "agg-2", 0)
    [orders_2] = orders_in(office.sent[told:], AggregatorOrders, "agg-2")
    assert orders_2.tasks == (Placement("words", 2, active=0),)
    [orders_1] = orders_in(office.sent[told:], AggregatorOrders, "agg-1")
    assert orders_1.tasks == (), "the old holder is told to stop, in case it lives"
    [routes] = [orders.routes for orders in orders_in(office.sent[told:], SelectorOrders)]
    assert routes == (Route("words", "agg-2", 2),)


def test_a_placement_requires_the_epoch_and_the_fence_that_it_replaces() -> None:
    office = a_failed_aggregator()
    office.aggregator("agg-2")
    transaction = office.settle("committed")
    assert dict(transaction.require) == {
        EPOCH_KEY: EpochRow(1),
        fence_key("words"): FenceRow(1, "agg-1", 0),
        MAINTENANCE_KEY: None,
    }
    assert transaction.put == ((fence_key("words"), FenceRow(2, "agg-2", 0)),)


def test_a_task_is_placed_once_at_a_time() -> None:
    office = a_failed_aggregator()
    for _ in range(3):
        office.aggregator("agg-2")
        office.aggregator("agg-3")
    assert len(office.held_back) == 1


def test_leases_on_their_way_are_told_to_the_successor_until_it_reports() -> None:
    office = a_served_office(a_task(), demand=4)
    sessions = sessions_in(office.selector("sel-1", 3))
    office.pass_s(1.0)
    sends = office.aggregator("agg-1", boot=1, number=1)
    [orders] = orders_in(sends, AggregatorOrders, "agg-1")[-1:]
    assert orders.boot == 1
    assert orders.tasks == (Placement("words", 2, tuple(sessions), 0),)
    sends = office.aggregator("agg-1", on("words", 1, demand=0), boot=1, number=2)
    [orders] = orders_in(sends, AggregatorOrders, "agg-1")
    assert orders.tasks == (Placement("words", 2, tuple(sessions), 0),), "not under this number yet"
    sends = office.aggregator("agg-1", on("words", 2, demand=0), boot=1, number=3)
    [orders] = orders_in(sends, AggregatorOrders, "agg-1")
    assert orders.tasks == (Placement("words", 2),), "it knows of them by now"


def test_after_a_move_the_old_demand_counts_no_more() -> None:
    office = a_served_office(a_task(), demand=4)
    office.aggregator("agg-1", boot=1, number=1)
    assert office.machine.demand.of("words") == 0
    office.aggregator("agg-1", on("words", 1, demand=4), boot=1, number=2)
    assert office.machine.demand.of("words") == 0, "the old sequence number"
    office.aggregator("agg-1", on("words", 2, demand=4), boot=1, number=3)
    assert office.machine.demand.of("words") == 4


# -- doubtful outcomes ------------------------------------------------------------------------


@pytest.mark.parametrize("fate", ["applied", "lost"])
def test_an_unknown_placement_is_read_back(fate: str) -> None:
    office = a_failed_aggregator()
    office.aggregator("agg-2")
    reads = len([effect for effect in office.log if isinstance(effect, Read)])
    told = len(office.sent)
    office.settle("applied" if fate == "applied" else "lost")
    assert len([effect for effect in office.log if isinstance(effect, Read)]) == reads + 1
    assert not any(orders.tasks for orders in orders_in(office.sent[told:], AggregatorOrders))
    office.release()
    sends = office.aggregator("agg-2")
    assert office.fence() == FenceRow(2, "agg-2", 0), "and never seq 3"
    [orders] = orders_in(sends, AggregatorOrders, "agg-2")
    assert orders.tasks == (Placement("words", 2, active=0),)


def test_a_placement_that_is_applied_late_is_not_made_twice() -> None:
    office = a_failed_aggregator()
    office.aggregator("agg-2")
    late = office.settle("lost")
    assert office.store.apply(late) == "committed"
    office.release()
    office.pass_s(H)
    sends = office.aggregator("agg-2")
    assert office.fence() == FenceRow(2, "agg-2", 0)
    [orders] = orders_in(sends, AggregatorOrders, "agg-2")
    assert orders.tasks == (Placement("words", 2, active=0),)


def test_a_refused_placement_is_read_back_and_the_row_decides() -> None:
    office = a_failed_aggregator()
    office.aggregator("agg-2")
    office.store.rows[fence_key("words")] = FenceRow(9, "agg-2", 0)
    office.settle("committed")
    office.release()
    sends = office.aggregator("agg-2")
    [orders] = orders_in(sends, AggregatorOrders, "agg-2")
    assert orders.tasks == (Placement("words", 9, active=0),)


def test_a_deposed_leader_moves_nothing_and_says_nothing() -> None:
    office = a_failed_aggregator()
    office.aggregator("agg-2")
    office.store.rows["leader"] = LeaderRow("c-2", 0.0, 2, 0)
    office.store.rows[EPOCH_KEY] = EpochRow(2)
    told = len(office.sent)
    office.settle("committed")
    office.release()
    assert office.fence() == FenceRow(1, "agg-1", 0)
    assert not office.leads
    office.aggregator("agg-2")
    office.selector("sel-1", 5)
    office.pass_s(H)
    assert office.sent[told:] == []


def test_a_snapshot_older_than_a_placement_does_not_undo_it() -> None:
    """Read, place, commit, and only then the rows of the read arrive."""
    office = a_served_office(a_task())
    for _ in range(2):
        office.pass_s(H)
        office.aggregator("agg-2")
    old_rows = tuple(office.store.rows.items())
    office.hold(Read)
    office.pass_s(H)
    assert office.fence() == FenceRow(2, "agg-2", 0)
    [read] = office.held_back
    assert isinstance(read, Read)
    office.held_back.clear()
    office.receive_rows(read, old_rows)
    [orders] = orders_in(office.aggregator("agg-2"), AggregatorOrders, "agg-2")
    assert orders.tasks == (Placement("words", 2, active=0),)


# -- stale assignments ------------------------------------------------------------------------


def test_an_aggregator_with_a_stale_assignment_is_told_what_it_holds() -> None:
    """It comes back after its task has moved: its orders do not list the task."""
    office = a_failed_aggregator()
    office.release()
    office.aggregator("agg-2")
    assert office.fence().aggregator == "agg-2"
    sends = office.aggregator("agg-1", on("words", 1, demand=4, active=3))
    [orders] = orders_in(sends, AggregatorOrders, "agg-1")
    assert orders.tasks == ()
    assert office.fence() == FenceRow(2, "agg-2", 0), "and it does not get the task back"
    assert office.machine.demand.of("words") == 0


def test_a_holder_is_told_all_its_tasks_and_no_others() -> None:
    office = an_office(a_task("words"), a_task("images"), a_task("sounds"))
    office.aggregator("agg-1")
    office.store.rows[fence_key("images")] = FenceRow(2, "agg-2", 0)
    office.aggregator("agg-2")
    office.pass_s(H)
    [orders_1] = orders_in(office.aggregator("agg-1"), AggregatorOrders)
    [orders_2] = orders_in(office.aggregator("agg-2"), AggregatorOrders)
    assert {p.task for p in orders_1.tasks} == {"words", "sounds"}
    assert [(p.task, p.seq) for p in orders_2.tasks] == [("images", 2)]


def test_an_earlier_boot_is_not_told_what_the_row_gives_to_a_later_one() -> None:
    first = a_served_office(a_task())
    first.store.rows[fence_key("words")] = FenceRow(4, "agg-1", 100.5)
    office = Office(node="c-2", store=first.store)
    office.wake()
    office.pass_s(SERVER.leader_lease_s)
    office.pass_s(H)
    [orders] = orders_in(office.aggregator("agg-1", boot=50), AggregatorOrders)
    assert orders.tasks == ()
    assert office.fence().seq == 4, "a later boot has it: this may be a late report"


def test_a_fence_of_a_later_boot_than_any_that_reports_is_replaced_after_the_recovery() -> None:
    """In a database of an earlier Papaya boots are times, which are larger than numbers."""
    first = a_served_office(a_task())
    first.store.rows[fence_key("words")] = FenceRow(4, "agg-1", 100.5)
    office = Office(node="c-1", store=first.store)
    office.wake()
    office.wake()
    assert office.leads
    for _ in range(4):
        office.pass_s(H)
        office.aggregator("agg-1", boot=50)
    assert office.fence() == FenceRow(5, "agg-1", 50)


def test_a_task_that_is_forgotten_and_made_again_is_placed_again() -> None:
    office = a_served_office(a_task())
    assert office.fence() == FenceRow(1, "agg-1", 0)
    for key in [key for key in office.store.rows if "/words" in key]:
        del office.store.rows[key]
    office.pass_s(H)
    office.aggregator("agg-1")
    Office(a_task(), store=office.store)
    assert office.fence().seq == 0
    office.pass_s(H)
    office.aggregator("agg-1")
    assert office.fence() == FenceRow(1, "agg-1", 0)
