"""What a coordinator tells its operator: who leads, who is alive, who holds a task, and why."""

from __future__ import annotations

import pytest

from papaya.machine import Transact
from papaya.messages.events import (
    LeadershipGained,
    LeadershipLost,
    ServerSeen,
    ServerSilent,
    TaskFound,
    TaskMoved,
    TaskPlaced,
    TaskReleased,
)
from papaya.messages.storage import FenceRow, Transaction, fence_key
from tests.unit.coordinator.builders import (
    SERVER,
    H,
    Office,
    a_served_office,
    a_task,
    an_office,
    on,
)
from tests.unit.coordinator.test_moves import a_failed_aggregator


def test_the_first_leader_places_a_task() -> None:
    office = a_served_office(a_task())
    office.selector("sel-1")
    assert office.events == [
        LeadershipGained(1, "there was no leader"),
        TaskFound("words", 0, 0, ""),
        ServerSeen("agg-1", 0),
        TaskPlaced("words", 0, 1, "agg-1", "no aggregator held it"),
        ServerSeen("sel-1", 0),
    ]


def silent(office: Office) -> None:
    """agg-1 says nothing for three heartbeats, agg-2 does."""
    for _ in range(4):
        office.aggregator("agg-2")
        office.pass_s(H)
    office.aggregator("agg-2")


def test_a_silent_holder_and_its_successor() -> None:
    office = a_served_office(a_task())
    silent(office)
    found = [event for event in office.events if not isinstance(event, TaskFound)][3:]
    assert found[0] == ServerSeen("agg-2", 0)
    assert isinstance(found[1], ServerSilent)
    assert (found[1].peer, found[1].silent_s >= SERVER.dead_after_s) == ("agg-1", True)
    assert found[2:] == [TaskMoved("words", 0, 2, "agg-2", "agg-1", "its holder is silent")]
    office.aggregator("agg-1")
    assert office.events[-1] == ServerSeen("agg-1", 0)


@pytest.mark.parametrize(
    ("report", "why"),
    [
        ({"boot": 1}, "its holder was restarted"),
        ({"draining": True}, "its holder stops"),
    ],
)
def test_a_move_says_why(report: dict[str, int], why: str) -> None:
    office = a_served_office(a_task())
    office.aggregator("agg-2")
    office.aggregator("agg-1", **report)  # type: ignore[arg-type]
    office.aggregator("agg-2")
    [moved] = [event for event in office.events if isinstance(event, TaskMoved)]
    assert (moved.before, moved.why) == ("agg-1", why)


@pytest.mark.parametrize("fate", ["committed", "applied"])
def test_a_move_is_told_once_whatever_the_outcome_was_called(fate: str) -> None:
    """After an unknown outcome, the rows tell that the task has moved."""
    office = a_failed_aggregator()
    office.aggregator("agg-2")
    assert not any(isinstance(event, TaskMoved) for event in office.events)
    office.settle(fate, FenceRow)  # type: ignore[arg-type]
    office.release()
    office.pass_s(H)
    moved = [event for event in office.events if isinstance(event, TaskMoved)]
    assert moved == [TaskMoved("words", 0, 2, "agg-2", "agg-1", "its holder is silent")]


def test_an_owner_takes_a_task_from_its_holder() -> None:
    office = a_served_office(a_task())
    office.store.apply(Transaction(put=((fence_key("words"), FenceRow(2, "", 0)),)))
    office.pass_s(H)
    office.aggregator("agg-1", on("words", 1, demand=4))
    assert office.events[-2:] == [
        TaskReleased("words", 0, 2, "agg-1"),
        TaskPlaced("words", 0, 3, "agg-1", "no aggregator held it"),
    ]


def test_the_next_leader_says_whom_it_follows() -> None:
    first = a_served_office(a_task())
    second = Office(node="c-2", store=first.store)
    second.wake()
    second.pass_s(SERVER.leader_lease_s)
    assert second.events == [
        LeadershipGained(2, "c-1 did not renew its lease"),
        TaskFound("words", 0, 1, "agg-1"),
    ]
    first.pass_s(SERVER.leader_lease_s)
    assert first.events[-1] == LeadershipLost(1, "c-2 leads now")


def test_a_leader_without_a_store_stops_leading_once() -> None:
    office = an_office(a_task())
    office.hold(Transact)
    office.pass_s(2 * SERVER.leader_lease_s)
    late = "no renewal of its lease was confirmed in time"
    assert office.events[-1:] == [LeadershipLost(1, late)]
    office.release()
    office.pass_s(H)
    assert office.leads
    assert office.events[-1:] == [LeadershipGained(1, "its lease was renewed late")]
    assert sum(isinstance(event, LeadershipLost) for event in office.events) == 1
