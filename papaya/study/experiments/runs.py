"""What experiments ask a lab for: runs of the machines, and learning along them.

Two experiments that ask for the same run get the same file (papaya/study/lab.py).

Paper, "Experimental Setup": SGD on the client, one local epoch with batches of 32, FedAdam on the
server; AsyncFL with K = 100 unless said otherwise, SyncFL with 30 % over-selection.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from papaya.config import AsyncFL, OptimizerConfig, SyncFL, TaskConfig
from papaya.learning.definition import ClientSGD
from papaya.sim.cluster import ClusterConfig
from papaya.sim.population import DEFAULT, PopulationConfig
from papaya.study.experiments.scale import OVER_SELECTION, Scale
from papaya.study.lab import Lab
from papaya.study.replay import EVALUATIONS, Curve, Rates
from papaya.study.run import UNBOUNDED, RecordingPlan, Run
from papaya.study.workloads.base import Workload
from papaya.study.workloads.paper import Model, paper_workload

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
