"""The supervisor's turns on rows: races, nonsense, errors. Whole runs are in tests/scenarios."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs

from papaya.config import (
    AsyncFL,
    EvaluationPlan,
    MetricBounds,
    MetricTarget,
    Privacy,
    PrivateEvaluation,
    ServerConfig,
    StopRule,
    TaskConfig,
)
from papaya.config.checks import MAX_COUNT
from papaya.errors import OperatorError
from papaya.learning import parameters
from papaya.learning.evaluation import EVALUATION_LENGTH, EvaluationResult, evaluation_vector
from papaya.learning.parameters import FLOAT32
from papaya.learning.private_evaluation import BINS, private_evaluation_length
from papaya.messages.storage import (
    DELETED,
    DeletedRow,
    EarlierRevision,
    EndingsRow,
    OptimizerRow,
    Outcome,
    PointRow,
    RecordRow,
    RevisionRow,
    Row,
    TaskRow,
    Transaction,
    VersionRow,
    deleted_key,
    endings_key,
    optimizer_key,
    point_key,
    record_key,
    revision_key,
    submission,
    task_key,
    version_key,
)
from papaya.server.admin import evaluations
from papaya.server.admin.blobs import ThreadedBlobs
from papaya.server.admin.history import TaskHistory
from papaya.server.admin.problems import Conflict
from papaya.server.admin.supervisor import Supervisor
from papaya.server.admin.views import Evaluate
from tests.unit.server.admin.builders import BY, TASK, System, a_system, encoded

PLANNED = structs.replace(TASK, evaluation=EvaluationPlan(every_versions=2, clients=2))


def version(system: System, task: str, number: int, data: bytes) -> None:
    """As an aggregator does."""
    key = f"{task}/1/version-{number}-{'0' * 32}"
    system.blobs.put(key, data)
    row = VersionRow(number, key, 1, system.time)
    system.change(
        Transaction(
            put=(
                (version_key(task, number), row),
                (optimizer_key(task), OptimizerRow(number, "o")),
            )
        )
    )


def mean_of(*vectors: parameters.Vector) -> bytes:
    total = np.stack(vectors).sum(axis=0, dtype=np.float64)
    return parameters.encode(np.asarray(total / len(vectors), FLOAT32), {})


def task_row(system: System, task: str) -> TaskRow:
    row = system.store.read((f"task/{task}",))[f"task/{task}"]
    assert isinstance(row, TaskRow)
    return row


def evaluated(system: System) -> dict[int, float]:
    rows = system.store.read(("point/next-word/",)).values()
    return {r.version: r.loss for r in rows if isinstance(r, PointRow) and r.loss is not None}


def test_a_result_is_the_mean_loss_over_all_clients(tmp_path: Path) -> None:
    async def test() -> None:
        async with a_system(tmp_path) as system:
            await system.submit(PLANNED)
            await system.turn()
            assert task_row(system, "next-word-eval-0").state == "running"
            # Ten examples with loss 3 and thirty with loss 1: not the mean of means.
            one, two = evaluation_vector(5, 30.0, 10), evaluation_vector(500, 30.0, 30)
            version(system, "next-word-eval-0", 1, mean_of(one, two))
            await system.turn()
            assert evaluated(system) == {0: pytest.approx(1.5)}
            row = task_row(system, "next-word-eval-0")
            assert row.state == "completed"
            assert row.why.startswith("loss 1.5 over 2 clients")
            view = (await system.service.task("next-word")).task
            assert view.loss == pytest.approx(1.5)
            assert (view.perplexity, view.metrics) == (None, {}), "the task asks for neither"

    asyncio.run(test())


def test_a_result_has_the_metrics_and_the_perplexity_that_the_task_asks_for(
    tmp_path: Path,
) -> None:
    stop = StopRule(target_metric=MetricTarget(name="accuracy", above=0.6))
    bounds = (MetricBounds("accuracy"), MetricBounds("error", -10.0, 10.0))
    config = structs.replace(PLANNED, metrics=bounds, perplexity=True, stop=stop)

    async def test() -> None:
        async with a_system(tmp_path) as system:
            await system.submit(config)
            await system.turn()
            assert task_row(system, "next-word-eval-0").config.model_length == 16 * 17
            # Ten examples with accuracy 0.2 and error 0, thirty with accuracy 0.8 and error 10.
            one = evaluation_vector(5, 30.0, 10, (2.0, 5.0))
            two = evaluation_vector(500, 30.0, 30, (24.0, 30.0))
            version(system, "next-word-eval-0", 1, mean_of(one, two))
            await system.turn()
            view = (await system.service.task("next-word")).task
            assert view.perplexity == pytest.approx(np.exp(1.5))
            assert view.metrics == pytest.approx({"accuracy": 0.65, "error": 7.5}, abs=1e-5)
            [point] = [p for p in (await system.service.task("next-word")).points if p.evaluated]
            result = msgspec.json.decode(point.evaluated, type=EvaluationResult)
            assert result.p99 is not None
            assert result.p99.metrics == pytest.approx({"accuracy": 0.8, "error": 10.0}, abs=1e-5)
            why = task_row(system, "next-word-eval-0").why
            assert why == "loss 1.5, accuracy 0.65, error 7.5 over 2 clients"
            await system.turn()
            row = task_row(system, "next-word")
            assert row.state == "completed"
            assert "accuracy 0.65 has reached the target: above 0.6" in row.why

    asyncio.run(test())


def test_a_private_result_says_how_much_of_it_is_noise(tmp_path: Path) -> None:
    evaluation = PrivateEvaluation(noise_multiplier=0.5, max_loss=4.0, max_examples=10)
    privacy = Privacy(
        clip=1.0, max_participations=1, delta=1e-7, noise_multiplier=1.0, evaluation=evaluation
    )
    plan = EvaluationPlan(every_versions=2, clients=100)
    regime = AsyncFL(aggregation_goal=10, max_staleness=50)
    config = structs.replace(TASK, privacy=privacy, regime=regime, evaluation=plan, perplexity=True)

    async def test() -> None:
        async with a_system(tmp_path) as system:
            await system.submit(config)
            await system.turn()
            mean = np.zeros(private_evaluation_length(0), FLOAT32)
            mean[:2] = 0.8, 0.8 * (0.5 - 0.5)  # eight examples each, half of the largest loss
            version(system, "next-word-eval-0", 1, parameters.encode(mean, {}))
            await system.turn()
            view = (await system.service.task("next-word")).task
            assert view.loss == pytest.approx(2.0)
            deviation = 4.0 * 0.5 * np.sqrt(1.25) / 80
            assert view.deviations == pytest.approx(
                {"loss": deviation, "perplexity": deviation * np.exp(2.0)}, rel=1e-5
            )
            why = task_row(system, "next-word-eval-0").why
            assert why == "loss 2 ± 0.028 over 100 clients"
            # A histogram of the same version takes no turn of the evaluations.
            started = await system.service.evaluate("next-word", Evaluate(norms=True), BY)
            assert started.task == "next-word-eval-0-2"
            counts = np.zeros(BINS, FLOAT32)
            counts[33] = 1.0
            version(system, started.task, 1, parameters.encode(counts, {}))
            await system.turn()
            [point] = [p for p in (await system.service.task("next-word")).points if p.norms]
            assert [point.norms[33], point.norms_deviation] == pytest.approx([100.0, 0.5])
            assert point.loss == pytest.approx(2.0)
            assert task_row(system, started.task).why == "a histogram of the norms of 100 clients"

    asyncio.run(test())


def test_nonsense_from_devices_ends_an_evaluation_and_nothing_else(tmp_path: Path) -> None:
    async def test() -> None:
        async with a_system(tmp_path) as system:
            await system.submit(PLANNED)
            await system.turn()
            version(
                system,
                "next-word-eval-0",
                1,
                parameters.encode(np.full(EVALUATION_LENGTH, -1, FLOAT32), {}),
            )
            await system.turn()
            row = task_row(system, "next-word-eval-0")
            assert row.state == "cancelled"
            assert "below zero" in row.why
            assert evaluated(system) == {}
            assert task_row(system, "next-word").state == "running"

    asyncio.run(test())


def test_a_result_waits_while_the_blob_store_fails(tmp_path: Path) -> None:
    """Its clients have taken part, and some have spent a part of their budgets."""

    async def test() -> None:
        async with a_system(tmp_path) as system:
            await system.submit(PLANNED)
            await system.turn()
            one, two = evaluation_vector(5, 30.0, 10), evaluation_vector(500, 30.0, 30)
            version(system, "next-word-eval-0", 1, mean_of(one, two))
            [made] = system.store.read((version_key("next-word-eval-0", 1),)).values()
            assert isinstance(made, VersionRow)
            file, away = system.blobs.path(made.parameters), tmp_path / "away"
            file.rename(away)
            file.mkdir()  # cannot be read, and is not missing
            await system.turn()
            assert task_row(system, "next-word-eval-0").state == "running"
            file.rmdir()
            away.rename(file)
            await system.turn()
            assert task_row(system, "next-word-eval-0").state == "completed"
            assert evaluated(system) == {0: pytest.approx(1.5)}

    asyncio.run(test())


@pytest.mark.parametrize("after", ["its task was cancelled", "gave up"])
def test_an_evaluation_whose_result_stays_unreadable_ends(tmp_path: Path, after: str) -> None:
    """Otherwise the task would never be evaluated again, and never be deleted."""

    async def test() -> None:
        async with a_system(tmp_path) as system:
            plan = EvaluationPlan(every_versions=2, clients=2, timeout_s=600.0)
            await system.submit(structs.replace(TASK, evaluation=plan))
            await system.turn()
            system.time += 500.0  # most of its time: its clients were slow
            version(system, "next-word-eval-0", 1, b"a result")
            [made] = system.store.read((version_key("next-word-eval-0", 1),)).values()
            assert isinstance(made, VersionRow)
            file = system.blobs.path(made.parameters)
            file.unlink()
            file.mkdir()  # cannot be read, and is not missing
            system.time += 500.0
            await system.turn()
            assert task_row(system, "next-word-eval-0").state == "running"
            if after == "gave up":
                system.time += 100.0
            else:
                await system.service.set_state("next-word", "cancelled", BY)
            await system.turn()
            row = task_row(system, "next-word-eval-0")
            assert row.state == "cancelled"
            assert row.why.startswith(after)
            if after == "gave up":
                assert "cannot read blob next-word-eval-0/1/version-1-" in row.why
                version(system, "next-word", 2, encoded())
                await system.turn()
                assert task_row(system, "next-word-eval-2").state == "running"

    asyncio.run(test())


def test_evaluations_follow_the_plan_one_at_a_time(tmp_path: Path) -> None:
    async def test() -> None:
        async with a_system(tmp_path) as system:
            await system.submit(PLANNED)
            await system.turn()
            for number in (1, 2, 3):
                version(system, "next-word", number, encoded())
            await system.turn()
            tasks = sorted(system.store.read(("task/",)))
            assert tasks == ["task/next-word", "task/next-word-eval-0"]
            await system.service.set_state("next-word-eval-0", "cancelled", BY)
            await system.turn()
            tasks = sorted(system.store.read(("task/",)))
            assert tasks[-1] == "task/next-word-eval-2"  # it has waited

    asyncio.run(test())


@pytest.mark.parametrize(
    ("stored", "tried", "is_last", "expected"),
    [
        ([], [], False, None),
        ([0, 1], [], False, 0),
        ([0, 4], [0], False, None),
        ([0, 4, 5], [0], False, 5),
        ([0, 4], [0], True, 4),
        ([0, 4], [4, 0], True, None),
        ([8, 9, 10, 11, 12], [0, 5], False, 10),  # 10 waits while version 5 is evaluated
        ([13, 14, 15], [0, 5], False, 13),  # 10 is no longer stored
        ([8, 9, 10, 11, 12], [0, 5], True, 10),
        ([8, 9, 10, 11, 12], [0, 5, 10], True, 12),
    ],
)
def test_the_planned_versions_are_due_in_order_and_the_last_one_at_the_end(
    stored: list[int], tried: list[int], is_last: bool, expected: int | None
) -> None:
    plan = EvaluationPlan(every_versions=5)
    assert evaluations.due_version(plan, stored, tried, is_last=is_last) == expected


def test_patience_starts_anew_after_a_rollback(tmp_path: Path) -> None:
    plan = EvaluationPlan(every_versions=1000, clients=2)
    config = structs.replace(TASK, stop=StopRule(patience=2), evaluation=plan)
    losses = {1: 1.0, 2: 2.0, 4: 2.0, 5: 2.0}

    async def states(restarts: bool) -> str:
        async with a_system(tmp_path / str(restarts)) as system:
            await system.submit(config)
            for number in range(1, 6):
                key = version_key("next-word", number)
                row = VersionRow(number, "p", 1, 0.0, restarts=restarts and number == 3)
                point = PointRow(number, 0.0, 4, 4, 0.0, loss=losses.get(number), evaluated="{}")
                system.change(
                    Transaction(put=((key, row), (f"point/next-word/{number:012d}", point)))
                )
            await system.turn()
            return task_row(system, "next-word").state

    assert asyncio.run(states(restarts=False)) == "completed"
    assert asyncio.run(states(restarts=True)) == "running"


def test_training_hours_count_from_the_first_version_even_when_its_row_is_deleted(
    tmp_path: Path,
) -> None:
    config = structs.replace(TASK, stop=StopRule(training_hours=1.0))

    async def test() -> None:
        async with a_system(tmp_path) as system:
            await system.submit(config)
            system.time += 7200.0
            await system.turn()
            assert task_row(system, "next-word").state == "running", "devices were late"
            first = system.time
            version(system, "next-word", 1, b"")
            await system.turn()
            system.time += 1800.0
            version(system, "next-word", 2, b"")
            system.change(Transaction(delete=(version_key("next-word", 1),)))
            await system.turn()
            system.time = first + 3599.0
            await system.turn()
            assert task_row(system, "next-word").state == "running"
            system.time = first + 3600.0
            await system.turn()
            row = task_row(system, "next-word")
            assert row.state == "completed"
            assert row.why == "reached the limit of 1 hours since the first version"

    asyncio.run(test())


def test_a_cancelled_task_takes_its_evaluation_with_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with a_system(tmp_path) as system:
            await system.submit()
            await system.service.evaluate("next-word", Evaluate(), BY)
            await system.service.set_state("next-word", "cancelled", BY)
            await system.turn()
            row = task_row(system, "next-word-eval-0")
            assert row.state == "cancelled"
            assert "its task was cancelled" in row.why

    asyncio.run(test())


def test_refused_and_unknown_writes_are_tried_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with a_system(tmp_path) as system:
            await system.submit(structs.replace(TASK, stop=StopRule(versions=1)))
            version(system, "next-word", 1, encoded())
            outcomes: tuple[Outcome, ...] = ("unknown", "refused")
            for outcome in outcomes:
                system.state.outcome = outcome
                await system.turn()
                assert task_row(system, "next-word").state == "running"
            system.state.outcome = None
            await system.turn()
            assert task_row(system, "next-word").state == "completed"
            assert len(system.store.read(("point/",))) == 2

    asyncio.run(test())


def test_an_error_costs_one_turn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        """A store that fails twice, in two ways."""

        def __init__(self, system: System) -> None:
            self.errors: list[Exception] = [OperatorError("no disk", hint="buy"), KeyError("bug")]
            self.transact = system.state.transact
            self._read = system.state.read

        async def read(self, prefixes: tuple[str, ...]) -> dict[str, object]:
            if self.errors:
                raise self.errors.pop(0)
            return dict(await self._read(prefixes))

    async def test() -> None:
        async with a_system(tmp_path) as system:
            await system.submit()
            state = Failing(system)
            turns = 0

            async def sleep(seconds: float) -> None:
                nonlocal turns
                turns += 1
                if turns == 3:
                    raise asyncio.CancelledError

            supervisor = Supervisor(
                state,  # type: ignore[arg-type]
                ThreadedBlobs(system.blobs),
                TaskHistory(system.state),
                ServerConfig(),
                lambda: system.time,
                lambda: None,
                sleep=sleep,
            )
            with pytest.raises(asyncio.CancelledError):
                await supervisor.run()
            assert len(system.store.read(("point/next-word/",))) == 1

    with caplog.at_level(logging.ERROR, logger="papaya.admin"):
        asyncio.run(test())
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "no disk; hint: buy" in caplog.text


def test_an_error_of_one_task_is_no_other_tasks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with a_system(tmp_path) as system:
            ends_soon = StopRule(hours=1 / 3600)
            for name in ("before", "behind"):
                await system.submit(structs.replace(TASK, task=name, stop=ends_soon))
            # Written before submissions were checked for it.
            plan = EvaluationPlan(clients=MAX_COUNT)
            mistaken = structs.replace(TASK, task="beginning", evaluation=plan)
            system.change(submission(mistaken, "p", "o", system.time))
            system.time += 2.0
            await system.turn()
            states = {name: task_row(system, name).state for name in ("before", "behind")}
            assert states == {"before": "completed", "behind": "completed"}

    with caplog.at_level(logging.ERROR, logger="papaya.admin"):
        asyncio.run(test())
    assert "concurrency" in caplog.text


def test_a_supervisor_that_is_late_starts_no_second_evaluation(tmp_path: Path) -> None:
    """It read the tasks before another one's evaluation was there, and the versions after."""

    async def test() -> None:
        async with a_system(tmp_path) as system:
            await system.submit(PLANNED)
            before = system.store.read(("task/",))
            await system.turn()
            fresh = system.state.read

            async def read(prefixes: tuple[str, ...]) -> dict[str, Row]:
                return before if prefixes == ("task/",) else await fresh(prefixes)

            system.state.read = read  # type: ignore[method-assign]
            await system.turn()
            assert len(system.store.read(("task/",))) == 2

    asyncio.run(test())


