"""`papaya swarm`: many seeds, each a whole system under random faults; every promise is checked.

A seed picks the configuration, the faults and their times, so a failure is replayed by its number
alone. Exit code 70 when a promise was broken. With a planted bug it is the other way round: 0 when
the bug was found, 1 when it was not.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial

from papaya.cli.output import (
    Commands,
    Progress,
    add_format,
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


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the list of bugs, so that a name can be copied."""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "swarm",
        description="Run whole simulated systems under random faults and check every promise.",
        epilog="bugs to plant:\n  " + "\n  ".join(BUGS),
        formatter_class=_Help,
    )
    parser.set_defaults(run=run)
    seeds = parser.add_argument_group("the seeds", argument_default=argparse.SUPPRESS)
    seeds.add_argument("--seeds", type=whole(1), metavar="N", help=f"how many (default: {_SEEDS})")
    seeds.add_argument(
        "--start", type=whole(0), metavar="S", help=f"the first of them (default: {_START})"
    )
    seeds.add_argument("--seed", type=whole(0), metavar="S", help="replay this one only")
    parser.add_argument(
        "--plant",
        default=argparse.SUPPRESS,
        metavar="BUG",
        help="plant a known bug, which must be found; the names are below",
    )
    parser.add_argument(
        "--jobs", type=whole(1), default=os.cpu_count() or 1, metavar="J", help="processes"
    )
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    plant = getattr(options, "plant", None)
    results = hunt(partial(run_seed, plant=plant), _seeds(options), options.jobs)
    show(results, options.format)
    return judge(results, plant)


def _seeds(options: argparse.Namespace) -> Sequence[int]:
    if not hasattr(options, "seed"):
        start = getattr(options, "start", _START)
        return range(start, start + getattr(options, "seeds", _SEEDS))
    for other in ("seeds", "start"):
        if hasattr(options, other):
            hint = f"leave --{other} out, or leave --seed out"
            raise OperatorError(f"--seed is one seed, --{other} is for many", hint=hint)
    return (options.seed,)


def hunt(run: RunSeed, seeds: Sequence[int], jobs: int) -> list[SwarmResult]:
    """Run every seed; a failure among many is told at once and does not stop the others."""
    results: list[SwarmResult] = []
    versions = failures = 0
    with Progress() as progress, mapping(min(jobs, len(seeds))) as mapped:
        for result in mapped(run, seeds):
            results.append(result)
            versions += result.versions
            if result.failure is not None:
                failures += 1
                if len(seeds) > 1:  # one is shown in full
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
    """What broke was told before; here is how many seeds it broke, and the first, to replay."""
    failed = [result.seed for result in results if result.failure is not None]
    if plant is not None:
        return _judge_planted(failed, len(results), plant)
    if failed:
        found = f"{len(failed):,} of {plural(len(results), 'seed')} broke a promise"
        raise InvariantError(found, hint=f"papaya swarm --seed {failed[0]}")
    note("every promise was kept")
    return 0


def _judge_planted(failed: Sequence[int], seeds: int, plant: str) -> int:
    if not failed:
        raise PapayaError(
            f"{plural(seeds, 'seed')} did not find the planted bug {plant!r}",
            hint=f"try more seeds: papaya swarm --seeds {max(_SEEDS, 2 * seeds)} --plant {plant}",
        )
    found = f"the planted bug was found, as it should be, by {len(failed):,} of"
    note(f"{found} {plural(seeds, 'seed')}")
    if seeds > 1:
        note(f"replay: papaya swarm --seed {failed[0]} --plant {plant}")
    return 0
