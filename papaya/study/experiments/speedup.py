"""Hours to a target loss, speedup and trips of AsyncFL over SyncFL, as concurrency grows.

Paper, figure "Number of hours to reach a target loss": "the speedup gap widens as concurrency
increases, from 2x to 5x", "The overall communication efficiency gain of AsyncFL increases from 2x
to 8x".

Three protocols for the learning rate, because it decides the outcome: one server rate for
everything, as in the paper; one for each regime, tuned at the paper's concurrency; and rate and
first moment tuned for each regime and concurrency. Tuning uses other seeds than those reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, geometric_mean
from typing import NamedTuple

from papaya.study.experiments import charts
from papaya.study.experiments.result import Check, Finding, Result, number, ratios
from papaya.study.experiments.runs import (
    Reached,
    Scale,
    Tuned,
    async_plan,
    learning,
    perplexity,
    rates,
    reached,
    runs_to,
    sync_plan,
    tuned_for_time,
    tuning_seeds,
)
from papaya.study.lab import Lab
from papaya.study.replay import Rates
from papaya.study.run import RecordingPlan

KEY = "speedup"
_ROUNDS_OF_A_TRANSIENT = 50
_PAPERS_SPEEDUP = 5


def plans(scale: Scale, seeds: Sequence[int]) -> list[RecordingPlan]:
    """At every concurrency, in both regimes, of the reported and the tuning seeds."""
    every = [*seeds, *tuning_seeds(scale)]
    makers = (sync_plan, async_plan)
    return [make(scale, c, seed) for make in makers for c in scale.concurrencies for seed in every]


class Pair(NamedTuple):
    """Both regimes at one concurrency, seed by seed."""

    concurrency: int
    sync: list[Reached]
    asynchronous: list[Reached]

    @property
    def speedup(self) -> tuple[float, ...]:
        return ratios([run.hours for run in self.sync], [run.hours for run in self.asynchronous])

    @property
    def trips_gain(self) -> tuple[float, ...]:
        return ratios([run.trips for run in self.sync], [run.trips for run in self.asynchronous])

    @property
    def throughput(self) -> tuple[float, ...]:
        """Trips per hour of AsyncFL by those of SyncFL: speedup ÷ trips gain, always."""
        return ratios(self.speedup, self.trips_gain)


class Protocol(NamedTuple):
    """How rates are chosen. Runs stop at the last of its targets, and pass the others."""

    name: str
    targets: tuple[float, ...]
    sync: dict[int, Rates]
    asynchronous: dict[int, Rates]
    tuned: dict[str, Tuned]


Measured = dict[str, list[Pair]]


def run(lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
    protocols = [_common(scale), *_tuned_protocols(lab, scale)]
    measured = {
        f"{protocol.name}, to {target:g}": _measure(lab, scale, seeds, protocol, target)
        for protocol in protocols
        for target in protocol.targets
    }
    checks = [grows(next(iter(measured.values())))]
    checks += [t.check(f"{p.name}, {name}") for p in protocols for name, t in p.tuned.items()]
    return Result(
        key=KEY,
        title="Speedup and trips of AsyncFL over SyncFL",
        paper="Figure 9: hours to a target loss, speedup, communication trips",
        findings=tuple(f for name, pairs in measured.items() for f in _findings(name, pairs)),
        checks=tuple(checks),
        plots=_draw(lab, measured),
        notes=(
            _in_short(measured),
            *map(_chosen, protocols),
            *_identity(measured),
            _PARADOX,
            *(_asymptotes(lab, scale, seeds, protocol) for protocol in protocols),
            *unmet(measured),
            *_transients(measured),
        ),
    )


_PARADOX = (
    "speedup = trips gain x throughput ratio holds for every run, by definition. So the paper's "
    "5x, 8x and 30x more server updates cannot all be of the same two runs."
)


def _common(scale: Scale) -> Protocol:
    chosen = dict.fromkeys(scale.concurrencies, rates(scale.common_rate))
    return Protocol("one rate for everything", (scale.target,), chosen, chosen, {})


def _tuned_protocols(lab: Lab, scale: Scale) -> list[Protocol]:
    tuned: dict[tuple[str, int], Tuned] = {}
    for concurrency in scale.concurrencies:
        for regime, make, grid in (
            ("SyncFL", sync_plan, scale.sync_grid),
            ("AsyncFL", async_plan, scale.async_grid),
        ):
            plans = [make(scale, concurrency, seed) for seed in tuning_seeds(scale)]
            tuned[regime, concurrency] = tuned_for_time(lab, scale, plans, grid)
    at = {regime: tuned[regime, scale.concurrency].rates for regime in ("SyncFL", "AsyncFL")}
    targets = (scale.target, scale.tuned_target)
    return [
        Protocol(
            "one rate per regime",
            targets,
            dict.fromkeys(scale.concurrencies, at["SyncFL"]),
            dict.fromkeys(scale.concurrencies, at["AsyncFL"]),
            {},
        ),
        Protocol(
            "tuned per regime and concurrency",
            targets,
            {c: tuned["SyncFL", c].rates for c in scale.concurrencies},
            {c: tuned["AsyncFL", c].rates for c in scale.concurrencies},
            {f"{regime} at {c}": found for (regime, c), found in tuned.items()},
        ),
    ]


def _measure(
    lab: Lab, scale: Scale, seeds: Sequence[int], protocol: Protocol, target: float
) -> list[Pair]:
    stop_at = protocol.targets[-1]
    sides = {
        c: (
            ([sync_plan(scale, c, seed) for seed in seeds], protocol.sync[c]),
            ([async_plan(scale, c, seed) for seed in seeds], protocol.asynchronous[c]),
        )
        for c in scale.concurrencies
    }
    lab.learn(t for pair in sides.values() for side in pair for t in runs_to(stop_at, *side))

    def runs(plans: list[RecordingPlan], chosen: Rates) -> list[Reached]:
        return reached(lab, target, plans, chosen, stop_at=stop_at)

    return [Pair(c, runs(*sync), runs(*side)) for c, (sync, side) in sides.items()]


def _findings(name: str, pairs: list[Pair]) -> list[Finding]:
    low, high = pairs[0], pairs[-1]
    ends = ((low, "2x", "2x"), (high, "5x", "8x"))
    found = []
    for pair, paper_speedup, paper_trips in ends:
        at = f"{name}: C = {pair.concurrency}"
        found.append(Finding(name=f"{at}, speedup", paper=paper_speedup, values=pair.speedup))
        found.append(Finding(name=f"{at}, fewer trips", paper=paper_trips, values=pair.trips_gain))
    return found


def grows(pairs: list[Pair]) -> Check:
    """A run that never met its target decides nothing, so then the claim does not hold."""
    means = [fmean(pair.speedup) for pair in pairs]
    is_complete = all(math.isfinite(speedup) for pair in pairs for speedup in pair.speedup)
    holds = is_complete and all(a < b for a, b in pairwise(means)) and means[-1] >= _PAPERS_SPEEDUP
    listed = ", ".join(f"{number(m)} at {p.concurrency}" for m, p in zip(means, pairs, strict=True))
    claim = f"with one rate the speedup grows with concurrency to at least {_PAPERS_SPEEDUP}"
    return Check(claim, holds, listed)


def _in_short(measured: Measured) -> str:
    """What the choice of rates did here, from the numbers."""
    parts = [
        f"{name}: {number(fmean(pairs[0].speedup))} at {pairs[0].concurrency}, "
        f"{number(fmean(pairs[-1].speedup))} at {pairs[-1].concurrency}"
        for name, pairs in measured.items()
    ]
    return "The learning rates decide the speedup. Here: " + "; ".join(parts) + "."


def _chosen(protocol: Protocol) -> str:
    def listed(chosen: dict[int, Rates]) -> str:
        return ", ".join(
            f"{number(found.optimizer.rate or 0.0)} (first moment {found.optimizer.beta1:g}) at {c}"
            for c, found in chosen.items()
        )

    return (
        f"{protocol.name}: server rates of SyncFL: {listed(protocol.sync)}; of AsyncFL: "
        f"{listed(protocol.asynchronous)}"
    )


def _identity(measured: Measured) -> list[str]:
    lines = []
    for name, pairs in measured.items():
        parts = [
            f"C = {p.concurrency}: {_typical(p.speedup)} = {_typical(p.trips_gain)} x "
            f"{_typical(p.throughput)}"
            for p in pairs
        ]
        lines.append(f"{name}: speedup = trips gain x throughput ratio: " + "; ".join(parts))
    return lines


def _typical(values: Sequence[float]) -> str:
    """Geometric means multiply, arithmetic ones do not."""
    is_usable = all(math.isfinite(value) and value > 0 for value in values)
    return number(geometric_mean(values) if is_usable else math.nan)


def _asymptotes(lab: Lab, scale: Scale, seeds: Sequence[int], protocol: Protocol) -> str:
    """The targets beside what each regime has reached where its recorded runs end."""
    c = scale.concurrency
    ends = []
    for name, make, chosen in (
        ("SyncFL", sync_plan, protocol.sync[c]),
        ("AsyncFL", async_plan, protocol.asynchronous[c]),
    ):
        runs = [learning(make(scale, c, seed), chosen) for seed in seeds]
        losses = [[p.quality.all for p in outcome.curve.points] for outcome in lab.learn(runs)]
        last = fmean(found[-1] for found in losses)
        falling = fmean(found[-max(1, len(found) // 10)] for found in losses) - last
        ends.append(f"{name} {number(perplexity(last))} (loss still falling by {number(falling)})")
    targets = " and ".join(f"{target:g}" for target in protocol.targets)
    return (
        f"{protocol.name}: target perplexity {targets}; where the recorded runs end, C = {c}: "
        f"{', '.join(ends)}"
    )


def unmet(measured: Measured) -> list[str]:
    """Where no speedup can be given."""
    found = [
        f"{name}, C = {pair.concurrency}"
        for name, pairs in measured.items()
        for pair in pairs
        if not all(map(math.isfinite, pair.speedup))
    ]
    if not found:
        return []
    return [f"No speedup, as a run ended before it met the target: {'; '.join(found)}"]


def _transients(measured: Measured) -> list[str]:
    short = [
        f"{name}, C = {pair.concurrency} ({number(fmean(run.versions for run in pair.sync))})"
        for name, pairs in measured.items()
        for pair in pairs
        if fmean(run.versions for run in pair.sync) < _ROUNDS_OF_A_TRANSIENT
    ]
    if not short:
        return []
    text = (
        f"SyncFL met the target in fewer than {_ROUNDS_OF_A_TRANSIENT} rounds, which measures the "
        f"start as much as the rate of learning: {'; '.join(short)}"
    )
    return [text]


def _draw(lab: Lab, measured: Measured) -> tuple[str, ...]:
    name, first = next(iter(measured.items()))
    hours = {
        "SyncFL": [(p.concurrency, [r.hours for r in p.sync]) for p in first],
        "AsyncFL": [(p.concurrency, [r.hours for r in p.asynchronous]) for p in first],
    }
    speedup = {n: [(p.concurrency, p.speedup) for p in pairs] for n, pairs in measured.items()}
    trips = {n: [(p.concurrency, p.trips_gain) for p in pairs] for n, pairs in measured.items()}
    panels = [
        charts.Panel(f"Hours: {name}", "hours", hours, log=True),
        charts.Panel("Speedup", "x", speedup, log=True),
        charts.Panel("Fewer trips", "x", trips, log=True),
    ]
    return (charts.by_concurrency(lab.folder, KEY, panels),)
