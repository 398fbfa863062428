"""Hours to a target for each design, and how much of the speedup comes from small K.

Paper, figure "Number of hours to reach a target loss for different FL design configurations":
AsyncFL with K = 100 is 4.3x faster than SyncFL with over-selection, "about half of this speedup
comes from using smaller K".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from papaya.study.experiments import charts
from papaya.study.experiments.result import PaperClaim, Result
from papaya.study.experiments.runs import (
    AS_CHOSEN,
    ONE_RATE,
    PLANS,
    Reached,
    RegimeName,
    Scale,
    Variation,
    async_plan,
    compared,
    exact,
    hours_finding,
    name_of,
    papers_rates,
    papers_target,
    plain_plan,
    reached,
    regime_plan,
    sync_plan,
    tuning_seeds,
)
from papaya.study.lab import Lab
from papaya.study.replay import Rates
from papaya.study.run import RecordingPlan

KEY = "designs"
OVER, LARGE, SMALL, PLAIN = DESIGNS = (
    "SyncFL with over-selection",
    "AsyncFL, large K",
    "AsyncFL, small K",
    "SyncFL without over-selection",
)
COMPARED = (OVER, LARGE, SMALL)
"""The designs that the paper's numbers are about."""


def design_plan(scale: Scale, name: str, seed: int) -> RecordingPlan:
    """As the paper configures it: all at one concurrency, but without over-selection at K."""
    if name == PLAIN:
        return plain_plan(scale, seed)
    if name == OVER:
        return sync_plan(scale, scale.concurrency, seed)
    goal = scale.goal if name == SMALL else scale.large_goal
    return async_plan(scale, scale.concurrency, seed, goal)


def regime_of(name: str) -> RegimeName:
    return "AsyncFL" if name in (LARGE, SMALL) else "SyncFL"


def plans(scale: Scale, seeds: Sequence[int]) -> list[RecordingPlan]:
    return [
        *(design_plan(scale, name, seed) for name in DESIGNS for seed in seeds),
        *(regime_plan(scale, regime_of(name), s) for name in DESIGNS for s in tuning_seeds(scale)),
    ]


def run(lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
    found = {}
    for data in scale.data:
        chosen = {regime: papers_rates(lab, scale, regime, data) for regime in PLANS}
        share = papers_target(lab, scale, data)
        found[name_of(data)] = measured(lab, scale, seeds, data, chosen, share, DESIGNS)
    bars = {design: [exact(by[design]) for by in found.values()] for design in DESIGNS}
    over = [fmean(hours) for hours in bars[OVER]]
    papers = {SMALL: [mean / 4.3 for mean in over], LARGE: [mean / 4.3**0.5 for mean in over]}
    return Result(
        key=KEY,
        title="Hours to the target for each design",
        paper="Figure 13: number of hours to reach a target loss for different designs",
        claims=tuple(claim for name, by in found.items() for claim in claims(name, by)),
        findings=tuple(
            hours_finding(f"{name}, hours: {design}", runs)
            for name, by in found.items()
            for design, runs in by.items()
        ),
        plots=(
            charts.bars(lab.folder, KEY, "Time to the target", "hours", list(found), bars, papers),
        ),
        notes=(
            "“At least”: a recorded run ended before it reached the target.",
            ONE_RATE,
        ),
    )


def measured(
    lab: Lab,
    scale: Scale,
    seeds: Sequence[int],
    data: str,
    chosen: Mapping[RegimeName, Rates],
    share: float,
    names: Sequence[str],
    varied: Variation = AS_CHOSEN,
) -> dict[str, list[Reached]]:
    found = {}
    for name in names:
        plans = [design_plan(scale, name, seed) for seed in seeds]
        found[name] = reached(lab, share, plans, chosen[regime_of(name)], data, varied)
    return found


def claims(name: str, found: dict[str, list[Reached]]) -> list[PaperClaim]:
    total = compared(found[OVER], found[SMALL])
    small = compared(found[LARGE], found[SMALL])
    share = tuple(
        100 * math.log(s) / math.log(t) if t > 1 and s > 0 else math.nan
        for s, t in zip(small.exact, total.exact, strict=True)
    )
    lacks_one = total.bound != "at least" and any(ratio <= 1 for ratio in total.values)
    return [
        PaperClaim(
            statement=f"{name}: AsyncFL with small K is faster than SyncFL with over-selection",
            paper="4.3x",
            expected=4.3,
            values=total.values,
            bound=total.bound,
            no_effect=1.0,
        ),
        PaperClaim(
            statement=f"{name}: about half of the logarithm of this speedup comes from smaller K",
            paper="half",
            expected=50.0,
            values=share,
            unit="%",
            incomparable="not every seed has a speedup to divide" if lacks_one else "",
        ),
    ]
