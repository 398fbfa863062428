"""Submits a task in two steps: its parameters as a blob, then the task that names them.

An owner sends initial parameters, and for devices that have no task file a signed bundle, which
the server stores and never runs. Parameters are one canonical safetensors file, which is read
completely before anything is stored. Refused: a task that exists, a name that the caller does not
own, a task that exceeds the caller's quota, an id reserved for evaluations, a manifest of another
length, a parameters file of another length or with NaN.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from secrets import token_bytes

from msgspec import structs

from papaya.aggregator.shards import blob_key
from papaya.config import TaskConfig
from papaya.errors import MissingBlob, OperatorError, ProtocolError
from papaya.learning import parameters
from papaya.learning.parameters import Manifest
from papaya.messages import owner
from papaya.messages.audit_trail import Attempt
from papaya.messages.base import TaskId
from papaya.messages.storage import (
    ManifestRow,
    Row,
    TaskRow,
    Transaction,
    deleted_key,
    manifest_key,
    submission,
    task_key,
)
from papaya.messages.tickets import PSEUDONYM_KEY_BYTES
from papaya.server.admin import bundles, evaluations
from papaya.server.admin.access import Caller
from papaya.server.admin.accounts import write_within_quota
from papaya.server.admin.bundles import KeptBundle
from papaya.server.admin.private_tasks import require_privacy
from papaya.server.admin.problems import Conflict, NotFound
from papaya.server.admin.server_methods import require_server_methods
from papaya.server.admin.service import AdminService, fresh_state
from papaya.server.admin.views import NewTask, Stored, TaskView

MAX_HEADER_BYTES = 8 + (1 << 16)  # the header of a parameters file


def max_parameters_bytes(model_length: int) -> int:
    return 4 * model_length + MAX_HEADER_BYTES


async def store_parameters(
    service: AdminService, task: TaskId, model_length: int, data: bytes
) -> Stored:
    """Store the parameters of version 0 of a task that will be submitted."""
    TaskConfig(task=task, concurrency=1, model_length=model_length)  # checks both
    await _require_new(service, task)
    key = await asyncio.to_thread(_checked_key, task, model_length, data)
    await service.blobs.put(key, data)
    return Stored(key)


async def submit(service: AdminService, caller: Caller, new: NewTask, attempt: Attempt) -> TaskView:
    config = new.config
    caller.require_owner(config.task)
    if config.evaluates is not None or owner.is_evaluation_id(config.task):
        raise OperatorError(
            f"task {config.task!r} looks like an evaluation",
            hint="choose another name; to start an evaluation: papaya task evaluate TASK",
        )
    evaluations.check_plan(config)
    _check_manifest(new)
    private = await require_privacy(service, config)
    await _require_new(service, config.task)
    await _require_parameters(service, new)
    kept = None
    if new.bundle:
        kept = await bundles.keep(service, config, new.bundle)
        config = kept.config
    methods = await require_server_methods(service, config)
    needs = private if private.put else methods  # both raise the same format
    key, state = await asyncio.to_thread(fresh_state, config, config.task, 0, 0)
    pseudonym_key = token_bytes(PSEUDONYM_KEY_BYTES)
    change = submission(config, new.parameters, key, service.now(), pseudonym_key)
    replaces: tuple[TaskId, ...] = ()
    if kept is not None:
        earlier = await bundles.follow_earlier_run(
            service, config.task, kept.manifest, replace=new.replace
        )
        replaces = tuple(row.config.task for _, row in earlier.put if isinstance(row, TaskRow))
        change = structs.replace(
            change,
            require=change.require + earlier.require,
            put=(*_signed(change, kept), *earlier.put, kept.revision_row(service.now())),
        )
    change = structs.replace(
        change, require=change.require + needs.require, put=change.put + needs.put
    )
    if new.manifest:
        row = ManifestRow(new.manifest)
        change = structs.replace(change, put=(*change.put, (manifest_key(config.task), row)))
    if caller.role != "operator":
        change = structs.replace(change, put=tuple(_of_account(change, caller)))
    await service.blobs.put(key, state)
    await write_within_quota(service, caller, config, change, attempt, replaces)
    return (await service.task(config.task)).task


def _of_account(change: Transaction, caller: Caller) -> Iterator[tuple[str, Row]]:
    """The rows of a new task, with the account whose quota counts it."""
    for key, row in change.put:
        is_new = isinstance(row, TaskRow) and not row.is_over
        yield key, structs.replace(row, account=caller.name) if is_new else row


def _signed(change: Transaction, kept: KeptBundle) -> list[tuple[str, Row]]:
    """The rows of a new task, with what its owner has signed."""
    manifest = kept.manifest
    signed = {
        "name": manifest.task,
        "run": manifest.run,
        "revision": manifest.revision,
        "lease_until": kept.lease_until,
    }
    return [
        (key, structs.replace(row, **signed) if isinstance(row, TaskRow) else row)
        for key, row in change.put
    ]


def _check_manifest(new: NewTask) -> None:
    if not new.manifest:
        return
    try:
        length = Manifest(new.manifest).length
    except ValueError as error:
        raise OperatorError(f"manifest: {error}", hint="submit the task again") from error
    if length != new.config.model_length:
        raise OperatorError(
            f"the manifest has {length} parameters, the task {new.config.model_length}",
            hint="submit the task again from its file",
        )


async def _require_new(service: AdminService, task: TaskId) -> None:
    keys = (task_key(task), deleted_key(task))
    found = await service.state.read(keys)
    if keys[1] in found:
        raise Conflict(
            f"task {task} existed and was deleted; its name cannot be used again",
            hint="choose another name: papaya task submit FILE --name NAME; or sign the task "
            "(papaya owner key): a signed task can reuse its name, because each run has its own id",
        )
    if keys[0] in found:
        raise Conflict(
            f"task {task} exists already",
            hint="choose another name: papaya task submit FILE --name NAME",
        )


async def _require_parameters(service: AdminService, new: NewTask) -> None:
    """They must belong to this task: another task's blobs are deleted with that task."""
    config = new.config
    if not new.parameters.startswith(f"{config.task}/0/version-0-"):
        raise OperatorError(
            f"parameters {new.parameters[:100]!r} are not those of {config.task}",
            hint="store them first: PUT /admin/tasks/TASK/parameters",
        )
    try:
        data = await service.blobs.get(new.parameters)
    except MissingBlob as error:
        raise NotFound(str(error), hint="submit the task again") from error
    await asyncio.to_thread(_checked_key, config.task, config.model_length, data)


def _checked_key(task: TaskId, model_length: int, data: bytes) -> str:
    try:
        parameters.decode(data, model_length)
    except ProtocolError as error:
        raise OperatorError(
            f"invalid parameters, expected {model_length}: {error}",
            hint="submit the task from its file: papaya task submit FILE",
        ) from error
    return blob_key(task, 0, "version-0", data)
