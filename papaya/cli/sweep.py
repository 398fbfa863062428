"""`papaya sweep`: many learning runs, to choose K, concurrency and rates before touching a fleet.

In parallel and resumable: what a run found is kept in the output folder, and asked for again it is
read, not run. A table on stdout, the best setting first, and how long client updates are there;
plots beside the runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from msgspec import structs, to_builtins

from papaya.cli.norm_summary import lines, scale_rows
from papaya.cli.output import (
    Commands,
    Progress,
    add_format,
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
from papaya.cli.simulate.simulate import add_data
from papaya.errors import OperatorError
from papaya.sim.population import DEFAULT
from papaya.sim.report import percent
from papaya.study.lab import LabStep
from papaya.study.sweep import VARIABLES, Plan, Regime, ResultRow, edges, rows_of, sweep, varied_in
from papaya.study.trace import MOST_HOURS
from papaya.study.workloads.registry import BUILT_IN, WorkloadSpec, prepare

_REGIMES: dict[str, Regime] = {"async": "async", "sync": "sync"}
_MEANINGLESS = {"async": "over_selection", "sync": "max_staleness"}
_JOBS = 2
_EPILOG = """examples:
  papaya sweep embedding --vary K=10,30,100 --vary server_rate=0.003,0.01,0.03 --seeds 3
  papaya sweep my_task.py --data leaf:data/train --vary client_rate=0.1,0.3 --target 2.5"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "sweep",
        description="Learn with every combination of what is varied, on a simulated fleet.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "workload", metavar="WORKLOAD", help=f"{', '.join(BUILT_IN)}, or a task file with --data"
    )
    add_data(parser.add_argument_group("the data of a task file"))
    what = parser.add_argument_group("what to vary")
    what.add_argument(
        "--vary",
        action="append",
        type=_varied,
        default=[],
        metavar="NAME=A,B,…",
        help=f"may be repeated; names: {', '.join(VARIABLES)}",
    )
    what.add_argument(
        "--regime",
        type=_regimes,
        default=(),
        metavar="R,…",
        help="async, sync or both (default: the task's)",
    )
    _add_run(parser)
    parser.add_argument(
        "--jobs", type=whole(1), default=_JOBS, metavar="J", help=f"processes (default: {_JOBS})"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/sweep"),
        metavar="DIR",
        help="for runs, traces and plots; what is there is not run again (default: runs/sweep)",
    )
    add_format(parser)


def _add_run(parser: argparse.ArgumentParser) -> None:
    each = parser.add_argument_group("each run")
    each.add_argument(
        "--seeds", type=whole(1), default=1, metavar="N", help="1 to N, each setting (default: 1)"
    )
    each.add_argument(
        "--updates",
        type=whole(1),
        default=5000,
        metavar="N",
        help="client updates to learn from, at most (default: 5000)",
    )
    each.add_argument(
        "--hours",
        type=positive,
        default=argparse.SUPPRESS,
        metavar="H",
        help="of virtual time, at most (default: no limit)",
    )
    each.add_argument(
        "--target",
        type=float,
        default=None,
        metavar="LOSS",
        help="a run ends there, and settings are sorted by hours to it (default: by final loss)",
    )
    each.add_argument(
        "--evaluations",
        type=whole(1),
        default=50,
        metavar="N",
        help="of each run, beside the first (default: 50)",
    )
    each.add_argument(
        "--population",
        type=whole(1),
        default=DEFAULT.size,
        metavar="N",
        help=f"devices (default: {DEFAULT.size:,})",
    )


def run(options: argparse.Namespace) -> int:
    from papaya.study import (
        learning_plots,  # before the runs: a missing matplotlib should cost none
    )

    plan = _plan(options)
    prepared = prepare(plan.workload, plan.population)
    folder = make_folder(options.output)
    note(prepared.about)
    with writing(folder), resumable(), Progress() as progress:
        outcomes = sweep(
            plan, folder, options.jobs, lambda step: progress.update(*_shown(step)), prepared
        )
    if any(not outcome.versions and outcome.curve.diverged is None for outcome in outcomes):
        note("warning: some runs made no server update and learnt nothing: raise --hours")
    asked = ("regime", *plan.vary)
    rows = rows_of(outcomes, varied_in(rows_of(outcomes, ()), asked))
    varied = varied_in(rows, asked)
    if options.format == "json":
        print_json([_without_curves(row) for row in rows])
    else:
        shown = (_table(rows, varied, plan.target), _fixed(rows, plan), _scale(rows[0]))
        print_data("\n\n".join(shown))
    plot = folder / "sweep.png"
    with writing(plot):
        learning_plots.draw_sweep(rows, varied, plot, f"{prepared.task.task}: the best settings")
    for warning in edges(rows):
        note(f"warning: {warning}: its optimum may lie beyond")
    note(f"\nruns: {folder / 'runs'}\nplot: {plot}")
    return 0


