"""Asking again: through another selector, later, with jitter; and only the newest answer counts."""

from __future__ import annotations

import pytest

from papaya.client.client import Stage
from papaya.client.work import Answered, Unanswered
from papaya.messages.participation import (
    MAX_EXTRA_S,
    Aborted,
    Alive,
    Chunk,
    Complete,
    Heartbeat,
    Incomplete,
    Refused,
    Report,
    Retry,
)
from papaya.messages.selection import Accepted
from tests.unit.client.builders import (
    ASSIGNED,
    GRANTED,
    HEARTBEAT_S,
    SELECTORS,
    TRAINED,
    Phone,
    joined,
)

ASKING = [
    Stage.CHECKING_IN,
    Stage.JOINING,
    Stage.REPORTING,
    Stage.UPLOADING,
    Stage.COMPLETING,
]
asking_stages = pytest.mark.parametrize("stage", ASKING)
MAX_BACKOFF_S = 5.0


def after(selector: str) -> str:
    return SELECTORS[(SELECTORS.index(selector) + 1) % len(SELECTORS)]


@asking_stages
@pytest.mark.parametrize("how", ["unanswered", "retry", "timeout"])
def test_the_same_request_goes_through_another_selector(stage: Stage, how: str) -> None:
    phone = Phone(seed=2).until(stage)
    first = phone.asked
    if how == "unanswered":
        assert phone.unanswered() == []
    elif how == "retry":
        assert phone.answer(Retry("the map is stale", 0.0)) == []
    else:
        phone.wait(30.0 if stage is Stage.CHECKING_IN else 10.0)
    phone.wait(MAX_BACKOFF_S)
    second = phone.asked
    assert second.message == first.message
    assert second.attempt > first.attempt
    assert second.to == after(first.to)
    assert phone.stage is stage


@pytest.mark.parametrize(("stage", "timeout_s"), [(Stage.CHECKING_IN, 30), (Stage.JOINING, 10)])
def test_a_check_in_may_be_held_longer_than_a_request_may_take(
    stage: Stage, timeout_s: float
) -> None:
    phone = Phone(check_in_timeout_s=30.0, request_timeout_s=10.0).until(stage)
    assert phone.client.next_wake() == phone.now + timeout_s


def test_every_selector_gets_its_turn() -> None:
    phone = Phone(give_up_s=10_000.0).until(Stage.CHECKING_IN)
    for _ in range(5):
        phone.unanswered()
        phone.wait(MAX_BACKOFF_S)
    tried = [request.to for request in phone.requests]
    assert [after(selector) for selector in tried[:-1]] == tried[1:]


def test_one_selector_is_asked_again_when_there_is_no_other() -> None:
    phone = Phone(selectors=["only"]).until(Stage.CHECKING_IN)
    phone.unanswered()
    phone.wait(MAX_BACKOFF_S)
    assert [request.to for request in phone.requests] == ["only", "only"]


def delays(failures: int, after_s: float = 0.0) -> list[float]:
    """The wait before the last retry after this many failures, for a hundred devices."""
    waited = []
    for seed in range(100):
        phone = Phone(seed=seed, backoff_s=0.5, max_backoff_s=5.0, give_up_s=10_000.0)
        phone.until(Stage.CHECKING_IN)
        for _ in range(failures - 1):
            phone.answer(Retry("busy", after_s))
            phone.wait(phone.client.next_wake() - phone.now)
        phone.answer(Retry("busy", after_s))
        waited.append(phone.client.next_wake() - phone.now)
    return waited


@pytest.mark.parametrize(("failures", "ceiling_s"), [(1, 1), (2, 2), (3, 4), (4, 5), (12, 5)])
def test_back_off_is_jittered_below_a_ceiling_that_doubles(failures: int, ceiling_s: float) -> None:
    waited = delays(failures)
    assert all(0 <= delay < ceiling_s for delay in waited)
    assert max(waited) > 0.8 * ceiling_s
    assert min(waited) < 0.2 * ceiling_s


def test_a_server_that_says_how_long_is_obeyed_and_jitter_comes_on_top() -> None:
    waited = delays(1, after_s=7.0)
    assert all(7 <= delay < 8 for delay in waited)
    assert max(waited) - min(waited) > 0.5


@asking_stages
def test_an_answer_that_helps_begins_the_back_off_anew(stage: Stage) -> None:
    for seed in range(30):
        phone = Phone(seed=seed, give_up_s=10_000.0).until(stage)
        for _ in range(6):
            phone.unanswered()
            phone.wait(MAX_BACKOFF_S)
        if stage is Stage.COMPLETING:
            phone.answer(Incomplete((0,)))
        else:
            phone.go_on()
        if stage is Stage.JOINING:
            phone.until(Stage.REPORTING)
        phone.unanswered()
        assert phone.client.next_wake() < phone.now + 1.0


def test_a_wait_beyond_the_end_of_the_stage_is_no_reason_to_hang() -> None:
    phone = Phone(give_up_s=60.0).until(Stage.JOINING)
    phone.answer(Retry("come back next year", 3e7))
    phone.wait(60.0)
    assert [finish.ending for finish in phone.endings] == ["gave_up"]


