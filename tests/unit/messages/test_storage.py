"""Rows and their keys: what is written comes back, and a successor reads all of its own task."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from papaya.aggregator.sessions import keep_until, pinned_until, session_life_s
from papaya.config import EvaluationPlan, ServerConfig, TaskConfig
from papaya.config.checks import MAX_S
from papaya.messages import owner, storage, wire
from papaya.messages.storage import (
    FenceRow,
    Member,
    OptimizerRow,
    RecordRow,
    TaskRow,
    VersionRow,
)
from tests.unit.messages.strategies import ROWS, a_row, with_unknown_fields

CONFIG = TaskConfig(task="next-word", concurrency=100, model_length=10)
NUMBERED = [storage.record_key, storage.version_key, storage.consumed_key]


@pytest.mark.parametrize("kind", ROWS)
@settings(max_examples=20)
@given(data=st.data())
def test_every_row_comes_back_as_it_was_written(
    kind: type[storage.Row], data: st.DataObject
) -> None:
    row = data.draw(a_row(kind))
    read = wire.decode_row(wire.encode_row(row))
    assert type(read) is kind
    assert read == row


def test_rows_of_a_task_with_the_longest_times_come_back() -> None:
    """JSON has no infinity: a row with one would stop every server that reads it."""
    plan, server = EvaluationPlan(timeout_s=MAX_S), ServerConfig()
    config = structs.replace(CONFIG, training_timeout_s=MAX_S, upload_timeout_s=MAX_S)
    version = VersionRow(0, "parameters", 0, 0.0)
    evaluation = owner.evaluation_config(config, version, plan, 1)
    pinned = structs.replace(version, kept_until=pinned_until(evaluation, 1e9, server))
    until = keep_until(1e9 + session_life_s(config, server), config, server)
    record = RecordRow(1, "sum", (Member("session", 0, 0, 1, until),), 1.0)
    for row in (pinned, record):
        assert wire.decode_row(wire.encode_row(row)) == row


@pytest.mark.parametrize("kind", [kind for kind in ROWS if kind is not storage.EndingsRow])
@settings(max_examples=20)
@given(data=st.data())
def test_fields_of_a_later_version_are_ignored_wherever_they_are(
    kind: type[storage.Row], data: st.DataObject
) -> None:
    """Two successive versions share one state store during an upgrade. (The objects of an
    `EndingsRow` and the metrics of a `PointRow` are mappings: any name is a valid key there.)
    """
    row = data.draw(a_row(kind))
    newer = with_unknown_fields(json.loads(wire.encode_row(row)))
    if isinstance(row, storage.PointRow):
        newer["metrics"], newer["deviations"] = row.metrics, row.deviations
    assert wire.decode_row(json.dumps(newer).encode()) == row


@pytest.mark.parametrize(
    "encoded",
    [
        b'{"type":"FenceRow","seq":2,"aggregator":"agg","boot":3.0}',
        b'{"type":"LeaderRow","holder":"c","boot":1763300000.25,"epoch":1,"renewal":2}',
    ],
)
def test_a_boot_that_an_earlier_version_wrote_is_encoded_as_it_was(encoded: bytes) -> None:
    """A row that is encoded differently than it was read might never be replaced."""
    assert wire.encode_row(wire.decode_row(encoded)) == encoded


def test_a_boot_is_written_as_an_integer() -> None:
    assert b'"boot":3}' in wire.encode_row(FenceRow(2, "agg", 3))


def test_every_row_is_frozen() -> None:
    assert [kind for kind in ROWS if not kind.__struct_config__.frozen] == []


@given(st.integers(0, 10**11), st.integers(0, 10**11))
def test_keys_are_ordered_as_their_versions(first: int, second: int) -> None:
    """Rows are read back ordered by key: version 10 comes after version 9."""
    for key in NUMBERED:
        assert (key("a", first) < key("a", second)) is (first < second)


def test_a_successor_reads_all_of_its_task_and_no_version_of_its_neighbours() -> None:
    """Single rows are looked up by their whole key; numbered ones are taken as they come."""

    def read(task: str, key: str) -> bool:
        return key.startswith(storage.holder_prefixes(task))

    for single in (storage.task_key, storage.fence_key, storage.optimizer_key):
        assert read("next", single("next"))
    for numbered in NUMBERED:
        assert read("next", numbered("next", 12))
        for neighbour in ("next-word", "nex", "n", "next1"):
            assert not read("next", numbered(neighbour, 12))
    assert not read("next", storage.LEADER_KEY)
    assert not read("next", storage.EPOCH_KEY)


def test_keys_of_two_tasks_never_meet() -> None:
    tasks = ["a", "a-1", "a_1", "1", "a1"]
    keys = [key(task, number) for task in tasks for number in (0, 1, 11) for key in NUMBERED]
    assert len(keys) == len(set(keys))


def test_tasks_and_fences_are_found_under_their_prefix() -> None:
    assert storage.task_key("a").startswith(storage.TASKS)
    assert storage.fence_key("a").startswith(storage.FENCES)


def test_a_submission_begins_at_version_0_with_nobody_holding_it() -> None:
    transaction = storage.submission(CONFIG, "parameters", "optimizer", now=5.0)
    assert transaction.require == (
        (storage.task_key("next-word"), None),
        (storage.deleted_key("next-word"), None),
    )
    assert transaction.delete == ()
    assert dict(transaction.put) == {
        storage.task_key("next-word"): TaskRow(CONFIG, "running", submitted=5.0),
        storage.fence_key("next-word"): FenceRow(seq=0, aggregator="", boot=0),
        storage.version_key("next-word", 0): VersionRow(0, "parameters", seq=0, created=5.0),
        storage.optimizer_key("next-word"): OptimizerRow(0, "optimizer"),
    }
