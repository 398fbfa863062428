"""`papaya simulate`: one run under virtual time; a report, report.json and a plot.

The servers and clients are the real ones; the network, the stores and the fleet are simulated. A
run is a function of its options and the seed. No model is trained here.
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


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "simulate",
        help="run a simulated fleet and report on it",
        description="Run servers and a simulated fleet under virtual time, without learning.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.set_defaults(run=run)
    task = parser.add_argument_group("the task")
    task.add_argument("--regime", choices=("async", "sync"), default="async", help="how to train")
    task.add_argument(
        "--concurrency", type=whole(1), default=1300, metavar="C", help="of each task"
    )
    task.add_argument(
        "--goal",
        type=whole(1),
        default=argparse.SUPPRESS,
        metavar="K",
        help="aggregation goal of AsyncFL (default: 10 %% of C)",
    )
    task.add_argument(
        "--over-selection",
        type=float,
        default=argparse.SUPPRESS,
        metavar="O",
        help="how many more clients than a round needs, as a share (0.3: 1300 for 1000) "
        "(default: 0.3)",
    )
    task.add_argument("--tasks", type=whole(1), default=1, metavar="N", help="how many, alike")
    task.add_argument(
        "--gap", type=float, default=3600.0, metavar="S", help="seconds between participations"
    )
    fleet = parser.add_argument_group("the fleet and the servers")
    fleet.add_argument(
        "--population", type=whole(1), default=DEFAULT.size, metavar="N", help="devices"
    )
    fleet.add_argument(
        "--supply",
        type=positive,
        default=1.5,
        metavar="X",
        help="check-ins per expected completion",
    )
    for role in ("coordinators", "selectors", "aggregators"):
        fleet.add_argument(f"--{role}", type=whole(1), default=1, metavar="N", help="how many")
    parser.add_argument("--hours", type=positive, default=0.5, metavar="H", help="of virtual time")
    parser.add_argument("--seed", type=whole(0), default=1, metavar="S", help="one seed, one run")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/simulate"), metavar="DIR", help="for the files"
    )
    add_format(parser)


def run(options: argparse.Namespace) -> int:
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
            options.hours,
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
    words = f"{moment.active:,} active, {moment.versions:,} updates"
    return moment.now_s / moment.until_s, words


def _configuration(options: argparse.Namespace) -> ClusterConfig:
    tasks = protocol_tasks(
        options.tasks,
        regime=_regime(options),
        concurrency=options.concurrency,
        participation_gap_s=options.gap,
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
    goal = getattr(options, "goal", None)
    over_selection = getattr(options, "over_selection", None)
    if options.regime == "async":
        if over_selection is not None:
            raise OperatorError(
                "--over-selection is for SyncFL", hint="add --regime sync, or leave it out"
            )
        return AsyncFL(goal)
    if goal is not None:
        raise OperatorError(
            "--goal is for AsyncFL: SyncFL aggregates C ÷ (1 + over-selection) updates",
            hint="leave it out, or set --over-selection",
        )
    return SyncFL() if over_selection is None else SyncFL(over_selection)
