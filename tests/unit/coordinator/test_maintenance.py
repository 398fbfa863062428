"""Maintenance: no client is assigned; stopped: no task is placed. Then everything goes on."""

from __future__ import annotations

import pytest

from papaya.messages.control import SelectorOrders
from papaya.messages.storage import (
    MAINTENANCE_KEY,
    Changed,
    FenceRow,
    MaintenanceRow,
    Outcome,
    Transaction,
    fence_key,
    submission,
)
from tests.unit.coordinator.builders import (
    H,
    Office,
    a_served_office,
    a_task,
    on,
    orders_in,
    sessions_in,
)


def begin(office: Office, *, is_stopped: bool) -> None:
    row = MaintenanceRow(office.now, office.now + 600.0, is_stopped, "admin", "a new disk")
    put = [(MAINTENANCE_KEY, row)]
    fences = ((fence_key("words"), FenceRow(2, "", 0)),) if is_stopped else ()
    office.store.apply(Transaction(put=(*put, *fences)))
    office.receive(Changed())


def end(office: Office) -> None:
    office.store.apply(Transaction(delete=(MAINTENANCE_KEY,)))
    office.receive(Changed())


@pytest.mark.parametrize("is_stopped", [False, True])
def test_no_client_is_assigned_until_it_ends(is_stopped: bool) -> None:
    office = a_served_office(a_task())
    begin(office, is_stopped=is_stopped)
    [order] = orders_in(office.selector("sel-1", 5), SelectorOrders)
    assert (order.assignments, order.advertised, order.wanting) == ((), (), ())
    assert order.assigns_in_s == pytest.approx(600.0)
    assert len(order.routes) == (0 if is_stopped else 1), "clients that train may finish"
    before = len(office.sent)
    office.aggregator("agg-1", on("words", 1, demand=4))
    assert sessions_in(office.sent[before:]) == []
    end(office)
    office.aggregator("agg-1", on("words", 1, demand=4))
    office.aggregator("agg-1", on("words", office.fence().seq, demand=4))
    assert len(sessions_in(office.sent[before:])) == 4


def test_a_stopped_task_is_placed_again_only_when_training_goes_on() -> None:
    office = a_served_office(a_task())
    begin(office, is_stopped=True)
    for _ in range(5):
        office.aggregator("agg-1")
        office.pass_s(H)
    assert office.fence() == FenceRow(2, "", 0)
    end(office)
    office.aggregator("agg-1")
    assert office.fence() == FenceRow(3, "agg-1", 0)


def test_devices_are_not_sent_away_for_longer_and_longer() -> None:
    office = a_served_office(a_task())
    [before] = orders_in(office.selector("sel-1", 0), SelectorOrders)
    assert before.check_ins_per_s > 0
    begin(office, is_stopped=True)
    office.pass_s(H)
    [order] = orders_in(office.selector("sel-1", 0), SelectorOrders)
    assert order.check_ins_per_s == before.check_ins_per_s


def test_a_task_that_nobody_held_is_not_told_as_released() -> None:
    office = a_served_office(a_task())
    begin(office, is_stopped=True)
    before = len(office.events)
    office.store.apply(Transaction(put=((fence_key("words"), FenceRow(3, "", 0)),)))
    office.receive(Changed())
    assert office.events[before:] == []


def test_a_task_that_is_submitted_during_a_stop_is_not_placed_by_a_leader_that_missed_it() -> None:
    """The stop could not raise its fence: the task did not exist yet."""
    office = a_served_office(a_task())
    row = MaintenanceRow(office.now, 0.0, True, "admin", "")
    put = ((MAINTENANCE_KEY, row), (fence_key("words"), FenceRow(2, "", 0)))
    submitted = submission(a_task(task="late"), "late/0/p", "late/0/o", office.now)
    real, held = office.store.apply, list[Transaction]()

    def stop_first(transaction: Transaction) -> Outcome:
        """The stop is committed after the leader has read the rows, and before it places."""
        if not held:
            held.append(transaction)
            real(Transaction(put=put))
        return real(transaction)

    office.store.apply(submitted)
    office.store.apply = stop_first  # type: ignore[method-assign]
    office.receive(Changed())
    office.aggregator("agg-1")
    assert held, "it tried to place the task"
    assert office.fence("late") == FenceRow(0, "", 0)
