"""The aggregation goal K at a fixed concurrency: hours to a target and server updates per hour.

Paper, figure "Number of hours to reach a target perplexity of 60 with concurrency = 1,300 and
varying values of K": "the larger the K is, the slower the convergence time".
"""

from __future__ import annotations

from collections.abc import Sequence

from papaya.study.experiments import charts
from papaya.study.experiments.result import PaperClaim, Result
from papaya.study.experiments.runs import (
    ONE_RATE,
    Reached,
    Scale,
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
from papaya.study.run import RecordingPlan

KEY = "goal-sweep"


def plans(scale: Scale, seeds: Sequence[int]) -> list[RecordingPlan]:
    at = scale.concurrency
    every = [async_plan(scale, at, seed, goal) for goal in scale.goals for seed in seeds]
    return [*every, *(regime_plan(scale, "AsyncFL", seed) for seed in tuning_seeds(scale))]


def run(lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
    plans = {
        goal: [async_plan(scale, scale.concurrency, seed, goal) for seed in seeds]
        for goal in scale.goals
    }
    found: dict[str, dict[int, list[Reached]]] = {}
    for data in scale.data:
        chosen, share = papers_rates(lab, scale, "AsyncFL", data), papers_target(lab, scale, data)
        found[name_of(data)] = {
            goal: reached(lab, share, same, chosen, data) for goal, same in plans.items()
        }
    frequency = {g: [versions_per_hour(lab, plan) for plan in same] for g, same in plans.items()}
    small, large = scale.goals[0], scale.goals[-1]
    panels = [
        charts.Panel(
            "Time to the target",
            "hours",
            {n: [(goal, exact(runs)) for goal, runs in by.items()] for n, by in found.items()},
        ),
        charts.Panel(
            "Server model updates", "updates per hour", {"AsyncFL": list(frequency.items())}
        ),
    ]
    return Result(
        key=KEY,
        title=f"Aggregation goal K at concurrency {scale.concurrency}",
        paper="Figure 10: hours to a target, and server updates per hour, by K",
        claims=tuple(
            PaperClaim(
                statement=f"{name}: the larger K, the slower: hours at K = {large} ÷ hours at "
                f"K = {small}",
                paper="above 1",
                expected=1.0,
                relation="above",
                values=compared(by[large], by[small]).values,
                bound=compared(by[large], by[small]).bound,
                no_effect=1.0,
            )
            for name, by in found.items()
        ),
        findings=tuple(
            hours_finding(f"{name}: hours at K = {goal}", runs)
            for name, by in found.items()
            for goal, runs in by.items()
        ),
        plots=(charts.lines(lab.folder, KEY, "aggregation goal K (client updates)", panels),),
        notes=(ONE_RATE,),
    )
