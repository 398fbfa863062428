"""Evaluations: when one is due, how it starts, and how its result is read.

An evaluation is a task that pins a version of another task. Its own version 1 is the mean over K
clients of (Σ loss, Σ examples, 1, Σ metrics) per bucket of data volume, so K times the mean are the
sums. The vectors of private tasks are others.
`papaya/messages/owner.py` has the rows, `papaya/learning/evaluation.py` and
`papaya/learning/private_evaluation.py` the vectors.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from secrets import token_bytes

import msgspec
import numpy as np
from msgspec import structs

from papaya.aggregator.sessions import pinned_until
from papaya.aggregator.shards import initial_blobs
from papaya.config import Evaluated, EvaluationPlan, ServerConfig, TaskConfig
from papaya.config.metrics import PERPLEXITY
from papaya.config.privacy import NORMS_CLIP
from papaya.errors import ConfigError, OperatorError
from papaya.learning import parameters
from papaya.learning.evaluation import (
    EvaluationResult,
    evaluation_length,
    summarize,
    with_deviation,
)
from papaya.learning.parameters import FLOAT32, FLOAT64
from papaya.learning.private_evaluation import (
    BINS,
    histogram,
    private_evaluation_length,
    summarize_private,
)
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


def _config(
    config: TaskConfig, version: VersionRow, plan: EvaluationPlan, *, norms: bool = False
) -> TaskConfig:
    length = evaluation_length if config.privacy is None else private_evaluation_length
    values = BINS if norms else length(len(config.metrics))
    return owner.evaluation_config(config, version, plan, values, norms=norms)


def of(task: TaskId, rows: Iterable[TaskRow]) -> list[TaskRow]:
    """The evaluations of a task among these rows."""
    return [
        row
        for row in rows
        if row.config.evaluates is not None and row.config.evaluates.task == task
    ]


async def running(state: AsyncState, task: TaskId, version: VersionRow) -> TaskId | None:
    """The evaluation or histogram of this version that is still running, if any."""
    if version.measured == 0:
        return None
    last = owner.evaluation_id(task, version.version, version.measured - 1)
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
    *,
    norms: bool = False,
) -> tuple[TaskConfig, Outcome]:
    """Submit an evaluation of one version, or a histogram of norms; refused if the row of the task
    or version changed.
    """
    evaluation = _config(row.config, version, plan, norms=norms)
    initial = initial_blobs(evaluation, np.zeros(evaluation.model_length, FLOAT32))
    for key, data in initial:
        await blobs.put(key, data)
    kept_until = pinned_until(evaluation, now, server)
    blob_keys = (initial[0][0], initial[1][0])
    change = owner.evaluate(
        row, evaluation, version, *blob_keys, now, kept_until, token_bytes(PSEUDONYM_KEY_BYTES)
    )
    return evaluation, await transact(change)


async def with_result(
    point: PointRow, blobs: AdminBlobs, evaluation: TaskRow, version: VersionRow, of: TaskConfig
) -> tuple[PointRow, str]:
    """The point with the result in the evaluation's version 1, and the result in words.

    ProtocolError if clients sent invalid sums.
    """
    data = await blobs.get(version.parameters)
    config, pinned = evaluation.config, evaluation.config.evaluates
    assert pinned is not None
    clients = config.aggregation_goal
    sums = parameters.decode(data, config.model_length).astype(FLOAT64) * clients
    if pinned.private is None:
        found = summarize(sums, pinned.max_examples, pinned.metrics)
    elif pinned.norms:
        counts, deviation = histogram(sums, clients, pinned.private), _norms_deviation(pinned)
        measured = structs.replace(point, norms=counts, norms_deviation=deviation)
        return measured, f"a histogram of the norms of {clients} clients"
    else:
        found = summarize_private(sums, clients, pinned.private, pinned.metrics)
    measured = _evaluated(point, found, perplexity=of.perplexity)
    values = {"loss": found.all.loss, **found.all.metrics}
    shown = ", ".join(
        f"{name} {with_deviation(value, found.all.deviations.get(name))}"
        for name, value in values.items()
    )
    return measured, f"{shown} over {found.all.clients:.0f} clients"


def _norms_deviation(pinned: Evaluated) -> float:
    assert pinned.private is not None
    return NORMS_CLIP * pinned.private.noise_multiplier


def _evaluated(point: PointRow, found: EvaluationResult, *, perplexity: bool) -> PointRow:
    """The point with a result; with exp(loss) if the task asks for it."""
    value, deviations = found.all.perplexity if perplexity else math.inf, found.all.deviations
    if deviations and value < math.inf:
        deviations = deviations | {PERPLEXITY: value * deviations["loss"]}
    return structs.replace(
        point,
        loss=found.all.loss,
        perplexity=value if value < math.inf else None,
        metrics=found.all.metrics,
        deviations=deviations,
        evaluated=msgspec.json.encode(found).decode(),
    )


def has_result(evaluation: TaskRow, points: Mapping[int, PointRow]) -> bool:
    """Does the history of the evaluated task have the result of this evaluation?"""
    pinned = evaluation.config.evaluates
    found = None if pinned is None else points.get(pinned.version)
    if found is None or pinned is None:
        return False
    return bool(found.norms if pinned.norms else found.evaluated)


def metrics_of(point: PointRow) -> dict[str, float]:
    """The metrics of a point, with the perplexity if it has one."""
    derived = {} if point.perplexity is None else {PERPLEXITY: point.perplexity}
    return derived | point.metrics
