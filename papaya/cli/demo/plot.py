"""The picture of a demo: perplexity over time, and how many clients were active meanwhile.

The lower panel is the paper's figure on client utilization, of a real run. Everything is drawn as
it was measured. Nothing is shown on a screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter

from papaya.cli.demo.progress import DemoSample

_INK, _FAINT, _MODEL, _CLIENTS = "#222222", "#dddddd", "#e4572e", "#2e6f95"
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.edgecolor": "#999999",
    "axes.labelcolor": _INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}


def draw(
    path: Path,
    title: str,
    curve: Sequence[tuple[float, int, float]],
    samples: Sequence[DemoSample],
    concurrency: int,
    utilization: float,
    evaluation_clients: int,
) -> None:
    """`curve`: seconds, version and perplexity of each evaluation."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9, 6), layout="constrained", facecolor="white")
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1.6, 1))
        _draw_perplexity(upper, curve, evaluation_clients)
        _draw_active(lower, samples, concurrency)
        lower.set_title(f"Active clients: {100 * utilization:.0f} % of the slots")
        figure.suptitle(title, x=0.01, ha="left", fontsize=12.5, fontweight="bold")
        figure.savefig(path, dpi=150)


def _draw_perplexity(axes: Axes, curve: Sequence[tuple[float, int, float]], clients: int) -> None:
    title = f"Perplexity on held-out examples; noisy, as each point is of {clients} devices only"
    _prepare(axes, title, "perplexity")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", which="minor", color=_FAINT, lw=0.4)
    seconds, perplexities = [point[0] for point in curve], [point[2] for point in curve]
    axes.plot(seconds, perplexities, color=_MODEL, lw=1.8, marker="o", ms=4.5, clip_on=False)
    axes.set_yticks([50, 100, 200, 500, 1000, 2000])
    axes.set_ylim(min([80.0, *perplexities]) * 0.8, max([2000.0, *perplexities]) * 1.3)
    for place, (at, version, perplexity) in enumerate(curve):
        if place in (0, len(curve) - 1):
            axes.annotate(
                f"{perplexity:,.0f} at version {version}",
                (at, perplexity),
                xytext=(8, 6) if place == 0 else (0, -14),
                textcoords="offset points",
                ha="left" if place == 0 else "right",
                color=_INK,
            )


def _draw_active(axes: Axes, samples: Sequence[DemoSample], concurrency: int) -> None:
    _prepare(axes, "", "active clients")
    axes.set_xlabel("seconds since the task was submitted")
    seconds, active = [s.seconds for s in samples], [s.active for s in samples]
    axes.plot(seconds, active, color=_CLIENTS, lw=1.5)
    axes.fill_between(seconds, active, color=_CLIENTS, alpha=0.12, lw=0)
    axes.axhline(concurrency, color=_INK, lw=0.8, ls=(0, (4, 3)), zorder=1)
    axes.annotate(
        f"C = {concurrency}",
        (1, concurrency),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8.5,
    )
    axes.set_ylim(0, 1.2 * concurrency)
    axes.set_xlim(left=0)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))


def _prepare(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title)
    axes.set_ylabel(label)
    axes.grid(axis="y", color=_FAINT, lw=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
