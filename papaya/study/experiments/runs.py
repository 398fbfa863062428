"""What experiments ask a lab for: runs of the machines, and learning along them.

Two experiments that ask for the same run get the same file (papaya/study/lab.py).

Paper, "Experimental Setup": SGD on the client, one local epoch with batches of 32, FedAdam on the
server; AsyncFL with K = 100 unless said otherwise, SyncFL with 30 % over-selection.

`Scale` is the size of a reproduction. Its inputs follow rules that look at no outcome:

- dialect: the first values that were written down, before any experiment existed (`DIALECTS`); the
  experiment on sensitivity repeats the learning claims with none and with a stronger one;
- real text: the documentation of Python's standard library, or what the user names; who has how
  much data, and how fast devices are, is that of the population, so recordings serve both;
- server rate: Adam's default, as in the paper; a shorter run has a proportionally larger one;
- target: where SyncFL at the paper's concurrency stands after three quarters of its rounds
  (`Target`), on seeds that are never reported; so a target is as deep in training as a run allows;
- first moment: "we use Adam's default learning rate and tune the first-moment parameter", from
  {0, 0.9}, for each regime, on seeds that are never reported;
- a seed decides who takes part and when, the language, its dialect and everybody's data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
from msgspec import Struct, structs

from papaya.config import AsyncFL, OptimizerConfig, SyncFL, TaskConfig
from papaya.errors import InvariantError
from papaya.learning.definition import ClientSGD
from papaya.sim.cluster import ClusterConfig
from papaya.sim.population import DEFAULT, PopulationConfig
from papaya.study.experiments.result import Check, Finding, Ratios, bounded_ratios, number
from papaya.study.lab import Lab
from papaya.study.replay import EVALUATIONS, STAYS, Curve, Point, Rates
from papaya.study.run import RecordingPlan, Run, RunResult
from papaya.study.trace import UNBOUNDED
from papaya.study.workloads.base import Workload
from papaya.study.workloads.language import LanguageWorkload
from papaya.study.workloads.paper import Dialect, Model, corpus_file, is_text, paper_workload


class Scale(Struct, frozen=True, kw_only=True):
    """All inputs of a reproduction that depend on its size. `concurrency` and `goal` are the
    paper's.

    most_clients       the paper's largest comparison of update frequencies
    large_goal         its K without the advantage of small K; clients of a plain SyncFL round
    tuning_seeds       other seeds than those reported, on which rates are chosen
    rounds             how far SyncFL is recorded; AsyncFL follows from it (`async_plan`)
    sync_grid, async_grid   server rates that are tried, neighbours a constant factor apart
    table_updates      counted updates after which Table 1 is taken
    window_hours       of runs in which nothing is learnt, after the start
    fixed_hour         at which the losses of the training curves are compared
    curve_model        the model of the training curves
    lstm               the model of the speedup on real text, at the concurrencies that follow
    languages          with which the experiment on sensitivity repeats each run
    left_out           experiments that `all` leaves out: they run only by name
    text               the name of the real text (workloads/paper.py); none if empty
    """

    name: str
    concurrency: int = 1300
    most_clients: int = 2300
    goal: int = 100
    large_goal: int = 1000
    seeds: int = 5
    tuning_seeds: int = 1
    concurrencies: tuple[int, ...]
    goals: tuple[int, ...]
    rounds: int
    table_updates: int
    window_hours: float
    fixed_hour: float
    sync_grid: tuple[float, ...]
    async_grid: tuple[float, ...]
    curve_model: Model
    lstm: Model
    lstm_concurrencies: tuple[int, ...]
    languages: int = 5
    left_out: tuple[str, ...] = ()
    text: str = ""

    @property
    def data(self) -> tuple[str, ...]:
        """What learning experiments learn: the synthetic language, and real text."""
        return (HEADLINE, self.text) if self.text else (HEADLINE,)

    @property
    def common_rate(self) -> float:
        """The one server rate of the paper's protocol: rate times rounds is that of `FULL`."""
        return ADAMS_RATE * _FULL_ROUNDS / self.rounds

    def table_versions(self, goal: int) -> int:
        """How many versions hold the updates of Table 1."""
        return math.ceil(self.table_updates / goal)


