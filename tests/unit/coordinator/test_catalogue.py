"""What selectors are told of tasks and routes: in full until they have it, and once per change."""

from __future__ import annotations

from papaya.coordinator.known_rows import KnownRows
from papaya.machine import Transact
from papaya.messages.control import SelectorOrders, SelectorReport
from papaya.messages.storage import Changed, TaskRow, submission, task_key
from tests.unit.coordinator.builders import (
    SERVER,
    H,
    Office,
    a_served_office,
    a_task,
    an_office,
    on,
    orders_in,
)


def answer_to(office: Office, catalogue: int, epoch: int | None = None) -> SelectorOrders:
    office._numbers["sel-1"] = number = office._numbers.get("sel-1", 0) + 1
    epoch = office.machine.leadership.epoch if epoch is None else epoch
    report = SelectorReport("sel-1", 0, number, epoch, 0, (), (), office.now, catalogue)
    [orders] = orders_in(office.receive(report), SelectorOrders, "sel-1")
    return orders


def test_a_selector_that_has_the_catalogue_is_not_told_it_again() -> None:
    office = a_served_office(a_task())
    full = answer_to(office, catalogue=0)
    assert not full.is_short
    assert [offer.task for offer in full.advertised] == ["words"]
    assert [route.aggregator for route in full.routes] == ["agg-1"]
    short = answer_to(office, full.catalogue)
    assert (short.is_short, short.catalogue) == (True, full.catalogue)
    assert (short.advertised, short.routes, short.over) == ((), (), ())
    assert short.wanting == full.wanting == ("words",)


def test_a_selector_without_a_catalogue_is_told_that_there_are_no_tasks() -> None:
    """It ignores short orders for a catalogue that it does not have, and would report at once."""
    office = an_office()
    full = answer_to(office, catalogue=0)
    assert (full.is_short, full.advertised, full.routes) == (False, (), ())
    assert answer_to(office, full.catalogue).is_short


def test_a_changed_catalogue_has_the_next_number() -> None:
    office = a_served_office(a_task())
    known = answer_to(office, 0).catalogue
    office.pass_s(H)  # the same rows again
    assert answer_to(office, known).is_short
    office.store.apply(submission(a_task(task="more"), "p", "o", office.now))
    office.receive(Changed())
    told = answer_to(office, known)
    assert not told.is_short
    assert told.catalogue > known
    assert [offer.task for offer in told.advertised] == ["more", "words"]


def test_a_catalogue_of_another_leader_is_not_known() -> None:
    office = a_served_office(a_task())
    known = answer_to(office, 0).catalogue
    assert not answer_to(office, known, epoch=office.machine.leadership.epoch - 1).is_short


def test_selectors_are_told_once_of_tasks_that_are_placed_together() -> None:
    tasks = [a_task(task=f"task-{i}") for i in range(5)]
    office = an_office(*tasks)
    office.selector("sel-1")
    office.hold(Transact)
    office.aggregator("agg-1")
    before = len(office.sent)
    office.release()
    assert len(office.transactions()) == len(tasks)
    [told] = orders_in(office.sent[before:], SelectorOrders, "sel-1")
    assert len(told.routes) == len(tasks)


def test_tasks_that_begin_to_want_clients_are_announced_together() -> None:
    tasks = [a_task(task=f"task-{i}") for i in range(4)]
    office = a_served_office(*tasks, demand=0)
    office.selector("sel-1")
    office.pass_s(1.0)
    before = len(office.sent)
    for wanting in range(1, 5):
        reports = [on(t.task, 1, demand=int(i < wanting)) for i, t in enumerate(tasks)]
        office.aggregator("agg-1", *reports, heartbeat=False)
    told = orders_in(office.sent[before:], SelectorOrders, "sel-1")
    assert [len(orders.wanting) for orders in told] == [1], "the first at once"
    office.pass_s(SERVER.min_report_interval_s)
    told = orders_in(office.sent[before:], SelectorOrders, "sel-1")
    assert [len(orders.wanting) for orders in told] == [1, 4], "the others in one message"
    assert office.machine.next_wake() > office.now + SERVER.min_report_interval_s


def test_selectors_are_told_of_the_tasks_that_ended_last_if_there_are_too_many() -> None:
    """Else clients of a task that has just ended would be told to try again. Most are evaluations,
    of which there may be hundreds in an hour.
    """
    rows, many = KnownRows(), 300
    names = [f"task-{number:03}" for number in range(many)]
    found = {
        task_key(name): TaskRow(a_task(name), state="completed", ended=float(many - number))
        for number, name in enumerate(names)
    }
    rows.load(float(many), found)
    assert rows.over == tuple(names[:256])
