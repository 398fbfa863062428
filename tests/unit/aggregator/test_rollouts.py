"""A holder during a rollout: two signed revisions are served at the same time (docs/adr/0064)."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from papaya.config import AsyncFL, TaskConfig
from papaya.messages.owner import TaskRows, offer, revise
from papaya.messages.participation import Aborted, Alive, Completed, Joined, Leave, Left
from papaya.messages.reasons import CANDIDATE_COUNTED, CANDIDATE_FAILED
from papaya.messages.storage import Candidate, RecordRow, Transaction, task_key
from papaya.messages.tickets import AssignmentTicket
from papaya.sim.revisions import signed
from tests.unit.aggregator.builders import KEYRING, TASK, Node, Phone, World, a_task, a_world

COUNTED = Completed()


def offered(world: World, node: Node, active: int = 0, **changes: Any) -> TaskConfig:
    """Offer a candidate, and let the same aggregator hold the task again."""
    rows = TaskRows(TASK, world.store.rows)
    config = signed(structs.replace(rows.row.config, **changes), 7)
    world.blobs |= dict.fromkeys(config.requirements.blobs, b"bundle")
    world.store.apply(offer(rows, Candidate(config, 0.5), (), world.now))
    node.order([])
    world.place(node, active=active)
    return config


def phone_under(world: World, node: Node, config: TaskConfig) -> Phone:
    """A phone that a selector has accepted for this revision."""
    phone = world.phone(node)
    held = node.held()
    ticket = AssignmentTicket(
        TASK,
        phone.session,
        held.fence.seq,
        world.now + world.server.confirm_by_s,
        held.ledger.version,
        manifest=config.manifest,
        epoch=node.machine.epoch,
    )
    phone.assignment = KEYRING.seal(ticket)
    return phone


def a_rollout(**changes: Any) -> tuple[World, Node, TaskConfig]:
    config = signed(a_task(regime=AsyncFL(4), max_examples=10, concurrency=8), 0)
    world, node = a_world(config)
    return world, node, offered(world, node, **changes)


def test_each_update_is_weighed_by_the_revision_of_its_client_in_one_buffer() -> None:
    world, node, candidate = a_rollout(max_examples=3, clip=1.0)
    [current, wild] = world.joined(node, 2)
    one, two = phone_under(world, node, candidate), phone_under(world, node, candidate)
    assert isinstance(one.join(), Joined)
    assert isinstance(two.join(), Joined)
    assert current.upload_for_good(5.0, examples=8) == COUNTED, "the current one has no clip"
    assert one.upload_for_good(0.5, examples=8) == COUNTED
    assert two.upload_for_good(5.0, examples=8) == Completed("over_norm")
    assert wild.upload_for_good(float("nan")) == Completed("not_finite")
    [record] = world.store.all(RecordRow)
    assert [member.examples for member in record.members] == [8, 3]
    endings = dict(node.held().report(world.now, 99).endings)
    assert (endings[CANDIDATE_COUNTED], endings[CANDIDATE_FAILED]) == (1, 1)
    assert endings["counted"] == 2, "those of the candidate are counted there too"


def test_a_device_that_is_no_longer_idle_says_nothing_about_the_candidate() -> None:
    world, node, candidate = a_rollout()
    phones = [phone_under(world, node, candidate) for _ in range(2)]
    for phone, reason in zip(phones, ("stopped", "crashed"), strict=True):
        assert isinstance(phone.join(), Joined)
        assert phone.ask(Leave(phone.ticket, reason)) == Left()
    endings = dict(node.held().report(world.now, 99).endings)
    assert endings[CANDIDATE_FAILED] == 1
    assert CANDIDATE_COUNTED not in endings


def test_clients_of_the_candidate_go_on_at_the_next_holder() -> None:
    world, node, candidate = a_rollout()
    phone = phone_under(world, node, candidate)
    assert isinstance(phone.join(), Joined)
    world.crash(node)
    successor = world.start("agg-2")
    world.place(successor, active=1)
    phone.node = successor
    assert phone.heartbeat() == Alive()
    assert phone.upload_for_good(1.0) == COUNTED
    assert dict(successor.held().report(world.now, 99).endings)[CANDIDATE_COUNTED] == 1


def test_the_bundle_of_the_candidate_is_not_swept() -> None:
    world, node, candidate = a_rollout()
    for phone in world.joined(node, 4):
        assert phone.upload_for_good(1.0) == COUNTED
    assert world.version == 1
    assert candidate.requirements.bundle in node.held().ledger.blobs()


def test_after_the_last_step_clients_of_both_revisions_finish() -> None:
    world, node, candidate = a_rollout()
    [before] = world.joined(node, 1)
    after = phone_under(world, node, candidate)
    assert isinstance(after.join(), Joined)
    rows = TaskRows(TASK, world.store.rows)
    world.store.apply(revise(rows, candidate, (), world.now, revision=1))
    revised = TaskRows(TASK, world.store.rows).row
    world.store.apply(Transaction(put=((task_key(TASK), structs.replace(revised, signed=2)),)))
    node.order([])
    world.place(node, active=2)
    assert before.upload_for_good(1.0) == COUNTED
    assert CANDIDATE_COUNTED not in dict(node.held().report(world.now, 99).endings)
    assert after.upload_for_good(1.0) == COUNTED
    assert dict(node.held().report(world.now, 99).endings)[CANDIDATE_COUNTED] == 1
    assert isinstance(world.phone(node).join(), Joined)


def test_without_a_rollout_nothing_is_counted_twice() -> None:
    config = signed(a_task(regime=AsyncFL(4)), 0)
    world, node = a_world(config)
    [phone] = world.joined(node, 1)
    assert phone.upload_for_good(1.0) == COUNTED
    assert CANDIDATE_COUNTED not in dict(node.held().report(world.now, 99).endings)


def test_a_candidate_that_was_taken_back_cannot_be_joined() -> None:
    world, node, candidate = a_rollout()
    late, training = phone_under(world, node, candidate), phone_under(world, node, candidate)
    assert isinstance(training.join(), Joined)
    rows = TaskRows(TASK, world.store.rows)
    fallback = signed(rows.row.config, 8)
    world.store.apply(revise(rows, fallback, (), world.now))
    node.order([])
    world.place(node, active=1)
    assert late.join() == Aborted("revised")
    assert training.upload_for_good(1.0) == COUNTED, "without a rollback of the model it may finish"