def _grid(low: float, count: int, step: float) -> tuple[float, ...]:
    return tuple(low * step**index for index in range(count))


ADAMS_RATE: Final = 0.001  # the default of Adam
_FULL_ROUNDS: Final = 600


def _shorter(name: str, rounds: int) -> Scale:
    """A scale with fewer rounds than the paper: rates, updates and hours follow from `rounds`."""
    rate = ADAMS_RATE * _FULL_ROUNDS / rounds
    return Scale(
        name=name,
        concurrencies=(130, 1300, 2600),
        goals=(100, 1000),
        rounds=rounds,
        table_updates=1000 * rounds,
        window_hours=0.25,
        fixed_hour=0.35 * rounds / 20,
        # Powers of two of the common rate. AsyncFL makes ten steps where SyncFL makes one.
        sync_grid=_grid(rate / 2, 6, 2.0),
        async_grid=_grid(rate / 16, 7, 2.0),
        curve_model="embedding",
        lstm="small-lstm",
        # As many as fit into 1,200 CPU-seconds of `quick`, at 0.8 ms per update.
        lstm_concurrencies=(130, 1300),
        languages=3,
        left_out=("lstm-speedup", "privacy"),
    )


QUICK: Final = _shorter("quick", rounds=20)
# Its targets lie beyond the first 50 rounds, which show mostly the start of training.
DEEP: Final = _shorter("deep", rounds=100)

FULL: Final = Scale(
    name="full",
    concurrencies=(130, 260, 520, 1300, 2600),
    goals=(100, 200, 400, 700, 1000, 1300),
    rounds=_FULL_ROUNDS,
    table_updates=1_000_000,
    window_hours=2.0,
    fixed_hour=10.0,
    sync_grid=_grid(0.005, 11, 1.5),
    async_grid=_grid(0.0007, 12, 1.5),
    curve_model="lstm",
    lstm="lstm",
    lstm_concurrencies=(130, 1300, 2600),
)

SCALES: Final = {scale.name: scale for scale in (QUICK, DEEP, FULL)}
OVER_SELECTION: Final = 0.3
HEADLINE: Final[Dialect] = "weak"  # of all experiments but the one on sensitivity
DEPTH: Final = 0.75  # share of SyncFL's rounds after which its loss is the target
_THROUGHPUT: Final = 1.6  # updates per hour of AsyncFL ÷ of SyncFL, as recorded at 130 to 2600


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
    start_s: float = START_S,
) -> RecordingPlan:
    """Record `hours` after the start, and until all clients assigned in them have ended."""
    cluster = _cluster(regime, concurrency, population)
    return RecordingPlan(cluster=cluster, seed=seed, hours=hours + start_s / 3600, drain_s=DRAIN_S)


def learning(
    plan: RecordingPlan,
    rates: Rates,
    *,
    model: Model = "embedding",
    data: str = HEADLINE,
    language: int | None = None,
    updates: int = UNBOUNDED,
    evaluations: int = EVALUATIONS,
    target: float | None = None,
) -> Run:
    """Learn along the whole recording, or from at most `updates`: so that experiments share runs,
    targets are looked for in the curve. A run that serves one search alone ends at its `target`.
    `language` is the seed of the language and of everybody's data, the plan's own unless given.
    """
    return Run(
        recording_plan=plan,
        workload=model,
        data=f"{data}/{plan.seed if language is None else language}",
        rates=rates,
        updates=updates,
        evaluations=evaluations,
        target=target,
        curve_only=True,
    )


def workload_of(run: Run, folder: Path | None = None) -> Workload:
    """`folder` is where corpora of real text are kept."""
    data, _, language = run.data.partition("/")
    population = run.recording_plan.cluster.population
    return paper_workload(run.workload, population, data, int(language), folder)


def corpora_of(run: Run) -> tuple[str, ...]:
    """The files with the real text of a run, in the folder of the lab."""
    data = run.data.partition("/")[0]
    return (corpus_file(data),) if is_text(data) else ()


