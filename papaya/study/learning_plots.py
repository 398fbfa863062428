"""Pictures of learning: the curve of one run; the best curves of a sweep and what was varied.

Loss is the mean by examples in natural logarithms; "p75" and "p99" are clients whose data volume is
at or above that percentile, as in the paper's Table 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from papaya.sim.plots import (  # says so if matplotlib is missing
    COLORS,
    Picture,
    prepare,
    save,
    styled,
)
from papaya.study.run import RunResult
from papaya.study.sweep import ResultRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TAILS = (
    ("all", "all clients"),
    ("p75", "75th percentile of data volume and above"),
    ("p99", "99th percentile and above"),
)
_BEST = 6
_DASHES = (
    "-",
    (0, (6, 3)),
    (0, (3, 3)),
    (0, (8, 3, 2, 3)),
    (0, (1.5, 1.5)),
    (0, (4, 2, 1, 2, 1, 2)),
)
_PANELS_PER_ROW = 3
_SPREAD = 8
_MAX_TICKS = 8
_FEW = 3  # points, which a line alone would not show


def draw_curve(result: RunResult, path: Path, title: str) -> Path:
    """Loss over virtual hours, for all clients and for those with much data."""
    return save(lambda: _curve(result, title), path)


def curve_picture(result: RunResult, title: str) -> Picture:
    """The same, for a notebook."""
    return styled(lambda: _curve(result, title))


def _curve(result: RunResult, title: str) -> Picture:
    figure = _figure(8, 4.4)
    axes = figure.add_subplot()
    ending = "" if result.curve.diverged is None else ": diverged"
    prepare(axes, title + ending, "virtual time (hours)", "loss on held-out data")
    hours = [point.hours for point in result.curve.points]
    for (field, label), color in zip(_TAILS, COLORS, strict=False):
        losses = [getattr(point.quality, field) for point in result.curve.points]
        marker = "o" if len(hours) <= _FEW else ""
        axes.plot(hours, losses, color=color, lw=1.6, marker=marker, ms=3, label=label)
    _target(axes, result.run.target)
    axes.legend(frameon=False, fontsize=8.5)
    return figure


def draw_sweep(rows: Sequence[ResultRow], varied: Sequence[str], path: Path, title: str) -> Path:
    """Rows are sorted, the best first. The curves of the best, then a panel for what was varied."""
    return save(lambda: _sweep(rows, varied, title), path)


def sweep_picture(rows: Sequence[ResultRow], varied: Sequence[str], title: str) -> Picture:
    """The same, for a notebook."""
    return styled(lambda: _sweep(rows, varied, title))


def _sweep(rows: Sequence[ResultRow], varied: Sequence[str], title: str) -> Picture:
    names = [name for name in varied if name != "regime"]
    lines = 1 + -(-len(names) // _PANELS_PER_ROW)
    figure = _figure(10, 3.8 * lines)
    grid = figure.add_gridspec(lines, _PANELS_PER_ROW)
    _draw_best(figure.add_subplot(grid[0, :]), rows, title)
    for number, name in enumerate(names):
        place = grid[1 + number // _PANELS_PER_ROW, number % _PANELS_PER_ROW]
        _draw_variable(figure.add_subplot(place), rows, name)
    return figure


def _draw_best(axes: Axes, rows: Sequence[ResultRow], title: str) -> None:
    prepare(axes, title, "virtual time (hours)", "loss on held-out data")
    # Curves often lie on each other: the later ones, dashed, let those below be seen.
    for row, color, dashes in zip(rows[:_BEST], COLORS, _DASHES, strict=False):
        for number, outcome in enumerate(row.outcomes):
            points = outcome.curve.points
            axes.plot(
                [point.hours for point in points],
                [point.quality.all for point in points],
                color=color,
                ls=dashes,
                lw=1.6,
                label=row.label if number == 0 else None,
            )
    _target(axes, rows[0].outcomes[0].run.target)
    axes.legend(frameon=False, fontsize=8, handlelength=4)


def _draw_variable(axes: Axes, rows: Sequence[ResultRow], name: str) -> None:
    """Each setting is a dot; the line joins the best at each value."""
    is_timed = any(row.target_hours is not None for row in rows)
    wanted = "hours to the target" if is_timed else "final loss"
    prepare(axes, f"{name}: best for each value", name, wanted)
    regimes = sorted({str(row.setting["regime"]) for row in rows})
    texts = sorted({v for row in rows if isinstance(v := row.setting[name], str)})
    for regime, color in zip(regimes, COLORS, strict=False):
        best: dict[float, float] = {}
        for row in rows:
            height = row.target_hours if is_timed else row.loss
            if row.setting["regime"] != regime or height is None or row.diverged:
                continue
            setting = row.setting[name]
            value = float(texts.index(setting) if isinstance(setting, str) else setting)
            axes.plot(value, height, "o", color=color, ms=4, alpha=0.6)
            best[value] = min(height, best.get(value, height))
        at = sorted(best)
        axes.plot(at, [best[value] for value in at], color=color, lw=1.3, label=regime)
    if texts:
        axes.set_xticks(range(len(texts)), texts)
    else:
        _scale(axes, sorted({float(row.setting[name]) for row in rows}))
    if len(regimes) > 1:
        axes.legend(frameon=False, fontsize=8)


def _scale(axes: Axes, values: list[float]) -> None:
    """By factors where the values are spread so; ticks where something was tried."""
    if values[0] > 0 and values[-1] >= _SPREAD * values[0]:
        axes.set_xscale("log")
    if len(values) <= _MAX_TICKS:
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.set_xticks([], minor=True)


def _figure(width: float, height: float) -> Picture:
    return Picture(figsize=(width, height), layout="constrained", facecolor="white")


def _target(axes: Axes, target: float | None) -> None:
    if target is not None:
        axes.axhline(target, color="#222222", lw=0.8, ls=(0, (4, 3)), zorder=1)
