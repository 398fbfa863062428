"""Rollouts: a revision reaches a share of the devices first, and is taken back if it does harm.

    begin ──▶ step 0 ──▶ step 1 ──▶ … ──▶ all devices ──▶ finished
                 │          │                  │
                 └──────────┴──────────────────┴──▶ rolled back: earlier settings, earlier model

All devices train one model. With less than all of them, the holder weighs each update by the
revision that its client has agreed to; the server's own settings (concurrency, regime, optimizer)
change with the last step. `judge` decides from rows alone, so any supervisor comes to the same
decision, and its transaction requires the rows that it has read (docs/adr/0064).

Refused: a candidate that other devices than before are eligible for, or whose evaluations measure
something else; and shares of less than all devices if buffers belong to one revision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple

from msgspec import structs

from papaya.config import TaskConfig
from papaya.config.metrics import PERPLEXITY
from papaya.errors import OperatorError
from papaya.messages import owner
from papaya.messages.base import BlobKey, TaskId
from papaya.messages.owner import TaskRows
from papaya.messages.reasons import CANDIDATE_COUNTED, CANDIDATE_FAILED, is_failure
from papaya.messages.storage import (
    ArmCounts,
    Candidate,
    PointRow,
    RolloutPlan,
    RolloutRow,
    RolloutState,
    TaskRow,
    Transaction,
    rollout_key,
    task_key,
    version_key,
)

MAX_STEPS: Final = 4
MAX_STEP_HOURS: Final = 168.0
"""Together less than the lease of a bundle: the fallback must be valid to the end."""


class RolloutVerdict(NamedTuple):
    """What to do with a rollout, and why."""

    action: Literal["go_on", "roll_back"]
    why: str


def check_plan(plan: RolloutPlan) -> None:
    """Raises OperatorError for a plan that makes no sense."""
    shares = plan.shares
    problem = ""
    if not shares or shares[-1] != 1.0 or len(shares) > MAX_STEPS:
        problem = f"shares = {shares}: one to {MAX_STEPS} steps, the last one with all devices"
    elif not all(0 < share <= 1 for share in shares) or list(shares) != sorted(set(shares)):
        problem = f"shares = {shares}: each above 0, at most 1, and larger than the one before"
    elif not (math.isfinite(plan.tolerance) and plan.tolerance >= 0):
        problem = f"tolerance = {plan.tolerance}: must be finite and at least 0"
    elif plan.evaluations < 1 or plan.updates < 1:
        problem = "a step needs at least one evaluation and one update"
    elif not 0 <= plan.failures <= 1:
        problem = f"failures = {plan.failures}: must be from 0 to 1"
    elif not 0 < plan.hours <= MAX_STEP_HOURS:
        problem = f"hours = {plan.hours}: above 0, at most {MAX_STEP_HOURS:g} for a step"
    if problem:
        raise OperatorError(f"invalid plan of a rollout: {problem}", hint="papaya task rollout -h")


def check_candidate(row: TaskRow, config: TaskConfig, plan: RolloutPlan) -> None:
    """Raises OperatorError if these settings cannot be rolled out by this plan."""
    owner.require_revisable(row, config)
    before = row.config
    if config.evaluation is None:
        raise OperatorError(
            f"task {row.name} has no planned evaluations: nothing would judge the rollout",
            hint=f"papaya task update {row.name} --set evaluation.every_versions=10",
        )
    names = ["loss", *([PERPLEXITY] if config.perplexity else [])]
    names += [metric.name for metric in config.metrics]
    if plan.metric not in names:
        raise OperatorError(
            f"task {row.name} has no metric {plan.metric}", hint=f"use one of {', '.join(names)}"
        )
    if plan.shares == (1.0,):
        return
    if before.is_bound:
        kind = "secure" if before.is_secure else "private"
        raise OperatorError(
            f"a {kind} task has one revision at a time: updates under two of them cannot be in one "
            "sum, and a buffer of a small share of the devices would delay all later versions",
            hint="watch it with all devices, with automatic rollback: --share 1",
        )
    if before.requirements.bundle is None:
        raise OperatorError(
            f"task {row.name} is not signed, so devices do not tell its revisions apart",
            hint="create a key (papaya owner key), then submit the task again",
        )
    same = {
        "metrics": (before.metrics, config.metrics),
        "evaluation": (before.evaluation, config.evaluation),
        "regime": (type(before.regime), type(config.regime)),
        "requirements": (_eligibility(before), _eligibility(config)),
    }
    if changed := [name for name, (old, new) in same.items() if old != new]:
        raise OperatorError(
            f"a rollout to a share of the devices cannot change {', '.join(changed)}",
            hint=f"change it for all devices: papaya task update {row.name}",
        )


def _eligibility(config: TaskConfig) -> object:
    needs = config.requirements
    compatible = (needs.engine, needs.engine_version, needs.min_memory_mb, needs.labels)
    return (*compatible, needs.owner, needs.upload_bits)


# -- what is measured ---------------------------------------------------------------------------


def measured(plan: RolloutPlan, point: PointRow) -> float | None:
    """The plan's metric at an evaluated version."""
    if plan.metric == "loss":
        return point.loss
    return point.perplexity if plan.metric == PERPLEXITY else point.metrics.get(plan.metric)


