"""`papaya simulate my_task.py --data …`: a simulated fleet trains the user's model.

First the state machines run and are recorded, then the model is trained along that trace. The
report says how the loss fell over time, for all clients and for those with much data; which clients
took part; the norms of client updates, the clip that follows from them, and the precision of secure
aggregation's fixed-point numbers (`papaya/study/precision.py`).
"""

from __future__ import annotations

import math
from pathlib import Path

from msgspec import structs

from papaya.cli.output import (
    Progress,
    make_folder,
    note,
    plural,
    print_data,
    print_json,
    resumable,
    table,
    writing,
)
from papaya.cli.simulate.simulate import SimulateOptions, check_goal
from papaya.errors import Diverged
from papaya.progress import elapsed
from papaya.sim.report import percent, regime_name
from papaya.study.fairness import Distance
from papaya.study.precision import LEAST_UPDATES
from papaya.study.run import FleetSummary, Run, RunResult, most_updates
from papaya.study.run_file import (
    differences,
    other_versions,
    prepared_again,
    read_run_file,
    relocated,
)
from papaya.study.run_warnings import before_run, ended_early
from papaya.study.simulation import (
    CHECKPOINT_S,
    SimulatedRun,
    for_programs,
    forget,
    kept_of,
    run_of,
    simulate_run,
)
from papaya.study.sweep import regime_of, setting_of
from papaya.study.trace import MOST_HOURS
from papaya.study.workloads.registry import Prepared, prepare

_EVALUATIONS = 20
_MANY = 100.0  # perplexities from here on have one decimal
_MUCH_WORSE = 1.1  # times the lowest loss
_MOST_FINITE = 700.0  # exp() of more overflows


def run_task(options: SimulateOptions) -> int:
    from papaya.study import (
        learning_plots,  # noqa: F401 - before the run, which would be lost without matplotlib
    )

    folder = make_folder(options.output)
    spec = options.workload_spec(str(options.task_file), options.updates)
    with elapsed(spec.preparation):
        prepared = prepare(spec, options.population_config())
    run = _run(options, prepared)
    note(prepared.about)
    seconds = prepared.population.execution_per_example_s
    note(f"a median device takes {seconds:g} s per example (--seconds-per-example)")
    for warning in run.recording_plan.task.warnings():
        note(f"warning: {warning}")
    simulated = _simulated(run, prepared, options, folder)
    _show(simulated, options, folder)
    return 0


def rerun_task(options: SimulateOptions, path: Path) -> int:
    """Repeat a run from its file. The exit code is 1 if the numbers differ."""
    from papaya.study import learning_plots  # noqa: F401 - as above

    if path.is_dir():
        path /= "run.json"
    file = read_run_file(path)
    file = relocated(path, file, options.capacity_trace, options.availability_trace)
    task = None if options.task_file is None else str(options.task_file)
    with elapsed(file.workload.preparation):
        prepared = prepared_again(path, file, task, options.data)
    # Never over the results of a run, nor into the folder of another one by default.
    is_default = options.output == type(options).output
    same_folder = options.output.resolve() == path.resolve().parent
    folder = make_folder(path.parent / "rerun" if is_default or same_folder else options.output)
    note(f"results go to {folder} (--output)")
    note(prepared.about)
    for difference in (others := other_versions(file)):
        note(f"warning: not as in {path}: {difference}")
    simulated = _simulated(file.run, prepared, options, folder)
    differing = differences(file, simulated.summary)
    _show(simulated, options, folder)
    if not differing:
        note(f"the same numbers as in {path}")
        return 0
    for difference in differing:
        note(f"differs from {path}: {difference}")
    if not others:
        note("versions and code are the same: another kind of processor can round differently")
    return 1


def _simulated(
    run: Run, prepared: Prepared, options: SimulateOptions, folder: Path
) -> SimulatedRun:
    every_s = options.checkpoint_every
    for warning in before_run(prepared.task, run):
        note(f"warning: {warning}")
    resume = folder / "resume"

    def kept() -> str:
        return kept_of(run, resume, "command")

    with writing(folder), resumable(kept), Progress() as progress:
        return simulate_run(
            run,
            prepared,
            processes=options.processes or 1,
            ray=options.ray,
            resume=resume,
            checkpoint_s=CHECKPOINT_S if every_s is None else every_s,
            tell=progress.update,
        )


