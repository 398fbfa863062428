"""The paper's figure "Data transfer time versus aggregation goal", from what was measured here.

Left the bytes into the trusted environment, right the time to move them there and the sum back.
Bytes are counted; a time that was not measured is drawn hollow, in proportion to its bytes, from
the largest K of the same design that was.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from papaya.sim.plots import COLORS, prepare, save
from papaya.study.tee_transfer import DESIGNS, Design, Transfer

_LABELS: dict[Design, str] = {
    "asynchronous": "a seed per client, one sum of masks: O(K + m)",
    "naive": "naive: every update crosses: O(K m)",
}
_X_LABEL = "aggregation goal K"


def draw_transfer(transfers: Sequence[Transfer], path: Path) -> Path:
    """Write the figure; the file name chooses the format."""
    return save(lambda: _figure(transfers), path)


def _figure(transfers: Sequence[Transfer]) -> Figure:
    figure = Figure(figsize=(10, 4.2), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2)
    out = max(found.bytes_out for found in transfers) / 1e6
    prepare(left, f"Into the TSA, for a {out:.0f} MB model", _X_LABEL, "MB")
    prepare(right, "Time to transfer, in and out", _X_LABEL, "milliseconds")
    for design, color in zip(DESIGNS, COLORS, strict=False):
        found = [transfer for transfer in transfers if transfer.design == design]
        goals = [transfer.k for transfer in found]
        sizes = [transfer.bytes_in / 1e6 for transfer in found]
        left.plot(goals, sizes, "o-", color=color, ms=4, lw=1.5, label=_LABELS[design])
        _draw_times(right, found, color)
    for axes in (left, right):
        axes.set(xscale="log", yscale="log")
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_major_formatter("{x:,g}")
    left.legend(frameon=False, fontsize=8.5)
    return figure


def _draw_times(axes: Axes, transfers: Sequence[Transfer], color: str) -> None:
    measured = [t for t in transfers if t.seconds is not None]
    times = [1e3 * seconds_of(t, measured) for t in transfers]
    axes.plot([t.k for t in transfers], times, "-", color=color, lw=1.5)
    for transfer, ms in zip(transfers, times, strict=True):
        face = color if transfer.seconds is not None else "white"
        axes.plot(transfer.k, ms, "o", color=color, mfc=face, ms=4)


def seconds_of(transfer: Transfer, measured: Sequence[Transfer]) -> float:
    """As measured, or in proportion to the bytes of the largest that was."""
    if transfer.seconds is not None:
        return transfer.seconds
    largest = max(measured, key=lambda found: found.k)
    assert largest.seconds is not None
    share = (transfer.bytes_in + transfer.bytes_out) / (largest.bytes_in + largest.bytes_out)
    return largest.seconds * share
