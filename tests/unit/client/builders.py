"""Small builders for client tests: one device, driven by hand through the stages of a session."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from msgspec import structs

from papaya.client.client import Client, Stage
from papaya.client.history import History
from papaya.client.work import Answered, Downloaded, Finish, SendRequest, Trained, Unanswered
from papaya.config import DeviceConfig
from papaya.machine import Effect, Effects
from papaya.messages.base import Message
from papaya.messages.participation import (
    ChunkReceived,
    Heartbeat,
    Joined,
    SecureOffer,
    UploadGranted,
)
from papaya.messages.selection import Accepted, Capabilities

SELECTORS = ("selector-1", "selector-2", "selector-3")
CAPABILITIES = Capabilities("torch", ("ab12",), 512)
START = 1_000.0
HEARTBEAT_S, TRAINING_TIMEOUT_S, UPLOAD_TIMEOUT_S = 10.0, 240.0, 120.0
CHUNK_BYTES = 4
UPDATE = b"0123456789"  # three chunks: 4 + 4 + 2 bytes
TRAINED = Trained(UPDATE, examples=20)

ASSIGNED = Accepted(b"assignment", "next-word", "s1")
GRANTED = UploadGranted(b"upload", 7, CHUNK_BYTES, UPLOAD_TIMEOUT_S)
OFFER = SecureOffer(b"parameters", b"offer", b"identity", "sgx", b"evidence", b"collateral", 3)
SECURE_GRANT = structs.replace(GRANTED, secure=OFFER)


def joined(**changes: Any) -> Joined:
    whole: dict[str, Any] = {
        "ticket": b"session",
        "task": "next-word",
        "session": "s1",
        "version": 6,
        "parameters": "blob-6",
        "model_length": 3,
        "update_length": 3,
        "evaluates": False,
        "heartbeat_s": HEARTBEAT_S,
        "training_timeout_s": TRAINING_TIMEOUT_S,
        "participation_gap_s": 3600.0,
        "max_participations": None,
    }
    return Joined(**{**whole, **changes})


class Phone:
    """A client, the time, and every effect that has come out of it so far."""

    def __init__(
        self,
        *,
        selectors: Sequence[str] = SELECTORS,
        history: History | None = None,
        seed: int = 1,
        **config: Any,
    ) -> None:
        self.history = History(floor_s=3600.0) if history is None else history
        device = DeviceConfig(**config)
        self.client = Client(selectors, CAPABILITIES, self.history, device, Random(seed))
        self.now = START
        self.effects: Effects = []

    @property
    def stage(self) -> Stage:
        return self.client.stage

    @property
    def requests(self) -> list[SendRequest]:
        return [effect for effect in self.effects if isinstance(effect, SendRequest)]

    @property
    def messages(self) -> list[Message]:
        return [request.message for request in self.requests]

    @property
    def heartbeats(self) -> list[SendRequest]:
        return [request for request in self.requests if isinstance(request.message, Heartbeat)]

    @property
    def asked(self) -> SendRequest:
        """The newest request that is no heartbeat."""
        return [r for r in self.requests if not isinstance(r.message, Heartbeat)][-1]

    @property
    def endings(self) -> list[Finish]:
        return [effect for effect in self.effects if isinstance(effect, Finish)]

    def start(self) -> Effects:
        return self._keep(self.client.start(self.now))

    def receive(self, message: Message) -> Effects:
        return self._keep(self.client.receive(self.now, message))

    def answer(self, message: Message) -> Effects:
        return self.receive(Answered(self.asked.attempt, message))

    def answer_heartbeat(self, message: Message) -> Effects:
        return self.receive(Answered(self.heartbeats[-1].attempt, message))

    def unanswered(self) -> Effects:
        return self.receive(Unanswered(self.asked.attempt))

    def wait(self, seconds: float) -> Effects:
        """Time passes; the client is woken whenever it asked for it."""
        until, seen = self.now + seconds, len(self.effects)
        while self.client.next_wake() <= until:
            due = self.client.next_wake()
            self.now = max(self.now, due)
            self._keep(self.client.wake(self.now))
            # A timer that fires again at once, forever, would hang its driver.
            assert len(self.effects) - seen < 10_000
            assert self.client.next_wake() > due
        self.now = until
        return self.effects[seen:]

    def until(self, stage: Stage) -> Phone:
        """Goes on as if all went well, up to the beginning of a stage."""
        if not self.effects:
            self.start()
        while self.stage is not stage:
            self.go_on()
        return self

    def go_on(self) -> None:
        """One step as if all went well."""
        match self.stage:
            case Stage.CHECKING_IN:
                self.answer(ASSIGNED)
            case Stage.JOINING:
                self.answer(joined())
            case Stage.DOWNLOADING:
                self.receive(Downloaded())
            case Stage.TRAINING:
                self.receive(TRAINED)
            case Stage.REPORTING:
                self.answer(GRANTED)
            case Stage.UPLOADING:
                self.answer(ChunkReceived("u", 0))
            case _:
                raise AssertionError(f"a session does not go on from {self.stage}")

    def _keep(self, effects: Effects) -> Effects:
        self.effects += effects
        return effects


def the_only(effects: Effects) -> Effect:
    [effect] = effects
    return effect
