"""SyncFL as concurrency grows: time to a target falls slowly, communication trips grow fast.

Paper, figure "We use SyncFL to train a language model until it reaches a target accuracy, while
varying the concurrency from 130 to 2600": "doubling the concurrency from 1300 to 2600 decreases the
overall training time by only 17% while increasing communication costs by 73%".
"""

from __future__ import annotations

from collections.abc import Sequence

from papaya.study.experiments import charts
from papaya.study.experiments.result import Finding, PaperClaim, Result, changes
from papaya.study.experiments.runs import (
    EARLY,
    ONE_RATE,
    Scale,
    papers_rates,
    reached,
    regime_plan,
    sync_plan,
    tuning_seeds,
)
from papaya.study.lab import Lab
from papaya.study.run import RecordingPlan

KEY = "sync-scaling"


def plans(scale: Scale, seeds: Sequence[int]) -> list[RecordingPlan]:
    every = [sync_plan(scale, c, seed) for c in scale.concurrencies for seed in seeds]
    return [*every, *(regime_plan(scale, "SyncFL", seed) for seed in tuning_seeds(scale))]


def run(lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
    chosen = papers_rates(lab, scale, "SyncFL")
    found = {
        c: reached(lab, EARLY, [sync_plan(scale, c, seed) for seed in seeds], chosen)
        for c in scale.concurrencies
    }
    hours = {c: [run.hours for run in runs] for c, runs in found.items()}
    trips = {c: [run.trips for run in runs] for c, runs in found.items()}
    low, high = scale.concurrencies[-2:]
    first = scale.concurrencies[0]
    panels = [
        charts.Panel("Hours to the target", "hours", {"SyncFL": list(hours.items())}),
        charts.Panel("Trips to the target", "client updates", {"SyncFL": list(trips.items())}),
    ]
    return Result(
        key=KEY,
        title="SyncFL at growing concurrency",
        paper="Figure 3: training time and trips of SyncFL, concurrency 130 to 2600",
        claims=(
            PaperClaim(
                statement=f"from {low} to {high} clients, training time falls",
                paper="-17 %",
                expected=-17.0,
                values=changes(hours[high], hours[low]),
                unit="%",
            ),
            PaperClaim(
                statement=f"from {low} to {high} clients, communication trips grow",
                paper="+73 %",
                expected=73.0,
                values=changes(trips[high], trips[low]),
                unit="%",
            ),
        ),
        findings=(
            Finding(
                name=f"time, {first} to {high}",
                values=changes(hours[high], hours[first]),
                unit="%",
            ),
            Finding(
                name=f"trips, {first} to {high}",
                values=changes(trips[high], trips[first]),
                unit="%",
            ),
        ),
        plots=(charts.by_concurrency(lab.folder, KEY, panels),),
        notes=(
            ONE_RATE,
            (
                "Over-selected clients whose upload came too late are trips, as they are for a "
                "server."
            ),
        ),
    )