@pytest.mark.parametrize("stage", [Stage.REPORTING, Stage.UPLOADING, Stage.COMPLETING])
def test_a_client_stays_as_long_as_the_server_keeps_its_session(stage: Stage) -> None:
    """But one limit holds for the whole visit, whatever servers say."""
    phone = Phone().until(stage)
    ends_at = phone.client._stage_ends
    while phone.now < ends_at + MAX_EXTRA_S - 60.0:
        phone.answer(Retry("waiting for the TSA", 30.0, 120.0))
        phone.wait(40.0)
        assert phone.stage is stage
    for _ in range(3):
        if not phone.endings:
            phone.answer(Retry("waiting for the TSA", 30.0, 120.0))
            phone.wait(40.0)
    assert [finish.ending for finish in phone.endings] == ["gave_up"]


@pytest.mark.parametrize("stage", [Stage.REPORTING, Stage.UPLOADING, Stage.COMPLETING])
def test_a_client_uses_the_ticket_that_an_answer_renews(stage: Stage) -> None:
    phone = Phone().until(stage)
    phone.answer(Retry("waiting for the TSA", 0.5, 120.0, b"renewed"))
    phone.wait(40.0)
    assert isinstance(phone.asked.message, Report | Chunk | Complete)
    assert phone.asked.message.ticket == b"renewed"
    last = phone.heartbeats[-1].message
    assert isinstance(last, Heartbeat)
    assert last.ticket == b"renewed"


def test_an_answer_to_a_join_renews_nothing() -> None:
    phone = Phone().until(Stage.JOINING)
    asked = phone.asked.message
    phone.answer(Retry("busy", 0.5, 0.0, b"renewed"))
    phone.wait(10.0)
    assert phone.asked.message == asked


def test_a_short_keep_does_not_bring_the_end_forward() -> None:
    phone = Phone().until(Stage.REPORTING)
    ends_at = phone.client._stage_ends
    phone.answer(Retry("waiting for the TSA", 0.5, 1.0))
    assert phone.client._stage_ends == ends_at


# --- Only the newest answer counts


@asking_stages
def test_the_answer_to_an_abandoned_attempt_is_ignored(stage: Stage) -> None:
    phone = Phone().until(stage)
    old = phone.asked.attempt
    phone.unanswered()
    late = [ASSIGNED, joined(), GRANTED, Aborted("stale"), Refused("no"), Retry("no", 1.0)]
    assert [phone.receive(Answered(old, answer)) for answer in late] == [[] for _ in late]
    phone.wait(MAX_BACKOFF_S)
    assert [phone.receive(Answered(old, answer)) for answer in late] == [[] for _ in late]
    assert phone.receive(Unanswered(old)) == []
    assert phone.stage is stage
    assert phone.endings == []


def test_the_answer_to_an_earlier_stage_is_ignored() -> None:
    phone = Phone().until(Stage.JOINING)
    check_in = phone.requests[0].attempt
    other = Accepted(b"another", "emoji", "s9")
    assert phone.receive(Answered(check_in, other)) == []
    phone.answer(joined())
    assert phone.stage is Stage.DOWNLOADING


def test_a_late_answer_does_not_stop_the_attempt_that_is_under_way() -> None:
    phone = Phone().until(Stage.CHECKING_IN)
    old = phone.asked.attempt
    phone.unanswered()
    phone.wait(MAX_BACKOFF_S)
    phone.receive(Answered(old, Retry("too late", 1000.0)))
    phone.answer(ASSIGNED)
    assert phone.stage is Stage.JOINING


def test_the_answer_to_an_old_heartbeat_is_ignored() -> None:
    phone = Phone().until(Stage.TRAINING)
    phone.wait(2 * HEARTBEAT_S)
    old = phone.heartbeats[0].attempt
    due = phone.client.next_wake()
    assert phone.receive(Answered(old, Aborted("silent"))) == []
    assert phone.receive(Unanswered(old)) == []
    assert phone.client.next_wake() == due
    phone.receive(TRAINED)
    newest = phone.heartbeats[-1].attempt
    assert phone.receive(Answered(newest, Alive())) == []
    assert phone.stage is Stage.REPORTING


# --- Heartbeats


@pytest.mark.parametrize("how", ["unanswered", "retry"])
def test_a_failed_heartbeat_is_tried_sooner_through_another_selector(how: str) -> None:
    """A successor adopts those who come in time: waiting for the next one may be too late."""
    phone = Phone(max_backoff_s=5.0).until(Stage.TRAINING)
    phone.wait(HEARTBEAT_S)
    first = phone.heartbeats[-1]
    if how == "unanswered":
        assert phone.receive(Unanswered(first.attempt)) == []
    else:
        assert phone.answer_heartbeat(Retry("the task has moved", 0.0)) == []
    phone.wait(5.0)
    second = phone.heartbeats[-1]
    assert second.attempt > first.attempt
    assert second.to == after(first.to)
    assert second.message == first.message


def test_the_second_try_of_a_heartbeat_is_jittered_after_what_the_server_asked_for() -> None:
    waited = []
    for seed in range(60):
        phone = Phone(seed=seed, max_backoff_s=5.0).until(Stage.TRAINING)
        phone.wait(HEARTBEAT_S)
        phone.answer_heartbeat(Retry("busy", 2.0))
        waited.append(phone.client.next_wake() - phone.now)
    assert 2.0 <= min(waited) < 3.0
    assert 6.0 < max(waited) < 7.0


def test_a_heartbeat_that_may_wait_goes_at_its_usual_time() -> None:
    phone = Phone().until(Stage.TRAINING)
    phone.wait(HEARTBEAT_S)
    phone.answer_heartbeat(Retry("busy", 100.0))
    assert phone.client.next_wake() == phone.now + HEARTBEAT_S
