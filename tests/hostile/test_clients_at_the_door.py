"""Strangers at a selector: whatever they send, it stands, stays small, and serves the others.

Requests come through the parser, as they do in production: a device can send what parses, no more.
"""

from __future__ import annotations

import io
import json
import pickle
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papaya.config import ServerConfig
from papaya.errors import ProtocolError
from papaya.machine import Effects, Forward, Reply
from papaya.messages import wire
from papaya.messages.base import MAX_EXCLUDED, Message
from papaya.messages.control import Held, SelectorOrders
from papaya.messages.participation import Heartbeat, Join, Refused, Retry
from papaya.messages.selection import Accepted, Capabilities, CheckIn, DeviceClass, Rejected
from papaya.messages.tickets import Keyring, SessionTicket
from papaya.messages.wire import MAX_MESSAGE_BYTES
from papaya.selector.selector import Selector
from tests.unit.messages.strategies import FROM_DEVICE, a_message
from tests.unit.selector.builders import (
    BOOT,
    PHONE,
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

ANY = Capabilities(engine="", trust_policy=True)


def knock(selector: Selector, now: float, data: bytes, handle: object) -> Effects:
    return selector.receive(now, wire.from_device.parse(data), handle)


def a_giant(number: int) -> CheckIn:
    """The longest self-description that the parser lets through, and no other device's."""
    many = tuple(f"{number:08d}{entry:08d}" + 48 * "x" for entry in range(MAX_EXCLUDED))
    return check_in(DeviceClass(Capabilities(many[0], many[:32], 2**53, many[:32]), many))


class Measure(pickle.Pickler):
    """Pickles everything but the keys, which do not grow."""

    def persistent_id(self, obj: object) -> object:
        return "keys" if isinstance(obj, Keyring) else None


def footprint_bytes(selector: Selector) -> int:
    """How much the selector remembers, whatever it is called inside."""
    Measure(whole := io.BytesIO()).dump(selector)
    return whole.tell()


# --- What it answers


@settings(max_examples=300)
@given(st.lists(a_message(*FROM_DEVICE), max_size=12), st.booleans())
def test_any_requests_are_answered_forwarded_or_held(
    requests: list[Message], has_orders: bool
) -> None:
    selector = an_open_selector() if has_orders else a_selector()
    for handle, request in enumerate(requests):
        effects = knock(selector, BOOT + handle, wire.encode(request), handle)
        mine = [e for e in effects if isinstance(e, Reply | Forward)]
        assert len(mine) <= 1
        assert mine or isinstance(request, CheckIn)
        selector.check()
    ended = selector.wake(BOOT + 1000)
    assert len(rejected(ended)) == len(answers(ended))
    assert len(selector.held) == 0


@settings(max_examples=200)
@given(a_message(*FROM_DEVICE) | st.builds(Join, st.binary(max_size=1024)), st.booleans())
def test_every_answer_can_be_parsed_by_the_device(request: Message, has_orders: bool) -> None:
    selector = an_open_selector() if has_orders else a_selector()
    effects = knock(selector, BOOT, wire.encode(request), "d") + selector.wake(BOOT + 1000)
    found = answers(effects)
    assert "d" in found or any(isinstance(effect, Forward) for effect in effects)
    for answer in found.values():
        assert wire.to_device.parse(wire.encode(answer)) == answer


@pytest.mark.parametrize("digits", [1, 30, 120, 1000])
def test_a_protocol_from_the_far_future_gets_an_answer_that_parses(digits: int) -> None:
    protocol = int(digits * "9")
    document: dict[str, Any] = {"type": "CheckIn", "protocol": protocol, "capabilities": {}}
    try:
        effects = knock(an_open_selector(), BOOT, json.dumps(document).encode(), "d")
    except ProtocolError:
        return  # too far: refused by the parser already
    answer = answers(effects)["d"]
    assert isinstance(answer, Refused)
    assert wire.to_device.parse(wire.encode(answer)) == answer


@given(st.binary(max_size=1024))
def test_a_forged_ticket_is_refused_or_left_to_the_aggregator(ticket: bytes) -> None:
    """Never an exception, and never a change: a forged ticket reserves nothing here."""
    selector = an_open_selector()
    before = footprint_bytes(selector)
    [effect] = knock(selector, BOOT, wire.encode(Join(ticket)), "d")
    assert isinstance(effect, Forward) or isinstance(effect.message, Refused | Retry)  # type: ignore[attr-defined]
    assert footprint_bytes(selector) == before


def test_a_ticket_nested_to_the_limit_does_not_stop_the_selector() -> None:
    claim = b"\x96\xb0AssignmentTicket\xa0\xa0\x01\x00"
    bomb = bytes(36) + claim + b"\x91" * (1024 - 36 - len(claim) - 1) + b"\x00"
    [effect] = knock(an_open_selector(), BOOT, wire.encode(Heartbeat(bomb)), "d")
    assert isinstance(effect, Reply)
    assert isinstance(effect.message, Refused | Retry)


def test_a_claim_of_a_sequence_number_from_the_future_only_gets_a_retry() -> None:
    """Were it believed, one stranger could turn the selector against its own map."""
    selector = an_open_selector()
    future = Keyring({1: b"guess"}).seal(SessionTicket(TASK, "s", 2**62, 1, "b", 1e18))
    assert isinstance(answers(selector.receive(BOOT, Heartbeat(future), "d"))["d"], Retry)
    honest = Heartbeat(Keyring({1: b"k"}).seal(SessionTicket(TASK, "s", 3, 1, "b", 1e18)))
    assert selector.receive(BOOT, honest, "e") == [Forward("e", "aggregator-1", honest)]


@pytest.mark.parametrize(
    "document",
    [
        {"type": "SelectorOrders", "epoch": 10**9},
        {"type": "AggregatorReport", "node": "me"},
        {"type": "Accepted", "ticket": "", "task": TASK, "session": "s"},
    ],
)
def test_a_device_cannot_speak_as_a_server(document: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="expected a device's request"):
        knock(an_open_selector(), BOOT, json.dumps(document).encode(), "d")


def test_orders_have_no_way_in_through_the_door() -> None:
    takeover = orders(10**6, epoch=10**6, routes=())
    assert isinstance(takeover, SelectorOrders)
    with pytest.raises(ProtocolError):
        knock(an_open_selector(), BOOT, wire.encode(takeover), "d")


# --- How large it grows


def test_a_flood_does_not_fill_more_than_the_places_there_are() -> None:
    selector = an_open_selector(max_held=50)
    for number in range(2000):
        selector.receive(BOOT + number / 1000, check_in(), number)
        selector.check()
    assert len(selector.held) == 50


def test_devices_that_were_sent_away_leave_nothing_behind() -> None:
    """Each describes itself differently; none of them fits; no leader is there to send orders."""
    selector = an_open_selector(max_held=10)
    selector.receive(BOOT, orders(1, wanting=()))
    knocked(selector, range(100))
    before = footprint_bytes(selector)
    knocked(selector, range(100, 5000))
    assert footprint_bytes(selector) < 2 * before


def test_devices_that_were_held_and_sent_away_leave_nothing_behind() -> None:
    selector = an_open_selector(max_held=10, hold_s=1.0)
    before = 0
    for number in range(0, 5000, 10):
        knocked(selector, range(number, number + 10), BOOT + number)
        selector.wake(BOOT + number + 5)
        assert len(selector.held) == 0
        before = before or footprint_bytes(selector)
    assert footprint_bytes(selector) < 2 * before


def knocked(selector: Selector, numbers: range, now: float = BOOT) -> None:
    for number in numbers:
        labels = (f"label-{number}",)
        selector.receive(now, check_in(DeviceClass(Capabilities(labels=labels))), number)


def test_a_long_life_leaves_nothing_behind() -> None:
    """Orders every second for an hour, devices that come and go: it stays as small as it was."""
    selector = an_open_selector(heartbeat_s=10.0)
    size_bytes = []
    for second in range(3600):
        now = BOOT + second
        selector.receive(now, check_in(), second)
        selector.receive(now, orders(second + 1, assignments=(assign(f"s{second}"),)))
        selector.wake(now)
        size_bytes.append(footprint_bytes(selector))
    assert max(size_bytes[60:]) < 2 * max(size_bytes[:60])


def test_reports_stay_readable_however_much_devices_say_of_themselves() -> None:
    """Else a few dozen giants silence a selector: the Coordinator refuses what is too long."""
    selector = an_open_selector(heartbeat_s=10.0)
    for number in range(1000):
        knock(selector, BOOT + 1, wire.encode(a_giant(number)), number)
    assert len(selector.held) == 1000
    found = report(selector.wake(BOOT + 10))
    assert found is not None
    encoded = wire.encode(found)
    assert len(encoded) <= MAX_MESSAGE_BYTES
    assert wire.between_servers.parse(encoded) == found


# --- The others


def test_honest_devices_are_served_beside_a_flood_of_strangers() -> None:
    selector = an_open_selector(max_held=100, hold_s=20.0)
    rng = Random(5)
    served = 0
    for second in range(200):
        now = BOOT + second
        selector.wake(now)
        for stranger in range(20):
            kind = DeviceClass(Capabilities(memory_mb=rng.randrange(100)), excluded=(TASK,))
            assert selector.receive(now, check_in(kind), ("stranger", second, stranger))
        selector.receive(now, check_in(), second)
        effects = selector.receive(now, orders(second + 1, assignments=(assign(f"s{second}"),)))
        served += len(accepted(effects))
        selector.check()
    assert served == 200


def test_strangers_of_a_thousand_kinds_do_not_hide_the_honest_from_the_coordinator() -> None:
    """A report has room for so many kinds of device; those that many devices are must be in it."""
    selector = an_open_selector(heartbeat_s=10.0)
    knocked(selector, range(1000))
    for number in range(50):
        selector.receive(BOOT + 1, check_in(PHONE), ("honest", number))
    found = report(selector.wake(BOOT + 10))
    assert found is not None
    assert Held(PHONE, 50) in found.held


def test_strangers_who_repeat_themselves_do_not_hide_a_single_honest_device() -> None:
    """A name that is said twice says nothing more. Else two tasks make thousands of classes."""
    selector = an_open_selector(heartbeat_s=10.0)
    for number in range(1000):
        excluded = ("for-phones",) * (1 + number % 32) + ("for-tablets",) * (1 + number // 32)
        for again in range(2):
            kind = DeviceClass(PHONE.capabilities, excluded)
            knock(selector, BOOT + 1, wire.encode(check_in(kind)), (number, again))
    selector.receive(BOOT + 1, check_in(PHONE), "honest")
    found = report(selector.wake(BOOT + 10))
    assert found is not None
    assert Held(PHONE, 1) in found.held
    assert len(found.held) == 2


@pytest.mark.parametrize("strangers", [512, 4000])
def test_strangers_with_different_exclusions_hide_no_honest_device_for_long(strangers: int) -> None:
    """n tasks make 2ⁿ sets of excluded ones. What a report has no room for is in a later one."""
    selector = an_open_selector()
    tasks = [f"task-{number}" for number in range(13)]
    offers = (advertised(), *(advertised(task) for task in tasks))
    selector.receive(BOOT, orders(1, advertised=offers))
    for number in range(strangers):
        excluded = tuple(task for bit, task in enumerate(tasks) if number >> bit & 1)
        for again in range(2):
            kind = DeviceClass(ANY, excluded)
            knock(selector, BOOT + 1, wire.encode(check_in(kind)), (number, again))
    alone, many = (DeviceClass(ANY, (f"task-{n}", "task-12")) for n in (10, 11))
    assert answers(selector.receive(BOOT + 1, check_in(alone), "honest")) == {}
    for number in range(50):
        selector.receive(BOOT + 1, check_in(many), ("honest", number))
    found = []
    while (now := selector.next_wake()) < BOOT + 1 + ServerConfig().hold_s:
        found += [sent.held for sent in [report(selector.wake(now))] if sent is not None]
    assert all(len(held) == 256 for held in found)
    assert all(Held(many, 50) in held for held in found)
    assert sum(Held(alone, 1) in held for held in found) >= len(found) * 128 // (strangers + 2)
    assert any(Held(alone, 1) in held for held in found)


def test_an_honest_device_is_answered_after_every_kind_of_nonsense() -> None:
    selector = an_open_selector()
    for nonsense in (b"", b"{}", b"null", b'{"type":"CheckIn"}', b"\xff" * 100, b"[" * 5000):
        with pytest.raises(ProtocolError):
            knock(selector, BOOT, nonsense, "x")
    assert answers(selector.receive(BOOT, check_in(PHONE), "d")) == {}
    effects = selector.receive(BOOT + 1, orders(1, assignments=(assign("s1"),)))
    assert isinstance(answers(effects)["d"], Accepted)


def test_knocking_twice_is_two_places_in_the_queue_and_no_more() -> None:
    """A device that checks in again after a lost answer gets both answered, each once."""
    selector = an_open_selector(hold_s=20.0)
    selector.receive(BOOT, check_in(), "first try")
    selector.receive(BOOT + 1, check_in(), "second try")
    effects = selector.receive(BOOT + 2, orders(1, assignments=(assign("s1"),)))
    assert accepted(effects) == {"first try": "s1"}
    late = answers(selector.wake(BOOT + 30))
    assert list(late) == ["second try"]
    assert isinstance(late["second try"], Rejected)
