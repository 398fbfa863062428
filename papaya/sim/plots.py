"""One picture of one or more reports: active clients, staleness, versions.

The upper panel is the paper's figure on client utilization: "The number of active clients (client
utilization) increases at the beginning of a round as clients join the cohort, and it falls
gradually towards the end of the round due to stragglers. In AsyncFL, the number of active clients
stays relatively constant over time".

Between two rounds of SyncFL the number is zero for a moment. Whether a sample falls into it is
chance, and looks like a crash: dips of one or two samples are not drawn. Everything else is drawn
as sampled, and utilization is of all samples.

The file name chooses the format: .png, .svg or .pdf. Nothing is shown on a screen and no global
state of matplotlib is touched.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from papaya.config import TaskConfig
from papaya.errors import ConfigError, OperatorError
from papaya.sim.report import RunReport, TaskResult, percent

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise OperatorError(
        "plots need matplotlib, which is not installed", hint="pip install rich matplotlib"
    ) from error

FORMATS = (".png", ".svg", ".pdf")
COLORS = ("#e4572e", "#2e6f95", "#8a8d91", "#4f9d69", "#8e5ea2", "#c9a227", "#17a2b8", "#7a4b2a")
_MAX_INNER_LEGEND = 4
_LEGEND_COLUMNS = 2
_INK, _FAINT = "#222222", "#dddddd"
# The same report gives the same bytes: no random ids.
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.edgecolor": "#999999",
    "axes.labelcolor": _INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "svg.hashsalt": "papaya",
}


class Picture(Figure):
    """A figure that a notebook shows."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=100)
        return buffer.getvalue()


class _Line(NamedTuple):
    label: str
    color: str
    config: TaskConfig
    result: TaskResult


def draw(reports: Mapping[str, RunReport], path: Path, title: str = "") -> Path:
    """Write one figure of all reports; the keys become the legend."""
    return save(lambda: _figure(_lines(reports), title), path)


def styled(make: Callable[[], Picture]) -> Picture:
    """A figure in our style, for a notebook."""
    with mpl.rc_context(_STYLE):
        return make()


def save(make: Callable[[], Figure], path: Path) -> Path:
    """Write a figure that is made in our style."""
    if path.suffix not in FORMATS:
        remedy = f"end the file name in {', '.join(FORMATS)}"
        raise ConfigError.of(
            "plot", str(path), f"{path.suffix!r} is not a supported format", remedy
        )
    with mpl.rc_context(_STYLE):
        figure = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix)
        figure.savefig(path, dpi=150, metadata=metadata)
    return path


def _lines(reports: Mapping[str, RunReport]) -> list[_Line]:
    found: list[_Line] = []
    for name, report in reports.items():
        for result in report.tasks:
            label = name if len(report.tasks) == 1 else f"{name} {result.task}".strip()
            color = COLORS[len(found) % len(COLORS)]
            found.append(_Line(label, color, report.config_of(result.task), result))
    return found


def _figure(lines: list[_Line], title: str) -> Figure:
    figure = Figure(figsize=(10, 6.6), layout="constrained", facecolor="white")
    grid = figure.add_gridspec(2, 2, height_ratios=(1.15, 1), hspace=0.06)
    _draw_active(figure.add_subplot(grid[0, :]), lines)
    _draw_staleness(figure.add_subplot(grid[1, 0]), lines)
    _draw_versions(figure.add_subplot(grid[1, 1]), lines)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12.5, fontweight="bold")
    return figure


def _draw_active(axes: Axes, lines: list[_Line]) -> None:
    prepare(axes, "Active clients over time", "virtual time (minutes)", "active clients")
    for line in reversed(lines):  # the first report on top
        minutes = [time_s / 60 for time_s in line.result.series.time_s]
        goal = f"K = {line.config.aggregation_goal:,}"
        label = f"{line.label}, {goal}: {percent(line.result.utilization)} utilized"
        active = without_short_dips(line.result.series.active)
        axes.plot(minutes, active, color=line.color, lw=1.5, label=label)
    limits = sorted({line.config.concurrency for line in lines})
    for limit in limits:
        axes.axhline(limit, color=_INK, lw=0.8, ls=(0, (4, 3)), zorder=1)
        axes.annotate(
            f"C = {limit:,}",
            (1, limit),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8.5,
        )
    axes.set_ylim(0, 1.13 * limits[-1])
    axes.margins(x=0.01)
    _legend_above(axes, math.ceil(len(lines) / _LEGEND_COLUMNS), _LEGEND_COLUMNS)


def without_short_dips(samples: Sequence[int]) -> npt.NDArray[np.int64]:
    """Dips of one or two samples filled to the lower of their edges; all else as it is."""
    values = np.asarray(samples, np.int64)
    if len(values) < 3:
        return values
    padded = np.pad(values, 2, "edge")
    highest = np.maximum.reduce([padded[:-2], padded[1:-1], padded[2:]])
    lowest: npt.NDArray[np.int64] = np.minimum.reduce([highest[:-2], highest[1:-1], highest[2:]])
    return lowest


def _draw_staleness(axes: Axes, lines: list[_Line]) -> None:
    prepare(axes, "Staleness", "staleness (server updates)", "share of updates (%)")
    stale = [line for line in lines if line.result.max_staleness > 0]
    if not stale:
        axes.text(
            0.5, 0.5, "no update was stale", transform=axes.transAxes, ha="center", color="#777777"
        )
        axes.set_xticks([])
        axes.set_yticks([])
        return
    for line in reversed(stale):
        result = line.result
        levels = range(result.max_staleness + 1)
        shares = [100 * result.staleness.get(level, 0) / result.counted for level in levels]
        is_only = len(stale) == 1
        axes.stairs(
            shares,
            [level - 0.5 for level in range(len(shares) + 1)],
            color=line.color,
            fill=is_only,
            alpha=0.85 if is_only else 1.0,
            lw=1.3,
            label=f"{line.label}: mean {result.mean_staleness:.1f}, at most {result.max_staleness}",
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(stale) <= _MAX_INNER_LEGEND:
        _legend_above(axes, rows=len(stale), columns=1)


def _draw_versions(axes: Axes, lines: list[_Line]) -> None:
    prepare(axes, "Server updates", "virtual time (minutes)", "version of the server model")
    for line in reversed(lines):
        minutes = [time_s / 60 for time_s in line.result.series.time_s]
        label = f"{line.label}: {line.result.versions_per_hour:,.0f} per hour"
        axes.step(
            minutes, line.result.series.version, color=line.color, lw=1.5, where="post", label=label
        )
    axes.margins(x=0.02)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if len(lines) <= _MAX_INNER_LEGEND:
        _legend_above(axes, rows=len(lines), columns=1)


def prepare(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(axis="y", color=_FAINT, lw=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _legend_above(axes: Axes, rows: int, columns: int) -> None:
    """Between the title and the axes, where nothing is drawn."""
    axes.set_title(axes.get_title("left"), pad=8 + 14 * rows)
    _legend(axes, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, borderaxespad=0.1)


def _legend(axes: Axes, **placement: Any) -> None:
    """In the order of the reports: lines are drawn last to first."""
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], frameon=False, fontsize=8.5, **placement)