def test_two_histories_of_one_task_end_up_the_same(tmp_path: Path) -> None:
    async def test() -> None:
        async with a_system(tmp_path) as system:
            await system.submit()
            rows = {
                number: VersionRow(number, "p", 1, float(number), restarts=number == 70)
                for number in range(150)
            }
            first, second = TaskHistory(system.state), TaskHistory(system.state)
            await second.points("next-word")  # it believes that there is none
            task = system.store.read(("task/",))["task/next-word"]
            assert isinstance(task, TaskRow)
            await first.record(task, dict(list(rows.items())[:100]))
            await second.record(task, rows)
            await second.record(task, rows)
            assert sorted(await second.points("next-word")) == list(range(150))
            first.forget("next-word")
            assert await first.points("next-word") == await second.points("next-word")

    asyncio.run(test())


def test_configurations_of_evaluations_survive_the_store(tmp_path: Path) -> None:
    """Compare-and-set compares encoded rows: what is read must be what was written."""

    async def test() -> None:
        async with a_system(tmp_path) as system:
            config: TaskConfig = structs.replace(
                TASK, evaluation=EvaluationPlan(timeout_s=100.0, clients=3)
            )
            await system.submit(config)
            await system.service.evaluate("next-word", Evaluate(), BY)
            view = await system.service.set_state("next-word-eval-0", "cancelled", BY)
            assert view.state == "cancelled"

    asyncio.run(test())