def name_of(data: str) -> str:
    return "real text" if is_text(data) else "synthetic language"


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
MOMENTS: Final = (0.0, 0.9)
NEVER_H: Final = 1e6  # hours: longer than any run
_MOST_STEPS: Final = 6  # by which a grid of rates may grow
_HEAT: Final = 4  # rates tried at the same time, whatever the number of processes
TUNING_SEED: Final = 1001  # tuning never sees a seed that is reported


RegimeName: TypeAlias = Literal["SyncFL", "AsyncFL"]


class Reached(NamedTuple):
    """When a run met the target; if it did not, lower bounds (`is_there` is False)."""

    hours: float
    trips: float
    versions: float
    is_there: bool = True


def rates(rate: float, beta1: float = 0.0, client: ClientSGD = CLIENT) -> Rates:
    return Rates(client, OptimizerConfig(rate=rate, beta1=beta1, epsilon=_EPSILON))


MakeRates: TypeAlias = Callable[[float, float], Rates]
"""From a server rate and a first moment."""


def _rounds(scale: Scale, concurrency: int) -> int:
    """Small cohorts need more rounds to the same target, and cost little."""
    return scale.rounds * (3 if concurrency < scale.concurrency else 1)


def sync_plan(scale: Scale, concurrency: int, seed: int) -> RecordingPlan:
    """The run at the paper's concurrency is long enough for Table 1 as well."""
    rounds = _rounds(scale, concurrency)
    if concurrency == scale.concurrency:
        rounds = max(rounds, scale.table_versions(scale.large_goal))
    return until_versions(SyncFL(OVER_SELECTION), concurrency, seed, rounds)


def async_plan(scale: Scale, concurrency: int, seed: int, goal: int | None = None) -> RecordingPlan:
    """About the hours in which SyncFL makes the share `DEPTH` of its rounds at this concurrency,
    which is when it reaches the target. If AsyncFL has not reached it by then, it is not faster.
    The length is given in updates, of which AsyncFL counts `_THROUGHPUT` times as many per hour. At
    the paper's concurrency, the run is long enough for Table 1 as well.
    """
    goal = scale.goal if goal is None else goal
    cohort = sync_plan(scale, concurrency, seed).task.aggregation_goal
    same_hours = _THROUGHPUT * DEPTH * _rounds(scale, concurrency) * cohort
    versions = math.ceil(round(same_hours) / goal)
    if (concurrency, goal) == (scale.concurrency, scale.goal):
        versions = max(versions, scale.table_versions(goal))
    return until_versions(AsyncFL(goal), concurrency, seed, versions)


PLANS: Final[dict[RegimeName, Callable[[Scale, int, int], RecordingPlan]]] = {
    "SyncFL": sync_plan,
    "AsyncFL": async_plan,
}


def plain_plan(scale: Scale, seed: int) -> RecordingPlan:
    """SyncFL without over-selection: "we set concurrency equal to aggregation goal"."""
    rounds = scale.table_versions(scale.large_goal)
    return until_versions(SyncFL(0.0), scale.large_goal, seed, rounds)


def target_loss(
    lab: Lab, plan: RecordingPlan, share: float, data: str = HEADLINE, language: int | None = None
) -> float:
    """The loss at which this share of the reducible loss remains: that between version 0 and the
    entropy of what all devices hold, given one word (of real text: one character) of context. The
    same for all models.
    """
    workload = lab.workload(learning(plan, rates(ADAMS_RATE), data=data, language=language))
    if not isinstance(workload, LanguageWorkload):
        raise InvariantError(f"{workload.name} has no known entropy")
    first = workload.evaluate(workload.initial(plan.seed)).all
    return workload.floor + share * (first - workload.floor)


def share_left(lab: Lab, outcome: RunResult, loss: float, data: str = HEADLINE) -> float:
    """What is left of the reducible loss at this loss of a run."""
    plan = outcome.run.recording_plan
    floor, first = target_loss(lab, plan, 0.0, data), target_loss(lab, plan, 1.0, data)
    return (loss - floor) / (first - floor)


