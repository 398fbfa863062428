"""The upload: numbered chunks under one id, again exactly those that the server lacks."""

from __future__ import annotations

from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.client.client import Stage
from papaya.client.work import Finish, Moving, Remember, SendRequest, Trained
from papaya.messages import wire
from papaya.messages.participation import (
    MAX_CHUNKS,
    Chunk,
    ChunkReceived,
    Complete,
    Completed,
    Incomplete,
    Retry,
    UploadGranted,
)
from tests.unit.client.builders import GRANTED, Phone


def chunks(phone: Phone) -> list[Chunk]:
    return [message for message in phone.messages if isinstance(message, Chunk)]


def uploading(update: bytes, chunk_bytes: int) -> Phone:
    phone = Phone().until(Stage.TRAINING)
    phone.receive(Trained(update, examples=1))
    phone.answer(UploadGranted(b"upload", 7, chunk_bytes, 120.0))
    return phone


@given(st.binary(min_size=1, max_size=200), st.integers(1, 64))
def test_the_chunks_put_together_are_the_update(update: bytes, chunk_bytes: int) -> None:
    phone = uploading(update, chunk_bytes).until(Stage.COMPLETING)
    sent = chunks(phone)
    assert b"".join(chunk.data for chunk in sent) == update
    assert [chunk.index for chunk in sent] == list(range(len(sent)))
    assert all(len(chunk.data) == chunk_bytes for chunk in sent[:-1])
    assert all(chunk.crc32 == crc32(chunk.data) for chunk in sent)
    assert {chunk.ticket for chunk in sent} == {b"upload"}
    assert {chunk.upload for chunk in sent} == {sent[0].upload}


@given(st.binary(min_size=1, max_size=64), st.data())
def test_exactly_the_missing_chunks_are_sent_again(update: bytes, data: st.DataObject) -> None:
    phone = uploading(update, 4).until(Stage.COMPLETING)
    first = chunks(phone)
    missing = data.draw(st.lists(st.integers(0, len(first) - 1), unique=True))
    phone.answer(Incomplete(tuple(missing)))
    phone.until(Stage.COMPLETING)
    assert chunks(phone)[len(first) :] == [first[index] for index in missing]
    assert phone.asked.message == Complete(b"upload", first[0].upload)
    assert phone.answer(Completed()) == [Finish("counted", "")]


def test_a_successor_that_has_nothing_gets_everything() -> None:
    phone = Phone().until(Stage.COMPLETING)
    phone.answer(Incomplete((0, 1, 2)))
    phone.until(Stage.COMPLETING)
    assert [chunk.index for chunk in chunks(phone)] == [0, 1, 2, 0, 1, 2]


def test_chunks_that_the_update_does_not_have_are_not_sent() -> None:
    phone = Phone().until(Stage.COMPLETING)
    phone.answer(Incomplete((3, 1, MAX_CHUNKS - 1)))
    phone.until(Stage.COMPLETING)
    assert [chunk.index for chunk in chunks(phone)] == [0, 1, 2, 1]


def test_one_chunk_at_a_time() -> None:
    """The next one is sent when the one before has been received."""
    phone = Phone().until(Stage.UPLOADING)
    assert [chunk.index for chunk in chunks(phone)] == [0]
    phone.answer(ChunkReceived("u", 0))
    assert [chunk.index for chunk in chunks(phone)] == [0, 1]


def test_a_lost_chunk_is_sent_again_as_it_was() -> None:
    phone = Phone().until(Stage.UPLOADING)
    phone.answer(ChunkReceived("u", 0))
    phone.unanswered()
    phone.wait(5.0)
    sent = chunks(phone)
    assert [chunk.index for chunk in sent] == [0, 1, 1]
    assert sent[1] == sent[2]


