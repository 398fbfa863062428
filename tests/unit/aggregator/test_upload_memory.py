"""Memory for uploads: limited, shared by tasks, and not for uploads that are too slow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.aggregator.held_task import TaskPhase
from papaya.aggregator.upload import ARRIVING, STARTER_BYTES, Claim, UploadMemory
from papaya.aggregator.work import Arriving, Drop, Fold, Growing, Snapshot
from papaya.config import Requirements
from papaya.config.upload_bits import UploadBits
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
    ONE_UPLOAD,
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


def two_uploaders(upload_bytes: int = ONE_UPLOAD) -> tuple[World, Node, Phone, Phone]:
    world, node = a_world(an_async_task(1), upload_bytes=upload_bytes)
    one, other = world.joined(node, 2)
    one.report()
    other.report()
    return world, node, one, other


def finished(world: World, phone: Phone, upload: str = "u1") -> Message | None:
    return world.answers.get(phone.complete(upload))


def offer(phone: Phone, index: int = 0) -> Message | None:
    """The head of a chunk is there: should its body be read?"""
    return phone.ask(ChunkOffer(phone.ticket, "u1", index, len(FIRST)))


# -- one task -------------------------------------------------------------------------------


def test_without_memory_a_client_is_asked_to_come_back() -> None:
    world, _, one, other = two_uploaders()
    one.chunk(0, FIRST)
    assert isinstance(offer(other), Retry)
    answer = other.chunk(0, FIRST)
    assert isinstance(answer, Retry)
    assert answer.after_s > 0
    one.chunk(1, SECOND)
    assert finished(world, one) == Completed()
    other.send(5)
    assert finished(world, other) == Completed()


def test_an_upload_begins_only_if_there_is_memory_for_all_of_it() -> None:
    """Else every upload holds some chunks, and none can ever end."""
    _, node, one, other = two_uploaders(2 * ONE_UPLOAD - 1)
    assert offer(one) is None
    assert isinstance(offer(other), Retry)
    assert node.memory_used == ONE_UPLOAD / (2 * ONE_UPLOAD - 1)


def test_a_slow_upload_is_left_alone_while_nobody_waits() -> None:
    world, _, phone, _ = two_uploaders()
    phone.chunk(0, FIRST)
    for _ in range(8):
        world.pass_s(H)
        assert phone.heartbeat() == Alive()
    phone.chunk(1, SECOND)
    assert finished(world, phone) == Completed()


def test_a_slow_upload_gives_way_to_one_that_waits_and_is_sent_again() -> None:
    world, node, slow, quick = two_uploaders()
    slow.chunk(0, FIRST)
    for _ in range(3):
        assert isinstance(quick.chunk(0, FIRST), Retry)
        world.pass_s(H)
        assert quick.heartbeat() == slow.heartbeat() == Alive()
    quick.send(1)
    assert Drop(TASK, 1, slow.session) in node.log, "what arrives is broken off"
    assert node.held().counters["uploads_taken_back"] == 1
    assert finished(world, quick) == Completed()
    assert slow.chunk(1, SECOND) == ChunkReceived("u1", 1)
    assert finished(world, slow) == Incomplete((0,)), "chunk 0 was taken back"
    slow.chunk(0, FIRST)
    assert finished(world, slow) == Completed()


def test_a_complete_update_keeps_its_memory_until_it_is_folded() -> None:
    world, node, phone, other = two_uploaders()
    phone.send(1, 2, 3, 4)
    node.hold(Fold)
    handle = phone.complete()
    for _ in range(5):
        world.pass_s(H)
        other.heartbeat()
        assert isinstance(other.chunk(0, FIRST), Retry)
    node.release()
    assert world.answers[handle] == Completed()
    assert node.memory_used == 0


def test_load_is_memory_in_use_and_what_was_turned_away() -> None:
    world, node = a_world(an_async_task(1), upload_bytes=ONE_UPLOAD)
    one, other = world.joined(node, 2)
    world.pass_s(H)
    assert node.reports[-1].load == 0
    world.pass_s(H - A_MOMENT_S)
    for phone in (one, other):
        phone.report()
        phone.chunk(0, FIRST)
    other.chunk(0, FIRST)
    world.pass_s(A_MOMENT_S)
    assert node.reports[-1].heartbeat
    assert node.reports[-1].load == 1 + 2
    world.pass_s(H - A_MOMENT_S)
    one.chunk(1, SECOND)
    world.pass_s(A_MOMENT_S)
    assert node.reports[-1].load == 1, "turned away counts once"


def test_a_task_whose_updates_do_not_fit_into_memory_is_halted_with_the_reason() -> None:
    _, node = a_world(an_async_task(1), upload_bytes=ONE_UPLOAD - 1)
    held = node.machine.tasks[TASK]
    assert held.phase is TaskPhase.HALTED
    assert "upload_memory_mb" in held.halted_because


def test_a_client_that_announces_chunks_and_sends_none_keeps_nobody_waiting() -> None:
    world, node, silent, quick = two_uploaders()
    for _ in range(6):
        assert offer(silent) is None
        quick.heartbeat()
        world.pass_s(H / 2)
    quick.send(1)
    assert finished(world, quick) == Completed()
    assert Drop(TASK, 1, silent.session) in node.log, "what arrives is broken off"


def test_bytes_that_arrive_keep_the_memory_and_the_session() -> None:
    """A chunk slower than three heartbeats is still on its way."""
    world, node, phone, other = two_uploaders()
    phone.chunk(0, FIRST)
    assert offer(phone, 1) is None
    for _ in range(8):
        world.pass_s(H / 2)
        node.receive(Arriving(TASK, phone.session, 1 << 20))
        other.heartbeat()
        assert isinstance(other.chunk(0, FIRST), Retry)
    assert phone.chunk(1, SECOND) == ChunkReceived("u1", 1)
    assert finished(world, phone) == Completed()


def test_bytes_for_nobody_change_nothing() -> None:
    _, node, phone = an_uploader()
    for message in (Arriving, Growing):
        node.receive(message(TASK, phone.session))
        node.receive(message(TASK, "stranger"))
        node.receive(message("no-task", "stranger"))
    assert node.memory_used == 0
    assert not node.machine.has_grown(TASK, phone.session)


def test_a_session_that_ends_breaks_off_what_arrives_for_it() -> None:
    _, node, phone = an_uploader()
    assert offer(phone) is None
    phone.leave()
    assert Drop(TASK, 1, phone.session) in node.log
    assert node.memory_used == 0


def test_chunks_that_arrive_together_do_not_break_each_other_off() -> None:
    _, node, phone = an_uploader()
    assert offer(phone, 0) is offer(phone, 1) is None
    phone.chunk(1, SECOND)
    assert node.did(Drop) == []


# -- pace -----------------------------------------------------------------------------------

CHUNK = 1 << 20
LARGE = a_task(model_length=20 * CHUNK // 4, upload_timeout_s=120.0)


def a_claim(session: str, task: str = TASK, model_bytes: int = 20 * CHUNK) -> Claim:
    return Claim((task, session), a_task(model_length=model_bytes // 4), CHUNK)


def a_memory(uploads: float) -> UploadMemory:
    return UploadMemory(uploads * 22 * CHUNK, H)


def is_begun(memory: UploadMemory, now: float, claim: Claim) -> bool:
    memory.check()
    return memory.may_send(now, claim, CHUNK)


def test_a_device_that_sends_nothing_holds_two_short_buffers() -> None:
    memory, claim = a_memory(1), a_claim("slow")
    assert is_begun(memory, 0.0, claim)
    assert claim.held_bytes == ARRIVING * STARTER_BYTES


def test_two_hundred_slow_devices_do_not_keep_one_that_is_fast_from_its_upload() -> None:
    """Memory for three: as a number of uploads, the slow ones would have all of it."""
    memory, slow = a_memory(3), [a_claim(f"slow-{i}") for i in range(200)]
    now = 0.0
    while not all(claim.has_begun for claim in slow):
        for claim in slow:
            is_begun(memory, now, claim)
            memory.arrived(now, claim, 1000)
        now += 1.0
    fast = a_claim("fast")
    assert is_begun(memory, now + H / 4, fast)
    for _ in range(20):
        now += 5.0
        for claim in slow:
            is_begun(memory, now, claim)
            memory.arrived(now, claim, 5000)
        assert memory.may_keep(now, fast, CHUNK)
        memory.keep(now, fast, CHUNK)
        memory.check()
    assert fast.kept_bytes == 20 * CHUNK


@pytest.mark.parametrize("bits", [8, 16])
def test_a_complete_upload_in_fewer_bits_holds_the_memory_of_its_numbers(bits: UploadBits) -> None:
    """It is decoded to be folded, and a rule that needs single updates keeps the numbers."""
    config = a_task(model_length=10_000, requirements=Requirements(upload_bits=bits))
    chunk = 1_000
    claim = Claim((TASK, "s"), config, chunk)
    memory = UploadMemory(claim.needed_bytes, H)
    for start in range(0, config.update_bytes, chunk):
        length = min(chunk, config.update_bytes - start)
        assert memory.may_send(0.0, claim, length)
        assert memory.may_keep(0.0, claim, length)
        memory.keep(0.0, claim, length)
    claim.is_complete = True
    assert claim.held_bytes >= config.update_bytes + config.model_bytes
    memory.check()


@pytest.mark.parametrize("stall_s", [0, 15])
def test_a_phone_at_64_kbit_per_s_keeps_pace_also_if_its_line_pauses(stall_s: int) -> None:
    """900 KB is nearly all that such a phone can send in 120 s. Others wait all the time."""
    phone = a_claim("phone", model_bytes=900_000)
    memory = UploadMemory(phone.needed_bytes, H)
    assert is_begun(memory, 0.0, phone)
    for second in range(1, 113 + stall_s):
        if not 60 <= second < 60 + stall_s:
            memory.arrived(float(second), phone, 8000)
        assert not is_begun(memory, float(second), a_claim(f"other-{second}"))
    assert memory.taken_back == []


def test_the_slowest_upload_gives_way_first_and_no_more_of_them_than_needed() -> None:
    memory = UploadMemory(30 * CHUNK, H)
    slow = [a_claim(f"slow-{number}") for number in range(3)]
    for number, claim in enumerate(slow):
        assert is_begun(memory, 3.0 * number, claim), "those before have lost their promises"
    for moment, claim in zip((12.0, 10.0, 11.0), slow, strict=True):
        assert memory.may_keep(moment, claim, CHUNK)
        memory.keep(moment, claim, CHUNK)
    assert not is_begun(memory, 30.0, a_claim("too soon"))
    assert is_begun(memory, 60.0, a_claim("fast"))
    assert memory.taken_back == [slow[1]]
    assert not is_begun(memory, 61.0, a_claim("too many"))
    assert memory.taken_back == [slow[1]], "nothing is taken in vain"


def test_slow_uploads_do_not_stop_each_other_in_turns() -> None:
    """Both have begun and have lost their promises. The faster one goes on until it ends."""
    memory = UploadMemory(23 * CHUNK, H)
    one, other = a_claim("one"), a_claim("other")
    assert is_begun(memory, 0.0, one)
    assert is_begun(memory, 3.0, other), "the first has sent nothing for longer than its trial"
    now = 3.0
    while one.kept_bytes < 20 * CHUNK and other.kept_bytes < 20 * CHUNK:
        now += 40.0
        for claim in (one, other):
            if memory.may_keep(now, claim, CHUNK):
                memory.keep(now, claim, CHUNK)
            memory.check()
        assert now < 3600


def test_without_room_to_grow_an_upload_is_dropped() -> None:
    memory, slow, fast = a_memory(1.01), a_claim("slow"), a_claim("fast")
    assert is_begun(memory, 0.0, slow)
    assert is_begun(memory, 3.0, fast)
    assert not memory.may_grow(3.0, slow)
    assert memory.may_grow(3.0, fast)
    assert memory.taken_back == []


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["send", "tell", "end"]), st.floats(0, 30)),
        max_size=80,
    )
)
def test_an_upload_that_keeps_pace_is_never_stopped(steps: list[tuple[int, str, float]]) -> None:
    """Memory for two and a half uploads, and four that come, stall and go as they like."""
    memory, now = a_memory(2.5), 0.0
    claims = [a_claim(f"{number}") for number in range(4)]
    for which, step, wait_s in steps:
        now += wait_s
        claim = claims[which]
        paced = [c for c in claims if c.is_promised and now <= c.paid_until]
        if step == "end":
            memory.release(claim)
        elif step == "tell":
            memory.arrived(now, claim, CHUNK // 2)
        elif claim.kept_bytes < 20 * CHUNK and memory.may_keep(now, claim, CHUNK):
            memory.keep(now, claim, CHUNK)
        else:
            assert claim not in paced or claim.kept_bytes == 20 * CHUNK
        memory.check()
        assert not [lost for lost in memory.taken_back if lost in paced]
        assert memory.used(now) <= 1
        memory.taken_back.clear()


# -- several tasks --------------------------------------------------------------------------


def fill(memory: UploadMemory, task: str, count: int) -> list[Claim]:
    """Uploads that keep pace."""
    claims = [a_claim(f"{task}-{number}", task) for number in range(count)]
    for claim in claims:
        assert is_begun(memory, 0.0, claim)
        memory.keep(0.0, claim, CHUNK)
    return claims


def test_memory_is_shared_by_all_tasks_of_an_aggregator() -> None:
    world = World(a_task(), a_task(task="images"), upload_bytes=ONE_UPLOAD)
    node = world.start()
    world.place(node)
    world.place(node, "images")
    [one], [other] = world.joined(node, 1), world.joined(node, 1, "images")
    one.report()
    other.report()
    one.chunk(0, FIRST)
    assert isinstance(other.chunk(0, FIRST), Retry)


def test_a_task_gets_its_share_from_one_that_has_more() -> None:
    memory = a_memory(4)
    words = fill(memory, "words", 4)
    fill(memory, "images", 2)
    assert memory.taken_back == [words[3], words[2]], "the newest, and no more than the share"
    assert not is_begun(memory, 0.0, a_claim("images-3", "images"))
    assert not is_begun(memory, 0.0, words[3]), "words has its share, and takes nothing back"


def test_every_task_may_have_one_upload() -> None:
    """Three tasks, memory for two uploads: no task with one upload loses it."""
    memory = a_memory(2)
    words = fill(memory, "words", 2)
    fill(memory, "images", 1)
    assert memory.taken_back == [words[1]]
    assert not is_begun(memory, 0.0, a_claim("sounds-1", "sounds"))


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
    assert node.memory_used == 0
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


def test_a_late_copy_of_a_chunk_does_not_drop_an_update_that_is_in_the_sum() -> None:
    """The copy comes on another connection, is slow, and asks for a whole buffer after the fold."""
    world, node = a_world(an_async_task(3))
    [phone] = world.joined(node, 1)
    phone.report()
    assert phone.ask(ChunkOffer(phone.ticket, "u1", 0, SERVER.chunk_bytes)) is None
    node.hold(Snapshot)
    phone.send(1, 2, 3, 4)
    handle = phone.complete()
    node.receive(Growing(TASK, phone.session))
    again = phone.complete()
    node.release()
    world.pass_s(2.0)
    assert (world.answers[handle], world.answers[again]) == (Completed(), Completed())
    assert len(node.did(Fold)) == 1
