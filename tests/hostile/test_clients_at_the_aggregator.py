"""Clients that lie, replay, forge and stall: they cost themselves, and nobody else.

Every request here may come from anybody on the network. An aggregator answers it, never raises, and
never lets it change another client's session, a sum, or the memory that it holds.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papaya.aggregator.work import Fold
from papaya.learning.weighting import WeightedSum
from papaya.messages.base import Message
from papaya.messages.participation import (
    Aborted,
    Alive,
    Chunk,
    ChunkReceived,
    Complete,
    Completed,
    Heartbeat,
    Incomplete,
    Join,
    Joined,
    Leave,
    Refused,
    Report,
    Retry,
    UploadGranted,
)
from papaya.messages.storage import RecordRow
from papaya.messages.tickets import AssignmentTicket, Keyring, SessionTicket, UploadTicket
from tests.unit.aggregator.builders import (
    KEYRING,
    MODEL_LENGTH,
    ONE_UPLOAD,
    SERVER,
    TASK,
    Node,
    Phone,
    World,
    a_world,
    an_async_task,
    chunks_of,
)

H = SERVER.heartbeat_s
A_CHUNK = b"\0" * 8

REQUESTS: dict[str, Callable[[bytes], Message]] = {
    "join": Join,
    "heartbeat": Heartbeat,
    "report": lambda ticket: Report(ticket, 1),
    "chunk": lambda ticket: Chunk(ticket, "u1", 0, 0, A_CHUNK),
    "complete": lambda ticket: Complete(ticket, "u1"),
    "leave": lambda ticket: Leave(ticket, ""),
}


def state_of(node: Node) -> object:
    """All that a request could change for others."""
    held = node.held()
    return (
        {
            s.id: (s.seen_at, s.upload_sealed, s.upload is None)
            for s in held.sessions.active.values()
        },
        dict(held.sessions.ended),
        node.memory_used,
        sorted(node.shards._uploads),
        dict(node.world.store.rows),
    )


# -- forged -----------------------------------------------------------------------------------


@given(ticket=st.binary(max_size=1024), name=st.sampled_from(sorted(REQUESTS)))
@settings(max_examples=300)
def test_noise_is_refused(ticket: bytes, name: str) -> None:
    world, node = a_world()
    world.joined(node, 1)
    before = state_of(node)
    answer = world.answers[world.ask(node, REQUESTS[name](ticket))]
    assert isinstance(answer, Refused | Retry)
    assert state_of(node) == before


@pytest.mark.parametrize("name", sorted(REQUESTS))
def test_no_flipped_bit_of_a_ticket_passes(name: str) -> None:
    world, node = a_world()
    [phone] = world.joined(node, 1)
    session = phone.ticket
    phone.report()
    right = {"join": phone.assignment, "chunk": phone.ticket, "complete": phone.ticket}
    valid = right.get(name, session)
    before = state_of(node)
    for bit in range(8 * len(valid)):
        forged = bytearray(valid)
        forged[bit // 8] ^= 1 << bit % 8
        answer = world.answers[world.ask(node, REQUESTS[name](bytes(forged)))]
        assert isinstance(answer, Refused | Retry), (bit, answer)
    assert state_of(node) == before


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("join", ["session", "upload"]),
        ("heartbeat", ["assignment"]),
        ("report", ["assignment"]),
        ("chunk", ["assignment", "session"]),
        ("complete", ["assignment", "session"]),
    ],
)
def test_a_ticket_opens_only_the_stage_it_was_made_for(name: str, kinds: list[str]) -> None:
    world, node = a_world()
    [phone] = world.joined(node, 1)
    tickets = {"assignment": phone.assignment, "session": phone.ticket}
    phone.report()
    tickets["upload"] = phone.ticket
    before = state_of(node)
    for kind in kinds:
        answer = world.answers[world.ask(node, REQUESTS[name](tickets[kind]))]
        assert isinstance(answer, Refused), (kind, answer)
    assert state_of(node) == before


def test_a_ticket_of_a_retired_key_is_refused() -> None:
    world, node = a_world()
    sealed = Keyring({0: b"old" * 11}).seal(
        SessionTicket(TASK, "s", 1, 0, "blob", expires=world.now + 60)
    )
    assert isinstance(world.answers[world.ask(node, Heartbeat(sealed))], Refused)


def test_nobody_talks_itself_into_a_better_staleness() -> None:
    """The ticket carries the staleness; a better one under another seal is worth nothing."""
    world, node = a_world()
    [phone] = world.joined(node, 1)
    phone.report()
    mine = KEYRING.open(phone.ticket, UploadTicket)
    better = UploadTicket(
        mine.task,
        mine.session,
        mine.seq,
        mine.version,
        mine.parameters,
        mine.expires,
        staleness=0,
        examples=2**31,
        upload_by=mine.upload_by + 1e9,
    )
    phone.ticket = Keyring({1: b"guess" * 7}).seal(better)
    assert isinstance(phone.chunk(0, A_CHUNK), Refused)


# -- replayed ---------------------------------------------------------------------------------


def test_a_counted_update_cannot_be_sent_again() -> None:
    world, node = a_world(an_async_task(2))
    [phone] = world.joined(node, 1)
    assert phone.upload_for_good(5) == Completed()
    for turn in range(5):
        assert phone.chunk(0, A_CHUNK, upload=f"again-{turn}") == Completed()
        assert world.answers[phone.complete(f"again-{turn}")] == Completed()
    assert phone.ask(Join(phone.assignment)) == Completed()
    assert world.recorded() == [phone.session]


def test_one_assignment_is_one_place_however_often_it_is_used() -> None:
    world, node = a_world()
    phone = world.phone(node)
    for _ in range(20):
        assert isinstance(phone.join(), Joined)
    assert len(node.held().sessions.active) == 1


def test_an_assignment_is_worth_nothing_after_its_session_has_ended() -> None:
    world, node = a_world()
    phone = world.phone(node)
    phone.join()
    phone.leave()
    assert phone.ask(Join(phone.assignment)) == Aborted("left")
    assert node.held().sessions.active == {}


def test_a_thousand_completions_are_one_update() -> None:
    world, node = a_world(an_async_task(2))
    [phone] = world.joined(node, 1)
    phone.report()
    phone.send(1)
    node.hold(Fold)
    handles = [phone.complete() for _ in range(1000)]
    assert len(node.held_back) == 1
    node.release()
    *early, last = [world.answers[handle] for handle in handles]
    assert last == Completed()
    waited = [answer for answer in early if answer == Completed()]
    assert len(waited) < 10, "whoever asks again and again must not fill our memory"
    assert all(isinstance(answer, Retry) for answer in early if answer not in waited)
    assert world.recorded() == [phone.session]


# -- stalling ---------------------------------------------------------------------------------


def room_for_one() -> tuple[World, Node, Phone, Phone]:
    world, node = a_world(an_async_task(1), upload_bytes=ONE_UPLOAD)
    greedy, honest = world.joined(node, 2)
    greedy.report()
    honest.report()
    return world, node, greedy, honest


def test_heartbeats_do_not_keep_memory() -> None:
    world, _, greedy, honest = room_for_one()
    greedy.chunk(0, A_CHUNK)
    for _ in range(6):
        world.pass_s(H / 2)
        greedy.heartbeat()
        honest.heartbeat()
    assert honest.chunk(0, A_CHUNK) == ChunkReceived("u1", 0)


def test_a_chunk_sent_again_and_again_does_not_keep_memory() -> None:
    """A chunk that is already there is no progress."""
    world, _, greedy, honest = room_for_one()
    got_in = []
    for _ in range(6):
        greedy.chunk(0, A_CHUNK)
        world.pass_s(H / 2)
        got_in.append(honest.chunk(0, A_CHUNK) == ChunkReceived("u1", 0))
    assert any(got_in)


def test_damaged_chunks_take_no_memory() -> None:
    _, _, greedy, honest = room_for_one()
    for _ in range(5):
        assert isinstance(greedy.chunk(0, A_CHUNK, crc32=7), Retry)
        assert isinstance(greedy.chunk(1, b"short"), Refused)
    assert honest.chunk(0, A_CHUNK) == ChunkReceived("u1", 0)


def test_new_upload_ids_take_no_more_memory() -> None:
    world, node, greedy, honest = room_for_one()
    for turn in range(50):
        greedy.chunk(turn % 2, A_CHUNK, upload=f"u{turn}")
    assert len(node.shards._uploads) == 1
    world.pass_s(2.5 * H)
    honest.heartbeat()
    assert honest.chunk(0, A_CHUNK) == ChunkReceived("u1", 0)


def test_an_upload_cannot_be_stretched_past_its_deadline() -> None:
    world, node, greedy, _ = room_for_one()
    while greedy.session in node.held().sessions.active:
        assert world.now < 1000, "it goes on for ever"
        greedy.chunk(0, A_CHUNK, upload=f"u{world.now}")
        world.pass_s(H / 2)
    assert greedy.heartbeat() == Aborted("timed_out")


def test_silent_clients_cannot_fill_a_task_for_ever() -> None:
    world, node = a_world(an_async_task(2, concurrency=3))
    world.joined(node, 3)
    world.pass_s(SERVER.dead_after_s + H)
    assert len(world.joined(node, 3)) == 3


# -- poison -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "coordinate",
    [0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FBFFFFF, 0x7F800000, 0xFF800000, 0x7F7FFFFF],
    ids=["nan", "-nan", "signalling nan", "last signalling nan", "inf", "-inf", "largest"],
)
def test_no_poison_reaches_a_sum(coordinate: int) -> None:
    world, node = a_world(an_async_task(3))
    poisoner, honest = world.joined(node, 2)
    poisoner.report(examples=2**31)
    poisoner.chunk(0, A_CHUNK)
    poisoner.chunk(1, struct.pack("<II", 0, coordinate))
    answer = world.answers[poisoner.complete()]
    assert isinstance(answer, Completed)
    assert answer.discarded in ("not_finite", "over_norm")
    assert honest.upload_for_good(2) == Completed()
    [record] = world.store.all(RecordRow)
    total = WeightedSum.decode(world.blobs[record.sum], MODEL_LENGTH)
    assert total.vector.tolist() == [2, 0, 0, 0]
    assert record.weight == 1


def test_examples_buy_no_more_weight_than_the_task_allows() -> None:
    world, node = a_world(an_async_task(2, max_examples=10))
    greedy, honest = world.joined(node, 2)
    greedy.upload(1, examples=2**31)
    honest.upload(0, examples=10)
    assert world.parameters(1)[0] == 0.5


# -- anything in any order --------------------------------------------------------------------

STEPS = st.tuples(
    st.integers(0, 2),  # which hostile client
    st.sampled_from(["any", "own"]),
    st.sampled_from(sorted(REQUESTS)),
    st.integers(0, 11),  # which of the tickets it has ever seen
    st.integers(0, 3),  # chunk index
    st.sampled_from(["u1", "u2"]),
    st.sampled_from([A_CHUNK, b"", b"x" * 8, b"x" * 9]),
)


@given(steps=st.lists(STEPS, max_size=60))
@settings(max_examples=150)
def test_whatever_they_send_honest_clients_are_served_and_counted_once(
    steps: list[tuple[int, str, str, int, int, str, bytes]],
) -> None:
    world, node = a_world(an_async_task(4, concurrency=5), upload_bytes=4 * ONE_UPLOAD)
    honest = world.joined(node, 2)
    hostile = [world.phone(node) for _ in range(3)]
    seen = [phone.assignment for phone in hostile]
    for who, whose, name, which, index, upload, data in steps:
        phone = hostile[who]
        ticket = seen[which % len(seen)] if whose == "any" else phone.ticket or phone.assignment
        request = REQUESTS[name](ticket)
        if isinstance(request, Chunk):
            phone.ticket = ticket
            answer = phone.chunk(index, data, upload)
        elif isinstance(request, Complete):
            answer = world.answers.get(world.ask(node, Complete(ticket, upload)))
        else:
            answer = world.answers.get(world.ask(node, request))
        if isinstance(answer, Joined | UploadGranted):
            seen.append(answer.ticket)
            phone.ticket = answer.ticket
        assert node.memory_used <= 1
        assert len(node.shards._uploads) <= 4
    world.pass_s(1.0)
    for phone, value in zip(honest, (3, 4), strict=True):
        assert phone.heartbeat() == Alive()
        assert isinstance(phone.report(), UploadGranted)
        sent = phone.send(value)
        assert sent == [ChunkReceived("u1", 0), ChunkReceived("u1", 1)]
        phone.complete()
    world.pass_s(1.0)
    counted = world.recorded() + world.consumed()
    assert len(counted) == len(set(counted))
    assert [session for session in counted if session in {p.session for p in honest}] == [
        phone.session for phone in honest
    ]


def test_a_client_cannot_end_the_session_of_another() -> None:
    """What it would need is the other's sealed ticket; its own says its own session."""
    world, node = a_world()
    mine, yours = world.joined(node, 2)
    mine.leave()
    stolen_name = KEYRING.open(yours.ticket, SessionTicket).session
    forged = Keyring({1: b"guess" * 7}).seal(AssignmentTicket(TASK, stolen_name, 1, world.now + 30))
    for request in (Leave(forged, ""), Join(forged), Heartbeat(forged)):
        assert isinstance(world.answers[world.ask(node, request)], Refused)
    assert yours.heartbeat() == Alive()


def test_an_upload_may_not_be_completed_with_the_chunks_of_another() -> None:
    world, node = a_world(an_async_task(2))
    one, other = world.joined(node, 2)
    one.report()
    other.report()
    first, second = chunks_of((1, 2, 3, 4), 8)
    one.chunk(0, first, upload="shared")
    other.chunk(1, second, upload="shared")
    assert world.answers[one.complete("shared")] == Incomplete((1,))
    assert world.answers[other.complete("shared")] == Incomplete((0,))