class Variation(NamedTuple):
    """How a run differs from that of an experiment: `sensitivity` changes one of these at a time.

    dialect    instead of that for which rates are chosen
    factor     of all server rates
    language   the seed of the language and of everybody's data, instead of the plan's
    share      of the reducible loss that is left at the target, instead of the protocol's
    part       of the updates or hours after which losses are read
    """

    dialect: Dialect | None = None
    factor: float = 1.0
    language: int | None = None
    share: float | None = None
    part: float = 1.0

    def run(self, plan: RecordingPlan, chosen: Rates, data: str) -> Run:
        return learning(
            plan, self._scaled(chosen), data=self.dialect or data, language=self.language
        )

    def target_loss(self, lab: Lab, plan: RecordingPlan, share: float, data: str) -> float:
        """At the target of a protocol, which is at this share."""
        share = share if self.share is None else self.share
        return target_loss(lab, plan, share, self.dialect or data, self.language)

    def _scaled(self, chosen: Rates) -> Rates:
        rate = (chosen.optimizer.rate or 0.0) * self.factor
        return structs.replace(chosen, optimizer=structs.replace(chosen.optimizer, rate=rate))


AS_CHOSEN: Final = Variation()


def reached(
    lab: Lab,
    share: float,
    plans: Sequence[RecordingPlan],
    chosen: Rates,
    data: str = HEADLINE,
    varied: Variation = AS_CHOSEN,
) -> list[Reached]:
    """For each plan, when its run with these rates reached the target."""
    outcomes = lab.learn([varied.run(plan, chosen, data) for plan in plans])
    return [
        met(outcome.curve, varied.target_loss(lab, plan, share, data))
        for outcome, plan in zip(outcomes, plans, strict=True)
    ]


def met(curve: Curve, loss: float) -> Reached:
    """When the run reaches the loss, interpolated between two judged versions. The mean over
    `STAYS` judged versions must be at most the loss. If fewer versions are judged per hour, these
    are more hours.
    """
    point = curve.reached(loss)
    is_there = point is not None
    if point is None:
        # If the run went on, the target might turn out to be reached at one of the last points.
        last = curve.points[1 - STAYS :]
        point = next((each for each in last if each.quality.all <= loss), None)
    if point is None:
        end = curve.points[-1]
        return Reached(end.hours, end.trips, end.version, is_there=False)
    before = curve.points[max(0, curve.points.index(point) - 1)]
    fallen = before.quality.all - point.quality.all
    # The version before may have met the loss without keeping it: then no line meets it here.
    share = (before.quality.all - loss) / fallen if before.quality.all > loss else 1.0
    return Reached(
        before.hours + share * (point.hours - before.hours),
        before.trips + share * (point.trips - before.trips),
        before.version + share * (point.version - before.version),
        is_there,
    )


def compared(
    above: Sequence[Reached], below: Sequence[Reached], what: Literal["hours", "trips"] = "hours"
) -> Ratios:
    """Seed by seed. A run that is not there needs at least what it had."""
    return bounded_ratios(
        [(getattr(one, what), one.is_there) for one in above],
        [(getattr(one, what), one.is_there) for one in below],
    )


def hours_finding(name: str, found: Sequence[Reached]) -> Finding:
    is_there = all(one.is_there for one in found)
    return Finding(
        name=name,
        values=tuple(one.hours for one in found),
        unit="h",
        bound="" if is_there else "at least",
    )


def exact(found: Sequence[Reached], what: Literal["hours", "trips"] = "hours") -> list[float]:
    """Values for a chart: NaN where the target was not reached."""
    return [getattr(one, what) if one.is_there else math.nan for one in found]


def after_updates(curve: Curve, updates: float) -> Point:
    """The first judged version that holds so many updates, or the last."""
    return next((point for point in curve.points if point.updates >= updates), curve.points[-1])


