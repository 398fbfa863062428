"""`papaya simulate`: one run under virtual time; writes a report, report.json and plots.

Servers and clients are the real state machines; the network, the stores and the fleet are
simulated. The options and the seed determine the run. With a task file and data the fleet trains
the model (`simulate/task.py`); without, devices upload a few integers and nothing is trained.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

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
    whole,
    writing,
)
from papaya.cli.simulate.options import DataOptions, add_data, add_population, add_ray, add_set
from papaya.config import AsyncFL, SyncFL
from papaya.errors import OperatorError
from papaya.sim.cluster import ClusterConfig
from papaya.sim.report import regime_name
from papaya.sim.simulate import Moment, protocol_tasks, simulate

_CONCURRENCY, _GAP_S, _HOURS, _TASKS = 1300, 3600.0, 0.5, 1
_CHECKPOINT_S = 30.0
_LOCATIONS = (
    "task_file",
    "data",
    "capacity_trace",
    "availability_trace",
    "rerun",
    "processes",
    "ray",
    "checkpoint_every",
    "output",
    "format",
)


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(DataOptions):
    """None means that an option was not given: its default depends on whether there is a task file.

    `updates` to `checkpoint_every` need a task file; `tasks` and `gap` are for runs without one.
    """

    task_file: Path | None = None
    # Training
    updates: int | None = None
    evaluations: int | None = None
    client_rate: float | None = None
    server_rate: float | None = None
    processes: int | None = None
    checkpoint_every: float | None = None
    rerun: Path | None = None
    # The task
    regime: Literal["async", "sync"] | None = None
    concurrency: int | None = None
    goal: int | None = None
    over_selection: float | None = None
    tasks: int | None = None
    gap: float | None = None
    # The fleet and the servers
    supply: float = 1.5
    coordinators: int = 1
    selectors: int = 1
    aggregators: int = 1
    # The run
    hours: float | None = None
    seed: int = 1
    output: Path = Path("runs/simulate")


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "simulate",
        description="Run the servers with a simulated fleet under virtual time. With a task file "
        "and data, the fleet trains the model. Without them, clients only wait and upload a few "
        "numbers, which shows utilization, staleness and fairness.",
    )
    parser.add_argument(
        "task_file",
        nargs="?",
        type=Path,
        metavar="TASK.py",
        help="task file of the model to train (default: train nothing)",
    )
    _add_training(parser.add_argument_group("training (with a task file)"))
    _add_task(parser.add_argument_group("the task"))
    _add_fleet(parser.add_argument_group("the fleet and the servers"))
    parser.add_argument(
        "--hours",
        type=positive,
        metavar="H",
        help=f"hours of virtual time (default: {_HOURS}; with a task file: until --updates)",
    )
    parser.add_argument(
        "--seed", type=whole(0), metavar="S", help="seed of the run; the same seed repeats it"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for results")
    add_format(parser)
    bind(parser, SimulateOptions, run)


def _add_training(group: argparse._ArgumentGroup) -> None:
    add_data(group)
    add_set(group)
    group.add_argument(
        "--updates",
        type=whole(1),
        metavar="N",
        help="number of client updates to train with; the run ends with the version that contains "
        "the last one (default: 5000; with --hours: no limit)",
    )
    group.add_argument(
        "--evaluations",
        type=whole(1),
        metavar="N",
        help="number of evaluations on held-out examples, besides that of version 0 (default: 20)",
    )
    for side in ("client", "server"):
        group.add_argument(
            f"--{side}-rate",
            type=positive,
            metavar="R",
            help=f"learning rate of the {side} (default: from the task file)",
        )
    group.add_argument(
        "--training-processes",
        dest="processes",
        type=whole(1),
        metavar="P",
        help="number of processes that train clients (default: 1)",
    )
    add_ray(group, "train clients")
    group.add_argument(
        "--checkpoint-every",
        type=float,
        metavar="S",
        help="seconds between checkpoints; an interrupted run resumes from the last one when the "
        f"same command is given again (default: {_CHECKPOINT_S:g})",
    )
    group.add_argument(
        "--rerun",
        type=Path,
        metavar="RUN.json",
        help="repeat the run of this file, which every run writes into its output folder (or name "
        "the folder), and compare the numbers. If the task file, the data or a trace was moved, "
        "name it with TASK.py, --data, --capacity-trace or --availability-trace. Results go to the "
        "folder `rerun` beside the file, unless --output names another",
    )


def _add_task(group: argparse._ArgumentGroup) -> None:
    own = "from the task file"
    group.add_argument(
        "--regime",
        choices=("async", "sync"),
        help=f"AsyncFL or SyncFL (default: {own}, else async)",
    )
    group.add_argument(
        "--concurrency",
        type=whole(1),
        metavar="C",
        help=f"number of clients that train at the same time, per task (default: {own}, else "
        f"{_CONCURRENCY})",
    )
    group.add_argument(
        "--goal",
        type=whole(1),
        metavar="K",
        help="aggregation goal of AsyncFL: client updates per server update (default: "
        f"{own} if neither --concurrency nor --regime is given, else 10 %% of the concurrency)",
    )
    group.add_argument(
        "--over-selection",
        type=float,
        metavar="O",
        help="over-selection of SyncFL: extra clients per round, as a fraction; 0.3 "
        f"selects 1300 clients for 1000 updates (default: {own}, else 0.3)",
    )
    group.add_argument(
        "--tasks",
        type=whole(1),
        metavar="N",
        help=f"number of identical tasks; only without a task file (default: {_TASKS})",
    )
    group.add_argument(
        "--gap",
        type=float,
        metavar="S",
        help="minimum seconds between two participations of a device; only without "
        f"a task file (default: {_GAP_S:g})",
    )


def _add_fleet(group: argparse._ArgumentGroup) -> None:
    add_population(group)
    group.add_argument(
        "--supply",
        type=positive,
        metavar="X",
        help="check-ins of devices per expected completion",
    )
    for role in ("coordinators", "selectors", "aggregators"):
        group.add_argument(f"--{role}", type=whole(1), metavar="N", help=f"number of {role}")


def run(options: SimulateOptions) -> int:
    if options.rerun is not None:
        _refuse_settings(options)
        from papaya.cli.simulate.task import rerun_task

        return rerun_task(options, options.rerun)
    if options.task_file is not None:
        _refuse({"--tasks": options.tasks, "--gap": options.gap}, "without a task file")
        from papaya.cli.simulate.task import run_task  # imports what only training needs

        return run_task(options)
    training = {
        "--data": options.data,
        "--partition": options.partition,
        "--judges": options.judges,
        "--held-out": options.held_out,
        "--seconds-per-example": options.seconds_per_example,
        "--updates": options.updates,
        "--evaluations": options.evaluations,
        "--client-rate": options.client_rate,
        "--server-rate": options.server_rate,
        "--training-processes": options.processes,
        "--set": options.set[0] if options.set else None,
        "--steps": None if options.steps == "auto" else options.steps,
        "--checkpoint-every": options.checkpoint_every,
        "--ray": options.ray,
    }
    _refuse(training, "with a task file", "papaya simulate my_task.py --data leaf:FOLDER")
    return _run_control_plane(options)


def _refuse_settings(options: SimulateOptions) -> None:
    """A repetition has the settings of its file."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name not in _LOCATIONS and value != field.default:
            raise OperatorError(
                f"--rerun has the settings of its file: {field.name} {value} cannot be changed",
                hint=f"leave it out, or run without --rerun {options.rerun}",
            )


