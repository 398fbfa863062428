"""What a sweep runs: every combination of the values that are varied, in every regime and seed.

K and max_staleness are of AsyncFL, over_selection is of SyncFL: in the other regime they vary
nothing, and no run is made twice; a plan with only the other regime is refused. What is not varied
is as the task's file says.
"""

from __future__ import annotations

import math
from difflib import get_close_matches
from itertools import product
from typing import Final, Literal

from msgspec import Struct, structs

from papaya.config import AsyncFL, SyncFL, TaskConfig
from papaya.config.checks import require
from papaya.learning.server_optimizer import server_optimizer
from papaya.sim.population import DEFAULT, PopulationConfig
from papaya.study.replay import Rates
from papaya.study.run import RecordingPlan, Run, recordable, require_target
from papaya.study.trace import MOST_HOURS
from papaya.study.workloads.registry import Prepared, WorkloadSpec

Regime = Literal["async", "sync"]

VARIABLES: Final = (
    "concurrency",
    "K",
    "max_staleness",
    "over_selection",
    "client_rate",
    "server_rate",
    "beta1",
)
_WHOLE: Final = ("concurrency", "K", "max_staleness")
_OF_ONE_REGIME: Final[dict[str, Regime]] = {
    "K": "async",
    "max_staleness": "async",
    "over_selection": "sync",
}
_MAX_RUNS: Final = 100_000


class Plan(Struct, frozen=True, kw_only=True):
    """A sweep. Each run ends at so many counted updates, after so many virtual hours, or when its
    loss has reached the target and stays there.
    """

    workload: WorkloadSpec
    vary: dict[str, tuple[float, ...]] = {}
    regimes: tuple[Regime, ...] = ()
    seeds: tuple[int, ...] = (1,)
    updates: int = 5000
    hours: float = MOST_HOURS
    target: float | None = None
    evaluations: int = 50
    population: PopulationConfig = DEFAULT

    def __post_init__(self) -> None:
        for name, values in self.vary.items():
            known = ", ".join(VARIABLES)
            remedy = _alike(name, values) or f"vary {known}"
            require(name in VARIABLES, "vary", name, f"is not one of {known}", remedy)
            require(bool(values), "vary", name, "has no values", f"write {name}=1,2")
            for value in values:
                require(math.isfinite(value), name, value, "must be finite", f"leave {value} out")
                is_whole = name not in _WHOLE or value == int(value)
                require(is_whole, name, value, "must be a whole number", f"round {name}")
        require_target(self.target)
        require(bool(self.seeds), "seeds", self.seeds, "must not be empty", "use (1,)")
        for field in ("updates", "evaluations"):
            value = getattr(self, field)
            require(value >= 1, field, value, "must be at least 1", f"leave {field} out")


def runs_of(plan: Plan, prepared: Prepared) -> list[Run]:
    """Without doubles, in the order of the plan; ConfigError if one of them cannot be."""
    regimes = plan.regimes or (regime_of(prepared.task),)
    for name in plan.vary:
        regime = _OF_ONE_REGIME.get(name, regimes[0])
        problem = f"is of {regime} runs, and there are none: it would vary nothing"
        remedy = f"--regime {regime} or --regime async,sync, or do not vary {name}"
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


def _alike(name: str, values: tuple[float, ...]) -> str:
    """The variable that may have been meant."""
    by_name = {known.lower(): known for known in VARIABLES}
    for found in get_close_matches(name.lower().replace("-", "_"), by_name, n=1):
        return f"did you mean {by_name[found]}={','.join(f'{value:g}' for value in values)}?"
    return ""


def setting_of(run: Run) -> dict[str, float | str]:
    """All that a sweep may vary, as it is in this run."""
    task, rates = run.recording_plan.task, run.rates
    return {
        "regime": regime_of(task),
        "concurrency": task.concurrency,
        "K": task.aggregation_goal,
        "max_staleness": task.max_staleness,
        "over_selection": getattr(task.regime, "over_selection", 0.0),
        "client_rate": rates.client.rate,
        "server_rate": server_optimizer(rates.optimizer).rate,
        "beta1": rates.optimizer.beta1,
    }


def regime_of(task: TaskConfig) -> Regime:
    return "sync" if isinstance(task.regime, SyncFL) else "async"


def with_setting(task: TaskConfig, regime: Regime | None, setting: dict[str, float]) -> TaskConfig:
    """The task with what is set. A goal that its file gives holds for the regime and concurrency
    that the file gives too: with others K is the default of those, unless it is set.
    """
    concurrency = int(setting.get("concurrency", task.concurrency))
    old = task.regime
    if (regime or regime_of(task)) == "sync":
        share = old.over_selection if isinstance(old, SyncFL) else SyncFL().over_selection
        new: AsyncFL | SyncFL = SyncFL(setting.get("over_selection", share))
    else:
        kept = old if isinstance(old, AsyncFL) and concurrency == task.concurrency else AsyncFL()
        goal = setting.get("K", kept.aggregation_goal)
        limit = setting.get("max_staleness", kept.max_staleness)
        new = AsyncFL(None if goal is None else int(goal), None if limit is None else int(limit))
    return structs.replace(task, regime=new, concurrency=concurrency)


def with_rates(rates: Rates, setting: dict[str, float]) -> Rates:
    client, optimizer = rates.client, rates.optimizer
    if "client_rate" in setting:
        client = structs.replace(client, rate=setting["client_rate"])
    if "server_rate" in setting:
        optimizer = structs.replace(optimizer, rate=setting["server_rate"])
    if "beta1" in setting:
        optimizer = structs.replace(optimizer, beta1=setting["beta1"])
    return structs.replace(rates, client=client, optimizer=optimizer)


def _run(
    plan: Plan, prepared: Prepared, regime: Regime, setting: dict[str, float], seed: int
) -> Run:
    task = with_setting(prepared.task, regime, setting)
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
        rates=with_rates(prepared.rates, setting),
        updates=plan.updates,
        target=plan.target,
        evaluations=plan.evaluations,
    )
