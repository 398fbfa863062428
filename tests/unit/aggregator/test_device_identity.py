"""Devices with a pseudonym: one session at a time, one update per buffer, none when revoked."""

from __future__ import annotations

from math import nan

import pytest
from msgspec import structs

from papaya.aggregator.work import Drop, Fold, Restore, Snapshot, Step
from papaya.config import ServerConfig, StopRule, TaskConfig
from papaya.machine import Transact
from papaya.messages.participation import (
    Aborted,
    Alive,
    ChunkReceived,
    Completed,
    Incomplete,
    Joined,
    Retry,
    UploadGranted,
)
from papaya.messages.storage import RecordRow, Revoked, TaskRow, task_key
from papaya.messages.tickets import AssignmentTicket, pseudonym_of
from tests.unit.aggregator.builders import (
    KEYRING,
    ONE_UPLOAD,
    SERVER,
    TASK,
    Node,
    Phone,
    World,
    a_sync_task,
    a_task,
    an_async_task,
)
from tests.unit.aggregator.secure_builders import (
    SecurePhone,
    SecureWorld,
    a_secure_task,
)

KEY = b"key of the task"
COUNTED = Completed()
REPLACED = Aborted("replaced")
AGAIN = Completed("already_counted")


def served(world: World) -> Node:
    """A node that holds the task, whose devices have pseudonyms."""
    row = world.store.rows[task_key(TASK)]
    assert isinstance(row, TaskRow)
    world.store.rows[task_key(TASK)] = structs.replace(row, pseudonym_key=KEY)
    node = world.start()
    world.place(node)
    world.pass_s(world.server.heartbeat_s)
    return node


def a_world(
    config: TaskConfig | None = None, server: ServerConfig = SERVER, upload_bytes: int = 1 << 20
) -> tuple[World, Node]:
    world = World(config or a_task(), server=server, upload_bytes=upload_bytes)
    return world, served(world)


def identify(phone: Phone, device: str) -> None:
    """Give the phone the assignment that a selector makes for this device."""
    ticket = KEYRING.open(phone.assignment, AssignmentTicket)
    pseudonym = pseudonym_of(device, KEY)
    phone.assignment = KEYRING.seal(structs.replace(ticket, pseudonym=pseudonym))


def assigned(world: World, node: Node, device: str) -> Phone:
    phone = world.phone(node)
    identify(phone, device)
    return phone


def joined(world: World, node: Node, device: str) -> Phone:
    phone = assigned(world, node, device)
    assert isinstance(phone.join(), Joined)
    return phone


def take_part(world: World, node: Node, device: str) -> object:
    return joined(world, node, device).upload_for_good(1.0)


def heir_of(world: World, node: Node) -> Node:
    """The node dies; its successor adopts whoever comes within a heartbeat."""
    world.crash(node)
    heir = world.start("agg-2")
    world.place(heir)
    return heir


# --- One session


def test_a_new_join_ends_the_earlier_session_of_the_device() -> None:
    world, node = a_world()
    first, other = joined(world, node, "phone"), joined(world, node, "tablet")
    second = joined(world, node, "phone")
    assert [first.heartbeat(), second.heartbeat(), other.heartbeat()] == [
        REPLACED,
        Alive(),
        Alive(),
    ]
    assert first.join() == REPLACED, "a repeated join does not bring it back"
    assert node.held().counters["aborted_replaced"] == 1


def test_a_device_takes_its_own_slot_when_the_task_is_full() -> None:
    world, node = a_world(an_async_task(goal=1, concurrency=1))
    joined(world, node, "phone")
    other, second = assigned(world, node, "tablet"), assigned(world, node, "phone")
    assert other.join() == Aborted("full")
    assert isinstance(second.join(), Joined)


def test_devices_without_an_identity_replace_nobody() -> None:
    world, node = a_world()
    phones = [joined(world, node, "") for _ in range(3)]
    assert [phone.heartbeat() for phone in phones] == [Alive()] * 3


def test_a_replaced_session_gives_its_upload_memory_back() -> None:
    world, node = a_world(an_async_task(1), upload_bytes=ONE_UPLOAD)
    first = joined(world, node, "phone")
    first.report()
    assert isinstance(first.chunk(0, bytes(8)), ChunkReceived)
    second = joined(world, node, "phone")
    second.report()
    assert isinstance(second.chunk(0, bytes(8)), ChunkReceived)
    assert [drop.session for drop in node.did(Drop)] == [first.session]


def test_an_update_that_is_being_folded_is_not_replaced() -> None:
    world, node = a_world()
    first = joined(world, node, "phone")
    node.hold(Snapshot)
    handle = first.upload(1.0)
    world.pass_s(1.0)
    second = assigned(world, node, "phone")
    assert second.join() == REPLACED
    node.release()
    assert world.answers[handle] == COUNTED
    assert second.join() == REPLACED
    joined(world, node, "phone")


