"""Bundles at the server: compared with their settings, replaced by newer ones, never run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import structs

import papaya
from papaya.aggregator.shards import blob_key
from papaya.bundle import archive
from papaya.bundle.errors import BundleError
from papaya.bundle.head import BundleHead
from papaya.bundle.manifest import BlobRef, Participation, SecureTerms, TaskManifest, run_id
from papaya.bundle.owner import SignedStatement
from papaya.cli.task.diff import differences
from papaya.config import (
    AsyncFL,
    EvaluationPlan,
    Requirements,
    SecureAggregation,
    SyncFL,
    TaskConfig,
)
from papaya.errors import OperatorError
from papaya.learning.frozen_file import FrozenTensor, encode_frozen
from papaya.messages.storage import (
    FIRST_FORMAT,
    FORMAT,
    FORMAT_KEY,
    BootRow,
    EarlierRevision,
    FenceRow,
    FormatRow,
    Transaction,
    boot_key,
    fence_key,
)
from papaya.server.admin import bundles, submissions
from papaya.server.admin.accounts import ADMIN
from papaya.server.admin.problems import Conflict, NotFound
from papaya.server.admin.views import Evaluate, NewTask, Revision, RollBack, TaskView
from papaya.server.auth import DeviceAuth, OpenDoor
from tests.unit.bundle.builders import ARCHIVE, KEY, NOW, STRANGER, a_lease, a_manifest
from tests.unit.device.bundle_server import FROZEN
from tests.unit.http.loopback import a_client, a_request
from tests.unit.server.admin.builders import BY, System, a_system, encoded
from tests.unit.server.test_device_api import a_door

LAYOUT = (("embed.weight", (2, 2)), ("out.bias", (2,)))


def signed_manifest(**changes: Any) -> TaskManifest:
    values: dict[str, Any] = {
        "layout": LAYOUT,
        "participation": Participation(3600.0, None, "task"),
        "clip": None,
        "evaluation_clients": 0,
    }
    return a_manifest(**(values | changes))


def settings(manifest: TaskManifest, **changes: Any) -> TaskConfig:
    values: dict[str, Any] = {
        "task": run_id(manifest.owner, manifest.task, manifest.run),
        "concurrency": 20,
        "model_length": 6,
        "regime": AsyncFL(aggregation_goal=4, max_staleness=manifest.max_staleness),
        "requirements": Requirements(engine="torch"),
    }
    return TaskConfig(**(values | changes))


def run(folder: Path, test: Callable[[System], Awaitable[None]]) -> None:
    async def inside() -> None:
        async with a_system(folder) as system:
            system.time = NOW
            await test(system)

    asyncio.run(inside())


async def head_of(
    system: System, manifest: TaskManifest, key: Ed25519PrivateKey = KEY, issued: float = NOW
) -> bytes:
    task = run_id(manifest.owner, manifest.task, manifest.run)
    stored = await bundles.store_program(system.service, task, ARCHIVE)
    lease = a_lease(manifest, key, issued)
    return BundleHead(manifest.sign(key), lease, stored.parameters).encode()


async def submit(
    system: System, manifest: TaskManifest, *, replace: bool = False, **changes: Any
) -> TaskView:
    config = settings(manifest, **changes)
    stored = await submissions.store_parameters(system.service, config.task, 6, encoded(config))
    head = await head_of(system, manifest)
    new = NewTask(config, stored.parameters, LAYOUT, head, replace)
    return await submissions.submit(system.service, ADMIN, new, BY)


async def submit_with_frozen(system: System) -> TaskView:
    """A task whose frozen tensors are in a file of their own."""
    manifest = signed_manifest(frozen_file=BlobRef(archive.digest(FROZEN), len(FROZEN)))
    config = settings(manifest)
    stored = await submissions.store_parameters(system.service, config.task, 6, encoded(config))
    frozen = await bundles.store_frozen(system.service, config.task, FROZEN)
    head = BundleHead.decode(await head_of(system, manifest))
    bundle = structs.replace(head, frozen_file=frozen.parameters).encode()
    new = NewTask(config, stored.parameters, LAYOUT, bundle)
    return await submissions.submit(system.service, ADMIN, new, BY)


def test_a_signed_task_names_its_bundle_and_its_owner(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        manifest = signed_manifest()
        view = await submit(system, manifest)
        assert (view.name, view.state) == ("digits", "running")
        needs = (await system.service.task("digits")).config.requirements
        assert (needs.owner, needs.module) == (manifest.owner, None)
        assert needs.bundle is not None
        assert needs.program is not None
        assert system.blobs.get(needs.program) == ARCHIVE
        head = BundleHead.decode(system.blobs.get(needs.bundle))
        assert TaskManifest.verify(head.manifest) == manifest
        assert needs.manifest == manifest.digest
        assert (await bundles.newest(system.service, "digits")).bundle == head.encode()

    run(tmp_path, test)


def test_devices_can_download_every_blob_of_a_bundle(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        await submit_with_frozen(system)
        needs = (await system.service.task("digits")).config.requirements
        assert len(needs.blobs) == 3
        door = a_door(tmp_path / "blobs", DeviceAuth(OpenDoor()))
        async with door as building, a_client(building.port) as client:
            for key in needs.blobs:
                client.send(a_request("GET", f"/v1/parameters/{key}"))
                response = await client.response()
                assert (response.status, response.body) == (200, system.blobs.get(key)), key

    run(tmp_path, test)


def test_frozen_tensors_wait_until_all_servers_run_one_version(tmp_path: Path) -> None:
    """An aggregator of 0.4.0 does not know which blob they are, and would delete it."""

    def server(version: str) -> Transaction:
        known = FORMAT if version else FIRST_FORMAT
        return Transaction(put=((boot_key("aggregator"), BootRow(1, known, version)),))

    async def test(system: System) -> None:
        system.change(server(""))
        with pytest.raises(Conflict, match="would delete the frozen tensors"):
            await submit_with_frozen(system)
        system.change(server(papaya.__version__))
        await submit_with_frozen(system)
        assert system.store.read((FORMAT_KEY,)) == {FORMAT_KEY: FormatRow(FORMAT)}

    run(tmp_path, test)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"training_timeout_s": 9.0}, "training_timeout_s"),
        ({"upload_timeout_s": 9.0}, "upload_timeout_s"),
        ({"participation_gap_s": 0.0}, "participation_gap_s"),
        ({"max_participations": 3}, "max_participations"),
        ({"max_examples": 3}, "max_examples"),
        ({"clip": 3.0}, "clip"),
        ({"regime": AsyncFL(4, max_staleness=49)}, "max_staleness"),
        ({"requirements": Requirements(engine="other")}, "engine"),
        ({"evaluation": EvaluationPlan(clients=3)}, "evaluation.clients"),
    ],
)
def test_settings_that_differ_from_the_signature_are_refused(
    tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    async def test(system: System) -> None:
        with pytest.raises(OperatorError, match=f"the signed manifest says {field}"):
            await submit(system, signed_manifest(), **change)
        assert await system.service.tasks() == ()

    run(tmp_path, test)


@pytest.mark.parametrize(
    ("signed", "asked", "problem"),
    [
        (0, None, "has signed no evaluations"),
        (20, 19, "has signed evaluations of at least 20 clients"),
        (20, None, None),
        (20, 21, None),
    ],
)
def test_an_evaluation_that_devices_would_refuse_is_not_started(
    tmp_path: Path, signed: int, asked: int | None, problem: str | None
) -> None:
    async def test(system: System) -> None:
        plan = EvaluationPlan(clients=signed) if signed else None
        await submit(system, signed_manifest(evaluation_clients=signed), evaluation=plan)
        started = system.service.evaluate("digits", Evaluate(clients=asked), BY)
        if problem is None:
            assert (await started).version == 0
        else:
            with pytest.raises(Conflict, match=problem):
                await started

    run(tmp_path, test)


def test_a_forged_or_expired_bundle_is_refused(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        manifest = signed_manifest()
        config = settings(manifest)
        genuine = BundleHead.decode(await head_of(system, manifest))
        forged = structs.replace(
            genuine,
            manifest=structs.replace(manifest.sign(STRANGER), key=genuine.manifest.key),
        )
        with pytest.raises(BundleError, match="signature is invalid"):
            await bundles.keep(system.service, config, forged.encode())
        old = await head_of(system, manifest, issued=1.0)
        with pytest.raises(BundleError, match="the lease ended"):
            await bundles.keep(system.service, config, old)
        missing = structs.replace(genuine, program=f"{config.task}/0/program-0-{'0' * 32}")
        with pytest.raises(NotFound):
            await bundles.keep(system.service, config, missing.encode())
        foreign = structs.replace(genuine, program="other/0/program-0-" + "0" * 32)
        with pytest.raises(OperatorError, match="program of another task"):
            await bundles.keep(system.service, config, foreign.encode())

    run(tmp_path, test)


def test_a_new_run_starts_when_the_earlier_one_is_over_or_replaced(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        first, second, third = (signed_manifest(run=int(NOW * 1000) + n) for n in range(3))
        one = await submit(system, first)
        with pytest.raises(Conflict, match="a run of digits is running"):
            await submit(system, second)
        system.time += 1
        two = await submit(system, second, replace=True)
        assert (await system.service.task(one.task)).task.state == "cancelled"
        assert (await system.service.task("digits")).task.task == two.task
        await system.service.set_state("digits", "cancelled", BY)
        system.time += 1
        three = await submit(system, third)
        assert (await system.service.task("digits")).task.task == three.task
        assert len(await system.service.tasks()) == 3, "the histories of all runs stay"

    run(tmp_path, test)


def test_two_submissions_of_one_name_at_once_start_one_run(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        both = [signed_manifest(run=int(NOW * 1000) + n) for n in range(2)]
        found = await asyncio.gather(*(submit(system, m) for m in both), return_exceptions=True)
        assert sorted(type(each).__name__ for each in found) == ["Conflict", "TaskView"]
        [running] = await system.service.tasks()
        assert running.state == "running"
        system.time += 1
        [third, fourth] = [signed_manifest(run=int(NOW * 1000) + n) for n in (2, 3)]
        found = await asyncio.gather(
            *(submit(system, m, replace=True) for m in (third, fourth)), return_exceptions=True
        )
        # Either they collide, or the later one replaces the earlier one.
        submitted = sum(isinstance(each, TaskView) for each in found)
        assert submitted + sum(isinstance(each, Conflict) for each in found) == 2
        states = [view.state for view in await system.service.tasks()]
        assert sorted(states) == ["cancelled"] * submitted + ["running"]

    run(tmp_path, test)


async def revise(system: System, manifest: TaskManifest, **changes: Any) -> TaskView:
    head = await head_of(system, manifest)
    revision = Revision(settings(manifest, **changes), head)
    return await bundles.revise(system.service, ADMIN, "digits", revision, BY)


def fence_of(system: System, task: str) -> FenceRow:
    row = system.store.read((fence_key(task),))[fence_key(task)]
    assert isinstance(row, FenceRow)
    return row


def test_a_revision_replaces_the_settings_and_moves_the_task(tmp_path: Path) -> None:
    """The new fence makes the holder let go: its successor reads the new settings."""

    async def test(system: System) -> None:
        manifest = signed_manifest()
        view = await submit(system, manifest)
        held = FenceRow(1, "aggregator", 7)
        system.change(Transaction(put=((fence_key(view.task), held),)))
        following = signed_manifest(revision=4, max_staleness=0)
        await revise(system, following, regime=SyncFL(over_selection=0.0))
        detail = await system.service.task("digits")
        assert detail.config.regime == SyncFL(over_selection=0.0)
        assert fence_of(system, view.task) == FenceRow(2, "", 0)
        needs = detail.config.requirements
        assert needs.bundle is not None
        assert needs.bundle.startswith(f"{view.task}/1/bundle-4-"), "not swept by the holder"
        assert (detail.task.run, detail.task.revision) == (manifest.run, 4)
        both = await bundles.revisions(system.service, "digits")
        assert [each.revision for each in both] == [manifest.revision, 4]
        assert [each.config.regime for each in both][1] == SyncFL(over_selection=0.0)
        signed = [msgspec.json.decode(each.manifest, type=SignedStatement) for each in both]
        manifests = [TaskManifest.verify(each) for each in signed]
        assert manifests == [manifest, following]
        sides = [(each.config, found) for each, found in zip(both, manifests, strict=True)]
        assert differences(sides[0], sides[0]) == {}
        changed = differences(sides[0], sides[1])
        assert changed["regime.type"] == ("async", "sync")
        assert "revision" not in changed
        assert not any(field.startswith("requirements") for field in changed)

    run(tmp_path, test)


def test_a_revision_may_change_the_clip_and_keeps_the_settings_of_clients(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        manifest = signed_manifest(evaluation_clients=3)
        plan = EvaluationPlan(clients=3)
        view = await submit(system, manifest, evaluation=plan)
        started = await system.service.evaluate("digits", Evaluate(), BY)
        before = (await system.service.rows("digits")).row.config
        following = signed_manifest(revision=4, clip=2.0, evaluation_clients=3)
        system.time += 5
        await revise(system, following, clip=2.0, evaluation=plan)
        row = (await system.service.rows(view.task)).row
        assert (row.config.clip, row.config.requirements.manifest) == (2.0, following.digest)
        assert row.earlier == (EarlierRevision(before, system.time),)
        ended = (await system.service.task(started.task)).task
        assert (ended.state, ended.why) == ("cancelled", "the task was revised")

    run(tmp_path, test)


def test_no_revision_names_a_program_of_an_earlier_fence_that_no_row_names(tmp_path: Path) -> None:
    """The holder deletes such blobs when it loads the task."""

    async def test(system: System) -> None:
        view = await submit(system, signed_manifest())
        following = signed_manifest(revision=4)

        def move(seq: int) -> None:
            moved = FenceRow(seq, "a", 1)
            system.store.transact(Transaction(put=((fence_key(view.task), moved),)))

        move(1)
        head = await head_of(system, following)
        move(2)
        revision = Revision(settings(following), head)
        with pytest.raises(Conflict, match="the task moved while its program was stored"):
            await bundles.revise(system.service, ADMIN, "digits", revision, BY)

    run(tmp_path, test)


def test_a_renewed_lease_does_not_move_the_task(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        manifest = signed_manifest()
        view = await submit(system, manifest)
        before = fence_of(system, view.task)
        system.time += 1000.0
        head = await head_of(system, manifest, issued=system.time)
        revision = Revision(settings(manifest), head)
        await bundles.revise(system.service, ADMIN, "digits", revision, BY)
        assert fence_of(system, view.task) == before
        assert (await bundles.newest(system.service, "digits")).bundle == head
        renewed = (await system.service.task("digits")).task
        assert renewed.lease_until == view.lease_until + 1000.0
        assert len(await bundles.revisions(system.service, "digits")) == 1

    run(tmp_path, test)


def test_a_renewed_lease_reaches_running_evaluations(tmp_path: Path) -> None:
    """No row would name the head that they named: the next holder of the task would delete it."""

    async def test(system: System) -> None:
        manifest, plan = signed_manifest(evaluation_clients=3), EvaluationPlan(clients=3)
        await submit(system, manifest, evaluation=plan)
        started = await system.service.evaluate("digits", Evaluate(), BY)
        before = (await system.service.rows(started.task)).row
        system.time += 1000.0
        head = await head_of(system, manifest, issued=system.time)
        renewal = Revision(settings(manifest, evaluation=plan), head)
        await bundles.revise(system.service, ADMIN, "digits", renewal, BY)
        needs = (await system.service.rows("digits")).row.config.requirements
        after = (await system.service.rows(started.task)).row
        assert needs.bundle != before.config.requirements.bundle
        assert after.config == structs.replace(before.config, requirements=needs)
        assert after.state == "running"

    run(tmp_path, test)


@pytest.mark.parametrize(
    ("manifest", "changes", "problem"),
    [
        (signed_manifest(revision=5), {}, "does not follow revision 3"),
        (signed_manifest(revision=2), {}, "does not follow revision 3"),
        (
            signed_manifest(revision=4, clip=2.0, secure=SecureTerms(4, 4)),
            {"clip": 2.0, "secure_aggregation": SecureAggregation()},
            "cannot change secure_aggregation",
        ),
    ],
)
def test_a_revision_that_does_not_fit_is_refused(
    tmp_path: Path, manifest: TaskManifest, changes: dict[str, Any], problem: str
) -> None:
    async def test(system: System) -> None:
        await submit(system, signed_manifest())
        with pytest.raises(Conflict, match=problem):
            await revise(system, manifest, **changes)

    run(tmp_path, test)


def test_a_task_without_a_signature_cannot_be_revised(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        await system.submit()
        assert (await bundles.newest(system.service, "next-word")).bundle == b""

    run(tmp_path, test)


@contextmanager
def calls_on_this_thread() -> Iterator[set[str]]:
    """The names of all functions that are called; keys of blobs with what they name."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found.add(frame.f_code.co_qualname)
            if frame.f_code is blob_key.__code__:
                found.add(f"key of {frame.f_locals['what']}")

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def test_work_that_grows_with_the_model_does_not_stall_the_loop(tmp_path: Path) -> None:
    """Each of these takes seconds for a model of 10⁹ parameters: a leader could lose its lead."""
    frozen = encode_frozen({"table": FrozenTensor("F32", (9,), np.zeros(36, np.uint8))})

    async def test(system: System) -> None:
        await bundles.store_frozen(system.service, "digits", frozen)
        await submit(system, signed_manifest())
        await system.service.roll_back("digits", RollBack(0), BY)

    with calls_on_this_thread() as found:
        run(tmp_path, test)
    assert "AdminService.fresh_optimizer" in found, "calls are noted"
    slow = {"ServerOptimizer.initial_state", "ServerOptimizer.encode_state", "BlobRef.check"}
    assert found.isdisjoint(slow)
    assert {name for name in found if name.startswith("key of ")} == {"key of bundle-3"}