def counts_of(endings: Mapping[str, int]) -> ArmCounts:
    """From the numbers of endings of a task, in which those of the candidate are counted too."""
    counted, failed = endings.get(CANDIDATE_COUNTED, 0), endings.get(CANDIDATE_FAILED, 0)
    all_failed = sum(times for ending, times in endings.items() if is_failure(ending))
    return ArmCounts(counted, failed, endings.get("counted", 0) - counted, all_failed - failed)


def since(rollout: RolloutRow, counts: ArmCounts) -> ArmCounts:
    """What has been counted since the step began."""
    before = rollout.counts
    return ArmCounts(
        max(0, counts.counted - before.counted),
        max(0, counts.failed - before.failed),
        max(0, counts.others_counted - before.others_counted),
        max(0, counts.others_failed - before.others_failed),
    )


def values_of(rollout: RolloutRow, points: Mapping[int, PointRow]) -> list[tuple[int, float]]:
    """The metric at the versions of this step that were evaluated."""
    found = [
        (version, measured(rollout.plan, point))
        for version, point in sorted(points.items())
        if version > rollout.from_version
    ]
    return [(version, value) for version, value in found if value is not None]


# -- the decision -------------------------------------------------------------------------------


def judge(
    rollout: RolloutRow, points: Mapping[int, PointRow], counts: ArmCounts, now: float
) -> RolloutVerdict | None:
    """What the evaluations and participations of this step lead to; None: wait."""
    plan, step = rollout.plan, since(rollout, counts)
    values = values_of(rollout, points)
    for version, value in values:
        change = rollout.baseline - value if plan.higher_is_better else value - rollout.baseline
        if not change <= plan.tolerance:  # also if it is not a number
            return RolloutVerdict(
                "roll_back",
                f"{plan.metric} {value:.4g} at version {version}, {rollout.baseline:.4g} before "
                f"the rollout",
            )
    counted, failed = step.counted, step.failed
    is_partial = rollout.share < 1
    usual = failing(step.others_counted, step.others_failed) if is_partial else rollout.failing
    if counted + failed >= plan.updates and failing(counted, failed) > usual + plan.failures:
        others = "of the others" if is_partial else "before the rollout"
        rate = f"{100 * failing(counted, failed):.0f} % of its participations fail"
        return RolloutVerdict("roll_back", f"{rate}, {100 * usual:.0f} % {others}")
    later = [value for version, value in values if version > enough_at(rollout)]
    if len(later) >= plan.evaluations:
        return RolloutVerdict("go_on", f"{plan.metric} {later[-1]:.4g}")
    if now >= rollout.since + rollout.paused_s + 3600 * plan.hours:
        missing = f"{counted} of {plan.updates} updates"
        missing += f", then {len(later)} of {plan.evaluations} evaluations"
        return RolloutVerdict("roll_back", f"a step took {plan.hours:g} h: {missing}")
    return None


