"""Held check-ins: who may wait, how long, how many, and what the Coordinator is told of them."""

from __future__ import annotations

from typing import Any

import pytest

from papaya.errors import InvariantError, ProtocolError
from papaya.machine import Effects
from papaya.messages.base import PROTOCOL_VERSION
from papaya.messages.control import Drain, Held
from papaya.messages.participation import Alive, Refused, Retry
from papaya.messages.selection import CheckIn, DeviceClass, Rejected
from tests.unit.selector.builders import (
    BOOT,
    EPOCH,
    NODE,
    PHONE,
    TABLET,
    TASK,
    a_selector,
    accepted,
    advertised,
    an_open_selector,
    answers,
    assign,
    check_in,
    orders,
    rejected,
    report,
)

# --- Who may wait


def test_nobody_waits_at_a_selector_that_knows_no_task() -> None:
    selector = a_selector()
    effects = selector.receive(BOOT, check_in(), "d")
    assert answers(effects) == {"d": Retry("this selector has just started", 2.5)}
    effects = selector.receive(BOOT + 10, check_in(), "d")
    assert rejected(effects) == ["d"]
    assert len(selector.held) == 0


def test_a_device_that_fits_a_task_with_demand_waits() -> None:
    selector = an_open_selector()
    assert answers(selector.receive(BOOT + 1, check_in(), "d")) == {}
    assert len(selector.held) == 1
    selector.check()


def test_a_check_in_that_the_network_doubled_is_held_once() -> None:
    selector = an_open_selector()
    for moment in (1, 2):
        assert answers(selector.receive(BOOT + moment, check_in(), "d")) == {}
        assert len(selector.held) == 1
        selector.check()
    assert rejected(selector.wake(BOOT + 1000)) == ["d"]
    selector.check()


FITS_NOTHING: list[dict[str, Any]] = [
    {"wanting": ()},
    {"wanting": ("another",)},
    {"advertised": ()},
    {"advertised": (advertised(min_memory_mb=513),)},
    {"advertised": (advertised("another"),)},
    {"advertised": (advertised(min_memory_mb=513), advertised("another")), "wanting": (TASK,)},
]


@pytest.mark.parametrize("changes", FITS_NOTHING)
def test_others_are_answered_at_once(changes: dict[str, Any]) -> None:
    """A task must be advertised, want clients, and fit: all three, of one and the same task."""
    selector = an_open_selector()
    selector.receive(BOOT, orders(1, **changes))
    assert rejected(selector.receive(BOOT + 1, check_in(), "d")) == ["d"]
    assert len(selector.held) == 0


def test_a_device_whose_history_rules_the_task_out_does_not_wait() -> None:
    selector = an_open_selector()
    tired = DeviceClass(PHONE.capabilities, excluded=(TASK,))
    assert rejected(selector.receive(BOOT + 1, check_in(tired), "d")) == ["d"]


def test_any_one_of_several_tasks_is_enough() -> None:
    selector = an_open_selector()
    both = (advertised(min_memory_mb=10**6), advertised("emoji"))
    selector.receive(BOOT, orders(1, advertised=both, wanting=(TASK, "emoji")))
    assert rejected(selector.receive(BOOT + 1, check_in(), "d")) == []
    tired = DeviceClass(PHONE.capabilities, excluded=("emoji",))
    assert rejected(selector.receive(BOOT + 1, check_in(tired), "e")) == ["e"]


@pytest.mark.parametrize("changes", FITS_NOTHING)
def test_what_is_wanted_is_read_from_the_newest_orders(changes: dict[str, Any]) -> None:
    selector = an_open_selector()
    assert rejected(selector.receive(BOOT + 1, check_in(), "first")) == []
    selector.receive(BOOT + 2, orders(1, **changes))
    assert rejected(selector.receive(BOOT + 3, check_in(), "second")) == ["second"]
    selector.receive(BOOT + 4, orders(2))
    assert rejected(selector.receive(BOOT + 5, check_in(), "third")) == []
    assert len(selector.held) == 2


@pytest.mark.parametrize("protocol", [0, PROTOCOL_VERSION + 1, -1])
def test_another_protocol_is_refused_with_a_hint(protocol: int) -> None:
    selector = an_open_selector()
    effects = selector.receive(BOOT, CheckIn(protocol, PHONE.capabilities), "d")
    answer = answers(effects)["d"]
    assert isinstance(answer, Refused)
    assert str(protocol) in answer.reason
    assert answer.hint == "update the client"
    assert len(selector.held) == 0


# --- How long


def test_a_held_device_is_rejected_when_its_time_is_up_and_not_before() -> None:
    selector = an_open_selector(hold_s=20.0, heartbeat_s=1000.0)
    selector.receive(BOOT + 1, check_in(), "first")
    selector.receive(BOOT + 5, check_in(), "second")
    assert rejected(selector.wake(BOOT + 20.9)) == []
    assert BOOT + 21 <= selector.next_wake() <= BOOT + 21.5
    assert rejected(selector.wake(BOOT + 21)) == ["first"]
    assert rejected(selector.wake(BOOT + 24.9)) == []
    assert rejected(selector.wake(BOOT + 25)) == ["second"]
    assert len(selector.held) == 0
    assert answers(selector.wake(BOOT + 60)) == {}
    selector.check()


