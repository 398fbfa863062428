"""Bundles at the server: stored, compared with the settings of their task, passed on to devices.

The server does not decide whether an owner is trustworthy: devices do. It refuses a bundle whose
signature is invalid or that says something else than the submitted settings, so that the owner
learns of it, and not a fleet of devices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
from msgspec import structs

from papaya.aggregator.shards import blob_key
from papaya.bundle import archive
from papaya.bundle.head import BundleHead
from papaya.bundle.manifest import Lease, TaskManifest, run_id
from papaya.bundle.owner import SignedStatement
from papaya.config import Staleness, TaskConfig
from papaya.errors import MissingBlob, OperatorError
from papaya.learning.frozen_file import decode_frozen
from papaya.messages import owner
from papaya.messages.audit_trail import Attempt
from papaya.messages.base import BlobKey, TaskId
from papaya.messages.owner import TaskRows
from papaya.messages.storage import (
    TASKS,
    FenceRow,
    RevisionRow,
    RolloutRow,
    Row,
    RunRow,
    TaskRow,
    Transaction,
    fence_key,
    revision_key,
    rollout_key,
    run_key,
)
from papaya.server.admin.access import Caller
from papaya.server.admin.accounts import write_within_quota
from papaya.server.admin.private_tasks import require_privacy
from papaya.server.admin.problems import Conflict, NotFound
from papaya.server.admin.server_methods import require_server_methods
from papaya.server.admin.service import AdminService
from papaya.server.admin.views import (
    Revision,
    RevisionView,
    SignedBundle,
    Stored,
    TaskView,
)

_AGAIN: Final = "run the command again"


async def store_program(service: AdminService, task: TaskId, data: bytes) -> Stored:
    """Store the program of a task that will be submitted or revised."""
    TaskConfig(task=task, concurrency=1, model_length=1)  # checks the id
    await asyncio.to_thread(archive.unpack, data)
    seq = await _fence(service, task)
    key = await asyncio.to_thread(blob_key, task, seq, "program-0", data)
    await service.blobs.put(key, data)
    return Stored(key)


async def store_frozen(service: AdminService, task: TaskId, data: bytes) -> Stored:
    """Store the frozen tensors of a task that will be submitted."""
    TaskConfig(task=task, concurrency=1, model_length=1)  # checks the id
    await asyncio.to_thread(decode_frozen, np.frombuffer(data, np.uint8))
    seq = await _fence(service, task)
    key = await asyncio.to_thread(blob_key, task, seq, "frozen-0", data)
    await service.blobs.put(key, data)
    return Stored(key)


async def _fence(service: AdminService, task: TaskId) -> int:
    """Blobs are stored under the current fence, whose holder does not sweep them.

    The transaction that names them requires the same fence.
    """
    row = (await service.state.read((fence_key(task),))).get(fence_key(task))
    return row.seq if isinstance(row, FenceRow) else 0


class KeptBundle(NamedTuple):
    """A stored bundle: the settings that name it, its manifest, and the end of its lease."""

    config: TaskConfig
    manifest: TaskManifest
    lease_until: float
    signed: SignedStatement

    def revision_row(self, now: float) -> tuple[str, RevisionRow]:
        number, signed = self.manifest.revision, msgspec.json.encode(self.signed)
        key = revision_key(self.config.task, number)
        return key, RevisionRow(number, now, self.config, signed)


async def keep(
    service: AdminService, config: TaskConfig, data: bytes, named: Sequence[BlobKey] = ()
) -> KeptBundle:
    """Check and store the head of a bundle. `named`: blobs that the task's row names already."""
    await check(service, config, data, named)
    return await keep_checked(service, config, data)


async def keep_checked(service: AdminService, config: TaskConfig, data: bytes) -> KeptBundle:
    """Store the head of a bundle that was checked before. Its lease may have ended since."""
    kept = await _kept(service, config, data)
    bundle = kept.config.requirements.bundle
    assert bundle is not None
    await service.blobs.put(bundle, data)
    return kept


