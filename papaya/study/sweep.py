"""Many learning runs that differ in K, rates, rules or client training: in parallel, resumable.

    plan = Plan(workload=WorkloadSpec("embedding"), vary={"K": (10, 100)}, seeds=(1, 2, 3))
    outcomes = sweep(plan, Path("runs/sweep"))
    rows = rows_of(outcomes, ["K"])

A plan is every combination of the varied values, in every regime and with every seed. K and
max_staleness belong to AsyncFL, over_selection to SyncFL: in the other regime they vary nothing,
and no run is made twice; a plan with only the other regime is refused. What is not varied is as the
task's file says. Settings of the server optimizer, the aggregation rule, the staleness function,
the weights and the client's training are varied by their names in the task: `staleness.kind`.

Runs that differ only in what happens to updates share one trace of the protocol. Finished runs are
kept in the folder (lab.py): a second call reads them and runs the rest. A run is a function of its
`Run`, in any process. A run that diverges is an outcome as well: its curve ends early and says why.

Results are means over the seeds of a setting, best setting first: by hours to the target if there
is one, else by the final loss. Settings in which a seed diverged or missed the target come last.
An optimum on the edge of the varied values may not be the optimum: `edges` names such variables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec
from msgspec import UNSET, Struct, structs

from papaya.config import (
    Aggregation,
    AsyncFL,
    OptimizerConfig,
    Staleness,
    SyncFL,
    TaskConfig,
    Weighting,
)
from papaya.config.checks import require, require_choice
from papaya.errors import ConfigError, OperatorError
from papaya.learning.definition import ADAM_DEFAULTS, ClientSGD
from papaya.learning.entry_points import load_used
from papaya.learning.server_optimizer import server_optimizer
from papaya.progress import plural
from papaya.sim.jobs import mapping
from papaya.sim.population import DEFAULT, PopulationConfig
from papaya.study.lab import Lab, LabStep, Make, is_kept
from papaya.study.replay import Rates
from papaya.study.run import (
    RecordingPlan,
    Run,
    RunResult,
    most_updates,
    recordable,
    require_target,
)
from papaya.study.trace import MOST_HOURS, UNBOUNDED
from papaya.study.workloads.base import Workload
from papaya.study.workloads.registry import (
    KINDS_OF_STEPS,
    Prepared,
    WorkloadSpec,
    prepare,
    steps_of,
    with_steps,
)

Regime = Literal["async", "sync"]

VARIABLES: Final = (
    "concurrency",
    "K",
    "max_staleness",
    "over_selection",
    "client_rate",
    "server_rate",
    "beta1",
    "upload_bits",
)
_GROUPS: Final[dict[str, type[Struct]]] = {
    "optimizer": OptimizerConfig,
    "aggregation": Aggregation,
    "staleness": Staleness,
    "weighting": Weighting,
    "client": ClientSGD,
}
# These have names of their own, are not one value, or change what is recorded.
_NOT_FIELDS: Final = (
    *("client.rate", "client.max_examples", "client.schedule", "optimizer.rate"),
    *("optimizer.beta1", "optimizer.averaged"),
    *(f"{group}.parameters" for group in _GROUPS),
)
FIELDS: Final = tuple(
    name
    for group, kind in _GROUPS.items()
    for field in kind.__struct_fields__
    if (name := f"{group}.{field}") not in _NOT_FIELDS
)
"""Settings that have the same names in a task."""
SweptValue: TypeAlias = float | str
_WHOLE: Final = ("concurrency", "K", "max_staleness", "upload_bits")
OF_ONE_REGIME: Final[dict[str, Regime]] = {
    "K": "async",
    "max_staleness": "async",
    "over_selection": "sync",
}
_OWN_NAMES: Final = {
    "client_rate": "client.rate",
    "server_rate": "optimizer.rate",
    "beta1": "optimizer.beta1",
}
_UNSET: Final[dict[str, SweptValue]] = {
    "client.optimizer": "sgd",
    "client.nesterov": "False",
    "client.proximal": 0.0,
    "client.precision": "float32",
}
_MAX_RUNS: Final = 100_000
_LEAST_FOR_TARGET: Final = 3  # evaluations (`Curve.reached`); version 0 is not trained


class Plan(Struct, frozen=True, kw_only=True):
    """A sweep. Each run ends at so many counted updates, after so many virtual hours, or when its
    loss has reached the target and stays there.
    """

    workload: WorkloadSpec
    vary: Mapping[str, tuple[SweptValue, ...]] = {}
    regimes: tuple[Regime, ...] = ()
    seeds: tuple[int, ...] = (1,)
    updates: int = 5000
    hours: float = MOST_HOURS
    target: float | None = None
    evaluations: int = 50
    population: PopulationConfig = DEFAULT

    def __post_init__(self) -> None:
        for regime in self.regimes:
            require_choice("regime", regime, get_args(Regime))
        for name, values in self.vary.items():
            known = (*VARIABLES, *FIELDS)
            if name not in known and (meant := _alike(name, values)):
                raise ConfigError.of("vary", name, "cannot be varied", meant)
            problem = f"is not one of {', '.join(known)}"
            require(name in known, "vary", name, problem, "vary one of these names")
            require(bool(values), "vary", name, "has no values", f"write {name}=1,2")
            for value in values:
                _check_value(name, value)
        require_target(self.target)
        require(bool(self.seeds), "seeds", self.seeds, "must not be empty", "use (1,)")
        for field in ("updates", "evaluations"):
            value = getattr(self, field)
            require(value >= 1, field, value, "must be at least 1", f"leave {field} out")
        if self.target is not None and self.evaluations < _LEAST_FOR_TARGET:
            raise ConfigError.of(
                "evaluations",
                self.evaluations,
                f"is too few for the target {self.target:g}: a version reaches it only if the next "
                "two evaluations confirm it",
                f"use at least {_LEAST_FOR_TARGET} evaluations, or leave the target out",
            )


def updates_together(
    vary: Mapping[str, Sequence[SweptValue]],
    regimes: Sequence[Regime],
    seeds: int,
    updates: int | None,
    hours: float | None,
) -> int | None:
    """The number of client updates in all runs of a sweep; None if hours are the only limit. It is
    computed before the task is loaded, so equal values that are written differently, such as 1 and
    1.0, count twice.
    """
    each = most_updates(updates, hours)
    if each == UNBOUNDED:
        return None
    runs = sum(
        math.prod(
            len(set(values))
            for name, values in vary.items()
            if regime is None or OF_ONE_REGIME.get(name, regime) == regime
        )
        for regime in dict.fromkeys(regimes or (None,))
    )
    return runs * seeds * each


def learned_otherwise(
    plan: Plan, prepared: Prepared, folder: Path, ray: str | None = None
) -> str | None:
    """A message if the folder has runs of this plan with another kind of steps, which round
    differently; else None. `auto` may choose another kind for a larger sweep, or because of `ray`.
    """
    if not (folder / "runs").is_dir():
        return None
    here = steps_of(prepared.digest)
    runs = runs_of(plan, prepared)
    missing = [run for run in runs if not is_kept(folder, run)]
    for there in KINDS_OF_STEPS:
        other = with_steps(prepared.digest, there)
        found = sum(is_kept(folder, structs.replace(run, data=other)) for run in missing)
        if found and there != here:
            can_keep = there == "eager" or ray is None  # a cluster has eager steps only
            remedy = f". To keep them, choose {there} steps (--steps {there})" if can_keep else ""
            return (
                f"{folder} has results with {there} steps for {found:,} of "
                f"{plural(len(runs), 'run')}; they will be repeated with {here} steps{remedy}"
            )
    return None


def runs_of(plan: Plan, prepared: Prepared) -> list[Run]:
    """Without doubles, in the order of the plan; ConfigError if one of them cannot be."""
    regimes = plan.regimes or (regime_of(prepared.task),)
    for name in plan.vary:
        regime = OF_ONE_REGIME.get(name, regimes[0])
        problem = f"applies only to {regime} runs, but none are selected"
        remedy = f"add --regime {regime} (or async,sync), or do not vary {name}"
        require(regime in regimes, "vary", name, problem, remedy)
    settings = [
        dict(zip(plan.vary, values, strict=True)) for values in product(*plan.vary.values())
    ]
    count = len(regimes) * len(settings) * len(plan.seeds)
    problem = f"makes more than {_MAX_RUNS:,} runs"
    require(count <= _MAX_RUNS, "vary", count, problem, "vary less at once")
    runs = (
        _run(plan, prepared, regime, setting, seed)
        for regime in regimes
        for setting in settings
        for seed in plan.seeds
    )
    return list({run.digest: run for run in runs}.values())


def _check_value(name: str, value: SweptValue) -> None:
    if isinstance(value, str):
        require(name in FIELDS, name, value, "must be a number", f"write {name}=1,2")
        return
    require(math.isfinite(value), name, value, "must be finite", f"leave {value} out")
    is_whole = name not in _WHOLE or value == int(value)
    require(is_whole, name, value, "must be a whole number", f"round {name}")


def _alike(name: str, values: tuple[SweptValue, ...]) -> str:
    """The variable that may have been meant."""
    by_name = {known.lower(): known for known in (*VARIABLES, *FIELDS)}
    meant = [known for known in FIELDS if known.endswith(f".{name}") or known == f"{name}.kind"]
    wanted = name.lower().replace("-", "_")
    meant += [by_name[found] for found in get_close_matches(wanted, by_name, n=1)]
    return f"did you mean {meant[0]}={','.join(map(_text, values))}?" if meant else ""


def _text(value: SweptValue) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def setting_of(run: Run, fields: Sequence[str] = ()) -> dict[str, SweptValue]:
    """All of `VARIABLES` and these `FIELDS`, as they are in this run."""
    task, rates = run.recording_plan.task, run.rates
    named = {name: _field(rates, name) for name in fields}
    return named | {
        "regime": regime_of(task),
        "concurrency": task.concurrency,
        "K": task.aggregation_goal,
        "max_staleness": task.max_staleness,
        "over_selection": getattr(task.regime, "over_selection", 0.0),
        "client_rate": rates.client.rate,
        "server_rate": server_optimizer(rates.optimizer).rate,
        "beta1": rates.optimizer.beta1,
        "upload_bits": rates.upload_bits,
    }


def regime_of(task: TaskConfig) -> Regime:
    return "sync" if isinstance(task.regime, SyncFL) else "async"


def _field(rates: Rates, name: str) -> SweptValue:
    group, _, field = name.partition(".")
    value = getattr(getattr(rates, group), field)
    if value is UNSET:
        return _UNSET.get(name, "–")
    return value if isinstance(value, float | int) and not isinstance(value, bool) else str(value)


def with_setting(
    task: TaskConfig, regime: Regime | None, setting: Mapping[str, SweptValue]
) -> TaskConfig:
    """The task with what is set. A goal that its file gives holds for the regime and concurrency
    that the file gives too: with others K is the default of those, unless it is set.
    """
    concurrency = int(setting.get("concurrency", task.concurrency))
    old = task.regime
    if (regime or regime_of(task)) == "sync":
        share = old.over_selection if isinstance(old, SyncFL) else SyncFL().over_selection
        new: AsyncFL | SyncFL = SyncFL(float(setting.get("over_selection", share)))
    else:
        kept = old if isinstance(old, AsyncFL) and concurrency == task.concurrency else AsyncFL()
        goal = setting.get("K", kept.aggregation_goal)
        limit = setting.get("max_staleness", kept.max_staleness)
        new = AsyncFL(None if goal is None else int(goal), None if limit is None else int(limit))
    return structs.replace(task, regime=new, concurrency=concurrency)


def with_rates(rates: Rates, setting: Mapping[str, SweptValue]) -> Rates:
    bits = int(setting.get("upload_bits", rates.upload_bits))
    require(bits in (8, 16, 32), "upload_bits", bits, "is not 8, 16 or 32", "use 8, 16 or 32")
    document: dict[str, Any] = msgspec.to_builtins(rates) | {"upload_bits": bits}
    if "client.optimizer" in setting:
        for field in ADAM_DEFAULTS:
            document["client"].pop(field, None)  # of the optimizer in the task's file
    for name, path in (*_OWN_NAMES.items(), *((name, name) for name in FIELDS)):
        if name in setting:
            group, _, field = path.partition(".")
            document[group][field] = _plain(setting[name])
    if document["weighting"]["kind"] != "capped":
        document["weighting"].pop("cap", None)  # varied together with the kind
    try:
        return msgspec.convert(document, Rates, strict=False)
    except msgspec.ValidationError as error:
        given = ", ".join(f"{name}={_text(setting[name])}" for name in FIELDS if name in setting)
        raise ConfigError(f"--vary {given}: {error}", hint="docs/configuration.md") from error


def _plain(value: SweptValue) -> SweptValue:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _run(
    plan: Plan, prepared: Prepared, regime: Regime, setting: dict[str, SweptValue], seed: int
) -> Run:
    task = with_setting(prepared.task, regime, setting)
    rates = with_rates(prepared.rates, setting)
    # Before anything is recorded: some settings do not go together.
    load_used(rates.task(task))
    recording_plan = RecordingPlan(
        cluster=recordable(task, prepared.population),
        seed=seed,
        updates=plan.updates,
        hours=plan.hours,
    )
    return Run(
        recording_plan=recording_plan,
        workload=prepared.task.task,
        data=prepared.digest,
        rates=rates,
        updates=plan.updates,
        target=plan.target,
        evaluations=plan.evaluations,
    )


# -- running -------------------------------------------------------------------------------------


def sweep(
    plan: Plan,
    folder: Path,
    jobs: int = 2,
    progress: Callable[[LabStep], None] = lambda step: None,
    prepared: Prepared | None = None,
    ray: str | None = None,
) -> list[RunResult]:
    """All outcomes, in the order of the plan. What `folder` has already is not run again.

    `jobs` above 1 are processes that import the program again: a script that calls this keeps its
    own work under `if __name__ == "__main__"`. `prepared` is the workload, if it is open already.
    `ray` is the address of a Ray cluster that does the work instead.
    """
    opened = prepared or prepare(plan.workload, plan.population)
    runs = runs_of(plan, opened)
    jobs = min(jobs, len(runs))
    make: Make
    if ray is not None:
        make = opened.shipped()
    elif jobs > 1:
        make = partial(_make, plan.workload, plan.population)
    else:
        make = _maker(opened)
    with mapping(jobs, ray) as mapped:
        return Lab(folder, mapped, make, progress).learn(runs)


def _maker(prepared: Prepared) -> Make:
    """For this process only: the data is not opened again."""
    made = lru_cache(maxsize=2)(lambda seed: prepared.make(seed, 1, None))
    return lambda run, folder: made(run.recording_plan.seed)


def _make(spec: WorkloadSpec, population: PopulationConfig, run: Run, folder: Path) -> Workload:
    """For other processes, which open the task and its data again."""
    _require_same(_prepared(spec, population).digest, run.data)
    return _workload(spec, population, run.recording_plan.seed)


def _require_same(found: str, wanted: str) -> None:
    """Results are kept under the digest of what the sweep began with."""
    if found == wanted:
        return
    if with_steps(found, "eager") == with_steps(wanted, "eager"):
        raise OperatorError(
            f"a worker process has {steps_of(found)} steps, but the sweep began with "
            f"{steps_of(wanted)} ones",
            hint="repeat the command, or choose eager steps",
        )
    raise OperatorError(
        "the task or its data changed while the sweep was running", hint="repeat the command"
    )


@lru_cache(maxsize=2)
def _workload(spec: WorkloadSpec, population: PopulationConfig, seed: int) -> Workload:
    return _prepared(spec, population).make(seed, 1, None)


@lru_cache(maxsize=2)
def _prepared(spec: WorkloadSpec, population: PopulationConfig) -> Prepared:
    return prepare(spec, population)


# -- results -------------------------------------------------------------------------------------


_RATES = ("client_rate", "server_rate")


class ResultRow(Struct, frozen=True, kw_only=True):
    """Means over the seeds of one setting; `*_spread` are sample standard deviations over the
    seeds (n − 1), None with one seed.

    `target_hours` and `target_trips` are None unless every seed reached the target. `rounding`: by
    how much uploads in fewer bits change the mean of the first buffer, as a share of its norm; None
    if it is unknown. `metrics` are the task's own by name, of the last version and for all clients.
    """

    label: str
    setting: dict[str, SweptValue]
    outcomes: tuple[RunResult, ...]
    diverged: int
    loss: float
    loss_spread: float | None
    p75: float
    p99: float
    hours: float
    trips: float
    target_hours: float | None
    target_hours_spread: float | None
    target_trips: float | None
    utilization: float | None
    ks: float | None
    rounding: float | None = None
    metrics: dict[str, float] = {}
    metrics_spread: dict[str, float | None] = {}


def rows_of(outcomes: Sequence[RunResult], varied: Sequence[str]) -> list[ResultRow]:
    """One for each setting, the best first. `varied`: those of `FIELDS` are part of a setting."""
    fields = [name for name in varied if name in FIELDS]
    groups: dict[tuple[tuple[str, SweptValue], ...], list[RunResult]] = {}
    for outcome in outcomes:
        groups.setdefault(tuple(setting_of(outcome.run, fields).items()), []).append(outcome)
    rows = [_row(dict(setting), found, varied) for setting, found in groups.items()]
    is_timed = any(outcome.run.target is not None for outcome in outcomes)

    def order(row: ResultRow) -> tuple[bool, float, float]:
        hours = row.target_hours if row.target_hours is not None else math.inf
        return row.diverged > 0, hours if is_timed else 0.0, row.loss

    return sorted(rows, key=order)


def varied_in(rows: Sequence[ResultRow], wanted: Sequence[str]) -> list[str]:
    """Those of the wanted names whose values differ between rows."""
    return [name for name in wanted if len({row.setting[name] for row in rows}) > 1]


def edges(rows: Sequence[ResultRow]) -> list[str]:
    """Rates whose best value, among the rows of the best regime, is the smallest or the largest."""
    if not rows or rows[0].diverged:
        return []
    alike = [row for row in rows if row.setting["regime"] == rows[0].setting["regime"]]
    found = []
    for name in varied_in(alike, _RATES):
        values = sorted(float(row.setting[name]) for row in alike)
        best = float(rows[0].setting[name])
        if best in (values[0], values[-1]):
            which = "smallest" if best == values[0] else "largest"
            found.append(f"the best {name}, {best:g}, is the {which} that was tried")
    return found


def _row(
    setting: dict[str, SweptValue], found: list[RunResult], varied: Sequence[str]
) -> ResultRow:
    losses = [outcome.end.all for outcome in found]
    hours = [o.target_hours for o in found if o.target_hours is not None]
    trips = [o.target_trips for o in found if o.target_trips is not None]
    used = [o.fleet.utilization for o in found if o.fleet.utilization is not None]
    rounding = [error for o in found if (error := _rounding(o)) is not None]
    bias = [o.fairness.execution_s.ks for o in found if o.fairness is not None]
    metrics = {
        name: [outcome.end.metrics[name].all for outcome in found] for name in found[0].end.metrics
    }
    have_all = len(hours) == len(found)
    return ResultRow(
        label=", ".join(_words(name, setting[name]) for name in varied) or "one setting",
        setting=setting,
        outcomes=tuple(found),
        diverged=sum(outcome.curve.diverged is not None for outcome in found),
        loss=fmean(losses),
        loss_spread=_spread(losses),
        p75=fmean(outcome.end.p75 for outcome in found),
        p99=fmean(outcome.end.p99 for outcome in found),
        hours=fmean(outcome.hours for outcome in found),
        trips=fmean(outcome.trips for outcome in found),
        target_hours=fmean(hours) if have_all else None,
        target_hours_spread=_spread(hours) if have_all else None,
        target_trips=fmean(trips) if have_all else None,
        utilization=fmean(used) if used else None,
        ks=fmean(bias) if bias else None,
        rounding=fmean(rounding) if rounding else None,
        metrics={name: fmean(values) for name, values in metrics.items()},
        metrics_spread={name: _spread(values) for name, values in metrics.items()},
    )


def _spread(values: Sequence[float]) -> float | None:
    """The sample standard deviation; None for a single value."""
    return stdev(values) if len(values) > 1 else None


def _rounding(outcome: RunResult) -> float | None:
    rates, curve = outcome.run.rates, outcome.curve
    if rates.upload_bits == 32:
        return 0.0
    found = curve.masked if rates.masked else curve.rounding.get(rates.upload_bits)
    return None if found is None else found.mean


def _words(name: str, value: SweptValue) -> str:
    if name == "regime":
        return str(value)
    return f"{name} {value:g}" if isinstance(value, int | float) else f"{name} {value}"
