"""What a task's owner may change while it runs: pure transactions, all compare-and-set.

    running ◀──▶ paused          mark      keep a version whatever its age
       └──┬────────┘             rollback  go on from an earlier version
    completed, cancelled         evaluate  pin a version by a task of its own (DESIGN, evaluation)

Each requires the very rows that it was made from: one that comes late, or second, is refused and
changes nothing. Blobs that a transaction names are written by the caller before.

A roll-back counts no update twice. The buffers that were open are given up, their members stay
consumed, and the fence moves on, so that a holder which has not heard of it can write nothing.
Refused: what cannot come after the state that a task is in; versions that are gone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from hashlib import sha256

from msgspec import structs

from papaya.config import (
    AsyncFL,
    Evaluated,
    EvaluationPlan,
    OptimizerConfig,
    SecureAggregation,
    StopRule,
    TaskConfig,
)
from papaya.config.task import EVALUATION_CLIP, EVALUATION_MAX_STALENESS
from papaya.errors import OperatorError
from papaya.messages.base import BlobKey, TaskId
from papaya.messages.storage import (
    ConsumedRow,
    FenceRow,
    OptimizerRow,
    PointRow,
    RecordRow,
    Row,
    TaskRow,
    TaskState,
    Transaction,
    VersionRow,
    consumed_key,
    fence_key,
    holder_prefixes,
    optimizer_key,
    point_key,
    record_key,
    submission,
    task_key,
    version_key,
)

_NEXT: dict[TaskState, tuple[TaskState, ...]] = {
    "running": ("paused", "cancelled", "completed"),
    "paused": ("running", "cancelled", "completed"),
    "completed": (),
    "cancelled": (),
}
_MAX_TASK_ID = 64
_EVALUATION_ID = re.compile(r".*-eval-[0-9]+(-[0-9]+)?")


def owner_prefixes(task: TaskId) -> tuple[str, ...]:
    """What an owner decides by. Not who was consumed: that is most of what a holder reads."""
    return tuple(p for p in holder_prefixes(task) if not p.startswith("consumed/"))


class TaskRows:
    """The rows of one task, from one snapshot of `owner_prefixes` or more."""

    def __init__(self, task: TaskId, rows: Mapping[str, Row]) -> None:
        row = rows.get(task_key(task))
        fence, optimizer = rows.get(fence_key(task)), rows.get(optimizer_key(task))
        if not isinstance(row, TaskRow):
            raise OperatorError(f"there is no task {task}", hint="papaya task list")
        assert isinstance(fence, FenceRow)
        assert isinstance(optimizer, OptimizerRow)
        self.task = task
        self.row = row
        self.fence = fence
        self.optimizer = optimizer
        self.versions = {r.version: r for r in rows.values() if isinstance(r, VersionRow)}
        self.records = {r.target: r for r in rows.values() if isinstance(r, RecordRow)}

    @property
    def newest(self) -> VersionRow:
        return self.versions[max(self.versions)]

    def version(self, number: int) -> VersionRow:
        found = self.versions.get(number)
        if found is None:
            kept = ", ".join(str(version) for version in sorted(self.versions)[-8:])
            raise OperatorError(
                f"version {number} of task {self.task} is not there (any more)",
                hint=f"the newest that are kept: {kept}; mark a version to keep it for longer",
            )
        return found


def change_state(row: TaskRow, state: TaskState, now: float, why: str = "") -> Transaction:
    """Pause, resume, cancel or complete."""
    task = row.config.task
    if state not in _NEXT[row.state]:
        hint = f"papaya task show {task}"
        if row.is_over:
            hint = "submit a new task, from a checkpoint of this one: papaya task export --help"
        raise OperatorError(f"task {task} is {row.state}, it cannot become {state}", hint=hint)
    ended = now if state in ("completed", "cancelled") else 0.0
    changed = structs.replace(row, state=state, why=why, ended=ended)
    return Transaction(
        require=((task_key(task), row),),
        put=((task_key(task), changed),),
    )


def mark(task: TaskId, row: VersionRow, marked: bool) -> Transaction:
    """Keep a version, or let it go by age."""
    if row.restarts and not marked:
        raise OperatorError(
            f"task {task} was rolled back at version {row.version}, which has to stay",
            hint="updates from before it are told apart by it",
        )
    key = version_key(task, row.version)
    return Transaction(require=((key, row),), put=((key, structs.replace(row, marked=marked)),))


def rollback(rows: TaskRows, to_version: int, optimizer: BlobKey, now: float) -> Transaction:
    """A new head with the parameters of an old version and a fresh optimizer state.

    Every write of a holder requires the fence and the optimizer row; both change here, so whatever
    is on its way from the branch that is given up is refused.
    """
    task, old = rows.task, rows.version(to_version)
    if rows.row.is_over:
        raise OperatorError(
            f"task {task} is {rows.row.state}, it cannot be rolled back",
            hint="submit a new task, from a checkpoint of this one: papaya task export --help",
        )
    head = rows.newest.version + 1
    last = rows.row.config.stop.versions
    if last is not None and head >= last:
        raise OperatorError(
            f"a roll-back of task {task} makes version {head} and it stops at version {last}: "
            "nothing would be trained",
            hint="submit a new task, from a checkpoint of this one: papaya task export --help",
        )
    seq = rows.fence.seq + 1
    # Marked: it stays for as long as updates from before it must be told apart.
    version = VersionRow(head, old.parameters, seq, now, marked=True, restarts=True)
    given_up = tuple(m for target in sorted(rows.records) for m in rows.records[target].members)
    consumed = ((consumed_key(task, head), ConsumedRow(head, given_up)),) if given_up else ()
    # A record that is not there must still not be there, or its members would be forgotten.
    open_targets = sorted({head, head + 1, *rows.records})
    return Transaction(
        require=(
            (task_key(task), rows.row),
            (fence_key(task), rows.fence),
            (optimizer_key(task), rows.optimizer),
            (version_key(task, to_version), old),
            *((record_key(task, target), rows.records.get(target)) for target in open_targets),
        ),
        put=(
            (fence_key(task), FenceRow(seq, "", 0.0)),
            (version_key(task, head), version),
            (optimizer_key(task), OptimizerRow(head, optimizer)),
            *consumed,
        ),
        delete=tuple(record_key(task, target) for target in rows.records),
    )


# -- evaluation ---------------------------------------------------------------------------------


def evaluation_id(task: TaskId, version: int, earlier: int = 0) -> TaskId:
    """`<task>-eval-<version>`, with a number when there were earlier ones of this version.

    Never used twice: clients, aggregators and blobs may remember an evaluation for longer than its
    rows are there. Shortened so that it is a task id and still tells tasks apart.
    """
    suffix = f"-eval-{version}" + (f"-{earlier + 1}" if earlier else "")
    if len(task) + len(suffix) > _MAX_TASK_ID:
        digest = sha256(task.encode()).hexdigest()[:8]
        task = f"{task[: _MAX_TASK_ID - len(suffix) - 9]}-{digest}"
    return task + suffix


def is_evaluation_id(task: TaskId) -> bool:
    """Such a name is reserved."""
    return _EVALUATION_ID.fullmatch(task) is not None


def evaluation_config(
    config: TaskConfig, version: VersionRow, plan: EvaluationPlan, length: int
) -> TaskConfig:
    """An evaluation is an ordinary task of one step from zero: version 1 is the mean of what its
    clients upload, each counted as one example. `length` is that of an evaluation's vector.
    """
    secure = config.secure_aggregation
    clients = max(plan.clients, config.threshold or 1)  # no smaller sum may be seen
    return TaskConfig(
        task=evaluation_id(config.task, version.version, version.evaluations),
        concurrency=math.ceil(1.5 * clients),
        model_length=length,
        regime=AsyncFL(clients, EVALUATION_MAX_STALENESS),
        clip=None if secure is None else EVALUATION_CLIP,
        secure_aggregation=None if secure is None else SecureAggregation(config.threshold),
        optimizer=OptimizerConfig(kind="fedavg", rate=1.0),
        requirements=config.requirements,
        training_timeout_s=config.training_timeout_s,
        upload_timeout_s=config.upload_timeout_s,
        max_examples=1,
        participation_gap_s=0.0,
        commit_interval_s=config.commit_interval_s,
        stop=StopRule(versions=1, hours=plan.timeout_s / 3600),
        evaluates=Evaluated(
            config.task,
            version.version,
            version.parameters,
            config.model_length,
            config.max_examples,
        ),
    )


def evaluate(
    config: TaskConfig,
    version: VersionRow,
    parameters: BlobKey,
    optimizer: BlobKey,
    now: float,
    kept_until: float,
) -> Transaction:
    """Submit the evaluation that `config` describes; its version stays until `kept_until`, after
    which no ticket of the evaluation is valid.
    """
    assert config.evaluates is not None
    submitted = submission(config, parameters, optimizer, now)
    key = version_key(config.evaluates.task, version.version)
    pinned = structs.replace(
        version,
        kept_until=max(version.kept_until, kept_until),
        evaluations=version.evaluations + 1,
    )
    return Transaction(
        require=(*submitted.require, (key, version)), put=(*submitted.put, (key, pinned))
    )


def end_evaluation(
    row: TaskRow,
    state: TaskState,
    now: float,
    why: str,
    points: tuple[PointRow | None, PointRow] | None = None,
) -> Transaction:
    """It is over. `points`: the point of its version, as it was read and with the result."""
    pinned = row.config.evaluates
    assert pinned is not None
    ended = change_state(row, state, now, why)
    if points is None:
        return ended
    key = point_key(pinned.task, pinned.version)
    return Transaction(
        require=(*ended.require, (key, points[0])), put=(*ended.put, (key, points[1]))
    )


def forget(row: TaskRow, rows: Mapping[str, Row]) -> Transaction:
    """Remove every row of an evaluation that is over; its result stays as a point."""
    if not row.is_over or row.config.evaluates is None:
        raise OperatorError(
            f"task {row.config.task} is {row.state} and must not be forgotten",
            hint="only evaluations that ended are removed",
        )
    task, kinds = row.config.task, ("record", "version", "consumed")
    exact = (task_key(task), fence_key(task), optimizer_key(task))
    under = tuple(f"{kind}/{task}/" for kind in kinds)
    # One task's name may begin another's: a read by prefix finds both.
    own = tuple(key for key in rows if key in exact or key.startswith(under))
    return Transaction(require=((task_key(task), row),), delete=own)
