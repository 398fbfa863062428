"""What a sweep found: outcomes of one setting put together over seeds, the best setting first.

Settings are sorted by hours to the target when there is one, else by the final loss; a setting in
which a seed diverged or missed the target comes after those in which none did.

An optimum on the edge of what was varied is no optimum yet: `edges` names such variables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, pstdev

from msgspec import Struct

from papaya.study.plan import setting_of
from papaya.study.run import RunResult

_RATES = ("client_rate", "server_rate")


class ResultRow(Struct, frozen=True, kw_only=True):
    """Means over the seeds of one setting; `*_spread` are standard deviations.

    `target_hours` and `target_trips` are None unless every seed reached the target.
    """

    label: str
    setting: dict[str, float | str]
    outcomes: tuple[RunResult, ...]
    diverged: int
    loss: float
    loss_spread: float
    p75: float
    p99: float
    hours: float
    trips: float
    target_hours: float | None
    target_hours_spread: float
    target_trips: float | None
    utilization: float | None
    ks: float | None


def rows_of(outcomes: Sequence[RunResult], varied: Sequence[str]) -> list[ResultRow]:
    """One for each setting, the best first."""
    groups: dict[tuple[tuple[str, float | str], ...], list[RunResult]] = {}
    for outcome in outcomes:
        groups.setdefault(tuple(setting_of(outcome.run).items()), []).append(outcome)
    rows = [_row(dict(setting), found, varied) for setting, found in groups.items()]
    is_timed = any(outcome.run.target is not None for outcome in outcomes)

    def order(row: ResultRow) -> tuple[bool, float, float]:
        hours = row.target_hours if row.target_hours is not None else math.inf
        return row.diverged > 0, hours if is_timed else 0.0, row.loss

    return sorted(rows, key=order)


def varied_in(rows: Sequence[ResultRow], wanted: Sequence[str]) -> list[str]:
    """Those of the wanted names whose values differ between rows."""
    return [name for name in wanted if len({row.setting[name] for row in rows}) > 1]


def edges(rows: Sequence[ResultRow]) -> list[str]:
    """Rates whose best value, among the rows of the best regime, is the smallest or the largest."""
    if not rows or rows[0].diverged:
        return []
    alike = [row for row in rows if row.setting["regime"] == rows[0].setting["regime"]]
    found = []
    for name in varied_in(alike, _RATES):
        values = sorted(float(row.setting[name]) for row in alike)
        best = float(rows[0].setting[name])
        if best in (values[0], values[-1]):
            which = "smallest" if best == values[0] else "largest"
            found.append(f"the best {name}, {best:g}, is the {which} that was tried")
    return found


def _row(
    setting: dict[str, float | str], found: list[RunResult], varied: Sequence[str]
) -> ResultRow:
    losses = [outcome.end.all for outcome in found]
    hours = [o.target_hours for o in found if o.target_hours is not None]
    trips = [o.target_trips for o in found if o.target_trips is not None]
    used = [o.fleet.utilization for o in found if o.fleet.utilization is not None]
    bias = [o.fairness.execution_s.ks for o in found if o.fairness is not None]
    have_all = len(hours) == len(found)
    return ResultRow(
        label=", ".join(_words(name, setting[name]) for name in varied) or "one setting",
        setting=setting,
        outcomes=tuple(found),
        diverged=sum(outcome.curve.diverged is not None for outcome in found),
        loss=fmean(losses),
        loss_spread=pstdev(losses),
        p75=fmean(outcome.end.p75 for outcome in found),
        p99=fmean(outcome.end.p99 for outcome in found),
        hours=fmean(outcome.hours for outcome in found),
        trips=fmean(outcome.trips for outcome in found),
        target_hours=fmean(hours) if have_all else None,
        target_hours_spread=pstdev(hours) if have_all else 0.0,
        target_trips=fmean(trips) if have_all else None,
        utilization=fmean(used) if used else None,
        ks=fmean(bias) if bias else None,
    )


def _words(name: str, value: float | str) -> str:
    if name == "regime":
        return str(value)
    return f"{name} {value:g}" if isinstance(value, int | float) else f"{name} {value}"
