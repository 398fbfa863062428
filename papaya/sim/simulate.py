"""Runs for a notebook or a command: plain functions from a configuration and a seed to reports.

`simulate` is one run; `compare` puts AsyncFL and SyncFL, with and without over-selection, on the
same population (paper, "Evaluation"). Nothing is printed, plotted or written here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from msgspec import structs

from papaya.config import AsyncFL, SyncFL, TaskConfig
from papaya.config.checks import require
from papaya.errors import ConfigError
from papaya.sim.cluster import Cluster, ClusterConfig
from papaya.sim.report import RunReport, RunWatch, regime_name

_MAX_HOURS = 10_000
_MAX_SAMPLES = 3600
_MAX_WARM_UP_S = 600.0
_PROTOCOL_MODEL_LENGTH = 4


class Moment(NamedTuple):
    """How far a run is, for whoever shows progress. `active` and `versions` are of all tasks."""

    now_s: float
    until_s: float
    active: int
    versions: int


def simulate(
    config: ClusterConfig,
    seed: int = 1,
    hours: float = 0.5,
    *,
    warm_up_s: float | None = None,
    progress: Callable[[Moment], None] | None = None,
) -> RunReport:
    """Run `hours` of virtual time; report on what comes after the warm-up (a quarter, at most
    ten minutes).
    """
    problem = f"must be above 0 and at most {_MAX_HOURS}"
    require(0 < hours <= _MAX_HOURS, "hours", hours, problem, "use a positive number, like 0.5")
    until_s = 3600 * hours
    if warm_up_s is None:
        warm_up_s = min(_MAX_WARM_UP_S, until_s / 4)
    if not 0 <= warm_up_s < until_s:
        remedy = f"choose it between 0 and {until_s:g}, or leave it out"
        raise ConfigError.of("warm_up_s", warm_up_s, "leaves no window to report on", remedy)
    sample_s = float(max(1, math.ceil(until_s / _MAX_SAMPLES)))
    watch = RunWatch(warm_up_s=warm_up_s, sample_s=sample_s)
    cluster = Cluster(config, seed, observers=[watch])
    steps = max(100, math.ceil(until_s / 60))
    for step in range(1, steps + 1):
        cluster.run(until_s * step / steps)
        if progress is not None:
            progress(_moment(watch, until_s))
    return watch.report()


def compare(
    config: ClusterConfig,
    seed: int = 1,
    hours: float = 0.5,
    *,
    over_selection: float = 0.3,
    warm_up_s: float | None = None,
    progress: Callable[[str, Moment], None] | None = None,
) -> dict[str, RunReport]:
    """The same tasks, population and seed in three regimes, by the regime's name.

    A task that is SyncFL in `config` gets the default aggregation goal when it becomes AsyncFL.
    """
    reports: dict[str, RunReport] = {}
    for regime in (AsyncFL(), SyncFL(over_selection), SyncFL(0.0)):
        tasks = tuple(_switched(task, regime) for task in config.tasks)
        name = regime_name(tasks[0])
        reports[name] = simulate(
            structs.replace(config, tasks=tasks),
            seed,
            hours,
            warm_up_s=warm_up_s,
            progress=None if progress is None else partial(progress, name),
        )
    return reports


def protocol_tasks(
    count: int = 1,
    *,
    regime: AsyncFL | SyncFL = AsyncFL(),  # noqa: B008 - frozen
    concurrency: int = 1300,
    participation_gap_s: float = 3600.0,
) -> tuple[TaskConfig, ...]:
    """Alike tasks for control-plane runs: clients upload a few integers and learn nothing."""
    return tuple(
        TaskConfig(
            task=f"task-{number}",
            concurrency=concurrency,
            model_length=_PROTOCOL_MODEL_LENGTH,
            regime=regime,
            participation_gap_s=participation_gap_s,
        )
        for number in range(1, count + 1)
    )


def _switched(task: TaskConfig, regime: AsyncFL | SyncFL) -> TaskConfig:
    """ "can be done via a configuration change": an AsyncFL task keeps its own goal."""
    if type(task.regime) is AsyncFL and type(regime) is AsyncFL:
        return task
    return structs.replace(task, regime=regime)


def _moment(watch: RunWatch, until_s: float) -> Moment:
    active = sum(watch.active(task) for task in watch.watches)
    versions = sum(each.version for each in watch.watches.values())
    return Moment(watch.cluster.engine.now, until_s, active, versions)
