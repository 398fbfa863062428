"""Reproduce figures and tables of the paper: record, learn, compare, write.

    results = reproduce(["speedup"], QUICK, seeds=[1, 2], folder=Path("runs/reproduce"))

Writes one JSON file and the plots of each experiment, and report.html of all. Every recorded run
is kept in the folder: calling it again goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Final, Protocol, cast

import msgspec
from msgspec import Struct, structs

from papaya.sim.jobs import mapping, write_whole
from papaya.study.experiments import (
    designs,
    execution_times,
    goal_sweep,
    model_quality,
    sampling_bias,
    server_updates,
    speedup,
    stale_limit,
    sync_scaling,
    tee_transfer,
    training_curves,
    utilization,
)
from papaya.study.experiments.page import page
from papaya.study.experiments.result import Result
from papaya.study.experiments.runs import Scale, workload_of
from papaya.study.identity import digest
from papaya.study.lab import Lab, LabStep
from papaya.study.run import RecordingPlan


class Experiment(Protocol):
    """A module of this package; `EXPERIMENTS` has all of them, in the order of the report."""

    KEY: str

    def plans(self, scale: Scale, seeds: Sequence[int]) -> list[RecordingPlan]:
        """The runs of the machines that it needs."""

    def run(self, lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
        """What came of them."""


_MODULES: Final[tuple[ModuleType, ...]] = (
    execution_times,
    sync_scaling,
    utilization,
    server_updates,
    speedup,
    goal_sweep,
    sampling_bias,
    model_quality,
    training_curves,
    designs,
    tee_transfer,
    stale_limit,
)
EXPERIMENTS: Final[dict[str, Experiment]] = {
    module.KEY: cast(Experiment, module) for module in _MODULES
}


class _Inputs(Struct, frozen=True):
    scale: Scale
    seeds: tuple[int, ...]


def reproduce(
    keys: Sequence[str],
    scale: Scale,
    seeds: Sequence[int],
    folder: Path,
    *,
    jobs: int = 2,
    tell: Callable[[LabStep], None] = lambda step: None,
    ended: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """The chosen experiments, in the order of the report. `tell` hears of progress, `ended` of
    each result.
    """
    chosen = [one for key, one in EXPERIMENTS.items() if key in keys]
    made_of = digest(_Inputs(scale, tuple(seeds)))
    results = []
    with mapping(jobs) as mapped:
        lab = Lab(folder, mapped, workload_of, tell)
        lab.record(plan for one in chosen for plan in one.plans(scale, seeds))
        for one in chosen:
            result = structs.replace(one.run(lab, scale, seeds), made_of=made_of)
            encoded = msgspec.json.format(msgspec.json.encode(result))
            write_whole(folder / f"{result.key}.json", partial(Path.write_bytes, data=encoded))
            results.append(result)
            ended(result)
    told, left_out = _with_earlier(results, made_of, folder)
    text = page(told, scale, seeds, folder, left_out)
    write_whole(folder / "report.html", partial(Path.write_text, data=text, encoding="utf-8"))
    return results


def _with_earlier(
    results: Sequence[Result], made_of: str, folder: Path
) -> tuple[list[Result], list[str]]:
    """Also those of earlier calls with the same inputs, in the order of the report; and the names
    of those with others.
    """
    found = {result.key: result for result in results}
    others = []
    for key in EXPERIMENTS:
        with suppress(FileNotFoundError, msgspec.MsgspecError):
            data = (folder / f"{key}.json").read_bytes()
            earlier = msgspec.json.decode(data, type=Result)
            if earlier.made_of == made_of:
                found.setdefault(key, earlier)
            else:
                others.append(key)
    return [found[key] for key in EXPERIMENTS if key in found], others
