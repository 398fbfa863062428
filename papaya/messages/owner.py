"""What a task's owner can change while it runs: compare-and-set transactions.

    running ◀──▶ paused          mark      keep a version, whatever its age
       └──┬────────┘             rollback  continue from an earlier version
    completed, cancelled         evaluate  evaluate a version in a task of its own (docs/adr/0016)
       └──▶ deleted               revise    continue with other settings (docs/adr/0045)

Each transaction requires exactly the rows that it was made from. One that is late or repeated is
refused and changes nothing. The caller writes the blobs that a transaction names before it.

A roll-back counts no update twice: open buffers are dropped, their members stay consumed, and the
fence gets a new sequence number, so that the current holder can no longer write. Changes that are
not possible in the state of the task, and versions that no longer exist, are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from hashlib import sha256

import msgspec
from msgspec import structs

from papaya.config import (
    AsyncFL,
    Evaluated,
    EvaluationPlan,
    OptimizerConfig,
    Privacy,
    Requirements,
    SecureAggregation,
    StopRule,
    TaskConfig,
)
from papaya.config.evaluation import EVALUATION_CLIP, EVALUATION_MAX_STALENESS
from papaya.config.privacy import NORMS_CLIP, evaluation_clip
from papaya.errors import OperatorError
from papaya.messages.base import BlobKey, TaskId
from papaya.messages.storage import (
    Candidate,
    ConsumedRow,
    DeletedRow,
    EarlierRevision,
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
    deleted_key,
    fence_key,
    holder_prefixes,
    optimizer_key,
    point_key,
    record_key,
    submission,
    task_key,
    task_prefixes,
    version_key,
)

_NEXT: dict[TaskState, tuple[TaskState, ...]] = {
    "running": ("paused", "cancelled", "completed"),
    "paused": ("running", "cancelled", "completed"),
    "completed": (),
    "cancelled": (),
}
_MAX_TASK_ID = 64
_MAX_EARLIER = 8
_EVALUATION_ID = re.compile(r"(.*)-eval-[0-9]+(-[0-9]+)?")


def owner_prefixes(task: TaskId) -> tuple[str, ...]:
    """The rows that an owner needs. Leaves out the consumed rows, which are the largest."""
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
        if not self.versions:
            raise OperatorError(
                f"task {self.task} has no version any more: it was restored without its models",
                hint="submit a new task",
            )
        return self.versions[max(self.versions)]

    def version(self, number: int) -> VersionRow:
        found = self.versions.get(number)
        if found is None:
            kept = ", ".join(str(version) for version in sorted(self.versions)[-8:])
            raise OperatorError(
                f"task {self.task} has no version {number}, or it was deleted",
                hint=f"newest versions: {kept}; mark a version to keep it longer",
            )
        return found


def change_state(row: TaskRow, state: TaskState, now: float, why: str = "") -> Transaction:
    """Pause, resume, cancel or complete."""
    task = row.config.task
    if state not in _NEXT[row.state]:
        hint = f"papaya task show {task}"
        if row.is_over:
            hint = "submit a new task, from a checkpoint of this one: papaya task export --help"
        rest = f"{row.state} and cannot become {state}"
        problem = f"already {state}" if state == row.state else rest
        raise OperatorError(f"task {task} is {problem}", hint=hint)
    changed = structs.replace(row, state=state, why=why)
    if changed.is_over:
        changed = structs.replace(changed, ended=now, pseudonym_key=b"")
    return Transaction(
        require=((task_key(task), row),),
        put=((task_key(task), changed),),
    )


def revise(
    rows: TaskRows,
    config: TaskConfig,
    evaluations: Iterable[TaskRow],
    now: float,
    *,
    revision: int = 0,
    lease_until: float = 0.0,
) -> Transaction:
    """Replace the settings of a running task; its model, buffers and clients stay.

    A new fence makes the holder release the task. The next holder reads the new settings and adopts
    the clients, which finish under the settings that they joined under. Running `evaluations` of
    the task end: their clients have agreed to the previous settings. `revision` and
    `lease_until` are those that the owner has signed. The candidate of a rollout is no longer
    offered. Refused: settings that stored data depends on.
    """
    require_revisable(rows.row, config)
    old, candidate = rows.row.config, rows.row.candidate
    replaced = [old] if candidate is None else [old, candidate.config]
    replaced = [each for each in replaced if each.manifest != config.manifest or each is old]
    earlier = (*(EarlierRevision(each, now) for each in replaced), *rows.row.earlier)
    revised = structs.replace(
        rows.row,
        config=_as_read(config),
        earlier=earlier[:_MAX_EARLIER],
        revision=revision,
        lease_until=lease_until,
        candidate=None,
    )
    return _released(rows, revised, evaluations, now)


def offer(
    rows: TaskRows, candidate: Candidate, evaluations: Iterable[TaskRow], now: float
) -> Transaction:
    """Give the candidate of a rollout to a share of the devices, beside the current settings."""
    require_revisable(rows.row, candidate.config)
    offered = structs.replace(candidate, config=_as_read(candidate.config))
    return _released(rows, structs.replace(rows.row, candidate=offered), evaluations, now)


def require_revisable(row: TaskRow, config: TaskConfig) -> None:
    """Raises OperatorError if stored data depends on a setting that would change."""
    _require_running(row)
    old = row.config
    fixed = {
        "model_length": (old.model_length, config.model_length),
        "secure_aggregation": (old.is_secure, config.is_secure),
        "requirements.upload_bits": (_masked_bits(old), _masked_bits(config)),
        "privacy": (old.privacy is not None, config.privacy is not None),
        "aggregation.kind": (old.aggregation.stored_as, config.aggregation.stored_as),
        "optimizer.kind": (old.optimizer.kind, config.optimizer.kind),
        "optimizer.momentum from or to 0": (
            bool(old.optimizer.momentum),
            bool(config.optimizer.momentum),
        ),
    }
    if changed := [field for field, (before, after) in fixed.items() if before != after]:
        raise OperatorError(
            f"a revision cannot change {', '.join(changed)}",
            hint="start a new run with it: papaya task submit FILE --replace",
        )


def _masked_bits(config: TaskConfig) -> int:
    """Of the words of a stored sum; 0 in the clear, where sums are float32."""
    return config.upload_bits if config.is_secure else 0


def _released(
    rows: TaskRows, revised: TaskRow, evaluations: Iterable[TaskRow], now: float
) -> Transaction:
    """Write the task's row under a new fence, and end its running evaluations."""
    task = rows.task
    ended = [change_state(row, "cancelled", now, "the task was revised") for row in evaluations]
    return Transaction(
        require=(
            (task_key(task), rows.row),
            (fence_key(task), rows.fence),
            *(required for change in ended for required in change.require),
        ),
        put=(
            (task_key(task), revised),
            (fence_key(task), FenceRow(rows.fence.seq + 1, "", 0)),
            *(put for change in ended for put in change.put),
        ),
    )


