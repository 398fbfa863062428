"""An owner's transactions: what they require, what they change, what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from papaya.config import (
    Aggregation,
    AsyncFL,
    EvaluationPlan,
    OptimizerConfig,
    SecureAggregation,
    SyncFL,
    TaskConfig,
    Weighting,
)
from papaya.errors import OperatorError
from papaya.messages import owner
from papaya.messages.owner import TaskRows
from papaya.messages.storage import (
    ConsumedRow,
    FenceRow,
    Member,
    OptimizerRow,
    PointRow,
    RecordRow,
    Row,
    TaskRow,
    TaskState,
    Transaction,
    VersionRow,
    blobs_of,
    consumed_key,
    fence_key,
    optimizer_key,
    point_key,
    record_key,
    submission,
    task_key,
    version_key,
)
from papaya.sim.revisions import signed

TASK = TaskConfig(task="next-word", concurrency=20, model_length=4)


def apply(rows: dict[str, Row], change: Transaction) -> bool:
    """The store's one primitive, on a dictionary."""
    if any(rows.get(key) != expected for key, expected in change.require):
        return False
    for key in change.delete:
        rows.pop(key, None)
    rows.update(change.put)
    return True


def a_member(session: str, version: int = 2) -> Member:
    return Member(session, version, staleness=0, examples=5, keep_until=900.0)


def running_rows(state: TaskState = "running") -> dict[str, Row]:
    """At version 3, held by a-1, with two open buffers."""
    return {
        task_key("next-word"): TaskRow(TASK, state, submitted=1.0),
        fence_key("next-word"): FenceRow(4, "a-1", 7),
        optimizer_key("next-word"): OptimizerRow(3, "next-word/4/optimizer-3-x", settled=1),
        **{
            version_key("next-word", v): VersionRow(v, f"next-word/4/version-{v}-x", 4, 10.0 * v)
            for v in (1, 2, 3)
        },
        record_key("next-word", 4): RecordRow(4, "sum-4", (a_member("a"), a_member("b")), 10.0),
        record_key("next-word", 5): RecordRow(5, "sum-5", (a_member("c"),), 5.0),
        # Another task whose name begins alike.
        task_key("next-word-2"): TaskRow(TASK),
    }


def test_a_state_can_change_as_drawn_and_not_otherwise() -> None:
    allowed = {
        ("running", "paused"),
        ("running", "completed"),
        ("running", "cancelled"),
        ("paused", "running"),
        ("paused", "completed"),
        ("paused", "cancelled"),
    }
    states: tuple[TaskState, ...] = ("running", "paused", "completed", "cancelled")
    for old in states:
        for new in states:
            row = TaskRow(TASK, old)
            if (old, new) in allowed:
                change = owner.change_state(row, new, 50.0, "because")
                [(key, changed)] = change.put
                assert change.require == ((key, row),)
                assert isinstance(changed, TaskRow)
                assert (changed.state, changed.why) == (new, "because")
                assert changed.ended == (50.0 if changed.is_over else 0.0)
            else:
                told = f"already {new}" if old == new else f"{old} and cannot become {new}"
                with pytest.raises(OperatorError, match=f"is {told}"):
                    owner.change_state(row, new, 50.0)


def test_a_change_that_comes_second_is_refused() -> None:
    rows = running_rows()
    row = TaskRows("next-word", rows).row
    assert apply(rows, owner.change_state(row, "paused", 50.0))
    assert not apply(rows, owner.change_state(row, "cancelled", 51.0))
    assert TaskRows("next-word", rows).row.state == "paused"


