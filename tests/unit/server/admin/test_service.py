"""The admin service on a real store: submitting, looking, changing, refusing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from msgspec import structs

import papaya
from papaya.config import EvaluationPlan, Privacy, StopRule, TaskConfig
from papaya.config.checks import MAX_COUNT
from papaya.errors import OperatorError
from papaya.learning import parameters
from papaya.messages.storage import (
    FORMAT,
    FORMAT_KEY,
    PRIVATE_FORMAT,
    TASKS,
    BootRow,
    ConsumedRow,
    FormatRow,
    Member,
    OptimizerRow,
    TaskRow,
    Transaction,
    VersionRow,
    boot_key,
    consumed_key,
    optimizer_key,
    version_key,
)
from papaya.messages.tickets import PSEUDONYM_KEY_BYTES
from papaya.server.admin import submissions
from papaya.server.admin.accounts import ADMIN
from papaya.server.admin.live import LiveTask
from papaya.server.admin.problems import Conflict, NotFound, Uncertain
from papaya.server.admin.views import Evaluate, Mark, NewTask, RollBack, SetShare
from papaya.server.formats import Formats
from tests.unit.server.admin.builders import BY, MANIFEST, TASK, System, a_system, because, encoded

Test = Callable[[System], Awaitable[None]]


def run(folder: Path, test: Test) -> None:
    async def inside() -> None:
        async with a_system(folder) as system:
            await test(system)

    asyncio.run(inside())


def advance(system: System, version: int) -> None:
    """As an aggregator does: the next version, of four members."""
    key = f"next-word/1/version-{version}-{'0' * 32}"
    system.blobs.put(key, encoded())
    members = tuple(Member(f"s{version}-{i}", version - 1, i, 10, 9e9) for i in range(4))
    system.change(
        Transaction(
            put=(
                (
                    version_key("next-word", version),
                    VersionRow(version, key, 1, system.time),
                ),
                (optimizer_key("next-word"), OptimizerRow(version, f"o-{version}")),
                (consumed_key("next-word", version), ConsumedRow(version, members)),
            )
        )
    )


def test_a_submitted_task_can_be_seen_and_its_parameters_fetched(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        view = await system.submit()
        assert (view.task, view.state, view.version) == ("next-word", "running", 0)
        assert system.changes == 1
        assert [found.task for found in await system.service.tasks()] == ["next-word"]
        detail = await system.service.task("next-word")
        assert detail.manifest == MANIFEST
        assert detail.config == TASK
        row, path = await system.service.parameters("next-word", "newest")
        assert row.version == 0
        assert path.read_bytes() == encoded()
        assert list(parameters.decode(path.read_bytes(), 6)) == [0, 1, 2, 3, 4, 5]

    run(tmp_path, test)


def test_every_task_and_evaluation_has_a_key_of_its_own_for_pseudonyms(tmp_path: Path) -> None:
    """So that nothing links a device in one to the same device in another."""

    async def test(system: System) -> None:
        await system.submit()
        await system.service.evaluate("next-word", Evaluate(), BY)
        rows = (await system.service.state.read((TASKS,))).values()
        keys = {row.pseudonym_key for row in rows if isinstance(row, TaskRow)}
        assert [len(key) for key in keys] == [PSEUDONYM_KEY_BYTES] * 2

    run(tmp_path, test)


def test_live_numbers_come_from_the_coordinator(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        await system.submit()
        system.live.found["next-word"] = LiveTask("aggregator", 15, 3, 7, "out of luck", 24.0)
        [view] = (await system.service.status()).tasks
        assert (view.active, view.demand, view.held) == (15, 3, 7)
        assert (view.utilization, view.halted, view.silent_s) == (0.75, "out of luck", 24.0)
        system.live.found.clear()
        [view] = await system.service.tasks()
        assert (view.active, view.utilization) == (None, None)

    run(tmp_path, test)


def test_points_and_speed_follow_the_versions(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        await system.submit()
        for version in (1, 2, 3):
            system.time += 20
            advance(system, version)
        await system.turn()
        points = await system.service.points("next-word")
        assert [(p.version, p.members, p.examples, p.staleness) for p in points] == [
            (0, 0, 0, 0.0),
            *((version, 4, 40, 1.5) for version in (1, 2, 3)),
        ]
        assert [p.version for p in await system.service.points("next-word", after=1)] == [2, 3]
        detail = await system.service.task("next-word")
        assert detail.versions_per_minute == pytest.approx(3.0)
        assert detail.task.version == 3

    run(tmp_path, test)


BAD_SUBMISSIONS: dict[str, tuple[TaskConfig, str]] = {
    "it exists": (TASK, "exists already"),
    "an id of evaluations": (structs.replace(TASK, task="x-eval-3"), "like an evaluation"),
    "an id of a repeated one": (structs.replace(TASK, task="x-eval-3-2"), "like an evaluation"),
    "a plan that cannot start": (
        structs.replace(TASK, task="other", evaluation=EvaluationPlan(clients=MAX_COUNT)),
        "no evaluation could start with the plan of task other: concurrency",
    ),
    "another length": (structs.replace(TASK, task="other", model_length=7), "6 parameters"),
}


@pytest.mark.parametrize("what", BAD_SUBMISSIONS)
def test_what_cannot_be_submitted_is_refused_with_a_reason(tmp_path: Path, what: str) -> None:
    config, problem = BAD_SUBMISSIONS[what]

    async def test(system: System) -> None:
        await system.submit()
        key = f"{config.task}/0/version-0-{'0' * 32}"
        system.blobs.put(key, encoded())
        with pytest.raises(OperatorError, match=problem):
            await submissions.submit(system.service, ADMIN, NewTask(config, key, MANIFEST), BY)
        assert [view.task for view in await system.service.tasks()] == ["next-word"]

    run(tmp_path, test)


def test_parameters_are_checked_before_they_are_stored(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        service = system.service
        for data in (b"", b"pickle", encoded()[:-4], encoded()[:-4] + b"\x00\x00\xc0\x7f"):
            with pytest.raises(OperatorError, match="invalid parameters, expected 6"):
                await submissions.store_parameters(service, "next-word", 6, data)
        with pytest.raises(OperatorError, match="invalid task id"):
            await submissions.store_parameters(service, "../x", 6, encoded())
        assert system.blobs.keys("next-word") == []
        key = f"next-word/0/version-0-{'0' * 32}"
        with pytest.raises(NotFound, match="is missing"):
            await submissions.submit(service, ADMIN, NewTask(TASK, key), BY)
        with pytest.raises(OperatorError, match="are not those of next-word"):
            await submissions.submit(service, ADMIN, NewTask(TASK, "other/0/version-0-x"), BY)
        await system.submit()
        with pytest.raises(Conflict, match="exists already"):
            await submissions.store_parameters(service, "next-word", 6, encoded())

    run(tmp_path, test)


def test_a_task_is_paused_resumed_and_cancelled(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        await system.submit()
        service = system.service
        assert (await service.set_state("next-word", "paused", BY)).state == "paused"
        with pytest.raises(Conflict, match="is already paused"):
            await service.set_state("next-word", "paused", BY)
        assert (await service.set_state("next-word", "running", BY)).state == "running"
        view = await service.set_state("next-word", "cancelled", because("enough"))
        assert (view.state, view.why, view.ended) == ("cancelled", "enough", 1000.0)
        with pytest.raises(Conflict):
            await service.set_state("next-word", "running", BY)
        with pytest.raises(Conflict, match="cannot be rolled back"):
            await service.roll_back("next-word", RollBack(0), BY)

    run(tmp_path, test)


def test_a_rollback_makes_a_new_head_with_a_fresh_optimizer(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        await system.submit()
        advance(system, 1)
        advance(system, 2)
        view = await system.service.roll_back("next-word", RollBack(1), BY)
        assert (view.version, view.restarts, view.marked) == (3, True, True)
        versions = await system.service.versions("next-word")
        assert versions[1].parameters == versions[3].parameters
        optimizer = (await system.state.read((optimizer_key("next-word"),))).values()
        [row] = optimizer
        assert isinstance(row, OptimizerRow)
        assert system.blobs.size(row.state) > 0
        with pytest.raises(NotFound, match="task next-word has no version 9"):
            await system.service.roll_back("next-word", RollBack(9), BY)

    run(tmp_path, test)


def test_marks_and_evaluations(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        await system.submit()
        service = system.service
        assert (await service.mark("next-word", Mark(0), BY)).marked
        assert not (await service.mark("next-word", Mark(0, marked=False), BY)).marked
        started = await service.evaluate("next-word", Evaluate(clients=3), BY)
        assert (started.task, started.version) == ("next-word-eval-0", 0)
        assert (await service.task(started.task)).config.aggregation_goal == 3
        assert (await service.task(started.task)).task.evaluates == "next-word@0"
        with pytest.raises(Conflict, match="is being evaluated already"):
            await service.evaluate("next-word", Evaluate(), BY)
        with pytest.raises(OperatorError, match="itself an evaluation"):
            await service.evaluate(started.task, Evaluate(), BY)
        with pytest.raises(OperatorError, match="the share of the task that it evaluates"):
            await service.set_share(started.task, SetShare(2.0), BY)

    run(tmp_path, test)


def test_an_evaluation_that_is_repeated_has_a_name_of_its_own(tmp_path: Path) -> None:
    """Whoever remembers the first one must not take the second for it."""

    async def test(system: System) -> None:
        await system.submit()
        names = []
        for _ in range(3):
            names.append((await system.service.evaluate("next-word", Evaluate(), BY)).task)
            await system.service.set_state(names[-1], "cancelled", BY)
            system.time += 1e6
            await system.turn()
            assert system.store.read((f"task/{names[-1]}",)) == {}, "forgotten"
        assert names == ["next-word-eval-0", "next-word-eval-0-2", "next-word-eval-0-3"]

    run(tmp_path, test)


def test_a_version_at_which_the_task_was_rolled_back_stays_marked(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        await system.submit(structs.replace(TASK, stop=StopRule(versions=2)))
        head = await system.service.roll_back("next-word", RollBack(0), BY)
        assert (head.version, head.marked) == (1, True)
        with pytest.raises(Conflict, match="must stay protected"):
            await system.service.mark("next-word", Mark(1, marked=False), BY)
        with pytest.raises(Conflict, match="stops at version 2: nothing would be trained"):
            await system.service.roll_back("next-word", RollBack(0), BY)

    run(tmp_path, test)


def test_what_is_not_there_is_not_found(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        service = system.service
        for ask in (
            service.task("nothing"),
            service.points("nothing"),
            service.versions("nothing"),
            service.parameters("nothing", "newest"),
            service.set_state("nothing", "paused", BY),
        ):
            with pytest.raises(NotFound, match="there is no task 'nothing'"):
                await ask
        await system.submit()
        for version in ("-1", "x", "१", "1.0"):
            with pytest.raises(OperatorError, match="invalid version"):
                await service.parameters("next-word", version)

    run(tmp_path, test)


def test_refused_and_unknown_writes_are_told_apart(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        await system.submit()
        system.state.outcome = "refused"
        with pytest.raises(Conflict, match="the task changed"):
            await system.service.set_state("next-word", "paused", BY)
        system.state.outcome = "unknown"
        with pytest.raises(Uncertain, match="outcome is unknown"):
            await system.service.set_state("next-word", "paused", BY)
        assert system.changes == 1  # only the submission

    run(tmp_path, test)


def test_the_supervisor_completes_a_task_and_says_why(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        await system.submit(structs.replace(TASK, stop=StopRule(hours=1.0)))
        system.time += 3599
        await system.turn()
        assert (await system.service.task("next-word")).task.state == "running"
        system.time += 1
        await system.turn()
        view = (await system.service.task("next-word")).task
        assert (view.state, view.why) == ("completed", "reached the limit of 1 hours")
        assert system.changes == 2

    run(tmp_path, test)


def test_a_private_task_waits_until_all_servers_run_one_version(tmp_path: Path) -> None:
    """An aggregator of 0.4.0 would publish the sums without noise."""
    private = structs.replace(
        TASK, privacy=Privacy(clip=1.0, max_participations=10, delta=1e-7, epsilon=8.0)
    )

    def server(version: str) -> Transaction:
        known = FORMAT if version else 1
        return Transaction(put=((boot_key("aggregator"), BootRow(1, known, version)),))

    async def test(system: System) -> None:
        system.change(server(""))
        await system.submit(structs.replace(TASK, task="without"))
        with pytest.raises(Conflict, match=r"aggregator runs 0\.4\.0"):
            await system.submit(private)
        assert FORMAT_KEY not in system.store.read((FORMAT_KEY,))
        system.change(server(papaya.__version__))
        await system.submit(private)
        assert system.store.read((FORMAT_KEY,)) == {FORMAT_KEY: FormatRow(PRIVATE_FORMAT)}
        # From now on a server of 0.4.0 does not start.
        with pytest.raises(OperatorError, match="knows formats up to 1"):
            Formats(newest=1).check(system.store.read(Formats.prefixes))

    run(tmp_path, test)


def test_a_private_task_in_the_clear_needs_identities_of_devices(tmp_path: Path) -> None:
    """Otherwise a device could be in one sum several times, and pay for each once."""
    private = structs.replace(
        TASK, privacy=Privacy(clip=1.0, max_participations=10, delta=1e-7, epsilon=8.0)
    )

    async def test(system: System) -> None:
        system.service.identifies_devices = False
        with pytest.raises(Conflict, match="identify devices"):
            await system.submit(private)
        system.service.identifies_devices = True
        await system.submit(private)

    run(tmp_path, test)


def test_a_task_that_was_restored_without_its_models_can_be_shown_and_deleted(
    tmp_path: Path,
) -> None:
    async def test(system: System) -> None:
        await system.submit()
        await system.service.set_state("next-word", "cancelled", BY)
        system.change(Transaction(delete=(version_key("next-word", 0),)))
        shown = (await system.service.task("next-word")).task
        assert (shown.state, shown.version) == ("cancelled", 0)
        with pytest.raises(OperatorError, match="has no version any more"):
            await system.service.parameters("next-word", "newest")
        await system.service.delete("next-word", BY)

    run(tmp_path, test)
