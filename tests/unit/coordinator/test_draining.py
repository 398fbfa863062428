"""An aggregator that is about to stop: its tasks move after their last record, not before."""

from __future__ import annotations

from msgspec.structs import replace

from papaya.messages.control import AggregatorOrders, Drain, Placement, Route, SelectorOrders
from papaya.messages.storage import FenceRow
from tests.unit.coordinator.builders import (
    H,
    Office,
    a_served_office,
    a_task,
    on,
    orders_in,
)

BUSY = on("words", 1, demand=0, active=3)
DRAINED = replace(BUSY, drained=True)


def two_aggregators() -> Office:
    """agg-1 holds the task, agg-2 is free, sel-1 routes to them."""
    office = a_served_office(a_task())
    office.aggregator("agg-2")
    office.selector("sel-1")
    return office


def last_orders(office: Office, node: str) -> AggregatorOrders:
    return orders_in(office.sent, AggregatorOrders, node)[-1]


def test_a_task_moves_as_soon_as_its_last_record_is_reported() -> None:
    office = two_aggregators()
    office.aggregator("agg-1", BUSY, draining=True, heartbeat=False)
    assert office.fence() == FenceRow(1, "agg-1", 0), "not before its last record"
    sends = office.aggregator("agg-1", DRAINED, draining=True, heartbeat=False)
    assert office.fence() == FenceRow(2, "agg-2", 0)
    assert last_orders(office, "agg-2").tasks == (Placement("words", 2, active=3),)
    assert last_orders(office, "agg-1").tasks == (), "it may stop now"
    [routes] = [orders.routes for orders in orders_in(sends, SelectorOrders)]
    assert routes == (Route("words", "agg-2", 2),), "clients find the successor at once"


def test_a_successor_hears_of_active_and_of_awaited_clients() -> None:
    office = two_aggregators()
    office.aggregator("agg-1", replace(DRAINED, awaited=1), draining=True)
    assert last_orders(office, "agg-2").tasks == (Placement("words", 2, active=4),)


def test_a_late_report_of_an_earlier_boot_that_stopped_moves_nothing() -> None:
    """The holder was restarted and has the task again; a new leader has not heard of it yet."""
    before = a_served_office(a_task())
    before.aggregator("agg-1", boot=1)
    assert before.fence() == FenceRow(2, "agg-1", 1)
    office = Office(store=before.store, boot=1, now=before.now)
    office.wake()
    office.aggregator("agg-2")
    office.aggregator("agg-1", draining=True, boot=0)
    assert office.fence() == FenceRow(2, "agg-1", 1)


def test_a_task_that_was_never_loaded_moves_at_once() -> None:
    office = two_aggregators()
    office.aggregator("agg-1", draining=True)
    assert office.fence().aggregator == "agg-2"


def test_nothing_is_given_to_an_aggregator_that_is_about_to_stop() -> None:
    office = two_aggregators()
    office.aggregator("agg-2", draining=True)
    office.aggregator("agg-1", DRAINED, draining=True)
    assert office.fence() == FenceRow(1, "agg-1", 0)
    for _ in range(4):  # agg-1 dies
        office.pass_s(H)
        office.aggregator("agg-2", draining=True)
    assert office.fence() == FenceRow(1, "agg-1", 0)
    office.aggregator("agg-2", boot=1, number=1)
    assert office.fence() == FenceRow(2, "agg-2", 1), "until it has restarted"


def test_an_aggregator_learns_whether_others_can_take_its_tasks() -> None:
    office = two_aggregators()
    office.aggregator("agg-1", BUSY, draining=True)
    assert not last_orders(office, "agg-1").is_last
    office.aggregator("agg-2", draining=True)
    office.aggregator("agg-1", BUSY, draining=True)
    assert last_orders(office, "agg-1").is_last


def test_a_new_leader_does_not_call_an_aggregator_the_last_before_it_has_listened() -> None:
    office = two_aggregators()
    second = Office(node="c-1", store=office.store, boot=1)
    second.wake()
    assert second.leads
    second.aggregator("agg-1", BUSY, draining=True)
    assert not last_orders(second, "agg-1").is_last
    second.pass_s(H)
    second.aggregator("agg-1", BUSY, draining=True)
    assert last_orders(second, "agg-1").is_last


def test_a_leader_that_stops_keeps_no_aggregator_waiting() -> None:
    office = two_aggregators()
    office.receive(Drain())
    assert last_orders(office, "agg-1").is_last
    assert last_orders(office, "agg-2").is_last
