"""Client utilization of AsyncFL and SyncFL at the same concurrency.

Paper, figure "AsyncFL achieves high client utilization while SyncFL client utilization
fluctuates". Every replacement goes through check-in, assignment and join of the real machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from papaya.config import AsyncFL, SyncFL
from papaya.experiments.result import Check, Finding, Result, number
from papaya.experiments.runs import window
from papaya.experiments.scale import OVER_SELECTION, Scale
from papaya.sim import plots
from papaya.sim.lab import Lab
from papaya.sim.learnt import Course

KEY = "utilization"


def _regimes(scale: Scale) -> dict[str, AsyncFL | SyncFL]:
    return {
        "AsyncFL": AsyncFL(scale.goal),
        "SyncFL with over-selection": SyncFL(OVER_SELECTION),
        "SyncFL without over-selection": SyncFL(0.0),
    }


def courses(scale: Scale, seeds: Sequence[int]) -> list[Course]:
    regimes = _regimes(scale).values()
    return [course for regime in regimes for course in _courses(scale, seeds, regime)]


def _courses(scale: Scale, seeds: Sequence[int], regime: AsyncFL | SyncFL) -> list[Course]:
    return [window(regime, scale.concurrency, seed, scale.window_hours) for seed in seeds]


def run(lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
    reports = {
        name: [recording.report for recording in lab.record(_courses(scale, seeds, regime))]
        for name, regime in _regimes(scale).items()
    }
    used = {n: tuple(r.tasks[0].utilization for r in found) for n, found in reports.items()}
    plot = lab.folder / f"{KEY}.png"
    plots.draw({name: found[0] for name, found in reports.items()}, plot, "Client utilization")
    lowest = min(used["AsyncFL"])
    highest = fmean(used["SyncFL with over-selection"])
    return Result(
        key=KEY,
        title=f"Client utilization at concurrency {scale.concurrency}",
        paper="Figure: number of active clients over time",
        findings=tuple(
            Finding(name=name, paper=paper, values=used[name])
            for name, paper in zip(used, ("near 1, constant", "fluctuates", "–"), strict=True)
        ),
        checks=(
            Check("AsyncFL uses at least 98 % of its slots", lowest >= 0.98, number(lowest)),
            Check("SyncFL with over-selection uses below 75 %", highest < 0.75, number(highest)),
        ),
        plots=(plot.name,),
        notes=(
            (
                "Active clients as the aggregator counts them ÷ concurrency. A device that "
                "vanished counts until its heartbeats are missed."
            ),
        ),
    )
