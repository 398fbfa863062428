"""The aggregation goal K at a fixed concurrency: hours to a target and server updates per hour.

Paper, figure "Number of hours to reach a target perplexity of 60 with concurrency = 1,300 and
varying values of K": "the larger the K is, the slower the convergence time".
"""

from __future__ import annotations

from collections.abc import Sequence

from papaya.study.experiments import charts
from papaya.study.experiments.result import Finding, PaperClaim, Result, ratios
from papaya.study.experiments.runs import (
    EARLY,
    ONE_RATE,
    Scale,
    async_plan,
    papers_rates,
    reached,
    regime_plan,
    tuning_seeds,
    versions_per_hour,
)
from papaya.study.lab import Lab
from papaya.study.run import RecordingPlan

KEY = "goal-sweep"


def plans(scale: Scale, seeds: Sequence[int]) -> list[RecordingPlan]:
    at = scale.concurrency
    every = [async_plan(scale, at, seed, goal) for goal in scale.goals for seed in seeds]
    return [*every, *(regime_plan(scale, "AsyncFL", seed) for seed in tuning_seeds(scale))]


def run(lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
    chosen = papers_rates(lab, scale, "AsyncFL")
    hours: dict[int, list[float]] = {}
    frequency: dict[int, list[float]] = {}
    for goal in scale.goals:
        found = [async_plan(scale, scale.concurrency, seed, goal) for seed in seeds]
        hours[goal] = [run.hours for run in reached(lab, EARLY, found, chosen)]
        frequency[goal] = [versions_per_hour(lab, plan) for plan in found]
    small, large = scale.goals[0], scale.goals[-1]
    slower = ratios(hours[large], hours[small])
    panels = [
        charts.Panel("Hours to the target", "hours", {"AsyncFL": list(hours.items())}),
        charts.Panel("Server updates per hour", "per hour", {"AsyncFL": list(frequency.items())}),
    ]
    return Result(
        key=KEY,
        title=f"Aggregation goal K at concurrency {scale.concurrency}",
        paper="Figure 10: hours to a target, and server updates per hour, by K",
        claims=(
            PaperClaim(
                statement=f"the larger K, the slower: hours at K = {large} ÷ hours at K = {small}",
                paper="above 1",
                expected=1.0,
                relation="above",
                values=slower,
            ),
        ),
        findings=tuple(
            Finding(name=f"hours at K = {goal}", values=tuple(found), unit="h")
            for goal, found in hours.items()
        ),
        plots=(charts.lines(lab.folder, KEY, "aggregation goal K", panels),),
        notes=(ONE_RATE,),
    )
