"""Clocks of servers, compared by the time in their reports."""

from __future__ import annotations

import pytest

from papaya.messages.storage import FenceRow
from tests.unit.coordinator.builders import (
    A_MOMENT_S,
    H,
    Office,
    a_served_office,
    a_task,
    an_office,
    on,
    sessions_in,
)

LIMIT_S = 3 * H


@pytest.mark.parametrize("ahead_s", [LIMIT_S, -LIMIT_S, 3600.0, -3600.0])
def test_an_aggregator_with_another_clock_gets_no_task(ahead_s: float) -> None:
    office = an_office(a_task())
    assert office.aggregator("agg-1", at=office.now + ahead_s) == []
    assert office.fence() == FenceRow(0, "", 0)
    assert office.machine.fleet.clocks(office.now) == {"agg-1": ahead_s}


@pytest.mark.parametrize("ahead_s", [LIMIT_S - A_MOMENT_S, A_MOMENT_S - LIMIT_S])
def test_a_smaller_difference_is_accepted(ahead_s: float) -> None:
    office = an_office(a_task())
    office.aggregator("agg-1", at=office.now + ahead_s)
    assert office.fence() == FenceRow(1, "agg-1", 0)


def test_an_aggregator_whose_clock_jumps_ahead_loses_its_tasks_and_clients() -> None:
    office = a_served_office(a_task(), demand=4)
    office.selector("sel-1", 0)
    for _ in range(4):
        office.pass_s(H)
        office.aggregator("agg-1", on("words", 1, demand=4), at=office.now + 3600.0)
        office.aggregator("agg-2")
    assert office.fence() == FenceRow(2, "agg-2", 0)


def test_a_selector_with_another_clock_gets_no_assignments() -> None:
    office = a_served_office(a_task(), demand=4)
    assert office.selector("sel-1", 4, at=office.now + LIMIT_S) == []
    assert len(sessions_in(office.selector("sel-2", 4))) == 4


def test_a_report_that_was_on_its_way_for_long_is_no_sign_of_a_wrong_clock() -> None:
    office = a_served_office(a_task(), demand=4)
    office.pass_s(LIMIT_S - A_MOMENT_S)
    office.aggregator("agg-1", on("words", 1, demand=2), at=office.now - LIMIT_S)
    assert office.machine.demand.of("words") == 2
    assert office.machine.fleet.clocks(office.now) == {"agg-1": 0.0}


def test_a_clock_that_stays_behind_is_noticed() -> None:
    """A process without a clock that runs while its machine is suspended."""
    office = a_served_office(a_task(), demand=4)
    for _ in range(8):
        office.pass_s(H)
        office.aggregator("agg-1", on("words", 1, demand=4), at=office.now - LIMIT_S)
    assert office.machine.fleet.clocks(office.now) == {"agg-1": -LIMIT_S}
    assert not office.machine.fleet.live_aggregators(office.now)


def test_a_new_boot_has_a_new_clock() -> None:
    office: Office = an_office(a_task())
    office.aggregator("agg-1", at=office.now + 3600.0)
    office.aggregator("agg-1", boot=1)
    assert office.fence() == FenceRow(1, "agg-1", 1)


def test_servers_that_have_been_silent_for_a_day_are_forgotten() -> None:
    """An autoscaler gives each new pod a name of its own."""
    office = a_served_office(a_task(), demand=4)
    for number in range(3):
        office.aggregator(f"pod-{number}")
        office.selector(f"pod-{number}-sel", 1, at=office.now + LIMIT_S)
    fleet, day_s = office.machine.fleet, 86_400.0
    office.pass_s(day_s - H)
    assert {"pod-0", "pod-1", "pod-2"} <= fleet.aggregators.keys()
    office.aggregator("pod-0")
    office.pass_s(2 * H)
    assert fleet.aggregators.keys() == fleet._clocks.keys() == {"pod-0"}
