"""One session of one client, stage by stage: exactly what leaves the device, and how it can end."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import pytest

from papaya.client.client import Client, Stage
from papaya.client.history import Participated
from papaya.client.work import (
    Answered,
    Download,
    Downloaded,
    Ending,
    Finish,
    Remember,
    SendRequest,
    Train,
    Unanswered,
    WorkFailed,
)
from papaya.errors import ProtocolError
from papaya.machine import Effects
from papaya.messages.base import PROTOCOL_VERSION, Message
from papaya.messages.participation import (
    Aborted,
    Alive,
    Chunk,
    ChunkReceived,
    Complete,
    Completed,
    DiscardReason,
    Heartbeat,
    Join,
    Leave,
    Left,
    Refused,
    Report,
)
from papaya.messages.selection import CheckIn, Rejected
from tests.unit.client.builders import (
    ASSIGNED,
    CAPABILITIES,
    GRANTED,
    HEARTBEAT_S,
    SECURE_GRANT,
    START,
    TRAINED,
    TRAINING_TIMEOUT_S,
    UPDATE,
    UPLOAD_TIMEOUT_S,
    Phone,
    joined,
    the_only,
)

LIVE = [stage for stage in Stage if stage not in (Stage.SEALING, Stage.OVER)]
WORKING = [Stage.DOWNLOADING, Stage.TRAINING]
every_live_stage = pytest.mark.parametrize("stage", LIVE)


# --- All goes well


def test_the_whole_way_effect_by_effect() -> None:
    phone = Phone(selectors=["only"])

    def ask(attempt: int, message: Message) -> Effects:
        return [SendRequest("only", attempt, message)]

    assert phone.start() == ask(1, CheckIn(PROTOCOL_VERSION, CAPABILITIES, ()))
    assert phone.answer(ASSIGNED) == ask(2, Join(b"assignment"))
    assert phone.answer(joined()) == [Download("blob-6", 3)]
    assert phone.receive(Downloaded()) == [Train("next-word", "s1", "blob-6", 240.0)]
    assert phone.receive(TRAINED) == ask(3, Report(b"session", 20))
    remember, first = phone.answer(GRANTED)
    assert remember == Remember("next-word", Participated(1, START, 3600.0, None))
    assert isinstance(first, SendRequest)
    assert isinstance(first.message, Chunk)
    upload = first.message.upload
    pieces = [UPDATE[0:4], UPDATE[4:8], UPDATE[8:10]]
    chunks = [Chunk(b"upload", upload, i, crc32(data), data) for i, data in enumerate(pieces)]
    assert [first] == ask(4, chunks[0])
    assert phone.answer(ChunkReceived(upload, 0)) == ask(5, chunks[1])
    assert phone.answer(ChunkReceived(upload, 1)) == ask(6, chunks[2])
    assert phone.answer(ChunkReceived(upload, 2)) == ask(7, Complete(b"upload", upload))
    assert phone.answer(Completed()) == [Finish("counted", "")]
    assert phone.client.next_wake() == float("inf")


def test_an_update_that_fills_its_last_chunk_has_no_empty_one() -> None:
    phone = Phone().until(Stage.TRAINING)
    phone.receive(type(TRAINED)(b"01234567", 1))
    phone.until(Stage.COMPLETING)
    assert [m.index for m in phone.messages if isinstance(m, Chunk)] == [0, 1]


def test_the_upload_id_is_drawn_afresh_for_each_update() -> None:
    ids = set()
    for seed in range(20):
        phone = Phone(seed=seed).until(Stage.COMPLETING)
        assert isinstance(phone.asked.message, Complete)
        ids.add(phone.asked.message.upload)
    assert len(ids) == 20


def test_devices_begin_at_different_selectors() -> None:
    first = [Phone(seed=seed).until(Stage.CHECKING_IN).asked.to for seed in range(60)]
    assert sorted(set(first)) == ["selector-1", "selector-2", "selector-3"]


# --- How it ends


@every_live_stage
def test_an_abort_is_obeyed_at_once_in_every_stage(stage: Stage) -> None:
    phone = Phone().until(stage)
    if stage in WORKING:
        phone.wait(HEARTBEAT_S)
        ending = phone.answer_heartbeat(Aborted("stale"))
    else:
        ending = phone.answer(Aborted("stale"))
    assert ending == [Finish("aborted", "stale")]
    assert over(phone)


@every_live_stage
def test_a_refusal_is_obeyed_at_once_in_every_stage(stage: Stage) -> None:
    phone = Phone().until(stage)
    if stage in WORKING:
        phone.wait(HEARTBEAT_S)
        ending = phone.answer_heartbeat(Refused("expired"))
    else:
        ending = phone.answer(Refused("expired"))
    assert ending == [Finish("refused", "expired")]
    assert over(phone)


def test_a_rejected_device_is_told_its_window() -> None:
    phone = Phone().until(Stage.CHECKING_IN)
    effects = phone.answer(Rejected("full", 5.0, 15.0))
    assert effects == [Finish("rejected", "full", 5.0, 15.0)]
    assert over(phone)


@pytest.mark.parametrize("reason", ["round_over", "not_finite"])
def test_a_discarded_update_says_why(reason: DiscardReason) -> None:
    phone = Phone().until(Stage.COMPLETING)
    assert phone.answer(Completed(reason)) == [Finish("discarded", reason)]


@pytest.mark.parametrize("stage", [Stage.UPLOADING, Stage.COMPLETING])
def test_an_upload_may_end_before_its_last_request(stage: Stage) -> None:
    """A successor that finds the update among the counted ones says so to a repeated chunk."""
    assert Phone().until(stage).answer(Completed()) == [Finish("counted", "")]


@pytest.mark.parametrize("stage", WORKING)
def test_work_that_failed_frees_the_slot(stage: Stage) -> None:
    phone = Phone().until(stage)
    leave, finish = phone.receive(WorkFailed("out_of_memory"))
    assert isinstance(leave, SendRequest)
    assert leave.message == Leave(b"session", "out_of_memory")
    assert finish == Finish("failed", "out_of_memory")
    assert over(phone)


@pytest.mark.parametrize(
    ("stage", "seconds", "ending"),
    [
        (Stage.CHECKING_IN, 60.0, "gave_up"),
        (Stage.JOINING, 60.0, "gave_up"),
        (Stage.DOWNLOADING, TRAINING_TIMEOUT_S, "failed"),
        (Stage.TRAINING, TRAINING_TIMEOUT_S, "failed"),
        (Stage.REPORTING, TRAINING_TIMEOUT_S + HEARTBEAT_S, "gave_up"),
        (Stage.UPLOADING, UPLOAD_TIMEOUT_S, "gave_up"),
        (Stage.COMPLETING, UPLOAD_TIMEOUT_S, "gave_up"),
    ],
)
def test_a_stage_that_takes_too_long_is_given_up_cleanly(
    stage: Stage, seconds: float, ending: Ending
) -> None:
    """Leave frees the slot, once there is one; before joining there is nothing to leave."""
    phone = Phone(give_up_s=60.0).until(stage)
    phone.wait(seconds - 0.001)
    assert phone.endings == []
    *before, last = phone.wait(0.001)
    assert last == Finish(ending, "timed_out", detail=f"{stage.value} took too long")
    leaves = [e for e in before if isinstance(e, SendRequest) and isinstance(e.message, Leave)]
    assert len(leaves) == (stage not in (Stage.CHECKING_IN, Stage.JOINING))
    assert over(phone)


def test_joining_has_its_own_time_however_long_the_check_in_was_held() -> None:
    phone = Phone(give_up_s=60.0, check_in_timeout_s=60.0).until(Stage.CHECKING_IN)
    phone.wait(50.0)
    phone.answer(ASSIGNED)
    phone.wait(59.9)
    assert phone.endings == []
    phone.wait(0.1)
    assert [finish.detail for finish in phone.endings] == ["joining took too long"]


@every_live_stage
def test_a_wake_before_its_time_does_nothing(stage: Stage) -> None:
    phone = Phone().until(stage)
    due = phone.client.next_wake()
    assert phone.client.wake(phone.now) == phone.client.wake(due - 0.001) == []
    assert phone.client.next_wake() == due


def test_downloading_and_training_share_one_timeout() -> None:
    phone = Phone().until(Stage.DOWNLOADING)
    phone.wait(200.0)
    phone.receive(Downloaded())
    phone.wait(39.9)
    assert phone.endings == []
    phone.wait(0.1)
    assert [finish.ending for finish in phone.endings] == ["failed"]


def test_leaving_is_said_once_and_its_answer_is_not_waited_for() -> None:
    phone = Phone().until(Stage.TRAINING)
    phone.receive(WorkFailed("out_of_memory"))
    assert phone.receive(Answered(phone.asked.attempt, Left())) == []
    assert phone.receive(Unanswered(phone.asked.attempt)) == []
    assert over(phone)


def over(phone: Phone) -> bool:
    """Nothing that happens later makes the client say anything."""
    late: list[Message] = [Downloaded(), TRAINED, WorkFailed("crashed"), Unanswered(1)]
    late += [Answered(attempt, Aborted("left")) for attempt in range(1, 12)]
    assert [phone.receive(message) for message in late] == [[] for _ in late]
    assert phone.wait(10_000.0) == []
    assert phone.client.wake(phone.now) == []
    return len(phone.endings) == 1 and phone.stage is Stage.OVER


# --- Heartbeats


def test_a_working_client_sends_heartbeats() -> None:
    phone = Phone().until(Stage.DOWNLOADING)
    times = []
    for _ in range(4):
        phone.wait(HEARTBEAT_S)
        times.append(phone.now)
        assert phone.asked.message == Join(b"assignment")
        assert phone.heartbeats[-1].message == Heartbeat(b"session")
        assert phone.answer_heartbeat(Alive()) == []
        if len(times) == 2:
            phone.receive(Downloaded())
    assert len(phone.heartbeats) == 4
    assert times == [START + HEARTBEAT_S * beat for beat in (1, 2, 3, 4)]


def test_heartbeats_go_on_when_nobody_answers_them() -> None:
    phone = Phone().until(Stage.TRAINING)
    phone.wait(5 * HEARTBEAT_S)
    assert len(phone.heartbeats) == 5


@pytest.mark.parametrize("stage", [Stage.CHECKING_IN, Stage.JOINING])
def test_before_it_has_joined_a_client_sends_no_heartbeats(stage: Stage) -> None:
    phone = Phone().until(stage)
    phone.wait(55.0)
    assert phone.heartbeats == []


@pytest.mark.parametrize(
    ("stage", "ticket"),
    [
        (Stage.DOWNLOADING, b"session"),
        (Stage.TRAINING, b"session"),
        (Stage.REPORTING, b"session"),
        (Stage.SEALING, b"upload"),
        (Stage.UPLOADING, b"upload"),
        (Stage.COMPLETING, b"upload"),
    ],
)
def test_heartbeats_go_on_in_every_stage_with_the_newest_ticket(
    stage: Stage, ticket: bytes
) -> None:
    """The protocol page: "every `heartbeat_s` from `Joined` until `Completed` has arrived, always
    with the newest ticket". Three heartbeats of silence end a session.
    """
    phone = in_stage(stage)
    phone.wait(5.5 * HEARTBEAT_S)
    assert phone.stage is stage
    assert [beat.message for beat in phone.heartbeats] == [Heartbeat(ticket)] * 5


def in_stage(stage: Stage, **config: Any) -> Phone:
    phone = Phone(**config)
    match stage:
        case Stage.SEALING:
            phone.until(Stage.JOINING).answer(joined(secure=True))
            phone.until(Stage.REPORTING).answer(SECURE_GRANT)
        case Stage.OVER:
            phone.until(Stage.TRAINING).receive(WorkFailed("out_of_memory"))
        case _:
            phone.until(stage)
    return phone


ASKING = [stage for stage in LIVE if stage not in WORKING]


@pytest.mark.parametrize(
    ("stage", "is_unanswered"),
    [*((stage, False) for stage in Stage), *((stage, True) for stage in ASKING)],
)
def test_beat_does_what_wake_does_or_nothing(stage: Stage, is_unanswered: bool) -> None:
    """Simulated devices call `beat`, and `wake` only if there is no heartbeat; real ones call only
    `wake`.
    """

    def client() -> Client:
        phone = in_stage(stage, request_timeout_s=15.0, backoff_s=60.0, max_backoff_s=60.0)
        if is_unanswered:
            phone.unanswered()  # the request of the stage is sent again within a minute
        return phone.client

    beats = 0
    for half_seconds in range(600):
        beating, waking, idle = client(), client(), client()
        now = START + half_seconds / 2
        heartbeat = beating.beat(now)
        if heartbeat is None:
            assert state_of(beating) == state_of(idle)
        else:
            assert [heartbeat] == waking.wake(now)
            assert state_of(beating) == state_of(waking)
            beats += 1
    may_beat = stage not in (Stage.CHECKING_IN, Stage.JOINING, Stage.OVER)
    assert (beats > 0) == may_beat


def state_of(client: Client) -> dict[str, Any]:
    found = {name: getattr(client, name) for name in Client.__slots__}
    del found["_bundles"]  # has no state
    return found | {"_rng": client._rng.getstate()}


@pytest.mark.parametrize(
    ("stage", "answer", "ending"),
    [
        (Stage.REPORTING, Aborted("stale"), Finish("aborted", "stale")),
        (Stage.SEALING, Aborted("timed_out"), Finish("aborted", "timed_out")),
        (Stage.UPLOADING, Refused("expired"), Finish("refused", "expired")),
        (Stage.UPLOADING, Completed(), Finish("counted", "")),
        (Stage.COMPLETING, Completed("round_over"), Finish("discarded", "round_over")),
    ],
)
def test_the_answer_to_a_heartbeat_can_end_every_stage(
    stage: Stage, answer: Message, ending: Finish
) -> None:
    phone = in_stage(stage)
    phone.wait(HEARTBEAT_S)
    assert phone.answer_heartbeat(answer) == [ending]
    assert over(phone)


def test_an_answer_to_a_heartbeat_with_the_old_ticket_does_not_end_an_upload() -> None:
    """A successor that adopted the upload may refuse the session's ticket: it has expired."""
    phone = Phone().until(Stage.TRAINING)
    phone.wait(HEARTBEAT_S)
    phone.until(Stage.UPLOADING)
    assert phone.answer_heartbeat(Refused("the session has expired")) == []
    assert phone.stage is Stage.UPLOADING


def test_a_failed_heartbeat_of_an_upload_is_sent_again_within_seconds() -> None:
    phone = Phone(max_backoff_s=5.0).until(Stage.COMPLETING)
    phone.wait(HEARTBEAT_S)
    phone.receive(Unanswered(phone.heartbeats[-1].attempt))
    phone.wait(5.0)
    assert len(phone.heartbeats) == 2


def test_a_message_that_is_none_of_a_clients_is_refused() -> None:
    phone = Phone().until(Stage.TRAINING)
    with pytest.raises(ProtocolError, match="does not accept Left"):
        phone.client.receive(phone.now, Left())
    assert phone.stage is Stage.TRAINING
    assert isinstance(the_only(phone.receive(TRAINED)), SendRequest)
