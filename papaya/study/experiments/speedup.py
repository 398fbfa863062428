"""Hours to a target loss, speedup and trips of AsyncFL over SyncFL, as concurrency grows.

Paper, figure "Number of hours to reach a target loss": "the speedup gap widens as concurrency
increases, from 2x to 5x", "The overall communication efficiency gain of AsyncFL increases from 2x
to 8x".

Two protocols side by side, because the server's rate decides the outcome. *The paper's*: Adam's
rate for everything, and a first moment for each regime. It answers: what does AsyncFL gain if
nobody tunes? *Tuned*: rate and first moment for each regime and concurrency. It answers: what does
AsyncFL gain over the best SyncFL? Tuning uses other seeds than those reported. Each protocol has a
target of its own, by one rule (`runs.Target`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, geometric_mean
from typing import Final, NamedTuple

from papaya.study.experiments import charts
from papaya.study.experiments.result import (
    Check,
    Finding,
    PaperClaim,
    Ratios,
    Result,
    number,
    ratios,
)
from papaya.study.experiments.runs import (
    AS_CHOSEN,
    HEADLINE,
    PLANS,
    Reached,
    RegimeName,
    Scale,
    Tuned,
    Variation,
    async_plan,
    compared,
    hours_finding,
    learning,
    name_of,
    papers_rates,
    papers_target,
    reached,
    share_left,
    sync_plan,
    tuned_rates,
    tuned_target,
    tuning_seeds,
)
from papaya.study.lab import Lab
from papaya.study.replay import Rates
from papaya.study.run import RecordingPlan

KEY = "speedup"
ROUNDS_OF_A_TRANSIENT: Final = 50
_SHARES: Final = (0.7, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.07, 0.05)


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
    def speedup(self) -> Ratios:
        return compared(self.sync, self.asynchronous)

    @property
    def trips_gain(self) -> Ratios:
        return compared(self.sync, self.asynchronous, "trips")

    @property
    def throughput(self) -> tuple[float, ...]:
        """Trips per hour of AsyncFL by those of SyncFL: speedup ÷ trips gain, always."""
        return ratios(self.speedup.values, self.trips_gain.values)


class Protocol(NamedTuple):
    """How rates are chosen: for each regime and concurrency. `share`: its target."""

    name: str
    share: float
    rates: dict[tuple[RegimeName, int], Rates]
    tuned: dict[str, Tuned]

    def case(self, data: str) -> SpeedupCase:
        return SpeedupCase(data, self.name, self.share)


class SpeedupCase(NamedTuple):
    """One text and one protocol, with its target."""

    data: str
    protocol: str
    share: float

    def __str__(self) -> str:
        return f"{name_of(self.data)}, {self.protocol}"


Measured = dict[SpeedupCase, list[Pair]]
PAPERS, TUNED = "one rate", "tuned rates"


def run(lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
    measured: Measured = {}
    by_share: dict[SpeedupCase, list[tuple[float, Ratios]]] = {}
    checks: list[Check] = []
    notes = [_MEANING]
    for data in scale.data:
        for protocol in protocols(lab, scale, data):
            case = protocol.case(data)
            pair = partial(pair_at, lab, scale, seeds, data, protocol)
            measured[case] = [pair(c) for c in scale.concurrencies]
            by_share[case] = [
                (100 * share, pair(scale.concurrency, Variation(share=share)).speedup)
                for share in _SHARES
            ]
            checks += [t.check(f"{case}, {name}") for name, t in protocol.tuned.items()]
            notes += [
                _chosen(case, protocol),
                _ends(lab, scale, seeds, data, protocol),
            ]
    return Result(
        key=KEY,
        title="Speedup and trips of AsyncFL over SyncFL",
        paper="Figure 9: hours to a target loss, speedup, communication trips",
        claims=tuple(claim for case, pairs in measured.items() for claim in claims(case, pairs)),
        checks=tuple(checks),
        findings=tuple(found for case, pairs in measured.items() for found in _hours(case, pairs)),
        plots=_draw(lab, scale, measured, by_share),
        notes=(*notes, *_identity(measured), _PARADOX, *unmet(measured), *transients(measured)),
    )


_MEANING = (
    f"“{PAPERS}” is the paper's protocol: it says what AsyncFL gains if nobody tunes. Small K "
    "makes more steps per hour, and the size of a step does not depend on the cohort. "
    f"“{TUNED}” says what is left of it when rate and first moment are tuned for each regime and "
    "concurrency, so that SyncFL may take larger steps with larger cohorts."
)
_PARADOX = (
    "speedup = trips gain x throughput ratio holds for every run, by definition. So the paper's 5x "
    "speedup, 8x fewer trips and 30x more server updates cannot all come from the same two runs."
)


def protocols(lab: Lab, scale: Scale, data: str = HEADLINE) -> tuple[Protocol, Protocol]:
    """The paper's, and the tuned one."""
    return _papers(lab, scale, data), _tuned(lab, scale, data)