async def check(
    service: AdminService, config: TaskConfig, data: bytes, named: Sequence[BlobKey] = ()
) -> KeptBundle:
    """The bundle as it would be stored now, if it agrees with these settings."""
    head = BundleHead.decode(data)
    manifest = TaskManifest.verify(head.manifest)
    lease = Lease.verify(head.lease)
    lease.check(manifest, service.now())
    _check_agreement(manifest, config)
    seq = await _fence(service, config.task)
    blobs = [(head.program, manifest.program, "program")]
    if manifest.frozen_blob is not None:
        blobs.append((head.frozen_file, manifest.frozen_blob, "frozen tensors"))
    for place, reference, what in blobs:
        if not place.startswith(f"{config.task}/"):
            raise OperatorError(f"{what} of another task", hint="submit the task again")
        if place in named and place.endswith(f"-{reference.sha256[:32]}"):
            continue  # compared when it was stored; frozen tensors may be large
        if not place.startswith(f"{config.task}/{seq}/"):
            # Nothing names it, so the holder may be about to delete it.
            raise Conflict(f"the task moved while its {what} was stored", hint=_AGAIN)
        try:
            await asyncio.to_thread(reference.check, await service.blobs.get(place), what)
        except MissingBlob as error:
            raise NotFound(str(error), hint="submit the task again") from error
    return await _kept(service, config, data)


async def _kept(service: AdminService, config: TaskConfig, data: bytes) -> KeptBundle:
    """The bundle as it would be stored now."""
    head = BundleHead.decode(data)
    manifest = TaskManifest.verify(head.manifest)
    seq = await _fence(service, config.task)
    key = blob_key(config.task, seq, f"bundle-{manifest.revision}", data)
    needs = structs.replace(
        config.requirements,
        module=None,
        owner=manifest.owner,
        bundle=key,
        program=head.program,
        frozen_file=head.frozen_file or None,
        engine_version=manifest.engine_version,
        manifest=manifest.digest,
    )
    config = structs.replace(config, requirements=needs)
    return KeptBundle(config, manifest, Lease.verify(head.lease).expires, head.manifest)


async def follow_earlier_run(
    service: AdminService, task: TaskId, manifest: TaskManifest, *, replace: bool
) -> Transaction:
    """Make `task` the newest run of its name, and end the one before it."""
    key = run_key(manifest.owner, manifest.task)
    # Read before the runs: if another submission starts one after this, the row changes.
    found = (await service.state.read((key,))).get(key)
    follows = Transaction(require=((key, found),), put=((key, RunRow(task)),))
    earlier = await service.newest_run(manifest.task, manifest.owner)
    if earlier is None or earlier.is_over:
        return follows
    if not replace:
        raise Conflict(
            f"a run of {manifest.task} is {earlier.state}",
            hint="end it and start the new one: papaya task submit FILE --replace",
        )
    ended = owner.change_state(earlier, "cancelled", service.now(), "replaced by a new run")
    return Transaction(require=follows.require + ended.require, put=follows.put + ended.put)


async def newest(service: AdminService, task: TaskId) -> SignedBundle:
    key = (await service.rows(task)).row.config.requirements.bundle
    return SignedBundle(b"" if key is None else await service.blobs.get(key))


async def revisions(service: AdminService, task: TaskId) -> tuple[RevisionView, ...]:
    """All revisions of a run, the first one first."""
    found = await service.rows(task)
    rows = await service.state.read((revision_key(found.task, 0)[:-12],))
    return tuple(
        RevisionView(row.revision, row.created, row.config, row.manifest)
        for row in rows.values()
        if isinstance(row, RevisionRow)
    )


async def revise(
    service: AdminService, caller: Caller, task: TaskId, revision: Revision, attempt: Attempt
) -> TaskView:
    """Replace the settings of a running task by the next revision, or renew its lease."""
    found = await service.rows(task)
    config = structs.replace(revision.config, task=found.task)
    kept = await keep(service, config, revision.bundle, found.row.config.requirements.blobs)
    manifest = kept.manifest
    rollout_row = await no_rollout(service, found)
    earlier = await followed(service, found, manifest)
    is_renewal = manifest == earlier
    if not is_renewal:
        require_next(found, earlier, manifest)
    # Read after the row of the task: it changes when an evaluation starts.
    running = await running_evaluations(service, found.task)
    try:
        if is_renewal:
            change = owner.renew(found, kept.config.requirements, running, kept.lease_until)
        else:
            change = owner.revise(
                found,
                kept.config,
                running,
                service.now(),
                revision=manifest.revision,
                lease_until=kept.lease_until,
            )
    except OperatorError as error:
        raise Conflict(str(error), hint=error.hint) from error
    change = structs.replace(change, require=(*change.require, rollout_row))
    if not is_renewal:
        await require_privacy(service, kept.config)
        needs = await require_server_methods(service, kept.config)
        put = (*change.put, kept.revision_row(service.now()), *needs.put)
        change = structs.replace(change, require=change.require + needs.require, put=put)
    await write_within_quota(service, caller, kept.config, change, attempt, (found.task,))
    return (await service.task(found.task)).task


