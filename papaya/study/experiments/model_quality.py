"""Table 1: test perplexity after the same number of client updates, and the hours it took.

Paper, table "Test perplexity (lower is better) after 1 million client updates": for all clients and
for those at or above the 75th and 99th percentile of data volume; SyncFL without and with
over-selection, and AsyncFL.

Each method has the rate and the first moment that give it the lowest perplexity for all clients on
other seeds.

AsyncFL damps stale updates by 1/√(1 + s). To see what damping does to its perplexity, the same
recordings are learnt again without it, with the same rates and with rates that are tuned for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec import structs

from papaya.config import Staleness
from papaya.study.experiments import charts
from papaya.study.experiments.result import Finding, PaperClaim, Result, ratios
from papaya.study.experiments.runs import (
    AS_CHOSEN,
    HEADLINE,
    Scale,
    Tuned,
    Variation,
    after_updates,
    async_plan,
    name_of,
    perplexity,
    plain_plan,
    rates,
    sync_plan,
    tuned_for_loss,
    tuning_seeds,
)
from papaya.study.lab import Lab
from papaya.study.replay import Rates
from papaya.study.run import RecordingPlan

KEY = "table-1"
_LEVELS = ("all", "p75", "p99")
PLAIN, OVER, ASYNC = METHODS = (
    "SyncFL without over-selection",
    "SyncFL with over-selection",
    "AsyncFL",
)
_PAPER = {
    PLAIN: ("68.38", "66.64", "47.82", "130.60"),
    OVER: ("72.97", "73.10", "73.24", "18.63"),
    ASYNC: ("57.32", "55.71", "38.51", "18.28"),
}
_RATIOS = {"all": (1.067, 0.838), "p75": (1.097, 0.836), "p99": (1.532, 0.805)}
"""The paper's perplexities of over-selection and of AsyncFL ÷ those of SyncFL without it."""
_HOURS = (7.01, 0.981)  # SyncFL without over-selection, and AsyncFL, ÷ SyncFL with it


class TableRow(NamedTuple):
    """One method: perplexities by level and hours, for each seed."""

    perplexity: dict[str, list[float]]
    all_by_clients: list[float]
    hours: list[float]


def plans(scale: Scale, seeds: Sequence[int]) -> list[RecordingPlan]:
    every = [*seeds, *tuning_seeds(scale)]
    return [method_plan(scale, name, seed) for name in _PAPER for seed in every]


def method_plan(scale: Scale, name: str, seed: int) -> RecordingPlan:
    if name == PLAIN:
        return plain_plan(scale, seed)
    make = sync_plan if name == OVER else async_plan
    return make(scale, scale.concurrency, seed)


