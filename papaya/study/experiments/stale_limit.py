"""A maximum staleness that is too small brings back the bias that AsyncFL avoids.

Paper, appendix: in AsyncFL "users that are still training continue normally, unless their staleness
would exceed maximum staleness". Those are the slow ones, and the slow ones have the most data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from papaya.config import AsyncFL
from papaya.sim.population import DEFAULT, STRESS, Population
from papaya.sim.report import everyone
from papaya.study.experiments import charts
from papaya.study.experiments.result import Finding, Result
from papaya.study.experiments.runs import DRAIN_S, Scale, window
from papaya.study.lab import Lab
from papaya.study.run import RecordingPlan

KEY = "stale-limit"
_LIMITS: Final = (10, 50, 200)
_START_S: Final = DRAIN_S  # the first clients have ended, so AsyncFL is in its steady state
_SMALLER: Final = 20  # than elsewhere, C and K alike: what counts is C / K
_POPULATIONS: Final = {"default": DEFAULT, "stress": STRESS}


def plans(scale: Scale, seeds: Sequence[int]) -> list[RecordingPlan]:
    return [
        _plan(scale, limit, name, seed)
        for name in _POPULATIONS
        for limit in _LIMITS
        for seed in seeds
    ]


def _plan(scale: Scale, limit: int, name: str, seed: int) -> RecordingPlan:
    goal = max(1, scale.goal // _SMALLER)
    concurrency = goal * scale.concurrency // scale.goal
    hours, population = scale.window_hours / 2, _POPULATIONS[name]
    return window(AsyncFL(goal, limit), concurrency, seed, hours, population, _START_S)


def run(lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
    kept = {
        name: {
            limit: tuple(_kept(lab, _plan(scale, limit, name, seed)) for seed in seeds)
            for limit in _LIMITS
        }
        for name in _POPULATIONS
    }
    panel = charts.Panel(
        "Share of the 1 % with most data that is counted",
        "counted ÷ expected",
        {f"{name} population": list(found.items()) for name, found in kept.items()},
        even=1.0,
    )
    return Result(
        key=KEY,
        title="A maximum staleness that is too small re-creates the bias",
        paper="Appendix: aborting stale clients",
        findings=tuple(
            Finding(
                name=f"{name} population, limit {limit}: top 1 % counted ÷ expected",
                values=shares,
            )
            for name, found in kept.items()
            for limit, shares in found.items()
        ),
        plots=(
            charts.lines(
                lab.folder, KEY, "maximum staleness (server updates)", [panel], ratios=True
            ),
        ),
        notes=(
            (
                f"C / K = {scale.concurrency / scale.goal:g}, which is about the mean staleness; "
                "the default limit is 16 C / K."
            ),
            "The paper has no number for this. A value near 1 means that no bias is seen.",
        ),
    )


def _kept(lab: Lab, plan: RecordingPlan) -> float:
    """Of the devices that can take part, the 1 % with the most data: counted ÷ expected."""
    [recording] = lab.record([plan])
    trace = recording.trace
    population = Population(plan.cluster.population, plan.seed)
    _, examples = everyone(population, trace.task.training_timeout_s)
    edge = float(np.percentile(examples, 99))
    ends_s = 3600 * plan.hours  # of later ones, the slow had no time to come back
    chosen = (trace.assigned_s >= _START_S) & (trace.assigned_s < ends_s)
    share = float((trace.clients.examples[chosen] >= edge).mean())
    return share / float((examples >= edge).mean())