def _refuse(given: Mapping[str, object], where: str, hint: str = "") -> None:
    """Refuse options that would have no effect."""
    for option, value in given.items():
        if value is not None:
            raise OperatorError(
                f"{option} {value} has an effect only {where}", hint=hint or f"leave {option} out"
            )


def _run_control_plane(options: SimulateOptions) -> int:
    from papaya.sim import plots  # before the run, which would be lost without matplotlib

    config = _configuration(options)
    folder = make_folder(options.output)
    for warning in config.tasks[0].warnings():
        note(f"warning: {warning}")
    name = regime_name(config.tasks[0])
    with Progress() as progress:
        report = simulate(
            config,
            options.seed,
            options.hours or _HOURS,
            progress=lambda moment: progress.update(name, *describe(moment)),
        )
    data, plot = folder / "report.json", folder / "plot.png"
    with writing(data):
        data.write_bytes(msgspec.json.encode(report))
    if options.is_json:
        print_json(report)
    else:
        print_data(report.summary())
    with writing(plot):
        plots.draw({name: report}, plot, "A simulated fleet")
    note(f"\nreport: {data}\nplot:   {plot}")
    return 0


def describe(moment: Moment) -> tuple[float, str]:
    """Which part is done, and a short description, for a progress display."""
    words = f"{moment.active:,} active, {plural(moment.versions, 'server update')}"
    return moment.now_s / moment.until_s, words


def _configuration(options: SimulateOptions) -> ClusterConfig:
    tasks = protocol_tasks(
        options.tasks or _TASKS,
        regime=_regime(options),
        concurrency=options.concurrency or _CONCURRENCY,
        participation_gap_s=_GAP_S if options.gap is None else options.gap,
    )
    return ClusterConfig(
        tasks=tasks,
        population=options.population_config(),
        supply=options.supply,
        coordinators=options.coordinators,
        selectors=options.selectors,
        aggregators=options.aggregators,
    )


def _regime(options: SimulateOptions) -> AsyncFL | SyncFL:
    regime = options.regime or "async"
    check_goal(regime, options)
    if regime == "async":
        return AsyncFL(options.goal)
    return SyncFL() if options.over_selection is None else SyncFL(options.over_selection)


def check_goal(regime: str, options: SimulateOptions) -> None:
    """Refuse the option that belongs to the other regime."""
    if regime == "async" and options.over_selection is not None:
        raise OperatorError(
            "--over-selection is for SyncFL only", hint="add --regime sync, or leave it out"
        )
    if regime == "sync" and options.goal is not None:
        raise OperatorError(
            "--goal is for AsyncFL only: SyncFL aggregates C ÷ (1 + over-selection) updates",
            hint="leave it out, or use --over-selection",
        )
