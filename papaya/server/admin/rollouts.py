"""Rollouts at the server: begun by an owner, judged once a second, ended by a rule or a person.

What to do is decided in `papaya/messages/rollout.py`. Every step is one transaction with a row in
the audit trail; those that the supervisor takes by itself have the actor `(rollout)`.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from msgspec import structs

from papaya.errors import OperatorError
from papaya.messages import rollout as rule
from papaya.messages.audit_trail import Attempt
from papaya.messages.base import TaskId
from papaya.messages.events import RolloutEnded, RolloutRolledBack, RolloutStepped, ServerEvent
from papaya.messages.owner import TaskRows
from papaya.messages.storage import (
    ArmCounts,
    EndingsRow,
    Outcome,
    RolloutPlan,
    RolloutRow,
    TaskRow,
    Transaction,
    endings_key,
    rollout_key,
)
from papaya.server.admin import bundles
from papaya.server.admin.access import Caller
from papaya.server.admin.accounts import transact_within_quota
from papaya.server.admin.bundles import KeptBundle
from papaya.server.admin.private_tasks import require_one_version
from papaya.server.admin.problems import Conflict, NotFound
from papaya.server.admin.server_methods import require_server_methods
from papaya.server.admin.service import AdminService
from papaya.server.admin.views import BeginRollout, EndRollout, TaskView
from papaya.server.logs import log

ACTOR: Final = "(rollout)"
"""No account can have this name."""
_ATTEMPTS: Final = 10


async def begin(
    service: AdminService, caller: Caller, task: TaskId, request: BeginRollout, attempt: Attempt
) -> TaskView:
    """Give the next revision of a task to the first share of the devices."""
    rule.check_plan(request.plan)
    if request.plan.shares[0] < 1:
        _require_identities(service)
    await require_one_version(
        service, "a rollout needs servers of one version, because an earlier one would forget it"
    )
    outcome: Outcome = "refused"
    for _ in range(_ATTEMPTS):  # evaluations start and end meanwhile
        found = await service.rows(task)
        row, change = await _begun(service, found, request)
        outcome = await transact_within_quota(
            service, caller, row.candidate, change, attempt, (found.task,)
        )
        if outcome == "committed":
            log(_stepped(found.row, row, f"begun by {attempt.actor}"))
        if outcome != "refused":
            break
    service.settle(outcome)
    return (await service.task(task)).task


async def _begun(
    service: AdminService, found: TaskRows, request: BeginRollout
) -> tuple[RolloutRow, Transaction]:
    """The first step, made from these rows."""
    before = (await bundles.no_rollout(service, found))[1]
    plan, named = request.plan, found.row.config.requirements.blobs
    config = structs.replace(request.config, task=found.task)
    needs = await require_server_methods(service, config)
    kept = await bundles.keep(service, config, request.bundle, named)
    try:
        rule.check_candidate(found.row, kept.config, plan)
    except OperatorError as error:
        raise Conflict(str(error), hint=error.hint) from error
    earlier = await bundles.followed(service, found, kept.manifest)
    bundles.require_next(found, earlier, kept.manifest)
    fallback = await bundles.check(service, found.row.config, request.fallback, named)
    expected = structs.replace(earlier, revision=kept.manifest.revision + 1)
    if fallback.manifest != expected:
        raise Conflict(
            f"the fallback must be revision {expected.revision} with the settings of revision "
            f"{earlier.revision}",
            hint="run the command again: it starts from the newest revision",
        )
    _require_one_program(kept, fallback)
    version, value = await _baseline(service, found, plan)
    now, counts = service.now(), await _counts(service, found.task)
    row = RolloutRow(
        plan=plan,
        candidate=kept.config,
        revision=kept.manifest.revision,
        lease_until=kept.lease_until,
        fallback=request.fallback,
        fallback_config=found.row.config,
        started=now,
        since=now,
        from_version=found.newest.version,
        counts=counts,
        baseline=value,
        baseline_version=version,
        failing=rule.failing(
            counts.counted + counts.others_counted, counts.failed + counts.others_failed
        ),
    )
    running = await bundles.running_evaluations(service, found.task)
    known = before if isinstance(before, RolloutRow) else None
    change = rule.begin(found, row, known, fallback.manifest.revision, running)
    put = (*change.put, kept.revision_row(now), *needs.put)
    change = structs.replace(change, require=change.require + needs.require, put=put)
    return row, change


async def end(
    service: AdminService, task: TaskId, request: EndRollout, attempt: Attempt
) -> TaskView:
    """Finish a rollout now, or roll it back, because a person says so."""
    found = await service.rows(task)
    key = rollout_key(found.task)
    rollout = (await service.state.read((key,))).get(key)
    if not isinstance(rollout, RolloutRow) or rollout.state != "running":
        raise NotFound(f"no rollout of {task} is under way", hint=f"papaya task show {task}")
    why = request.why or f"{request.action} by {attempt.actor}"
    outcome = await _carry_out(service, found.task, rollout, request.action, why, attempt)
    service.settle(outcome)
    return (await service.task(found.task)).task


async def judge(service: AdminService, row: TaskRow, rollout: RolloutRow) -> None:
    """Take the next step, or roll back, if it is time. Called by the supervisor."""
    task = row.config.task
    if row.is_over:
        ended, change = rule.end_with_task(row, rollout, service.now())
        if await service.state.transact(change) == "committed":
            log(_ended(row, ended))
        return
    paused = rule.note_pause(row, rollout, service.now())
    if paused is not None:
        await service.state.transact(paused[1])
        return
    if row.state != "running":
        return
    counts = await _counts(service, task)
    noted = rule.note_updates(await service.rows(task), rollout, counts)
    if noted is not None:
        await service.state.transact(noted[1])
        return
    points = {point.version: point for point in await service.all_points(task)}
    verdict = rule.judge(rollout, points, counts, service.now())
    if verdict is None:
        return
    details = {"revision": rollout.revision, "share": rollout.share}
    action = "rollout-step" if verdict.action == "go_on" else "rollout-roll-back"
    text = msgspec.json.encode(details).decode()
    attempt = Attempt(ACTOR, action, task, text, verdict.why)
    await _carry_out(service, task, rollout, verdict.action, verdict.why, attempt)


async def _carry_out(
    service: AdminService,
    task: TaskId,
    rollout: RolloutRow,
    action: Literal["go_on", "finish", "roll_back"],
    why: str,
    attempt: Attempt,
) -> str:
    """Write the change, again from newer rows while the holder commits versions meanwhile."""
    outcome = "refused"
    for _ in range(_ATTEMPTS):
        found = await service.rows(task)
        key = rollout_key(task)
        if (await service.state.read((key,))).get(key) != rollout:
            return "refused"  # somebody else was first
        if action == "roll_back":
            after, change = await _rolled_back(service, found, rollout, why)
        else:
            after, change = await _further(service, found, rollout, why, is_last=action == "finish")
        outcome = await service.trail.transact(attempt, change)
        if outcome == "committed":
            log(_event(found, after))
            service.settle(outcome)
        if outcome != "refused":
            break
    return outcome


async def _further(
    service: AdminService, found: TaskRows, rollout: RolloutRow, why: str, *, is_last: bool
) -> tuple[RolloutRow, Transaction]:
    now, counts = service.now(), await _counts(service, found.task)
    running = await bundles.running_evaluations(service, found.task)
    if is_last:
        return rule.finish(found, rollout, running, now, why)
    return rule.go_on(found, rollout, counts, running, now, why)


async def _rolled_back(
    service: AdminService, found: TaskRows, rollout: RolloutRow, why: str
) -> tuple[RolloutRow, Transaction]:
    kept = await bundles.keep_checked(service, rollout.fallback_config, rollout.fallback)
    optimizer = await service.fresh_optimizer(found, kept.config)
    running = await bundles.running_evaluations(service, found.task)
    after, change = rule.roll_back(
        found,
        rollout,
        kept.config,
        kept.lease_until,
        optimizer,
        running,
        service.now(),
        why,
    )
    return after, structs.replace(change, put=(*change.put, kept.revision_row(service.now())))


def _require_one_program(candidate: KeptBundle, fallback: KeptBundle) -> None:
    """With all devices, only blobs of the candidate are named: a rollback needs the same ones."""
    one, other = candidate.config.requirements, fallback.config.requirements
    if (one.program, one.frozen_file) != (other.program, other.frozen_file):
        raise Conflict(
            "a rollout cannot change the program of a task, or its frozen tensors",
            hint="submit the task again: papaya task submit FILE --replace",
        )


def _require_identities(service: AdminService) -> None:
    if not service.identifies_devices:
        raise Conflict(
            "a rollout to a share of the devices needs tokens that identify devices: otherwise a "
            "device would get one revision today and the other tomorrow, which it refuses",
            hint='set device_tokens = "signed" in the server\'s file, or use --share 1',
        )


async def _baseline(service: AdminService, found: TaskRows, plan: RolloutPlan) -> tuple[int, float]:
    """The newest version that is stored and evaluated, and the metric there."""
    restarted = max((v for v, row in found.versions.items() if row.restarts), default=0)
    for point in reversed(await service.all_points(found.task)):
        value = rule.measured(plan, point)
        if value is not None and point.version in found.versions and point.version >= restarted:
            return point.version, value
    name = found.row.name
    raise Conflict(
        f"no stored version of {name} was evaluated: a rollout has nothing to compare with",
        hint=f"papaya task evaluate {name}",
    )


async def _counts(service: AdminService, task: TaskId) -> ArmCounts:
    key = endings_key(task)
    row = (await service.state.read((key,))).get(key)
    return rule.counts_of(row.total if isinstance(row, EndingsRow) else {})


def _event(found: TaskRows, rollout: RolloutRow) -> ServerEvent:
    row = found.row
    if rollout.state == "running":
        return _stepped(row, rollout, rollout.why)
    if rollout.state == "rolled_back":
        version = rollout.baseline_version
        return RolloutRolledBack(row.config.task, row.run, rollout.revision, version, rollout.why)
    return _ended(row, rollout)


def _stepped(row: TaskRow, rollout: RolloutRow, why: str) -> RolloutStepped:
    return RolloutStepped(row.config.task, row.run, rollout.revision, rollout.share, why)


def _ended(row: TaskRow, rollout: RolloutRow) -> RolloutEnded:
    state, why = rollout.state, rollout.why
    return RolloutEnded(row.config.task, row.run, rollout.revision, state, why)
