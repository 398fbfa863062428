"""Secure aggregation on the client's side: one seal per update, and nothing else leaves."""

from __future__ import annotations

from papaya.client.client import Stage
from papaya.client.work import Finish, Remember, Seal, Sealed, WorkFailed
from papaya.messages.participation import (
    Chunk,
    ChunkReceived,
    Complete,
    Incomplete,
    Leave,
    Report,
    Retry,
)
from tests.unit.client.builders import GRANTED, OFFER, SECURE_GRANT, TRAINED, UPDATE, Phone, joined

MASKED, SEAL = b"masked-bytes", b"sealed-seed"


def reporting() -> Phone:
    phone = Phone().until(Stage.JOINING)
    phone.answer(joined(secure=True))
    return phone.until(Stage.REPORTING)


def sealing() -> Phone:
    phone = reporting()
    phone.answer(SECURE_GRANT)
    return phone


def test_the_number_of_examples_is_not_told() -> None:
    phone = reporting()
    assert TRAINED.examples > 1
    assert phone.messages[-1] == Report(b"session", 1)


def test_an_offer_is_sealed_before_anything_is_sent() -> None:
    phone = reporting()
    effects = phone.answer(SECURE_GRANT)
    assert effects == [Seal("next-word", OFFER, UPDATE, TRAINED.examples, 6, 7)]
    assert phone.stage is Stage.SEALING
    assert not any(isinstance(message, Chunk) for message in phone.messages)


def test_what_is_sent_is_the_masked_update_and_its_sealed_seed() -> None:
    phone = sealing()
    first = phone.receive(Sealed(MASKED, SEAL))
    assert isinstance(first[0], Remember)
    while phone.stage is Stage.UPLOADING:
        phone.answer(ChunkReceived("u", 0))
    chunks = [message for message in phone.messages if isinstance(message, Chunk)]
    assert b"".join(chunk.data for chunk in chunks) == MASKED
    completion = phone.messages[-1]
    assert isinstance(completion, Complete)
    assert completion.sealed == SEAL


def test_whatever_a_server_says_was_lost_the_same_bytes_are_sent_again() -> None:
    """Sealed for two offers, two sums would differ by one client (DESIGN 7)."""
    phone = sealing()
    phone.receive(Sealed(MASKED, SEAL))
    phone.until(Stage.COMPLETING)
    phone.answer(Incomplete((0, 1, 2)))
    phone.until(Stage.COMPLETING)
    phone.answer(Retry("lost", 0.0))
    phone.wait(10.0)
    seals = [effect for effect in phone.effects if isinstance(effect, Seal)]
    completions = [message for message in phone.messages if isinstance(message, Complete)]
    assert len(seals) == 1
    assert {completion.sealed for completion in completions} == {SEAL}
    assert len(completions) >= 3


def test_a_second_grant_is_no_answer_once_it_is_sealed() -> None:
    phone = sealing()
    phone.receive(Sealed(MASKED, SEAL))
    phone.answer(SECURE_GRANT)
    assert phone.stage is Stage.OVER
    assert sum(isinstance(effect, Seal) for effect in phone.effects) == 1


def test_a_secure_task_without_an_offer_is_left() -> None:
    phone = reporting()
    phone.answer(GRANTED)
    assert phone.stage is Stage.OVER
    assert isinstance(phone.messages[-1], Leave)
    assert not any(isinstance(message, Chunk) for message in phone.messages)


def test_an_offer_that_the_device_does_not_believe_ends_the_visit() -> None:
    phone = sealing()
    phone.receive(WorkFailed("untrusted"))
    assert phone.stage is Stage.OVER
    [finish] = [effect for effect in phone.effects if isinstance(effect, Finish)]
    assert (finish.ending, finish.reason) == ("failed", "untrusted")
    assert not any(isinstance(effect, Remember) for effect in phone.effects)


def test_sealing_that_takes_too_long_ends_the_visit() -> None:
    phone = sealing()
    phone.wait(GRANTED.upload_timeout_s + 1)
    assert phone.stage is Stage.OVER
