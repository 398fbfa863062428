"""Who takes part: execution times and example counts of counted clients, and whether they differ.

Paper, figure "Participating client execution time and normalized number of examples" and its
two-sample Kolmogorov-Smirnov test against SyncFL without over-selection, "the ground truth
distribution": D = 8.8e-4 (p = 0.98) for AsyncFL, 6.6e-2 (p = 0.0) with over-selection.

Compared are clients that were assigned in a window: after the start, and long enough before the end
of the run that all of them had ended. At the end itself the slow would be missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np

from papaya.sim.draws import Floats
from papaya.study.experiments import charts
from papaya.study.experiments.result import Check, Finding, Result, number
from papaya.study.experiments.runs import (
    DRAIN_S,
    START_S,
    TUNING_SEED,
    Scale,
    async_plan,
    plain_plan,
    sync_plan,
)
from papaya.study.fairness import Distance, distance
from papaya.study.lab import Lab
from papaya.study.run import RecordingPlan
from papaya.study.trace import Trace

KEY = "sampling-bias"
_ASYNC, _OVER = "AsyncFL", "SyncFL with over-selection"
_PAPER = {_ASYNC: ("8.8e-4", "0.98"), _OVER: ("6.6e-2", "0.0")}
_TRUTH = "SyncFL without over-selection"


def plans(scale: Scale, seeds: Sequence[int]) -> list[RecordingPlan]:
    compared = [plan for found in _compared(scale, seeds).values() for plan in found]
    return [*compared, plain_plan(scale, TUNING_SEED)]


def _compared(scale: Scale, seeds: Sequence[int]) -> dict[str, list[RecordingPlan]]:
    at = scale.concurrency
    return {
        _ASYNC: [async_plan(scale, at, seed) for seed in seeds],
        _OVER: [sync_plan(scale, at, seed) for seed in seeds],
    }


def run(lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
    # Another seed, or the same devices would be on both sides of the comparison.
    truth = _clients(lab, plain_plan(scale, TUNING_SEED), in_whole_rounds=True)
    found = {
        name: [_clients(lab, plan) for plan in side]
        for name, side in _compared(scale, seeds).items()
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
        paper="Figure 11 and K-S test: execution time and examples of participating clients",
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


def _clients(
    lab: Lab, plan: RecordingPlan, *, in_whole_rounds: bool = False
) -> tuple[Floats, Floats]:
    """(execution, examples) of the counted. A round that waits for all its clients has no cut."""
    [recording] = lab.record([plan])
    trace: Trace = recording.trace
    chosen = trace.assigned_s >= START_S
    if not in_whole_rounds:
        chosen &= trace.assigned_s < trace.created_s[-1] - DRAIN_S
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
