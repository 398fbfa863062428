"""Who takes part: execution times and example counts of counted clients, and whether they differ.

Paper, figure "Participating client execution time and normalized number of examples" and its
two-sample Kolmogorov-Smirnov test against SyncFL without over-selection, "the ground truth
distribution": D = 8.8e-4 (p = 0.98) for AsyncFL, 6.6e-2 (p = 0.0) with over-selection.

Compared are clients that were assigned in a window after the start, of runs that went on until all
of them had ended: at a cut the slow would be missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np
import numpy.typing as npt

from papaya.config import AsyncFL, SyncFL
from papaya.experiments import charts
from papaya.experiments.common import TUNING_SEED, plain_course
from papaya.experiments.result import Check, Finding, Result, number
from papaya.experiments.runs import START_S, window
from papaya.experiments.scale import OVER_SELECTION, Scale
from papaya.sim.fairness import Distance, distance
from papaya.sim.lab import Lab
from papaya.sim.learnt import Course
from papaya.sim.trace import Trace

KEY = "sampling-bias"
_ASYNC, _OVER = "AsyncFL", "SyncFL with over-selection"
_PAPER = {_ASYNC: ("8.8e-4", "0.98"), _OVER: ("6.6e-2", "0.0")}
_TRUTH = "SyncFL without over-selection"

Floats = npt.NDArray[np.float64]


def _regimes(scale: Scale) -> dict[str, AsyncFL | SyncFL]:
    return {_ASYNC: AsyncFL(scale.goal), _OVER: SyncFL(OVER_SELECTION)}


def courses(scale: Scale, seeds: Sequence[int]) -> list[Course]:
    compared = [
        _course(scale, regime, seed) for regime in _regimes(scale).values() for seed in seeds
    ]
    return [*compared, plain_course(scale, TUNING_SEED)]


def _course(scale: Scale, regime: AsyncFL | SyncFL, seed: int) -> Course:
    return window(regime, scale.concurrency, seed, scale.window_hours)


def run(lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
    # Another seed, or the same devices would be on both sides of the comparison.
    truth = _clients(lab, plain_course(scale, TUNING_SEED), None)
    found = {
        name: [_clients(lab, _course(scale, r, seed), scale.window_hours) for seed in seeds]
        for name, r in _regimes(scale).items()
    }
    by_examples = {n: _distances(sides, truth, 1) for n, sides in found.items()}
    by_time = {n: _distances(sides, truth, 0) for n, sides in found.items()}
    findings = []
    for name in found:
        d, p = _PAPER[name]
        noise = number(fmean(one.noise for one in by_examples[name]))
        findings += [
            Finding(
                name=f"{name}: D by examples (chance alone: up to {noise})",
                paper=d,
                values=tuple(one.ks for one in by_examples[name]),
            ),
            Finding(
                name=f"{name}: p-value by examples",
                paper=p,
                values=tuple(one.p_value for one in by_examples[name]),
            ),
            Finding(
                name=f"{name}: D by execution time",
                paper="–",
                values=tuple(one.ks for one in by_time[name]),
            ),
            Finding(
                name=f"{name}: p-value by execution time",
                paper="–",
                values=tuple(one.p_value for one in by_time[name]),
            ),
        ]
    return Result(
        key=KEY,
        title="Who takes part: sampling bias of over-selection",
        paper="Figure and K-S test: execution time and number of examples of participating clients",
        findings=tuple(findings),
        checks=decide(by_examples, by_time),
        plots=_draw(lab, found, truth),
        notes=(
            (
                "D of two samples is never zero: the noise level is what chance exceeds once in "
                "twenty times. The paper's 8.8e-4 comes from far larger samples."
            ),
        ),
    )


def _clients(lab: Lab, course: Course, hours: float | None) -> tuple[Floats, Floats]:
    """(execution, examples) of the counted; without `hours` the run ends with a whole round."""
    [recording] = lab.record([course])
    trace: Trace = recording.trace
    chosen = trace.assigned_s >= START_S
    if hours is not None:
        chosen &= trace.assigned_s < START_S + 3600 * hours
    return trace.execution_s[chosen], trace.clients.examples[chosen].astype(np.float64)


def _distances(
    sides: list[tuple[Floats, Floats]], truth: tuple[Floats, Floats], quantity: int
) -> list[Distance]:
    return [distance(side[quantity], truth[quantity]) for side in sides]


def decide(
    by_examples: dict[str, list[Distance]], by_time: dict[str, list[Distance]]
) -> tuple[Check, ...]:
    """The smallest of n p-values is multiplied by n: with many tests, one is small by chance."""
    tests = [*by_examples[_ASYNC], *by_time[_ASYNC]]
    unbiased = min(1.0, len(tests) * min(one.p_value for one in tests))
    biased = min(one.ks for one in by_examples[_OVER])
    return (
        Check("AsyncFL: p > 0.01, no bias is seen", unbiased > 0.01, number(unbiased)),
        Check("over-selection: D > 0.05", biased > 0.05, number(biased)),
    )


def _draw(
    lab: Lab,
    found: dict[str, list[tuple[Floats, Floats]]],
    truth: tuple[Floats, Floats],
) -> tuple[str, ...]:
    names = ("Execution time of counted clients", "Examples of counted clients")
    labels = ("seconds", "examples")
    return tuple(
        charts.histograms(
            lab.folder,
            f"{KEY}-{label}",
            names[quantity],
            label,
            {
                _TRUTH: truth[quantity].tolist(),
                **{name: sides[0][quantity].tolist() for name, sides in found.items()},
            },
        )
        for quantity, label in enumerate(labels)
    )