def renew(
    rows: TaskRows,
    requirements: Requirements,
    evaluations: Iterable[TaskRow],
    lease_until: float,
) -> Transaction:
    """Replace the bundle by one with another lease for the same manifest. Nothing else changes.

    It requires the fence under which the bundle was stored: a later holder may have deleted it.
    `evaluations` of the task that are running name the new bundle too: the next holder deletes the
    one before.
    """
    _require_running(rows.row)
    before = [rows.row, *evaluations]
    own, *others = (_with_requirements(row, requirements) for row in before)
    after = [structs.replace(own, lease_until=lease_until), *others]
    return Transaction(
        require=(
            *((task_key(row.config.task), row) for row in before),
            (fence_key(rows.task), rows.fence),
        ),
        put=tuple((task_key(row.config.task), row) for row in after),
    )


def _with_requirements(row: TaskRow, requirements: Requirements) -> TaskRow:
    return structs.replace(row, config=structs.replace(row.config, requirements=requirements))


def _require_running(row: TaskRow) -> None:
    if row.is_over:
        raise OperatorError(
            f"task {row.config.task} is {row.state}",
            hint="start a new run: papaya task submit FILE",
        )


def _as_read(config: TaskConfig) -> TaskConfig:
    """As the store returns it: an int in a float field comes back as a float."""
    return msgspec.convert(msgspec.to_builtins(config), TaskConfig)


def mark(task: TaskId, row: VersionRow, marked: bool) -> Transaction:
    """Keep a version, or allow it to be deleted by age."""
    if row.restarts and not marked:
        raise OperatorError(
            f"version {row.version} of task {task} must stay protected: it records a rollback",
            hint="it is needed to recognize updates from before the rollback",
        )
    key = version_key(task, row.version)
    return Transaction(require=((key, row),), put=((key, structs.replace(row, marked=marked)),))


