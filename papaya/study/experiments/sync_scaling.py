"""SyncFL as concurrency grows: time to a target falls slowly, communication trips grow fast.

Paper, figure "We use SyncFL to train a language model until it reaches a target accuracy, while
varying the concurrency from 130 to 2600": "doubling the concurrency from 1300 to 2600 decreases the
overall training time by only 17% while increasing communication costs by 73%".
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from papaya.study.experiments import charts
from papaya.study.experiments.result import Check, Finding, Result, number, ratios
from papaya.study.experiments.runs import Scale, rates, reached, sync_plan
from papaya.study.lab import Lab
from papaya.study.run import RecordingPlan

KEY = "sync-scaling"


def plans(scale: Scale, seeds: Sequence[int]) -> list[RecordingPlan]:
    return [sync_plan(scale, c, seed) for c in scale.concurrencies for seed in seeds]


def run(lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
    chosen = rates(scale.common_rate)
    found = {
        c: reached(lab, scale.target, [sync_plan(scale, c, seed) for seed in seeds], chosen)
        for c in scale.concurrencies
    }
    hours = {c: [run.hours for run in runs] for c, runs in found.items()}
    trips = {c: [run.trips for run in runs] for c, runs in found.items()}
    low, high = scale.concurrencies[-2:]
    time_change = tuple(100 * (ratio - 1) for ratio in ratios(hours[high], hours[low]))
    trip_change = tuple(100 * (ratio - 1) for ratio in ratios(trips[high], trips[low]))
    panels = [
        charts.Panel("Hours to the target", "hours", {"SyncFL": list(hours.items())}),
        charts.Panel("Trips to the target", "client updates", {"SyncFL": list(trips.items())}),
    ]
    smaller = min(scale.concurrencies)
    gain = fmean(hours[smaller]) / fmean(hours[high])
    cost = fmean(trips[high]) / fmean(trips[smaller])
    return Result(
        key=KEY,
        title="SyncFL at growing concurrency",
        paper="Figure 3: training time and trips of SyncFL, concurrency 130 to 2600",
        findings=(
            Finding(name=f"time, {low} to {high}", paper="-17 %", values=time_change, unit="%"),
            Finding(name=f"trips, {low} to {high}", paper="+73 %", values=trip_change, unit="%"),
        ),
        checks=(
            Check(
                "trips grow faster with concurrency than time falls",
                cost > gain,
                f"from {smaller} to {high}: {number(cost)}x the trips, {number(gain)}x faster",
            ),
        ),
        plots=(charts.by_concurrency(lab.folder, KEY, panels),),
        notes=(
            (
                f"One server rate ({scale.common_rate:g}) at every concurrency, as in the paper. "
                "Over-selected clients whose upload came too late are trips, as they are for a "
                "server."
            ),
        ),
    )
