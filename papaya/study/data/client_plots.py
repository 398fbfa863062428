"""Pictures of clients: how many examples each has, and of which labels."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from papaya.sim.plots import COLORS, Picture, prepare, save
from papaya.study.data.source import Source, described

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHOWN_CLIENTS: Final = 40
_MAX_LABELS: Final = 40
_BINS: Final = 30


def draw_clients(source: Source, path: Path, label: str = "y") -> Path:
    return save(lambda: clients_picture(source, label), path)


def clients_picture(source: Source, label: str = "y") -> Picture:
    """Sizes of all clients and, if examples are JSON with a field of that name, the labels of some
    clients. A notebook shows it.
    """
    counts = _labels(source, label)
    figure = Picture(figsize=(10 if counts else 5.5, 4), layout="constrained", facecolor="white")
    axes = figure.subplots(1, 2 if counts else 1, squeeze=False)[0]
    figure.suptitle(described(source), fontsize=9)
    _draw_sizes(axes[0], source)
    if counts:
        _draw_labels(axes[1], counts, label)
    return figure


def _draw_sizes(axes: Axes, source: Source) -> None:
    prepare(axes, "Size of clients", "training examples", "clients")
    largest = int(source.volumes.max())
    edges = np.unique(np.geomspace(1, largest + 1, _BINS).astype(int))
    axes.hist(source.volumes, bins=edges.tolist(), color=COLORS[1])
    axes.set_xscale("log")


def _draw_labels(axes: Axes, counts: list[Counter[Any]], label: str) -> None:
    prepare(axes, f"Labels of {len(counts)} clients", "client", label)
    names = sorted({name for count in counts for name in count}, key=lambda v: (str(type(v)), v))
    largest = max(max(count.values()) for count in counts)
    for row, name in enumerate(names):
        sizes = np.array([count[name] for count in counts], float)
        area = 90 * sizes / largest
        axes.scatter(range(len(counts)), [row] * len(counts), s=area, color=COLORS[1], lw=0)
    axes.set_yticks(range(len(names)), [str(name) for name in names])


def _labels(source: Source, label: str) -> list[Counter[Any]]:
    """Of clients spread over the source; empty if labels are missing, lists, or too many."""
    chosen = np.unique(np.linspace(0, len(source.volumes) - 1, _SHOWN_CLIENTS).astype(int))
    counts = []
    for client in chosen.tolist():
        try:
            rows = [msgspec.json.decode(example) for example in source.training(client)]
            counts.append(Counter(row[label] for row in rows))
        except (msgspec.DecodeError, KeyError, TypeError):
            return []
    return counts if len(set().union(*counts)) <= _MAX_LABELS else []
