"""How the learning claims depend on inputs that the paper does not give.

The paper does not say how its clients' data differ, and its text is not public. So the claims of
Table 1 at the 99th percentile and of the speedup are computed again over a grid: three dialects
(none, weak, strong), server rates of half and twice the chosen ones, targets from early to deep,
and other languages. The recorded run is the same for all, so only these inputs differ.

This experiment has no claims: it shows which claims of the others depend on an input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Final, NamedTuple, TypeVar, get_args

from msgspec import structs

from papaya.study.experiments import charts
from papaya.study.experiments.model_quality import ASYNC, METHODS, OVER, PLAIN, tune
from papaya.study.experiments.model_quality import method_plan as plan_of
from papaya.study.experiments.result import Finding, Ratios, Result, ratios
from papaya.study.experiments.runs import (
    HEADLINE,
    Reached,
    RegimeName,
    Scale,
    after_updates,
    compared,
    learning,
    met,
    papers_rates,
    papers_target,
    perplexity,
    target_loss,
    tuned_rates,
    tuned_target,
    tuning_seeds,
)
from papaya.study.experiments.speedup import PAPERS, TUNED
from papaya.study.lab import Lab
from papaya.study.replay import Rates
from papaya.study.run import RecordingPlan, Run, RunResult
from papaya.study.workloads.paper import Dialect

KEY = "sensitivity"
_DIALECTS: Final[tuple[Dialect, ...]] = get_args(Dialect)
_NAMES: Final[dict[Dialect, str]] = {
    "none": "no dialect",
    "weak": "weak dialect",
    "strong": "strong dialect",
}
_FACTORS: Final = (0.5, 1.0, 2.0)
_SHARES: Final = (0.7, 0.5, 0.3, 0.2, 0.1)


class Cell(NamedTuple):
    """One place of the grid; `language` is the seed of language and data."""

    dialect: Dialect
    factor: float
    language: int


def plans(scale: Scale, seeds: Sequence[int]) -> list[RecordingPlan]:
    return [
        plan_of(scale, name, seed) for name in METHODS for seed in (seeds[0], *tuning_seeds(scale))
    ]


def run(lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
    seeds = seeds[: scale.languages]
    worse, better = _table(lab, scale, seeds)
    speedups = [
        _speedup(lab, scale, seeds, protocol)
        for protocol in (_papers(lab, scale), _tuned(lab, scale))
    ]
    by_rate = [
        charts.Panel(
            f"{title}, 99th percentile",
            "perplexity ÷ without over-selection",
            _by_factor({place: ratio.exact for place, ratio in found.items()}),
            paper=((1.0, papers),),
            even=1.0,
            from_zero=False,
        )
        for title, found, papers in (("Over-selection", worse, 1.53), ("AsyncFL", better, 0.81))
    ]
    x_rate, x_target = "server rate ÷ chosen rate", "target: reducible loss that is left (%)"
    return Result(
        key=KEY,
        title="Sensitivity of the learning claims",
        paper="No figure of the paper: how the claims depend on what it does not say",
        findings=(
            *_findings("99th percentile, over-selection ÷ none", worse, "1.53"),
            *_findings("99th percentile, AsyncFL ÷ none", better, "0.81"),
            *(found for speedup in speedups for found in speedup.findings),
        ),
        plots=(
            charts.lines(lab.folder, f"{KEY}-rates", x_rate, by_rate, ratios=True),
            charts.lines(
                lab.folder, f"{KEY}-speedup", x_rate, [s.by_rate for s in speedups], ratios=True
            ),
            charts.lines(
                lab.folder,
                f"{KEY}-targets",
                x_target,
                [s.by_target for s in speedups],
                falling=True,
            ),
        ),
        notes=(
            (
                "Intervals are over languages and data, along one recorded run. Chosen rates are "
                "those of Table 1, and of the two protocols of the experiment on speedup, tuned "
                f"with the {HEADLINE} dialect. The other learning claims are not repeated: trips, "
                "other concurrencies, other percentiles, K, training curves, and everything on "
                "real text."
            ),
        ),
    )


_Place = tuple[Dialect, float]
_Values = dict[_Place, Ratios]


class _Protocol(NamedTuple):
    """How the rates of both regimes were chosen, and the share of the loss that is its target."""

    name: str
    share: float
    rates: Mapping[str, Rates]


def _papers(lab: Lab, scale: Scale) -> _Protocol:
    rates = {OVER: papers_rates(lab, scale, "SyncFL"), ASYNC: papers_rates(lab, scale, "AsyncFL")}
    return _Protocol(PAPERS, papers_target(lab, scale), rates)


def _tuned(lab: Lab, scale: Scale) -> _Protocol:
    share = tuned_target(lab, scale)

    def best(regime: RegimeName) -> Rates:
        return tuned_rates(lab, scale, regime, scale.concurrency, share).rates

    return _Protocol(TUNED, share, {OVER: best("SyncFL"), ASYNC: best("AsyncFL")})


class _Speedup(NamedTuple):
    """Of one protocol: place of the grid -> share of the loss that is left -> the languages'."""

    protocol: _Protocol
    concurrency: int
    found: dict[_Place, dict[float, Ratios]]

    @property
    def at_target(self) -> _Values:
        return {place: shares[self.protocol.share] for place, shares in self.found.items()}

    @property
    def findings(self) -> list[Finding]:
        name, share = self.protocol.name, self.protocol.share
        text = f"{name}: speedup with {share:.0%} of the reducible loss left"
        return _findings(text, self.at_target, "–")

    @property
    def by_rate(self) -> charts.Panel:
        title = f"{self.protocol.name}, {self.protocol.share:.0%} left"
        return charts.ratio_panel(title, _SPEEDUP, _by_factor(self.at_target))

    @property
    def by_target(self) -> charts.Panel:
        title = f"{self.protocol.name}, C = {self.concurrency}"
        points = {
            _NAMES[d]: [(100 * share, self.found[d, 1.0][share]) for share in _SHARES]
            for d in _DIALECTS
        }
        return charts.ratio_panel(title, _SPEEDUP, points)


