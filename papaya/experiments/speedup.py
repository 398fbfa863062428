"""Hours to a target loss, speedup and trips of AsyncFL over SyncFL, as concurrency grows.

Paper, figure "Number of hours to reach a target loss": "the speedup gap widens as concurrency
increases, from 2x to 5x", "The overall communication efficiency gain of AsyncFL increases from 2x
to 8x".

Three protocols for the learning rate, because it decides the outcome: one server rate for
everything, as in the paper; one for each regime, tuned at the paper's concurrency; and rate and
first moment tuned for each regime and concurrency. Tuning uses other seeds than those reported.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from papaya.experiments import charts
from papaya.experiments.common import (
    Reached,
    async_scene,
    perplexity,
    rates,
    reached,
    sync_scene,
    tuning_seeds,
)
from papaya.experiments.lab import Lab, Scene, Trial
from papaya.experiments.result import Check, Finding, Result, number, ratios
from papaya.experiments.scale import Scale
from papaya.experiments.tuning import Tuned, tuned_for_time
from papaya.sim.replay import Rates

KEY = "speedup"
_ROUNDS_OF_A_TRANSIENT = 50


def scenes(scale: Scale, seeds: Sequence[int]) -> list[Scene]:
    """At every concurrency, in both regimes, of the reported and the tuning seeds."""
    every = [*seeds, *tuning_seeds(scale)]
    makers = (sync_scene, async_scene)
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
    name: str
    target: float
    sync: dict[int, Rates]
    asynchronous: dict[int, Rates]
    tuned: dict[str, Tuned]


def run(lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
    protocols = [_common(scale), *_tuned_protocols(lab, scale)]
    measured = {p.name: _measure(lab, scale, seeds, p) for p in protocols}
    findings = [f for name, pairs in measured.items() for f in _findings(name, pairs)]
    checks = [_grows(next(iter(measured.values())))]
    checks += [t.check(f"{p.name}, {name}") for p in protocols for name, t in p.tuned.items()]
    return Result(
        key=KEY,
        title="Speedup and trips of AsyncFL over SyncFL",
        paper="Figure: hours to a target loss, speedup, communication trips",
        findings=tuple(findings),
        checks=tuple(checks),
        plots=_draw(lab, measured),
        notes=(
            *_NOTES,
            *_identity(measured),
            *(_asymptotes(lab, scale, seeds[0], protocol) for protocol in protocols),
            *_transients(measured),
        ),
    )


_NOTES = (
    (
        "The choice of learning rates decides this figure. With one server rate for everything "
        "the steps are equally large in both regimes, AsyncFL makes ever more of them per hour, "
        "and the speedup grows with concurrency. Tuned for each configuration, SyncFL takes "
        "larger steps as its cohorts grow, staleness makes AsyncFL take smaller ones, and the "
        "speedup stops growing."
    ),
    (
        "speedup = trips gain x throughput ratio holds for every run, by definition. The "
        "paper's 5x, 8x and 30x more server updates cannot all be of the same two runs."
    ),
)


def _common(scale: Scale) -> Protocol:
    chosen = dict.fromkeys(scale.concurrencies, rates(scale.common_rate))
    return Protocol("one rate for everything", scale.target, chosen, chosen, {})


def _tuned_protocols(lab: Lab, scale: Scale) -> list[Protocol]:
    tuned: dict[tuple[str, int], Tuned] = {}
    for concurrency in scale.concurrencies:
        for regime, make, grid in (
            ("SyncFL", sync_scene, scale.sync_grid),
            ("AsyncFL", async_scene, scale.async_grid),
        ):
            scenes = [make(scale, concurrency, seed) for seed in tuning_seeds(scale)]
            tuned[regime, concurrency] = tuned_for_time(lab, scale, scenes, grid)
    at = {regime: tuned[regime, scale.concurrency].rates for regime in ("SyncFL", "AsyncFL")}
    return [
        Protocol(
            "one rate per regime",
            scale.tuned_target,
            dict.fromkeys(scale.concurrencies, at["SyncFL"]),
            dict.fromkeys(scale.concurrencies, at["AsyncFL"]),
            {},
        ),
        Protocol(
            "tuned per regime and concurrency",
            scale.tuned_target,
            {c: tuned["SyncFL", c].rates for c in scale.concurrencies},
            {c: tuned["AsyncFL", c].rates for c in scale.concurrencies},
            {f"{regime} at {c}": found for (regime, c), found in tuned.items()},
        ),
    ]


def _measure(lab: Lab, scale: Scale, seeds: Sequence[int], protocol: Protocol) -> list[Pair]:
    def both(c: int) -> Pair:
        sync = [sync_scene(scale, c, seed) for seed in seeds]
        asynchronous = [async_scene(scale, c, seed) for seed in seeds]
        return Pair(
            c,
            reached(lab, protocol.target, sync, protocol.sync[c]),
            reached(lab, protocol.target, asynchronous, protocol.asynchronous[c]),
        )

    return [both(c) for c in scale.concurrencies]


def _asymptotes(lab: Lab, scale: Scale, seed: int, protocol: Protocol) -> str:
    """The target beside what each regime reaches in the end, at the paper's concurrency."""
    c = scale.concurrency
    trials = {
        "SyncFL": Trial(scene=sync_scene(scale, c, seed), rates=protocol.sync[c]),
        "AsyncFL": Trial(scene=async_scene(scale, c, seed), rates=protocol.asynchronous[c]),
    }
    curves = lab.learn(trials.values())
    ends = [
        f"{name} {number(perplexity(curves[trial].points[-1].quality.all))}"
        for name, trial in trials.items()
    ]
    return (
        f"{protocol.name}: target perplexity {number(protocol.target)}; at the end of the recorded "
        f"runs, C = {c}: {', '.join(ends)}"
    )