def test_an_assignment_that_is_turned_away_is_used_up() -> None:
    """Otherwise a device whose update is being folded could hold a lease for each of its joins."""
    world, node = a_world()
    first = joined(world, node, "phone")
    world.pass_s(world.server.heartbeat_s)
    promised = node.held().slots.promises.count
    assert promised == 3
    node.hold(Snapshot)
    first.upload(1.0)
    second = assigned(world, node, "phone")
    assert second.join() == second.join() == REPLACED
    assert node.held().slots.promises.count == promised - 1
    world.pass_s(world.server.heartbeat_s)
    assert second.session in node.last_report().joined


@pytest.mark.parametrize("newer_first", [True, False])
def test_a_successor_adopts_the_newer_of_two_sessions(newer_first: bool) -> None:
    world, node = a_world()
    older = joined(world, node, "phone")
    world.pass_s(1.0)
    newer = joined(world, node, "phone")
    older.node = newer.node = heir_of(world, node)
    phones = (newer, older) if newer_first else (older, newer)
    assert isinstance(phones[0].heartbeat(), Alive)
    phones[1].heartbeat()
    assert (older.heartbeat(), newer.heartbeat()) == (REPLACED, Alive())


# --- One update per buffer


def test_a_second_update_goes_to_the_next_buffer_and_a_third_is_discarded() -> None:
    world, node = a_world(an_async_task(goal=2))
    assert [take_part(world, node, "phone") for _ in range(3)] == [COUNTED, COUNTED, AGAIN]
    records = {row.target: len(row.members) for row in world.store.all(RecordRow)}
    assert records == {1: 1, 2: 1}
    assert take_part(world, node, "tablet") == COUNTED
    assert world.version == 1
    assert take_part(world, node, "phone") == COUNTED, "buffer 3 is open now"


def test_a_successor_knows_the_devices_of_open_buffers() -> None:
    world, node = a_world(an_async_task(goal=2))
    assert [take_part(world, node, "phone") for _ in range(2)] == [COUNTED] * 2
    heir = heir_of(world, node)
    world.pass_s(world.server.heartbeat_s)
    assert take_part(world, heir, "phone") == AGAIN
    assert take_part(world, heir, "tablet") == COUNTED


def test_a_device_that_is_in_the_open_buffer_waits_for_the_one_after_the_full_one() -> None:
    """Buffer 1 becomes a version, buffer 2 has the device: its update waits for buffer 3."""
    world, node = a_world(an_async_task(goal=2))
    node.hold(Transact)
    handles = [joined(world, node, device).upload(1.0) for device in ("a", "b", "phone")]
    node.hold(Step)
    node.release_one()
    assert [world.answers[handle] for handle in handles] == [COUNTED] * 3
    handle = joined(world, node, "phone").upload(1.0)
    world.pass_s(1.0)
    assert handle not in world.answers
    node.release()
    world.pass_s(1.0)
    assert world.answers[handle] == COUNTED
    assert [row.target for row in world.store.all(RecordRow)] == [2, 3]


def test_a_device_counts_once_in_a_round() -> None:
    world, node = a_world(a_sync_task(concurrency=2, over_selection=0.0))
    assert [take_part(world, node, "phone") for _ in range(2)] == [COUNTED, AGAIN]
    assert take_part(world, node, "tablet") == COUNTED
    assert world.version == 1


def test_a_device_counts_once_in_a_task_of_one_version_such_as_an_evaluation() -> None:
    world, node = a_world(an_async_task(goal=3, stop=StopRule(versions=1)))
    assert [take_part(world, node, "phone") for _ in range(3)] == [COUNTED, AGAIN, AGAIN]
    assert [take_part(world, node, device) for device in ("a", "b")] == [COUNTED] * 2
    assert world.version == 1


def test_a_refused_update_leaves_its_place_to_the_device() -> None:
    world, node = a_world(an_async_task(goal=2, stop=StopRule(versions=1)))
    assert joined(world, node, "phone").upload_for_good(nan) == Completed("not_finite")
    assert take_part(world, node, "phone") == COUNTED


# --- Under secure aggregation


def a_secure_world() -> tuple[SecureWorld, Node]:
    world = SecureWorld(a_secure_task(goal=2))
    return world, served(world)


def test_seeds_of_one_device_go_to_different_groups() -> None:
    world, node = a_secure_world()
    assert [take_part(world, node, "phone") for _ in range(3)] == [COUNTED, COUNTED, AGAIN]
    assert [take_part(world, node, device) for device in ("a", "b")] == [COUNTED] * 2
    assert world.version == 2
    assert world.parameters(2)[0] == pytest.approx(2.0, abs=1e-4)


