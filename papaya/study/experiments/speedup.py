"""Hours to a target loss, speedup and trips of AsyncFL over SyncFL, as concurrency grows.

Paper, figure "Number of hours to reach a target loss": "the speedup gap widens as concurrency
increases, from 2x to 5x", "The overall communication efficiency gain of AsyncFL increases from 2x
to 8x".

Two protocols side by side, because the server's rate decides the outcome. *The paper's*: Adam's
rate for everything, and a first moment for each regime. It answers: what does AsyncFL gain if
nobody tunes? *Tuned*: rate and first moment for each regime and concurrency. It answers: what does
AsyncFL gain over the best SyncFL? Tuning uses other seeds than those reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, geometric_mean
from typing import NamedTuple

from papaya.study.experiments import charts
from papaya.study.experiments.result import PaperClaim, Result, number, ratios
from papaya.study.experiments.runs import (
    TARGETS,
    Reached,
    RegimeName,
    Scale,
    Tuned,
    async_plan,
    learning,
    papers_rates,
    reached,
    regime_plan,
    runs_to_target,
    sync_plan,
    target_loss,
    tuned_for_time,
    tuning_seeds,
)
from papaya.study.lab import Lab
from papaya.study.replay import Rates
from papaya.study.run import RecordingPlan

KEY = "speedup"
_ROUNDS_OF_A_TRANSIENT = 50


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
    """How rates are chosen."""

    name: str
    sync: dict[int, Rates]
    asynchronous: dict[int, Rates]
    tuned: dict[str, Tuned]


class SpeedupCase(NamedTuple):
    """One protocol and one of `TARGETS`."""

    protocol: str
    remaining: float

    def __str__(self) -> str:
        return f"{self.protocol}, to {self.remaining:.0%} of the reducible loss"


Measured = dict[SpeedupCase, list[Pair]]


def run(lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
    protocols = [_papers(lab, scale), _tuned(lab, scale)]
    measured = {
        SpeedupCase(protocol.name, remaining): _measure(lab, scale, seeds, protocol, remaining)
        for protocol in protocols
        for remaining in TARGETS
    }
    return Result(
        key=KEY,
        title="Speedup and trips of AsyncFL over SyncFL",
        paper="Figure 9: hours to a target loss, speedup, communication trips",
        claims=tuple(claim for case, pairs in measured.items() for claim in claims(case, pairs)),
        checks=tuple(
            t.check(f"{p.name}, {name}") for p in protocols for name, t in p.tuned.items()
        ),
        plots=_draw(lab, measured),
        notes=(
            _MEANING,
            *map(_chosen, protocols),
            *_identity(measured),
            _PARADOX,
            *(_asymptotes(lab, scale, seeds, protocol) for protocol in protocols),
            *unmet(measured),
            *_transients(measured),
        ),
    )


_MEANING = (
    "The paper's protocol says what AsyncFL gains with one rate for everything: small K makes more "
    "steps per hour, and a step is as large whatever the cohort. The tuned protocol says what is "
    "left of it when SyncFL may take larger steps with larger cohorts."
)
_PARADOX = (
    "speedup = trips gain x throughput ratio holds for every run, by definition. So the paper's "
    "5x, 8x and 30x more server updates cannot all be of the same two runs."
)
PAPERS, TUNED = "the paper's protocol", "tuned per regime and concurrency"


def _papers(lab: Lab, scale: Scale) -> Protocol:
    sync, asynchronous = papers_rates(lab, scale, "SyncFL"), papers_rates(lab, scale, "AsyncFL")
    return Protocol(
        PAPERS,
        dict.fromkeys(scale.concurrencies, sync),
        dict.fromkeys(scale.concurrencies, asynchronous),
        {},
    )


def _tuned(lab: Lab, scale: Scale) -> Protocol:
    tuned: dict[tuple[str, int], Tuned] = {}
    for concurrency in scale.concurrencies:
        for regime, make, grid in (
            ("SyncFL", sync_plan, scale.sync_grid),
            ("AsyncFL", async_plan, scale.async_grid),
        ):
            plans = [make(scale, concurrency, seed) for seed in tuning_seeds(scale)]
            tuned[regime, concurrency] = tuned_for_time(lab, plans, grid)
    return Protocol(
        TUNED,
        {c: tuned["SyncFL", c].rates for c in scale.concurrencies},
        {c: tuned["AsyncFL", c].rates for c in scale.concurrencies},
        {f"{regime} at {c}": found for (regime, c), found in tuned.items()},
    )


def _measure(
    lab: Lab, scale: Scale, seeds: Sequence[int], protocol: Protocol, remaining: float
) -> list[Pair]:
    sides = {
        c: (
            ([sync_plan(scale, c, seed) for seed in seeds], protocol.sync[c]),
            ([async_plan(scale, c, seed) for seed in seeds], protocol.asynchronous[c]),
        )
        for c in scale.concurrencies
    }
    lab.learn(run for pair in sides.values() for side in pair for run in runs_to_target(*side))
    return [
        Pair(c, reached(lab, remaining, *sync), reached(lab, remaining, *side))
        for c, (sync, side) in sides.items()
    ]


def claims(case: SpeedupCase, pairs: list[Pair]) -> list[PaperClaim]:
    """At the lowest and at the highest concurrency, and that the gap widens between them."""
    low, high = pairs[0], pairs[-1]
    ends = ((low, 2.0, 2.0), (high, 5.0, 8.0))
    found = []
    for pair, papers_speedup, papers_trips in ends:
        for what, values, expected in (
            ("speedup", pair.speedup, papers_speedup),
            ("fewer trips", pair.trips_gain, papers_trips),
        ):
            found.append(
                PaperClaim(
                    statement=f"{case}: C = {pair.concurrency}, {what}",
                    paper=f"{expected:g}x",
                    expected=expected,
                    values=values,
                )
            )
    found.append(
        PaperClaim(
            statement=f"{case}: the speedup grows from C = {low.concurrency} to {high.concurrency}",
            paper="from 2x to 5x",
            expected=1.0,
            relation="above",
            values=ratios(high.speedup, low.speedup),
        )
    )
    return found


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
    for case, pairs in measured.items():
        parts = [
            f"C = {p.concurrency}: {_typical(p.speedup)} = {_typical(p.trips_gain)} x "
            f"{_typical(p.throughput)}"
            for p in pairs
        ]
        lines.append(f"{case}: speedup = trips gain x throughput ratio: " + "; ".join(parts))
    return lines


def _typical(values: Sequence[float]) -> str:
    """Geometric means multiply, arithmetic ones do not."""
    is_usable = all(math.isfinite(value) and value > 0 for value in values)
    return number(geometric_mean(values) if is_usable else math.nan)


def _asymptotes(lab: Lab, scale: Scale, seeds: Sequence[int], protocol: Protocol) -> str:
    """Where the recorded runs end."""
    ends = []
    sides: tuple[tuple[RegimeName, Rates], ...] = (
        ("SyncFL", protocol.sync[scale.concurrency]),
        ("AsyncFL", protocol.asynchronous[scale.concurrency]),
    )
    for regime, chosen in sides:
        plans = [regime_plan(scale, regime, seed) for seed in seeds]
        outcomes = lab.learn([learning(plan, chosen) for plan in plans])
        left = fmean(
            (outcome.end.all - target_loss(plan, 0.0))
            / (target_loss(plan, 1.0) - target_loss(plan, 0.0))
            for outcome, plan in zip(outcomes, plans, strict=True)
        )
        ends.append(f"{regime} {left:.1%}")
    return (
        f"{protocol.name}: what is left of the reducible loss where the recorded runs end, "
        f"C = {scale.concurrency}: {', '.join(ends)}"
    )


def unmet(measured: Measured) -> list[str]:
    """Where no speedup can be given."""
    found = [
        f"{case}, C = {pair.concurrency}"
        for case, pairs in measured.items()
        for pair in pairs
        if not all(map(math.isfinite, pair.speedup))
    ]
    if not found:
        return []
    return [f"No speedup, as a run ended before it met the target: {'; '.join(found)}"]


def _transients(measured: Measured) -> list[str]:
    short = [
        f"{case}, C = {pair.concurrency} ({number(fmean(run.versions for run in pair.sync))})"
        for case, pairs in measured.items()
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
    speedup = {str(case): [(p.concurrency, p.speedup) for p in p_] for case, p_ in measured.items()}
    trips = {
        str(case): [(p.concurrency, p.trips_gain) for p in p_] for case, p_ in measured.items()
    }
    concurrencies = [pair.concurrency for pair in next(iter(measured.values()))]
    ends = (concurrencies[0], concurrencies[-1])
    panels = [
        charts.Panel(
            "Speedup of AsyncFL over SyncFL",
            "hours of SyncFL ÷ AsyncFL",
            speedup,
            log=True,
            paper=tuple(zip(ends, (2.0, 5.0), strict=True)),
        ),
        charts.Panel(
            "Fewer communication trips",
            "trips of SyncFL ÷ AsyncFL",
            trips,
            log=True,
            paper=tuple(zip(ends, (2.0, 8.0), strict=True)),
        ),
    ]
    return (charts.by_concurrency(lab.folder, KEY, panels),)
