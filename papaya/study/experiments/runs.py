"""What experiments ask a lab for: runs of the machines, and learning along them.

Who asks for the same gets the same file (papaya/study/lab.py), so experiments share what they need.
"""

from __future__ import annotations

from typing import Final

from papaya.config import AsyncFL, SyncFL, TaskConfig
from papaya.sim.cluster import ClusterConfig
from papaya.sim.population import DEFAULT, PopulationConfig
from papaya.study.replay import EVALUATIONS, Rates
from papaya.study.run import UNBOUNDED, RecordingPlan, Run
from papaya.study.workloads.base import Workload
from papaya.study.workloads.paper import Model, paper_workload

SUPPLY: Final = 3.0  # a fleet this large has more than enough devices for a round to start
START_S: Final = 600.0  # a window begins after it
DRAIN_S: Final = 300.0  # longer than a timeout: whoever was assigned before has ended
_MODEL_LENGTH: Final = 4  # of what is uploaded while a trace is recorded


def until_versions(
    regime: AsyncFL | SyncFL, concurrency: int, seed: int, versions: int
) -> RecordingPlan:
    """As many updates as so many versions hold."""
    cluster = _cluster(regime, concurrency, DEFAULT)
    return RecordingPlan(
        cluster=cluster, seed=seed, updates=versions * cluster.tasks[0].aggregation_goal
    )


def window(
    regime: AsyncFL | SyncFL,
    concurrency: int,
    seed: int,
    hours: float,
    population: PopulationConfig = DEFAULT,
) -> RecordingPlan:
    """So many hours after the start, and until all who were assigned in them have ended."""
    cluster = _cluster(regime, concurrency, population)
    return RecordingPlan(cluster=cluster, seed=seed, hours=hours + START_S / 3600, drain_s=DRAIN_S)


def learning(
    plan: RecordingPlan,
    rates: Rates,
    *,
    model: Model = "embedding",
    updates: int = UNBOUNDED,
    target: float | None = None,
    evaluations: int = EVALUATIONS,
) -> Run:
    """Until `target` (a loss) is reached and kept, of at most so many updates."""
    return Run(
        recording_plan=plan,
        workload=model,
        data=model,  # all else about it is code
        rates=rates,
        updates=updates,
        target=target,
        evaluations=evaluations,
    )


def workload_of(run: Run) -> Workload:
    return paper_workload(run.workload, run.recording_plan.cluster.population)


def _cluster(
    regime: AsyncFL | SyncFL, concurrency: int, population: PopulationConfig
) -> ClusterConfig:
    task = TaskConfig(
        task="experiment",
        concurrency=concurrency,
        model_length=_MODEL_LENGTH,
        regime=regime,
        durability="step",  # the paper's
    )
    return ClusterConfig(tasks=(task,), population=population, supply=SUPPLY)