def test_a_device_is_answered_soon_after_its_time_however_busy_the_selector() -> None:
    """Deadlines are swept together: at most one sweep every held_report_interval_s."""
    selector = an_open_selector(hold_s=20.0, held_report_interval_s=0.5, heartbeat_s=1000.0)
    due = {number: BOOT + 21 + number / 100 for number in range(300)}
    for number, at in due.items():
        selector.receive(at - 20.0, check_in(), number)
    now, wakes, late_s = BOOT + 4.0, 0, []
    while selector.held:
        now, wakes = max(now, selector.next_wake()), wakes + 1
        gone = rejected(selector.wake(now))
        late_s += [now - at for number, at in due.items() if number in gone]
    assert len(late_s) == 300
    assert min(late_s) >= -1e-9
    assert max(late_s) <= 0.5 + 1e-9
    assert wakes < 50


def test_a_late_wake_answers_everyone_who_is_due() -> None:
    selector = an_open_selector(hold_s=20.0)
    for number in range(5):
        device = PHONE if number % 2 else TABLET
        selector.receive(BOOT + number, check_in(device), number)
    assert rejected(selector.wake(BOOT + 23)) == [0, 1, 2, 3]
    assert len(selector.held) == 1
    selector.check()


def test_an_accepted_device_is_not_answered_again_when_its_time_is_up() -> None:
    selector = an_open_selector()
    selector.receive(BOOT + 1, check_in(), "d")
    effects = selector.receive(BOOT + 2, orders(1, assignments=(assign("s1"),)))
    assert list(answers(effects)) == ["d"]
    assert answers(selector.wake(BOOT + 100)) == {}
    selector.check()


def window(effects: Effects) -> tuple[float, float]:
    [answer] = answers(effects).values()
    assert isinstance(answer, Rejected)
    return answer.retry_from_s, answer.retry_until_s


def test_a_rejected_device_is_told_when_to_come_back() -> None:
    selector = a_selector(min_retry_s=6.0)
    selector.receive(BOOT, orders(1, wanting=()))
    assert window(selector.receive(BOOT + 1, check_in(), "d")) == (3.0, 9.0)


def test_during_recovery_devices_are_sent_to_its_end_and_spread_over_as_long_again() -> None:
    selector = a_selector(min_retry_s=6.0)
    selector.receive(BOOT, orders(1, wanting=(), assigns_in_s=30.0))
    assert window(selector.receive(BOOT, check_in(), "early")) == (30 + 3, 60 + 9)
    assert window(selector.receive(BOOT + 20, check_in(), "late")) == (10 + 3, 20 + 9)
    assert window(selector.receive(BOOT + 30, check_in(), "after")) == (3.0, 9.0)


def test_while_nobody_leads_devices_are_sent_behind_the_recovery_of_the_next_leader() -> None:
    selector = a_selector(min_retry_s=6.0)
    assert window(selector.receive(BOOT + 50, check_in(), "d")) == (30 + 3, 60 + 9)


# --- The process stops


def test_a_selector_that_stops_sends_everyone_to_another_one() -> None:
    selector = an_open_selector()
    selector.receive(BOOT + 1, check_in(), "held")
    effects = selector.receive(BOOT + 2, Drain())
    assert answers(effects) == {"held": Retry("this selector is stopping", 1.0)}
    told = report(effects)
    assert told is not None, "the leader must assign nobody to it"
    assert told.held == ()
    late = selector.receive(BOOT + 3, check_in(), "late")
    assert answers(late) == {"late": Retry("this selector is stopping", 1.0)}
    unfilled = report(selector.receive(BOOT + 4, orders(1, assignments=(assign("s1"),))))
    assert unfilled is not None
    assert unfilled.unfilled == ("s1",)
    selector.check()


def test_a_selector_that_stops_alone_names_the_time_after_its_restart() -> None:
    selector = an_open_selector(min_retry_s=6.0)
    selector.receive(BOOT + 1, check_in(), "held")
    assert window(selector.receive(BOOT + 2, Drain(is_alone=True))) == (30 + 3, 60 + 9)


# --- How many


def test_no_more_wait_than_may() -> None:
    selector = an_open_selector(max_held=3)
    for number in range(3):
        assert rejected(selector.receive(BOOT + 1, check_in(), number)) == []
    assert rejected(selector.receive(BOOT + 1, check_in(), "fourth")) == ["fourth"]
    assert rejected(selector.receive(BOOT + 1, check_in(TABLET), "fifth")) == ["fifth"]
    assert len(selector.held) == 3
    selector.check()


def test_whoever_leaves_makes_room() -> None:
    selector = an_open_selector(max_held=2, hold_s=20.0)
    selector.receive(BOOT + 1, check_in(), "first")
    selector.receive(BOOT + 2, check_in(), "second")
    selector.receive(BOOT + 3, orders(1, assignments=(assign("s1"),)))
    assert rejected(selector.receive(BOOT + 4, check_in(), "third")) == []
    assert rejected(selector.wake(BOOT + 22)) == ["second"]
    assert rejected(selector.receive(BOOT + 22, check_in(), "fourth")) == []
    assert rejected(selector.receive(BOOT + 22, check_in(), "fifth")) == ["fifth"]
    selector.check()


