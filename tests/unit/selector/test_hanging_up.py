"""Devices that hang up while they are held: gone at once, at a cost that does not grow."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable

import pytest

from papaya.messages.selection import Gone
from tests.unit.selector.builders import (
    BOOT,
    PHONE,
    TABLET,
    accepted,
    an_open_selector,
    answers,
    assign,
    check_in,
    orders,
    rejected,
)


def test_a_device_that_hung_up_is_not_given_a_session() -> None:
    selector = an_open_selector()
    gone, stays = object(), object()
    selector.receive(BOOT + 1, check_in(), gone)
    selector.receive(BOOT + 1, check_in(), stays)
    assert answers(selector.receive(BOOT + 2, Gone(), gone)) == {}
    assert len(selector.held) == 1
    effects = selector.receive(BOOT + 3, orders(2, assignments=(assign("s1", "s2"),)))
    assert accepted(effects) == {stays: "s1"}
    selector.receive(BOOT + 4, Gone(), gone)
    selector.check()


def test_devices_that_hang_up_leave_nothing_behind() -> None:
    """One device stays while others come and go, within the time that it is held."""
    selector = an_open_selector()
    stays = object()
    selector.receive(BOOT + 1, check_in(), stays)
    tracemalloc.start()
    for number in range(2000):
        handle = object()
        device = PHONE if number % 2 else TABLET
        assert rejected(selector.receive(BOOT + 1, check_in(device), handle)) == []
        selector.receive(BOOT + 1, Gone(), handle)
        selector.check()
    kept_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept_bytes < 2000 * 16
    effects = selector.receive(BOOT + 2, orders(2, assignments=(assign("s1"),)))
    assert accepted(effects) == {stays: "s1"}
    selector.check()


@pytest.mark.parametrize("place", [0, 250, 499])
def test_a_hang_up_costs_the_same_whoever_else_is_held(place: int) -> None:
    selector = an_open_selector()
    handles = [object() for _ in range(500)]
    for handle in handles:
        selector.receive(BOOT + 1, check_in(), handle)
    assert lines_run(lambda: selector.receive(BOOT + 2, Gone(), handles[place])) < 100
    assert len(selector.held) == 499


def lines_run(call: Callable[[], object]) -> int:
    """How many lines of Python that takes, whatever the machine."""
    count = 0

    def trace(frame: object, event: str, argument: object) -> object:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_a_request_that_the_network_doubles_is_held_once() -> None:
    selector = an_open_selector()
    device = object()
    for _ in range(2):
        assert answers(selector.receive(BOOT + 1, check_in(), device)) == {}
    selector.check()
    effects = selector.receive(BOOT + 2, orders(2, assignments=(assign("s1", "s2"),)))
    assert accepted(effects) == {device: "s1"}
    selector.check()
