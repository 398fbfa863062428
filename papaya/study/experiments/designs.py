"""Hours to a target for each design, and how much of the speedup comes from small K.

Paper, figure "Number of hours to reach a target loss for different FL design configurations":
AsyncFL with K = 100 is 4.3x faster than SyncFL with over-selection, "about half of this speedup
comes from using smaller K".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from papaya.study.experiments import charts
from papaya.study.experiments.result import Check, Finding, Result, number, ratios
from papaya.study.experiments.runs import (
    ONE_RATE,
    Scale,
    async_plan,
    plain_plan,
    rates,
    reached,
    sync_plan,
)
from papaya.study.lab import Lab
from papaya.study.run import RecordingPlan

KEY = "designs"
OVER, LARGE, SMALL, PLAIN = DESIGNS = (
    "SyncFL with over-selection",
    "AsyncFL, large K",
    "AsyncFL, small K",
    "SyncFL without over-selection",
)


def design_plan(scale: Scale, name: str, seed: int) -> RecordingPlan:
    """As the paper configures it: all at one concurrency, but without over-selection at K."""
    if name == PLAIN:
        return plain_plan(scale, seed)
    if name == OVER:
        return sync_plan(scale, scale.concurrency, seed)
    goal = scale.goal if name == SMALL else scale.large_goal
    return async_plan(scale, scale.concurrency, seed, goal)


def plans(scale: Scale, seeds: Sequence[int]) -> list[RecordingPlan]:
    return [design_plan(scale, name, seed) for name in DESIGNS for seed in seeds]


def run(lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
    chosen = rates(scale.common_rate)
    hours = {
        name: [
            run.hours
            for run in reached(
                lab, scale.target, [design_plan(scale, name, seed) for seed in seeds], chosen
            )
        ]
        for name in DESIGNS
    }
    total = ratios(hours[OVER], hours[SMALL])
    small = ratios(hours[LARGE], hours[SMALL])
    share = tuple(
        100 * math.log(s) / math.log(t) if 1 < t < math.inf and s > 0 else math.nan
        for s, t in zip(small, total, strict=True)
    )
    bars = {name: [found] for name, found in hours.items()}
    return Result(
        key=KEY,
        title="Hours to the target for each design",
        paper="Figure 13: number of hours to reach a target loss for different designs",
        findings=(
            Finding(
                name="AsyncFL with small K over SyncFL with over-selection",
                paper="4.3x",
                values=total,
            ),
            Finding(name="of it from small K (logarithms)", paper="half", values=share, unit="%"),
            *(
                Finding(name=f"hours: {name}", paper="–", values=tuple(found), unit="h")
                for name, found in hours.items()
            ),
        ),
        checks=(
            Check(
                "AsyncFL with small K is the fastest design",
                all(fmean(hours[SMALL]) < fmean(v) for n, v in hours.items() if n != SMALL),
                number(fmean(total)),
            ),
        ),
        plots=(charts.bars(lab.folder, KEY, "Hours to the target", "hours", [""], bars),),
        notes=(
            "–: not within the recorded run.",
            ONE_RATE,
        ),
    )
