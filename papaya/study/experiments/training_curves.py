"""Training curves that split the speedup: straggler resilience, and small K.

Paper, figure "Training curves for different FL configuration": at the 10-hour mark AsyncFL with
K = 1000 has 3.4 % less loss than SyncFL with over-selection, and K = 100 another 3.5 % less.

At `full` scale the model is an LSTM, as in the paper; the other experiments use a smaller one, and
so does this one at `quick` scale, where its runs are those of the experiment on designs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
from msgspec import structs

from papaya.study.experiments import charts
from papaya.study.experiments.designs import (
    COMPARED,
    DESIGNS,
    LARGE,
    OVER,
    SMALL,
    design_plan,
    regime_of,
)
from papaya.study.experiments.result import PaperClaim, Result, changes
from papaya.study.experiments.runs import (
    AS_CHOSEN,
    HEADLINE,
    LSTM_CLIENT,
    ONE_RATE,
    PLANS,
    RegimeName,
    Scale,
    Variation,
    learning,
    name_of,
    papers_rates,
    regime_plan,
    tuning_seeds,
)
from papaya.study.lab import Lab
from papaya.study.replay import Curve, Rates
from papaya.study.run import RecordingPlan, Run
from papaya.study.trace import Trace
from papaya.study.workloads.paper import Model

KEY = "training-curves"
_EVALUATIONS = 15


def plans(scale: Scale, seeds: Sequence[int]) -> list[RecordingPlan]:
    return [
        *(design_plan(scale, name, seed) for name in DESIGNS for seed in seeds),
        *(regime_plan(scale, regime_of(name), s) for name in DESIGNS for s in tuning_seeds(scale)),
    ]


def run(lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
    curves = {}
    for data in scale.data:
        chosen = {regime: papers_rates(lab, scale, regime, data) for regime in PLANS}
        curves[data] = measured(lab, scale, seeds, data, chosen, DESIGNS, scale.curve_model)
    panels = [
        charts.Panel(
            f"{name_of(data)}: all clients".capitalize(),
            "loss (nats per word)" if data == HEADLINE else "loss (nats per character)",
            {name: _line(found) for name, found in by.items()},
            from_zero=False,
            paper=_papers(scale, by),
            caption="a line ends where its recorded runs end",
        )
        for data, by in curves.items()
    ]
    return Result(
        key=KEY,
        title="Training curves of four designs",
        paper="Figure 12: training curves at aggregation goal 1000; losses at 10 hours",
        claims=tuple(
            claim for data, by in curves.items() for claim in claims(scale, name_of(data), by)
        ),
        plots=(charts.lines(lab.folder, KEY, "hours", panels),),
        notes=(
            f"Model: {scale.curve_model}. The first moment is that of the embedding model.",
            ONE_RATE,
        ),
    )


def measured(
    lab: Lab,
    scale: Scale,
    seeds: Sequence[int],
    data: str,
    chosen: Mapping[RegimeName, Rates],
    names: Sequence[str],
    model: Model,
    varied: Variation = AS_CHOSEN,
) -> dict[str, list[Curve]]:
    """Only runs of the small model can be varied."""
    runs = {}
    for name in names:
        plans, rates = [design_plan(scale, name, seed) for seed in seeds], chosen[regime_of(name)]
        if model == "embedding":
            runs[name] = [varied.run(plan, rates, data) for plan in plans]
        else:
            runs[name] = _lstm_runs(lab, scale, model, plans, rates, data)
    learnt = iter(lab.learn([run for group in runs.values() for run in group]))
    return {name: [next(learnt).curve for _ in group] for name, group in runs.items()}


def claims(
    scale: Scale, name: str, curves: dict[str, list[Curve]], part: float = 1.0
) -> list[PaperClaim]:
    """`part`: losses are compared after this part of the fixed hour."""
    hour = part * scale.fixed_hour
    at = {name: [_loss_at(curve, hour) for curve in curves[name]] for name in COMPARED}
    is_short = any(c.points[-1].hours < hour for name in COMPARED for c in curves[name])
    incomparable = f"a run ended before {hour:g} h" if is_short else ""
    start = f"{name}: loss at {hour:g} h"
    return [
        PaperClaim(
            statement=f"{start}: AsyncFL with K = {scale.large_goal} against over-selection",
            paper="-3.4 %",
            expected=-3.4,
            values=changes(at[LARGE], at[OVER]),
            unit="%",
            incomparable=incomparable,
            no_effect=0.0,
        ),
        PaperClaim(
            statement=f"{start}: K = {scale.goal} against K = {scale.large_goal}",
            paper="-3.5 %",
            expected=-3.5,
            values=changes(at[SMALL], at[LARGE]),
            unit="%",
            incomparable=incomparable,
            no_effect=0.0,
        ),
    ]


def _papers(scale: Scale, curves: dict[str, list[Curve]]) -> tuple[tuple[float, float], ...]:
    """The paper's losses of AsyncFL with large and with small K, as shares of our SyncFL's."""
    hour = scale.fixed_hour
    over = fmean(_loss_at(curve, hour) for curve in curves[OVER])
    return (hour, 0.966 * over), (hour, 0.966 * 0.965 * over)


def _line(curves: Sequence[Curve]) -> list[tuple[float, list[float]]]:
    """At the hours of the first seed, as far as all seeds go."""
    until = min(curve.points[-1].hours for curve in curves)
    hours = [point.hours for point in curves[0].points if point.hours <= until]
    return [(hour, [_loss_at(curve, hour) for curve in curves]) for hour in hours]


def _lstm_runs(
    lab: Lab,
    scale: Scale,
    model: Model,
    plans: Sequence[RecordingPlan],
    chosen: Rates,
    data: str,
) -> list[Run]:
    """Until the hour at which losses are compared, and rarely evaluated: an LSTM learns slowly."""
    return [
        learning(
            recording.plan,
            structs.replace(chosen, client=LSTM_CLIENT),
            model=model,
            data=data,
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
