"""Charts of experiments: lines and bars with the spread of the seeds, histograms.

A regime has the same colour in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from papaya.sim.plots import COLORS, prepare, save

Points = Sequence[tuple[float, Sequence[float]]]
_Lines = Mapping[str, Points]
_HEIGHT, _WIDTH = 3.6, 4.6
_FEW = 12
_INSIDE = 4
_ROOM = 0.8
_REGIMES = {"AsyncFL": 0, "AsyncFL, large K": 3, "SyncFL": 1, "SyncFL without": 2}


class Panel(NamedTuple):
    """`lines`: label -> (x, values of the seeds). `paper`: the paper's points."""

    title: str
    y_label: str
    lines: _Lines
    log: bool = False
    paper: tuple[tuple[float, float], ...] = ()


def by_concurrency(folder: Path, key: str, panels: Sequence[Panel]) -> str:
    return lines(folder, key, "concurrency", panels)


def lines(folder: Path, key: str, x_label: str, panels: Sequence[Panel]) -> str:
    """One panel beside the other; a band from the lowest to the highest seed."""

    def make() -> Figure:
        labels = list(dict.fromkeys(label for panel in panels for label in panel.lines))
        colors = _colors(labels)
        figure, axes = _figure(len(panels))
        for axis, panel in zip(axes, panels, strict=True):
            prepare(axis, panel.title, x_label, panel.y_label)
            for label, points in panel.lines.items():
                _line(axis, label, _seen(points, positive=panel.log), colors[label])
            if panel.paper:
                x, y = zip(*panel.paper, strict=True)
                axis.plot(x, y, "k*", markersize=9, label="the paper")
            _scale(axis, panel)
        _legends(figure, axes, panels)
        return figure

    return save(make, folder / f"{key}.png").name


def bars(
    folder: Path,
    key: str,
    title: str,
    y_label: str,
    groups: Sequence[str],
    values: Mapping[str, Sequence[Sequence[float]]],
) -> str:
    """`values`: label -> for each group, what the seeds gave. A whisker spans the seeds."""

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
            axis.bar(0, 0, color=color, label=label)  # the legend's, even if nothing was drawn
        axis.set_xticks(range(len(groups)), groups)
        if len(values) > 1:
            axis.legend(frameon=False, fontsize=8)
        return figure

    return save(make, folder / f"{key}.png").name


def histograms(
    folder: Path, key: str, title: str, x_label: str, samples: Mapping[str, Sequence[float]]
) -> str:
    """Densities over a logarithmic axis, as steps."""

    def make() -> Figure:
        figure, (axis,) = _figure(1)
        prepare(axis, title, x_label, "share of clients")
        low = min(min(values) for values in samples.values())
        high = max(max(values) for values in samples.values())
        edges = np.geomspace(max(low, 1e-3), high, 50)
        colors, steps = _colors(samples), edges.tolist()
        for label, values in samples.items():
            weights, color = np.full(len(values), 1 / len(values)), colors[label]
            axis.hist(values, steps, weights=weights, histtype="step", color=color, label=label)
        axis.set_xscale("log")
        axis.legend(frameon=False, fontsize=8)
        return figure

    return save(make, folder / f"{key}.png").name


def _colors(labels: Iterable[str]) -> dict[str, str]:
    regimes = {
        label: COLORS[place]
        for label in labels
        for name, place in _REGIMES.items()
        if label.startswith(name)
    }
    others = cycle(color for color in COLORS if color not in regimes.values())
    return {label: regimes.get(label) or next(others) for label in labels}


def _figure(count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(_WIDTH * count, _HEIGHT), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)
    return figure, list(axes[0])


def _line(axis: Axes, label: str, seen: Points, color: str) -> None:
    x, low, high = [], [], []
    for place, values in seen:
        x.append(place)
        low.append(min(values))
        high.append(max(values))
    means = [fmean(values) for _, values in seen]
    marker = "o" if len(seen) <= _FEW else ""
    axis.plot(x, means, marker=marker, markersize=4, color=color, label=label)
    axis.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def _seen(points: Points, *, positive: bool) -> Points:
    """What cannot be drawn is left out, such as hours to a target that was never met."""
    return [
        (x, values)
        for x, values in points
        if all(math.isfinite(value) and (value > 0 or not positive) for value in values)
    ]


def _scale(axis: Axes, panel: Panel) -> None:
    if not panel.log:
        axis.set_ylim(bottom=0)
    elif any(_seen(points, positive=True) for points in panel.lines.values()):
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _legends(figure: Figure, axes: Sequence[Axes], panels: Sequence[Panel]) -> None:
    """Inside a panel if it is short, under all of them if it is not."""
    longest = max(zip(axes, panels, strict=True), key=lambda pair: len(pair[1].lines))
    if len(longest[1].lines) > _INSIDE:
        handles, labels = longest[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    for axis, panel in zip(axes, panels, strict=True):
        if 1 < len(panel.lines) <= _INSIDE:
            axis.legend(frameon=False, fontsize=8)
