"""Memory for uploads is bounded: slots are shared and taken back, and uploads have deadlines."""

from __future__ import annotations

from papaya.aggregator.held_task import TaskPhase
from papaya.aggregator.upload import ARRIVING, Slots
from papaya.aggregator.work import Arriving, Drop, Fold
from papaya.config import ServerConfig
from papaya.machine import Transact
from papaya.messages.base import Message
from papaya.messages.participation import (
    Aborted,
    Alive,
    ChunkOffer,
    ChunkReceived,
    Completed,
    Incomplete,
    Refused,
    Retry,
    UploadGranted,
)
from tests.unit.aggregator.builders import (
    SERVER,
    TASK,
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


def one_slot() -> ServerConfig:
    return ServerConfig(heartbeat_s=H, upload_slots=1, chunk_bytes=8)


def finished(world: World, phone: Phone, upload: str = "u1") -> Message | None:
    return world.answers.get(phone.complete(upload))


# -- slots ----------------------------------------------------------------------------------


def test_without_a_free_slot_a_client_is_asked_to_come_back() -> None:
    world, node = a_world(an_async_task(1), one_slot())
    one, other = world.joined(node, 2)
    one.report()
    other.report()
    one.chunk(0, FIRST)
    answer = other.chunk(0, FIRST)
    assert isinstance(answer, Retry)
    assert answer.after_s > 0
    one.chunk(1, SECOND)
    assert finished(world, one) == Completed()
    other.send(5)
    assert finished(world, other) == Completed()


def test_slots_are_shared_by_all_tasks_of_an_aggregator() -> None:
    world = World(a_task(), a_task(task="images"), server=one_slot())
    node = world.start()
    world.place(node)
    world.place(node, "images")
    [one], [other] = world.joined(node, 1), world.joined(node, 1, "images")
    one.report()
    other.report()
    one.chunk(0, FIRST)
    assert isinstance(other.chunk(0, FIRST), Retry)


def test_an_idle_slot_is_taken_back_and_the_client_sends_again() -> None:
    world, node = a_world(an_async_task(1), one_slot())
    slow, quick = world.joined(node, 2)
    slow.report()
    slow.chunk(0, FIRST)
    world.pass_s(2 * H)
    assert node.shards._uploads == {}
    assert quick.heartbeat() == slow.heartbeat() == Alive()
    quick.report()
    quick.send(1)
    assert finished(world, quick) == Completed()
    slow.chunk(1, SECOND)
    assert finished(world, slow) == Incomplete((0,)), "chunk 0 went with the slot"
    slow.chunk(0, FIRST)
    assert finished(world, slow) == Completed()


def test_a_slot_in_use_is_not_taken_back() -> None:
    world, _, phone = an_uploader()
    phone.chunk(0, FIRST)
    world.pass_s(H - A_MOMENT_S)
    phone.chunk(1, SECOND)
    world.pass_s(H - A_MOMENT_S)
    assert finished(world, phone) == Completed()


def test_a_complete_update_keeps_its_slot_until_it_is_folded() -> None:
    world, node, phone = an_uploader()
    phone.send(1, 2, 3, 4)
    node.hold(Fold)
    handle = phone.complete()
    world.pass_s(5 * H)
    assert node.machine._slots.used == 1 / SERVER.upload_slots
    node.release()
    assert world.answers[handle] == Completed()
    assert node.machine._slots.used == 0


def test_load_is_slots_in_use_and_uploads_turned_away() -> None:
    world, node = a_world(an_async_task(1), one_slot())
    one, other = world.joined(node, 2)
    world.pass_s(H)
    assert node.reports[-1].load == 0
    world.pass_s(H / 2)
    for phone in (one, other):
        phone.report()
        phone.chunk(0, FIRST)
    other.chunk(0, FIRST)
    world.pass_s(H / 2)
    assert node.reports[-1].heartbeat
    assert node.reports[-1].load == 1 + 2
    world.pass_s(H / 2)
    one.chunk(1, SECOND)
    world.pass_s(H / 2)
    assert node.reports[-1].load == 1, "turned away counts once"


def test_idle_slots_are_listed_longest_first() -> None:
    slots = Slots(3, idle_after_s=10.0)
    for moment, session in enumerate(("a", "b", "c")):
        assert slots.has_room((TASK, session), 1)
        slots.take(float(moment), (TASK, session), 1)
    slots.touch(5.0, (TASK, "a"))
    assert slots.idle(10.9) == []
    assert slots.idle(12.0) == [(TASK, "b"), (TASK, "c")]
    assert slots.idle(15.0) == [(TASK, "b"), (TASK, "c"), (TASK, "a")]
    assert slots.has_room((TASK, "a"), 1)
    assert not slots.has_room((TASK, "d"), 1)
    slots.release((TASK, "b"))
    slots.release((TASK, "b"))
    assert slots.has_room((TASK, "d"), 1)
    slots.take(15.0, (TASK, "d"), 1)
    assert slots.used == 1


# -- memory ---------------------------------------------------------------------------------


def offer(phone: Phone, index: int = 0) -> Message | None:
    """The head of a chunk is there: should its body be read?"""
    return phone.ask(ChunkOffer(phone.ticket, "u1", index, len(FIRST)))


def with_buffers(count: int) -> tuple[World, Node]:
    world = World(an_async_task(1))
    world.upload_buffers = count
    node = world.start()
    world.place(node)
    return world, node


def test_an_upload_begins_only_if_there_is_memory_for_all_of_it() -> None:
    """Else every upload holds some chunks, and none can ever end."""
    world, node = with_buffers(2 * (2 + ARRIVING) - 1)
    one, other = world.joined(node, 2)
    one.report()
    other.report()
    assert offer(one) is None
    assert isinstance(offer(other), Retry), "slots are free, memory is not"
    assert isinstance(other.chunk(0, FIRST), Retry)
    assert node.machine._slots.used == 4 / 7
    one.send(1)
    assert finished(world, one) == Completed()
    other.send(2)
    assert finished(world, other) == Completed()


def test_a_task_whose_updates_do_not_fit_into_memory_is_halted_with_the_reason() -> None:
    _, node = with_buffers(2 + ARRIVING - 1)
    held = node.machine.tasks[TASK]
    assert held.phase is TaskPhase.HALTED
    assert "upload_memory_mb" in held.halted_because


def test_a_client_that_announces_chunks_and_sends_none_loses_its_slot() -> None:
    world, node, phone = an_uploader()
    for _ in range(4):
        assert offer(phone) is None
        world.pass_s(H / 2)
    assert Drop(TASK, 1, phone.session) in node.log, "what arrives is broken off"


def test_bytes_that_arrive_keep_the_slot_and_the_session() -> None:
    """A chunk slower than a heartbeat, or than three of them, is still on its way."""
    world, node, phone = an_uploader()
    phone.chunk(0, FIRST)
    assert offer(phone, 1) is None
    for _ in range(8):
        world.pass_s(H / 2)
        node.receive(Arriving(TASK, phone.session))
    assert phone.chunk(1, SECOND) == ChunkReceived("u1", 1)
    assert finished(world, phone) == Completed()


def test_bytes_for_nobody_change_nothing() -> None:
    _, node, phone = an_uploader()
    node.receive(Arriving(TASK, phone.session))
    node.receive(Arriving(TASK, "stranger"))
    node.receive(Arriving("no-task", "stranger"))
    assert node.machine._slots.used == 0


def test_a_session_that_ends_breaks_off_what_arrives_for_it() -> None:
    _, node, phone = an_uploader()
    assert offer(phone) is None
    phone.leave()
    assert Drop(TASK, 1, phone.session) in node.log
    assert node.machine._slots.used == 0


def test_chunks_that_arrive_together_do_not_break_each_other_off() -> None:
    _, node, phone = an_uploader()
    assert offer(phone, 0) is offer(phone, 1) is None
    phone.chunk(1, SECOND)
    assert node.did(Drop) == []


# -- deadline -------------------------------------------------------------------------------


def test_an_upload_has_a_deadline_however_lively_the_client_is() -> None:
    world, node = a_world(a_task(upload_timeout_s=20.0))
    [phone] = world.joined(node, 1)
    phone.report()
    world.pass_s(H)
    phone.chunk(0, FIRST)
    world.pass_s(H - A_MOMENT_S)
    assert phone.heartbeat() == Alive()
    world.pass_s(A_MOMENT_S)
    assert phone.chunk(1, SECOND) == Aborted("timed_out")
    assert finished(world, phone) == Aborted("timed_out")
    assert node.machine._slots.used == 0
    assert node.shards._uploads == {}


def test_a_complete_update_is_not_given_up_while_its_commit_takes_long() -> None:
    world, node = a_world(an_async_task(1, upload_timeout_s=20.0))
    [phone] = world.joined(node, 1)
    node.hold(Transact)
    handle = phone.upload(1, 2, 3, 4)
    world.pass_s(10 * H)
    assert handle not in world.answers
    node.release()
    assert world.answers[handle] == Completed()


def test_the_deadline_holds_at_a_successor_too() -> None:
    world, node = a_world(an_async_task(1, upload_timeout_s=20.0))
    [phone] = world.joined(node, 1)
    phone.report()
    world.pass_s(20.0)
    world.crash(node)
    phone.node = world.start("agg-2")
    world.place(phone.node)
    world.pass_s(A_MOMENT_S)
    assert isinstance(phone.chunk(0, FIRST), Refused)
    assert phone.node.held().sessions.active == {}
