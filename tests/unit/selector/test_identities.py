"""Devices with an identity: one check-in, few assignments without a join, none if revoked."""

from __future__ import annotations

from msgspec import structs

from papaya.machine import Effects
from papaya.messages.participation import Join, Refused, Retry
from papaya.messages.selection import Accepted, IdentifiedCheckIn, JoinDecided
from papaya.messages.storage import Revoked
from papaya.messages.tickets import AssignmentTicket, Keyring, pseudonym_of
from papaya.selector.selector import MAX_OPEN_ASSIGNMENTS, Selector
from tests.unit.selector.builders import (
    BOOT,
    CONFIRM_BY,
    KEYRING,
    accepted,
    an_open_selector,
    answers,
    assign,
    check_in,
    orders,
    rejected,
)

KEY = b"key of the task"
GREEDY = "greedy-phone"
REVOKED = Refused("this device was revoked", "ask the operator of the servers")


def a_selector() -> Selector:
    return an_open_selector(hold_s=500.0, heartbeat_s=100.0)


def knock(selector: Selector, handle: str, device: str = GREEDY) -> Effects:
    return selector.receive(BOOT, IdentifiedCheckIn(device, check_in()), handle)


def give(selector: Selector, number: int, session: str) -> Effects:
    assignment = structs.replace(assign(session), pseudonym_key=KEY)
    return selector.receive(BOOT, orders(number, assignments=(assignment,)))


def join(selector: Selector, granted: Effects, handle: str, *, is_decided: bool = True) -> None:
    """Join. `is_decided`: the aggregator gives an answer other than Retry."""
    answer = answers(granted)[handle]
    assert isinstance(answer, Accepted)
    selector.receive(BOOT, Join(answer.ticket), "join")
    if is_decided:
        assert selector.receive(BOOT, JoinDecided(answer.ticket)) == []


def with_open_assignments(selector: Selector) -> list[Effects]:
    """The device has as many as it may have, and has joined none."""
    found = []
    for number in range(1, MAX_OPEN_ASSIGNMENTS + 1):
        knock(selector, f"d{number}")
        found.append(give(selector, number, f"s{number}"))
    return found


def test_a_second_check_in_of_a_device_ends_the_first() -> None:
    selector = a_selector()
    knock(selector, "first")
    knock(selector, "other", "tablet")
    effects = knock(selector, "second")
    assert answers(effects) == {"first": Retry("replaced by a newer check-in of this device", 0.0)}
    assert len(selector.held) == 2
    assert accepted(give(selector, 1, "s1")) == {"other": "s1"}
    assert accepted(give(selector, 2, "s2")) == {"second": "s2"}
    selector.check()


def test_a_check_in_that_is_delivered_twice_is_held_once() -> None:
    selector = a_selector()
    knock(selector, "first")
    assert knock(selector, "first") == []
    assert len(selector.held) == 1


def test_the_ticket_has_the_pseudonym_of_the_device_in_this_task() -> None:
    selector = a_selector()
    knock(selector, "known")
    selector.receive(BOOT, check_in(), "unknown")
    found = []
    for number, handle in enumerate(("known", "unknown"), start=1):
        answer = answers(give(selector, number, f"s{number}"))[handle]
        assert isinstance(answer, Accepted)
        found.append(KEYRING.open(answer.ticket, AssignmentTicket).pseudonym)
    assert found == [pseudonym_of(GREEDY, KEY), b""]


def test_a_device_that_joins_nothing_is_rejected_until_its_assignments_end() -> None:
    selector = a_selector()
    with_open_assignments(selector)
    assert rejected(knock(selector, "more")) == ["more"]
    assert rejected(knock(selector, "other", "tablet")) == []
    selector.wake(CONFIRM_BY + 1)
    assert rejected(knock(selector, "later")) == []


def test_a_device_that_joins_may_check_in_again() -> None:
    selector = a_selector()
    given = with_open_assignments(selector)
    join(selector, given[0], "d1")
    assert rejected(knock(selector, "more")) == []


def test_a_join_that_is_answered_retry_does_not_end_an_assignment() -> None:
    """Its lease lasts, so a device could take any number of slots while its task moves."""
    selector = a_selector()
    given = with_open_assignments(selector)
    join(selector, given[0], "d1", is_decided=False)
    assert rejected(knock(selector, "more")) == ["more"]
    join(selector, given[0], "d1")
    assert rejected(knock(selector, "now")) == []


def test_a_join_that_is_decided_twice_ends_one_assignment() -> None:
    selector = a_selector()
    given = with_open_assignments(selector)
    join(selector, given[0], "d1")
    join(selector, given[0], "d1")
    knock(selector, "d3")
    give(selector, 3, "s3")
    assert rejected(knock(selector, "more")) == ["more"]


def test_a_forged_join_does_not_end_an_assignment() -> None:
    """The aggregator refuses it, which is a decision too."""
    selector = a_selector()
    with_open_assignments(selector)
    forged = Keyring({1: b"guess"}).seal(AssignmentTicket("next-word", "s1", 3, CONFIRM_BY))
    for ticket in (forged, b"nonsense"):
        selector.receive(BOOT, Join(ticket), "join")
        selector.receive(BOOT, JoinDecided(ticket))
    assert rejected(knock(selector, "more")) == ["more"]


def test_a_revoked_device_is_refused_and_let_go() -> None:
    selector = a_selector()
    knock(selector, "held")
    knock(selector, "other", "tablet")
    assert answers(selector.receive(BOOT, Revoked((GREEDY,)))) == {"held": REVOKED}
    assert answers(knock(selector, "again")) == {"again": REVOKED}
    assert accepted(give(selector, 1, "s1")) == {"other": "s1"}
    selector.receive(BOOT, Revoked(()))
    assert answers(knock(selector, "forgiven")) == {}
    selector.check()
