"""Charts of experiments: lines and bars with the spread of the seeds, histograms.

A regime has the same colour in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean
from textwrap import fill
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from papaya.sim.draws import Floats
from papaya.sim.plots import COLORS, prepare, save
from papaya.study.experiments.result import Ratios

Points = Sequence[tuple[float, Sequence[float]]]
Lines = Mapping[str, Points]
Bounds = Mapping[str, Sequence[tuple[float, float, str]]]
_HEIGHT, _WIDTH, _ROW = 3.4, 4.6, 0.18  # inches, of a panel and a row of its legend
_FEW = 12
_INSIDE = 4
_ROOM = 0.8
_REGIMES = {"AsyncFL": 0, "AsyncFL, large K": 3, "SyncFL": 1, "SyncFL without": 2}
_UNMET = "target not reached in every recorded run"
_TRIANGLES = {"at most": "v", "at least": "^"}
_SIDEWAYS = {"at most": "<", "at least": ">"}
_BINS = 50
_MARGIN = 1.15
_EDGE = 1.05
_STEPS = ((1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0), (1.0, 2.0, 5.0), (1.0,))  # ticks of a logarithm
_MOST_TICKS = 9
_LABELS, _SPREAD_ROW, _LETTERS = 2.6, 0.42, 44  # inches, inches, and in a line of a row's label
_SMALL, _LARGE = 2.5, 6.5


class Panel(NamedTuple):
    """`lines`: label -> (x, values of the seeds). `paper`: the paper's points. `even` is drawn as a
    level at which both sides are equal. `caption` explains what could be misread. `bounds`:
    label -> (x, y, "at most" or "at least") where no value but a bound is known.
    """

    title: str
    y_label: str
    lines: Lines
    log: bool = False
    paper: tuple[tuple[float, float], ...] = ()
    even: float | None = None
    from_zero: bool = True
    caption: str = ""
    bounds: Bounds = MappingProxyType({})


class Dots(NamedTuple):
    """`values`: label -> for each group, what the seeds gave; `paper`: what the paper has. `level`
    is drawn as a line.
    """

    title: str
    y_label: str
    groups: Sequence[str]
    values: Mapping[str, Sequence[Sequence[float]]]
    paper: Mapping[str, Sequence[float]]
    level: float = 1.0
    log: bool = False


class SpreadRow(NamedTuple):
    """A number: the paper's, that of the experiment, and for each input what its values, in order,
    make of it.
    """

    label: str
    paper: Ratios
    own: Ratios
    spread: Mapping[str, Sequence[Ratios]]


class SpreadPanel(NamedTuple):
    title: str
    rows: Sequence[SpreadRow]


def ratio_panel(
    title: str,
    y_label: str,
    found: Mapping[str, Sequence[tuple[float, Ratios]]],
    paper: tuple[tuple[float, float], ...] = (),
) -> Panel:
    """Ratios of two sides on a logarithmic axis, with triangles where only a bound is known."""
    return Panel(
        title,
        y_label,
        {label: [(x, ratio.exact) for x, ratio in points] for label, points in found.items()},
        log=True,
        paper=paper,
        even=1.0,
        bounds={
            label: [(x, fmean(ratio.values), ratio.bound) for x, ratio in points if ratio.bound]
            for label, points in found.items()
        },
    )


def by_concurrency(folder: Path, key: str, panels: Sequence[Panel]) -> str:
    return lines(folder, key, "concurrency (clients)", panels)


def lines(
    folder: Path,
    key: str,
    x_label: str,
    panels: Sequence[Panel],
    *,
    falling: bool = False,
    ratios: bool = False,
) -> str:
    """One panel beside the other; a band from the lowest to the highest seed. A cross at the edge
    marks a place where a line has no value, because a target was not reached.

    `ratios`: the axis of x is logarithmic. `falling`: it also has large values on the left.
    """

    def make() -> Figure:
        labels = list(dict.fromkeys(label for panel in panels for label in panel.lines))
        colors = _colors(labels)
        figure, axes = _figure(len(panels))
        for axis, panel in zip(axes, panels, strict=True):
            prepare(axis, panel.title, x_label, panel.y_label)
            for label, points in panel.lines.items():
                _line(axis, label, _gapped(points, positive=panel.log), colors[label])
            if known := [point for point in panel.paper if all(map(math.isfinite, point))]:
                x, y = zip(*known, strict=True)
                axis.plot(x, y, "k*", markersize=9, label="the paper", linestyle="none")
            if panel.even is not None:
                axis.axhline(panel.even, color="#999999", lw=0.8, ls=(0, (4, 3)), zorder=0)
            if falling or ratios:
                _stretch(axis, panel, falling=falling)
            _mark_places(axis, panel)
            _mark_bounds(axis, panel, colors)
            _scale(axis, panel)
            _mark_unmet(axis, panel, colors)
            if panel.caption:
                axis.text(
                    0.99, 0.99, panel.caption, transform=axis.transAxes, ha="right", va="top",
                    fontsize=7, color="#666666",
                )  # fmt: skip
        _legends(figure, axes, panels)
        return figure

    return save(make, folder / f"{key}.png").name


def dots(folder: Path, key: str, x_label: str, panels: Sequence[Dots]) -> str:
    """A point for each group with a whisker over the seeds, beside the paper's star. The axes of y
    are the same.
    """

    def make() -> Figure:
        figure, axes = _figure(len(panels), share_y=True)
        for axis, panel in zip(axes, panels, strict=True):
            prepare(axis, panel.title, x_label, panel.y_label)
            colors, width = _colors(panel.values), _ROOM / len(panel.values)
            for place, (label, found) in enumerate(panel.values.items()):
                shift = (place - (len(panel.values) - 1) / 2) * width
                x = [at + shift for at in range(len(found))]
                means = [fmean(seeds) for seeds in found]
                below = [mean - min(seeds) for mean, seeds in zip(means, found, strict=True)]
                above = [max(seeds) - mean for mean, seeds in zip(means, found, strict=True)]
                color = colors[label]
                axis.errorbar(x, means, (below, above), fmt="o", ms=5, color=color, label=label)
                axis.plot(x, panel.paper[label], "*", ms=9, color=color, mec="k", mew=0.7)
            axis.plot([], [], "*", ms=9, color="w", mec="k", label="the paper")
            axis.axhline(panel.level, color="#999999", lw=0.8, ls=(0, (4, 3)), zorder=0)
            if panel.log:
                _log_axis(axis, _dotted(panel))
            axis.set_xticks(range(len(panel.groups)), panel.groups)
            axis.set_xlim(-0.5, len(panel.groups) - 0.5)
        axes[0].legend(frameon=False, fontsize=8)
        return figure

    return save(make, folder / f"{key}.png").name


def _dotted(panel: Dots) -> list[float]:
    seeds = [value for found in panel.values.values() for each in found for value in each]
    papers = [value for found in panel.paper.values() for value in found]
    return [value for value in (*seeds, *papers, panel.level) if math.isfinite(value) and value > 0]


def spreads(
    folder: Path, key: str, x_label: str, grid: Sequence[Sequence[SpreadPanel]], caption: str
) -> str:
    """Rows of ratios on a logarithmic axis. Panels beside each other have the same rows and axis.
    The marks of an input grow from its first value to its last.
    """

    def make() -> Figure:
        heights = [len(line[0].rows) for line in grid]
        size = (_LABELS + _WIDTH * len(grid[0]), _SPREAD_ROW * sum(heights) + 2)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(
            len(grid), len(grid[0]), squeeze=False, sharex="row", sharey="row",
            gridspec_kw={"height_ratios": heights},
        )  # fmt: skip
        every = [row for line in grid for panel in line for row in panel.rows]
        colors = _colors(dict.fromkeys(name for row in every for name in row.spread))
        for line, beside in zip(grid, axes, strict=True):
            for panel, axis in zip(line, beside, strict=True):
                prepare(axis, panel.title, x_label, "")
                _spread_rows(axis, panel, colors)
            _log_axis(beside[0], _spread_values(line), of_x=True)
        handles = _spread_legend(axes[0][0], colors)
        figure.legend(
            handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8,
            title=caption, title_fontsize=8,
        )  # fmt: skip
        return figure

    return save(make, folder / f"{key}.png").name


def _spread_values(line: Sequence[SpreadPanel]) -> list[float]:
    rows = [row for panel in line for row in panel.rows]
    found = [ratio for row in rows for each in row.spread.values() for ratio in each]
    values = [fmean(ratio.values) for ratio in found]
    own = [value for row in rows for value in (*row.own.values, *row.paper.values)]
    return [value for value in (*values, *own, 1.0) if math.isfinite(value) and value > 0]


def _spread_rows(axis: Axes, panel: SpreadPanel, colors: Mapping[str, str]) -> None:
    axis.grid(visible=False)
    axis.grid(axis="x", color="#dddddd", lw=0.7)
    axis.axvline(1.0, color="#999999", lw=0.8, ls=(0, (4, 3)), zorder=0)
    lanes = np.linspace(-0.34, 0.34, len(colors) + 1)
    for at, row in enumerate(panel.rows):
        if at % 2:
            axis.axhspan(at - 0.5, at + 0.5, color="#f5f5f5", zorder=-1, lw=0)
        own, *others = (at + lanes).tolist()
        if not row.own.bound:
            axis.plot([min(row.own.values), max(row.own.values)], [own, own], "k", lw=1)
        _spread_mark(axis, row.own, own, "k", 5.0)
        _spread_mark(axis, row.paper, own, "k", 9.0, "*")
        for (name, color), y in zip(colors.items(), others, strict=True):
            found = row.spread.get(name, ())
            known = [x for ratio in found if math.isfinite(x := fmean(ratio.values))]
            axis.plot(known, [y] * len(known), color=color, lw=0.8)
            for ratio, size in zip(found, np.linspace(_SMALL, _LARGE, len(found)), strict=True):
                _spread_mark(axis, ratio, y, color, float(size))
    labels = [fill(row.label, _LETTERS) for row in panel.rows]
    axis.set_yticks(range(len(labels)), labels, fontsize=7.5)
    axis.set_ylim(len(labels) - 0.5, -0.5)


def _spread_mark(
    axis: Axes, ratio: Ratios, y: float, color: str, size: float, exact: str = "o"
) -> None:
    """A triangle points to where the value is; a cross at the edge stands for an unknown one."""
    x = fmean(ratio.values)
    if not math.isfinite(x):
        across = axis.get_yaxis_transform()  # y as data, x as a share of the width
        axis.plot([0.985], [y], "x", color=color, ms=size, transform=across)
    elif ratio.bound:
        axis.plot([x], [y], _SIDEWAYS[ratio.bound], color=color, mfc="none", ms=size)
    else:
        axis.plot([x], [y], exact, color=color, ms=size)


def _spread_legend(axis: Axes, colors: Mapping[str, str]) -> list[Line2D]:
    marks = [
        ("*", "k", "k", 9, "the paper"),
        ("o", "k", "k", 5, "the experiment, with the range over seeds"),
        *(("o", color, color, 5, name) for name, color in colors.items()),
        *((mark, "#666666", "none", 7, f"{bound} this") for bound, mark in _SIDEWAYS.items()),
        ("x", "#666666", "none", 5, "unknown: runs ended too early"),
    ]
    return [
        axis.plot([], [], mark, color=color, mfc=inside, ms=size, label=label)[0]
        for mark, color, inside, size, label in marks
    ]


def bars(
    folder: Path,
    key: str,
    title: str,
    y_label: str,
    groups: Sequence[str],
    values: Mapping[str, Sequence[Sequence[float]]],
    paper: Mapping[str, Sequence[float]],
) -> str:
    """`values`: label -> for each group, what the seeds gave. A whisker spans the seeds. Words
    stand where a bar would be if a target was not reached. `paper`: what the paper has, alike.
    """

    def make() -> Figure:
        figure, (axis,) = _figure(1)
        prepare(axis, title, "", y_label)
        width, colors = _ROOM / len(values), _colors(values)
        for place, (label, found) in enumerate(values.items()):
            shift = (place - (len(values) - 1) / 2) * width
            color = colors[label]
            for at, seeds in enumerate(found):
                if all(map(math.isfinite, seeds)):
                    mean = fmean(seeds)
                    spread = [[mean - min(seeds)], [max(seeds) - mean]]
                    axis.bar(at + shift, mean, 0.9 * width, yerr=spread, color=color)
                else:
                    axis.text(
                        at + shift, 0, " not reached", rotation=90, ha="center", va="bottom",
                        fontsize=7, color=color,
                    )  # fmt: skip
            axis.bar(0, 0, color=color, label=label)  # the legend's, even if nothing was drawn
            places = [at + shift for at in range(len(groups))]
            axis.plot(places, paper.get(label, [math.nan] * len(groups)), "k*", ms=9)
        axis.plot([], [], "k*", ms=9, label="the paper's ratio, of our bar on the left")
        axis.set_xticks(range(len(groups)), groups)
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
        return figure

    return save(make, folder / f"{key}.png").name


def histograms(
    folder: Path,
    key: str,
    title: str,
    x_label: str,
    samples: Mapping[str, Sequence[float]],
    marks: Mapping[str, float] = MappingProxyType({}),
) -> str:
    """Densities over a logarithmic axis, as steps. Whole numbers have bins of whole numbers, with
    edges between them; a bin's share is divided by its width, or wide bins would look fuller.
    `marks` are single values on the axis of x.
    """

    def make() -> Figure:
        figure, (axis,) = _figure(1)
        prepare(axis, title, x_label, "share of clients per factor of e")
        edges = _edges(samples.values())
        middles = np.sqrt(edges[:-1] * edges[1:])
        widths, colors = np.diff(np.log(edges)), _colors(samples)
        for label, values in samples.items():
            counts, _ = np.histogram(values, edges)
            shares = counts / len(values) / widths
            axis.step(middles, shares, where="mid", color=colors[label], label=label)
        for (label, place), style in zip(marks.items(), cycle(("-", "--", ":"))):
            axis.axvline(place, color="#222222", lw=1, ls=style, label=label)
        axis.set_xscale("log")
        axis.set_ylim(bottom=0)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        if len(samples) + len(marks) > 1:
            figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
        return figure

    return save(make, folder / f"{key}.png").name


def _edges(samples: Iterable[Sequence[float]]) -> Floats:
    every = np.concatenate([np.asarray(values, np.float64) for values in samples])
    low, high = float(every.min()), float(every.max())
    found: Floats
    if (every == np.rint(every)).all():
        found = np.unique(np.rint(np.geomspace(low, high + 1, _BINS))) - 0.5
    else:
        found = np.geomspace(max(low, 1e-3), high * (1 + 1e-9), _BINS)
    return found


def _colors(labels: Iterable[str]) -> dict[str, str]:
    regimes = {
        label: COLORS[place]
        for label in labels
        for name, place in _REGIMES.items()
        if label.startswith(name)
    }
    others = cycle(color for color in COLORS if color not in regimes.values())
    return {label: regimes.get(label) or next(others) for label in labels}


def _figure(count: int, *, share_y: bool = False) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(_WIDTH * count, _HEIGHT), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False, sharey=share_y)
    return figure, list(axes[0])


def _line(axis: Axes, label: str, points: Points, color: str) -> None:
    x, low, high = [], [], []
    for place, values in points:
        x.append(place)
        low.append(min(values))
        high.append(max(values))
    means = [fmean(values) for _, values in points]
    marker = "o" if len(points) <= _FEW else ""
    axis.plot(x, means, marker=marker, markersize=4, color=color, label=label)
    axis.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def _seen(points: Points, *, positive: bool) -> Points:
    """What cannot be drawn is left out, such as hours to a target that was never met."""
    return [
        (x, values)
        for x, values in points
        if all(math.isfinite(value) and (value > 0 or not positive) for value in values)
    ]


def _gapped(points: Points, *, positive: bool) -> Points:
    """Leave a gap in the line at each value that cannot be drawn, because it is unknown."""
    seen = dict(_seen(points, positive=positive))
    return [(x, seen.get(x, [math.nan])) for x, _ in points]


def _scale(axis: Axes, panel: Panel) -> None:
    if panel.log:
        if values := _heights(panel):
            _log_axis(axis, values)
    elif panel.from_zero:
        axis.set_ylim(bottom=0)


def _heights(panel: Panel) -> list[float]:
    """Of all that is drawn on a logarithmic axis; none if neither a value nor a bound is known."""
    seen = [_seen(points, positive=True) for points in panel.lines.values()]
    found = [value for points in seen for _, values in points for value in values]
    found += [y for points in panel.bounds.values() for _, y, _ in points]
    if not found:
        return []
    papers = [y for _, y in panel.paper]
    even = [] if panel.even is None else [panel.even]
    return [value for value in (*found, *papers, *even) if math.isfinite(value) and value > 0]


def _log_axis(axis: Axes, values: Sequence[float], *, of_x: bool = False) -> None:
    """A logarithmic axis with ticks below and above all values."""
    ticks = log_ticks(min(values), max(values))
    limits = min(ticks[0], min(values) / _EDGE), max(ticks[-1], max(values) * _EDGE)
    line = axis.xaxis if of_x else axis.yaxis
    if of_x:
        axis.set_xscale("log")
        axis.set_xlim(*limits)
    else:
        axis.set_yscale("log")
        axis.set_ylim(*limits)
    line.set_major_locator(FixedLocator(ticks))
    line.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    line.set_minor_locator(NullLocator())


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers, the first at most `low`, the last at least `high`, and not too many."""
    # One power more on both sides: rounded logarithms may be on the wrong side of a power of ten.
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    ticks: list[float] = []
    for steps in _STEPS:
        every = sorted(float(f"{step}e{power}") for power in powers for step in steps)
        first = max(index for index, tick in enumerate(every) if tick <= low)
        last = min(index for index, tick in enumerate(every) if tick >= high)
        ticks = every[first : last + 1]
        if len(ticks) <= _MOST_TICKS:
            break
    return ticks


