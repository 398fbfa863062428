"""The owner marks a version, or an evaluation pins one, while its holder makes the next."""

from __future__ import annotations

import msgspec
import pytest

from papaya.aggregator.work import Restore
from papaya.machine import Read
from papaya.messages.participation import Completed, Joined, UploadGranted
from papaya.messages.storage import (
    ConsumedRow,
    FenceRow,
    OptimizerRow,
    RecordRow,
    Row,
    Transaction,
    VersionRow,
    consumed_key,
    fence_key,
    optimizer_key,
    record_key,
    version_key,
)
from tests.unit.aggregator.builders import (
    TASK,
    Node,
    World,
    a_world,
    an_async_task,
    chunks_of,
    make_version,
)

TIMEOUT_S = 60.0
TICKETS_EXPIRE_S = 1000.0


def a_world_with_an_old_version() -> tuple[World, Node]:
    """Version 1 is about to be deleted, with the next version that is made."""
    world, node = a_world(
        an_async_task(1, keep_versions=1, training_timeout_s=TIMEOUT_S, upload_timeout_s=TIMEOUT_S)
    )
    for _ in range(3):
        make_version(world, node)
    world.pass_s(TICKETS_EXPIRE_S)
    return world, node


def pin(world: World, version: int, kept_until: float) -> None:
    key = version_key(TASK, version)
    row = world.store.rows[key]
    assert isinstance(row, VersionRow)
    pinned = msgspec.structs.replace(row, kept_until=kept_until)
    assert world.store.apply(Transaction(((key, row),), ((key, pinned),))) == "committed"


def versions(world: World) -> list[int]:
    return [row.version for row in world.store.all(VersionRow)]


def test_a_pin_costs_no_other_client_its_upload() -> None:
    world, node = a_world_with_an_old_version()
    slow = world.phone(node)
    assert isinstance(slow.join(), Joined)
    assert isinstance(slow.report(), UploadGranted)
    first, second = chunks_of([2.0], world.server.chunk_bytes)
    slow.chunk(0, first)
    pin(world, 1, kept_until=world.now + 10 * TICKETS_EXPIRE_S)
    make_version(world, node)
    assert world.version == 4
    slow.chunk(1, second)
    handle = slow.complete()
    world.pass_s(1.0)
    assert world.answers[handle] == Completed()
    assert len(node.did(Restore)) == 1, "the task was loaded once"
    assert 1 in versions(world)


def test_a_pin_that_is_over_lets_the_version_go() -> None:
    world, node = a_world_with_an_old_version()
    pin(world, 1, kept_until=world.now + TICKETS_EXPIRE_S)
    make_version(world, node)
    assert 1 in versions(world)
    world.pass_s(2 * TICKETS_EXPIRE_S)
    reads = len(node.did(Read))
    make_version(world, node)
    assert 1 not in versions(world)
    assert len(node.did(Read)) == reads, "the row is known as it is"


def test_a_refusal_that_no_row_explains_loads_the_task_again() -> None:
    world, node = a_world_with_an_old_version()
    ledger = node.held().ledger
    assert not ledger.take_owners_changes(dict(world.store.rows))


MORE: dict[str, tuple[str, Row]] = {
    "the fence": (fence_key(TASK), FenceRow(9, "agg-2", 0)),
    "the head": (optimizer_key(TASK), OptimizerRow(9, "optimizer")),
    "a record": (record_key(TASK, 4), RecordRow(4, "sum", (), 0.0)),
    "the consumed": (consumed_key(TASK, 9), ConsumedRow(9, ())),
}


@pytest.mark.parametrize("what", MORE)
def test_if_anything_else_has_changed_nothing_is_adopted(what: str) -> None:
    world, node = a_world_with_an_old_version()
    ledger = node.held().ledger
    before = dict(ledger.versions)
    pin(world, 1, kept_until=1e9)
    key, row = MORE[what]
    assert not ledger.take_owners_changes({**world.store.rows, key: row})
    assert ledger.versions == before
    assert ledger.take_owners_changes(dict(world.store.rows))
    assert ledger.versions != before