def test_a_rollback_restarts_from_the_old_model_and_keeps_members_consumed() -> None:
    rows = running_rows()
    change = owner.rollback(TaskRows("next-word", rows), 1, "next-word/4/optimizer-4-new", 99.0)
    assert apply(rows, change)
    after = TaskRows("next-word", rows)
    assert after.newest == VersionRow(
        4, "next-word/4/version-1-x", 5, 99.0, marked=True, restarts=True
    )
    assert after.fence == FenceRow(5, "", 0)
    assert after.optimizer == OptimizerRow(4, "next-word/4/optimizer-4-new", settled=1)
    assert after.records == {}
    consumed = rows[consumed_key("next-word", 4)]
    assert isinstance(consumed, ConsumedRow)
    assert [member.session for member in consumed.members] == ["a", "b", "c"]
    assert sorted(after.versions) == [1, 2, 3, 4]


MEANWHILE: dict[str, dict[str, Row | None]] = {
    "another fence": {fence_key("next-word"): FenceRow(5, "a-2", 8)},
    "another head": {optimizer_key("next-word"): OptimizerRow(4, "next-word/4/optimizer-4-x")},
    "a longer record": {
        record_key("next-word", 4): RecordRow(4, "s", tuple(map(a_member, "abcd")), 20.0)
    },
    "the old version is gone": {version_key("next-word", 1): None},
    "cancelled": {task_key("next-word"): TaskRow(TASK, "cancelled", submitted=1.0)},
}


@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_a_rollback_is_refused_when_anything_it_relies_on_has_changed(meanwhile: str) -> None:
    rows = running_rows()
    change = owner.rollback(TaskRows("next-word", rows), 1, "optimizer", 99.0)
    for key, row in MEANWHILE[meanwhile].items():
        if row is None:
            del rows[key]
        else:
            rows[key] = row
    before = dict(rows)
    assert not apply(rows, change)
    assert rows == before


def test_a_record_that_comes_into_being_meanwhile_is_not_forgotten() -> None:
    rows = running_rows()
    del rows[record_key("next-word", 4)], rows[record_key("next-word", 5)]
    change = owner.rollback(TaskRows("next-word", rows), 1, "optimizer", 99.0)
    assert not any(isinstance(row, ConsumedRow) for _, row in change.put)
    rows[record_key("next-word", 4)] = RecordRow(4, "sum-4", (a_member("a"),), 5.0)
    assert not apply(rows, change)


def test_what_is_gone_or_over_cannot_be_rolled_back() -> None:
    with pytest.raises(OperatorError, match="task next-word has no version 0") as gone:
        owner.rollback(TaskRows("next-word", running_rows()), 0, "optimizer", 99.0)
    assert "1, 2, 3" in gone.value.hint
    with pytest.raises(OperatorError, match="is completed and cannot be rolled back"):
        owner.rollback(TaskRows("next-word", running_rows("completed")), 1, "optimizer", 99.0)
    with pytest.raises(OperatorError, match="there is no task nothing"):
        TaskRows("nothing", running_rows())


# -- evaluation ---------------------------------------------------------------------------------


@given(
    task=st.from_regex(r"[a-z0-9][a-z0-9_-]{0,63}", fullmatch=True),
    version=st.integers(0, 10**12),
    clients=st.integers(1, 10**5),
)
def test_an_evaluation_is_a_legal_task_of_one_step(task: str, version: int, clients: int) -> None:
    config = TaskConfig(task=task, concurrency=7, model_length=99, regime=SyncFL())
    row = VersionRow(version, "blob", 1, 0.0)
    plan = EvaluationPlan(clients=clients, timeout_s=300)
    found = owner.evaluation_config(config, row, plan, length=48)
    assert found.evaluates is not None
    assert found.evaluates.model_length == 99
    assert found.aggregation_goal == clients
    assert found.concurrency >= clients
    assert (found.stop.versions, found.max_examples) == (1, 1)
    assert found.task.endswith(f"-eval-{version}")


def test_ids_of_evaluations_tell_tasks_and_versions_apart() -> None:
    assert owner.evaluation_id("next-word", 12) == "next-word-eval-12"
    long, other = "a" * 63 + "b", "a" * 63 + "c"
    ids = {
        owner.evaluation_id(task, v, earlier)
        for task in (long, other)
        for v in (1, 2)
        for earlier in (0, 1, 10**9)
    }
    assert len(ids) == 12
    assert max(map(len, ids)) == 64
    assert all(owner.is_evaluation_id(task) for task in ids)


