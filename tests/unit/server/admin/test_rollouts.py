"""A rollout from its begin to its end, on a real store: steps, rollback, races, refusals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec import structs

import papaya
from papaya.bundle.head import BundleHead
from papaya.bundle.manifest import LEASE_S, TaskManifest
from papaya.config import EvaluationPlan, Staleness, TaskConfig
from papaya.errors import ConfigError
from papaya.messages.audit_trail import AuditRow
from papaya.messages.storage import (
    FORMAT,
    BootRow,
    EndingsRow,
    FenceRow,
    OptimizerRow,
    Outcome,
    PointRow,
    RolloutPlan,
    RolloutRow,
    Row,
    TaskRow,
    Transaction,
    VersionRow,
    boot_key,
    endings_key,
    fence_key,
    optimizer_key,
    point_key,
    rollout_key,
    task_key,
    version_key,
)
from papaya.server.admin import bundles, rollouts
from papaya.server.admin.accounts import ADMIN
from papaya.server.admin.problems import Conflict, NotFound
from papaya.server.admin.views import BeginRollout, EndRollout, Mark, Revision, RolloutView
from tests.unit.server.admin.builders import BY, System
from tests.unit.server.admin.test_bundles import head_of, run, settings, signed_manifest, submit

PLAN = RolloutPlan(shares=(0.2, 1.0), tolerance=0.1, evaluations=1, updates=5, failures=0.2)
EVALUATED = EvaluationPlan(every_versions=5, clients=2)


class Rolling:
    """A signed task with a version that was evaluated, and what its owner and holder do."""

    def __init__(self, system: System, first: TaskManifest, task: str) -> None:
        self.system = system
        self.first = first
        self.task = task

    @classmethod
    async def started(cls, system: System) -> Rolling:
        first = signed_manifest(evaluation_clients=2, revision=1)
        view = await submit(system, first, evaluation=EVALUATED)
        rolling = cls(system, first, view.task)
        rolling.version(1, loss=1.0)
        return rolling

    def version(self, number: int, loss: float | None = None) -> None:
        """A new version, evaluated if it has a loss."""
        task, system = self.task, self.system
        point = PointRow(number, system.time, 4, 40, 0.0, loss=loss, evaluated="{}" if loss else "")
        key = f"{task}/1/version-{number}-{'0' * 32}"
        system.blobs.put(key, b"")
        optimizer = system.store.read((optimizer_key(task),))[optimizer_key(task)]
        assert isinstance(optimizer, OptimizerRow)
        put = (
            (version_key(task, number), VersionRow(number, key, 1, system.time)),
            (optimizer_key(task), structs.replace(optimizer, version=number)),
            (point_key(task, number), point),
        )
        system.change(Transaction(put=put))

    def ended(self, **endings: int) -> None:
        row = EndingsRow(1, endings)
        self.system.change(Transaction(put=((endings_key(self.task), row),)))

    def row(self) -> TaskRow:
        row = self.system.store.read((task_key(self.task),))[task_key(self.task)]
        assert isinstance(row, TaskRow)
        return row

    def rollout(self) -> RolloutRow:
        row = self.system.store.read((rollout_key(self.task),))[rollout_key(self.task)]
        assert isinstance(row, RolloutRow)
        return row

    def seq(self) -> int:
        row = self.system.store.read((fence_key(self.task),))[fence_key(self.task)]
        assert isinstance(row, FenceRow)
        return row.seq

    def candidate(self, revision: int = 2, **changes: Any) -> tuple[TaskConfig, TaskManifest]:
        manifest = structs.replace(self.first, revision=revision, training_timeout_s=9.0, **changes)
        return settings(manifest, evaluation=EVALUATED, training_timeout_s=9.0), manifest

    async def begin(
        self,
        revision: int = 2,
        fallback: dict[str, Any] | None = None,
        shares: tuple[float, ...] = PLAN.shares,
    ) -> None:
        config, manifest = self.candidate(revision)
        numbered = {"revision": revision + 1} | (fallback or {})
        back = structs.replace(self.first, **numbered)
        bundle = await head_of(self.system, manifest)
        plan = structs.replace(PLAN, shares=shares)
        request = BeginRollout(config, bundle, await head_of(self.system, back), plan)
        await rollouts.begin(self.system.service, ADMIN, self.task, request, BY)

    async def view(self) -> RolloutView:
        found = (await self.system.service.task(self.task)).rollout
        assert found is not None
        return found

    async def turn(self) -> None:
        await self.system.turn()


def rolling(folder: Path, test: Callable[[Rolling], Awaitable[None]]) -> None:
    async def inside(system: System) -> None:
        await test(await Rolling.started(system))

    run(folder, inside)


def trail(system: System) -> list[tuple[str, str, str]]:
    rows = system.store.read(("audit/",)).values()
    found = sorted((r for r in rows if isinstance(r, AuditRow)), key=lambda r: r.number)
    return [(r.attempt.actor, r.attempt.action, r.result) for r in found]


def test_a_good_candidate_reaches_all_devices_step_by_step(tmp_path: Path) -> None:
    async def test(own: Rolling) -> None:
        await own.begin()
        row = own.row()
        assert row.config.training_timeout_s != 9.0
        assert row.candidate is not None
        assert (row.candidate.share, row.candidate.config.training_timeout_s) == (0.2, 9.0)
        assert (row.revision, row.signed) == (1, 3)
        assert own.seq() == 1, "the holder reads the candidate"
        await own.turn()
        assert (await own.view()).share == 0.2, "nothing was measured yet"
        own.version(5, loss=1.05)
        own.ended(counted=20, candidate_counted=5)
        await own.turn()
        assert own.rollout().updated_at == 5
        await own.turn()
        assert (await own.view()).share == 0.2, "version 5 may have no update of the candidate"
        own.version(6, loss=1.05)
        await own.turn()
        row = own.row()
        assert (row.candidate, row.revision) == (None, 2)
        assert row.config.training_timeout_s == 9.0
        assert len(row.earlier) == 1, "clients of the revision before may finish"
        assert (await own.view()).state == "running", "with all devices it is watched again"
        own.ended(counted=30, candidate_counted=9)
        await own.turn()
        assert own.rollout().updated_at is None, "most are of clients that joined before"
        own.ended(counted=31, candidate_counted=10)
        await own.turn()
        own.version(11, loss=1.05)
        await own.turn()
        assert (await own.view()).state == "finished"
        assert own.row().config == row.config
        actors = [
            (actor, action) for actor, action, result in trail(own.system) if result == "done"
        ]
        assert actors[-2:] == [(rollouts.ACTOR, "rollout-step")] * 2

    rolling(tmp_path, test)


@pytest.mark.parametrize("after_a_step", [False, True])
def test_a_bad_evaluation_restores_settings_and_model(tmp_path: Path, after_a_step: bool) -> None:
    async def test(own: Rolling) -> None:
        await own.begin()
        if after_a_step:
            own.ended(counted=20, candidate_counted=5)
            await own.turn()
            own.version(2, loss=1.0)
            await own.turn()
            assert own.row().revision == 2
        own.version(3, loss=1.2)
        own.version(4)
        await own.turn()
        row, view = own.row(), await own.view()
        assert (view.state, view.why) == (
            "rolled_back",
            "loss 1.2 at version 3, 1 before the rollout",
        )
        assert (row.candidate, row.revision, row.signed) == (None, 3, 3)
        assert row.config.training_timeout_s == own.first.training_timeout_s
        found = (await own.system.service.rows(own.task)).versions
        assert found[5].restarts
        assert found[5].parameters == found[1].parameters
        bundle = (await bundles.newest(own.system.service, own.task)).bundle
        assert TaskManifest.verify(BundleHead.decode(bundle).manifest).revision == 3
        assert trail(own.system)[-1] == (rollouts.ACTOR, "rollout-roll-back", "done")

    rolling(tmp_path, test)


def test_the_next_revision_follows_the_highest_that_was_signed(tmp_path: Path) -> None:
    """A number must not be signed twice: devices could be given either of the two."""

    async def test(own: Rolling) -> None:
        await own.begin()
        await rollouts.end(own.system.service, own.task, EndRollout("finish"), BY)
        assert (own.row().revision, own.row().signed) == (2, 3)
        for revision in (3, 4):
            config, manifest = own.candidate(revision, upload_timeout_s=8.0)
            config = structs.replace(config, upload_timeout_s=8.0)
            revised = Revision(config, await head_of(own.system, manifest))
            change = bundles.revise(own.system.service, ADMIN, own.task, revised, BY)
            if revision == 4:
                assert (await change).revision == 4
            else:
                with pytest.raises(Conflict, match="does not follow revision 3"):
                    await change

    rolling(tmp_path, test)


def test_a_person_ends_it(tmp_path: Path) -> None:
    async def test(own: Rolling) -> None:
        service = own.system.service
        with pytest.raises(NotFound, match="no rollout"):
            await rollouts.end(service, own.task, EndRollout("finish"), BY)
        await own.begin()
        with pytest.raises(Conflict, match="is under way"):
            await own.begin(revision=4)
        config, manifest = own.candidate(4)
        revised = Revision(config, await head_of(own.system, manifest))
        with pytest.raises(Conflict, match="is under way"):
            await bundles.revise(service, ADMIN, own.task, revised, BY)
        await rollouts.end(service, own.task, EndRollout("roll_back", "too slow"), BY)
        assert (await own.view()).why == "too slow"
        assert own.row().revision == 3

    rolling(tmp_path, test)


@pytest.mark.parametrize("was_marked", [False, True])
@pytest.mark.parametrize("action", ["finish", "roll_back"])
def test_the_baseline_version_is_kept_until_the_end(
    tmp_path: Path, action: Literal["finish", "roll_back"], was_marked: bool
) -> None:
    async def test(own: Rolling) -> None:
        service = own.system.service
        if was_marked:
            await service.mark(own.task, Mark(1), BY)
        await own.begin()
        assert (await service.rows(own.task)).version(1).marked
        await rollouts.end(service, own.task, EndRollout(action), BY)
        found = await service.rows(own.task)
        assert found.version(1).marked == was_marked, "only if its owner wants it"
        assert found.newest.marked == (action == "roll_back" or was_marked)

    rolling(tmp_path, test)


def test_the_hours_of_a_step_do_not_run_while_the_task_is_paused(tmp_path: Path) -> None:
    async def test(own: Rolling) -> None:
        hour, service = 3600.0, own.system.service
        await own.begin()
        for _ in range(2):
            await service.set_state(own.task, "paused", BY)
            await own.turn()
            own.system.time += 2 * PLAN.hours * hour
            await own.turn()
            await service.set_state(own.task, "running", BY)
            await own.turn()
            own.system.time += (PLAN.hours / 2 - 1) * hour
            await own.turn()
            assert (await own.view()).state == "running"
        own.system.time += 2 * hour
        await own.turn()
        assert (await own.view()).why.startswith("a step took 24 h")

    rolling(tmp_path, test)


def test_a_task_that_ends_ends_its_rollout(tmp_path: Path) -> None:
    async def test(own: Rolling) -> None:
        await own.begin()
        await own.system.service.set_state(own.task, "cancelled", BY)
        await own.turn()
        assert (await own.view()).state == "ended"
        assert own.rollout().fallback == b""

    rolling(tmp_path, test)


def test_a_view_shows_the_rollout_and_the_task_of_one_moment(tmp_path: Path) -> None:
    async def test(own: Rolling) -> None:
        await own.begin()
        read, service = own.system.state.read, own.system.service

        async def rolled_back_after(prefixes: tuple[str, ...]) -> dict[str, Row]:
            rows = await read(prefixes)
            own.system.state.read = read  # type: ignore[method-assign]
            await rollouts.end(service, own.task, EndRollout("roll_back"), BY)
            return rows

        own.system.state.read = rolled_back_after  # type: ignore[method-assign]
        seen = await service.task(own.task)
        now = await service.task(own.task)
        assert seen.rollout is not None
        assert now.rollout is not None
        assert (seen.rollout.state, seen.task.revision) == ("running", 1)
        assert (now.rollout.state, now.task.revision) == ("rolled_back", 3)

    rolling(tmp_path, test)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"revision": 2}, "the fallback must be revision 3"),
        ({"upload_timeout_s": 8.0}, "upload_timeout_s"),
    ],
)
def test_a_fallback_that_is_not_the_revision_of_now_is_refused(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    async def test(own: Rolling) -> None:
        with pytest.raises(Exception, match=problem):
            await own.begin(fallback=change)
        assert own.row().candidate is None

    rolling(tmp_path, test)


def test_a_candidate_cannot_name_an_extension_that_the_servers_do_not_have(tmp_path: Path) -> None:
    """Its aggregator would halt the task for all devices."""

    async def test(own: Rolling) -> None:
        config, manifest = own.candidate()
        config = structs.replace(config, staleness=Staleness("not_here"))
        back = structs.replace(own.first, revision=3)
        heads = await head_of(own.system, manifest), await head_of(own.system, back)
        request = BeginRollout(config, *heads, PLAN)
        with pytest.raises(ConfigError, match="no staleness function 'not_here'"):
            await rollouts.begin(own.system.service, ADMIN, own.task, request, BY)
        assert own.row().candidate is None

    rolling(tmp_path, test)


def test_it_needs_identities_and_something_to_compare_with(tmp_path: Path) -> None:
    async def test(own: Rolling) -> None:
        own.system.service.identifies_devices = False
        with pytest.raises(Conflict, match="tokens that identify devices"):
            await own.begin()
        own.system.service.identifies_devices = True
        own.version(1, loss=None)
        with pytest.raises(Conflict, match="nothing to compare with"):
            await own.begin()

    rolling(tmp_path, test)


@pytest.mark.parametrize("shares", [(0.2, 1.0), (1.0,)])
@pytest.mark.parametrize("role", ["aggregator", "coordinator"])
def test_it_needs_servers_of_one_version(
    tmp_path: Path, role: str, shares: tuple[float, ...]
) -> None:
    """A coordinator of 0.4.0 writes the row of the task without the fields of a rollout."""

    async def test(own: Rolling) -> None:
        own.system.service.coordinators = ("coordinator", "never-started")
        for version in ("", papaya.__version__):
            own.system.change(Transaction(put=((boot_key(role), BootRow(1, FORMAT, version)),)))
            if version:
                await own.begin(shares=shares)
            else:
                with pytest.raises(Conflict, match=rf"{role} runs 0\.4\.0"):
                    await own.begin(shares=shares)

    rolling(tmp_path, test)


def test_the_newest_version_is_evaluated_when_the_step_has_its_updates(tmp_path: Path) -> None:
    """The plan is every five versions, and may be far behind."""

    async def test(own: Rolling) -> None:
        await own.begin()
        own.version(2)
        own.version(3)
        await own.turn()
        before = [t.task for t in await own.system.service.tasks() if t.evaluates]
        assert not any(task.endswith("-eval-3") for task in before)
        own.ended(counted=20, candidate_counted=5)
        await own.turn()
        own.version(4)
        await own.turn()
        evaluated = [t.evaluates for t in await own.system.service.tasks() if t.evaluates]
        assert f"{own.task}@4" in evaluated

    rolling(tmp_path, test)


def test_a_rollback_works_after_the_end_of_the_lease(tmp_path: Path) -> None:
    """A task may be paused for long. The owner renews the lease after the rollback."""

    async def test(own: Rolling) -> None:
        await own.begin()
        own.system.time += 2 * LEASE_S
        await own.turn()
        assert (await own.view()).state == "rolled_back"
        row = own.row()
        assert (row.revision, row.candidate) == (3, None)
        assert row.lease_until < own.system.time
        assert row.config.training_timeout_s == own.first.training_timeout_s

    rolling(tmp_path, test)


@pytest.mark.parametrize("is_last_step", [False, True])
def test_a_rollback_finds_a_program_that_was_stored_for_the_rollout(
    tmp_path: Path, is_last_step: bool
) -> None:
    """The first revision names an equal program, at another place."""

    async def test(own: Rolling) -> None:
        own.system.change(Transaction(put=((fence_key(own.task), FenceRow(7, "", 0)),)))
        await own.begin()
        if is_last_step:
            own.ended(counted=20, candidate_counted=5)
            await own.turn()
            own.version(2, loss=1.0)
            await own.turn()
            assert own.row().revision == 2
        await rollouts.end(own.system.service, own.task, EndRollout("roll_back"), BY)
        needs = own.row().config.requirements
        assert own.row().revision == 3
        assert needs.program is not None
        assert needs.program.startswith(f"{own.task}/7/")

    rolling(tmp_path, test)


def test_a_rollout_does_not_change_the_program(tmp_path: Path) -> None:
    """With all devices, only that of the candidate is kept: a rollback would not find its own."""

    async def test(own: Rolling) -> None:
        back = await head_of(own.system, structs.replace(own.first, revision=3))
        own.system.change(Transaction(put=((fence_key(own.task), FenceRow(7, "", 0)),)))
        config, manifest = own.candidate()
        request = BeginRollout(config, await head_of(own.system, manifest), back, PLAN)
        with pytest.raises(Conflict, match="program"):
            await rollouts.begin(own.system.service, ADMIN, own.task, request, BY)
        assert own.row().candidate is None

    rolling(tmp_path, test)


def test_settings_are_rolled_back_if_the_baseline_version_was_deleted(tmp_path: Path) -> None:
    async def test(own: Rolling) -> None:
        await own.begin()
        # The owner has unmarked it, and the holder has deleted it.
        own.system.change(Transaction(delete=(version_key(own.task, 1),)))
        own.version(2, loss=1.2)
        await own.turn()
        view = await own.view()
        assert view.state == "rolled_back"
        assert view.why.endswith("; the model stays: version 1 was deleted")
        assert own.row().revision == 3
        assert max((await own.system.service.rows(own.task)).versions) == 2

    rolling(tmp_path, test)


def test_a_rollout_begins_although_evaluations_start_and_end(tmp_path: Path) -> None:
    async def test(own: Rolling) -> None:
        transact, changes = own.system.state.transact, iter(range(2))

        async def changed_first(transaction: Transaction) -> Outcome:
            if next(changes, None) is not None:
                row = own.row()
                counted = structs.replace(row, evaluations=row.evaluations + 1)
                own.system.change(Transaction(put=((task_key(own.task), counted),)))
            return await transact(transaction)

        own.system.state.transact = changed_first  # type: ignore[method-assign]
        await own.begin()
        assert own.row().evaluations == 2
        assert (await own.view()).state == "running"

    rolling(tmp_path, test)
