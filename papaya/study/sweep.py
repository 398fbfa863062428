"""Many learning runs that differ in K, concurrency, rates or first moment: in parallel, resumable.

    plan = Plan(workload=WorkloadSpec("embedding"), vary={"K": (10, 100)}, seeds=(1, 2, 3))
    outcomes = sweep(plan, Path("runs/sweep"))

Runs that differ only in what happens to updates share one trace of the protocol. What has ended is
kept in the folder (lab.py): a second call reads what is there and runs the rest.

A run is a function of its `Run`, whatever process makes it. A run that diverges is an outcome as
well: its curve ends early and says why.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

from papaya.sim.jobs import mapping
from papaya.sim.population import PopulationConfig
from papaya.study.lab import Lab, LabStep
from papaya.study.plan import Plan, runs_of
from papaya.study.run import Run, RunResult
from papaya.study.workloads.base import Workload
from papaya.study.workloads.registry import Prepared, WorkloadSpec, prepare


def sweep(
    plan: Plan,
    folder: Path,
    jobs: int = 2,
    progress: Callable[[LabStep], None] = lambda step: None,
    prepared: Prepared | None = None,
) -> list[RunResult]:
    """All outcomes, in the order of the plan. What `folder` has already is not run again.

    `jobs` above 1 are processes that import the program anew: a script that calls this keeps its
    own work under `if __name__ == "__main__"`. `prepared` is the workload, if it is open already.
    """
    runs = runs_of(plan, prepared or prepare(plan.workload, plan.population))
    make = partial(_make, plan.workload, plan.population)
    with mapping(min(jobs, len(runs))) as mapped:
        return Lab(folder, mapped, make, progress).learn(runs)


def _make(spec: WorkloadSpec, population: PopulationConfig, run: Run) -> Workload:
    return _workload(spec, population, run.recording_plan.seed)


@lru_cache(maxsize=2)
def _workload(spec: WorkloadSpec, population: PopulationConfig, seed: int) -> Workload:
    return _prepared(spec, population).make(seed, 1)


@lru_cache(maxsize=2)
def _prepared(spec: WorkloadSpec, population: PopulationConfig) -> Prepared:
    return prepare(spec, population)
