"""`papaya compare`: AsyncFL and SyncFL on the same simulated fleet of a hundred million phones.

The paper's comparison: "Both configurations in the figure have max concurrency of 1300. SyncFL uses
30\\% over-selection." A table on stdout, the figure in a file. Each regime has its own K, and the
table names it: a smaller K makes more, smaller steps. Everything is simulated, nothing is learnt,
and no process is left behind.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from papaya.cli.output import (
    Commands,
    Progress,
    add_format,
    make_folder,
    note,
    positive,
    print_data,
    print_json,
    table,
    whole,
    writing,
)
from papaya.cli.simulate.simulate import describe
from papaya.config import AsyncFL
from papaya.sim.cluster import ClusterConfig
from papaya.sim.report import RunReport, percent
from papaya.sim.simulate import compare, protocol_tasks

CONCURRENCY, GOAL = 1300, 100
_TITLE = "AsyncFL keeps every slot busy; SyncFL waits for stragglers"


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "compare",
        description="Compare AsyncFL with SyncFL, with and without over-selection, under virtual "
        f"time: the same 100 million phones, {CONCURRENCY} at a time.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--hours", type=positive, default=0.5, metavar="H", help="of virtual time")
    parser.add_argument("--seed", type=whole(0), default=1, metavar="S", help="one seed, one run")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/compare"), metavar="DIR", help="for the files"
    )
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    from papaya.sim import plots  # before the runs: a missing matplotlib should not cost them

    tasks = protocol_tasks(regime=AsyncFL(GOAL), concurrency=CONCURRENCY)
    config = ClusterConfig(tasks=tasks)
    folder = make_folder(options.output)
    note(
        f"Simulating {options.hours:g} h with {CONCURRENCY:,} clients at a time, "
        f"of a fleet of {config.population.size:,} phones, three times."
    )
    with Progress() as progress:
        reports = compare(
            config,
            options.seed,
            options.hours,
            progress=lambda name, moment: progress.update(name, *describe(moment)),
        )
    data, plot = folder / "report.json", folder / "utilization.png"
    if options.format == "json":
        print_json(reports)
    else:
        print_data(_table(reports))
    for name, report in reports.items():
        if not report.tasks[0].versions:
            note(f"warning: {name} made no server update in the window: raise --hours")
    with writing(data):
        data.write_bytes(msgspec.json.encode(reports))
    with writing(plot):
        plots.draw(reports, plot, _TITLE)
    note(f"\nreport: {data}\nplot:   {plot}")
    return 0


def _table(reports: dict[str, RunReport]) -> str:
    header = ("", "K", "utilization", "server updates/h", "mean staleness", "trips")
    rows = []
    for name, report in reports.items():
        result = report.tasks[0]
        rows.append(
            (
                name,
                f"{report.config_of(result.task).aggregation_goal:,}",
                percent(result.utilization),
                f"{result.versions_per_hour:,.0f}",
                f"{result.mean_staleness:.1f}" if result.versions else "–",
                f"{result.trips:,}",
            )
        )
    window = next(iter(reports.values())).window
    return f"{window}\n\n{table(header, rows)}"
