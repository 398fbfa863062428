"""Versions at their holder: one transaction each; what is kept, and for how long."""

from __future__ import annotations

import msgspec
import pytest

from papaya.aggregator.work import DeleteBlobs
from papaya.config import OptimizerConfig, TaskConfig
from papaya.machine import Transact
from papaya.messages.participation import Completed, Refused, Retry
from papaya.messages.storage import (
    ConsumedRow,
    FenceRow,
    OptimizerRow,
    RecordRow,
    Transaction,
    VersionRow,
    consumed_key,
    fence_key,
    optimizer_key,
    record_key,
    version_key,
)
from papaya.messages.tickets import SessionTicket, UploadTicket
from tests.unit.aggregator.builders import (
    KEYRING,
    TASK,
    Node,
    World,
    a_world,
    an_async_task,
    make_version,
)

TIMEOUT_S, UPLOAD_S, H = 60.0, 30.0, 10.0
TICKET_LIFE_S = TIMEOUT_S + H + UPLOAD_S
A_MOMENT_S = 2.0**-10


def a_short_task(keep_versions: int, goal: int = 1) -> TaskConfig:
    return an_async_task(
        goal,
        keep_versions=keep_versions,
        training_timeout_s=TIMEOUT_S,
        upload_timeout_s=UPLOAD_S,
    )


def versions(world: World) -> list[int]:
    return [row.version for row in world.store.all(VersionRow)]


def consumed_versions(world: World) -> list[int]:
    return [row.version for row in world.store.all(ConsumedRow)]


def the_version_transaction(node: Node) -> Transaction:
    """The last one that made a version."""
    return [
        effect.transaction
        for effect in node.did(Transact)
        if isinstance(effect.transaction.put[0][1], VersionRow)
    ][-1]


def mark(world: World, version: int, *, marked: bool = True) -> None:
    """What the owner does, by one transaction on the row."""
    key = version_key(TASK, version)
    row = world.store.rows[key]
    assert isinstance(row, VersionRow)
    changed = msgspec.structs.replace(row, marked=marked)
    assert world.store.apply(Transaction(((key, row),), ((key, changed),))) == "committed"


# -- the transaction --------------------------------------------------------------------------


def test_a_version_is_one_fenced_transaction() -> None:
    world, node = a_world(an_async_task(2))
    phones = world.joined(node, 2)
    for phone in phones:
        phone.upload(1)
    transaction = the_version_transaction(node)
    required, put = dict(transaction.require), dict(transaction.put)
    assert required[fence_key(TASK)] == FenceRow(1, "agg-1", 1)
    record = required[record_key(TASK, 1)]
    assert isinstance(record, RecordRow)
    assert [member.session for member in record.members] == [phone.session for phone in phones]
    assert isinstance(put[version_key(TASK, 1)], VersionRow)
    assert put[consumed_key(TASK, 1)] == ConsumedRow(1, record.members)
    assert isinstance(put[optimizer_key(TASK)], OptimizerRow)
    assert record_key(TASK, 1) in transaction.delete
    assert world.store.apply(transaction) == "refused", "a second time it changes nothing"


def test_the_record_goes_with_the_version_that_it_became() -> None:
    world, node = a_world(an_async_task(2))
    for phone in world.joined(node, 3):
        phone.upload(1)
    world.pass_s(1.0)
    assert [row.target for row in world.store.all(RecordRow)] == [2]


def test_a_version_row_says_when_and_under_which_fence_it_was_made() -> None:
    world, node = a_world(an_async_task(1))
    world.place(node)
    world.pass_s(H)
    made_at = world.now
    make_version(world, node)
    [_, row] = world.store.all(VersionRow)
    assert (row.seq, row.created, row.marked) == (2, made_at, False)


def test_nothing_of_a_version_is_there_before_its_transaction() -> None:
    world, node = a_world(an_async_task(1))
    [phone] = world.joined(node, 1)
    node.hold(Transact)
    phone.upload(1)
    assert versions(world) == [0]
    assert world.phone(node).join() is not None
    assert node.held().ledger.version == 0
    node.settle("committed")
    assert versions(world) == [0, 1]


def test_a_deposed_holder_makes_no_version() -> None:
    world, node = a_world(an_async_task(1))
    [phone] = world.joined(node, 1)
    node.hold(Transact)
    phone.upload(1)
    before = dict(world.store.rows)
    before[fence_key(TASK)] = world.store.rows[fence_key(TASK)] = FenceRow(2, "agg-2", 0)
    node.settle("committed")
    assert world.store.rows == before
    assert TASK not in node.machine.tasks


def test_the_optimizer_goes_on_from_its_durable_state() -> None:
    """Momentum 0.5, updates of 1: steps of 1, then of 0.5 + 1, also at a successor."""
    config = an_async_task(1, optimizer=OptimizerConfig(kind="fedavg", momentum=0.5))
    world, node = a_world(config)
    make_version(world, node)
    world.crash(node)
    successor = world.start("agg-2")
    world.place(successor)
    make_version(world, successor)
    assert world.parameters(1)[0] == 1
    assert world.parameters(2)[0] == 2.5


