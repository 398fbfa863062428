"""What experiments ask a lab for: runs of the machines, and learning along them.

Two experiments that ask for the same run get the same file (papaya/study/lab.py).

Paper, "Experimental Setup": SGD on the client, one local epoch with batches of 32, FedAdam on the
server; AsyncFL with K = 100 unless said otherwise, SyncFL with 30 % over-selection.

`Scale` is the size of a reproduction. Server rates are tuned on seeds that are never reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from statistics import fmean
from typing import Final, NamedTuple

from msgspec import Struct

from papaya.config import AsyncFL, OptimizerConfig, SyncFL, TaskConfig
from papaya.learning.definition import ClientSGD
from papaya.sim.cluster import ClusterConfig
from papaya.sim.population import DEFAULT, PopulationConfig
from papaya.study.experiments.result import Check, number
from papaya.study.lab import Lab
from papaya.study.replay import EVALUATIONS, Curve, Rates
from papaya.study.run import UNBOUNDED, RecordingPlan, Run
from papaya.study.workloads.base import Workload
from papaya.study.workloads.lstm import Model, paper_workload


class Scale(Struct, frozen=True, kw_only=True):
    """All inputs of a reproduction that depend on its size.

    `QUICK` takes about ten minutes, `FULL` is the paper's size. Learning rates and targets of
    `QUICK` are larger because its runs are shorter. `concurrency` and `goal` are the paper's.

    most_clients       the paper's largest comparison of update frequencies
    large_goal         its K without the advantage of small K; clients of a plain SyncFL round
    tuning_seeds       other seeds than those reported, on which rates are chosen
    rounds, versions   how far SyncFL, and AsyncFL at the largest concurrency, are recorded
    common_rate        the one server rate of the first protocol
    sync_grid, async_grid   server rates that are tried, neighbours at most a factor 1.5 apart
    target             perplexity for all clients whose time is measured, with the common rate
    tuned_target       the same for tuned rates: lower, or it would be met within a few rounds
    table_updates      counted updates after which Table 1 is taken
    window_hours       of runs in which nothing is learnt, after the start
    fixed_hour         at which the losses of the training curves are compared
    curve_seeds        how many seeds have training curves: those are of an LSTM, and slow
    """

    name: str
    concurrency: int = 1300
    most_clients: int = 2300
    goal: int = 100
    large_goal: int = 1000
    seeds: int
    tuning_seeds: int
    concurrencies: tuple[int, ...]
    goals: tuple[int, ...]
    rounds: int
    versions: int
    table_updates: int
    window_hours: float
    fixed_hour: float
    curve_seeds: int
    common_rate: float
    target: float
    tuned_target: float
    sync_grid: tuple[float, ...]
    async_grid: tuple[float, ...]

    def table_versions(self, goal: int) -> int:
        """How many versions hold the updates of Table 1."""
        return math.ceil(self.table_updates / goal)


def _grid(low: float, count: int, step: float = 1.5) -> tuple[float, ...]:
    return tuple(low * step**index for index in range(count))


QUICK: Final = Scale(
    name="quick",
    seeds=2,
    tuning_seeds=1,
    concurrencies=(130, 650, 1300, 2600),
    goals=(100, 1000, 1300),
    rounds=40,
    versions=300,
    table_updates=40_000,
    window_hours=0.25,
    fixed_hour=0.5,
    curve_seeds=1,
    common_rate=0.008,
    target=47.0,
    tuned_target=30.0,
    sync_grid=_grid(0.0133, 9),
    async_grid=_grid(0.002, 10),
)

FULL: Final = Scale(
    name="full",
    seeds=5,
    tuning_seeds=1,
    concurrencies=(130, 260, 520, 1300, 2600),
    goals=(100, 200, 400, 700, 1000, 1300),
    rounds=600,
    versions=3_000,
    table_updates=1_000_000,
    window_hours=2.0,
    fixed_hour=10.0,
    curve_seeds=5,
    common_rate=0.001,  # Adam's default
    target=40.0,
    tuned_target=25.0,
    sync_grid=_grid(0.005, 11),
    async_grid=_grid(0.0007, 12),
)

SCALES: Final = {scale.name: scale for scale in (QUICK, FULL)}
OVER_SELECTION: Final = 0.3


SUPPLY: Final = 3.0  # a fleet this large has more than enough devices for a round to start
START_S: Final = 600.0  # a window begins after it
DRAIN_S: Final = 300.0  # longer than a timeout: clients assigned before have ended
_MODEL_LENGTH: Final = 4  # of what is uploaded while a trace is recorded


def until_versions(
    regime: AsyncFL | SyncFL, concurrency: int, seed: int, versions: int
) -> RecordingPlan:
    """Record as many updates as this many versions hold."""
    cluster = _cluster(regime, concurrency, DEFAULT)
    return RecordingPlan(
        cluster=cluster, seed=seed, updates=versions * cluster.tasks[0].aggregation_goal
    )


def window(
    regime: AsyncFL | SyncFL,
    concurrency: int,
    seed: int,
    hours: float,
    population: PopulationConfig = DEFAULT,
) -> RecordingPlan:
    """Record `hours` after the start, and until all clients assigned in them have ended."""
    cluster = _cluster(regime, concurrency, population)
    return RecordingPlan(cluster=cluster, seed=seed, hours=hours + START_S / 3600, drain_s=DRAIN_S)


def learning(
    plan: RecordingPlan,
    rates: Rates,
    *,
    model: Model = "embedding",
    updates: int = UNBOUNDED,
    target: float | None = None,
    evaluations: int = EVALUATIONS,
) -> Run:
    """Learn until `target` (a loss) is reached and kept, from at most `updates`."""
    return Run(
        recording_plan=plan,
        workload=model,
        data=model,  # all else about it is code
        rates=rates,
        updates=updates,
        target=target,
        evaluations=evaluations,
    )


def workload_of(run: Run) -> Workload:
    return paper_workload(run.workload, run.recording_plan.cluster.population)


def _cluster(
    regime: AsyncFL | SyncFL, concurrency: int, population: PopulationConfig
) -> ClusterConfig:
    task = TaskConfig(
        task="experiment",
        concurrency=concurrency,
        model_length=_MODEL_LENGTH,
        regime=regime,
        durability="step",  # the paper's
    )
    return ClusterConfig(tasks=(task,), population=population, supply=SUPPLY)


# -- runs that several experiments share --------------------------------------------------------

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


def sync_plan(scale: Scale, concurrency: int, seed: int) -> RecordingPlan:
    """The run at the paper's concurrency is long enough for Table 1 as well. Tuned rates need half
    the rounds of the common one, or fewer.
    """
    rounds = scale.rounds if seed < TUNING_SEED else scale.rounds // 2
    if concurrency == scale.concurrency:
        rounds = max(rounds, scale.table_versions(scale.large_goal))
    return until_versions(SyncFL(OVER_SELECTION), concurrency, seed, rounds)


def async_plan(scale: Scale, concurrency: int, seed: int, goal: int | None = None) -> RecordingPlan:
    """Here too. Elsewhere about the same hours at every concurrency, and enough versions for one
    rate at all of them.
    """
    goal = scale.goal if goal is None else goal
    if (concurrency, goal) == (scale.concurrency, scale.goal):
        versions = scale.table_versions(goal)
    elif goal == scale.goal:
        most = scale.concurrencies[-1]
        versions = max(3 * scale.rounds, scale.versions * concurrency // most)
    else:
        versions = max(scale.rounds, scale.versions * scale.goal // goal)
    return until_versions(AsyncFL(goal), concurrency, seed, versions)


def plain_plan(scale: Scale, seed: int) -> RecordingPlan:
    """SyncFL without over-selection: "we set concurrency equal to aggregation goal"."""
    rounds = scale.table_versions(scale.large_goal)
    return until_versions(SyncFL(0.0), scale.large_goal, seed, rounds)


def reached(
    lab: Lab,
    target: float,
    plans: Sequence[RecordingPlan],
    chosen: Rates,
    *,
    stop_at: float | None = None,
) -> list[Reached]:
    """For each plan, when its run with these rates met the target, a perplexity.

    `stop_at`: the run goes on until it has met a lower one.
    """
    runs = runs_to(target if stop_at is None else stop_at, plans, chosen)
    return [met(outcome.curve, math.log(target)) for outcome in lab.learn(runs)]


def runs_to(target: float, plans: Sequence[RecordingPlan], chosen: Rates) -> list[Run]:
    """Runs that end when they have met the target, a perplexity."""
    return [learning(plan, chosen, target=math.log(target)) for plan in plans]


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


def versions_per_hour(lab: Lab, plan: RecordingPlan) -> float:
    """Server updates, after the first tenth, in which the fleet starts."""
    [recording] = lab.record([plan])
    created_s = recording.trace.created_s
    skipped = len(created_s) // 10
    return float(3600 * (len(created_s) - 1 - skipped) / (created_s[-1] - created_s[skipped]))


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


ONE_RATE: Final = (
    "One server rate for all: a smaller K makes more steps of the same size per hour. The "
    "experiment on speedup shows what tuning each of them changes."
)


def tuning_seeds(scale: Scale) -> range:
    return range(TUNING_SEED, TUNING_SEED + scale.tuning_seeds)


class Tuned(NamedTuple):
    """The best rates of a grid. `score`: the mean over the tuning seeds, the lower the better.

    An optimum on the edge of the grid may not be the optimum, so it fails the check.
    """

    rates: Rates
    score: float
    is_on_edge: bool

    def check(self, name: str) -> Check:
        optimizer = self.rates.optimizer
        place = f"rate {number(optimizer.rate or 0.0)}, first moment {optimizer.beta1:g}"
        return Check(f"{name}: the best rate lies inside the grid", not self.is_on_edge, place)


def tuned_for_time(
    lab: Lab, scale: Scale, plans: Sequence[RecordingPlan], grid: Sequence[float]
) -> Tuned:
    """The fewest hours to the target of tuned rates."""
    loss = math.log(scale.tuned_target)
    return tuned(lab, plans, grid, (0.0, 0.9), lambda curve: met(curve, loss).hours, target=loss)


def tuned_for_loss(
    lab: Lab, plans: Sequence[RecordingPlan], grid: Sequence[float], updates: int
) -> Tuned:
    """The lowest loss for all clients after so many updates, which is what is reported too."""

    def last(curve: Curve) -> float:
        return curve.points[-1].quality.all

    return tuned(lab, plans, grid, (0.9,), last, updates=updates)


def tuned(
    lab: Lab,
    plans: Sequence[RecordingPlan],
    grid: Sequence[float],
    moments: Sequence[float],
    score: Callable[[Curve], float],
    *,
    target: float | None = None,
    updates: int = UNBOUNDED,
) -> Tuned:
    """The best of all rates and first moments, by the mean score over the plans."""
    candidates = [rates(rate, beta1) for beta1, rate in product(moments, grid)]
    outcomes = lab.learn(
        learning(plan, chosen, updates=updates, target=target)
        for chosen in candidates
        for plan in plans
    )
    scores = {
        chosen: fmean(_score(each.curve, score) for each in outcomes if each.run.rates == chosen)
        for chosen in candidates
    }
    best = min(candidates, key=lambda chosen: scores[chosen])
    is_on_edge = best.optimizer.rate in (grid[0], grid[-1])
    return Tuned(best, scores[best], is_on_edge or math.isinf(scores[best]))


def _score(curve: Curve, score: Callable[[Curve], float]) -> float:
    return math.inf if curve.diverged else score(curve)