def rollback(rows: TaskRows, to_version: int, optimizer: BlobKey, now: float) -> Transaction:
    """A new version with the parameters of an old one and a fresh optimizer state.

    Every write of a holder requires the fence and the optimizer row. Both change here, so writes
    of the abandoned branch that are still on their way are refused.
    """
    task, old = rows.task, rows.version(to_version)
    if rows.row.is_over:
        raise OperatorError(
            f"task {task} is {rows.row.state} and cannot be rolled back",
            hint="submit a new task, from a checkpoint of this one: papaya task export --help",
        )
    head = rows.newest.version + 1
    last = rows.row.config.stop.versions
    if last is not None and head >= last:
        raise OperatorError(
            f"a rollback of task {task} would create version {head}, but the task "
            f"stops at version {last}: nothing would be trained",
            hint="submit a new task, from a checkpoint of this one: papaya task export --help",
        )
    seq = rows.fence.seq + 1
    # Marked, so that it is kept: it separates updates from before and after the roll-back.
    version = VersionRow(head, old.parameters, seq, now, marked=True, restarts=True)
    given_up = tuple(m for target in sorted(rows.records) for m in rows.records[target].members)
    consumed = ((consumed_key(task, head), ConsumedRow(head, given_up)),) if given_up else ()
    # Also require absent records to be absent: otherwise the members of a new one would be lost.
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
            (optimizer_key(task), OptimizerRow(head, optimizer, rows.optimizer.settled)),
            *consumed,
        ),
        delete=tuple(record_key(task, target) for target in rows.records),
    )


# -- evaluation ---------------------------------------------------------------------------------


def evaluation_id(task: TaskId, version: int, earlier: int = 0) -> TaskId:
    """`<task>-eval-<version>`, with a number if the version was evaluated before.

    An id is never used twice: clients, aggregators and blobs may refer to an evaluation after its
    rows are deleted. A long task id is shortened and gets a hash.
    """
    suffix = f"-eval-{version}" + (f"-{earlier + 1}" if earlier else "")
    if len(task) + len(suffix) > _MAX_TASK_ID:
        digest = sha256(task.encode()).hexdigest()[:8]
        task = f"{task[: _MAX_TASK_ID - len(suffix) - 9]}-{digest}"
    return task + suffix


def is_evaluation_id(task: TaskId) -> bool:
    """Is the id reserved for evaluations?"""
    return _EVALUATION_ID.fullmatch(task) is not None


def evaluated_in(task: TaskId) -> TaskId:
    """The task in the id of an evaluation; any other id as it is."""
    found = _EVALUATION_ID.fullmatch(task)
    return task if found is None else found[1]


def evaluation_config(
    config: TaskConfig,
    version: VersionRow,
    plan: EvaluationPlan,
    length: int,
    *,
    norms: bool = False,
) -> TaskConfig:
    """An evaluation is a task of one step that starts from zero: version 1 is the mean of what its
    clients upload, each counted as one example. `length` is the length of an evaluation's vector.
    `norms`: make a histogram of the norms of updates instead.
    """
    privacy = _evaluation_privacy(config, norms=norms)
    secure, is_private = config.secure_aggregation, privacy is not None
    clients = max(plan.clients, config.threshold or 1)  # no smaller sum may be revealed
    return TaskConfig(
        task=evaluation_id(config.task, version.version, version.measured),
        concurrency=math.ceil(1.5 * clients),
        model_length=length,
        regime=AsyncFL(clients, EVALUATION_MAX_STALENESS),
        clip=None if secure is None or is_private else EVALUATION_CLIP,
        secure_aggregation=None if secure is None else SecureAggregation(config.threshold),
        optimizer=OptimizerConfig(kind="fedavg", rate=1.0),
        requirements=config.requirements,
        training_timeout_s=config.training_timeout_s,
        upload_timeout_s=config.upload_timeout_s,
        max_examples=1,
        participation_gap_s=0.0,
        commit_interval_s=config.commit_interval_s,
        stop=StopRule(versions=1, hours=plan.timeout_s / 3600),
        privacy=privacy,
        evaluates=Evaluated(
            config.task,
            version.version,
            version.parameters,
            config.model_length,
            config.max_examples,
            config.metrics,
            private=None if config.privacy is None else config.privacy.terms.evaluation,
            norms=norms,
        ),
    )