def run(lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
    tables: dict[str, dict[str, TableRow]] = {}
    undamped: dict[str, dict[str, TableRow]] = {}
    checks = []
    for data in scale.data:
        chosen = {name: tune(lab, scale, name, data) for name in METHODS}
        best = {name: found.rates for name, found in chosen.items()}
        tables[name_of(data)] = measured(lab, scale, seeds, data, best)
        chosen[_UNDAMPED] = tune_undamped(lab, scale, best[ASYNC], data)
        without = {_SAME: without_damping(best[ASYNC]), _AGAIN: chosen[_UNDAMPED].rates}
        undamped[name_of(data)] = {
            how: _row(lab, scale, seeds, ASYNC, found, data) for how, found in without.items()
        }
        checks += [found.check(f"{name_of(data)}, {name}") for name, found in chosen.items()]
    first = next(iter(tables.values()))
    return Result(
        key=KEY,
        title=f"Table 1: perplexity after {scale.table_updates:,} client updates",
        paper="Table 1",
        claims=(*(c for name, rows in tables.items() for c in claims(name, rows)), *hours(first)),
        checks=tuple(checks),
        findings=(
            *(found for name, rows in tables.items() for found in _perplexities(name, rows)),
            *(
                found
                for name, rows in tables.items()
                for found in damping(name, rows, undamped[name])
            ),
            *(
                Finding(name=f"hours: {n}", paper=_PAPER[n][-1], values=tuple(row.hours), unit="h")
                for n, row in first.items()
            ),
        ),
        plots=(_draw(lab, tables),),
        notes=_NOTES,
    )


def tune(lab: Lab, scale: Scale, name: str, data: str = HEADLINE) -> Tuned:
    grid = scale.async_grid if name == ASYNC else scale.sync_grid
    plans = [method_plan(scale, name, seed) for seed in tuning_seeds(scale)]
    return tuned_for_loss(lab, plans, grid, scale.table_updates, data)


def tune_undamped(lab: Lab, scale: Scale, damped: Rates, data: str = HEADLINE) -> Tuned:
    """AsyncFL without damping: the search begins with the neighbours of the best damped rate."""
    rate, factor = damped.optimizer.rate or 0.0, scale.async_grid[1] / scale.async_grid[0]
    plans = [method_plan(scale, ASYNC, seed) for seed in tuning_seeds(scale)]
    grid = (rate / factor, rate, rate * factor)
    return tuned_for_loss(lab, plans, grid, scale.table_updates, data, _undamped_rates)


def without_damping(chosen: Rates) -> Rates:
    return structs.replace(chosen, staleness=Staleness(kind="constant"))


def _undamped_rates(rate: float, beta1: float) -> Rates:
    return without_damping(rates(rate, beta1))


def measured(
    lab: Lab,
    scale: Scale,
    seeds: Sequence[int],
    data: str,
    chosen: Mapping[str, Rates],
    varied: Variation = AS_CHOSEN,
) -> dict[str, TableRow]:
    """Of each method with its rates."""
    return {
        name: _row(lab, scale, seeds, name, found, data, varied) for name, found in chosen.items()
    }


def _row(
    lab: Lab,
    scale: Scale,
    seeds: Sequence[int],
    name: str,
    chosen: Rates,
    data: str,
    varied: Variation = AS_CHOSEN,
) -> TableRow:
    runs = [varied.run(method_plan(scale, name, seed), chosen, data) for seed in seeds]
    updates = varied.part * scale.table_updates
    points = [after_updates(outcome.curve, updates) for outcome in lab.learn(runs)]
    found = {level: [perplexity(getattr(p.quality, level)) for p in points] for level in _LEVELS}
    by_clients = [perplexity(point.quality.all_by_clients) for point in points]
    return TableRow(found, by_clients, [point.hours for point in points])


def claims(name: str, rows: dict[str, TableRow]) -> list[PaperClaim]:
    """Ratios can be compared with the paper's, perplexities of another language cannot."""
    return [
        PaperClaim(
            statement=f"{name}: perplexity, {_WORDS[level]}: {method} ÷ without over-selection",
            paper=f"{expected:.2f}",
            expected=expected,
            values=_relative(rows, method, level),
            no_effect=1.0,
        )
        for level, both in _RATIOS.items()
        for method, expected in zip((OVER, ASYNC), both, strict=True)
    ]


def hours(rows: dict[str, TableRow]) -> list[PaperClaim]:
    """They do not depend on what is learnt."""
    return [
        PaperClaim(
            statement=f"hours: {name} ÷ with over-selection",
            paper=f"{expected:.2f}",
            expected=expected,
            values=ratios(rows[name].hours, rows[OVER].hours),
            no_effect=1.0,
        )
        for name, expected in zip((PLAIN, ASYNC), _HOURS, strict=True)
    ]


def _relative(rows: dict[str, TableRow], method: str, level: str) -> tuple[float, ...]:
    return _over_plain(rows, rows[method], level)


def _over_plain(rows: dict[str, TableRow], row: TableRow, level: str) -> tuple[float, ...]:
    return ratios(row.perplexity[level], rows[PLAIN].perplexity[level])


def _perplexities(name: str, rows: dict[str, TableRow]) -> list[Finding]:
    found = []
    for method, row in rows.items():
        for level, paper in zip(_LEVELS, _PAPER[method], strict=False):
            values = tuple(row.perplexity[level])
            found.append(
                Finding(name=f"{name}, {method}: {_WORDS[level]}", paper=paper, values=values)
            )
        by_clients = tuple(row.all_by_clients)
        found.append(Finding(name=f"{name}, {method}: all, by clients", values=by_clients))
    return found


def damping(
    name: str, rows: dict[str, TableRow], undamped: Mapping[str, TableRow]
) -> Iterator[Finding]:
    """`undamped`: how its rates were chosen -> AsyncFL without damping."""
    for how, row in undamped.items():
        for level in _LEVELS:
            start = f"{name}: perplexity, {_WORDS[level]}"
            yield Finding(
                name=f"{start}: AsyncFL without damping, {how} ÷ without over-selection",
                values=_over_plain(rows, row, level),
            )
            sides = (rows[PLAIN], rows[ASYNC], row)
            yield Finding(
                name=f"{start}: share of AsyncFL's gap to SyncFL without over-selection that "
                f"disappears without damping, {how}",
                values=tuple(map(_closed, *(side.perplexity[level] for side in sides))),
                unit="%",
            )


def _closed(plain: float, damped: float, undamped: float) -> float:
    """In percent of the gap; not a number if there is none."""
    gap = damped - plain
    return 100 * (damped - undamped) / gap if gap > 0 else math.nan


_UNDAMPED: Final = "AsyncFL without damping"
_SAME, _AGAIN = "same rates", "rates tuned again"
_WORDS = {"all": "all", "p75": "75th percentile", "p99": "99th percentile"}
_NOTES = (
    (
        "Perplexities are per word of a synthetic language and per character of real text, so "
        "claims compare ratios. Perplexity for all clients weighs by examples; by clients it can "
        "rank the methods differently, so both are printed."
    ),
    "Rate and first moment of each method are tuned for the perplexity of all clients.",
    (
        "Without damping, a stale update weighs as much as a fresh one. “Same rates” are those of "
        "AsyncFL with damping, “rates tuned again” are tuned in the same way without it."
    ),
)


def _draw(lab: Lab, tables: dict[str, dict[str, TableRow]]) -> str:
    panels = [
        charts.Dots(
            name.capitalize(),
            "perplexity ÷ without over-selection",
            [_WORDS[level] for level in _LEVELS],
            {m: [_relative(rows, m, level) for level in _LEVELS] for m in (OVER, ASYNC)},
            {m: [_RATIOS[level][at] for level in _LEVELS] for at, m in enumerate((OVER, ASYNC))},
        )
        for name, rows in tables.items()
    ]
    return charts.dots(lab.folder, KEY, "clients, by volume of data", panels)
