"""The runs that several experiments share, and how their rates are written.

Paper, "Experimental Setup": SGD on the client, one local epoch with batches of 32, FedAdam on the
server; AsyncFL with K = 100 unless said otherwise, SyncFL with 30 % over-selection.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from papaya.config import AsyncFL, OptimizerConfig, SyncFL
from papaya.experiments.lab import Lab, Scene, Trial
from papaya.experiments.scale import OVER_SELECTION, Scale
from papaya.learning.definition import ClientSGD
from papaya.sim.replay import Curve, Rates

CLIENT: Final = ClientSGD(rate=1.0)
LSTM_CLIENT: Final = ClientSGD(rate=2.0)
_EPSILON: Final = 1e-5
TUNING_SEED: Final = 1001  # tuning never sees a seed that is reported


class Reached(NamedTuple):
    """When a run met the target: infinity if it never did."""

    hours: float
    trips: float
    versions: float


def rates(rate: float, beta1: float = 0.0, client: ClientSGD = CLIENT) -> Rates:
    return Rates(client, OptimizerConfig(rate=rate, beta1=beta1, epsilon=_EPSILON))


def sync_scene(scale: Scale, concurrency: int, seed: int) -> Scene:
    regime = SyncFL(OVER_SELECTION)
    return Scene(regime=regime, concurrency=concurrency, seed=seed, versions=scale.rounds)


def async_scene(scale: Scale, concurrency: int, seed: int, goal: int | None = None) -> Scene:
    """The run at the paper's concurrency is long enough for Table 1 as well."""
    goal = scale.goal if goal is None else goal
    versions = scale.versions
    if goal != scale.goal:
        versions = max(scale.rounds, scale.versions * scale.goal // goal)
    if (concurrency, goal) == (scale.concurrency, scale.goal):
        versions = max(versions, math.ceil(scale.table_updates / goal))
    return Scene(regime=AsyncFL(goal), concurrency=concurrency, seed=seed, versions=versions)


def plain_scene(scale: Scale, seed: int) -> Scene:
    """SyncFL without over-selection: "we set concurrency equal to aggregation goal"."""
    rounds = math.ceil(scale.table_updates / scale.large_goal)
    clients = scale.large_goal
    return Scene(regime=SyncFL(0.0), concurrency=clients, seed=seed, versions=rounds)


def reached(
    lab: Lab,
    target: float,
    scenes: Sequence[Scene],
    chosen: Rates,
    *,
    stop_at: float | None = None,
) -> list[Reached]:
    """For each scene, when its run with these rates met the target, a perplexity.

    `stop_at`: the run goes on until it has met a lower one.
    """
    trials = trials_to(target if stop_at is None else stop_at, scenes, chosen)
    curves = lab.learn(trials)
    return [met(curves[trial], math.log(target)) for trial in trials]


def trials_to(target: float, scenes: Sequence[Scene], chosen: Rates) -> list[Trial]:
    """Runs that end when they have met the target, a perplexity."""
    return [Trial(scene=scene, rates=chosen, target=math.log(target)) for scene in scenes]


def met(curve: Curve, loss: float) -> Reached:
    """Between two judged versions, where a straight line meets the loss: how densely versions are
    judged must not matter.
    """
    point = curve.reached(loss)
    if point is None:
        return Reached(math.inf, math.inf, math.inf)
    before = curve.points[max(0, curve.points.index(point) - 1)]
    fallen = before.quality.all - point.quality.all
    share = (before.quality.all - loss) / fallen if fallen > 0 else 1.0
    return Reached(
        before.hours + share * (point.hours - before.hours),
        before.trips + share * (point.trips - before.trips),
        before.version + share * (point.version - before.version),
    )


def versions_per_hour(lab: Lab, scene: Scene) -> float:
    """Server updates, after the first tenth, in which the fleet starts."""
    [recording] = lab.record([scene]).values()
    created_s = recording.trace.created_s
    skipped = len(created_s) // 10
    return float(3600 * (len(created_s) - 1 - skipped) / (created_s[-1] - created_s[skipped]))


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


ONE_RATE: Final = (
    "One server rate for all: a smaller K makes more steps of the same size per hour. What tuning "
    "each of them changes, the experiment on speedup tells."
)


def tuning_seeds(scale: Scale) -> range:
    return range(TUNING_SEED, TUNING_SEED + scale.tuning_seeds)