_SPEEDUP = "hours of SyncFL ÷ hours of AsyncFL"


def _scaled(chosen: Rates, factor: float) -> Rates:
    rate = (chosen.optimizer.rate or 0.0) * factor
    return structs.replace(chosen, optimizer=structs.replace(chosen.optimizer, rate=rate))


def _cells(seeds: Sequence[int]) -> list[Cell]:
    return [Cell(*found) for found in product(_DIALECTS, _FACTORS, seeds)]


def _learnt(
    lab: Lab, scale: Scale, seeds: Sequence[int], chosen: Mapping[str, Rates]
) -> dict[tuple[str, Cell], RunResult]:
    """The runs of all methods and cells, with these rates."""

    def run_of(name: str, cell: Cell) -> Run:
        return learning(
            plan_of(scale, name, seeds[0]),
            _scaled(chosen[name], cell.factor),
            data=cell.dialect,
            language=cell.language,
        )

    wanted = {(name, cell): run_of(name, cell) for name in chosen for cell in _cells(seeds)}
    return dict(zip(wanted, lab.learn(wanted.values()), strict=True))


def _table(lab: Lab, scale: Scale, seeds: Sequence[int]) -> tuple[_Values, _Values]:
    """Perplexities at the 99th percentile of over-selection and of AsyncFL, ÷ plain SyncFL's."""
    chosen = {name: tune(lab, scale, name).rates for name in METHODS}
    learnt = _learnt(lab, scale, seeds, chosen)

    def relative(name: str) -> _Values:
        def p99(method: str, place: _Place) -> list[float]:
            curves = [learnt[method, Cell(*place, seed)].curve for seed in seeds]
            ends = [after_updates(curve, scale.table_updates) for curve in curves]
            return [perplexity(point.quality.p99) for point in ends]

        places = list(product(_DIALECTS, _FACTORS))
        return {place: Ratios(ratios(p99(name, place), p99(PLAIN, place))) for place in places}

    return relative(OVER), relative(ASYNC)


def _speedup(lab: Lab, scale: Scale, seeds: Sequence[int], protocol: _Protocol) -> _Speedup:
    """At the paper's concurrency."""
    learnt = _learnt(lab, scale, seeds, protocol.rates)

    def runs(name: str, place: _Place, share: float) -> list[Reached]:
        plan, found = plan_of(scale, name, seeds[0]), []
        for seed in seeds:
            loss = target_loss(lab, plan, share, place[0], seed)
            found.append(met(learnt[name, Cell(*place, seed)].curve, loss))
        return found

    shares = (*_SHARES, protocol.share)
    found = {
        place: {s: compared(runs(OVER, place, s), runs(ASYNC, place, s)) for s in shares}
        for place in product(_DIALECTS, _FACTORS)
    }
    return _Speedup(protocol, scale.concurrency, found)


_Value = TypeVar("_Value")


def _by_factor(values: Mapping[_Place, _Value]) -> dict[str, list[tuple[float, _Value]]]:
    return {_NAMES[d]: [(f, values[d, f]) for f in _FACTORS] for d in _DIALECTS}


def _findings(name: str, values: _Values, paper: str) -> list[Finding]:
    return [
        Finding(
            name=f"{name}: {_NAMES[dialect]}, rate x {factor:g}",
            paper=paper if factor == 1.0 else "–",
            values=found.values,
            bound=found.bound,
        )
        for (dialect, factor), found in values.items()
    ]
