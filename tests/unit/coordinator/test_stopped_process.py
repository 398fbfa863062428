"""The process of a leader was stopped. When it goes on, reports wait to be read."""

from __future__ import annotations

from papaya.messages.events import ServerSilent
from tests.unit.coordinator.builders import SERVER, H, Office, a_served_office, a_task, on


def a_stopped_leader(seconds: float) -> Office:
    """Its last renewal is the newest event; agg-1 and sel-1 last reported a heartbeat before it."""
    office = a_served_office(a_task())
    office.selector("sel-1", 0)
    office.pass_s(H)
    office.now += seconds  # nothing is called meanwhile, not even a timer
    return office


def test_servers_whose_reports_wait_are_not_silent() -> None:
    office = a_stopped_leader(2.5 * H)
    assert office.leads
    office.wake()
    office.aggregator("agg-2")
    office.aggregator("agg-1", on("words", 1, demand=4))
    assert office.fence().aggregator == "agg-1"
    assert list(office.machine.fleet.selectors) == ["sel-1"]
    assert not any(isinstance(event, ServerSilent) for event in office.events)


def test_an_aggregator_whose_report_waits_is_alive_but_gets_no_task() -> None:
    """Formats are raised only if all live servers know them. A task must not go to a dead one."""
    office = a_stopped_leader(2.5 * H)
    office.wake()
    fleet = office.machine.fleet
    assert list(fleet.live_aggregators(office.now)) == ["agg-1"]
    assert list(fleet.open_aggregators(office.now)) == []
    office.aggregator("agg-1", on("words", 1, demand=4))
    assert list(fleet.open_aggregators(office.now)) == ["agg-1"]


def test_silence_begins_again_when_the_process_goes_on() -> None:
    office = a_stopped_leader(2.5 * H)
    office.wake()
    for _ in range(3):
        office.aggregator("agg-2")
        office.pass_s(H)
    assert office.fence().aggregator == "agg-2"
    assert list(office.machine.fleet.selectors) == []


def test_the_recovery_period_is_longer_by_a_stop() -> None:
    """Holders that have not reported to a new leader have as much time as without the stop."""
    before = a_served_office(a_task())
    office = Office(store=before.store, boot=1, now=before.now)
    office.wake()
    office.now += 2.5 * H
    office.wake()
    for _ in range(2):
        office.pass_s(H)
        office.aggregator("agg-2")
    assert office.fence().aggregator == "agg-1"
    office.pass_s(H)
    assert office.fence().aggregator == "agg-2"


def test_leadership_ends_by_the_clock() -> None:
    """Another candidate may lead by now."""
    office = a_stopped_leader(SERVER.leader_lease_s)
    assert not office.leads
    assert office.aggregator("agg-1", on("words", 1, demand=4)) == []