def _plan(options: argparse.Namespace) -> Plan:
    vary: dict[str, tuple[float, ...]] = {}
    for name, values in options.vary:
        if name in vary:
            raise OperatorError(f"{name} is varied twice", hint=f"--vary {name}=A,B,C")
        vary[name] = values
    plan = Plan(
        workload=WorkloadSpec(
            options.workload,
            getattr(options, "data", None),
            getattr(options, "seconds_per_example", None),
        ),
        vary=vary,
        regimes=options.regime,
        seeds=tuple(range(1, options.seeds + 1)),
        updates=options.updates,
        target=options.target,
        evaluations=options.evaluations,
        population=structs.replace(DEFAULT, size=options.population),
    )
    return structs.replace(plan, hours=options.hours) if hasattr(options, "hours") else plan


def _varied(text: str) -> tuple[str, tuple[float, ...]]:
    """NAME=A,B,…; `Plan` knows the names."""
    name, _, listed = text.partition("=")
    try:
        values = tuple(float(value) for value in listed.split(","))
    except ValueError:
        names = ", ".join(VARIABLES)
        problem = f"{text!r} is not NAME=A,B,… with numbers; names are {names}"
        raise argparse.ArgumentTypeError(problem) from None
    return name, values


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
    header = (*(varied or ("",)), *timed, "loss", "p75", "p99", "utilization", "K–S")
    shown = table(header, [_cells(row, varied, target) for row in rows])
    return "\n".join([shown, *(_diverged(row) for row in rows if row.diverged)])


def _fixed(rows: Sequence[ResultRow], plan: Plan) -> str:
    """What was the same everywhere, and means something in the regimes that ran."""
    meaningless = {_MEANINGLESS[str(row.setting["regime"])] for row in rows}
    names = [name for name in rows[0].setting if meaningless != {name}]
    alike = [name for name in names if not varied_in(rows, (name,))]
    words = [f"{name} {_value(rows[0].setting[name])}" for name in alike]
    words.append(f"at most {plural(plan.updates, 'update')}")
    if plan.hours < MOST_HOURS:
        words.append(f"at most {plan.hours:g} virtual hours")
    if plan.target is not None:
        words.append(f"until loss {plan.target:g}")
    return "fixed: " + ", ".join(words)


def _diverged(row: ResultRow) -> str:
    """Why a setting has no loss: a mean over what was learnt until then would look like one."""
    first = next(o for o in row.outcomes if o.curve.diverged is not None)
    of = f" with {plural(row.diverged, 'seed')} of {len(row.outcomes)}"
    many = of if len(row.outcomes) > 1 else ""
    return f"– {row.label}: diverged{many} after version {first.versions}: {first.curve.diverged}"


def _scale(best: ResultRow) -> str:
    """Of one seed: norms of one run are many already."""
    first = best.outcomes[0]
    seed = first.run.recording_plan.seed
    head = f"client updates with the best setting ({best.label}), seed {seed}:"
    return "\n".join([head, *lines(scale_rows(first))])


def _cells(row: ResultRow, varied: Sequence[str], target: float | None) -> list[str]:
    many = len(row.outcomes) > 1
    named = [_value(row.setting[name]) for name in varied] or ["one setting"]
    if target is None:
        spent = [f"{row.hours:.2f}", f"{row.trips:,.0f}"]
    elif row.target_hours is None or row.target_trips is None:
        spent = ["not reached", "–"]
    else:
        spread = f" ± {row.target_hours_spread:.2f}" if many else ""
        spent = [f"{row.target_hours:.2f}{spread}", f"{row.target_trips:,.0f}"]
    loss = f"{row.loss:.4f}" + (f" ± {row.loss_spread:.4f}" if many else "")
    losses = ["–"] * 3 if row.diverged else [loss, f"{row.p75:.4f}", f"{row.p99:.4f}"]
    ks = "–" if row.ks is None else f"{row.ks:.3f}"
    used = "–" if row.utilization is None else percent(row.utilization)
    return [*named, *spent, *losses, used, ks]


def _value(value: float | str) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return value if isinstance(value, str) else f"{value:g}"


def _without_curves(row: ResultRow) -> dict[str, object]:
    """The curves are in the files, one for each run; here are their names."""
    shown: dict[str, object] = to_builtins(structs.replace(row, outcomes=()))
    if row.diverged:
        shown |= dict.fromkeys(("loss", "loss_spread", "p75", "p99"))
    shown["outcomes"] = [
        {
            "run": f"runs/{outcome.run.digest}.json",
            "seed": outcome.run.recording_plan.seed,
            "loss": outcome.end.all if outcome.curve.diverged is None else None,
            "target_hours": outcome.target_hours,
            "diverged": outcome.curve.diverged,
            "norms": to_builtins(outcome.norms),
            "precision": to_builtins(outcome.precision),
            "fairness": to_builtins(outcome.fairness),
        }
        for outcome in row.outcomes
    ]
    return shown