def enough_at(rollout: RolloutRow) -> float:
    """Evaluations of versions above this one show what the candidate does."""
    return math.inf if rollout.updated_at is None else rollout.updated_at


def note_updates(
    rows: TaskRows, rollout: RolloutRow, counts: ArmCounts
) -> tuple[RolloutRow, Transaction] | None:
    """Note the newest version, as soon as the step has its updates."""
    counted = since(rollout, counts).counted
    if rollout.updated_at is not None or counted < rollout.plan.updates:
        return None
    noted = structs.replace(rollout, updated_at=rows.newest.version)
    require = Transaction(require=((task_key(rows.task), rows.row),))
    return noted, _with_row(rows.task, rollout, noted, require)


def note_pause(
    row: TaskRow, rollout: RolloutRow, now: float
) -> tuple[RolloutRow, Transaction] | None:
    """Note when the task was paused or resumed: the hours of a step do not run meanwhile."""
    is_paused = row.state == "paused"
    if is_paused == bool(rollout.paused_at):
        return None
    if is_paused:
        noted = structs.replace(rollout, paused_at=now)
    else:
        paused_s = rollout.paused_s + max(0.0, now - rollout.paused_at)
        noted = structs.replace(rollout, paused_at=0.0, paused_s=paused_s)
    task = row.config.task
    return noted, _with_row(task, rollout, noted, Transaction(require=((task_key(task), row),)))


def failing(counted: int, failed: int) -> float:
    """The share of participations that fail."""
    return failed / (counted + failed) if failed else 0.0


# -- rows ---------------------------------------------------------------------------------------


def begin(
    rows: TaskRows,
    rollout: RolloutRow,
    before: RolloutRow | None,
    signed: int,
    evaluations: Iterable[TaskRow],
) -> Transaction:
    """Start the first step. `before`: the row of an earlier rollout. `signed`: the number of the
    fallback. The baseline version is marked until the end, because a rollback needs it.
    """
    if before is not None and before.state == "running":
        raise OperatorError(
            f"a rollout of {rows.row.name} is under way",
            hint=f"papaya task rollout {rows.row.name} --finish, or --roll-back",
        )
    change = _step(rows, rollout, evaluations, rollout.started)
    put = dict(change.put)
    task, version = put[task_key(rows.task)], rows.version(rollout.baseline_version)
    assert isinstance(task, TaskRow)
    put[task_key(rows.task)] = structs.replace(task, signed=signed)
    put[rollout_key(rows.task)] = structs.replace(rollout, marks_baseline=not version.marked)
    marked = version_key(rows.task, version.version)
    put[marked] = structs.replace(version, marked=True)
    require = (*change.require, (rollout_key(rows.task), before), (marked, version))
    return Transaction(require=require, put=tuple(put.items()), delete=change.delete)


def go_on(
    rows: TaskRows,
    rollout: RolloutRow,
    counts: ArmCounts,
    evaluations: Iterable[TaskRow],
    now: float,
    why: str,
) -> tuple[RolloutRow, Transaction]:
    """Take the next step, or finish after the last one."""
    if rollout.share == 1:
        return finish(rows, rollout, evaluations, now, why)
    following = structs.replace(
        rollout,
        step=rollout.step + 1,
        since=now,
        from_version=rows.newest.version,
        counts=counts,
        updated_at=None,
        paused_s=0.0,
        why=why,
    )
    change = _step(rows, following, evaluations, now)
    return following, _with_row(rows.task, rollout, following, change)


