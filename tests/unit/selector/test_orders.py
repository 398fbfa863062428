"""Orders: each session goes to one held device or comes back, whatever the network does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.machine import Effects
from papaya.messages.control import Held, SelectorReport
from papaya.messages.selection import Accepted
from papaya.messages.tickets import AssignmentTicket
from papaya.selector.selector import Selector
from tests.unit.selector.builders import (
    BOOT,
    CONFIRM_BY,
    EPOCH,
    KEYRING,
    PHONE,
    SEQ,
    TABLET,
    TASK,
    VERSION,
    accepted,
    an_open_selector,
    answers,
    assign,
    check_in,
    orders,
    rejected,
    report,
)


def holding(*devices: str, **config: float) -> Selector:
    """Phones wait in this order."""
    selector = an_open_selector(**{"hold_s": 500.0, "heartbeat_s": 100.0, **config})
    for number, device in enumerate(devices):
        selector.receive(BOOT + number / 100, check_in(PHONE), device)
    return selector


def next_report(selector: Selector, effects: Effects) -> SelectorReport:
    """The report in these effects, or the one that goes out next."""
    found = report(effects)
    while found is None:
        found = report(selector.wake(selector.next_wake()))
    return found


GHOST = (assign("ghost"),)


# --- Accepting


def test_no_device_is_sent_to_a_task_that_has_ended() -> None:
    selector = holding("a")
    selector.receive(BOOT + 1, orders(2, advertised=(), wanting=(), routes=(), over=(TASK,)))
    late = selector.receive(BOOT + 1, orders(1, assignments=(assign("s1"),)))
    assert accepted(late) == {}
    assert next_report(selector, late).unfilled == ("s1",)


def test_the_oldest_held_device_goes_first() -> None:
    selector = holding("a", "b", "c", "d")
    effects = selector.receive(BOOT + 1, orders(1, assignments=(assign("s1", "s2"),)))
    assert accepted(effects) == {"a": "s1", "b": "s2"}
    effects = selector.receive(BOOT + 2, orders(2, assignments=(assign("s3"),)))
    assert accepted(effects) == {"c": "s3"}
    assert len(selector.held) == 1
    selector.check()


def test_each_accepted_device_gets_a_valid_ticket_of_its_own() -> None:
    selector = holding("a", "b")
    effects = selector.receive(BOOT + 1, orders(1, assignments=(assign("s1", "s2"),)))
    for device, session in (("a", "s1"), ("b", "s2")):
        answer = answers(effects)[device]
        assert isinstance(answer, Accepted)
        assert (answer.task, answer.session) == (TASK, session)
        ticket = KEYRING.open(answer.ticket, AssignmentTicket)
        assert ticket == AssignmentTicket(TASK, session, SEQ, CONFIRM_BY, VERSION, epoch=EPOCH)


def test_only_devices_of_the_named_class_are_forwarded() -> None:
    selector = holding("phone-1", "phone-2")
    selector.receive(BOOT + 1, check_in(TABLET), "tablet")
    effects = selector.receive(BOOT + 2, orders(1, assignments=(assign("s1", to=TABLET),)))
    assert accepted(effects) == {"tablet": "s1"}
    assert len(selector.held) == 2


def test_orders_for_several_tasks_are_filled_from_one_queue() -> None:
    selector = holding("a", "b", "c")
    both = (assign("s1"), assign("s2", task="emoji"))
    effects = selector.receive(BOOT + 1, orders(1, assignments=both))
    assert accepted(effects) == {"a": "s1", "b": "s2"}
    answer = answers(effects)["b"]
    assert isinstance(answer, Accepted)
    assert answer.task == "emoji"


# --- Unfilled


def test_sessions_that_find_no_device_are_reported_at_once() -> None:
    selector = holding("a")
    effects = selector.receive(BOOT + 1, orders(1, assignments=(assign("s1", "s2", "s3"),)))
    assert accepted(effects) == {"a": "s1"}
    assert report(effects) is not None or selector.next_wake() <= BOOT + 1.02
    found = next_report(selector, effects)
    assert found.unfilled == ("s2", "s3")
    assert found.held == ()


def test_unfilled_sessions_are_repeated_until_a_report_that_carried_them_is_acknowledged() -> None:
    selector = holding()
    before = next_report(selector, [])
    lost = next_report(selector, selector.receive(BOOT + 200, orders(1, assignments=GHOST)))
    again = next_report(selector, [])
    assert before.unfilled == ()
    assert lost.unfilled == again.unfilled == ("ghost",)
    selector.receive(BOOT + 400, orders(2, acked=before.number))
    assert next_report(selector, []).unfilled == ("ghost",)
    selector.receive(BOOT + 600, orders(3, acked=lost.number))
    assert next_report(selector, []).unfilled == ()


def test_a_later_report_acknowledges_as_well() -> None:
    selector = holding()
    next_report(selector, selector.receive(BOOT + 1, orders(1, assignments=GHOST)))
    again = next_report(selector, [])
    selector.receive(BOOT + 400, orders(2, acked=again.number))
    assert next_report(selector, []).unfilled == ()


def test_an_acknowledgement_does_not_cover_what_came_after_it() -> None:
    selector = holding()
    first = next_report(selector, selector.receive(BOOT + 1, orders(1, assignments=GHOST)))
    late = orders(2, acked=first.number, assignments=(assign("other"),))
    second = next_report(selector, selector.receive(BOOT + 2, late))
    assert second.unfilled == ("other",)


def test_a_device_that_comes_later_does_not_get_an_unfilled_session() -> None:
    """Its lease has ended: the Coordinator may have given the place away."""
    selector = holding()
    selector.receive(BOOT + 1, orders(1, assignments=GHOST))
    assert answers(selector.receive(BOOT + 2, check_in(), "late")) == {}


# --- Doubled, reordered, old, foreign


def test_doubled_orders_are_carried_out_once() -> None:
    selector = holding("a", "b", "c")
    twice = orders(1, assignments=(assign("s1"),))
    assert accepted(selector.receive(BOOT + 1, twice)) == {"a": "s1"}
    effects = selector.receive(BOOT + 2, twice)
    assert answers(effects) == {}
    assert next_report(selector, effects).unfilled == ()
    assert len(selector.held) == 2


def test_orders_doubled_after_a_thousand_others_are_still_known() -> None:
    """At one order every 20 ms that takes 22 s: an assignment can be confirmed for 30 s."""
    selector = holding("a", "b")
    twice = orders(1, assignments=(assign("s1"),))
    selector.receive(BOOT + 1, twice)
    for number in range(2, 1100):
        selector.receive(BOOT + 1 + number / 50, orders(number))
    assert accepted(selector.receive(BOOT + 25, twice)) == {}


def test_orders_are_known_for_as_long_as_an_assignment_can_be_confirmed() -> None:
    selector = an_open_selector(heartbeat_s=10.0, hold_s=500.0)
    for device in ("a", "b"):
        selector.receive(BOOT, check_in(), device)
    twice = orders(1, assignments=(assign("s1"),))
    selector.receive(BOOT + 1, twice)
    for beat in (10, 20, 30):
        selector.wake(BOOT + beat)
    assert accepted(selector.receive(BOOT + 30.9, twice)) == {}


def test_overtaken_orders_still_assign_but_do_not_bring_old_news_back() -> None:
    selector = holding("a", "b")
    newer = orders(2, wanting=(), assignments=(assign("s2"),))
    older = orders(1, wanting=(TASK,), assignments=(assign("s1"),))
    assert accepted(selector.receive(BOOT + 1, newer)) == {"a": "s2"}
    assert accepted(selector.receive(BOOT + 2, older)) == {"b": "s1"}
    assert rejected(selector.receive(BOOT + 3, check_in(), "c")) == ["c"]
    assert next_report(selector, []).acked == 2


def test_overtaken_orders_do_not_bring_an_old_acknowledgement_back() -> None:
    selector = holding()
    first = next_report(selector, selector.receive(BOOT + 1, orders(1, assignments=GHOST)))
    selector.receive(BOOT + 2, orders(3, acked=first.number))
    selector.receive(BOOT + 3, orders(2, acked=0))
    assert next_report(selector, []).unfilled == ()


def test_a_deposed_leader_is_ignored() -> None:
    selector = holding("a")
    old = orders(10, epoch=EPOCH - 1, wanting=(), assignments=(assign("s1"),))
    assert selector.receive(BOOT + 1, old) == []
    assert answers(selector.receive(BOOT + 2, check_in(), "b")) == {}
    assert len(selector.held) == 2
    assert next_report(selector, []).epoch == EPOCH


def test_the_first_orders_of_a_new_leader_are_answered_with_a_report_at_once() -> None:
    selector = holding("a", "b")
    found = report(selector.receive(BOOT + 1, orders(1, epoch=EPOCH + 1)))
    assert found is not None
    assert (found.epoch, found.acked, found.held) == (EPOCH + 1, 1, (Held(PHONE, 2),))
    assert report(selector.receive(BOOT + 1, orders(2, epoch=EPOCH + 1))) is None


def test_a_new_leader_numbers_its_orders_by_itself() -> None:
    selector = holding("a", "b")
    selector.receive(BOOT + 1, orders(7, assignments=(assign("s1"),)))
    new = orders(7, epoch=EPOCH + 1, wanting=(), assignments=(assign("s2"),))
    assert accepted(selector.receive(BOOT + 2, new)) == {"b": "s2"}
    assert rejected(selector.receive(BOOT + 3, check_in(), "c")) == ["c"]
    assert selector.receive(BOOT + 4, orders(8, assignments=(assign("s3"),))) == []
    assert selector.receive(BOOT + 5, new) == []
    found = next_report(selector, [])
    assert (found.epoch, found.acked) == (EPOCH + 1, 7)


@pytest.mark.parametrize("boot", [BOOT - 1, BOOT + 1, 0.0])
def test_orders_to_another_boot_of_this_selector_are_ignored(boot: float) -> None:
    """Its held devices are gone; these are others."""
    selector = holding("a")
    assert selector.receive(BOOT + 1, orders(1, boot=boot, assignments=(assign("s1"),))) == []
    assert len(selector.held) == 1
    assert next_report(selector, []).acked == 0


SESSIONS = [f"s{number}" for number in range(1, 7)]


@given(st.lists(st.integers(1, 6), max_size=24), st.integers(0, 8))
def test_no_session_is_ever_given_out_twice_or_lost(numbers: list[int], phones: int) -> None:
    """Each order carries one session; orders come in any order, any number of times."""
    selector = holding(*[f"d{number}" for number in range(phones)])
    given_out: list[str] = []
    effects: Effects = []
    for step, number in enumerate(numbers):
        assignments = (assign(SESSIONS[number - 1]),)
        effects = selector.receive(BOOT + 1 + step, orders(number, assignments=assignments))
        given_out += accepted(effects).values()
        selector.check()
    unfilled = next_report(selector, effects).unfilled
    ordered = sorted({SESSIONS[number - 1] for number in numbers})
    assert sorted([*given_out, *unfilled]) == ordered
    assert len(given_out) == min(phones, len(ordered))
    assert len(selector.held) == phones - len(given_out)
    assert next_report(selector, []).held == (
        () if len(selector.held) == 0 else (Held(PHONE, len(selector.held)),)
    )
