"""Who took part, against who could have: the Kolmogorov-Smirnov test on time and on data.

Paper, "Sampling bias": the distributions of execution time and of the number of examples of the
clients that were counted are compared with those of the population, because a regime that loses
the slow loses those with much data. Those who can take part at all are the devices that neither
drop out nor exceed the task's timeout: no regime counts the others.

D alone says little: of n clients it is about 0.9 / sqrt(n) by chance. `noise` is the D that chance
exceeds once in twenty times. Example counts are whole numbers, so for them the test is cautious:
its p-value is at least the true one.

Clients are those that were assigned in a window, whenever they were counted. It begins after the
start, when only the fast have come back, and ends a timeout before the trace does, or the slow of
the last minutes would be missing.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from msgspec import Struct

from papaya.sim.draws import Floats
from papaya.sim.population import Population
from papaya.sim.report import everyone, ks_statistic
from papaya.study.trace import Trace

_APART: Final = 1 << 40  # arrivals that no run gets to: the reference is another sample
_LEAST_CLIENTS: Final = 30  # of fewer, D is mostly chance
_WARM_UP_S: Final = 600.0
_TERMS: Final = 100


class Distance(Struct, frozen=True):
    """Of those who were counted from those who could be, in one quantity."""

    ks: float
    p_value: float
    noise: float


class Fairness(Struct, frozen=True):
    """Of the counted clients that were assigned in the window."""

    from_s: float
    until_s: float
    clients: int
    execution_s: Distance
    examples: Distance


def fairness(
    trace: Trace, from_s: float | None = None, until_s: float | None = None
) -> Fairness | None:
    """None if too few were counted. The window is ten minutes (at most a quarter of the trace)
    after its start to a timeout before its end, unless given.
    """
    task, end_s = trace.task, float(trace.created_s[-1])
    if from_s is None:
        from_s = min(_WARM_UP_S, end_s / 4)
    if until_s is None:
        until_s = end_s - task.training_timeout_s
    chosen = (trace.assigned_s >= from_s) & (trace.assigned_s < until_s)
    count = int(chosen.sum())
    if count < _LEAST_CLIENTS:
        return None
    population = Population(trace.config.population, trace.seed)
    execution_s, examples = everyone(population, task.training_timeout_s, first=_APART)
    held = population.examples(trace.clients.device[chosen])
    return Fairness(
        from_s=from_s,
        until_s=until_s,
        clients=count,
        execution_s=distance(trace.execution_s[chosen], execution_s),
        examples=distance(held.astype(np.float64), examples),
    )


def distance(sample: Floats, reference: Floats) -> Distance:
    """Of two samples that are not empty."""
    ks = ks_statistic(sample, reference)
    return Distance(
        ks, p_value(ks, len(sample), len(reference)), noise_level(len(sample), len(reference))
    )


def weighted_ks(
    sample: Floats, weights: Floats, reference: Floats, reference_weights: Floats
) -> float:
    """The largest distance between two distribution functions in which each value has a weight."""
    points = np.sort(np.concatenate([sample, reference]))
    below = [
        np.concatenate([[0.0], np.cumsum(weight[order])])[
            np.searchsorted(values[order], points, side="right")
        ]
        / weight.sum()
        for values, weight in ((sample, weights), (reference, reference_weights))
        for order in (np.argsort(values, kind="stable"),)
    ]
    return float(np.abs(below[0] - below[1]).max())


def p_value(ks: float, sample: int, reference: int) -> float:
    """How often two samples of these sizes from one distribution are so far apart, or farther.

    Kolmogorov's series, for large samples.
    """
    scaled = ks * math.sqrt(_effective(sample, reference))
    if scaled < 0.2:  # 1 - 1e-12; the series converges ever more slowly towards 0
        return 1.0
    square = scaled * scaled
    terms = ((1 if k % 2 else -1) * math.exp(-2 * k * k * square) for k in range(1, _TERMS))
    return min(1.0, max(0.0, 2 * sum(terms)))


def noise_level(sample: int, reference: int, chance: float = 0.05) -> float:
    """The D that is exceeded with this probability when there is no bias."""
    return math.sqrt(-math.log(chance / 2) / 2 / _effective(sample, reference))


def _effective(sample: int, reference: int) -> float:
    return sample * reference / (sample + reference)
