"""`papaya swarm`: simulate whole systems under random faults and check every invariant.

The seed determines the configuration, the faults and their times, so a failure can be replayed by
its seed alone. Exits with 70 if an invariant was broken. With a planted bug it exits with 0 if the
bug was found, and with 1 if it was not.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from papaya.cli.output import (
    Commands,
    FormatOptions,
    Progress,
    add_format,
    bind,
    note,
    plural,
    print_data,
    print_json,
    table,
    whole,
)
from papaya.errors import InvariantError, OperatorError, PapayaError
from papaya.sim.bugs import BUGS
from papaya.sim.jobs import mapping
from papaya.sim.swarm import SwarmResult, run_seed

RunSeed = Callable[[int], SwarmResult]

_SEEDS, _START = 100, 0


@dataclass(frozen=True, kw_only=True)
class SwarmOptions(FormatOptions):
    """`seed` excludes `seeds` and `start`; None means that an option was not given."""

    seeds: int | None = None
    start: int | None = None
    seed: int | None = None
    plant: str | None = None
    jobs: int = os.cpu_count() or 1


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "swarm",
        description="Simulate whole systems under random faults and check every invariant of the "
        "protocol.\nA seed determines the system and its faults.",
        epilog="bugs to plant:\n" + "\n".join(_listed(bug) for bug in BUGS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seeds", type=whole(1), metavar="N", help=f"number of seeds to run (default: {_SEEDS})"
    )
    parser.add_argument(
        "--start", type=whole(0), metavar="S", help=f"first seed to run (default: {_START})"
    )
    parser.add_argument("--seed", type=whole(0), metavar="S", help="run only this seed")
    parser.add_argument(
        "--plant",
        metavar="BUG",
        help="run with one of the bugs listed below; succeeds only if a checker finds it",
    )
    parser.add_argument(
        "--jobs", type=whole(1), metavar="J", help="number of processes (default: one per core)"
    )
    add_format(parser)
    bind(parser, SwarmOptions, run)


def _listed(bug: str) -> str:
    return f"  {bug}\n      {BUGS[bug].explanation}"


def run(options: SwarmOptions) -> int:
    results = hunt(partial(run_seed, plant=options.plant), _seeds(options), options.jobs)
    show(results, options.format)
    return judge(results, options.plant)


def _seeds(options: SwarmOptions) -> Sequence[int]:
    if options.seed is None:
        start = _START if options.start is None else options.start
        return range(start, start + (options.seeds or _SEEDS))
    for name, value in (("--seeds", options.seeds), ("--start", options.start)):
        if value is not None:
            raise OperatorError(
                f"--seed {options.seed} runs one seed, but {name} {value} asks for several",
                hint=f"leave {name} out, or leave --seed out",
            )
    return (options.seed,)


def hunt(run: RunSeed, seeds: Sequence[int], jobs: int) -> list[SwarmResult]:
    """Run every seed. Failures are printed at once and do not stop the other seeds."""
    results: list[SwarmResult] = []
    versions = failures = 0
    with Progress() as progress, mapping(min(jobs, len(seeds))) as mapped:
        for result in mapped(run, seeds):
            results.append(result)
            versions += result.versions
            if result.failure is not None:
                failures += 1
                if len(seeds) > 1:  # the failure of a single seed is part of its details
                    progress.say(f"seed {result.seed}: {result.failure}")
            counts = (plural(versions, "server update"), plural(failures, "failure"))
            words = f"{len(results):,} of {plural(len(seeds), 'seed')}, {', '.join(counts)}"
            progress.update("swarm", len(results) / len(seeds), words)
    return sorted(results, key=lambda result: result.seed)


def show(results: Sequence[SwarmResult], output_format: str) -> None:
    failed = [result.seed for result in results if result.failure is not None]
    if output_format == "json":
        print_json({"seeds": len(results), "failed": failed, "results": results})
    elif len(results) == 1:
        print_data(_details(results[0]))
    else:
        totals = (
            f"{len(results):,}",
            f"{sum(result.events for result in results):,}",
            f"{sum(result.virtual_s for result in results) / 3600:.1f}",
            f"{sum(result.versions for result in results):,}",
            f"{len(failed):,}",
        )
        header = ("seeds", "events", "virtual hours", "server updates", "failures")
        print_data(table(header, [totals]))


def _details(result: SwarmResult) -> str:
    rows = [
        ("seed", f"{result.seed}"),
        ("configuration", result.configuration),
        ("events", f"{result.events:,}"),
        ("virtual time", f"{result.virtual_s:,.0f} s"),
        ("server updates", f"{result.versions:,}"),
        ("trace", result.trace_hash),
        ("failure", result.failure or "none"),
    ]
    return "\n".join(f"{name:<15} {text}" for name, text in rows)


def judge(results: Sequence[SwarmResult], plant: str | None) -> int:
    """Say how many seeds failed, and how to replay the first; the failures are printed already."""
    failed = [result.seed for result in results if result.failure is not None]
    if plant is not None:
        return _judge_planted(failed, len(results), plant)
    if failed:
        found = f"{len(failed):,} of {plural(len(results), 'seed')} broke an invariant"
        raise InvariantError(found, hint=f"papaya swarm --seed {failed[0]}")
    note("no invariant was broken")
    return 0


def _judge_planted(failed: Sequence[int], seeds: int, plant: str) -> int:
    if not failed:
        raise PapayaError(
            f"{plural(seeds, 'seed')} did not find the planted bug {plant!r}",
            hint=f"try more seeds: papaya swarm --seeds {max(_SEEDS, 2 * seeds)} --plant {plant}",
        )
    note(f"the planted bug was found by {len(failed):,} of {plural(seeds, 'seed')}, as expected")
    if seeds > 1:
        note(f"replay: papaya swarm --seed {failed[0]} --plant {plant}")
    return 0
