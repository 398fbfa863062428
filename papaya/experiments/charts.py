"""Charts of experiments: lines over an axis with the spread of the seeds, curves, histograms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from papaya.sim.plots import COLORS, prepare, save

Points = Sequence[tuple[float, Sequence[float]]]
Lines = Mapping[str, Points]
_HEIGHT, _WIDTH = 3.6, 4.6
_FEW = 12


class Panel(NamedTuple):
    """`lines`: label -> (x, values of the seeds)."""

    title: str
    y_label: str
    lines: Lines
    log: bool = False
    log_x: bool = False


def by_concurrency(folder: Path, key: str, panels: Sequence[Panel]) -> str:
    return lines(folder, key, "concurrency", panels)


def lines(folder: Path, key: str, x_label: str, panels: Sequence[Panel]) -> str:
    """One panel beside the other; a band from the lowest to the highest seed."""

    def make() -> Figure:
        figure, axes = _figure(len(panels))
        for axis, panel in zip(axes, panels, strict=True):
            prepare(axis, panel.title, x_label, panel.y_label)
            for (label, points), color in zip(panel.lines.items(), COLORS, strict=False):
                _line(axis, label, points, color)
            if not panel.log:
                axis.set_ylim(bottom=0)
            elif any(_seen(points) for points in panel.lines.values()):
                axis.set_yscale("log")
            if panel.log_x:
                axis.set_xscale("log")
            if len(panel.lines) > 1:
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
        for (label, values), color in zip(samples.items(), COLORS, strict=False):
            weights = np.full(len(values), 1 / len(values))
            axis.hist(
                values, edges.tolist(), weights=weights, histtype="step", color=color, label=label
            )
        axis.set_xscale("log")
        axis.legend(frameon=False, fontsize=8)
        return figure

    return save(make, folder / f"{key}.png").name


def _figure(count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(_WIDTH * count, _HEIGHT), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)
    return figure, list(axes[0])


def _line(axis: Axes, label: str, points: Points, color: str) -> None:
    seen = _seen(points)
    x, low, high = [], [], []
    for place, values in seen:
        x.append(place)
        low.append(min(values))
        high.append(max(values))
    means = [fmean(values) for _, values in seen]
    marker = "o" if len(points) <= _FEW else ""
    axis.plot(x, means, marker=marker, markersize=4, color=color, label=label)
    axis.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def _seen(points: Points) -> Points:
    """What is not finite, such as hours to a target that was never met, is not drawn."""
    return [(x, values) for x, values in points if all(map(math.isfinite, values))]
