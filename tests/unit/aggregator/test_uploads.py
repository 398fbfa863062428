"""Uploads in chunks: late, twice, out of order, damaged, for another upload id; and bad updates."""

from __future__ import annotations

import math

import pytest

from papaya.aggregator.upload import chunk_count, chunk_length
from papaya.aggregator.work import Fold, Keep
from papaya.config import ServerConfig
from papaya.messages.base import Message
from papaya.messages.participation import (
    ChunkReceived,
    Complete,
    Completed,
    Incomplete,
    Joined,
    Refused,
    Retry,
    UploadGranted,
)
from tests.unit.aggregator.builders import (
    SERVER,
    Node,
    Phone,
    World,
    a_task,
    a_world,
    an_async_task,
    chunks_of,
)

H = SERVER.heartbeat_s
A_MOMENT_S = 2.0**-10
FIRST, SECOND = chunks_of((1, 2, 3, 4), SERVER.chunk_bytes)


def an_uploader(goal: int = 1) -> tuple[World, Node, Phone]:
    """A client that has reported and may send its two chunks."""
    world, node = a_world(an_async_task(goal))
    [phone] = world.joined(node, 1)
    assert isinstance(phone.report(), UploadGranted)
    return world, node, phone


def finished(world: World, phone: Phone, upload: str = "u1") -> Message | None:
    return world.answers.get(phone.complete(upload))


# -- chunks ---------------------------------------------------------------------------------


def test_the_grant_says_how_to_upload() -> None:
    world, node = a_world(a_task(upload_timeout_s=77.0))
    [phone] = world.joined(node, 1)
    granted = phone.report()
    assert isinstance(granted, UploadGranted)
    assert (granted.version, granted.chunk_bytes, granted.upload_timeout_s) == (0, 8, 77.0)


def test_chunks_in_order_become_the_update() -> None:
    world, _, phone = an_uploader()
    assert phone.chunk(0, FIRST) == ChunkReceived("u1", 0)
    assert phone.chunk(1, SECOND) == ChunkReceived("u1", 1)
    assert finished(world, phone) == Completed()
    assert world.parameters(1) == [1, 2, 3, 4]


def test_chunks_may_come_out_of_order() -> None:
    world, _, phone = an_uploader()
    phone.chunk(1, SECOND)
    phone.chunk(0, FIRST)
    assert finished(world, phone) == Completed()
    assert world.parameters(1) == [1, 2, 3, 4]


def test_a_chunk_twice_gets_the_same_answer_and_is_kept_once() -> None:
    world, node, phone = an_uploader()
    assert phone.chunk(0, FIRST) == phone.chunk(0, FIRST) == ChunkReceived("u1", 0)
    assert len(node.did(Keep)) == 1
    phone.chunk(1, SECOND)
    assert finished(world, phone) == Completed()
    assert world.parameters(1) == [1, 2, 3, 4]


def test_complete_too_early_names_what_is_missing() -> None:
    world, _, phone = an_uploader()
    assert finished(world, phone) == Incomplete((0, 1))
    phone.chunk(1, SECOND)
    assert finished(world, phone) == Incomplete((0,))
    phone.chunk(0, FIRST)
    assert finished(world, phone) == Completed()


def test_complete_twice_is_counted_once_and_answered_twice() -> None:
    world, node, phone = an_uploader()
    phone.send(1, 2, 3, 4)
    node.hold(Fold)
    handles = [phone.complete(), phone.complete()]
    assert [world.answers.get(handle) for handle in handles] == [None, None]
    node.release()
    assert [world.answers[handle] for handle in handles] == [Completed(), Completed()]
    assert finished(world, phone) == Completed(), "and once more, after the session has ended"
    assert world.consumed() == [phone.session]
    assert len(node.did(Fold)) == 1


def test_another_upload_id_starts_again() -> None:
    """At chunk 0, and bytes of two encodings never meet in one update."""
    world, _, phone = an_uploader()
    phone.chunk(0, FIRST, upload="old")
    last = chunks_of((0, 0, 9, 9), 8)[1]
    assert isinstance(phone.chunk(1, last, upload="new"), Refused)
    phone.chunk(0, chunks_of((8, 8), 8)[0], upload="new")
    assert finished(world, phone, "new") == Incomplete((1,))
    phone.chunk(1, last, upload="new")
    assert finished(world, phone, "new") == Completed()
    assert world.parameters(1) == [8, 8, 9, 9]


def test_completing_an_upload_id_that_was_given_up_needs_all_its_chunks() -> None:
    world, _, phone = an_uploader()
    phone.send(1, 2, 3, 4, upload="old")
    phone.chunk(0, FIRST, upload="new")
    assert finished(world, phone, "old") == Incomplete((0, 1))
    assert world.version == 0


def test_a_damaged_chunk_is_asked_for_again_and_not_kept() -> None:
    world, node, phone = an_uploader()
    answer = phone.chunk(0, b"damaged!", crc32=1234)
    assert isinstance(answer, Retry)
    assert node.did(Keep) == []
    assert finished(world, phone) == Incomplete((0, 1))
    phone.send(1, 2, 3, 4)
    assert finished(world, phone) == Completed()


