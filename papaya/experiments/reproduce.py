"""Reproduce figures and tables of the paper: record, learn, compare, write.

    results = reproduce(["speedup"], QUICK, seeds=[1, 2], folder=Path("runs/reproduce"))

Writes one JSON file and the plots of each experiment, and report.html of all. Every recorded run
is kept in the folder: calling it again goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from papaya.experiments.catalogue import EXPERIMENTS
from papaya.experiments.lab import Lab
from papaya.experiments.page import page
from papaya.experiments.result import Result
from papaya.experiments.scale import Scale

Tell = Callable[[str, int, int], None]


def reproduce(
    keys: Sequence[str],
    scale: Scale,
    seeds: Sequence[int],
    folder: Path,
    *,
    jobs: int = 2,
    tell: Tell = lambda kind, done, total: None,
    ended: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """The chosen experiments, in the order of the report. `tell` hears of progress, `ended` of
    each result.
    """
    chosen = [one for key, one in EXPERIMENTS.items() if key in keys]
    lab = Lab(folder, jobs, tell)
    lab.record(scene for one in chosen for scene in one.scenes(scale, seeds))
    results = []
    for one in chosen:
        result = one.run(lab, scale, seeds)
        (folder / f"{result.key}.json").write_bytes(
            msgspec.json.format(msgspec.json.encode(result))
        )
        results.append(result)
        ended(result)
    (folder / "report.html").write_text(page(results, scale, seeds, folder), encoding="utf-8")
    return results