def versions_per_hour(lab: Lab, plan: RecordingPlan) -> float:
    """Server updates, after the start: when the timeout is over, the first clients have ended."""
    [recording] = lab.record([plan])
    created_s, versions = recording.trace.created_s, recording.trace.versions
    started = int(np.searchsorted(created_s, plan.task.training_timeout_s))
    skipped = min(started, versions // 2)
    return float(3600 * (versions - skipped) / (created_s[-1] - created_s[skipped]))


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


ONE_RATE: Final = (
    "The paper's protocol: Adam's rate for all, scaled to the length of the run, and a first "
    "moment for each regime. A smaller K makes more steps of the same size per hour. The "
    "experiment on speedup shows what tuning the rate changes."
)


def tuning_seeds(scale: Scale) -> range:
    return range(TUNING_SEED, TUNING_SEED + scale.tuning_seeds)


class Tuned(NamedTuple):
    """The best rates of a grid. `score`: the mean over the tuning seeds, the lower the better.

    While the optimum is on the edge of the grid, the grid gets one more rate there. If it is still
    there after `_MOST_STEPS`, it may not be the optimum, and fails the check.
    """

    rates: Rates
    score: float
    is_on_edge: bool

    def check(self, name: str) -> Check:
        optimizer = self.rates.optimizer
        place = f"rate {number(optimizer.rate or 0.0)}, first moment {optimizer.beta1:g}"
        return Check(f"{name}: the best rate lies inside the grid", not self.is_on_edge, place)


def regime_plan(scale: Scale, regime: RegimeName, seed: int) -> RecordingPlan:
    """At the paper's concurrency and goal."""
    return PLANS[regime](scale, scale.concurrency, seed)


class Target(NamedTuple):
    """The share of the reducible loss at which a run has reached the target: that which SyncFL at
    the paper's concurrency leaves after three quarters of its rounds, on the tuning seeds, with
    the best rates of a grid. AsyncFL has no say in it.
    """

    share: float
    sync: Rates


def target_of(lab: Lab, scale: Scale, grid: Sequence[float], data: str = HEADLINE) -> Target:
    """With a grid of one rate, the target of the paper's protocol."""
    plans = [regime_plan(scale, "SyncFL", seed) for seed in tuning_seeds(scale)]
    updates = DEPTH * scale.rounds * plans[0].task.aggregation_goal
    best = tuned_for_loss(lab, plans, grid, updates, data).rates
    outcomes = lab.learn([learning(plan, best, data=data) for plan in plans])
    shares = [
        share_left(lab, outcome, after_updates(outcome.curve, updates).quality.all, data)
        for outcome in outcomes
    ]
    return Target(fmean(shares), best)


def papers_target(lab: Lab, scale: Scale, data: str = HEADLINE) -> float:
    return target_of(lab, scale, (scale.common_rate,), data).share


def tuned_target(lab: Lab, scale: Scale, data: str = HEADLINE) -> float:
    return target_of(lab, scale, scale.sync_grid, data).share


def papers_rates(lab: Lab, scale: Scale, regime: RegimeName, data: str = HEADLINE) -> Rates:
    """Adam's rate, with the first moment that needs the fewest hours to the target."""
    plans = [regime_plan(scale, regime, seed) for seed in tuning_seeds(scale)]
    grid = (scale.common_rate,)
    share = papers_target(lab, scale, data)
    tuned = tuned_for_time(lab, plans, grid, share, data, whole=True)
    return rates(scale.common_rate, tuned.rates.optimizer.beta1)


def tuned_rates(
    lab: Lab,
    scale: Scale,
    regime: RegimeName,
    concurrency: int,
    share: float,
    data: str = HEADLINE,
) -> Tuned:
    """The rates with the fewest hours to this share, of one regime at one concurrency."""
    plans = [PLANS[regime](scale, concurrency, seed) for seed in tuning_seeds(scale)]
    grid = scale.sync_grid if regime == "SyncFL" else scale.async_grid
    # At the paper's concurrency, Table 1 needs the same runs to their end.
    whole = concurrency == scale.concurrency
    return tuned_for_time(lab, plans, grid, share, data, whole=whole)


def tuned_for_time(
    lab: Lab,
    plans: Sequence[RecordingPlan],
    grid: Sequence[float],
    share: float,
    data: str = HEADLINE,
    *,
    whole: bool = False,
) -> Tuned:
    """The fewest hours until this share of the reducible loss is left. `whole`: runs do not end
    there, because other experiments need them.
    """
    targets = [None if whole else target_loss(lab, plan, share, data) for plan in plans]

    def runs(chosen: Rates) -> list[Run]:
        pairs = zip(plans, targets, strict=True)
        return [learning(plan, chosen, data=data, target=target) for plan, target in pairs]

    return best_of(lab, grid, MOMENTS, runs, hours_to(lab, share, data))


def hours_to(lab: Lab, share: float, data: str) -> Callable[[RunResult], float]:
    """Of a run that does not get there, more hours than any, and the more the higher its loss."""

    def hours(outcome: RunResult) -> float:
        loss = target_loss(lab, outcome.run.recording_plan, share, data)
        found = met(outcome.curve, loss)
        return found.hours if found.is_there else NEVER_H + outcome.end.all

    return hours


def tuned_for_loss(
    lab: Lab,
    plans: Sequence[RecordingPlan],
    grid: Sequence[float],
    updates: float,
    data: str = HEADLINE,
    make: MakeRates = rates,
) -> Tuned:
    """The lowest loss for all clients after so many updates."""

    def loss(outcome: RunResult) -> float:
        return after_updates(outcome.curve, updates).quality.all

    def runs(chosen: Rates) -> list[Run]:
        return [learning(plan, chosen, data=data) for plan in plans]

    return best_of(lab, grid, MOMENTS, runs, loss, make)


def best_of(
    lab: Lab,
    grid: Sequence[float],
    moments: Sequence[float],
    runs: Callable[[Rates], list[Run]],
    score: Callable[[RunResult], float],
    make: MakeRates = rates,
) -> Tuned:
    """The rates with the lowest mean score. A grid of several rates grows by one where the best is
    on its edge, by the factor between its neighbours, at most `_MOST_STEPS` times.

    The score of runs with a target is the hours to it. When a rate has reached the target, later
    runs end as soon as they are certain to be slower. This does not change which rate is the best.
    """
    every = sorted(grid)
    scores: dict[Rates, float] = {}
    for _ in range(_MOST_STEPS):
        tuned = _best_in(lab, every, moments, runs, score, make, scores)
        if len(every) < 2 or not tuned.is_on_edge:
            return tuned
        factor = every[1] / every[0]
        is_lowest = tuned.rates.optimizer.rate == every[0]
        every = [every[0] / factor, *every] if is_lowest else [*every, every[-1] * factor]
    return _best_in(lab, every, moments, runs, score, make, scores)


def _best_in(
    lab: Lab,
    grid: Sequence[float],
    moments: Sequence[float],
    runs: Callable[[Rates], list[Run]],
    score: Callable[[RunResult], float],
    make: MakeRates,
    scores: dict[Rates, float],
) -> Tuned:
    """`scores` has the scores that are known; new ones are added to it."""
    last = len(grid) - 1
    # From the middle of the grid, where the best rate is likely, to its edges.
    outwards = sorted(range(len(grid)), key=lambda place: abs(2 * place - last))
    wanted = [make(grid[place], beta1) for place, beta1 in product(outwards, moments)]
    missing = [chosen for chosen in wanted if chosen not in scores]
    is_race = bool(missing) and any(run.target is not None for run in runs(missing[0]))
    while missing:
        count = _HEAT if is_race else len(missing)
        heat, missing = missing[:count], missing[count:]
        best_h = min(scores.values(), default=math.inf)
        found: dict[Rates, list[float]] = {}
        for outcome in lab.learn([run for chosen in heat for run in _racing(runs(chosen), best_h)]):
            is_whole = outcome.curve.diverged is None
            found.setdefault(outcome.run.rates, []).append(score(outcome) if is_whole else math.inf)
        scores.update((chosen, fmean(each)) for chosen, each in found.items())
    ordered = [make(rate, beta1) for beta1, rate in product(moments, grid)]
    best_rates = min(ordered, key=lambda chosen: scores[chosen])  # the first if several are equal
    is_on_edge = best_rates.optimizer.rate in (grid[0], grid[-1])
    return Tuned(best_rates, scores[best_rates], is_on_edge)


def _racing(runs: list[Run], best_h: float) -> list[Run]:
    """The runs, each of which ends when their mean hours are certain to exceed `best_h`."""
    if best_h >= NEVER_H:
        return runs
    return [
        run if run.target is None else structs.replace(run, deadline_h=len(runs) * best_h)
        for run in runs
    ]