def finish(
    rows: TaskRows, rollout: RolloutRow, evaluations: Iterable[TaskRow], now: float, why: str
) -> tuple[RolloutRow, Transaction]:
    """All devices get the candidate, if they do not have it yet, and nothing takes it back."""
    last = structs.replace(rollout, step=len(rollout.plan.shares) - 1)
    change = Transaction(require=((task_key(rows.task), rows.row),))
    if rollout.share < 1:
        change = _step(rows, last, evaluations, now)
    ended = _ended(last, "finished", now, why)
    change = _baseline_released(rows, rollout, change)
    return ended, _with_row(rows.task, rollout, ended, change)


def roll_back(
    rows: TaskRows,
    rollout: RolloutRow,
    fallback: TaskConfig,
    lease_until: float,
    optimizer: BlobKey,
    evaluations: Iterable[TaskRow],
    now: float,
    why: str,
) -> tuple[RolloutRow, Transaction]:
    """Return to the settings from before, and to the baseline version of the model.

    `optimizer`: the key of a fresh optimizer state. If the model cannot be rolled back, because the
    task stops at its next version or the baseline version was deleted, only the settings are.
    """
    revised = owner.revise(
        rows, fallback, evaluations, now, revision=rows.row.signed, lease_until=lease_until
    )
    change, baseline = revised, rollout.baseline_version
    last = rows.row.config.stop.versions
    if last is not None and rows.newest.version + 1 >= last:
        why += f"; the model stays: the task stops at version {last}"
    elif baseline not in rows.versions:
        why += f"; the model stays: version {baseline} was deleted"
    else:
        restored = owner.rollback(rows, baseline, optimizer, now)
        change = Transaction(
            require=tuple((dict(revised.require) | dict(restored.require)).items()),
            put=tuple((dict(revised.put) | dict(restored.put)).items()),
            delete=restored.delete,
        )
    ended = _ended(rollout, "rolled_back", now, why)
    change = _baseline_released(rows, rollout, change)
    return ended, _with_row(rows.task, rollout, ended, change)


def end_with_task(row: TaskRow, rollout: RolloutRow, now: float) -> tuple[RolloutRow, Transaction]:
    """The task was over before the rollout."""
    ended = _ended(rollout, "ended", now, f"the task is {row.state}")
    task = row.config.task
    return ended, _with_row(task, rollout, ended, Transaction(require=((task_key(task), row),)))


def _ended(rollout: RolloutRow, state: RolloutState, now: float, why: str) -> RolloutRow:
    return structs.replace(rollout, state=state, why=why, ended=now, fallback=b"")


def _step(
    rows: TaskRows, rollout: RolloutRow, evaluations: Iterable[TaskRow], now: float
) -> Transaction:
    """Give the candidate to this step's share of the devices."""
    if rollout.share == 1:
        return owner.revise(
            rows,
            rollout.candidate,
            evaluations,
            now,
            revision=rollout.revision,
            lease_until=rollout.lease_until,
        )
    if rows.row.candidate is None:
        return owner.offer(rows, Candidate(rollout.candidate, rollout.share), evaluations, now)
    # The holder serves both revisions already: only selectors have to learn of it.
    candidate = structs.replace(rows.row.candidate, share=rollout.share)
    key = task_key(rows.task)
    changed = structs.replace(rows.row, candidate=candidate)
    return Transaction(require=((key, rows.row),), put=((key, changed),))


def _baseline_released(rows: TaskRows, rollout: RolloutRow, change: Transaction) -> Transaction:
    """Allow the baseline version to be deleted by age again, if only the rollout has marked it."""
    version = rows.versions.get(rollout.baseline_version)
    if version is None or not rollout.marks_baseline or version.restarts:
        return change
    released = owner.mark(rows.task, version, marked=False)
    return Transaction(
        require=tuple((dict(change.require) | dict(released.require)).items()),
        put=(*change.put, *released.put),
        delete=change.delete,
    )


def _with_row(
    task: TaskId, before: RolloutRow, after: RolloutRow, change: Transaction
) -> Transaction:
    key = rollout_key(task)
    return Transaction(
        require=(*change.require, (key, before)),
        put=(*change.put, (key, after)),
        delete=change.delete,
    )
