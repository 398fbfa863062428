"""Who takes part: execution times and example counts of counted clients, and whether they differ.

Paper, figure "Participating client execution time and normalized number of examples" and its
two-sample Kolmogorov-Smirnov test against SyncFL without over-selection, "the ground truth
distribution": D = 8.8e-4 (p = 0.98) for AsyncFL, 6.6e-2 (p = 0.0) with over-selection.

Compared are clients that were assigned in a window: after the start, and long enough before the end
of the run that all of them had ended. At the end itself the slow would be missing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Final, NamedTuple

import numpy as np

from papaya.learning.weighting import staleness_weight
from papaya.sim.draws import Floats
from papaya.study.experiments import charts
from papaya.study.experiments.result import Finding, PaperClaim, Result
from papaya.study.experiments.runs import (
    DRAIN_S,
    START_S,
    TUNING_SEED,
    Scale,
    async_plan,
    plain_plan,
    sync_plan,
)
from papaya.study.fairness import Distance, distance, weighted_ks
from papaya.study.lab import Lab
from papaya.study.run import RecordingPlan
from papaya.study.trace import Trace

KEY = "sampling-bias"
_ASYNC, _OVER = "AsyncFL", "SyncFL with over-selection"
_TRUTH = "SyncFL without over-selection"
_PAPERS_D: Final = {_ASYNC: 8.8e-4, _OVER: 6.6e-2}


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
    return Result(
        key=KEY,
        title="Who takes part: sampling bias of over-selection",
        paper="Figure 11 and K-S test: execution time and examples of participating clients",
        claims=(
            PaperClaim(
                statement="AsyncFL: D by examples is not above what chance alone gives (D ÷ the D "
                "that chance exceeds once in twenty times)",
                paper="D = 8.8e-4, p = 0.98",
                expected=1.0,
                relation="below",
                values=tuple(one.ks / one.noise for one in by_examples[_ASYNC]),
            ),
            PaperClaim(
                statement="SyncFL with over-selection: D by examples",
                paper="6.6e-2",
                expected=_PAPERS_D[_OVER],
                values=tuple(one.ks for one in by_examples[_OVER]),
            ),
        ),
        findings=(
            *_findings(by_examples, "examples"),
            *_findings(by_time, "execution time"),
            *influences(found, truth),
        ),
        plots=(*_draw(lab, found, truth), _draw_distances(lab, by_examples, by_time)),
        notes=(
            (
                "D of two samples is never zero. The paper's 8.8e-4 comes from far larger samples, "
                "so it is compared with chance, not by its size."
            ),
            (
                "By influence, a client counts with what its update weighs in the model: its "
                "examples times 1/sqrt(1 + staleness). “AsyncFL without damping” counts the same "
                "clients with their examples alone, so the difference is what damping does."
            ),
        ),
    )


def _findings(distances: dict[str, list[Distance]], quantity: str) -> list[Finding]:
    found = []
    for name, sides in distances.items():
        found += [
            Finding(name=f"{name}: D by {quantity}", values=tuple(one.ks for one in sides)),
            Finding(
                name=f"{name}: p-value by {quantity}", values=tuple(one.p_value for one in sides)
            ),
        ]
    return found


def influences(found: dict[str, list[Counted]], truth: Counted) -> list[Finding]:
    """In SyncFL nothing is stale, so there is no damping to leave out."""
    edge = float(np.percentile(truth.examples, 99))
    expected = truth.influence_above(edge)
    undamped = [one._replace(influence=one.weight) for one in found[_ASYNC]]
    findings = []
    for name, sides in {**found, f"{_ASYNC} without damping": undamped}.items():
        distances = tuple(
            weighted_ks(one.examples, one.influence, truth.examples, truth.influence)
            for one in sides
        )
        top = tuple(100 * (one.influence_above(edge) / expected - 1) for one in sides)
        findings += [
            Finding(name=f"{name}: D by influence", values=distances),
            Finding(
                name=f"{name}: influence of the 1 % of clients with the most data",
                values=top,
                unit="%",
            ),
        ]
    return findings


class Counted(NamedTuple):
    """Columns of the counted clients. `weight`: of their updates, before damping. `influence`: what
    their updates weigh in the model.
    """

    execution_s: Floats
    examples: Floats
    weight: Floats
    influence: Floats

    def influence_above(self, examples: float) -> float:
        """The share of the influence that clients with so much data have."""
        chosen = self.examples >= examples
        return float(self.influence[chosen].sum() / self.influence.sum())


def _clients(lab: Lab, plan: RecordingPlan, *, in_whole_rounds: bool = False) -> Counted:
    """A round that waits for all its clients has no cut."""
    [recording] = lab.record([plan])
    trace: Trace = recording.trace
    chosen = trace.assigned_s >= START_S
    if not in_whole_rounds:
        chosen &= trace.assigned_s < trace.created_s[-1] - DRAIN_S
    examples = trace.clients.examples[chosen].astype(np.float64)
    damping = np.array([staleness_weight(s) for s in trace.staleness[chosen].tolist()])
    weight = np.minimum(examples, trace.task.max_examples)
    return Counted(trace.execution_s[chosen], examples, weight, weight * damping)


def _distances(sides: list[Counted], truth: Counted, quantity: int) -> list[Distance]:
    return [distance(side[quantity], truth[quantity]) for side in sides]


def _draw(
    lab: Lab,
    found: dict[str, list[Counted]],
    truth: Counted,
) -> tuple[str, ...]:
    names = ("Execution time of counted clients", "Examples of counted clients")
    labels = {"seconds": "execution time (s)", "examples": "examples of the client"}
    return tuple(
        charts.histograms(
            lab.folder,
            f"{KEY}-{label}",
            names[quantity],
            x_label,
            {
                _TRUTH: truth[quantity].tolist(),
                **{name: sides[0][quantity].tolist() for name, sides in found.items()},
            },
        )
        for quantity, (label, x_label) in enumerate(labels.items())
    )


def _draw_distances(
    lab: Lab, by_examples: dict[str, list[Distance]], by_time: dict[str, list[Distance]]
) -> str:
    """The paper's test is of examples."""
    both = (by_examples, by_time)
    panel = charts.Dots(
        "Distance from SyncFL without over-selection",
        "D (dashed: what AsyncFL exceeds by chance once in 20)",
        ("examples", "execution time"),
        {name: [[one.ks for one in by[name]] for by in both] for name in by_examples},
        {name: [d, math.nan] for name, d in _PAPERS_D.items()},
        level=fmean(one.noise for one in by_examples[_ASYNC]),
        log=True,
    )
    return charts.dots(lab.folder, f"{KEY}-distances", "", [panel])
