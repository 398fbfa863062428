"""Choosing a server rate and a first moment, on seeds that are never reported.

An optimum on the edge of the grid may not be the optimum: it is marked, and fails the check.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from statistics import fmean
from typing import NamedTuple

from papaya.study.experiments.result import Check, number
from papaya.study.experiments.runs import learning, met, rates
from papaya.study.experiments.scale import Scale
from papaya.study.lab import Lab
from papaya.study.replay import Curve, Rates
from papaya.study.run import UNBOUNDED, RecordingPlan


class Tuned(NamedTuple):
    """`score`: the mean over the tuning seeds, the lower the better."""

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