def _papers(lab: Lab, scale: Scale, data: str) -> Protocol:
    chosen = {regime: papers_rates(lab, scale, regime, data) for regime in PLANS}
    every = {(regime, c): chosen[regime] for regime in PLANS for c in scale.concurrencies}
    return Protocol(PAPERS, papers_target(lab, scale, data), every, {})


def _tuned(lab: Lab, scale: Scale, data: str) -> Protocol:
    share = tuned_target(lab, scale, data)
    tuned = {
        (regime, c): tuned_rates(lab, scale, regime, c, share, data)
        for regime in PLANS
        for c in scale.concurrencies
    }
    return Protocol(
        TUNED,
        share,
        {place: found.rates for place, found in tuned.items()},
        {f"{regime} at {c}": found for (regime, c), found in tuned.items()},
    )


def pair_at(
    lab: Lab,
    scale: Scale,
    seeds: Sequence[int],
    data: str,
    protocol: Protocol,
    concurrency: int,
    varied: Variation = AS_CHOSEN,
) -> Pair:
    sides = [
        reached(
            lab,
            protocol.share,
            [make(scale, concurrency, seed) for seed in seeds],
            protocol.rates[regime, concurrency],
            data,
            varied,
        )
        for regime, make in PLANS.items()
    ]
    return Pair(concurrency, *sides)


def claims(case: SpeedupCase, pairs: list[Pair]) -> list[PaperClaim]:
    """At the lowest and at the highest concurrency, and that the gap widens between them."""
    low, high = pairs[0], pairs[-1]
    ends = ((low, 2.0, 2.0), (high, 5.0, 8.0))
    found = []
    for pair, papers_speedup, papers_trips in ends:
        for what, found_ratios, expected in (
            ("speedup", pair.speedup, papers_speedup),
            ("fewer trips", pair.trips_gain, papers_trips),
        ):
            found.append(
                PaperClaim(
                    statement=f"{case}: C = {pair.concurrency}, {what}",
                    paper=f"{expected:g}x",
                    expected=expected,
                    values=found_ratios.values,
                    bound=found_ratios.bound,
                    no_effect=1.0,
                )
            )
    growth = high.speedup.over(low.speedup)
    found.append(
        PaperClaim(
            statement=f"{case}: the speedup grows from C = {low.concurrency} to {high.concurrency}",
            paper="from 2x to 5x",
            expected=1.0,
            relation="above",
            values=growth.values,
            bound=growth.bound,
            no_effect=1.0,
        )
    )
    return found


def _hours(case: SpeedupCase, pairs: list[Pair]) -> list[Finding]:
    return [
        hours_finding(f"{case}: C = {pair.concurrency}, {regime} to the target", side)
        for pair in pairs
        for regime, side in (("SyncFL", pair.sync), ("AsyncFL", pair.asynchronous))
    ]


def _chosen(case: SpeedupCase, protocol: Protocol) -> str:
    listed = ", ".join(
        f"{regime} at {c} {number(found.optimizer.rate or 0.0)} ({found.optimizer.beta1:g})"
        for (regime, c), found in protocol.rates.items()
    )
    return (
        f"{case}: the target is {case.share:.1%} of the reducible loss left; server rates (first "
        f"moments): {listed}"
    )