def test_a_step_that_is_not_finite_publishes_nothing_and_loses_nothing() -> None:
    """The task halts with its record; a holder with a better optimizer can go on from there."""
    config = an_async_task(2, optimizer=OptimizerConfig(kind="fedavg", rate=1e38))
    world, node = a_world(config)
    *diverging, late = world.joined(node, 3)
    handles = [phone.upload(1e15) for phone in diverging]
    assert [world.answers[handle] for handle in handles] == [Completed(), Completed()]
    assert versions(world) == [0]
    assert world.recorded() == [phone.session for phone in diverging]
    assert isinstance(late.heartbeat(), Retry)
    world.pass_s(H)
    assert all(task.demand == 0 for task in node.reports[-1].tasks), "no client is wanted"


# -- consumed ids -----------------------------------------------------------------------------


def test_consumed_ids_are_kept_for_a_ticket_life_after_the_next_version() -> None:
    world, node = a_world(a_short_task(keep_versions=2))
    make_version(world, node)
    world.pass_s(2 * TICKET_LIFE_S)
    make_version(world, node)
    assert consumed_versions(world) == [1, 2], "clients may have joined just before version 2"
    [second] = [row for row in world.store.all(VersionRow) if row.version == 2]
    world.pass_s(second.created + TICKET_LIFE_S - world.now)
    make_version(world, node)
    assert consumed_versions(world) == [1, 2, 3], "by a clock that is a heartbeat behind"
    world.pass_s(second.created + TICKET_LIFE_S + H - world.now)
    make_version(world, node)
    assert consumed_versions(world) == [2, 3, 4]
    assert list(node.held().ledger.consumed) == [2, 3, 4]
    world.pass_s(2 * TICKET_LIFE_S)
    make_version(world, node)
    assert consumed_versions(world) == [4, 5], "and not for ever"


def test_a_client_counted_long_ago_is_never_counted_again() -> None:
    """At every moment its upload ticket is either remembered or expired."""
    world, node = a_world(a_short_task(keep_versions=2))
    [phone] = world.joined(node, 1)
    for _ in range(6):
        world.pass_s(H)
        phone.heartbeat()
    phone.report()
    phone.send(7)
    phone.complete()
    while world.now < 3 * TICKET_LIFE_S:
        world.pass_s(H / 2)
        successor = world.start(f"agg-{world.now}")
        world.crash(world.nodes[0])
        world.place(successor)
        phone.node = successor
        phone.send(7, upload="again")
        phone.complete("again")
        world.pass_s(1.0)
        make_version(world, successor)
    assert (world.consumed() + world.recorded()).count(phone.session) == 0, "long settled"
    assert world.parameters(world.version)[0] == 7 + (world.version - 1)


@pytest.mark.parametrize("off_s", [-A_MOMENT_S, 0.0, A_MOMENT_S])
def test_the_last_instant_of_a_ticket_is_not_a_second_chance(off_s: float) -> None:
    """A report in the last moment of a session gives a ticket as long-lived as the consumed id."""
    world, node = a_world(a_short_task(keep_versions=2))
    [phone] = world.joined(node, 1)
    expires = KEYRING.open(phone.ticket, SessionTicket).expires
    while world.now + H < expires:
        world.pass_s(H)
        phone.heartbeat()
    world.now = expires - A_MOMENT_S
    assert world.answers[phone.upload(7)] == Completed()
    upload_by = KEYRING.open(phone.ticket, UploadTicket).upload_by
    world.pass_s(upload_by + off_s - world.now)
    [other] = world.joined(node, 1)
    assert world.answers[other.upload(1)] == Completed()
    world.crash(node)
    phone.node = world.start("agg-2")
    world.place(phone.node)
    phone.send(7, upload="again")
    phone.complete("again")
    assert world.parameters(world.version)[0] == 7 + 1, "counted twice"


# -- old versions -----------------------------------------------------------------------------


def test_the_last_n_versions_are_kept() -> None:
    world, node = a_world(a_short_task(keep_versions=5))
    for _ in range(8):
        make_version(world, node)
        world.pass_s(2 * TICKET_LIFE_S)
    assert versions(world) == [4, 5, 6, 7, 8]


def test_one_version_may_be_all_that_is_kept() -> None:
    """`keep_versions` = 1 is legal: the versions before go when their tickets have expired."""
    world, node = a_world(a_short_task(keep_versions=1))
    for _ in range(6):
        make_version(world, node)
        world.pass_s(2 * TICKET_LIFE_S)
    kept = versions(world)
    assert kept[-1] == 6
    assert kept[0] >= 4


def test_a_version_is_kept_while_a_ticket_may_name_it() -> None:
    """However many versions come after it."""
    world, node = a_world(a_short_task(keep_versions=1))
    [phone] = world.joined(node, 1)
    joined_at = world.now
    for _ in range(6):
        make_version(world, node)
    world.pass_s(joined_at + TICKET_LIFE_S - world.now - 2.0)
    make_version(world, node)
    assert phone.version == 0
    assert versions(world)[0] == 0
    world.pass_s(2 * TICKET_LIFE_S)
    make_version(world, node)
    assert versions(world)[0] >= 5, "and not for ever"


