"""`papaya simulate`: one run under virtual time; a report, report.json and plots.

The servers and clients are the real ones; the network, the stores and the fleet are simulated. A
run is a function of its options and the seed. With a task file and data the fleet learns
(`simulate_task.py`); without, devices upload a few integers and nothing is learnt.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
from msgspec import structs

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
    whole,
    writing,
)
from papaya.config import AsyncFL, SyncFL
from papaya.errors import OperatorError
from papaya.sim.cluster import ClusterConfig
from papaya.sim.population import DEFAULT
from papaya.sim.report import regime_name
from papaya.sim.simulate import Moment, protocol_tasks, simulate

_CONCURRENCY, _GAP_S, _HOURS, _TASKS = 1300, 3600.0, 0.5, 1
# Of the one kind of run only: said with the other, they would silently do nothing.
_LEARNING = (
    "data",
    "updates",
    "evaluations",
    "client_rate",
    "server_rate",
    "seconds_per_example",
    "processes",
)
_CONTROL = ("tasks", "gap")


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "simulate",
        description="Run servers and a simulated fleet under virtual time. With a task file and "
        "data it learns; without, clients take their time and upload nothing of use.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("task_file", nargs="?", type=Path, metavar="TASK.py", help="what to learn")
    _add_learning(parser.add_argument_group("learning", argument_default=argparse.SUPPRESS))
    _add_task(parser.add_argument_group("the task", argument_default=argparse.SUPPRESS))
    _add_fleet(parser.add_argument_group("the fleet and the servers"))
    parser.add_argument(
        "--hours",
        type=positive,
        default=argparse.SUPPRESS,
        metavar="H",
        help=f"of virtual time (default: {_HOURS}; when learning, until --updates)",
    )
    parser.add_argument(
        "--seed", type=whole(0), default=1, metavar="S", help="one seed, one run (default: 1)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/simulate"),
        metavar="DIR",
        help="for the files (default: runs/simulate)",
    )
    add_format(parser)


def _add_learning(group: argparse._ArgumentGroup) -> None:
    add_data(group)
    group.add_argument(
        "--updates", type=whole(1), metavar="N", help="client updates to learn from (default: 5000)"
    )
    group.add_argument(
        "--evaluations",
        type=whole(1),
        metavar="N",
        help="how often the model is judged on held-out clients, beside the start (default: 20)",
    )
    for side in ("client", "server"):
        group.add_argument(
            f"--{side}-rate",
            type=positive,
            metavar="R",
            help=f"learning rate of the {side} (default: the file's)",
        )
    group.add_argument(
        "--clients-processes",
        dest="processes",
        type=whole(1),
        metavar="P",
        help="how many train clients (default: 1)",
    )


def add_data(group: argparse._ArgumentGroup) -> None:
    """Also of `papaya sweep`."""
    group.add_argument(
        "--data",
        default=argparse.SUPPRESS,
        metavar="DATA",
        help="leaf:FOLDER (LEAF's JSON), text:FOLDER (a file for each client), or stdlib "
        "(Python's own sources)",
    )
    group.add_argument(
        "--seconds-per-example",
        type=positive,
        default=argparse.SUPPRESS,
        metavar="S",
        help="of training on a mean device (default: so that the mean device takes as long as in "
        "the built-in population)",
    )


def _add_task(group: argparse._ArgumentGroup) -> None:
    own = "; with a task file: its own"
    group.add_argument(
        "--regime", choices=("async", "sync"), help=f"how to train (default: async{own})"
    )
    group.add_argument(
        "--concurrency",
        type=whole(1),
        metavar="C",
        help=f"of each task (default: {_CONCURRENCY}{own}); with another than a file's, K is "
        "10 %% of it unless --goal is given",
    )
    group.add_argument(
        "--goal",
        type=whole(1),
        metavar="K",
        help=f"aggregation goal of AsyncFL (default: 10 %% of C{own})",
    )
    group.add_argument(
        "--over-selection",
        type=float,
        metavar="O",
        help="how many more clients than a round needs, as a share (0.3: 1300 for 1000) "
        f"(default: 0.3{own})",
    )
    group.add_argument(
        "--tasks", type=whole(1), metavar="N", help=f"how many, alike (default: {_TASKS})"
    )
    group.add_argument(
        "--gap",
        type=float,
        metavar="S",
        help=f"seconds between participations (default: {_GAP_S:g})",
    )


def _add_fleet(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--population",
        type=whole(1),
        default=DEFAULT.size,
        metavar="N",
        help=f"devices (default: {DEFAULT.size:,})",
    )
    group.add_argument(
        "--supply",
        type=positive,
        default=1.5,
        metavar="X",
        help="check-ins per expected completion (default: 1.5)",
    )
    for role in ("coordinators", "selectors", "aggregators"):
        group.add_argument(
            f"--{role}", type=whole(1), default=1, metavar="N", help="how many (default: 1)"
        )


def run(options: argparse.Namespace) -> int:
    given = vars(options)
    if options.task_file is not None:
        _refuse(given, _CONTROL, "is for runs that learn nothing", "leave it, or the file, out")
        from papaya.cli.simulate.task import run_task  # most of what it imports is for learning

        return run_task(options)
    _refuse(given, _LEARNING, "is for learning", "papaya simulate my_task.py --data leaf:FOLDER")
    return _run_control_plane(options)


def _refuse(given: dict[str, object], names: tuple[str, ...], problem: str, hint: str) -> None:
    for name in names:
        if name in given:
            option = "clients-processes" if name == "processes" else name.replace("_", "-")
            raise OperatorError(f"--{option} {problem}", hint=hint)


def _run_control_plane(options: argparse.Namespace) -> int:
    from papaya.sim import plots  # before the run: a missing matplotlib should not cost one

    config = _configuration(options)
    folder = make_folder(options.output)
    for warning in config.tasks[0].warnings():
        note(f"warning: {warning}")
    name = regime_name(config.tasks[0])
    with Progress() as progress:
        report = simulate(
            config,
            options.seed,
            getattr(options, "hours", _HOURS),
            progress=lambda moment: progress.update(name, *describe(moment)),
        )
    data, plot = folder / "report.json", folder / "plot.png"
    with writing(data):
        data.write_bytes(msgspec.json.encode(report))
    if options.format == "json":
        print_json(report)
    else:
        print_data(report.summary())
    with writing(plot):
        plots.draw({name: report}, plot, "A simulated fleet")
    note(f"\nreport: {data}\nplot:   {plot}")
    return 0


def describe(moment: Moment) -> tuple[float, str]:
    """How much is done, and how things stand, for a progress display."""
    words = f"{moment.active:,} active, {plural(moment.versions, 'server update')}"
    return moment.now_s / moment.until_s, words


def _configuration(options: argparse.Namespace) -> ClusterConfig:
    tasks = protocol_tasks(
        getattr(options, "tasks", _TASKS),
        regime=_regime(options),
        concurrency=getattr(options, "concurrency", _CONCURRENCY),
        participation_gap_s=getattr(options, "gap", _GAP_S),
    )
    return ClusterConfig(
        tasks=tasks,
        population=structs.replace(DEFAULT, size=options.population),
        supply=options.supply,
        coordinators=options.coordinators,
        selectors=options.selectors,
        aggregators=options.aggregators,
    )


def _regime(options: argparse.Namespace) -> AsyncFL | SyncFL:
    regime = getattr(options, "regime", "async")
    check_goal(regime, options)
    if regime == "async":
        return AsyncFL(getattr(options, "goal", None))
    over_selection = getattr(options, "over_selection", None)
    return SyncFL() if over_selection is None else SyncFL(over_selection)


def check_goal(regime: str, options: argparse.Namespace) -> None:
    """K is set in one regime, over-selection in the other."""
    if regime == "async" and hasattr(options, "over_selection"):
        raise OperatorError(
            "--over-selection is for SyncFL", hint="add --regime sync, or leave it out"
        )
    if regime == "sync" and hasattr(options, "goal"):
        raise OperatorError(
            "--goal is for AsyncFL: SyncFL aggregates C ÷ (1 + over-selection) updates",
            hint="leave it out, or set --over-selection",
        )
