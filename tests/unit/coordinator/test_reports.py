"""Reports come late, twice and out of order; orders answer them and acknowledge what arrived."""

from __future__ import annotations

import pytest
from msgspec import structs

from papaya.config import Requirements, StopRule
from papaya.errors import ProtocolError
from papaya.machine import Read
from papaya.messages.control import Advertised, AggregatorOrders, Route, SelectorOrders
from papaya.messages.selection import Capabilities, CheckIn
from papaya.messages.storage import TaskRow, task_key
from tests.unit.coordinator.builders import (
    PHONE,
    SERVER,
    H,
    Office,
    a_served_office,
    a_task,
    an_office,
    needing,
    on,
    orders_in,
    sessions_in,
)

# -- aggregators ------------------------------------------------------------------------------


def test_a_doubled_report_is_heard_once() -> None:
    office = a_served_office(a_task(), demand=2)
    assert office.aggregator("agg-1", on("words", 1, demand=4), number=2) == []
    assert office.machine.demand.of("words") == 2


def test_a_report_that_was_overtaken_is_ignored() -> None:
    office = a_served_office(a_task(), demand=0)
    office.aggregator("agg-1", on("words", 1, demand=1), number=9)
    office.aggregator("agg-1", on("words", 1, demand=4), number=8)
    assert office.machine.demand.of("words") == 1


def test_an_overtaken_report_is_no_sign_of_life() -> None:
    office = a_served_office(a_task())
    office.aggregator("agg-2")
    for _ in range(3):
        office.pass_s(H)
        office.aggregator("agg-1", on("words", 1, demand=4), number=1)
        office.aggregator("agg-2")
    assert office.fence().aggregator == "agg-2"


def test_a_report_of_an_earlier_boot_is_ignored() -> None:
    office = an_office(a_task())
    office.aggregator("agg-1", boot=5, number=1)
    office.aggregator("agg-1", on("words", 1, demand=2), boot=5, number=2)
    assert office.aggregator("agg-1", on("words", 1, demand=4), boot=4, number=900) == []
    assert office.machine.demand.of("words") == 2
    assert (office.fence().seq, office.fence().boot) == (1, 5.0)


def test_a_later_boot_counts_from_its_own_first_report() -> None:
    office = an_office(a_task())
    office.aggregator("agg-1", boot=5, number=900)
    office.aggregator("agg-1", boot=6, number=1)
    office.aggregator("agg-1", on("words", 2, demand=3), boot=6, number=2)
    assert office.machine.demand.of("words") == 3


def test_a_heartbeat_is_answered_with_orders_that_acknowledge_it() -> None:
    office = a_served_office(a_task())
    [orders] = orders_in(office.aggregator("agg-1", number=41), AggregatorOrders)
    assert (orders.acked, orders.boot, orders.leader, orders.epoch) == (41, 0.0, "c-1", 1)


def test_a_report_between_heartbeats_is_not_answered() -> None:
    office = a_served_office(a_task())
    assert office.aggregator("agg-1", on("words", 1, demand=1), heartbeat=False) == []


def test_many_joins_are_acknowledged_at_once() -> None:
    """Or a burst of joins would make every report of the next seconds longer."""
    office = a_served_office(a_task(concurrency=100), demand=100)
    joined = tuple(sessions_in(office.selector("sel-1", 100)))
    report = on("words", 1, active=100, demand=0, joined=joined)
    sends = office.aggregator("agg-1", report, heartbeat=False, number=77)
    [orders] = orders_in(sends, AggregatorOrders)
    assert orders.acked == 77


def test_orders_are_numbered_upwards() -> None:
    office = a_served_office(a_task())
    for _ in range(3):
        office.aggregator("agg-1")
        office.selector("sel-1")
    for kind in (AggregatorOrders, SelectorOrders):
        numbers = [send.message.number for send in office.sent if isinstance(send.message, kind)]
        assert numbers == sorted(set(numbers))


# -- selectors --------------------------------------------------------------------------------


def test_every_report_of_a_selector_refreshes_its_map() -> None:
    """ "assignment maps [...] refreshed from coordinator on every report"."""
    office = a_served_office(a_task())
    [orders] = orders_in(office.selector("sel-1", 0, number=5), SelectorOrders, "sel-1")
    assert orders.routes == (Route("words", "agg-1", 1),)
    assert orders.advertised == (Advertised("words", Requirements()),)
    assert orders.wanting == ("words",)
    assert orders.acked == 5


def test_a_task_that_nobody_holds_has_no_route() -> None:
    office = an_office(a_task())
    [orders] = orders_in(office.selector("sel-1"), SelectorOrders)
    assert orders.routes == ()
    assert orders.wanting == ()
    assert [offer.task for offer in orders.advertised] == ["words"]


def test_requirements_are_advertised() -> None:
    office = a_served_office(needing("words", engine="torch", min_memory_mb=64))
    [orders] = orders_in(office.selector("sel-1"), SelectorOrders)
    assert orders.advertised == (
        Advertised("words", Requirements(engine="torch", min_memory_mb=64)),
    )


def test_a_new_task_is_found_within_a_heartbeat() -> None:
    office = a_served_office(a_task())
    office.store.rows[task_key("images")] = TaskRow(a_task("images"))
    office.store.rows["fence/images"] = office.fence()
    office.pass_s(H)
    [orders] = orders_in(office.selector("sel-1"), SelectorOrders)
    assert [offer.task for offer in orders.advertised] == ["images", "words"]