def _show(simulated: SimulatedRun, options: SimulateOptions, folder: Path) -> None:
    learnt = simulated.result
    early = ended_early(learnt)
    if early is not None and learnt.curve.diverged is None:
        note(f"warning: {early}")
    with writing(folder):
        written = simulated.save(folder)
    forget(learnt.run, folder / "resume")
    if options.is_json:
        print_json(for_programs(learnt))
    else:
        print_data(summary(learnt))
    note("\n" + "\n".join(map(str, written)))
    if early is not None and learnt.curve.diverged is not None:
        used = setting_of(learnt.run)
        raise Diverged(
            early,
            hint=f"lower --client-rate ({used['client_rate']:g}) or --server-rate "
            f"({used['server_rate']:g})",
        )


def _run(options: SimulateOptions, prepared: Prepared) -> Run:
    regime = options.regime or regime_of(prepared.task)
    check_goal(regime, options)
    given = {
        "K": options.goal,
        "concurrency": options.concurrency,
        "over_selection": options.over_selection,
        "client_rate": options.client_rate,
        "server_rate": options.server_rate,
    }
    setting = {name: float(value) for name, value in given.items() if value is not None}
    run = run_of(
        prepared,
        regime,
        setting,
        seed=options.seed,
        updates=most_updates(options.updates, options.hours),
        hours=options.hours or MOST_HOURS,
        evaluations=options.evaluations or _EVALUATIONS,
    )
    cluster = structs.replace(
        run.recording_plan.cluster,
        supply=options.supply,
        coordinators=options.coordinators,
        selectors=options.selectors,
        aggregators=options.aggregators,
    )
    return structs.replace(run, recording_plan=structs.replace(run.recording_plan, cluster=cluster))


def summary(learnt: RunResult) -> str:
    """The result as text for people."""
    task = learnt.run.recording_plan.task
    head = f"{learnt.run.workload}: {regime_name(task)}, C = {task.concurrency}, "
    head += f"K = {task.aggregation_goal}, seed {learnt.run.recording_plan.seed}"
    rows = [
        ("learnt", f"{_done(learnt)} in {learnt.hours:.2f} virtual hours"),
        ("utilization", _used(learnt.fleet)),
        ("took part", _took_part(learnt)),
        *_privacy(learnt),
        *scale_rows(learnt),
    ]
    if learnt.curve.diverged is not None:
        last = f"loss {learnt.end.all:.4f} before that"
        whole = "the lines below describe the whole recording"
        rows.insert(1, ("diverged", f"{learnt.curve.diverged}; {last}; {whole}"))
    return "\n".join([head, *lines(rows)]) + "\n\n" + _qualities(learnt) + _best(learnt)


def _used(fleet: FleetSummary) -> str:
    if fleet.utilization is None:
        return "–, staleness – (the run is shorter than its warm-up)"
    if fleet.mean_staleness is None:
        return f"{percent(fleet.utilization)}, staleness – (no server update after the warm-up)"
    staleness = f"staleness {fleet.mean_staleness:.1f}, at most {fleet.max_staleness}"
    return f"{percent(fleet.utilization)}, {staleness}"


def _done(learnt: RunResult) -> str:
    counts = ((learnt.updates, "client update"), (learnt.versions, "server update"))
    return f"{', '.join(plural(*count) for count in counts)}, {plural(learnt.trips, 'trip')}"


