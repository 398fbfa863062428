"""Sweeps: which runs a plan makes, that traces are shared, resuming, and what is found."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from papaya.config import (
    AsyncFL,
    EvaluationPlan,
    Requirements,
    SecureAggregation,
    StopRule,
    SyncFL,
    TaskConfig,
)
from papaya.errors import ConfigError, OperatorError
from papaya.sim.jobs import mapping
from papaya.sim.population import PopulationConfig
from papaya.study.data.opening import save_source
from papaya.study.data.source import Memory
from papaya.study.lab import Lab, LabStep
from papaya.study.run import RecordingPlan, Run, RunResult, record_plan, recordable
from papaya.study.sweep import (
    Plan,
    Regime,
    ResultRow,
    edges,
    learned_otherwise,
    rows_of,
    runs_of,
    setting_of,
    sweep,
    updates_together,
    varied_in,
    with_setting,
)
from papaya.study.workloads.registry import Prepared, WorkloadSpec, prepare

POPULATION = PopulationConfig(size=100_000, latency_mean_s=1.0)
EMBEDDING = WorkloadSpec("embedding")
SMALL = Plan(
    workload=EMBEDDING,
    vary={"concurrency": (20,), "K": (5, 10), "server_rate": (0.003, 0.03)},
    updates=100,
    evaluations=4,
    population=POPULATION,
)


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return prepare(EMBEDDING, POPULATION)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sweep")


@pytest.fixture(scope="module")
def outcomes(prepared: Prepared, folder: Path) -> list[RunResult]:
    return sweep(SMALL, folder, jobs=1, prepared=prepared)


# -- plans


def test_a_plan_is_every_combination_with_every_seed(prepared: Prepared) -> None:
    runs = runs_of(structs.replace(SMALL, seeds=(1, 2)), prepared)
    assert len({run.digest for run in runs}) == len(runs) == 8
    found = [(s["K"], s["server_rate"]) for s in map(setting_of, runs)]
    assert found[::2] == [(5, 0.003), (5, 0.03), (10, 0.003), (10, 0.03)]
    assert [run.recording_plan.seed for run in runs[:2]] == [1, 2]


def test_runs_that_differ_in_rates_share_their_recording(prepared: Prepared) -> None:
    runs = runs_of(SMALL, prepared)
    assert len({run.recording_plan.digest for run in runs}) == 2
    assert runs[0].recording_plan == runs[1].recording_plan


def test_what_the_other_regime_does_not_know_makes_no_runs(prepared: Prepared) -> None:
    vary: dict[str, tuple[float, ...]] = {"K": (5, 10), "over_selection": (0.0, 0.3)}
    plan = Plan(workload=EMBEDDING, vary=vary, regimes=("async", "sync"), population=POPULATION)
    settings = [setting_of(run) for run in runs_of(plan, prepared)]
    assert [(s["regime"], s["K"]) for s in settings] == [
        ("async", 5), ("async", 10), ("sync", 130), ("sync", 100),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"updates": 101},
        {"target": 3.0},
        {"evaluations": 5},
        {"seeds": (2,)},
        {"hours": 1.0},
        {"vary": {"beta1": (0.5,)}},
        {"vary": {"client_rate": (0.5,)}},
        {"population": PopulationConfig(size=100_001, latency_mean_s=1.0)},
    ],
)
def test_another_configuration_has_another_name(change: dict[str, object]) -> None:
    plain = Plan(workload=EMBEDDING, population=POPULATION, updates=100)
    other = structs.replace(plain, **change)
    digests = {
        run.digest
        for plan in (plain, other)
        for run in runs_of(plan, prepare(EMBEDDING, plan.population))
    }
    assert len(digests) == 2


def test_rules_functions_weights_and_client_optimizers_are_varied_by_name(
    prepared: Prepared,
) -> None:
    vary: dict[str, tuple[float | str, ...]] = {
        "staleness.kind": ("polynomial", "constant"),
        "staleness.exponent": (0.5, 1.0),
        "weighting.kind": ("equal", "capped"),
        "weighting.cap": (20.0,),
        "aggregation.kind": ("mean", "norm_bound"),
        "optimizer.kind": ("fedavg", "fedadam"),
        "client.optimizer": ("sgd", "adam"),
    }
    runs = runs_of(structs.replace(SMALL, vary=vary), prepared)
    assert len(runs) == 64
    assert len({run.recording_plan.digest for run in runs}) == 1, "one trace for all"
    rates = [run.rates for run in runs]
    assert {r.staleness.kind for r in rates} == {"polynomial", "constant"}
    assert {(r.weighting.kind, r.weighting.cap) for r in rates} == {("equal", None), ("capped", 20)}
    assert {r.aggregation.kind for r in rates} == {"mean", "norm_bound"}
    assert {r.optimizer.kind for r in rates} == {"fedavg", "fedadam"}
    names = {setting_of(run, ["client.optimizer"])["client.optimizer"] for run in runs}
    assert names == {"sgd", "adam"}


def test_a_name_without_its_group_is_explained() -> None:
    for name, meant in (("exponent", "staleness.exponent"), ("aggregation", "aggregation.kind")):
        with pytest.raises(ConfigError) as caught:
            Plan(workload=EMBEDDING, vary={name: (1.0, "mean")})
        assert caught.value.hint == f"did you mean {meant}=1,mean?"
        assert "max_staleness" not in str(caught.value), "no list of all names"


def test_an_unknown_name_lists_the_others_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Plan(workload=EMBEDDING, vary={"foo": (1.0, 2.0)})
    assert str(caught.value).count("max_staleness") == 1, "with its hint"


def test_functions_and_formats_are_compared(prepared: Prepared, tmp_path: Path) -> None:
    vary: dict[str, tuple[float | str, ...]] = {
        "concurrency": (20,),
        "K": (5,),
        "staleness.kind": ("polynomial", "constant"),
        "upload_bits": (32, 8),
    }
    plan = structs.replace(SMALL, vary=vary, updates=30, evaluations=1)
    rows = rows_of(sweep(plan, tmp_path, jobs=1, prepared=prepared), list(vary))
    assert len({row.loss for row in rows}) == 4
    found = {row.setting["upload_bits"]: row.rounding for row in rows}
    assert found[32] == 0.0
    assert 1e-3 < (found[8] or 0) < 1
    curve = rows[0].outcomes[0].curve
    assert curve.masked is not None
    assert curve.masked.levels == 32767 // 5 - 1
    assert curve.rounding[16].mean < curve.masked.mean < curve.masked.update


def test_other_data_has_another_name(prepared: Prepared) -> None:
    [run] = runs_of(structs.replace(SMALL, vary={}), prepared)
    assert structs.replace(run, data="other").digest != run.digest


@pytest.mark.parametrize(
    ("vary", "problem"),
    [
        ({"speed": (1.0,)}, "vary = 'speed': is not one of concurrency, K"),
        ({"K": ()}, "vary = 'K': has no values"),
        ({"K": (1.5,)}, "K = 1.5: must be a whole number"),
        ({"K": (float("nan"),)}, "K = nan: must be finite"),
        ({"server_rate": (float("inf"),)}, "server_rate = inf: must be finite"),
        ({"K": ("many",)}, "K = 'many': must be a number"),
        ({"client.rate": (0.1,)}, "vary = 'client.rate': cannot be varied"),
    ],
)
def test_an_impossible_plan_is_refused(vary: dict[str, tuple[float, ...]], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Plan(workload=EMBEDDING, vary=vary)
    with pytest.raises(ConfigError, match="target = nan: must be a finite loss"):
        Plan(workload=EMBEDDING, target=float("nan"))


def test_a_target_needs_versions_that_keep_it(
    outcomes: list[RunResult], tmp_path: Path, prepared: Prepared
) -> None:
    first = outcomes[1]
    target = round(0.95 * first.start.all + 0.05 * first.end.all, 3)
    vary: dict[str, tuple[float, ...]] = {"concurrency": (20,), "K": (5,), "server_rate": (0.03,)}
    easy = structs.replace(SMALL, vary=vary, target=target, evaluations=3)
    [outcome] = sweep(easy, tmp_path, jobs=1, prepared=prepared)
    assert outcome.target_hours is not None, "three evaluations are enough"
    assert outcome.target_hours > 0, "version 0 does not meet it"
    for few in (1, 2):
        problem = f"evaluations = {few}: is too few for the target {target:g}"
        with pytest.raises(ConfigError, match=problem) as refused:
            structs.replace(easy, evaluations=few)
        assert refused.value.hint == "use at least 3 evaluations, or leave the target out"


@pytest.mark.parametrize(
    "vary",
    [
        {"K": (0.0,)},
        {"client_rate": (-1.0,)},
        {"beta1": (1.0,)},
        {"concurrency": (0.0,)},
        {"upload_bits": (12.0,)},
        {"staleness.exponent": ("large",)},
        {"weighting.kind": ("some",)},
        {"weighting.kind": ("capped",)},
        {"aggregation.kind": ("median",)},  # with weights by examples
        {"client.optimizer": ("adamax",)},
    ],
)
def test_an_impossible_value_is_refused_before_anything_runs(
    vary: dict[str, tuple[float | str, ...]], prepared: Prepared, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError):
        sweep(structs.replace(SMALL, vary=vary), tmp_path, jobs=1, prepared=prepared)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("staleness.kind", "poly", "did you mean polynomial?"),
        ("staleness.kind", "none", "built in are polynomial, hinge, constant;"),
        ("upload_bits", 12.0, "use 8, 16 or 32"),
    ],
)
def test_a_refused_value_comes_with_those_there_are(
    name: str, value: float | str, hint: str, prepared: Prepared
) -> None:
    with pytest.raises(OperatorError) as caught:
        runs_of(structs.replace(SMALL, vary={name: (value,)}), prepared)
    assert caught.value.hint.startswith(hint)


def test_a_goal_of_the_file_holds_for_its_own_regime_and_concurrency(prepared: Prepared) -> None:
    task = structs.replace(prepared.task, concurrency=50, regime=AsyncFL(7, 90))
    assert with_setting(task, None, {}) == task
    assert with_setting(task, None, {"K": 9}).regime == AsyncFL(9, 90)
    assert with_setting(task, None, {"concurrency": 60}).regime == AsyncFL()
    assert with_setting(task, "sync", {}).regime == SyncFL(0.3)
    sync = structs.replace(task, regime=SyncFL(0.1))
    assert with_setting(sync, None, {}) == sync
    assert with_setting(sync, "async", {}).regime == AsyncFL()


@pytest.mark.parametrize(
    ("vary", "regimes", "seeds", "updates", "hours", "together"),
    [
        ({"K": (5, 10), "client_rate": (0.1, 0.2, 0.2)}, (), 5, 1000, None, 20_000),
        ({"K": (5, 10), "beta1": (0, 0.9)}, ("async", "sync"), 1, 100, None, 600),
        ({}, (), 2, None, None, 10_000),
        ({}, (), 2, 300, 1.0, 600),
        ({"K": (5, 10)}, (), 2, None, 1.0, None),
    ],
)
def test_all_runs_of_a_sweep_together_decide_whether_to_compile(
    vary: dict[str, tuple[float, ...]],
    regimes: tuple[Regime, ...],
    seeds: int,
    updates: int | None,
    hours: float | None,
    together: int | None,
    prepared: Prepared,
) -> None:
    assert updates_together(vary, regimes, seeds, updates, hours) == together
    plan = Plan(workload=EMBEDDING, vary=vary, regimes=regimes, seeds=tuple(range(seeds)))
    if updates is not None:
        assert len(runs_of(plan, prepared)) * updates == together


# -- sweeps


def test_outcomes_come_in_the_order_of_the_plan(outcomes: list[RunResult], folder: Path) -> None:
    settings = [setting_of(outcome.run) for outcome in outcomes]
    assert [(s["K"], s["server_rate"]) for s in settings] == [
        (5, 0.003), (5, 0.03), (10, 0.003), (10, 0.03),
    ]  # fmt: skip
    assert len(list((folder / "runs").iterdir())) == 4
    assert len(list((folder / "traces").glob("*.npz"))) == 2
    for outcome in outcomes:
        assert outcome.updates == 100
        assert outcome.end.all < outcome.start.all
        assert outcome.norms is not None
        assert outcome.norms.updates == outcome.updates


def test_a_second_sweep_reads_and_runs_only_what_is_missing(
    outcomes: list[RunResult], folder: Path, prepared: Prepared
) -> None:
    gone = folder / "runs" / f"{outcomes[2].run.digest}.json"
    damaged = folder / "runs" / f"{outcomes[1].run.digest}.json"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.*")}
    gone.unlink()
    damaged.write_bytes(damaged.read_bytes()[:50])
    steps: list[LabStep] = []
    again = sweep(SMALL, folder, jobs=1, progress=steps.append, prepared=prepared)
    assert again == outcomes
    assert list(dict.fromkeys((s.kind, s.done, s.total) for s in steps)) == [
        ("traces", 2, 2), ("runs", 2, 4), ("runs", 3, 4), ("runs", 4, 4),
    ]  # fmt: skip
    assert [s.share for s in steps if s.kind == "traces"] == [1.0]  # nothing was left to do
    changed = {p for p, time in before.items() if p.stat().st_mtime_ns != time}
    assert changed == {gone, damaged}


@pytest.mark.parametrize("jobs", [1, 2])
def test_progress_is_a_share_of_the_work_and_grows_while_runs_go_on(
    prepared: Prepared, tmp_path: Path, jobs: int
) -> None:
    """Of two recordings one is three times as long as the other, and goes first."""
    recording_plan, steps = runs_of(SMALL, prepared)[0].recording_plan, list[LabStep]()
    with mapping(jobs) as mapped:
        lab = Lab(tmp_path, mapped, lambda run, folder: prepared.make(1, 1, None), steps.append)
        lab.record(structs.replace(recording_plan, updates=updates) for updates in (300, 900))
    shares = [step.share for step in steps]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert shares.count(1.0) == 1  # when all have ended
    if jobs == 1:
        first_ended = next(step.share for step in steps if step.done == 1)
        assert first_ended == pytest.approx(0.75)
        assert any(0 < share < 0.7 for share in shares)


def test_a_run_is_the_same_in_other_processes(
    outcomes: list[RunResult], tmp_path: Path, prepared: Prepared
) -> None:
    plan = structs.replace(SMALL, vary={**SMALL.vary, "K": (5,)})
    elsewhere = sweep(plan, tmp_path, jobs=2, prepared=prepared)
    assert msgspec.json.encode(elsewhere) == msgspec.json.encode(outcomes[:2])


@pytest.mark.parametrize("changed", ["task.py", "clients"])
def test_what_changes_while_a_sweep_records_is_not_kept_as_what_it_was(
    changed: str, tmp_path: Path
) -> None:
    task, clients = tmp_path / "task.py", tmp_path / "clients"
    shutil.copy("examples/leaf.py", task)
    save_source(_signs(1.0), clients)
    plan = Plan(
        workload=WorkloadSpec(str(task), f"saved:{clients}", steps="eager"),
        vary={"client_rate": (0.1, 0.2)},
        updates=20,
        evaluations=2,
        population=POPULATION,
    )

    def change(step: LabStep) -> None:
        if step.kind == "traces" and changed == "task.py":
            task.write_text(task.read_text() + "\n# edited\n")
        elif step.kind == "traces":
            save_source(_signs(2.0), clients)

    with pytest.raises(OperatorError, match="changed while the sweep was running") as refused:
        sweep(plan, tmp_path / "sweep", jobs=2, progress=change)
    assert refused.value.hint == "repeat the command"
    assert not list((tmp_path / "sweep" / "runs").iterdir())
    assert len(sweep(plan, tmp_path / "sweep", jobs=2)) == 2


def _signs(scale: float) -> Memory:
    examples = [
        msgspec.json.encode({"x": [scale * (number - 9.5), 1.0], "y": int(number > 9)})
        for number in range(20)
    ]
    return Memory("signs", [examples] * 5)


def test_a_worker_that_cannot_compile_does_not_train_for_one_that_can(
    prepared: Prepared, tmp_path: Path
) -> None:
    compiled = replace(prepared, digest=f"{prepared.digest}/compiled")
    with pytest.raises(OperatorError, match="has eager steps, but the sweep began with compiled"):
        sweep(SMALL, tmp_path, jobs=2, prepared=compiled)
    assert not list((tmp_path / "runs").iterdir())


def test_runs_with_the_other_kind_of_steps_are_named(
    outcomes: list[RunResult], folder: Path, prepared: Prepared, tmp_path: Path
) -> None:
    """A larger sweep may choose compiled steps, and its finished runs had eager ones."""
    compiled = replace(prepared, digest=f"{prepared.digest}/compiled")
    larger = structs.replace(SMALL, seeds=(1, 2))
    told = learned_otherwise(larger, compiled, folder)
    assert told is not None
    assert told.startswith(f"{folder} has results with eager steps for {len(outcomes)} of 8 runs")
    assert told.endswith("(--steps eager)")
    compiled_folder = tmp_path / "compiled"
    (compiled_folder / "runs").mkdir(parents=True)
    for run in runs_of(SMALL, compiled):
        (compiled_folder / "runs" / f"{run.digest}.json").touch()
    told = learned_otherwise(SMALL, prepared, compiled_folder)
    assert told is not None
    assert told.endswith("(--steps compiled)")
    told = learned_otherwise(SMALL, prepared, compiled_folder, ray="local")
    assert told is not None
    assert told.endswith("repeated with eager steps")
    assert learned_otherwise(larger, prepared, folder) is None
    assert learned_otherwise(larger, compiled, tmp_path) is None


def test_an_error_of_who_watches_is_no_divergence(
    prepared: Prepared, outcomes: list[RunResult], tmp_path: Path
) -> None:
    def stop(step: LabStep) -> None:
        if step.kind == "runs" and step.share > 0:
            raise OperatorError("enough")

    with pytest.raises(OperatorError, match="enough"):
        sweep(SMALL, tmp_path, jobs=1, progress=stop, prepared=prepared)
    assert not list((tmp_path / "runs").iterdir())
    assert sweep(SMALL, tmp_path, jobs=1, prepared=prepared) == outcomes


def test_an_interrupted_sweep_leaves_whole_files(
    prepared: Prepared, outcomes: list[RunResult], tmp_path: Path
) -> None:
    class Enough(Exception):
        pass

    def stop(step: LabStep) -> None:
        if step.outcome is not None:
            raise Enough

    with pytest.raises(Enough):
        sweep(SMALL, tmp_path, jobs=1, progress=stop, prepared=prepared)
    [only] = (tmp_path / "runs").iterdir()
    assert msgspec.json.decode(only.read_bytes(), type=RunResult) == outcomes[0]
    assert not [name for _, _, files in os.walk(tmp_path) for name in files if name[0] == "."]


def test_a_run_that_diverges_is_an_outcome(prepared: Prepared, tmp_path: Path) -> None:
    plan = structs.replace(SMALL, vary={"client_rate": (1e30,), "concurrency": (20,)})
    [outcome] = sweep(plan, tmp_path, jobs=1, prepared=prepared)
    assert outcome.curve.diverged is not None
    assert outcome.versions < 10
    assert sweep(plan, tmp_path, jobs=1, prepared=prepared) == [outcome]


def test_a_run_that_is_over_before_anything_is_sampled_is_kept_as_well(
    prepared: Prepared, tmp_path: Path
) -> None:
    [outcome] = sweep(structs.replace(SMALL, vary={}, hours=1e-4), tmp_path, 1, prepared=prepared)
    assert (outcome.fleet.utilization, outcome.fleet.mean_staleness) == (None, None)
    assert outcome.versions == 0


def test_a_damaged_recording_is_named(prepared: Prepared, tmp_path: Path) -> None:
    plan = structs.replace(SMALL, vary={})
    sweep(plan, tmp_path, jobs=1, prepared=prepared)
    for kind in ("report", "trace"):
        elsewhere = tmp_path / kind
        shutil.copytree(tmp_path / "traces", elsewhere / "traces")
        [path] = (elsewhere / "traces").glob("*.msgpack" if kind == "report" else "*.npz")
        path.write_bytes(path.read_bytes()[:99])
        with pytest.raises(OperatorError, match=f"cannot read {kind} {path}"):
            sweep(plan, elsewhere, jobs=1, prepared=prepared)


def test_a_task_is_recorded_with_its_own_terms_and_every_device_fits() -> None:
    task = TaskConfig(
        task="own",
        concurrency=20,
        model_length=10**6,
        regime=AsyncFL(4),
        clip=1.0,
        secure_aggregation=SecureAggregation(),
        requirements=Requirements(
            engine="torch", module="sha256:1", min_memory_mb=9, labels=("x",)
        ),
        evaluation=EvaluationPlan(every_versions=2),
        stop=StopRule(versions=3),
    )
    cluster = recordable(task, POPULATION)
    trace, report = record_plan(RecordingPlan(cluster=cluster, seed=1, updates=40))
    assert len(trace.clients) >= 40
    assert trace.versions > 3
    assert (trace.task.concurrency, trace.task.aggregation_goal) == (20, 4)
    assert [result.task for result in report.tasks] == ["own"]


# -- results


def test_rows_put_seeds_together_and_the_best_first(outcomes: list[RunResult]) -> None:
    other = [_with_seed(outcome.run, 2) for outcome in outcomes]
    doubled = [structs.replace(o, run=r) for o, r in zip(outcomes, other, strict=True)]
    rows = rows_of([*outcomes, *doubled], ("K", "server_rate"))
    assert [len(row.outcomes) for row in rows] == [2] * 4
    assert [row.loss for row in rows] == sorted(row.loss for row in rows)
    best = rows[0].setting
    assert rows[0].label == f"K {best['K']}, server_rate {best['server_rate']}"
    assert [row.loss_spread for row in rows] == pytest.approx([0.0] * 4)
    assert varied_in(rows, ("regime", "K", "beta1")) == ["K"]


def test_a_spread_is_the_sample_standard_deviation_and_unknown_for_one_seed(
    outcomes: list[RunResult],
) -> None:
    runs = [structs.replace(_with_seed(outcomes[0].run, seed), target=3.0) for seed in (1, 2)]
    found = [
        structs.replace(outcome, run=run, target_hours=hours, target_trips=10)
        for outcome, run, hours in zip(outcomes[:2], runs, (1.0, 2.0), strict=True)
    ]
    [row] = rows_of(found, ())
    first, second = (outcome.end.all for outcome in found)
    assert row.loss_spread == pytest.approx(abs(first - second) / 2**0.5)
    assert row.target_hours_spread == pytest.approx(0.5**0.5)
    [row] = rows_of(found[:1], ())
    assert (row.loss_spread, row.target_hours_spread) == (None, None)


def _with_seed(run: Run, seed: int) -> Run:
    return structs.replace(run, recording_plan=structs.replace(run.recording_plan, seed=seed))


def test_with_a_target_the_soonest_come_first_and_those_that_missed_it_last(
    outcomes: list[RunResult],
) -> None:
    hours = (None, 3.0, 1.0, 2.0)
    timed = [
        structs.replace(
            outcome,
            run=structs.replace(outcome.run, target=3.0),
            target_hours=time,
            target_trips=None if time is None else 10,
        )
        for outcome, time in zip(outcomes, hours, strict=True)
    ]
    assert [row.target_hours for row in rows_of(timed, ())] == [1.0, 2.0, 3.0, None]
    broken = structs.replace(timed[2], curve=structs.replace(timed[2].curve, diverged="NaN"))
    rows = rows_of([*timed[:2], broken, timed[3]], ())
    assert [row.diverged for row in rows] == [0, 0, 0, 1]


def test_a_rate_at_the_edge_is_told(outcomes: list[RunResult]) -> None:
    rows = rows_of(outcomes, ("K", "server_rate"))
    [found] = edges(rows)
    assert "the best server_rate" in found
    middle = [rows[0], _at_rate(rows[1], 1e-4), _at_rate(rows[2], 9.0)]
    assert edges(middle) == []
    assert edges([]) == []


def _at_rate(row: ResultRow, rate: float) -> ResultRow:
    return structs.replace(row, setting=row.setting | {"server_rate": rate})