def test_a_doubled_report_of_held_clients_is_not_served_twice() -> None:
    office = a_served_office(a_task(), demand=4)
    assert len(sessions_in(office.selector("sel-1", 2, number=1))) == 2
    assert office.selector("sel-1", 2, number=1) == []
    assert office.machine.leases.count("words") == 2


def test_an_overtaken_report_of_held_clients_is_ignored() -> None:
    office = a_served_office(a_task(), demand=0)
    office.selector("sel-1", 0, number=9)
    office.selector("sel-1", 5, number=8)
    assert sessions_in(office.aggregator("agg-1", on("words", 1, demand=4))) == []


def test_a_restarted_selector_holds_what_it_says() -> None:
    office = a_served_office(a_task(), demand=0)
    office.selector("sel-1", 5, boot=1, number=900)
    office.selector("sel-1", 1, boot=2, number=1)
    office.selector("sel-1", 9, boot=1, number=901)
    sends = office.aggregator("agg-1", on("words", 1, demand=4))
    assert len(sessions_in(sends)) == 1
    [orders] = orders_in(sends, SelectorOrders)
    assert orders.boot == 2.0


def test_the_pace_is_shared_by_the_selectors() -> None:
    """1.5 x what is expected: sessions that end per second, and demand within a heartbeat."""
    office = a_served_office(a_task(concurrency=100), demand=0)
    office.aggregator("agg-1", on("words", 1, demand=0, ended=100))
    office.now += H
    office.aggregator("agg-1", on("words", 1, demand=20, ended=180))
    [alone] = orders_in(office.selector("sel-1"), SelectorOrders)
    assert alone.check_ins_per_s == pytest.approx(SERVER.pace * (8 + 2))
    [shared] = orders_in(office.selector("sel-2"), SelectorOrders)
    assert shared.check_ins_per_s == pytest.approx(SERVER.pace * (8 + 2) / 2)


def test_a_task_whose_clients_come_and_go_is_wanting_before_it_has_demand() -> None:
    office = a_served_office(a_task(), demand=0)
    [orders] = orders_in(office.selector("sel-1"), SelectorOrders)
    assert orders.wanting == ()
    office.aggregator("agg-1", on("words", 1, demand=0, ended=0))
    office.now += H
    office.aggregator("agg-1", on("words", 1, demand=0, ended=10))
    [orders] = orders_in(office.selector("sel-1"), SelectorOrders)
    assert orders.wanting == ("words",)


def test_a_task_with_its_last_version_wants_nobody_although_its_clients_have_just_ended() -> None:
    office = a_served_office(a_task(stop=StopRule(versions=1)), demand=0)
    office.aggregator("agg-1", on("words", 1, demand=0, ended=0))
    office.now += H
    office.aggregator("agg-1", on("words", 1, demand=0, ended=10, version=1))
    [orders] = orders_in(office.selector("sel-1"), SelectorOrders)
    assert orders.wanting == ()
    assert orders.check_ins_per_s == 0.0


def test_a_coordinator_never_speaks_to_a_device() -> None:
    office = an_office()
    with pytest.raises(ProtocolError, match="CheckIn"):
        office.receive(CheckIn(1, PHONE.capabilities))
    assert PHONE.capabilities == Capabilities()


def test_a_new_leader_answers_selectors_that_reported_before_it_led() -> None:
    """Otherwise devices are sent away until their next report, a heartbeat later."""
    office = Office(a_task())
    office.selector("sel-1", 5)
    assert office.sent == []
    office.wake()
    [orders] = orders_in(office.sent, SelectorOrders, "sel-1")
    assert orders.assigns_in_s == 0.0
    second = Office(node="c-1", store=office.store, boot=1)
    second.selector("sel-1", 5)
    second.wake()
    [orders] = orders_in(second.sent, SelectorOrders, "sel-1")
    assert orders.assigns_in_s == 3 * H, "it recovers"


def test_selectors_learn_at_once_that_a_task_begins_to_want_clients() -> None:
    office = a_served_office(a_task(), demand=0)
    office.selector("sel-1")
    office.selector("sel-2", 2)
    before = len(office.sent)
    sends = office.aggregator("agg-1", on("words", 1, demand=4), heartbeat=False)
    assert [orders.wanting for orders in orders_in(sends, SelectorOrders, "sel-1")] == [("words",)]
    assert len(sessions_in(office.sent[before:])) == 2
    assert len(orders_in(sends, SelectorOrders, "sel-2")) == 1, "with the assignments, not again"
    sends = office.aggregator("agg-1", on("words", 1, demand=3), heartbeat=False)
    assert orders_in(sends, SelectorOrders) == [], "they know"


def test_a_new_leader_places_tasks_one_heartbeat_after_it_was_elected() -> None:
    """Not two: the heartbeat that comes first is a moment too early."""
    office = Office(a_task())
    office.hold(Read)
    office.wake()
    office.pass_s(0.1)
    office.release()
    assert office.leads
    office.aggregator("agg-1")
    office.pass_s(H)
    assert office.fence().aggregator == "agg-1"


def test_a_task_that_has_ended_is_forgotten() -> None:
    office = a_served_office(a_task())
    assert list(office.machine._active) == ["words"]
    row = office.store.rows[task_key("words")]
    assert isinstance(row, TaskRow)
    office.store.rows[task_key("words")] = structs.replace(row, state="cancelled", ended=office.now)
    office.pass_s(H)
    assert office.machine._active == {}