async def no_rollout(service: AdminService, found: TaskRows) -> tuple[str, Row | None]:
    """The row to require while a task is changed, unless a rollout is under way."""
    key = rollout_key(found.task)
    row = (await service.state.read((key,))).get(key)
    if isinstance(row, RolloutRow) and row.state == "running":
        name = found.row.name
        raise Conflict(
            f"a rollout of {name} is under way: revision {row.revision}",
            hint=f"end it first: papaya task rollout {name} --finish, or --roll-back",
        )
    return key, row


async def followed(service: AdminService, found: TaskRows, manifest: TaskManifest) -> TaskManifest:
    """The current manifest of a task, if its owner has signed this one too."""
    before, task = found.row.config.requirements, found.row.name
    if before.bundle is None or before.owner != manifest.owner:
        raise Conflict(f"task {task} was not signed by this owner", hint="papaya owner show")
    earlier = TaskManifest.verify(
        BundleHead.decode(await service.blobs.get(before.bundle)).manifest
    )
    if earlier.engine == "executorch" and manifest.client.batch_size != earlier.client.batch_size:
        raise Conflict(
            f"the program of {task} has a batch size of {earlier.client.batch_size}",
            hint="to change it, submit the task again: papaya task submit FILE --replace",
        )
    return earlier


def require_next(found: TaskRows, earlier: TaskManifest, manifest: TaskManifest) -> None:
    """Raises Conflict unless this is the next revision that the owner signs."""
    last = max(earlier.revision, found.row.signed)
    if manifest.revision != last + 1:
        raise Conflict(
            f"revision {manifest.revision} does not follow revision {last} of {found.row.name}",
            hint="run the command again: it starts from the newest revision",
        )


async def running_evaluations(service: AdminService, task: TaskId) -> list[TaskRow]:
    rows = [r for r in (await service.state.read((TASKS,))).values() if isinstance(r, TaskRow)]
    return [
        row
        for row in rows
        if not row.is_over
        and row.config.evaluates is not None
        and row.config.evaluates.task == task
    ]


def _check_agreement(manifest: TaskManifest, config: TaskConfig) -> None:
    """A device follows the manifest, the server the settings: both must say the same."""
    secure, participation = manifest.secure, manifest.participation
    pairs = {
        "task": (run_id(manifest.owner, manifest.task, manifest.run), config.task),
        "engine": (manifest.engine, config.requirements.engine),
        "model_length": (manifest.model_length, config.model_length),
        "max_examples": (manifest.client.max_examples, config.max_examples),
        "clip": (manifest.clip, config.clip),
        "upload_bits": (manifest.upload_bits or 32, config.upload_bits),
        "max_staleness": (manifest.max_staleness, config.max_staleness),
        "training_timeout_s": (manifest.training_timeout_s, config.training_timeout_s),
        "upload_timeout_s": (manifest.upload_timeout_s, config.upload_timeout_s),
        "evaluation.clients": (manifest.evaluation_clients, config.evaluation_clients),
        "metrics": (manifest.metric_bounds, config.metrics),
        "participation_gap_s": (participation.gap_s, config.participation_gap_s),
        "max_participations": (participation.max_count, config.max_participations),
        "threshold": (None if secure is None else secure.threshold, config.threshold),
        "privacy": (manifest.privacy, None if config.privacy is None else config.privacy.terms),
        "weighting": (
            manifest.weighting,
            config.weighting.kind if config.privacy is None else config.privacy.weighting,
        ),
        "weighting.cap": (manifest.weight_cap or None, config.weighting.cap),
        "staleness": (manifest.staleness or Staleness(), config.staleness),
    }
    if secure is not None:
        pairs["aggregation_goal"] = (secure.aggregation_goal, config.aggregation_goal)
    for field, (signed, submitted) in pairs.items():
        if signed != submitted:
            raise OperatorError(
                f"the signed manifest says {field} = {signed!r}, the settings say {submitted!r}",
                hint="submit the task again from its file",
            )
