"""The servers for 10⁸ devices, from the load that one core of each handles (docs/scaling.md).

    python bench/scaling.py              run the benchmarks named below, then print the tables
    python bench/scaling.py FILE...      use the JSON lines that they have printed before

Inputs, all of them CPU time: `check_ins.py` (selector), `data_plane.py` (selector and
aggregator per 20 MiB update), `secure_aggregation.py` (masks that a TSA adds per second),
`state_on_postgresql.py` (database per small update) and `coordinator.py` (leader of 1,000
aggregators). The rest is arithmetic on the constants below. Prints Markdown.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

BENCHES = ("check_ins", "data_plane", "secure_aggregation", "state_on_postgresql", "coordinator")
FOLDER = Path(__file__).parent

DEVICES = 100_000_000
TASKS, CONCURRENCY, SESSION_S = 1_000, 230, 80.0
PACE = 1.5  # check-ins per client that ends (ServerConfig.pace)
LONGEST_RETRY_S = 86_400.0  # so each device checks in once a day even if no task needs it
UPDATE_BYTES = 20 << 20
REQUESTS = (
    11  # of one participation besides check-in and chunks: join, report, complete, heartbeats
)
CORES_PER_MACHINE, LOAD = 16, 0.5
NETWORK_BYTES_PER_S = 0.5 * 25e9 / 8  # half of 25 Gbit/s


class Part(NamedTuple):
    """What one part of the fleet needs. `bytes_per_s`: through its network cards."""

    name: str
    one_core: str
    cores: float
    bytes_per_s: float
    limit: str

    @property
    def machines(self) -> int:
        by_cores = self.cores / (CORES_PER_MACHINE * LOAD)
        return max(1, math.ceil(by_cores), math.ceil(self.bytes_per_s / NETWORK_BYTES_PER_S))


def main(files: list[str]) -> None:
    lines = [line for file in files for line in Path(file).read_text("utf-8").splitlines()]
    if not files:
        for bench in BENCHES:
            command = [sys.executable, str(FOLDER / f"{bench}.py")]
            lines += subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True
            ).stdout.splitlines()
    inputs = [json.loads(line) for line in lines if line.startswith("{")]
    joins_per_s = TASKS * CONCURRENCY / SESSION_S
    check_ins_per_s = PACE * joins_per_s + DEVICES / LONGEST_RETRY_S
    print_demand(joins_per_s, check_ins_per_s)
    print_parts(parts(inputs, joins_per_s, check_ins_per_s))


def parts(inputs: list[dict[str, Any]], joins_per_s: float, check_ins_per_s: float) -> list[Part]:
    reject_s = of(inputs, "check_ins", "rejected at once", "selector_us") / 1e6
    accept_s = of(inputs, "check_ins", "held, assigned", "selector_us") / 1e6
    relay_s = of(inputs, "data_plane", "selector and aggregator", "selector_ms") / 1e3
    fold_s = of(inputs, "data_plane", "selector and aggregator", "aggregator_ms") / 1e3
    masks_per_s = of(inputs, "secure", "adding 8 masks", "sum_gb_per_s") * 1e9 / UPDATE_BYTES
    store_s = of(inputs, "state_on_postgresql", "4 KiB", "database_cpu_ms") / 1e3
    leader = next(line for line in inputs if line["bench"] == "coordinator")
    messages = sum(value for name, value in leader.items() if name.endswith("s_per_s"))
    messages += sum(value for name, value in leader.items() if name.endswith("Report_per_s"))
    uploads = joins_per_s * UPDATE_BYTES
    rejected_per_s = check_ins_per_s - joins_per_s
    small_s = REQUESTS * reject_s
    selector = rejected_per_s * reject_s + joins_per_s * (accept_s + small_s + relay_s)
    return [
        Part(
            "selectors",
            f"{1 / accept_s:,.0f} accepted check-ins/s, or {1 / relay_s:,.0f} updates/s",
            selector,
            uploads,
            "add machines",
        ),
        Part(
            "aggregators",
            f"{1 / fold_s:,.0f} updates/s",
            joins_per_s * (fold_s + small_s),
            uploads,
            "add machines; one task uses one process",
        ),
        Part(
            "TSAs, if all tasks are secure",
            f"{masks_per_s:,.0f} updates/s",
            joins_per_s / masks_per_s,
            0.0,
            "add machines; one task uses one core",
        ),
        Part(
            "database (primary)",
            f"{1 / store_s:,.0f} updates/s",
            joins_per_s * store_s,
            0.0,
            "one server writes",
        ),
        Part(
            "coordinator (leader)",
            f"{joins_per_s / leader['value']:,.0f} joins/s in 1,000 tasks",
            leader["value"] + messages * reject_s,
            leader["sent_mb_per_s"] * 1e6,
            "one process, one core for its decisions",
        ),
    ]


def of(inputs: Iterable[dict[str, Any]], bench: str, case: str, field: str) -> float:
    """A number of the first line of this benchmark whose case contains a text."""
    for line in inputs:
        if line["bench"].startswith(bench) and case in line["case"] and field in line:
            return float(line[field])
    sys.exit(f"no line of {bench}.py about {case!r} with {field!r}")


def print_demand(joins_per_s: float, check_ins_per_s: float) -> None:
    gb_per_s = joins_per_s * UPDATE_BYTES / 1e9
    print("| what the fleet asks for | per second |\n|---|---|")
    print(f"| check-ins | {check_ins_per_s:,.0f} |")
    print(f"| joins, and updates that are counted | {joins_per_s:,.0f} |")
    print(f"| small requests | {check_ins_per_s + REQUESTS * joins_per_s:,.0f} |")
    print(f"| bytes uploaded | {gb_per_s:,.0f} GB |")
    print(f"| bytes downloaded, from a CDN | {gb_per_s:,.0f} GB |\n")


def print_parts(found: list[Part]) -> None:
    print("| part | one core carries | cores | machines | machines at ten times this | limit |")
    print("|---|---|---|---|---|---|")
    total = more = 0
    for part in found:
        tenfold = part._replace(cores=10 * part.cores, bytes_per_s=10 * part.bytes_per_s)
        total, more = total + part.machines, more + tenfold.machines
        counts = f"{part.cores:,.1f} | {part.machines:,} | {tenfold.machines:,}"
        print(f"| {part.name} | {part.one_core} | {counts} | {part.limit} |")
    print(f"| all | | | {total:,} | {more:,} | |")


if __name__ == "__main__":
    main(sys.argv[1:])