def _findings(name: str, pairs: list[Pair]) -> list[Finding]:
    low, high = pairs[0], pairs[-1]
    ends = ((low, "2x", "2x"), (high, "5x", "8x"))
    found = []
    for pair, paper_speedup, paper_trips in ends:
        at = f"{name}: C = {pair.concurrency}"
        found.append(Finding(name=f"{at}, speedup", paper=paper_speedup, values=pair.speedup))
        found.append(Finding(name=f"{at}, fewer trips", paper=paper_trips, values=pair.trips_gain))
    return found


def _grows(pairs: list[Pair]) -> Check:
    means = [fmean(pair.speedup) for pair in pairs]
    holds = all(a < b for a, b in itertools.pairwise(means)) and means[-1] >= 5
    listed = ", ".join(f"{number(m)} at {p.concurrency}" for m, p in zip(means, pairs, strict=True))
    return Check("with one rate the speedup grows with concurrency to at least 5", holds, listed)


def _identity(measured: dict[str, list[Pair]]) -> list[str]:
    lines = []
    for name, pairs in measured.items():
        parts = [
            f"C = {p.concurrency}: {number(fmean(p.speedup))} = {number(fmean(p.trips_gain))} x "
            f"{number(fmean(p.throughput))}"
            for p in pairs
        ]
        lines.append(f"{name}: speedup = trips gain x throughput ratio: " + "; ".join(parts))
    return lines


def _transients(measured: dict[str, list[Pair]]) -> list[str]:
    short = [
        f"{name}, C = {pair.concurrency} ({number(fmean(run.versions for run in pair.sync))})"
        for name, pairs in measured.items()
        for pair in pairs
        if fmean(run.versions for run in pair.sync) < _ROUNDS_OF_A_TRANSIENT
    ]
    if not short:
        return []
    return [
        (
            f"SyncFL met the target in fewer than {_ROUNDS_OF_A_TRANSIENT} rounds, which "
            f"measures the start as much as the rate of learning: {'; '.join(short)}"
        )
    ]


def _draw(lab: Lab, measured: dict[str, list[Pair]]) -> tuple[str, ...]:
    first = next(iter(measured.values()))
    hours = {
        "SyncFL": [(p.concurrency, [r.hours for r in p.sync]) for p in first],
        "AsyncFL": [(p.concurrency, [r.hours for r in p.asynchronous]) for p in first],
    }
    speedup = {n: [(p.concurrency, p.speedup) for p in pairs] for n, pairs in measured.items()}
    trips = {n: [(p.concurrency, p.trips_gain) for p in pairs] for n, pairs in measured.items()}
    panels = [
        charts.Panel("Hours to the target, one rate for everything", "hours", hours, log=True),
        charts.Panel("Speedup", "x", speedup),
        charts.Panel("Fewer trips", "x", trips),
    ]
    return (charts.by_concurrency(lab.folder, KEY, panels),)
