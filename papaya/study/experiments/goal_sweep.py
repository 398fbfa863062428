"""The aggregation goal K at a fixed concurrency: hours to a target and server updates per hour.

Paper, figure "Number of hours to reach a target perplexity of 60 with concurrency = 1,300 and
varying values of K": "the larger the K is, the slower the convergence time".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final

from papaya.study.experiments import charts
from papaya.study.experiments.result import PaperClaim, Result
from papaya.study.experiments.runs import (
    AS_CHOSEN,
    ONE_RATE,
    Reached,
    Scale,
    Variation,
    async_plan,
    compared,
    exact,
    hours_finding,
    name_of,
    papers_rates,
    papers_target,
    reached,
    regime_plan,
    tuning_seeds,
    versions_per_hour,
)
from papaya.study.lab import Lab
from papaya.study.replay import Rates
from papaya.study.run import RecordingPlan

KEY = "goal-sweep"
_PAPERS_RATIO: Final = 4.3**0.5
"""Hours at K = 1000 ÷ hours at K = 100: half (of the logarithm) of 4.3x, of Figure 13."""

_ByGoal = Mapping[int, list[Reached]]


def plans(scale: Scale, seeds: Sequence[int]) -> list[RecordingPlan]:
    at = scale.concurrency
    every = [async_plan(scale, at, seed, goal) for goal in scale.goals for seed in seeds]
    return [*every, *(regime_plan(scale, "AsyncFL", seed) for seed in tuning_seeds(scale))]


def run(lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
    found: dict[str, _ByGoal] = {}
    for data in scale.data:
        chosen, share = papers_rates(lab, scale, "AsyncFL", data), papers_target(lab, scale, data)
        found[name_of(data)] = measured(lab, scale, seeds, data, chosen, share, scale.goals)
    plans = {goal: _plans(scale, seeds, goal) for goal in scale.goals}
    frequency = {g: [versions_per_hour(lab, plan) for plan in same] for g, same in plans.items()}
    return Result(
        key=KEY,
        title=f"Aggregation goal K at concurrency {scale.concurrency}",
        paper="Figure 10: hours to a target, and server updates per hour, by K",
        claims=tuple(claim(name, by) for name, by in found.items()),
        findings=tuple(
            hours_finding(f"{name}: hours at K = {goal}", runs)
            for name, by in found.items()
            for goal, runs in by.items()
        ),
        plots=(_draw(lab, scale, found, frequency),),
        notes=(ONE_RATE,),
    )


def measured(
    lab: Lab,
    scale: Scale,
    seeds: Sequence[int],
    data: str,
    chosen: Rates,
    share: float,
    goals: Sequence[int],
    varied: Variation = AS_CHOSEN,
) -> _ByGoal:
    plans = {goal: _plans(scale, seeds, goal) for goal in goals}
    return {goal: reached(lab, share, same, chosen, data, varied) for goal, same in plans.items()}


def _plans(scale: Scale, seeds: Sequence[int], goal: int) -> list[RecordingPlan]:
    return [async_plan(scale, scale.concurrency, seed, goal) for seed in seeds]


def claim(name: str, by: _ByGoal) -> PaperClaim:
    """Between the smallest and the largest K."""
    small, large = min(by), max(by)
    slower = compared(by[large], by[small])
    return PaperClaim(
        statement=f"{name}: the larger K, the slower: hours at K = {large} ÷ hours at K = {small}",
        paper="above 1",
        expected=1.0,
        relation="above",
        values=slower.values,
        bound=slower.bound,
        no_effect=1.0,
    )


def _draw(
    lab: Lab, scale: Scale, found: Mapping[str, _ByGoal], frequency: Mapping[int, list[float]]
) -> str:
    panels = [
        charts.Panel(
            "Time to the target",
            "hours",
            {n: [(goal, exact(runs)) for goal, runs in by.items()] for n, by in found.items()},
            paper=papers_hours(scale, found),
            caption=f"stars: mean at K = {scale.large_goal} ÷ {_PAPERS_RATIO:.3g}, of Figure 13",
        ),
        charts.Panel(
            "Server model updates", "updates per hour", {"AsyncFL": list(frequency.items())}
        ),
    ]
    return charts.lines(lab.folder, KEY, "aggregation goal K (client updates)", panels)


def papers_hours(scale: Scale, found: Mapping[str, _ByGoal]) -> tuple[tuple[float, float], ...]:
    """Figure 10 has no number in the text, Figure 13 has one. It is drawn at the small K, because
    our runs may not reach the target there.
    """
    return tuple(
        (scale.goal, fmean(exact(by[scale.large_goal])) / _PAPERS_RATIO) for by in found.values()
    )