def _qualities(learnt: RunResult) -> str:
    is_language = learnt.run.recording_plan.task.perplexity
    names_of_values = ("loss", *["perplexity"] * is_language, *learnt.start.metrics)
    header = ["held-out data, by volume"]
    for name in names_of_values:
        header += [name, "→"]
    names = (
        ("all", "all, weighted by examples"),
        ("p75", "75th percentile and above"),
        ("p99", "99th percentile and above"),
        ("all_by_clients", "all, equal weight per client"),
    )
    rows = []
    for field, words in names:
        count = getattr(learnt.judges, field, None)
        if count is not None:
            words += f" ({count:,})"
        losses = [getattr(learnt.start, field), getattr(learnt.end, field)]
        cells = [f"{loss:.4f}" for loss in losses]
        cells += [_perplexity(loss) for loss in losses] if is_language else []
        for name in learnt.start.metrics:
            ends = (learnt.start.metrics[name], learnt.end.metrics[name])
            cells += [f"{getattr(end, field):.4f}" for end in ends]
        if learnt.curve.diverged is not None:
            cells[1::2] = ["–"] * (len(cells) // 2)
        rows.append((words, *cells))
    return table(header, rows)


def _best(learnt: RunResult) -> str:
    """A line about the best version, if the last one is much worse."""
    best = min(learnt.curve.points, key=lambda point: point.quality.all)
    if learnt.end.all <= _MUCH_WORSE * best.quality.all:
        return ""
    return f"\nbest: loss {best.quality.all:.4f} at version {best.version}"


def _perplexity(loss: float) -> str:
    value = math.exp(loss) if loss < _MOST_FINITE else math.inf
    return f"{value:,.1f}" if value >= _MANY else f"{value:.3f}"


def _took_part(learnt: RunResult) -> str:
    found = learnt.fairness
    if found is None:
        return "unknown: the K–S test needs 30 clients that were assigned well before the end"
    time, examples = _distance(found.execution_s), _distance(found.examples)
    return (
        f"K–S {time} by execution time, {examples} by examples; "
        f"chance gives up to {found.execution_s.noise:.3f} for {plural(found.clients, 'client')}"
    )


def _privacy(learnt: RunResult) -> list[tuple[str, str]]:
    """The noise of a private task, which the run has had."""
    privacy = learnt.run.rates.privacy
    if privacy is None:
        return []
    terms = privacy.terms
    members = learnt.run.recording_plan.task.aggregation_goal * learnt.run.copies
    noise = terms.noise_multiplier * privacy.clip * math.sqrt(learnt.length)
    noise /= members * terms.expected_weight
    text = (
        f"epsilon {terms.epsilon:.3g} at delta {terms.delta:.2g} for "
        f"{plural(terms.max_participations, 'participation')} of a device; noise of norm "
        f"{noise:.3g} in each step"
    )
    return [("privacy", text)]


def _distance(found: Distance) -> str:
    return f"{found.ks:.3f} (p = {found.p_value:.2g})"


def scale_rows(learnt: RunResult) -> list[tuple[str, str]]:
    """Norms of client updates, the suggested clip and the fixed-point precision: name and text."""
    return [
        ("update norms", _norms(learnt)),
        ("clip", _clip(learnt)),
        ("fixed point", _fixed_point(learnt)),
        ("fewer bits", _rounding(learnt)),
    ]


def lines(rows: list[tuple[str, str]]) -> list[str]:
    return [f"  {name:<13} {text}" for name, text in rows]


def _norms(learnt: RunResult) -> str:
    norms = learnt.norms
    if norms is None:
        return "–"
    return (
        f"median {norms.p50:.3g}, 90 % {norms.p90:.3g}, 99 % {norms.p99:.3g}, "
        f"longest {norms.largest:.3g} (of the first {norms.updates:,})"
    )


def _clip(learnt: RunResult) -> str:
    found, own = learnt.precision, learnt.run.rates.clip
    if found is None:
        return _why_none(learnt)
    now = "the task has none" if own is None else f"the task has {own:g}"
    return f"suggested {found.clip:g}: {percent(found.clipped)} of updates are longer; {now}"


def _why_none(learnt: RunResult) -> str:
    if learnt.curve.diverged is not None:
        return "– (the run diverged)"
    if learnt.norms is None or learnt.norms.updates < LEAST_UPDATES:
        return f"– (this needs {LEAST_UPDATES} client updates)"
    return "–"


def _rounding(learnt: RunResult) -> str:
    """What `upload_bits` would do to an update, and to the mean of many: in the clear, and under
    secure aggregation.
    """
    texts = [
        f"{bits} bits change an update by {e.update:.2g} of its norm, their mean by {e.mean:.2g}"
        for bits, e in learnt.curve.rounding.items()
    ]
    if (found := learnt.curve.masked) is not None:
        texts.append(
            f"masked, 16 bits by {found.update:.2g} and {found.mean:.2g} ({found.levels} levels "
            f"for clip {found.clip:g})"
        )
    return "; ".join(texts) or "–"


def _fixed_point(learnt: RunResult) -> str:
    found = learnt.precision
    if found is None:
        return "–"
    if not found.is_enough:
        return f"K leaves {found.levels:,} levels, {found.needed:,} are needed: lower K"
    return (
        f"at this clip and K a step is {found.step:.2g}; the error of a coordinate of the mean is "
        f"{found.error:.2g} (at most {found.error_bound:.2g}); a coordinate of a median update is "
        f"{found.coordinate:.2g}"
    )
