"""An upload to the aggregator itself, and back to the selectors when that does not work."""

from __future__ import annotations

import pytest
from msgspec import structs

from papaya.client.client import Stage
from papaya.client.work import DirectUploadFailed, SendRequest
from papaya.config import DeviceConfig
from papaya.messages.participation import (
    Aborted,
    Chunk,
    ChunkReceived,
    Complete,
    Completed,
    Refused,
    Retry,
)
from tests.unit.client.builders import GRANTED, HEARTBEAT_S, SELECTORS, Phone

DIRECT = "https://aggregator-1.example:8750"
FIRST_BACKOFF_S = 2 * DeviceConfig().backoff_s


def granted() -> Phone:
    phone = Phone().until(Stage.REPORTING)
    phone.answer(structs.replace(GRANTED, upload_url=DIRECT))
    return phone


def completing() -> Phone:
    return granted().until(Stage.COMPLETING)


def test_chunks_and_complete_go_to_the_aggregator_and_heartbeats_do_not() -> None:
    phone = granted()
    phone.wait(HEARTBEAT_S - 1)
    phone.answer(ChunkReceived("u", 0))
    phone.wait(2.0)
    phone.until(Stage.COMPLETING)
    phone.answer(Completed())
    went = {type(r.message).__name__: r.to for r in phone.requests}
    assert went["Chunk"] == went["Complete"] == DIRECT
    assert went["Report"] in SELECTORS
    assert went["Heartbeat"] in SELECTORS
    assert [end.ending for end in phone.endings] == ["counted"]


@pytest.mark.parametrize("stage", [Stage.UPLOADING, Stage.COMPLETING])
@pytest.mark.parametrize("how", ["unanswered", "timeout", "elsewhere", "refused"])
def test_a_failure_sends_the_same_request_through_a_selector(stage: Stage, how: str) -> None:
    phone = granted().until(stage)
    first = phone.asked
    match how:
        case "unanswered":
            phone.unanswered()
        case "timeout":
            phone.wait(10.0)
        case "elsewhere":
            phone.answer(Retry("this aggregator does not hold the task", 60.0, elsewhere=True))
        case "refused":
            phone.answer(Refused("no such path"))
    reason = {"timeout": "unanswered", "elsewhere": "moved"}.get(how, how)
    assert DirectUploadFailed(DIRECT, reason) in phone.effects  # type: ignore[arg-type]
    phone.wait(FIRST_BACKOFF_S)
    again = phone.asked
    assert first.to == DIRECT
    assert again.to in SELECTORS
    assert again.message == first.message
    assert phone.stage is stage


def test_clients_that_are_sent_away_at_the_same_time_come_at_different_times() -> None:
    """A halted or revised task sends all its direct uploads to the selectors."""
    came: list[float] = []
    for seed in range(50):
        phone = Phone(seed=seed).until(Stage.REPORTING)
        phone.answer(structs.replace(GRANTED, upload_url=DIRECT))
        sent_away_at = phone.now
        phone.answer(Retry("the task has moved", 0.0, elsewhere=True))
        came.append(phone.client.next_wake() - sent_away_at)
    assert max(came) <= FIRST_BACKOFF_S
    assert max(came) - min(came) > 0.8 * FIRST_BACKOFF_S
    assert len(set(came)) == len(came)


def test_after_one_failure_the_whole_upload_goes_through_selectors() -> None:
    phone = granted()
    phone.unanswered()
    phone.wait(FIRST_BACKOFF_S)
    phone.until(Stage.COMPLETING)
    phone.answer(Completed())
    sent = [r.to for r in phone.requests if isinstance(r.message, Chunk | Complete)]
    assert sent[0] == DIRECT
    assert not set(sent[1:]) - set(SELECTORS)


def test_a_busy_aggregator_is_asked_again_later() -> None:
    phone = granted()
    assert phone.answer(Retry("all upload buffers are in use", 0.5)) == []
    phone.wait(6.0)
    assert [r.to for r in phone.requests if isinstance(r.message, Chunk)] == [DIRECT, DIRECT]


def test_a_refusal_of_the_selector_is_final() -> None:
    phone = granted()
    phone.unanswered()
    phone.wait(FIRST_BACKOFF_S)
    phone.answer(Refused("the session has expired"))
    assert [end.ending for end in phone.endings] == ["refused"]


def test_an_abort_of_the_aggregator_is_final() -> None:
    phone = completing()
    phone.answer(Aborted("stale"))
    assert [end.ending for end in phone.endings] == ["aborted"]


def test_a_new_ticket_of_a_busy_aggregator_is_used_through_the_selector() -> None:
    phone = completing()
    phone.answer(Retry("the TSA is away", 1.0, 60.0, b"renewed", elsewhere=True))
    phone.wait(FIRST_BACKOFF_S)
    again = phone.asked
    assert isinstance(again, SendRequest)
    assert isinstance(again.message, Complete)
    assert again.message.ticket == b"renewed"
    assert again.to in SELECTORS