def test_a_selector_that_miscounts_says_so() -> None:
    selector = an_open_selector(max_held=2)
    selector.receive(BOOT + 1, check_in(), "d")
    selector.held.in_order.clear()
    with pytest.raises(InvariantError, match="0 held check-ins, 1 by class"):
        selector.check()


# --- What the Coordinator is told


def test_a_selector_reports_when_it_boots() -> None:
    selector = a_selector()
    assert selector.next_wake() == BOOT
    first = report(selector.wake(BOOT))
    assert first is not None
    assert (first.node, first.boot, first.number) == (NODE, BOOT, 1)
    assert (first.epoch, first.acked, first.held, first.unfilled) == (0, 0, (), ())


def test_a_selector_with_nobody_waiting_reports_every_heartbeat() -> None:
    selector = a_selector(heartbeat_s=10.0)
    selector.wake(BOOT)
    assert selector.next_wake() == BOOT + 10
    assert report(selector.wake(BOOT + 9.9)) is None
    second = report(selector.wake(BOOT + 10))
    third = report(selector.wake(BOOT + 20))
    assert second is not None
    assert third is not None
    assert (second.number, third.number) == (2, 3)


def test_held_devices_are_reported_by_class() -> None:
    selector = an_open_selector(heartbeat_s=10.0, hold_s=60.0)
    for number, device in enumerate((PHONE, TABLET, PHONE, PHONE)):
        selector.receive(BOOT + 1, check_in(device), number)
    found = report(selector.wake(BOOT + 10))
    assert found is not None
    assert found.held == (Held(PHONE, 3), Held(TABLET, 1))
    assert (found.epoch, found.acked) == (EPOCH, 0)


def test_devices_that_left_are_reported_no_more() -> None:
    selector = an_open_selector(hold_s=5.0, heartbeat_s=10.0)
    selector.receive(BOOT + 1, check_in(PHONE), "phone")
    selector.receive(BOOT + 2, check_in(TABLET), "tablet")
    selector.receive(BOOT + 3, orders(1, assignments=(assign("s1"),)))
    selector.wake(BOOT + 7)
    found = report(selector.wake(BOOT + 10))
    assert found is not None
    assert found.held == ()
    assert found.acked == 1


def test_devices_whose_time_was_up_are_missed_from_the_next_report_soon() -> None:
    """Else the Coordinator would assign sessions to devices that are gone."""
    selector = an_open_selector(hold_s=5.0, heartbeat_s=100.0, held_report_interval_s=0.5)
    assert report(selector.receive(BOOT + 1, check_in(), "d")) is not None
    effects = selector.wake(BOOT + 6)
    found = report(effects) or report(selector.wake(BOOT + 6.5))
    assert found is not None
    assert found.held == ()


def test_the_first_of_a_class_is_reported_at_once_and_more_of_it_a_little_later() -> None:
    """A task may be waiting for just this device; one more of a hundred can wait half a second."""
    selector = an_open_selector(min_report_interval_s=0.02, held_report_interval_s=0.5)
    first = report(selector.receive(BOOT + 1, check_in(PHONE), 0))
    assert first is not None
    assert first.held == (Held(PHONE, 1),)
    assert report(selector.receive(BOOT + 1.1, check_in(PHONE), 1)) is None
    assert selector.next_wake() == BOOT + 1.5
    second = report(selector.wake(BOOT + 1.5))
    assert second is not None
    assert second.held == (Held(PHONE, 2),)


def test_urgent_reports_keep_their_distance() -> None:
    selector = an_open_selector(min_report_interval_s=0.02)
    assert report(selector.receive(BOOT + 1, check_in(PHONE), 0)) is not None
    assert report(selector.receive(BOOT + 1.001, check_in(TABLET), 1)) is None
    assert selector.next_wake() == pytest.approx(BOOT + 1.02)
    found = report(selector.wake(selector.next_wake()))
    assert found is not None
    assert [held.count for held in found.held] == [1, 1]


def test_a_flood_of_check_ins_is_no_flood_of_reports() -> None:
    selector = an_open_selector(heartbeat_s=1.0, held_report_interval_s=0.5, max_held=10**6)
    sent = 0
    for number in range(10_000):
        now = BOOT + 1 + number / 1000
        sent += report(selector.receive(now, check_in(), number)) is not None
        sent += report(selector.wake(now)) is not None
    assert 10 <= sent <= 35


# --- What is no message for a selector


def test_a_message_for_somebody_else_is_refused_and_changes_nothing() -> None:
    selector = an_open_selector()
    selector.receive(BOOT + 1, check_in(), "d")
    with pytest.raises(ProtocolError, match="does not accept Alive"):
        selector.receive(BOOT + 2, Alive(), "x")
    assert len(selector.held) == 1
    effects = selector.receive(BOOT + 2, orders(1, assignments=(assign("s1"),)))
    assert accepted(effects) == {"d": "s1"}
