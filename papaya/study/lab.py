"""The lab: records runs once, learns along them many times, and keeps both on disk.

    with mapping(jobs) as mapped:
        outcomes = Lab(folder, mapped, make, tell).learn(runs)

A request is read from disk if it is there, and computed if not. Every recording and every learning
run is kept under the digest of all that decides it (identity.py). Files are written completely or
not at all. So interrupted work resumes where it stopped, and equal requests get the same file:

    traces/DIGEST.npz, .msgpack   a `RecordingPlan`: its trace, and the report on it
    runs/DIGEST.json              a `Run`: its `RunResult`
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from papaya.errors import OperatorError
from papaya.sim.jobs import Map, SharedFiles, Tell, take_away_parts, write_whole
from papaya.sim.report import RunReport
from papaya.study.identity import code_digest
from papaya.study.run import (
    RecordingPlan,
    Run,
    RunResult,
    clients_to_train,
    fleet_of,
    learn_run,
    record_plan,
)
from papaya.study.trace import Trace
from papaya.study.workloads.base import Workload

_NEARLY = 0.99  # all is done when all have ended, not before

_Kind = Literal["traces", "runs"]
Make: TypeAlias = Callable[[Run, Path], Workload]
"""The workload that a run names; the folder has the files that it needs. It is called in other
processes, so it has a name itself."""


class LabStep(NamedTuple):
    """How far it is with what was asked for, of which `kept` were there before.

    `share` is of the work that was left to do: long runs count for more than short ones.
    `outcome` is the run that ended last.
    """

    kind: _Kind
    done: int
    total: int
    kept: int
    share: float
    outcome: RunResult | None = None


class Recording:
    """What was recorded, read when it is asked for."""

    def __init__(self, folder: Path, plan: RecordingPlan) -> None:
        self.plan = plan
        # JSON has no NaN, so the report is not JSON.
        self._trace, self._report = (folder / name for name in _recorded_files(plan))

    @property
    def is_there(self) -> bool:
        return self._trace.exists() and self._report.exists()

    @cached_property
    def trace(self) -> Trace:
        return Trace.load(self._trace)

    @cached_property
    def report(self) -> RunReport:
        try:
            return msgspec.msgpack.decode(self._report.read_bytes(), type=RunReport)
        except msgspec.MsgspecError as error:
            problem = f"cannot read report {self._report}: {error}"
            raise OperatorError(problem, hint="delete it") from error

    def write(self, trace: Trace, report: RunReport) -> None:
        encoded = msgspec.msgpack.encode(report)
        write_whole(self._report, lambda path: path.write_bytes(encoded))
        write_whole(self._trace, trace.save)


class Lab:
    """`mapped` does the work (jobs.py), `make` makes workloads, `tell` is called with progress.
    `needs` names the files of the folder that the workload of a run reads.
    """

    def __init__(
        self,
        folder: Path,
        mapped: Map,
        make: Make,
        tell: Callable[[LabStep], None] = lambda step: None,
        needs: Callable[[Run], Sequence[str]] = lambda run: (),
    ) -> None:
        self.folder = folder
        self._mapped = mapped
        self._make = make
        self._tell = tell
        self._needs = needs
        for part in (folder / "traces", folder / "runs"):
            part.mkdir(parents=True, exist_ok=True)
            take_away_parts(part)

    def workload(self, run: Run) -> Workload:
        """What this run learns."""
        return self._make(run, self.folder)

    def record(self, plans: Iterable[RecordingPlan]) -> list[Recording]:
        """In the order in which they are asked for."""
        wanted = [Recording(self.folder, plan) for plan in plans]
        distinct = {recording.plan.digest: recording for recording in wanted}.values()
        missing = [recording.plan for recording in distinct if not recording.is_there]
        missing.sort(key=lambda plan: -plan.effort)  # the longest first
        work = partial(_record, code_digest())
        files = SharedFiles(self.folder, needs=lambda plan: (), makes=_recorded_files)
        self._do("traces", work, missing, len(distinct), files)
        return wanted

    def learn(self, runs: Iterable[Run]) -> list[RunResult]:
        """In the order in which they are asked for."""
        wanted = list(runs)
        found = {run: _read(self.folder, run) for run in dict.fromkeys(wanted)}
        missing = [run for run, outcome in found.items() if outcome is None]
        if missing:
            self.record(run.recording_plan for run in missing)
        missing.sort(key=lambda run: -run.effort)
        work = partial(_learn, code_digest(), self._make)
        files = SharedFiles(
            self.folder,
            needs=lambda run: (*_recorded_files(run.recording_plan), *self._needs(run)),
            makes=lambda run: (_path(run),),
        )
        outcomes = self._do("runs", work, missing, len(found), files)
        made = {outcome.run: outcome for outcome in outcomes}
        return [found[run] or made[run] for run in wanted]

    def _do(
        self,
        kind: _Kind,
        work: Callable[..., Any],
        missing: Sequence[Any],
        total: int,
        files: SharedFiles,
    ) -> list[Any]:
        kept, outcomes = total - len(missing), list[Any]()
        effort, spent = sum(each.effort for each in missing), 0.0

        def tell() -> None:
            is_over = len(outcomes) == len(missing)
            share = 1.0 if is_over else min(spent / effort, _NEARLY)
            last = outcomes[-1] if outcomes else None
            self._tell(LabStep(kind, kept + len(outcomes), total, kept, share, last))

        def hear(amount: float) -> None:
            nonlocal spent
            spent += amount
            tell()

        tell()
        for outcome in self._mapped(work, missing, hear, files):
            outcomes.append(outcome)
            tell()
        return outcomes


# -- in any process -----------------------------------------------------------------------------


def _record(code: str, plan: RecordingPlan, *, folder: Path, tell: Tell) -> None:
    _refuse_other_code(code)
    with _shares(plan.effort, tell) as told:
        recorded = record_plan(plan, lambda recorder: told(plan.share_of(recorder)))
        Recording(folder, plan).write(*recorded)
    gc.collect()  # a cluster is full of cycles, and the next run would look for them rarely


def _learn(code: str, make: Make, run: Run, *, folder: Path, tell: Tell) -> RunResult:
    _refuse_other_code(code)
    recording = _recording(folder, run.recording_plan)
    total = max(1, clients_to_train(run, recording.trace))
    with _shares(run.effort, tell) as told:
        outcome = learn_run(
            run,
            recording.trace,
            fleet_of(recording.report),
            make(run, folder),
            lambda trained, judged: told(trained / total),
        )
        encoded = msgspec.json.encode(outcome)
        write_whole(folder / _path(run), lambda path: path.write_bytes(encoded))
    return outcome


@contextmanager
def _shares(effort: float, tell: Tell) -> Iterator[Callable[[float], None]]:
    """Who tells how far one piece of work is tells all of them how much was done since."""
    told = 0.0

    def reach(share: float) -> None:
        nonlocal told
        before, told = told, max(told, effort * min(1.0, share))
        tell(told - before)

    yield reach
    reach(1.0)


def _refuse_other_code(code: str) -> None:
    """Of a process that was started after the sources had changed."""
    if code_digest() != code:
        raise OperatorError(
            "Papaya's source code changed during the run", hint="run the same command again"
        )


def _read(folder: Path, run: Run) -> RunResult | None:
    """None as well for a file that is damaged: it is made again."""
    try:
        return msgspec.json.decode((folder / _path(run)).read_bytes(), type=RunResult)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def is_kept(folder: Path, run: Run) -> bool:
    """Whether the folder has the result of this run."""
    return (folder / _path(run)).exists()


def _path(run: Run) -> str:
    return f"runs/{run.digest}.json"


def _recorded_files(plan: RecordingPlan) -> tuple[str, str]:
    """The trace and the report on it."""
    return f"traces/{plan.digest}.npz", f"traces/{plan.digest}.msgpack"


@lru_cache(maxsize=2)
def _recording(folder: Path, plan: RecordingPlan) -> Recording:
    return Recording(folder, plan)