def _identity(measured: Measured) -> list[str]:
    lines = []
    for case, pairs in measured.items():
        parts = [
            f"C = {p.concurrency}: {_typical(p.speedup.exact)} = {_typical(p.trips_gain.exact)} x "
            f"{_typical(p.throughput)}"
            for p in pairs
        ]
        lines.append(
            f"{case}: speedup = trips gain x throughput ratio (geometric means over seeds): "
            + "; ".join(parts)
        )
    return lines


def _typical(values: Sequence[float]) -> str:
    """Geometric means multiply, arithmetic ones do not."""
    is_usable = all(math.isfinite(value) and value > 0 for value in values)
    return number(geometric_mean(values) if is_usable else math.nan)


def _ends(lab: Lab, scale: Scale, seeds: Sequence[int], data: str, protocol: Protocol) -> str:
    """Where the recorded runs end."""
    ends = []
    for regime, make in PLANS.items():
        for c in scale.concurrencies:
            plans = [make(scale, c, seed) for seed in seeds]
            runs = [learning(plan, protocol.rates[regime, c], data=data) for plan in plans]
            left = fmean(share_left(lab, one, one.end.all, data) for one in lab.learn(runs))
            ends.append(f"{regime} at {c} {left:.1%}")
    return (
        f"{name_of(data)}, {protocol.name}: what is left of the reducible loss where the recorded "
        f"runs end: {', '.join(ends)}"
    )


def unmet(measured: Measured) -> list[str]:
    """Where the speedup is only a bound."""
    found = [
        f"{case}, C = {pair.concurrency}"
        for case, pairs in measured.items()
        for pair in pairs
        if not all(run.is_there for run in (*pair.sync, *pair.asynchronous))
    ]
    if not found:
        return []
    return [f"Only a bound, as a run ended before it met the target: {'; '.join(found)}"]


def transients(measured: Measured) -> list[str]:
    short = [
        f"{case}, C = {pair.concurrency} ({number(fmean(run.versions for run in pair.sync))})"
        for case, pairs in measured.items()
        for pair in pairs
        if fmean(run.versions for run in pair.sync) < ROUNDS_OF_A_TRANSIENT
    ]
    if not short:
        return []
    text = (
        f"SyncFL met the target, or its run ended, in fewer than {ROUNDS_OF_A_TRANSIENT} rounds, "
        "which measures the start as much as the rate of learning (mean rounds in brackets): "
        f"{'; '.join(short)}"
    )
    return [text]


_HOURS = "hours of SyncFL ÷ hours of AsyncFL"


def _draw(
    lab: Lab,
    scale: Scale,
    measured: Measured,
    by_share: dict[SpeedupCase, list[tuple[float, Ratios]]],
) -> tuple[str, ...]:
    ends = (scale.concurrencies[0], scale.concurrencies[-1])

    def panel(
        title: str, y_label: str, value: Callable[[Pair], Ratios], paper: float
    ) -> charts.Panel:
        found = {
            str(case): [(p.concurrency, value(p)) for p in pairs]
            for case, pairs in measured.items()
        }
        papers = tuple(zip(ends, (2.0, paper), strict=True))
        return charts.ratio_panel(title, y_label, found, papers)

    panels = [
        panel("Speedup", _HOURS, lambda pair: pair.speedup, 5.0),
        panel(
            "Fewer communication trips",
            "trips of SyncFL ÷ trips of AsyncFL",
            lambda pair: pair.trips_gain,
            8.0,
        ),
    ]
    by_target = charts.ratio_panel(
        f"Speedup by target, C = {scale.concurrency}",
        _HOURS,
        {str(case): found for case, found in by_share.items()},
    )
    return (
        charts.by_concurrency(lab.folder, KEY, panels),
        charts.lines(
            lab.folder,
            f"{KEY}-targets",
            "target: reducible loss that is left (%)",
            [by_target],
            falling=True,
        ),
    )
