"""`papaya sweep`: many simulated training runs, to choose K, concurrency and learning rates.

Runs are parallel and resumable: each result is saved in the output folder and not computed again.
Prints a table, the best setting first, and the norms of client updates with that setting; plots go
to the output folder.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs, to_builtins

from papaya.cli.output import (
    Commands,
    Progress,
    add_format,
    bind,
    make_folder,
    note,
    plural,
    positive,
    print_data,
    print_json,
    resumable,
    table,
    whole,
    writing,
)
from papaya.cli.simulate.options import DataOptions, add_data, add_population, add_ray, add_set
from papaya.cli.simulate.task import lines, scale_rows
from papaya.errors import OperatorError
from papaya.progress import elapsed
from papaya.sim.report import percent
from papaya.study.lab import LabStep
from papaya.study.run import most_updates
from papaya.study.run_warnings import after_sweep, before_sweep
from papaya.study.sweep import (
    FIELDS,
    VARIABLES,
    Plan,
    Regime,
    ResultRow,
    SweptValue,
    edges,
    learned_otherwise,
    rows_of,
    sweep,
    updates_together,
    varied_in,
)
from papaya.study.trace import MOST_HOURS, UNBOUNDED
from papaya.study.workloads.registry import BUILT_IN, prepare

_REGIMES: dict[str, Regime] = {"async": "async", "sync": "sync"}
_MEANINGLESS = {"async": "over_selection", "sync": "max_staleness"}
_EPILOG = """examples:
  papaya sweep embedding --vary K=10,30,100 --vary server_rate=0.003,0.01,0.03 --seeds 3
  papaya sweep my_task.py --data leaf:data/train --vary client_rate=0.1,0.3 --target 2.5
  papaya sweep my_task.py --data leaf:data/train --vary staleness.kind=polynomial,constant
  papaya sweep my_task.py --data leaf:data/train --vary client.optimizer=sgd,adam"""


@dataclass(frozen=True, kw_only=True)
class SweepOptions(DataOptions):
    workload: str
    vary: Sequence[tuple[str, tuple[SweptValue, ...]]] = ()
    regime: tuple[Regime, ...] = ()
    seeds: int = 1
    updates: int | None = None
    hours: float | None = None
    target: float | None = None
    evaluations: int = 50
    jobs: int = 2
    output: Path = Path("runs/sweep")


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "sweep",
        description="Train with every combination of the given values, on a simulated fleet, and "
        "compare the results.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "workload",
        metavar="WORKLOAD",
        help=f"what to train: {', '.join(BUILT_IN)}, or a task file together with --data",
    )
    own = parser.add_argument_group("the data of a task file, and changes to the file")
    add_data(own)
    add_set(own)
    what = parser.add_argument_group("what to vary")
    what.add_argument(
        "--vary",
        action="append",
        type=_varied,
        metavar="NAME=A,B,...",
        help=f"values to try for one of {', '.join(VARIABLES)}, or for a setting of a task: "
        f"{', '.join(FIELDS)}; may be repeated",
    )
    what.add_argument(
        "--regime",
        type=_regimes,
        metavar="R[,R]",
        help="async, sync, or async,sync for both (default: from the task)",
    )
    _add_run(parser.add_argument_group("each run"))
    parser.add_argument("--jobs", type=whole(1), metavar="J", help="number of processes")
    add_ray(parser, "run")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder for runs, traces and plots; runs that are already there are not repeated",
    )
    add_format(parser)
    bind(parser, SweepOptions, run)


def _add_run(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--seeds",
        type=whole(1),
        metavar="N",
        help="repetitions of each setting, with seeds 1, 2, 3, …",
    )
    group.add_argument(
        "--updates",
        type=whole(1),
        metavar="N",
        help="number of client updates to train with; a run ends with the version that contains "
        "the last one (default: 5000; with --hours: no limit)",
    )
    group.add_argument(
        "--hours",
        type=positive,
        metavar="H",
        help="maximum hours of virtual time (default: no limit)",
    )
    group.add_argument(
        "--target",
        type=float,
        metavar="LOSS",
        help="stop a run when it reaches this loss, and sort settings by the hours "
        "needed (default: sort by final loss)",
    )
    group.add_argument(
        "--evaluations",
        type=whole(1),
        metavar="N",
        help="number of evaluations, besides that of version 0",
    )
    add_population(group)


def run(options: SweepOptions) -> int:
    # Before the runs, which would be lost without matplotlib.
    from papaya.study import learning_plots

    plan = _plan(options)
    with elapsed(plan.workload.preparation):
        prepared = prepare(plan.workload, plan.population)
    folder = make_folder(options.output)
    note(prepared.about)
    for warning in before_sweep(prepared.task, plan.vary):
        note(f"warning: {warning}")
    if (otherwise := learned_otherwise(plan, prepared, folder, options.ray)) is not None:
        note(otherwise)
    with writing(folder), resumable(), Progress() as progress:
        outcomes = sweep(
            plan,
            folder,
            options.jobs,
            lambda step: progress.update(*_shown(step)),
            prepared,
            options.ray,
        )
    for warning in after_sweep(outcomes):
        note(f"warning: {warning}")
    asked = ("regime", *plan.vary)
    rows = rows_of(outcomes, varied_in(rows_of(outcomes, asked), asked))
    varied = varied_in(rows, asked)
    if options.is_json:
        print_json([_without_curves(row) for row in rows])
    else:
        shown = (_table(rows, varied, plan.target), _fixed(rows, plan), _scale(rows[0]))
        print_data("\n\n".join(shown))
    plot = folder / "sweep.png"
    with writing(plot):
        learning_plots.draw_sweep(rows, varied, plot, f"{prepared.task.task}: the best settings")
    for warning in edges(rows):
        note(f"warning: {warning}: the optimum may be outside the given values")
    note(f"\nruns: {folder / 'runs'}\nplot: {plot}")
    return 0


def _plan(options: SweepOptions) -> Plan:
    vary: dict[str, tuple[SweptValue, ...]] = {}
    for name, values in options.vary:
        if name in vary:
            raise OperatorError(f"--vary {name} is given twice", hint=f"--vary {name}=A,B,C")
        vary[name] = values
    together = updates_together(vary, options.regime, options.seeds, options.updates, options.hours)
    return Plan(
        workload=options.workload_spec(options.workload, together),
        vary=vary,
        regimes=options.regime,
        seeds=tuple(range(1, options.seeds + 1)),
        updates=most_updates(options.updates, options.hours),
        hours=options.hours or MOST_HOURS,
        target=options.target,
        evaluations=options.evaluations,
        population=options.population_config(),
    )


def _varied(text: str) -> tuple[str, tuple[SweptValue, ...]]:
    """Parse NAME=A,B,…; `Plan` checks the name."""
    name, _, listed = text.partition("=")
    values = [value.strip() for value in listed.split(",")]
    if not all(values):
        names = ", ".join((*VARIABLES, *FIELDS))
        problem = f"{text!r} does not have the form NAME=VALUE,VALUE,...; names are {names}"
        raise argparse.ArgumentTypeError(problem)
    return name, tuple(map(_number_or_text, values))


def _number_or_text(text: str) -> SweptValue:
    try:
        return float(text)
    except ValueError:
        return text


def _regimes(text: str) -> tuple[Regime, ...]:
    try:
        return tuple(_REGIMES[name] for name in text.split(","))
    except KeyError as error:
        raise argparse.ArgumentTypeError(f"{error} is neither async nor sync") from None


def _shown(step: LabStep) -> tuple[str, float, str]:
    if step.kind == "traces":
        words = f"{step.done} of {plural(step.total, 'trace')} of the protocol recorded"
        return "traces", step.share, words
    words = f"{step.done} of {plural(step.total, 'run')}"
    if step.outcome is not None and step.outcome.curve.diverged is not None:
        words += ", the last diverged"
    elif step.outcome is not None:
        words += f", the last with loss {step.outcome.end.all:.4f}"
    return "runs", step.share, words


def _table(rows: Sequence[ResultRow], varied: Sequence[str], target: float | None) -> str:
    timed = ("hours to target", "trips") if target is not None else ("hours", "trips")
    header = [*(varied or ("",)), *timed, "loss", "p75", "p99", *rows[0].metrics]
    header += ["utilization", "K–S"]
    cells = [_cells(row, varied, target) for row in rows]
    if "upload_bits" in varied:
        header.append("rounding")
        cells = [[*line, _error(row.rounding)] for line, row in zip(cells, rows, strict=True)]
    below = [_diverged(row) for row in rows if row.diverged]
    if (seeds := max(len(row.outcomes) for row in rows)) > 1:
        below.insert(0, f"means over {seeds} seeds ± sample standard deviation")
    return "\n".join([table(header, cells), *below])


def _fixed(rows: Sequence[ResultRow], plan: Plan) -> str:
    """The settings that were the same in all runs and have an effect in their regimes."""
    meaningless = {_MEANINGLESS[str(row.setting["regime"])] for row in rows}
    names = [name for name in rows[0].setting if meaningless != {name}]
    alike = [name for name in names if not varied_in(rows, (name,))]
    words = [f"{name} {_value(rows[0].setting[name])}" for name in alike]
    if plan.updates < UNBOUNDED:
        words.append(f"until the version that contains update {plan.updates:,}")
    if plan.hours < MOST_HOURS:
        words.append(f"at most {plan.hours:g} virtual hours")
    if plan.target is not None:
        words.append(f"until loss {plan.target:g}")
    return "fixed: " + ", ".join(words)


def _diverged(row: ResultRow) -> str:
    """A line that says why a setting has no loss."""
    first = next(o for o in row.outcomes if o.curve.diverged is not None)
    of = f" with {plural(row.diverged, 'seed')} of {len(row.outcomes)}"
    many = of if len(row.outcomes) > 1 else ""
    return f"– {row.label}: diverged{many} after version {first.versions}: {first.curve.diverged}"


def _scale(best: ResultRow) -> str:
    """Norms of client updates, from the first seed only: one run has enough updates."""
    first = best.outcomes[0]
    seed = first.run.recording_plan.seed
    head = f"client updates with the best setting ({best.label}), seed {seed}:"
    return "\n".join([head, *lines(scale_rows(first))])


def _cells(row: ResultRow, varied: Sequence[str], target: float | None) -> list[str]:
    named = [_value(row.setting[name]) for name in varied] or ["one setting"]
    if target is None:
        spent = [f"{row.hours:.2f}", f"{row.trips:,.0f}"]
    elif row.target_hours is None or row.target_trips is None:
        spent = ["not reached", "–"]
    else:
        hours = _mean(row.target_hours, row.target_hours_spread, 2)
        spent = [hours, f"{row.target_trips:,.0f}"]
    loss = _mean(row.loss, row.loss_spread, 4)
    losses = [loss, f"{row.p75:.4f}", f"{row.p99:.4f}"]
    losses += [_mean(row.metrics[name], row.metrics_spread[name], 4) for name in row.metrics]
    if row.diverged:
        losses = ["–"] * len(losses)
    ks = "–" if row.ks is None else f"{row.ks:.3f}"
    used = "–" if row.utilization is None else percent(row.utilization)
    return [*named, *spent, *losses, used, ks]


def _mean(value: float, spread: float | None, digits: int) -> str:
    return f"{value:.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")


def _error(share: float | None) -> str:
    return "–" if share is None else f"{share:.2g}"


def _value(value: SweptValue) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return value if isinstance(value, str) else f"{value:g}"


def _without_curves(row: ResultRow) -> dict[str, object]:
    """For JSON: names the file of each run instead of its curve."""
    shown: dict[str, object] = to_builtins(structs.replace(row, outcomes=()))
    if row.diverged:
        shown |= dict.fromkeys(("loss", "loss_spread", "p75", "p99"))
        shown |= dict.fromkeys(("metrics", "metrics_spread"), dict.fromkeys(row.metrics))
    shown["outcomes"] = [
        {
            "run": f"runs/{outcome.run.digest}.json",
            "seed": outcome.run.recording_plan.seed,
            "loss": outcome.end.all if outcome.curve.diverged is None else None,
            "metrics": {
                name: means.all if outcome.curve.diverged is None else None
                for name, means in outcome.end.metrics.items()
            },
            "target_hours": outcome.target_hours,
            "diverged": outcome.curve.diverged,
            "norms": to_builtins(outcome.norms),
            "precision": to_builtins(outcome.precision),
            "rounding": to_builtins(outcome.curve.rounding),
            "masked": to_builtins(outcome.curve.masked),
            "fairness": to_builtins(outcome.fairness),
        }
        for outcome in row.outcomes
    ]
    return shown