def test_a_version_is_kept_for_a_ticket_given_while_the_next_was_being_committed() -> None:
    """Until the commit is seen, clients still join the version before."""
    world, node = a_world(a_short_task(keep_versions=2))
    [phone] = world.joined(node, 1)
    node.hold(Transact)
    phone.upload(1)
    world.pass_s(H)  # the version's transaction is on its way all the time
    [late] = world.joined(node, 1)
    node.settle("committed")
    node.release()
    ticket_ends = KEYRING.open(late.ticket, SessionTicket).expires + UPLOAD_S
    world.pass_s(ticket_ends - world.now - 2.0)
    make_version(world, node)
    assert late.version == 0
    assert 0 in versions(world), "a live ticket names it"


def test_a_marked_version_is_kept() -> None:
    world = World(a_short_task(keep_versions=2))
    mark(world, 0)
    node = world.start()
    world.place(node)
    world.pass_s(H)
    for _ in range(6):
        make_version(world, node)
        world.pass_s(2 * TICKET_LIFE_S)
    assert versions(world)[0] == 0
    assert 1 not in versions(world)
    assert all(row.parameters in world.blobs for row in world.store.all(VersionRow))


def test_a_version_that_is_marked_while_the_task_runs_is_kept() -> None:
    """Deleting must not trust a row that was read before the owner marked it."""
    world, node = a_world(a_short_task(keep_versions=2))
    make_version(world, node)
    mark(world, 1)
    for _ in range(3):
        world.pass_s(2 * TICKET_LIFE_S)
        make_version(world, node)
    assert 1 in versions(world)
    [row] = [row for row in world.store.all(VersionRow) if row.version == 1]
    assert row.parameters in world.blobs


def test_a_version_whose_mark_is_taken_away_goes_like_the_others() -> None:
    world = World(a_short_task(keep_versions=2))
    mark(world, 0)
    node = world.start()
    world.place(node)
    world.pass_s(H)
    for _ in range(6):
        make_version(world, node)
        world.pass_s(2 * TICKET_LIFE_S)
    assert versions(world)[0] == 0
    mark(world, 0, marked=False)
    world.place(node)  # reads the rows again
    world.pass_s(H)
    make_version(world, node)
    assert versions(world)[0] >= 4


# -- blobs ------------------------------------------------------------------------------------


def test_blobs_are_deleted_only_after_the_rows_that_named_them() -> None:
    world, node = a_world(a_short_task(keep_versions=2))
    make_version(world, node)
    world.pass_s(2 * TICKET_LIFE_S)
    named = {row.parameters for row in world.store.all(VersionRow)}
    named |= {row.state for row in world.store.all(OptimizerRow)}
    [phone] = world.joined(node, 1)
    node.hold(Transact)
    phone.upload(1)
    assert len(node.held_back) == 1, "the version's transaction, which drops version 0"
    assert named <= set(world.blobs)
    node.settle("committed")
    still = {row.parameters for row in world.store.all(VersionRow)}
    still |= {row.state for row in world.store.all(OptimizerRow)}
    assert set(world.blobs) == still
    assert named - still, "something had to go"


@pytest.mark.parametrize("fate", ["applied", "lost"])
def test_an_unknown_outcome_deletes_no_blob(fate: str) -> None:
    world, node = a_world(a_short_task(keep_versions=2))
    make_version(world, node)
    world.pass_s(2 * TICKET_LIFE_S)
    [phone] = world.joined(node, 1)
    node.hold(Transact)
    phone.upload(1)
    deletions = len([effect for effect in node.did(DeleteBlobs) if effect.blobs])
    node.settle("applied" if fate == "applied" else "lost")
    assert len([effect for effect in node.did(DeleteBlobs) if effect.blobs]) == deletions
    node.release()
    if fate == "lost":
        phone.send(1)
        phone.complete()
    world.pass_s(1.0)
    assert world.version == 2
    assert all(row.parameters in world.blobs for row in world.store.all(VersionRow))


def test_every_row_names_a_blob_that_is_there_and_nothing_else_is_left() -> None:
    world, node = a_world(a_short_task(keep_versions=2, goal=2))
    for turn in range(9):
        [phone] = world.joined(node, 1)
        phone.upload_for_good(turn)
        world.pass_s(TICKET_LIFE_S / 2)
        named = {row.parameters for row in world.store.all(VersionRow)}
        named |= {row.state for row in world.store.all(OptimizerRow)}
        named |= {row.sum for row in world.store.all(RecordRow)}
        assert set(world.blobs) == named


def test_an_expired_ticket_is_refused_even_if_its_version_is_still_there() -> None:
    world, node = a_world(a_short_task(keep_versions=5))
    [phone] = world.joined(node, 1)
    world.pass_s(2 * TICKET_LIFE_S)
    assert versions(world) == [0]
    assert isinstance(phone.report(), Refused)
