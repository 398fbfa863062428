"""Routing: every later request goes by its ticket to the task's holder, as far as the map knows."""

from __future__ import annotations

import pytest

from papaya.errors import TicketError
from papaya.machine import Forward, Reply
from papaya.messages.control import Route
from papaya.messages.participation import (
    Chunk,
    Complete,
    Heartbeat,
    Join,
    Leave,
    Refused,
    Report,
    Request,
    Retry,
)
from papaya.messages.tickets import (
    AnyTicket,
    AssignmentTicket,
    Keyring,
    SessionTicket,
    UploadTicket,
)
from papaya.selector.assignment_map import AssignmentMap
from papaya.selector.selector import Selector
from tests.unit.selector.builders import (
    BOOT,
    EPOCH,
    KEYRING,
    SEQ,
    TASK,
    a_selector,
    an_open_selector,
    orders,
)

ASSIGNMENT = AssignmentTicket(TASK, "s1", SEQ, confirm_by=1e9)
SESSION = SessionTicket(TASK, "s1", SEQ, 4, "blob", expires=1e9)
UPLOAD = UploadTicket(TASK, "s1", SEQ, 4, "blob", 1e9, 0, 10, upload_by=1e9)


def with_seq(seq: int) -> Heartbeat:
    return Heartbeat(KEYRING.seal(SessionTicket(TASK, "s1", seq, 4, "blob", 1e9)))


REQUESTS: list[Request] = [
    Join(KEYRING.seal(ASSIGNMENT)),
    Heartbeat(KEYRING.seal(SESSION)),
    Report(KEYRING.seal(SESSION), examples=10),
    Chunk(KEYRING.seal(UPLOAD), "u1", 0, 0, b"data"),
    Complete(KEYRING.seal(UPLOAD), "u1"),
    Leave(KEYRING.seal(SESSION), "low battery"),
]
every_request = pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)


def retry(selector: Selector, now: float, request: Request) -> Retry:
    [effect] = selector.receive(now, request, "d")
    assert isinstance(effect, Reply)
    assert effect.to == "d"
    assert isinstance(effect.message, Retry)
    return effect.message


@every_request
def test_a_request_is_forwarded_to_the_holder_as_it_is(request_: Request) -> None:
    selector = an_open_selector()
    assert selector.receive(BOOT + 1, request_, "d") == [Forward("d", "aggregator-1", request_)]


@every_request
def test_a_selector_without_a_map_asks_to_retry(request_: Request) -> None:
    """It has just booted: the device goes through another selector meanwhile."""
    selector = a_selector(heartbeat_s=10.0)
    assert retry(selector, BOOT, request_).after_s == 5


@every_request
def test_a_task_that_is_not_on_the_map_is_a_retry(request_: Request) -> None:
    selector = an_open_selector()
    selector.receive(BOOT, orders(1, routes=(Route("another", "aggregator-1", SEQ),)))
    retry(selector, BOOT + 1, request_)


def test_a_ticket_newer_than_the_map_is_a_retry() -> None:
    """The task has moved, unheard of here: the request must not go to the old holder."""
    selector = an_open_selector()
    retry(selector, BOOT + 1, with_seq(SEQ + 1))
    retry(selector, BOOT + 1, with_seq(SEQ + 100))


@pytest.mark.parametrize("seq", [SEQ, SEQ - 1, 0])
def test_a_ticket_older_than_the_map_goes_to_the_new_holder(seq: int) -> None:
    """Tickets let a successor adopt running clients."""
    selector = an_open_selector()
    request = with_seq(seq)
    assert selector.receive(BOOT, request, "d") == [Forward("d", "aggregator-1", request)]


def test_the_newest_orders_refresh_the_map() -> None:
    selector = an_open_selector()
    request = with_seq(SEQ + 1)
    selector.receive(BOOT + 1, orders(1, routes=(Route(TASK, "aggregator-2", SEQ + 1),)))
    assert selector.receive(BOOT + 2, request, "d") == [Forward("d", "aggregator-2", request)]
    selector.receive(BOOT + 3, orders(2, routes=()))
    retry(selector, BOOT + 4, request)


def test_overtaken_and_deposed_orders_do_not_bring_an_old_map_back() -> None:
    selector = an_open_selector()
    selector.receive(BOOT + 1, orders(2, routes=(Route(TASK, "aggregator-2", SEQ + 1),)))
    selector.receive(BOOT + 2, orders(1))
    selector.receive(BOOT + 3, orders(9, epoch=EPOCH - 1))
    selector.receive(BOOT + 4, orders(9, boot=BOOT - 1))
    request = with_seq(SEQ)
    assert selector.receive(BOOT + 5, request, "d") == [Forward("d", "aggregator-2", request)]


@every_request
def test_the_last_known_map_is_used_while_there_is_no_leader(request_: Request) -> None:
    selector = an_open_selector(heartbeat_s=10.0)
    for beat in range(1, 100):
        selector.wake(BOOT + 10 * beat)
    effects = selector.receive(BOOT + 1000, request_, "d")
    assert effects == [Forward("d", "aggregator-1", request_)]


def test_a_ticket_that_cannot_be_read_is_refused_with_a_hint() -> None:
    selector = an_open_selector()
    [effect] = selector.receive(BOOT, Join(b"no ticket"), "d")
    expected = Refused("the ticket cannot be read", TicketError.default_hint)
    assert effect == Reply("d", expected)


def test_a_seal_is_for_the_aggregator_to_judge() -> None:
    """A selector routes by claims: it need not have the newest keys."""
    request = Join(Keyring({99: b"unknown here"}).seal(ASSIGNMENT))
    selector = an_open_selector()
    assert selector.receive(BOOT, request, "d") == [Forward("d", "aggregator-1", request)]


# --- The map alone


@pytest.mark.parametrize("ticket", [ASSIGNMENT, SESSION, UPLOAD])
def test_the_map_routes_every_kind_of_ticket_by_task_and_sequence_number(ticket: AnyTicket) -> None:
    routes = AssignmentMap()
    assert routes.route(ticket) is None
    routes.replace((Route("emoji", "aggregator-2", SEQ), Route(TASK, "aggregator-1", SEQ)), ())
    assert routes.route(ticket) == "aggregator-1"
    routes.replace((Route(TASK, "aggregator-1", SEQ - 1),), ())
    assert routes.route(ticket) is None
    routes.replace((Route(TASK, "aggregator-3", SEQ + 1),), ())
    assert routes.route(ticket) == "aggregator-3"
