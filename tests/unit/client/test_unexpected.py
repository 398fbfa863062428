"""Answers that make no sense, and every order of events: a client ends once and never raises."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from papaya.client.client import Stage
from papaya.client.work import (
    Answered,
    Download,
    Downloaded,
    Finish,
    SendRequest,
    Train,
    Trained,
    Unanswered,
    WorkFailed,
)
from papaya.machine import Effects
from papaya.messages import wire
from papaya.messages.base import Message
from papaya.messages.participation import (
    Alive,
    ChunkReceived,
    Completed,
    Heartbeat,
    Incomplete,
    Joined,
    Leave,
    LeaveReason,
    Left,
    UploadGranted,
)
from papaya.messages.selection import Rejected
from tests.unit.client.builders import ASSIGNED, GRANTED, HEARTBEAT_S, Phone, joined
from tests.unit.messages.strategies import TO_DEVICE, a_message

PROGRESS: list[tuple[Message, tuple[Stage, ...]]] = [
    (Rejected("full", 1.0, 2.0), (Stage.CHECKING_IN,)),
    (ASSIGNED, (Stage.CHECKING_IN,)),
    (joined(), (Stage.JOINING,)),
    (GRANTED, (Stage.REPORTING,)),
    (ChunkReceived("u", 0), (Stage.UPLOADING,)),
    (Incomplete((0,)), (Stage.COMPLETING,)),
    (Completed(), (Stage.UPLOADING, Stage.COMPLETING)),
    (Alive(), ()),
    (Left(), ()),
]
LIVE = [stage for stage in Stage if stage not in (Stage.SEALING, Stage.OVER)]
WORKING = (Stage.DOWNLOADING, Stage.TRAINING)
NONSENSE = [
    pytest.param(stage, answer, id=f"{type(answer).__name__} while {stage.value}")
    for answer, welcome in PROGRESS
    for stage in LIVE
    if stage not in welcome and not (isinstance(answer, Alive) and stage in WORKING)
]


@pytest.mark.parametrize(("stage", "answer"), NONSENSE)
def test_an_answer_to_another_question_ends_the_session(stage: Stage, answer: Message) -> None:
    """Without an exception; never as a success; and a slot that was taken is given back."""
    phone = Phone().until(stage)
    if stage in WORKING:
        phone.wait(HEARTBEAT_S)
        effects = phone.answer_heartbeat(answer)
    else:
        effects = phone.answer(answer)
    *before, last = effects
    assert isinstance(last, Finish)
    assert last.ending in ("failed", "gave_up")
    leaves = [e for e in before if isinstance(e, SendRequest) and isinstance(e.message, Leave)]
    has_slot = stage not in (Stage.CHECKING_IN, Stage.JOINING)
    assert len(leaves) == len(before) == has_slot
    assert phone.stage is Stage.OVER


@pytest.mark.parametrize("heartbeat_s", [0.0, 1e-12])
def test_a_server_that_wants_heartbeats_without_pause_does_not_hang_the_client(
    heartbeat_s: float,
) -> None:
    phone = Phone().until(Stage.JOINING)
    phone.answer(joined(heartbeat_s=heartbeat_s, training_timeout_s=60.0))
    phone.wait(60.0)
    assert len(phone.heartbeats) <= 600


# --- Every order of events

ANSWERS = (
    st.sampled_from([answer for answer, _ in PROGRESS])
    | a_message(*TO_DEVICE)
    | st.builds(
        joined,
        heartbeat_s=st.floats(0.1, 100),
        training_timeout_s=st.floats(0, 1000),
        participation_gap_s=st.floats(0, 1e5),
        max_participations=st.none() | st.integers(0, 3),
    )
    | st.builds(UploadGranted, st.just(b"u"), st.integers(0, 9), st.integers(1, 9), st.floats(0, 9))
    | st.builds(Incomplete, st.lists(st.integers(0, 9)).map(tuple))
)


class AnySequence(RuleBasedStateMachine):
    """The driver is honest (it answers what was asked, and works as told); the server is not."""

    @initialize(seed=st.integers(0, 99), selectors=st.integers(1, 3))
    def begin(self, seed: int, selectors: int) -> None:
        self.phone = Phone(seed=seed, selectors=[f"s{n}" for n in range(selectors)])
        self.did(self.phone.start())

    @rule(answer=ANSWERS, back=st.integers(1, 3))
    def answered(self, answer: Message, back: int) -> None:
        """Mostly the newest request, sometimes an older one."""
        if not is_sane(answer):
            return
        attempt = self.phone.requests[-min(back, len(self.phone.requests))].attempt
        self.did(self.phone.receive(Answered(attempt, answer)))

    @rule()
    def goes_well(self) -> None:
        if self.phone.stage not in (Stage.COMPLETING, Stage.OVER):
            seen = len(self.phone.effects)
            self.phone.go_on()
            self.did(self.phone.effects[seen:])

    @rule(back=st.integers(1, 3))
    def unanswered(self, back: int) -> None:
        attempt = self.phone.requests[-min(back, len(self.phone.requests))].attempt
        self.did(self.phone.receive(Unanswered(attempt)))

    @rule(seconds=st.floats(0, 300))
    def time_passes(self, seconds: float) -> None:
        has_session = self.phone.stage not in (Stage.CHECKING_IN, Stage.JOINING, Stage.OVER)
        effects = self.phone.wait(seconds)
        beats = [
            e for e in effects if isinstance(e, SendRequest) and isinstance(e.message, Heartbeat)
        ]
        assert has_session or not beats
        self.did(effects)

    @precondition(lambda self: self.is_working)
    @rule(reason=st.sampled_from(get_args(LeaveReason)))
    def work_fails(self, reason: LeaveReason) -> None:
        self.did(self.phone.receive(WorkFailed(reason)))

    @precondition(lambda self: self.is_working)
    @rule(update=st.binary(min_size=1, max_size=20), examples=st.integers(1, 2**31))
    def work_is_done(self, update: bytes, examples: int) -> None:
        work = [e for e in self.phone.effects if isinstance(e, Download | Train)][-1]
        done = Downloaded() if isinstance(work, Download) else Trained(update, examples)
        self.did(self.phone.receive(done))

    @property
    def is_working(self) -> bool:
        return hasattr(self, "phone") and self.phone.stage in WORKING

    def did(self, effects: Effects) -> None:
        for effect in effects:
            if isinstance(effect, SendRequest):
                assert wire.from_device.parse(wire.encode(effect.message)) == effect.message

    @invariant()
    def ends_at_most_once_and_is_silent_then(self) -> None:
        if not hasattr(self, "phone"):
            return
        phone = self.phone
        assert (len(phone.endings) == 1) is (phone.stage is Stage.OVER)
        assert len(phone.endings) <= 1
        if phone.stage is Stage.OVER:
            assert isinstance(phone.effects[-1], Finish)
            assert phone.client.next_wake() == float("inf")
        else:
            assert phone.client.next_wake() < float("inf")
        attempts = [request.attempt for request in phone.requests]
        assert attempts == list(range(1, len(attempts) + 1))


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=150, stateful_step_count=25)


@settings(max_examples=300)
@given(st.lists(ANSWERS, max_size=12))
def test_a_session_always_ends(answers: list[Message]) -> None:
    """Whatever is answered, and however long it takes: the device is free again."""
    phone = Phone()
    phone.start()
    for answer in answers:
        if phone.stage is Stage.DOWNLOADING:
            phone.receive(Downloaded())
        if phone.stage is Stage.TRAINING:
            phone.receive(Trained(b"1", 1))
        if phone.stage is not Stage.OVER and is_sane(answer):
            phone.answer(answer)
    phone.wait(2e4)
    assert len(phone.endings) == 1


def is_sane(answer: Message) -> bool:
    """How long a session may take is for its task to say."""
    match answer:
        case Joined():
            return 0.1 <= answer.heartbeat_s <= 1000 and answer.training_timeout_s <= 1000
        case UploadGranted():
            return answer.upload_timeout_s <= 1000
    return True