def test_a_chunk_that_moves_is_not_sent_again_until_the_upload_ends() -> None:
    """A device that needs eleven seconds for a chunk is slow, not lost."""
    phone = Phone().until(Stage.UPLOADING)
    for _ in range(14):
        phone.wait(8.0)
        phone.receive(Moving(phone.asked.attempt))
    assert [chunk.index for chunk in chunks(phone)] == [0]
    phone.answer(ChunkReceived("u", 0))
    assert [chunk.index for chunk in chunks(phone)] == [0, 1]
    phone.wait(8.1)
    assert [finish.ending for finish in phone.endings] == ["gave_up"]


def test_a_chunk_that_stands_still_is_sent_again() -> None:
    phone = Phone().until(Stage.UPLOADING)
    first = phone.asked.attempt
    phone.wait(8.0)
    phone.receive(Moving(first))
    phone.wait(20.0)
    assert [chunk.index for chunk in chunks(phone)][:2] == [0, 0]
    sent = len(chunks(phone))
    phone.receive(Moving(first))
    phone.wait(20.0)
    assert len(chunks(phone)) > sent, "a request that was given up moves nothing"


def test_the_upload_has_a_deadline_of_its_own_that_resending_does_not_move() -> None:
    phone = Phone().until(Stage.COMPLETING)
    for _ in range(11):
        phone.wait(10.0 - 0.001)
        phone.answer(Incomplete((0,)))
        phone.until(Stage.COMPLETING)
    assert phone.endings == []
    phone.wait(10.1)
    assert [finish.ending for finish in phone.endings] == ["gave_up"]


def test_the_participation_is_remembered_before_the_first_chunk_leaves() -> None:
    phone = Phone().until(Stage.REPORTING)
    assert [effect for effect in phone.effects if isinstance(effect, Remember)] == []
    effects = phone.answer(GRANTED)
    assert [type(effect) for effect in effects] == [Remember, SendRequest]
    phone.until(Stage.COMPLETING)
    assert len([effect for effect in phone.effects if isinstance(effect, Remember)]) == 1


# --- What must not leave the device


def test_an_update_in_more_chunks_than_the_protocol_numbers_is_not_begun() -> None:
    """Its last chunks could never be delivered: a server that grants such an upload is wrong."""
    phone = uploading(bytes(4 * (MAX_CHUNKS + 1)), 4)
    assert chunks(phone) == []
    assert [finish.ending for finish in phone.endings] == ["failed"]
    longest = uploading(bytes(4 * MAX_CHUNKS), 4)
    assert len(chunks(longest)) == 1


@pytest.mark.parametrize("examples", [0, -1])
def test_training_on_nothing_is_a_failure_and_no_report(examples: int) -> None:
    """A report of no examples is one that no server can parse."""
    phone = Phone().until(Stage.TRAINING)
    phone.receive(Trained(b"0123", examples))
    for message in phone.messages:
        wire.from_device.parse(wire.encode(message))
    assert [finish.ending for finish in phone.endings] == ["failed"]


def test_an_empty_update_is_a_failure_and_not_asked_for_forever() -> None:
    """A server answers Incomplete to it, the client has nothing to send, and so on."""
    phone = Phone().until(Stage.TRAINING)
    phone.receive(Trained(b"", examples=1))
    assert [finish.ending for finish in phone.endings] == ["failed"]


def test_a_client_survives_refusals_because_too_many_chunks_are_being_received() -> None:
    """Each asks it to come back after up to 15 s; `upload_timeout_s` is 120 s."""
    phone = Phone().until(Stage.UPLOADING)
    for refusals in range(1, 6):
        phone.answer(Retry("too many chunks are being received", 15.0))
        phone.wait(20.0)  # its own back-off is at most 5 s
        assert len(chunks(phone)) == 1 + refusals
    assert len(phone.heartbeats) >= 10, "or the server would abort the session"
    phone.until(Stage.COMPLETING)
    assert [chunk.index for chunk in chunks(phone)] == [0] * 6 + [1, 2]
    assert phone.answer(Completed()) == [Finish("counted", "")]
