"""Learning along a trace: the sums and steps of the aggregator, with updates that are trained.

The order of members, their weights, their staleness and their start versions are the trace's, the
sum and the step are those of `papaya.learning`: no rule of the protocol is written here again. The
members of one version are trained in one batch, each from the version that it had downloaded; a
version is forgotten when the last member that starts from it has trained.

Refused: an update that the server would refuse (it would have counted another one instead), so a
run that diverges ends here with what it learnt until then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from papaya.config import OptimizerConfig
from papaya.errors import OperatorError, UpdateRefused
from papaya.learning.definition import ClientSGD
from papaya.learning.parameters import Vector
from papaya.learning.server_optimizer import server_optimizer
from papaya.learning.weighting import Contribution, WeightedSum, admit, clipped, norm
from papaya.sim.trace import Trace
from papaya.sim.workloads.base import Matrix, Quality, Workload

_EVALUATIONS = 200
_NORMS_KEPT = 4096
_STAYS = 3


class Rates(Struct, frozen=True):
    """What a sweep varies along one trace."""

    client: ClientSGD
    optimizer: OptimizerConfig = OptimizerConfig()
    clip: float | None = None


class Point(Struct, frozen=True):
    """A judged version."""

    version: int
    hours: float
    updates: int
    trips: int
    quality: Quality


class Curve(Struct, frozen=True):
    """How a model got better. `diverged` says why learning ended early, if it did.

    `norms` are the L2 norms of the first client updates.
    """

    workload: str
    rates: Rates
    points: tuple[Point, ...]
    norms: tuple[float, ...]
    diverged: str | None = None

    def reached(self, loss: float) -> Point | None:
        """The first judged version whose loss for all clients is at most this, and stays there
        on average: single lucky versions do not count.
        """
        losses = np.array([point.quality.all for point in self.points])
        for index in range(len(losses)):
            if losses[index] <= loss and losses[index : index + _STAYS].mean() <= loss:
                return self.points[index]
        return None


def learn(
    trace: Trace,
    workload: Workload,
    rates: Rates,
    *,
    target: float | None = None,
    evaluations: int = _EVALUATIONS,
    until: int | None = None,
) -> Curve:
    """Replay the trace, or until version `until`, or until `target` is reached and kept.

    Judged are version 0, the last, and `evaluations` versions in between.
    """
    last = trace.versions if until is None else min(until, trace.versions)
    judged = _judged(last, evaluations)
    points: list[Point] = []
    norms: list[float] = []
    diverged = None
    streak = 0
    try:
        for version, parameters in _versions(trace, workload, rates, last, norms):
            if version not in judged:
                continue
            quality = workload.evaluate(parameters)
            points.append(_point(trace, version, quality))
            if not math.isfinite(quality.all):
                diverged = f"the loss of version {version} is not finite"
                break
            streak = streak + 1 if target is not None and quality.all <= target else 0
            if streak > _STAYS:
                break
    except (OperatorError, UpdateRefused) as error:
        diverged = str(error)
    return Curve(workload.name, rates, tuple(points), tuple(norms), diverged)


def _versions(
    trace: Trace, workload: Workload, rates: Rates, last: int, norms: list[float]
) -> Iterator[tuple[int, Vector]]:
    """Every version in turn, from version 0 on."""
    optimizer = server_optimizer(rates.optimizer)
    parameters = workload.initial(trace.seed)
    state = optimizer.initial_state(workload.length)
    models = {0: parameters}
    last_use = _last_use(trace, last)
    yield 0, parameters
    for version in range(1, last + 1):
        updates = _train(trace, workload, rates, models, version)
        total = _sum(trace, rates, version, updates, norms)
        parameters, state = optimizer.step(parameters, total.mean(), state)
        models[version] = parameters
        for old in last_use.get(version, ()):
            del models[old]
        yield version, parameters


def _train(
    trace: Trace, workload: Workload, rates: Rates, models: dict[int, Vector], version: int
) -> Matrix:
    members = trace.members(version)
    starts, index = np.unique(trace.start[members], return_inverse=True)
    chosen = [models[start] for start in starts.tolist()]
    return workload.train(chosen, index, trace.clients.take(members), rates.client)


def _sum(
    trace: Trace, rates: Rates, version: int, updates: Matrix, norms: list[float]
) -> WeightedSum:
    members = trace.members(version)
    examples, staleness = trace.clients.examples[members], trace.staleness[members]
    contributions = []
    for row, n, s in zip(updates, examples.tolist(), staleness.tolist(), strict=True):
        if len(norms) < _NORMS_KEPT:
            norms.append(norm(row))
        update = row if rates.clip is None else clipped(row, rates.clip)
        contributions.append(Contribution(admit([update.data], len(row), rates.clip), n, s))
    total = WeightedSum.zero(updates.shape[1])
    total.add_all(contributions)
    return total


def _last_use(trace: Trace, last: int) -> dict[int, list[int]]:
    """version -> versions from which nobody trains after it, so that they can be forgotten.

    The newest version is always needed for the next step; it is never listed under itself.
    """
    final: dict[int, int] = {version: version + 1 for version in range(last)}
    for version in range(1, last + 1):
        for start in np.unique(trace.start[trace.members(version)]).tolist():
            final[start] = max(final[start], version)
    found: dict[int, list[int]] = {}
    for start, version in final.items():
        found.setdefault(version, []).append(start)
    return found


def _judged(last: int, evaluations: int) -> frozenset[int]:
    if last <= evaluations:
        return frozenset(range(last + 1))
    return frozenset(np.rint(np.linspace(0, last, evaluations + 1)).astype(int).tolist())


def _point(trace: Trace, version: int, quality: Quality) -> Point:
    return Point(
        version=version,
        hours=float(trace.created_s[version]) / 3600,
        updates=int(trace.first[version + 1]),
        trips=int(trace.trips[version]),
        quality=quality,
    )
