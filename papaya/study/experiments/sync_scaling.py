"""SyncFL as concurrency grows: time to a target falls slowly, communication trips grow fast.

Paper, figure "We use SyncFL to train a language model until it reaches a target accuracy, while
varying the concurrency from 130 to 2600": "doubling the concurrency from 1300 to 2600 decreases the
overall training time by only 17% while increasing communication costs by 73%".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal

from papaya.study.experiments import charts
from papaya.study.experiments.result import Finding, PaperClaim, Result
from papaya.study.experiments.runs import (
    AS_CHOSEN,
    ONE_RATE,
    Reached,
    Scale,
    Variation,
    compared,
    exact,
    name_of,
    papers_rates,
    papers_target,
    reached,
    regime_plan,
    sync_plan,
    tuning_seeds,
)
from papaya.study.lab import Lab
from papaya.study.replay import Rates
from papaya.study.run import RecordingPlan

KEY = "sync-scaling"

_Unit = Literal["hours", "trips"]
SyncRuns = Mapping[int, list[Reached]]
"""Of one text, by concurrency."""


def plans(scale: Scale, seeds: Sequence[int]) -> list[RecordingPlan]:
    every = [sync_plan(scale, c, seed) for c in scale.concurrencies for seed in seeds]
    return [*every, *(regime_plan(scale, "SyncFL", seed) for seed in tuning_seeds(scale))]


def run(lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
    found = {}
    for data in scale.data:
        chosen, share = papers_rates(lab, scale, "SyncFL", data), papers_target(lab, scale, data)
        found[name_of(data)] = measured(lab, scale, seeds, data, chosen, share, scale.concurrencies)
    first, (low, high) = scale.concurrencies[0], scale.concurrencies[-2:]
    return Result(
        key=KEY,
        title="SyncFL at growing concurrency",
        paper="Figure 3: training time and trips of SyncFL, concurrency 130 to 2600",
        claims=tuple(claim for name, by in found.items() for claim in claims(scale, name, by)),
        findings=tuple(
            one
            for name, by in found.items()
            for one in (
                _finding(name, by, first, high, "time", "hours"),
                _finding(name, by, first, high, "trips", "trips"),
            )
        ),
        plots=(charts.by_concurrency(lab.folder, KEY, _panels(found, low, high)),),
        notes=(
            ONE_RATE,
            (
                "Over-selected clients whose upload came too late are trips, as they are for a "
                "server."
            ),
        ),
    )


def claims(scale: Scale, name: str, by: SyncRuns) -> list[PaperClaim]:
    """Between the two highest concurrencies."""
    low, high = scale.concurrencies[-2:]
    return [
        _claim(name, by, low, high, "training time falls", -17.0, "hours"),
        _claim(name, by, low, high, "communication trips grow", 73.0, "trips"),
    ]


def _claim(
    name: str, by: SyncRuns, low: int, high: int, what: str, papers: float, unit: _Unit
) -> PaperClaim:
    change = compared(by[high], by[low], unit).changes
    return PaperClaim(
        statement=f"{name}: from {low} to {high} clients, {what}",
        paper=f"{papers:+g} %",
        expected=papers,
        values=change.values,
        bound=change.bound,
        unit="%",
        no_effect=0.0,
    )


def _finding(name: str, by: SyncRuns, first: int, high: int, what: str, unit: _Unit) -> Finding:
    values, bound = compared(by[high], by[first], unit).changes
    text = f"{name}: {what}, {first} to {high}"
    return Finding(name=text, values=values, bound=bound, unit="%")


def _panels(found: Mapping[str, SyncRuns], low: int, high: int) -> list[charts.Panel]:
    hours = {name: {c: exact(at) for c, at in by.items()} for name, by in found.items()}
    trips = {name: {c: exact(at, "trips") for c, at in by.items()} for name, by in found.items()}
    return [
        charts.Panel(
            "Time to the target",
            "hours",
            {n: list(by.items()) for n, by in hours.items()},
            paper=tuple((high, 0.83 * fmean(by[low])) for by in hours.values()),
            caption=f"stars: the paper's change from {low} to {high} clients, of our mean",
        ),
        charts.Panel(
            "Trips to the target",
            "client updates",
            {n: list(by.items()) for n, by in trips.items()},
            paper=tuple((high, 1.73 * fmean(by[low])) for by in trips.values()),
        ),
    ]


def measured(
    lab: Lab,
    scale: Scale,
    seeds: Sequence[int],
    data: str,
    chosen: Rates,
    share: float,
    concurrencies: Sequence[int],
    varied: Variation = AS_CHOSEN,
) -> SyncRuns:
    plans = {c: [sync_plan(scale, c, seed) for seed in seeds] for c in concurrencies}
    return {c: reached(lab, share, same, chosen, data, varied) for c, same in plans.items()}
