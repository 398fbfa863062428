"""One learning run from end to end, and its result.

`Run` is all that decides an outcome: a run is a function of it, the same in any process. First the
machines run and are recorded (trace.py), then a workload learns along the trace (replay.py), then
it is judged: how good the model got and how soon, for all clients and for those with much data,
who took part, how long updates are, and what fixed point would make of them.

A trace is of the control plane: its devices upload a few integers, in the clear. Whom the servers
select and count, and when, depends on neither the length nor the masking of an update; sealing one
would take a twentieth of a second of its device's time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Protocol, runtime_checkable

import numpy as np
from msgspec import Struct, structs

from papaya.config import Aggregation, Staleness, StopRule, TaskConfig, Weighting
from papaya.config.checks import require
from papaya.errors import InvariantError, OperatorError
from papaya.learning.parameters import Vector
from papaya.messages.selection import Capabilities
from papaya.sim.cluster import ClusterConfig, DeviceKind
from papaya.sim.population import PopulationConfig
from papaya.sim.report import RunReport
from papaya.study.checkpoint import Checkpoints
from papaya.study.fairness import Fairness, fairness
from papaya.study.followed_trace import FollowedTrace
from papaya.study.identity import digest
from papaya.study.precision import Norms, Precision, mean_weight, norms_of, precision
from papaya.study.replay import Curve, Rates, learn
from papaya.study.trace import MOST_HOURS, UNBOUNDED, Recorder, Trace, least_s, record
from papaya.study.workloads.base import Clients, Quality, Workload, at_or_above

_TRACED_LENGTH: Final = 4
_MAX_WARM_UP_S: Final = 600.0
_UPDATES_PER_PLACE: Final = 50  # in an hour, about
DEFAULT_UPDATES: Final = 5000


class RecordingPlan(Struct, frozen=True, kw_only=True):
    """What is recorded: until `updates` are counted or `hours` have passed, then for `drain_s` more
    so that clients assigned before can finish.
    """

    cluster: ClusterConfig
    seed: int
    updates: int = UNBOUNDED
    hours: float = MOST_HOURS
    drain_s: float = 0.0

    def __post_init__(self) -> None:
        for field, value in (("updates", self.updates), ("hours", self.hours)):
            require(
                value > 0, field, value, "must be above zero", f"leave {field} out for no limit"
            )

    @property
    def task(self) -> TaskConfig:
        return self.cluster.tasks[0]

    @property
    def effort(self) -> float:
        """About how many updates are recorded."""
        return min(self.updates, self.hours * self.task.concurrency * _UPDATES_PER_PLACE)

    def share_of(self, recorder: Recorder) -> float:
        """How much of it has been recorded."""
        return self.share(recorder.counted, recorder.engine.now)

    def share(self, counted: int, now_s: float) -> float:
        return max(counted / self.updates, now_s / (3600 * self.hours + self.drain_s))

    @property
    def digest(self) -> str:
        return digest(self)


def most_updates(updates: int | None, hours: float | None) -> int:
    """How many updates a run has at most, as commands and notebooks ask for it: hours alone are a
    limit of their own.
    """
    if updates is not None:
        return updates
    return DEFAULT_UPDATES if hours is None else UNBOUNDED


def require_target(loss: float | None) -> None:
    is_loss = loss is None or math.isfinite(loss)
    require(is_loss, "target", loss, "must be a finite loss", "leave it out for none")


class Run(Struct, frozen=True, kw_only=True):
    """What is learnt along a recording, from at most so many counted updates (recording goes on to
    the end of a minute). `data` names the model and its data by their content. A run ends early
    when it has reached its `target`, or can no longer reach it within `deadline_h` hours. `copies`:
    as many devices stand in place of each recorded one (`Trace.repeated`). `curve_only`: nothing
    but the curve and the norms of updates is computed, which is cheaper.
    """

    recording_plan: RecordingPlan
    workload: str
    data: str
    rates: Rates
    updates: int = UNBOUNDED
    target: float | None = None
    deadline_h: float | None = None
    evaluations: int = 100
    copies: int = 1
    curve_only: bool = False

    def __post_init__(self) -> None:
        require_target(self.target)

    @property
    def effort(self) -> float:
        """About how many updates are learnt from."""
        return self.copies * min(self.updates, self.recording_plan.effort)

    @property
    def digest(self) -> str:
        return digest(self)


class FleetSummary(Struct, frozen=True):
    """What the recorded system was like, after its warm-up.

    None: the run was over before; of staleness also: no server update came after it.
    """

    utilization: float | None
    versions_per_hour: float | None
    mean_staleness: float | None
    max_staleness: int | None
    aborted: int
    dropped: int


class Judges(Struct, frozen=True):
    """How many clients a model is judged on: in all, and of those with much data."""

    all: int
    p75: int
    p99: int


@runtime_checkable
class SupportsJudges(Protocol):
    """A workload that judges on real clients."""

    held_out: Clients


class RunResult(Struct, frozen=True, kw_only=True):
    """What came of a run. `target_*` are None when the target was not reached, or not given.

    `judges` are None where no clients judge: the built-in workloads know their language.
    """

    run: Run
    length: int
    curve: Curve
    hours: float
    versions: int
    updates: int
    trips: int
    target_hours: float | None
    target_trips: int | None
    fleet: FleetSummary
    fairness: Fairness | None
    norms: Norms | None
    precision: Precision | None
    judges: Judges | None = None

    @property
    def start(self) -> Quality:
        return self.curve.points[0].quality

    @property
    def end(self) -> Quality:
        return self.curve.points[-1].quality


def recordable(task: TaskConfig, population: PopulationConfig) -> ClusterConfig:
    """A fleet of which every device can train this task, and the task as it is recorded."""
    needs = task.requirements
    capabilities = Capabilities(
        engine=needs.engine or "torch",
        modules=() if needs.module is None else (needs.module,),
        memory_mb=needs.min_memory_mb,
        labels=needs.labels,
    )
    recorded = structs.replace(
        task,
        model_length=_TRACED_LENGTH,
        requirements=structs.replace(needs, upload_bits=32),
        secure_aggregation=None,
        clip=None,
        privacy=None,
        staleness=Staleness(),
        weighting=Weighting(),
        aggregation=Aggregation(),
        evaluation=None,
        stop=StopRule(),
    )
    return ClusterConfig(
        tasks=(recorded,), population=population, kinds=(DeviceKind(1.0, capabilities),)
    )


def record_plan(
    plan: RecordingPlan, progress: Callable[[Recorder], None] | None = None
) -> tuple[Trace, RunReport]:
    return record(
        plan.cluster,
        plan.seed,
        updates=plan.updates,
        hours=plan.hours,
        drain_s=plan.drain_s,
        warm_up_s=_warm_up_s(plan),
        progress=progress,
    )


def _warm_up_s(plan: RecordingPlan) -> float:
    """Half of what the run takes at least, or a quarter of its hours."""
    return min(
        _MAX_WARM_UP_S,
        least_s(plan.cluster, plan.updates) / 2,
        900 * plan.hours,
    )


def fleet_of(report: RunReport) -> FleetSummary:
    result = report.tasks[0]
    is_over = math.isnan(result.utilization)
    return FleetSummary(
        utilization=None if is_over else result.utilization,
        versions_per_hour=None if is_over else result.versions_per_hour,
        mean_staleness=result.mean_staleness if result.counted else None,
        max_staleness=result.max_staleness if result.counted else None,
        aborted=sum(result.aborted.values()),
        dropped=result.dropped,
    )


def clients_to_train(run: Run, trace: Trace | FollowedTrace) -> int:
    """All members of the versions that are learnt: a version is of K, however few are asked for."""
    last = _last_version(run, trace)
    if isinstance(trace, FollowedTrace):
        return run.copies * last * trace.task.aggregation_goal
    return run.copies * int(trace.first[last + 1])


def _last_version(run: Run, trace: Trace | FollowedTrace) -> int:
    if isinstance(trace, FollowedTrace):
        return min(math.ceil(run.updates / trace.task.aggregation_goal), trace.versions)
    enough = int(np.searchsorted(trace.first[1:], run.updates))
    return min(enough, trace.versions)


def _whole(trace: Trace | FollowedTrace) -> Trace:
    if isinstance(trace, FollowedTrace):
        raise InvariantError("a trace that is still recorded cannot be repeated")
    return trace


def learn_run(
    run: Run,
    trace: Trace | FollowedTrace,
    fleet: FleetSummary | None,
    workload: Workload,
    progress: Callable[[int, int], None] = lambda trained, judged: None,
    *,
    judged: Callable[[int, Vector], None] | None = None,
    checkpoints: Checkpoints | None = None,
    resumed: Callable[[int, int], None] = lambda trained, judged: None,
) -> RunResult:
    """`progress` is called with the numbers of clients trained and versions judged so far, counted
    from the start of a run that is resumed; `resumed` with the numbers at which it is resumed.
    `judged` is called with each judged version. Of a trace that is still recorded, `fleet` is not
    known yet.
    """
    last_version = _last_version(run, trace)
    curve = learn(
        trace if run.copies == 1 else _whole(trace).repeated(run.copies),
        workload,
        run.rates,
        target=run.target,
        deadline_h=math.inf if run.deadline_h is None else run.deadline_h,
        evaluations=run.evaluations,
        until=last_version,
        progress=progress,
        judged=judged,
        checkpoints=checkpoints,
        resumed=resumed,
        rounding=not run.curve_only,
    )
    if not curve.points:
        raise OperatorError(
            f"cannot evaluate version 0: {curve.diverged}",
            hint="the loss function returned a non-finite value; check it",
        )
    if isinstance(trace, FollowedTrace):
        trace, report = trace.whole()
        fleet = fleet_of(report)
        if (found := _last_version(run, trace)) != last_version:
            raise InvariantError(f"version {last_version} was to be the last, not {found}")
    assert fleet is not None
    return _result(run, trace, fleet, workload, curve)


def _result(
    run: Run, trace: Trace, fleet: FleetSummary, workload: Workload, curve: Curve
) -> RunResult:
    reached = None if run.target is None else curve.reached(run.target)
    last = curve.points[-1]
    task = run.rates.task(run.recording_plan.task)
    weight = mean_weight(task, trace.clients.examples)
    return RunResult(
        run=run,
        length=workload.length,
        curve=structs.replace(curve, norms=()),
        hours=last.hours,
        versions=last.version,
        updates=last.updates,
        trips=last.trips,
        target_hours=None if reached is None else reached.hours,
        target_trips=None if reached is None else reached.trips,
        fleet=fleet,
        fairness=None if run.curve_only else fairness(trace),
        norms=norms_of(curve.norms),
        precision=None
        if run.curve_only or curve.diverged is not None  # diverged updates are no sample of others
        else precision(task, workload.length, weight, curve.norms),
        judges=_judges(workload.held_out) if isinstance(workload, SupportsJudges) else None,
    )


def _judges(clients: Clients) -> Judges:
    levels = (0.0, 0.75, 0.99)
    return Judges(*(int(at_or_above(clients.examples, level).sum()) for level in levels))