# -- deleted tasks ------------------------------------------------------------------------------


def left_of(system: System, task: str) -> list[str]:
    """Rows and blobs that belong to a task; the row that says that it was deleted is not one."""
    kinds = (
        *("task", "fence", "optimizer", "record", "version", "consumed", "manifest", "point"),
        *("revision", "endings"),
    )
    rows = system.store.read(tuple(f"{kind}/{task}" for kind in kinds))
    return [*rows, *system.blobs.keys(task)]


async def an_ended_task(system: System, name: str = "next-word", points: int = 3) -> None:
    await system.submit(structs.replace(TASK, task=name))
    version(system, name, 1, b"one")
    found = [PointRow(number, 0.0, 4, 4, 0.0) for number in range(points)]
    system.change(
        Transaction(
            put=(
                *((point_key(name, p.version), p) for p in found),
                (endings_key(name), EndingsRow(1, {"counted": 4})),
                (record_key(name, 2), RecordRow(2, "s", (), 0.0)),
                (revision_key(name, 1), RevisionRow(1, 0.0, TASK, b"m")),
            )
        )
    )
    await system.service.set_state(name, "cancelled", BY)


def test_a_deleted_task_goes_completely_and_takes_nothing_of_others(tmp_path: Path) -> None:
    async def test() -> None:
        async with a_system(tmp_path) as system:
            await an_ended_task(system, points=2500)  # more than fit into one transaction
            await system.submit(structs.replace(TASK, task="next-word-2"))
            other = left_of(system, "next-word-2")
            deleted = await system.service.delete("next-word", BY)
            assert [view.task for view in await system.service.tasks()] == ["next-word-2"]
            system.time = deleted.gone_after - 1
            await system.turn()
            assert task_key("next-word") in left_of(system, "next-word"), "tickets are still valid"
            system.time = deleted.gone_after
            await system.turn()
            left = left_of(system, "next-word")
            assert [key for key in left if "next-word-2" not in key] == []
            assert set(other) <= set(left_of(system, "next-word-2"))
            with pytest.raises(Conflict, match="existed and was deleted"):
                await system.submit()

    asyncio.run(test())