def evaluated() -> tuple[dict[str, Row], TaskRow, VersionRow]:
    rows = running_rows()
    newest = TaskRows("next-word", rows).newest
    config = owner.evaluation_config(TASK, newest, EvaluationPlan(), 48)
    assert apply(rows, owner.evaluate(row_of(rows), config, newest, "p", "o", 60.0, 900.0))
    return rows, eval_row(rows), TaskRows("next-word", rows).newest


def row_of(rows: dict[str, Row], task: str = "next-word") -> TaskRow:
    row = rows[task_key(task)]
    assert isinstance(row, TaskRow)
    return row


def eval_row(rows: dict[str, Row]) -> TaskRow:
    return row_of(rows, "next-word-eval-3")


def test_a_task_is_not_evaluated_and_revised_at_once() -> None:
    """Devices would refuse the evaluation: it names the manifest from before the revision."""
    rows = running_rows()
    found = TaskRows("next-word", rows)
    config = owner.evaluation_config(TASK, found.newest, EvaluationPlan(), 48)
    start = owner.evaluate(found.row, config, found.newest, "p", "o", 60.0, 900.0)
    revise = owner.revise(found, TASK, [], 60.0, revision=2)
    revised_first, evaluated_first = dict(rows), dict(rows)
    assert apply(revised_first, revise)
    assert not apply(revised_first, start)
    assert apply(evaluated_first, start)
    assert not apply(evaluated_first, revise)


def test_an_evaluation_pins_its_version_for_as_long_as_its_tickets_live() -> None:
    rows, row, version = evaluated()
    assert (version.marked, version.kept_until) == (False, 900.0)
    old = PointRow(3, 30.0, 5, 50, 0.5)
    rows[point_key("next-word", 3)] = old
    new = PointRow(3, 30.0, 5, 50, 0.5, loss=2.0)
    assert apply(rows, owner.end_evaluation(row, "completed", 70.0, "loss 2", (old, new)))
    row = eval_row(rows)
    assert (row.state, row.ended, row.why) == ("completed", 70.0, "loss 2")
    assert rows[point_key("next-word", 3)] == new
    assert TaskRows("next-word", rows).newest.kept_until == 900.0  # stragglers still download it


def test_an_evaluation_needs_the_bundle_of_its_task_until_it_ends() -> None:
    """Then the next holder of the task may delete it, and a backup may leave it out."""
    rows = running_rows()
    config = signed(TASK, 1)
    rows[task_key("next-word")] = TaskRow(config)
    found = TaskRows("next-word", rows)
    evaluation = owner.evaluation_config(config, found.newest, EvaluationPlan(), 48)
    start = owner.evaluate(found.row, evaluation, found.newest, "p", "o", 60.0, 900.0)
    assert apply(rows, start)
    assert blobs_of(eval_row(rows)) == (config.requirements.bundle,)
    assert apply(rows, owner.end_evaluation(eval_row(rows), "cancelled", 70.0, "revised"))
    assert blobs_of(eval_row(rows)) == ()
    assert blobs_of(row_of(rows)) == (config.requirements.bundle,)


def test_an_evaluation_shortens_no_other_pin_and_touches_no_mark() -> None:
    rows, _, version = evaluated()
    assert apply(rows, owner.mark("next-word", version, True))
    newest = TaskRows("next-word", rows).newest
    config = owner.evaluation_config(TASK, newest, EvaluationPlan(), 48)
    again = structs.replace(config, task="next-word-eval-3b")
    assert apply(rows, owner.evaluate(row_of(rows), again, newest, "p", "o", 60.0, 100.0))
    newest = TaskRows("next-word", rows).newest
    assert (newest.marked, newest.kept_until) == (True, 900.0)


