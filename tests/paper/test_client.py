"""The paper's sentences on the client: its stages, virtual session, history and retries."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from papaya.client.client import Stage
from papaya.client.history import History
from papaya.client.work import (
    Download,
    Downloaded,
    Finish,
    SendRequest,
    Train,
    WorkFailed,
)
from papaya.config import ServerConfig, TaskConfig
from papaya.machine import Effect
from papaya.messages.participation import (
    Aborted,
    Chunk,
    ChunkReceived,
    Complete,
    Completed,
    Heartbeat,
    Join,
    Leave,
    Report,
    Retry,
)
from papaya.messages.selection import CheckIn, Rejected
from tests.unit.client.builders import (
    ASSIGNED,
    GRANTED,
    HEARTBEAT_S,
    START,
    TRAINED,
    UPDATE,
    Phone,
    joined,
)


def kind(effect: Effect) -> type:
    return type(effect.message) if isinstance(effect, SendRequest) else type(effect)


def test_a_client_checks_in_then_executes_the_protocol() -> None:
    """Client Runtime: "If a client is eligible for training, the client checks in with the server
    to execute the FL client protocol".
    """
    phone = Phone()
    [effect] = phone.start()
    assert kind(effect) is CheckIn


def test_participation_consists_of_four_stages() -> None:
    """Client Independence: "1. A client first downloads model parameters [...]. 2. Next, the client
    trains the downloaded model on its local data. 3. Once the training finishes, the client reports
    its status to the server. The server shares an upload configuration with the client [...].
    4. In the final stage, the client uploads the model in chunks".
    """
    phone = Phone().until(Stage.COMPLETING)
    phone.answer(Completed())
    stages = [kind(effect) for effect in phone.effects]
    assert [stage.__name__ for stage in stages] == [
        *("CheckIn", "Join", "Download", "Train", "Report"),
        *("Remember", "Chunk", "Chunk", "Chunk", "Complete", "Finish"),
    ]


def test_the_downloaded_model_is_the_one_that_is_trained() -> None:
    """Client Independence: "the client trains the downloaded model on its local data"."""
    phone = Phone().until(Stage.REPORTING)
    [download] = [effect for effect in phone.effects if isinstance(effect, Download)]
    [train] = [effect for effect in phone.effects if isinstance(effect, Train)]
    assert download.parameters == train.parameters == joined().parameters


def test_the_upload_is_as_the_server_configured_it() -> None:
    """Client Independence: "The server shares an upload configuration with the client"."""
    phone = Phone().until(Stage.COMPLETING)
    sent = [message for message in phone.messages if isinstance(message, Chunk)]
    assert [len(chunk.data) for chunk in sent] == [4, 4, 2]
    assert b"".join(chunk.data for chunk in sent) == UPDATE
    assert {chunk.ticket for chunk in sent} == {GRANTED.ticket}


def test_every_stage_happens_within_the_session_established_during_selection() -> None:
    """Client Independence: "All stages happen within a virtual session established during
    selection." Each request carries all that is needed: the ticket from the stage before.
    """
    phone = Phone().until(Stage.TRAINING)
    phone.wait(HEARTBEAT_S)
    phone.until(Stage.COMPLETING)
    tickets = {
        type(message): message.ticket
        for message in phone.messages
        if isinstance(message, Join | Heartbeat | Report | Chunk | Complete)
    }
    assert tickets == {
        Join: ASSIGNED.ticket,
        Heartbeat: joined().ticket,
        Report: joined().ticket,
        Chunk: GRANTED.ticket,
        Complete: GRANTED.ticket,
    }


@pytest.mark.parametrize("failures", [1, 2])
def test_transient_failures_do_not_make_a_client_drop_out(failures: int) -> None:
    """Client Independence: "transient client failures do not cause clients to dropout because the
    client protocol is based on virtual sessions instead of persistent connections." Here the
    connection breaks under every single request.
    """
    phone = Phone()
    phone.start()
    while phone.stage is not Stage.COMPLETING:
        if phone.stage not in (Stage.DOWNLOADING, Stage.TRAINING):
            fail(phone, failures)
        phone.go_on()
    fail(phone, failures)
    assert phone.answer(Completed()) == [Finish("counted", "")]
    assert len({request.to for request in phone.requests}) == 3


def fail(phone: Phone, times: int) -> None:
    for _ in range(times):
        phone.unanswered()
        phone.wait(5.0)


@pytest.mark.parametrize(
    "happens",
    [
        lambda phone: phone.unanswered(),
        lambda phone: phone.wait(30.0),
        lambda phone: phone.answer(Retry("no aggregator is known for the task", 0.0)),
    ],
    ids=["selector refuses the connection", "selector died", "selector has a stale map"],
)
def test_a_client_retries_through_a_different_selector(happens: Callable[[Phone], object]) -> None:
    """Failure Recovery: "Upon selector failure or selector having stale assignment map clients
    retry through a different selector."
    """
    phone = Phone().until(Stage.JOINING)
    first = phone.asked
    happens(phone)
    phone.wait(5.0)
    again = next(r for r in phone.requests if r.attempt > first.attempt)
    assert again.message == first.message
    assert again.to != first.to


def test_a_rejected_client_tries_at_another_time() -> None:
    """Client Independence: "rejection (client will try to participate at another time)"."""
    phone = Phone().until(Stage.CHECKING_IN)
    phone.answer(Rejected("no task needs clients now", 60.0, 180.0))
    assert phone.endings == [Finish("rejected", "no task needs clients now", 60.0, 180.0)]
    assert phone.wait(10_000.0) == []


def test_training_time_is_limited_to_4_minutes() -> None:
    """Experimental Setup: "a timeout is imposed to limit the client training time; we set the
    timeout to 4 minutes."
    """
    config = TaskConfig(task="a", concurrency=10, model_length=1)
    phone = Phone().until(Stage.JOINING)
    phone.answer(joined(training_timeout_s=config.training_timeout_s))
    phone.receive(Downloaded())
    phone.wait(4 * 60 - 1.0)
    assert phone.stage is Stage.TRAINING
    phone.wait(1.0)
    assert [finish.ending for finish in phone.endings] == ["failed"]


def test_a_client_tracks_its_participation() -> None:
    """Client Runtime: "It also tracks prior participation history to enable fair and unbiased
    client selection."
    """
    history = History(floor_s=3600.0)
    assert history.excluded(START) == ()
    Phone(history=history).until(Stage.COMPLETING).answer(Completed())
    again = Phone(history=history)
    again.start()
    hello = again.asked.message
    assert isinstance(hello, CheckIn)
    assert hello.excluded == ("next-word",)
    assert history.excluded(START + 3600.0) == ()


def test_a_living_client_is_never_silent_for_as_long_as_the_dead() -> None:
    """Enforcing Max Concurrency: a client "may be considered dead due to missed heartbeats". One
    that trains, even while every other heartbeat is lost, must not be.
    """
    phone = Phone().until(Stage.DOWNLOADING)
    heard_at = START
    while phone.now < START + 230:
        seen = len(phone.heartbeats)
        phone.wait(0.5)
        for heartbeat in phone.heartbeats[seen:]:
            if heartbeat.attempt % 2:
                heard_at = phone.now
        assert phone.now - heard_at < ServerConfig(heartbeat_s=HEARTBEAT_S).dead_after_s


def test_a_client_that_cannot_go_on_says_so() -> None:
    """Enforcing Max Concurrency: "it may be considered dead due to [...] execution error". A client
    that still can tells the server, so that it is replaced at once.
    """
    phone = Phone().until(Stage.TRAINING)
    phone.receive(WorkFailed("diverged"))
    assert phone.asked.message == Leave(b"session", "diverged")


ASKING = [stage for stage in Stage if stage not in (Stage.SEALING, Stage.OVER)]


@pytest.mark.parametrize("stage", ASKING)
def test_a_client_obeys_an_abort(stage: Stage) -> None:
    """Handling Staleness: "to bound staleness, the aggregator abort clients whose staleness is
    larger than a configurable parameter".
    """
    phone = Phone().until(stage)
    if stage in (Stage.DOWNLOADING, Stage.TRAINING):
        phone.wait(HEARTBEAT_S)
        phone.answer_heartbeat(Aborted("stale"))
    else:
        phone.answer(Aborted("stale"))
    assert phone.endings == [Finish("aborted", "stale")]
    assert phone.receive(TRAINED) == []


def test_a_client_depends_on_no_other_client() -> None:
    """Client Independence: "PAPAYA's client protocol deliberately avoids any inter-client
    dependency." Two sessions interleaved in any way are each the same as alone.
    """
    alone = Phone(seed=4).until(Stage.COMPLETING)
    first, second = Phone(seed=4), Phone(seed=9)
    first.start()
    second.start()
    while first.stage is not Stage.COMPLETING:
        first.go_on()
        if second.stage is not Stage.COMPLETING:
            second.go_on()
    assert first.effects == alone.effects


def test_chunks_are_acknowledged_one_by_one() -> None:
    """Client Independence: "the client uploads the model in chunks"."""
    phone = Phone().until(Stage.UPLOADING)
    for number in range(3):
        assert isinstance(phone.asked.message, Chunk)
        assert phone.asked.message.index == number
        phone.answer(ChunkReceived("u", number))
    assert isinstance(phone.asked.message, Complete)