def test_a_deleted_task_stays_while_tickets_of_an_earlier_revision_are_valid(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        async with a_system(tmp_path) as system:
            await an_ended_task(system)
            row = task_row(system, "next-word")
            slower = structs.replace(row.config, training_timeout_s=90_000.0)
            revised = structs.replace(row, earlier=(EarlierRevision(slower, row.ended),))
            system.change(Transaction(put=((task_key("next-word"), revised),)))
            deleted = await system.service.delete("next-word", BY)
            assert deleted.gone_after > row.ended + 90_000.0
            system.time = deleted.gone_after - 1
            await system.turn()
            assert task_key("next-word") in left_of(system, "next-word")
            system.time = deleted.gone_after
            await system.turn()
            assert left_of(system, "next-word") == []

    asyncio.run(test())


@pytest.mark.parametrize("crash", range(6))
def test_a_deletion_goes_on_after_a_crash(tmp_path: Path, crash: int) -> None:
    """Whatever step fails, the next supervisor finishes the work. Blobs go after their rows."""

    async def test() -> None:
        async with a_system(tmp_path) as system:
            await an_ended_task(system)
            system.time = (await system.service.delete("next-word", BY)).gone_after
            steps = 0
            transact, sweep = system.state.transact, system.blobs.sweep

            def step() -> None:
                nonlocal steps
                steps += 1
                if steps == crash:
                    raise OperatorError("the power is gone")

            async def failing_transact(change: Transaction) -> Outcome:
                step()
                return await transact(change)

            def failing_sweep(*arguments: Any) -> None:
                step()
                rows = system.store.read((task_key("next-word"), "version/next-word/"))
                assert not rows, "blobs are deleted after the rows that name them"
                sweep(*arguments)

            system.state.transact = failing_transact  # type: ignore[method-assign, assignment]
            system.blobs.sweep = failing_sweep  # type: ignore[method-assign, assignment]
            await system.turn()
            again = Supervisor(
                system.state,
                ThreadedBlobs(system.blobs),
                TaskHistory(system.state),
                ServerConfig(),
                system.now,
                lambda: None,
            )
            await again.turn()
            assert left_of(system, "next-word") == []
            row = system.store.read((DELETED,))[deleted_key("next-word")]
            assert isinstance(row, DeletedRow)
            assert row.is_done
            quiet = steps
            await again.turn()
            assert steps == quiet, "nothing is left to do"

    asyncio.run(test())


def test_a_task_is_not_deleted_while_it_runs_or_is_evaluated(tmp_path: Path) -> None:
    async def test() -> None:
        async with a_system(tmp_path) as system:
            await system.submit()
            with pytest.raises(Conflict, match="is running and cannot be deleted"):
                await system.service.delete("next-word", BY)
            await system.service.evaluate("next-word", Evaluate(clients=2), BY)
            await system.service.set_state("next-word", "cancelled", BY)
            with pytest.raises(Conflict, match="an evaluation"):
                await system.service.delete("next-word", BY)

    asyncio.run(test())


def test_evaluations_are_deleted_with_their_task(tmp_path: Path) -> None:
    async def test() -> None:
        async with a_system(tmp_path) as system:
            await system.submit()
            started = await system.service.evaluate("next-word", Evaluate(clients=2), BY)
            await system.service.set_state(started.task, "cancelled", BY)
            await system.service.set_state("next-word", "cancelled", BY)
            system.time = (await system.service.delete("next-word", BY)).gone_after + 3600
            await system.turn()
            await system.turn()
            assert left_of(system, "next-word") == []
            assert left_of(system, started.task) == []

    asyncio.run(test())


def test_an_evaluation_of_a_deleted_task_ends(tmp_path: Path) -> None:
    """Another supervisor may have started it just before the deletion."""

    async def test() -> None:
        async with a_system(tmp_path) as system:
            await system.submit()
            started = await system.service.evaluate("next-word", Evaluate(clients=2), BY)
            version(system, started.task, 1, b"a result")
            system.change(Transaction(delete=(task_key("next-word"),)))
            await system.turn()
            assert task_row(system, started.task).state == "cancelled"

    asyncio.run(test())


# -- endings ------------------------------------------------------------------------------------


def test_endings_are_added_up_over_holders(tmp_path: Path) -> None:
    async def test() -> None:
        async with a_system(tmp_path) as system:
            await system.submit()

            async def after(seq: int, **endings: int) -> dict[str, int]:
                system.endings = {"next-word": (seq, endings), "unknown": (1, {"counted": 9})}
                await system.turn()
                return (await system.service.task("next-word")).endings

            assert await after(1) == {}
            assert await after(1, left_diverged=30) == {"left_diverged": 30}
            assert await after(1, left_diverged=29) == {"left_diverged": 30}, "an old report"
            moved = {"left_diverged": 30, "counted": 5}
            assert await after(2, counted=5) == moved
            assert await after(1, left_diverged=31) == moved, "a holder that lost the task"
            assert await after(4, left_diverged=7) == {"left_diverged": 37, "counted": 5}
            assert left_of(system, "unknown") == []

    asyncio.run(test())


def test_endings_are_written_in_the_turn_in_which_an_evaluation_starts(tmp_path: Path) -> None:
    """Its start changes the row of the task."""

    async def test() -> None:
        async with a_system(tmp_path) as system:
            await system.submit(PLANNED)
            system.endings = {"next-word": (1, {"counted": 5})}
            await system.turn()
            assert task_row(system, "next-word-eval-0").state == "running"
            assert (await system.service.task("next-word")).endings == {"counted": 5}

    asyncio.run(test())
