"""Many learning runs that differ in K, concurrency, rates or first moment: in parallel, resumable.

    plan = Plan(workload=WorkloadSpec("embedding"), vary={"K": (10, 100)}, seeds=(1, 2, 3))
    outcomes = sweep(plan, Path("runs/sweep"))

Each finished run is one JSON file, named by a digest of all that decides its outcome:
configuration, data and seed. A second call reads what is there and runs the rest; another
configuration has another name. Runs that differ only in what happens to updates share one trace of
the protocol, which is recorded once and kept beside them.

A run is a function of its `Run`, whatever process makes it. A run that diverges is an outcome as
well: its curve ends early and says why.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from papaya.sim.jobs import mapping, write_whole
from papaya.sim.learnt import Course, Fleet, Learnt, Run, fleet_of, learn_run, record_course
from papaya.sim.plan import Plan, runs_of
from papaya.sim.population import PopulationConfig
from papaya.sim.trace import Trace
from papaya.sim.workloads.base import Workload
from papaya.sim.workloads.named import Prepared, WorkloadSpec, prepare

Outcome: TypeAlias = Learnt


class Step(NamedTuple):
    """How far a sweep is. `outcome` is the run that has just ended."""

    kind: Literal["traces", "runs"]
    done: int
    total: int
    outcome: Outcome | None = None


def sweep(
    plan: Plan,
    folder: Path,
    jobs: int = 2,
    progress: Callable[[Step], None] | None = None,
    prepared: Prepared | None = None,
) -> list[Outcome]:
    """All outcomes, in the order of the plan. What `folder` has already is not run again.

    `jobs` above 1 are processes that import the program anew: a script that calls this keeps its
    own work under `if __name__ == "__main__"`. `prepared` is the workload, if it is open already.
    """
    tell = progress or (lambda step: None)
    runs = runs_of(plan, prepared or prepare(plan.workload, plan.population))
    for part in ("traces", "runs"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    read = ((run.digest, _read(folder, run)) for run in runs)
    ended = {digest: outcome for digest, outcome in read if outcome is not None}
    missing = [run for run in runs if run.digest not in ended]
    courses = {run.course.digest: run.course for run in missing}
    unknown = [course for course in courses.values() if not _is_recorded(folder, course)]
    tell(Step("traces", 0, len(unknown)))
    with mapping(min(jobs, len(missing))) as mapped:
        for done, _ in enumerate(mapped(partial(_record, folder), unknown), start=1):
            tell(Step("traces", done, len(unknown)))
        tell(Step("runs", len(ended), len(runs)))
        work = partial(_learn, folder, plan.workload, plan.population)
        for outcome in mapped(work, missing):
            ended[outcome.run.digest] = outcome
            tell(Step("runs", len(ended), len(runs), outcome))
    return [ended[run.digest] for run in runs]


# -- work, in any process -----------------------------------------------------------------------


def _record(folder: Path, course: Course) -> None:
    trace, report = record_course(course)
    columns, facts = _trace_paths(folder, course)
    write_whole(facts, lambda path: path.write_bytes(msgspec.json.encode(fleet_of(report))))
    write_whole(columns, trace.save)


def _learn(folder: Path, spec: WorkloadSpec, population: PopulationConfig, run: Run) -> Outcome:
    trace, fleet = _recorded(*_trace_paths(folder, run.course))
    outcome = learn_run(run, trace, fleet, _workload(spec, population, run.course.seed))
    write_whole(_run_path(folder, run), lambda path: path.write_bytes(msgspec.json.encode(outcome)))
    return outcome


@lru_cache(maxsize=2)
def _recorded(trace: Path, fleet: Path) -> tuple[Trace, Fleet]:
    return Trace.load(trace), msgspec.json.decode(fleet.read_bytes(), type=Fleet)


@lru_cache(maxsize=2)
def _prepared(spec: WorkloadSpec, population: PopulationConfig) -> Prepared:
    return prepare(spec, population)


@lru_cache(maxsize=2)
def _workload(spec: WorkloadSpec, population: PopulationConfig, seed: int) -> Workload:
    return _prepared(spec, population).make(seed, 1)


# -- files --------------------------------------------------------------------------------------


def _run_path(folder: Path, run: Run) -> Path:
    return folder / "runs" / f"{run.digest}.json"


def _trace_paths(folder: Path, course: Course) -> tuple[Path, Path]:
    stem = folder / "traces" / course.digest
    return stem.with_suffix(".npz"), stem.with_suffix(".json")


def _is_recorded(folder: Path, course: Course) -> bool:
    return all(path.exists() for path in _trace_paths(folder, course))


def _read(folder: Path, run: Run) -> Outcome | None:
    """None as well for a file that is damaged: it is run again."""
    try:
        return msgspec.json.decode(_run_path(folder, run).read_bytes(), type=Learnt)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