def test_forgetting_an_evaluation_touches_no_other_task() -> None:
    rows = running_rows()
    for version in (3, 30):  # the first id begins the second
        config = owner.evaluation_config(
            TASK, VersionRow(version, "blob", 4, 0.0, marked=True), EvaluationPlan(), 48
        )
        rows.update(submission(config, "p", "o", 60.0).put)
    kept = {key: row for key, row in rows.items() if not key.endswith("-eval-3")}
    kept = {key: row for key, row in kept.items() if "-eval-3/" not in key}
    row = TaskRow(eval_row(rows).config, "completed", ended=70.0)
    rows[task_key("next-word-eval-3")] = row
    assert apply(rows, owner.forget(row, rows))
    assert rows == kept
    assert AsyncFL(20, max_staleness=1) == row.config.regime


@pytest.mark.parametrize("key", ["record", "optimizer"])
def test_forgetting_is_refused_if_a_holder_wrote_meanwhile(key: str) -> None:
    """It may not have heard of the end. What it wrote would stay without a task."""
    rows, row, _ = evaluated()
    task = row.config.task
    assert apply(rows, owner.end_evaluation(row, "cancelled", 70.0, "gave up"))
    change = owner.forget(eval_row(rows), dict(rows))
    late: dict[str, tuple[str, Row]] = {
        "record": (record_key(task, 1), RecordRow(1, "sum", (), 0.0)),
        "optimizer": (optimizer_key(task), OptimizerRow(1, "state")),
    }
    rows.update([late[key]])
    assert not apply(rows, change)
    assert apply(rows, owner.forget(eval_row(rows), rows))
    assert not [found for found in rows if task in found]


def test_the_key_of_pseudonyms_is_deleted_when_the_task_ends() -> None:
    """Then nobody can link pseudonyms in its rows to devices."""
    row = TaskRow(TASK, pseudonym_key=b"secret")

    def after(state: TaskState) -> TaskRow:
        [(_, changed)] = owner.change_state(row, state, now=5.0).put
        assert isinstance(changed, TaskRow)
        return changed

    assert after("paused").pseudonym_key == b"secret"
    assert after("completed").pseudonym_key == after("cancelled").pseudonym_key == b""


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"optimizer": OptimizerConfig(kind="fedavg")}, "optimizer.kind"),
        ({"optimizer": OptimizerConfig(momentum=0.9)}, "optimizer.momentum"),
        (
            {"aggregation": Aggregation("median"), "weighting": Weighting("equal")},
            "aggregation.kind",
        ),
        ({"aggregation": Aggregation("mine")}, "aggregation.kind"),
    ],
)
def test_a_revision_cannot_change_what_stored_data_depends_on(
    changes: dict[str, Any], named: str
) -> None:
    found = TaskRows("next-word", running_rows())
    with pytest.raises(OperatorError, match=named):
        owner.revise(found, structs.replace(TASK, **changes), [], 60.0, revision=2)
    allowed = structs.replace(TASK, optimizer=structs.replace(TASK.optimizer, rate=0.5))
    owner.revise(found, allowed, [], 60.0, revision=2)


def test_a_revision_cannot_change_the_words_of_stored_masked_sums() -> None:
    rows = running_rows()
    secure = structs.replace(TASK, clip=1.0, secure_aggregation=SecureAggregation())
    needs = structs.replace(secure.requirements, upload_bits=16)
    narrow = structs.replace(secure, requirements=needs)
    for before, after in ((secure, narrow), (narrow, secure)):
        row = structs.replace(TaskRows("next-word", rows).row, config=before)
        with pytest.raises(OperatorError, match=r"cannot change requirements\.upload_bits"):
            owner.require_revisable(row, after)
    clear = structs.replace(TASK, requirements=needs)
    owner.require_revisable(TaskRows("next-word", rows).row, clear)
