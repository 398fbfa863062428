"""`papaya swarm`: many seeds, each a whole system under random faults; every promise is checked.

A seed picks the configuration, the faults and their times, so a failure is replayed by its number
alone. Exit code 70 when a promise was broken.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context

from papaya.cli.output import Commands, Progress, add_format, note, print_json, table, whole
from papaya.errors import InvariantError, OperatorError
from papaya.sim.swarm import SwarmResult, run_seed

RunSeed = Callable[[int], SwarmResult]


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "swarm",
        help="check the protocol under random faults, seed by seed",
        description="Run whole simulated systems under random faults and check every promise.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--seeds", type=whole(1), default=100, metavar="N", help="how many")
    parser.add_argument("--start", type=whole(0), default=0, metavar="S", help="the first of them")
    parser.add_argument("--seed", type=whole(0), metavar="S", help="replay this one only")
    parser.add_argument("--plant", metavar="BUG", help="plant a known bug, which must be found")
    parser.add_argument(
        "--jobs", type=whole(1), default=os.cpu_count() or 1, metavar="J", help="processes"
    )
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    if options.seed is None:
        seeds: Sequence[int] = range(options.start, options.start + options.seeds)
    else:
        seeds = (options.seed,)
    results = hunt(partial(run_seed, plant=options.plant), seeds, options.jobs)
    show(results, options.format)
    return judge(results, options.plant)


def hunt(run: RunSeed, seeds: Sequence[int], jobs: int) -> list[SwarmResult]:
    """Run every seed; a failure is told at once and does not stop the others."""
    results: list[SwarmResult] = []
    versions = failures = 0
    with Progress() as progress, _mapped(run, seeds, jobs) as finished:
        for result in finished:
            results.append(result)
            versions += result.versions
            if result.failure is not None:
                failures += 1
                progress.say(f"seed {result.seed}: {result.failure}")
            done = f"{len(results)} of {len(seeds)} seeds"
            words = f"{done}, {versions:,} server updates, {failures} failures"
            progress.update("swarm", len(results) / len(seeds), words)
    return sorted(results, key=lambda result: result.seed)


@contextmanager
def _mapped(run: RunSeed, seeds: Sequence[int], jobs: int) -> Iterator[Iterator[SwarmResult]]:
    """In this process, or in fresh ones: `spawn`, so that no state leaks into a run."""
    jobs = min(jobs, len(seeds))
    if jobs == 1:
        yield map(run, seeds)
        return
    with get_context("spawn").Pool(jobs, _ignore_interrupt) as pool:
        yield pool.imap_unordered(run, seeds)


def _ignore_interrupt() -> None:
    """Ctrl-C is for the parent, which ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def show(results: Sequence[SwarmResult], output_format: str) -> None:
    failed = [result.seed for result in results if result.failure is not None]
    if output_format == "json":
        print_json({"seeds": len(results), "failed": failed, "results": results})
    elif len(results) == 1:
        print(_details(results[0]))
    else:
        totals = (
            f"{len(results):,}",
            f"{sum(result.events for result in results):,}",
            f"{sum(result.virtual_s for result in results) / 3600:.1f}",
            f"{sum(result.versions for result in results):,}",
            f"{len(failed):,}",
        )
        header = ("seeds", "events", "virtual hours", "server updates", "failures")
        print(table(header, [totals]))


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
    failed = [result for result in results if result.failure is not None]
    if failed:
        first = failed[0]
        replay = f"papaya swarm --seed {first.seed}" + (f" --plant {plant}" if plant else "")
        others = f" ({len(failed)} seeds failed)" if len(failed) > 1 else ""
        raise InvariantError(f"seed {first.seed}: {first.failure}{others}", hint=replay)
    if plant is not None:
        seeds = f"{len(results)} seed{'s' * (len(results) > 1)}"
        raise OperatorError(f"{seeds} did not find the planted bug {plant!r}", hint="more --seeds")
    note("every promise was kept")
    return 0
