"""Training curves that split the speedup: straggler resilience, and small K.

Paper, figure "Training curves for different FL configuration": at the 10-hour mark AsyncFL with
K = 1000 has 3.4 % less loss than SyncFL with over-selection, and K = 100 another 3.5 % less.

The model is an LSTM, as in the paper; the other experiments use a smaller one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from papaya.study.experiments import charts
from papaya.study.experiments.designs import DESIGNS, design_plan, regime_of
from papaya.study.experiments.result import PaperClaim, Result, changes
from papaya.study.experiments.runs import (
    LSTM_CLIENT,
    ONE_RATE,
    Scale,
    learning,
    papers_rates,
    regime_plan,
    tuning_seeds,
)
from papaya.study.lab import Lab
from papaya.study.replay import Curve
from papaya.study.run import RecordingPlan, Run
from papaya.study.trace import Trace

KEY = "training-curves"
_EVALUATIONS = 30


def plans(scale: Scale, seeds: Sequence[int]) -> list[RecordingPlan]:
    seeds = seeds[: scale.curve_seeds]
    return [
        *(design_plan(scale, name, seed) for name in DESIGNS for seed in seeds),
        *(regime_plan(scale, regime_of(name), s) for name in DESIGNS for s in tuning_seeds(scale)),
    ]


def run(lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
    seeds = seeds[: scale.curve_seeds]
    runs = {name: _runs(lab, scale, name, seeds) for name in DESIGNS}
    learnt = iter(lab.learn([run for group in runs.values() for run in group]))
    curves = {name: [next(learnt).curve for _ in group] for name, group in runs.items()}
    at = {name: [_loss_at(c, scale.fixed_hour) for c in found] for name, found in curves.items()}
    over, large, small, _ = (at[name] for name in DESIGNS)
    hour = f"{scale.fixed_hour:g} h"
    lines = {
        name: [(point.hours, (point.quality.all,)) for point in found[0].points]
        for name, found in curves.items()
    }
    panel = charts.Panel("Loss for all clients", "loss", lines)
    return Result(
        key=KEY,
        title="Training curves of four designs",
        paper="Figure 12: training curves at aggregation goal 1000; losses at 10 hours",
        claims=(
            PaperClaim(
                statement=f"loss at {hour}: AsyncFL with K = {scale.large_goal} against "
                "over-selection",
                paper="-3.4 %",
                expected=-3.4,
                values=changes(large, over),
                unit="%",
            ),
            PaperClaim(
                statement=f"loss at {hour}: K = {scale.goal} against K = {scale.large_goal}",
                paper="-3.5 %",
                expected=-3.5,
                values=changes(small, large),
                unit="%",
            ),
        ),
        plots=(charts.lines(lab.folder, KEY, "hours", [panel]),),
        notes=(
            f"An LSTM; seeds {list(seeds)}. The first moment is that of the smaller model.",
            ONE_RATE,
        ),
    )


def _runs(lab: Lab, scale: Scale, name: str, seeds: Sequence[int]) -> list[Run]:
    chosen = papers_rates(lab, scale, regime_of(name), LSTM_CLIENT)
    plans = [design_plan(scale, name, seed) for seed in seeds]
    return [
        learning(
            recording.plan,
            chosen,
            model="lstm",
            updates=_updates_until(recording.trace, scale.fixed_hour),
            evaluations=_EVALUATIONS,
        )
        for recording in lab.record(plans)
    ]


def _updates_until(trace: Trace, hours: float) -> int:
    """Up to the first version that is made after so many hours."""
    versions = int(np.searchsorted(trace.created_s, 3600 * hours))
    return versions * trace.task.aggregation_goal


def _loss_at(curve: Curve, hours: float) -> float:
    """Interpolated; of a run that ended before, its last."""
    x = [point.hours for point in curve.points]
    return float(np.interp(hours, x, [point.quality.all for point in curve.points]))