def _evaluation_privacy(config: TaskConfig, *, norms: bool) -> Privacy | None:
    """The noise of an evaluation; none if the task has none."""
    terms = None if config.privacy is None else config.privacy.terms
    if terms is None:
        if norms:
            raise OperatorError(
                f"task {config.task} is not private: a histogram of norms has no noise",
                hint="set privacy and privacy.evaluation in the task's file",
            )
        return None
    if terms.evaluation is None:
        raise OperatorError(
            f"task {config.task} is private, and has no noise for evaluations",
            hint="papaya task update TASK --set privacy.evaluation.share=0.1",
        )
    return Privacy(
        clip=NORMS_CLIP if norms else evaluation_clip(len(config.metrics)),
        max_participations=terms.evaluation.max_participations,
        delta=terms.delta,
        noise_multiplier=terms.evaluation.noise_multiplier,
    )


def evaluate(
    row: TaskRow,
    config: TaskConfig,
    version: VersionRow,
    parameters: BlobKey,
    optimizer: BlobKey,
    now: float,
    kept_until: float,
    pseudonym_key: bytes = b"",
) -> Transaction:
    """Submit the evaluation that `config` describes, and keep its version until `kept_until`, when
    all tickets of the evaluation have expired.

    `row` is that of the evaluated task. It changes, so that no revision that was made without
    knowing this evaluation is applied after it.
    """
    assert config.evaluates is not None
    of, candidate = config.evaluates.task, row.candidate
    if candidate is not None:  # its devices evaluate too, under the revision that they have
        needs = candidate.config.requirements
        candidate = structs.replace(candidate, config=structs.replace(config, requirements=needs))
    submitted = submission(config, parameters, optimizer, now, pseudonym_key, candidate)
    key = version_key(of, version.version)
    counted = structs.replace(row, evaluations=row.evaluations + 1)
    norms = config.evaluates.norms
    pinned = structs.replace(
        version,
        kept_until=max(version.kept_until, kept_until),
        evaluations=version.evaluations + (not norms),
        histograms=version.histograms + norms,
    )
    return Transaction(
        require=(*submitted.require, (task_key(of), row), (key, version)),
        put=(*submitted.put, (task_key(of), counted), (key, pinned)),
    )


def end_evaluation(
    row: TaskRow,
    state: TaskState,
    now: float,
    why: str,
    points: tuple[PointRow | None, PointRow] | None = None,
) -> Transaction:
    """End an evaluation. `points`: the point of its version, as read and with the result."""
    pinned = row.config.evaluates
    assert pinned is not None
    ended = change_state(row, state, now, why)
    if points is None:
        return ended
    key = point_key(pinned.task, pinned.version)
    return Transaction(
        require=(*ended.require, (key, points[0])), put=(*ended.put, (key, points[1]))
    )


def delete(row: TaskRow, now: float) -> Transaction:
    """Delete a task that is over. The supervisor removes its rows and blobs, see `forget`.

    Its id must not be used again: tickets of its clients and keys of its blobs would match.
    """
    task = row.config.task
    if not row.is_over:
        raise OperatorError(
            f"task {task} is {row.state} and cannot be deleted",
            hint=f"end it first: papaya task cancel {row.name or task}",
        )
    return Transaction(
        require=((task_key(task), row), (deleted_key(task), None)),
        put=((deleted_key(task), DeletedRow(now)),),
    )


def forget(row: TaskRow, rows: Mapping[str, Row]) -> Transaction:
    """Delete these rows of a task that has ended; among them must be all of `holder_prefixes`.

    A holder that has not heard of the end may write until its fence is deleted. Rows that it
    writes after these were read would remain without a task, so these must not have changed.
    """
    if not row.is_over:
        raise OperatorError(
            f"task {row.config.task} is {row.state} and cannot be deleted",
            hint="only tasks that have ended can be deleted",
        )
    task = row.config.task
    exact = tuple(key.rstrip("/") for key in task_prefixes(task))
    under = tuple(f"{key}/" for key in exact)
    own = tuple(key for key in rows if key in exact or key.startswith(under))
    versions = [found.version for key in own if isinstance(found := rows[key], VersionRow)]
    head = max(versions, default=0)
    written = [optimizer_key(task), record_key(task, head + 1), record_key(task, head + 2)]
    written += [version_key(task, version) for version in versions]
    return Transaction(
        require=((task_key(task), row), *((key, rows.get(key)) for key in written)), delete=own
    )
