"""Table 1: test perplexity after the same number of client updates, and the hours it took.

Paper, table "Test perplexity (lower is better) after 1 million client updates": for all clients and
for those at or above the 75th and 99th percentile of data volume; SyncFL without and with
over-selection, and AsyncFL.

Each method has the rate and the first moment that give it the lowest perplexity for all clients on
other seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from papaya.study.experiments import charts
from papaya.study.experiments.result import Finding, PaperClaim, Result, ratios
from papaya.study.experiments.runs import (
    Scale,
    Tuned,
    async_plan,
    learning,
    perplexity,
    plain_plan,
    sync_plan,
    tuned_for_loss,
    tuning_seeds,
)
from papaya.study.lab import Lab
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
    chosen = {name: tune(lab, scale, name) for name in _PAPER}
    rows = {name: _row(lab, scale, seeds, name, chosen[name]) for name in _PAPER}
    return Result(
        key=KEY,
        title=f"Table 1: perplexity after {scale.table_updates:,} client updates",
        paper="Table 1",
        claims=claims(rows),
        checks=tuple(found.check(name) for name, found in chosen.items()),
        findings=_findings(rows),
        plots=(_draw(lab, rows),),
        notes=_NOTES,
    )


def tune(lab: Lab, scale: Scale, name: str) -> Tuned:
    grid = scale.async_grid if name == ASYNC else scale.sync_grid
    plans = [method_plan(scale, name, seed) for seed in tuning_seeds(scale)]
    return tuned_for_loss(lab, plans, grid, scale.table_updates)


def _row(lab: Lab, scale: Scale, seeds: Sequence[int], name: str, chosen: Tuned) -> TableRow:
    plans = [method_plan(scale, name, seed) for seed in seeds]
    runs = [learning(plan, chosen.rates, updates=scale.table_updates) for plan in plans]
    points = [outcome.curve.points[-1] for outcome in lab.learn(runs)]
    found = {level: [perplexity(getattr(p.quality, level)) for p in points] for level in _LEVELS}
    by_clients = [perplexity(point.quality.all_by_clients) for point in points]
    return TableRow(found, by_clients, [point.hours for point in points])


def claims(rows: dict[str, TableRow]) -> tuple[PaperClaim, ...]:
    """Ratios can be compared with the paper's, perplexities of another language cannot."""
    plain, over, asynchronous = (rows[name] for name in (PLAIN, OVER, ASYNC))
    found = []
    for level, (worse, better) in _RATIOS.items():
        for name, row, expected in ((OVER, over, worse), (ASYNC, asynchronous, better)):
            found.append(
                PaperClaim(
                    statement=f"perplexity, {_WORDS[level]}: {name} ÷ without over-selection",
                    paper=f"{expected:.2f}",
                    expected=expected,
                    values=ratios(row.perplexity[level], plain.perplexity[level]),
                )
            )
    for name, row, expected in zip((PLAIN, ASYNC), (plain, asynchronous), _HOURS, strict=True):
        found.append(
            PaperClaim(
                statement=f"hours: {name} ÷ with over-selection",
                paper=f"{expected:.2f}",
                expected=expected,
                values=ratios(row.hours, over.hours),
            )
        )
    return tuple(found)


def _findings(rows: dict[str, TableRow]) -> tuple[Finding, ...]:
    found = []
    for name, row in rows.items():
        for level, paper in zip(_LEVELS, _PAPER[name], strict=False):
            values = tuple(row.perplexity[level])
            found.append(Finding(name=f"{name}: {_WORDS[level]}", paper=paper, values=values))
        by_clients = tuple(row.all_by_clients)
        found.append(Finding(name=f"{name}: all, by clients", values=by_clients))
        hours, paper = tuple(row.hours), _PAPER[name][-1]
        found.append(Finding(name=f"{name}: hours", paper=paper, values=hours, unit="h"))
    return tuple(found)


_WORDS = {"all": "all", "p75": "75th percentile", "p99": "99th percentile"}
_NOTES = (
    (
        "Perplexities are of a synthetic language, so claims compare ratios. Perplexity for all "
        "clients weighs by examples; by clients it can rank the methods otherwise, so both are "
        "printed."
    ),
    "Rate and first moment of each method are tuned for the perplexity of all clients.",
)


def _draw(lab: Lab, rows: dict[str, TableRow]) -> str:
    values = {name: [row.perplexity[level] for level in _LEVELS] for name, row in rows.items()}
    groups = [_WORDS[level] for level in _LEVELS]
    return charts.bars(
        lab.folder, KEY, "By data volume of the clients", "perplexity", groups, values
    )
