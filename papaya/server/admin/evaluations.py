"""Evaluations: when one is due, how it starts, and how its result is read.

An evaluation is a task that pins a version of another task. Its own version 1 is the mean over K
clients of (Σ loss, Σ examples, 1, Σ metrics) per bucket of data volume, so K times the mean are the
sums.
`papaya/messages/owner.py` has the rows, `papaya/learning/evaluation.py` the vector.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable
from secrets import token_bytes

import msgspec
import numpy as np
from msgspec import structs

from papaya.aggregator.sessions import pinned_until
from papaya.aggregator.shards import initial_blobs
from papaya.config import EvaluationPlan, ServerConfig, TaskConfig
from papaya.config.metrics import PERPLEXITY
from papaya.errors import ConfigError, OperatorError
from papaya.learning import parameters
from papaya.learning.evaluation import EvaluationResult, evaluation_length, summarize
from papaya.learning.parameters import FLOAT32, FLOAT64
from papaya.messages import owner
from papaya.messages.base import TaskId
from papaya.messages.storage import Outcome, PointRow, TaskRow, Transaction, VersionRow, task_key
from papaya.messages.tickets import PSEUDONYM_KEY_BYTES
from papaya.server.admin.blobs import AdminBlobs
from papaya.server.state_thread import AsyncState


def due_version(
    plan: EvaluationPlan, stored: Iterable[int], tried: Iterable[int], *, is_last: bool
) -> int | None:
    """The version to evaluate next, if any: the first one (a baseline), then every
    `every_versions`, and the last one.

    One evaluation runs at a time. Versions that became due meanwhile wait, as long as they are
    stored; of those that are gone, the next stored one takes the place.
    """
    versions = sorted(stored)
    last = max(tried, default=None)
    if last is None:
        return versions[0] if versions else None
    due = (version for version in versions if version >= last + plan.every_versions)
    newest = versions[-1] if versions and is_last and versions[-1] > last else None
    return next(due, newest)


def check_plan(config: TaskConfig) -> None:
    """Refuse a plan with which no evaluation could start."""
    if config.evaluation is None:
        return
    try:
        first = VersionRow(0, "", 0, 0.0)
        _config(config, first, config.evaluation)
    except ConfigError as error:
        raise OperatorError(
            f"no evaluation could start with the plan of task {config.task}: {error}",
            hint="change evaluation.clients or evaluation.timeout_s",
        ) from error


def _config(config: TaskConfig, version: VersionRow, plan: EvaluationPlan) -> TaskConfig:
    return owner.evaluation_config(config, version, plan, evaluation_length(len(config.metrics)))


def of(task: TaskId, rows: Iterable[TaskRow]) -> list[TaskRow]:
    """The evaluations of a task among these rows."""
    return [
        row
        for row in rows
        if row.config.evaluates is not None and row.config.evaluates.task == task
    ]


async def running(state: AsyncState, task: TaskId, version: VersionRow) -> TaskId | None:
    """The evaluation of this version that is still running, if any."""
    if version.evaluations == 0:
        return None
    last = owner.evaluation_id(task, version.version, version.evaluations - 1)
    row = (await state.read((task_key(last),))).get(task_key(last))
    return last if isinstance(row, TaskRow) and not row.is_over else None


async def start(
    transact: Callable[[Transaction], Awaitable[Outcome]],
    blobs: AdminBlobs,
    row: TaskRow,
    version: VersionRow,
    plan: EvaluationPlan,
    now: float,
    server: ServerConfig,
) -> tuple[TaskConfig, Outcome]:
    """Submit an evaluation of one version; refused if the row of the task or version changed."""
    evaluation = _config(row.config, version, plan)
    initial = initial_blobs(evaluation, np.zeros(evaluation.model_length, FLOAT32))
    for key, data in initial:
        await blobs.put(key, data)
    kept_until = pinned_until(evaluation, now, server)
    blob_keys = (initial[0][0], initial[1][0])
    change = owner.evaluate(
        row, evaluation, version, *blob_keys, now, kept_until, token_bytes(PSEUDONYM_KEY_BYTES)
    )
    return evaluation, await transact(change)


async def result(blobs: AdminBlobs, evaluation: TaskRow, version: VersionRow) -> EvaluationResult:
    """The result in the evaluation's version 1; ProtocolError if clients sent invalid sums."""
    data = await blobs.get(version.parameters)
    pinned = evaluation.config.evaluates
    assert pinned is not None
    mean = parameters.decode(data, evaluation.config.model_length).astype(FLOAT64)
    sums = mean * evaluation.config.aggregation_goal
    return summarize(sums, pinned.max_examples, pinned.metrics)


def with_result(point: PointRow, found: EvaluationResult, *, perplexity: bool) -> PointRow:
    """The point with a result; with exp(loss) if the task asks for it."""
    value = found.all.perplexity if perplexity else math.inf
    return structs.replace(
        point,
        loss=found.all.loss,
        perplexity=value if value < math.inf else None,
        metrics=found.all.metrics,
        evaluated=msgspec.json.encode(found).decode(),
    )


def metrics_of(point: PointRow) -> dict[str, float]:
    """The metrics of a point, with the perplexity if it has one."""
    derived = {} if point.perplexity is None else {PERPLEXITY: point.perplexity}
    return derived | point.metrics
