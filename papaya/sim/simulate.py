"""Runs for a notebook or a command: `simulate` makes a report of a configuration and a seed.

Nothing is printed, plotted or written here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from papaya.config import AsyncFL, SyncFL, TaskConfig
from papaya.config.checks import require
from papaya.errors import ConfigError
from papaya.sim.cluster import Cluster, ClusterConfig
from papaya.sim.counted_updates import behaviour_without_model
from papaya.sim.report import RunReport, RunWatch

_MAX_HOURS = 10_000
_MAX_SAMPLES = 3600
_MAX_WARM_UP_S = 600.0
_PROTOCOL_MODEL_LENGTH = 4


class Moment(NamedTuple):
    """Progress of a run. `active` and `versions` are sums over all tasks."""

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
    behaviour = behaviour_without_model(config.tasks)
    cluster = Cluster(config, seed, observers=[watch], behaviour=behaviour)
    steps = max(100, math.ceil(until_s / 60))
    for step in range(1, steps + 1):
        cluster.run(until_s * step / steps)
        if progress is not None:
            progress(_moment(watch, until_s))
    return watch.report()


def protocol_tasks(
    count: int = 1,
    *,
    regime: AsyncFL | SyncFL = AsyncFL(),  # noqa: B008 - frozen
    concurrency: int = 1300,
    participation_gap_s: float = 3600.0,
) -> tuple[TaskConfig, ...]:
    """Equal tasks for control-plane runs: clients upload a few integers and learn nothing."""
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


def _moment(watch: RunWatch, until_s: float) -> Moment:
    active = sum(watch.active(task) for task in watch.watches)
    versions = sum(each.version for each in watch.watches.values())
    return Moment(watch.cluster.engine.now, until_s, active, versions)