@pytest.mark.parametrize("data", [b"", b"1234567", b"123456789", b"x" * 16], ids=len)
def test_a_chunk_of_another_length_is_refused(data: bytes) -> None:
    world, node, phone = an_uploader()
    assert isinstance(phone.chunk(0, data), Refused)
    assert isinstance(phone.chunk(1, data), Refused)
    assert node.did(Keep) == []
    assert finished(world, phone) == Incomplete((0, 1))


@pytest.mark.parametrize("index", [2, 3, 4095])
@pytest.mark.parametrize("length", [0, 8])
def test_a_chunk_out_of_range_is_refused(index: int, length: int) -> None:
    _, node, phone = an_uploader()
    assert isinstance(phone.chunk(index, b"x" * length), Refused)
    assert node.did(Keep) == []


def test_a_refused_chunk_ends_nothing_for_a_client_that_does_better() -> None:
    world, _, phone = an_uploader()
    phone.chunk(7, b"x")
    phone.send(1, 2, 3, 4)
    assert finished(world, phone) == Completed()


def test_a_late_chunk_of_a_complete_update_changes_nothing() -> None:
    world, node, phone = an_uploader()
    phone.send(1, 2, 3, 4)
    node.hold(Fold)
    handle = phone.complete()
    assert phone.chunk(0, chunks_of((9, 9), 8)[0]) == ChunkReceived("u1", 0)
    node.release()
    assert world.answers[handle] == Completed()
    assert world.parameters(1) == [1, 2, 3, 4]
    assert phone.chunk(1, SECOND) == Completed(), "the session is over: it is told how it ended"


def test_the_last_chunk_may_be_shorter() -> None:
    server = ServerConfig(heartbeat_s=H, chunk_bytes=12)
    world, node = a_world(an_async_task(1), server)
    [phone] = world.joined(node, 1)
    phone.report()
    assert isinstance(phone.chunk(1, b"x" * 12), Refused)
    assert phone.send(1, 2, 3, 4) == [ChunkReceived("u1", 0), ChunkReceived("u1", 1)]
    assert finished(world, phone) == Completed()
    assert world.parameters(1) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("model_bytes", "chunk_bytes", "lengths"),
    [(16, 8, [8, 8]), (16, 12, [12, 4]), (16, 16, [16]), (16, 100, [16]), (17, 4, [4, 4, 4, 4, 1])],
)
def test_chunk_lengths_add_up_to_the_model(
    model_bytes: int, chunk_bytes: int, lengths: list[int]
) -> None:
    count = chunk_count(model_bytes, chunk_bytes)
    assert [chunk_length(model_bytes, chunk_bytes, index) for index in range(count)] == lengths


# -- what must not enter the sum ------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ((1, math.nan), "not_finite"),
        ((math.inf,), "not_finite"),
        ((0, 0, 0, -math.inf), "not_finite"),
        ((3, 4.1), "over_norm"),
        ((3e38, 3e38), "over_norm"),
    ],
)
def test_a_bad_update_is_refused_and_counted(values: tuple[float, ...], reason: str) -> None:
    world, node = a_world(an_async_task(2, clip=5.0))
    bad, good, better = world.joined(node, 3)
    bad.report()
    bad.send(*values)
    answer = finished(world, bad)
    assert isinstance(answer, Completed)
    assert answer.discarded == reason
    assert finished(world, bad) == answer, "a repetition gets the same answer"
    assert node.held().counters[f"discarded_{reason}"] == 1
    assert node.held().counters["trips"] == 1
    assert bad.session not in node.held().sessions.active
    assert node.memory_used == 0
    good.upload(3, 4)
    better.upload(1)
    assert world.parameters(1) == [2, 2, 0, 0], "the mean of the two good ones"
    assert world.consumed() == [good.session, better.session]


def test_an_update_over_the_clip_is_clipped_where_the_task_says_so() -> None:
    world, node = a_world(an_async_task(1, clip=5.0, over_clip="clip"))
    [phone] = world.joined(node, 1)
    phone.upload(30, 40)
    assert world.parameters(1) == pytest.approx([3, 4, 0, 0], rel=1e-6)


def test_the_place_of_a_refused_update_goes_to_one_that_waits() -> None:
    """Two buffers of one: both are being folded, a third update waits, the first is refused."""
    world, node = a_world(an_async_task(1))
    phones = world.joined(node, 3)
    node.hold(Fold)
    handles = [phone.upload(value) for phone, value in zip(phones, (math.nan, 2, 3), strict=True)]
    assert len(node.held_back) == 2
    node.release()
    world.pass_s(1.0)
    answers = [world.answers[handle] for handle in handles]
    assert answers == [Completed("not_finite"), Completed(), Completed()]
    assert world.consumed() == [phone.session for phone in (phones[2], phones[1])]


def test_examples_are_capped() -> None:
    world, node = a_world(an_async_task(2, max_examples=3))
    greedy, modest = world.joined(node, 2)
    greedy.upload(4, examples=2**31)
    modest.upload(0, examples=1)
    assert world.parameters(1)[0] == 4 * 3 / (3 + 1)


def test_a_client_that_never_reported_cannot_upload() -> None:
    world, node = a_world()
    phone = world.phone(node)
    assert isinstance(phone.join(), Joined)
    assert isinstance(phone.chunk(0, FIRST), Refused)
    assert isinstance(world.answers[world.ask(node, Complete(phone.ticket, "u1"))], Refused)