def _stretch(axis: Axes, panel: Panel, *, falling: bool) -> None:
    """A logarithmic axis of x with all places of the lines, drawn or not."""
    places = [x for points in panel.lines.values() for x, _ in points]
    axis.set_xscale("log")
    low, high = min(places) / _MARGIN, max(places) * _MARGIN
    axis.set_xlim(*((high, low) if falling else (low, high)))


def _mark_places(axis: Axes, panel: Panel) -> None:
    """Ticks where there are values, if those are few."""
    places = sorted({x for points in panel.lines.values() for x, _ in points})
    if len(places) <= _FEW:
        axis.set_xticks(places, [f"{x:g}" for x in places])
        axis.set_xticks([], minor=True)


def _mark_bounds(axis: Axes, panel: Panel, colors: Mapping[str, str]) -> None:
    """A hollow triangle that points to where the value is."""
    labels = {bound: f"{bound} this, as a run ended before its target" for bound in _TRIANGLES}
    for line, points in panel.bounds.items():
        for x, y, bound in points:
            axis.plot(
                [x], [y], _TRIANGLES[bound], color=colors[line], mfc="none", ms=7, ls="none",
                label=labels.pop(bound, None),
            )  # fmt: skip


def _mark_unmet(axis: Axes, panel: Panel, colors: Mapping[str, str]) -> None:
    """A cross at the lower edge for each line that has no value there, side by side."""
    label: str | None = _UNMET
    across = axis.get_xaxis_transform()  # x as data, y as a share of the height
    for row, (line, points) in enumerate(panel.lines.items()):
        seen = {x for x, _ in _seen(points, positive=panel.log)}
        seen |= {x for x, _, _ in panel.bounds.get(line, ())}
        for x in (x for x, _ in points if x not in seen):
            y = 0.04 + 0.04 * row
            axis.plot(
                [x], [y], "x", color=colors[line], ms=5, transform=across, label=label,
                clip_on=False,
            )  # fmt: skip
            label = None


def _legends(figure: Figure, axes: Sequence[Axes], panels: Sequence[Panel]) -> None:
    """Inside a panel if all have other lines and few, else under all of them."""
    handles = {
        label: handle
        for axis in axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    alike = all(list(panel.lines) == list(panels[0].lines) for panel in panels)
    if len(handles) > _INSIDE or (alike and len(panels) > 1):
        columns = 1 if len(panels) == 1 else 3
        figure.set_figheight(figure.get_figheight() + _ROW * len(handles) / columns)
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center",
            ncols=columns, frameon=False, fontsize=8,
        )  # fmt: skip
        return
    for axis in axes:
        if len(axis.get_legend_handles_labels()[1]) > 1:
            axis.legend(frameon=False, fontsize=8)