def test_a_seed_in_a_group_does_not_get_its_device_into_the_buffer_twice() -> None:
    """A holder put a seed into group 1 and died. A later session of the device is in buffer 1 when
    the first one comes back: its seed can be in no other group.
    """
    world, node = a_secure_world()
    first = joined(world, node, "phone")
    assert isinstance(first, SecurePhone)
    node.hold(Snapshot)
    first.upload(1.0)
    world.pass_s(1.0)
    heir = heir_of(world, node)
    assert take_part(world, heir, "phone") == COUNTED
    first.node = heir
    first.send_masked()
    asked = world.answers.get(first.complete())
    assert isinstance(asked, Incomplete), "its seed is in group 1, so its bytes are needed again"
    assert first.send_for_good() == AGAIN
    assert len(heir.did(Fold)) == 2


# --- Revoked devices


def test_a_revoked_device_learns_it_at_its_next_request() -> None:
    world, node = a_world()
    phone, other = joined(world, node, "phone"), joined(world, node, "tablet")
    on_its_way = assigned(world, node, "phone")
    node.receive(Revoked(("phone", "somebody-else")))
    assert phone.heartbeat() == on_its_way.join() == Aborted("revoked")
    assert other.heartbeat() == Alive()
    assert node.held().counters["aborted_revoked"] == 1


def test_a_revocation_that_is_taken_back_lets_the_device_join() -> None:
    world, node = a_world()
    node.receive(Revoked(("phone",)))
    node.receive(Revoked(()))
    joined(world, node, "phone")


def test_a_successor_that_knows_of_the_revocation_does_not_adopt_the_device() -> None:
    world, node = a_world()
    phone, uploading = joined(world, node, "phone"), joined(world, node, "tablet")
    assert isinstance(uploading.report(), UploadGranted)
    world.crash(node)
    heir = world.start("agg-2")
    heir.receive(Revoked(("phone", "tablet")))
    world.place(heir)
    phone.node = uploading.node = heir
    assert phone.heartbeat() == Aborted("revoked")
    assert uploading.chunk(0, bytes(8)) == Aborted("revoked")


def test_an_update_that_is_being_folded_when_its_device_is_revoked_is_counted() -> None:
    """It may be in the sum already, so it cannot be withdrawn."""
    world, node = a_world()
    phone = joined(world, node, "phone")
    node.hold(Snapshot)
    handle = phone.upload(1.0)
    world.pass_s(1.0)
    node.receive(Revoked(("phone",)))
    node.release()
    assert world.answers[handle] == COUNTED
    assert phone.heartbeat() == COUNTED


def test_a_revoked_device_whose_update_was_not_counted_does_not_send_it_again() -> None:
    """It is revoked while its update is folded. The TSA does not answer, so the update is not in
    the sum and can be withdrawn.
    """
    world = SecureWorld(a_secure_task(goal=1))
    node = served(world)
    phone = joined(world, node, "phone")
    assert isinstance(phone, SecurePhone)
    node.hold(Fold)
    handle = phone.upload(1.0)
    world.tsa.cut_off(1.0)
    node.receive(Revoked(("phone",)))
    node.release()
    assert isinstance(world.answers[handle], Retry)
    world.pass_s(3.0)
    assert phone.send_for_good() == Aborted("revoked")
    assert phone.heartbeat() == Aborted("revoked")
    assert world.version == 0


def test_a_revocation_that_arrives_while_the_task_loads_holds() -> None:
    world, node = a_world()
    world.crash(node)
    heir = world.start("agg-2")
    heir.hold(Restore)
    world.place(heir)
    heir.receive(Revoked(("phone",)))
    heir.release()
    assert assigned(world, heir, "phone").join() == Aborted("revoked")


@pytest.mark.parametrize("reason", ["revoked", "replaced"])
def test_a_place_that_was_kept_for_an_ended_session_is_used_at_once(reason: str) -> None:
    world = SecureWorld(a_secure_task(goal=1))
    node = served(world)
    phones = [joined(world, node, device) for device in ("a", "b", "c")]
    node.hold(Fold)
    phones[0].upload(1.0)
    phones[1].upload(1.0)
    handle = phones[2].upload(1.0)
    world.tsa.cut_off(1.0)
    node.release()
    world.pass_s(3.0)
    assert handle not in world.answers, "places are kept for the others"
    if reason == "revoked":
        node.receive(Revoked(("a",)))
    else:
        joined(world, node, "a")
    world.pass_s(1.0)
    assert world.answers[handle] == COUNTED
    assert node.held().counters[f"aborted_{reason}"] == 1


def test_a_task_without_a_key_excludes_nobody() -> None:
    """Of an identity that is not known, nobody can say whether it is revoked."""
    world = World(a_task())
    node = world.start()
    world.place(node)
    world.pass_s(world.server.heartbeat_s)
    node.receive(Revoked(("phone",)))
    joined(world, node, "")
