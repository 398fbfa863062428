"""`papaya reproduce`: figures and tables of the paper, its numbers beside ours.

Writes JSON, plots and report.html. Exits with 1 if a check of method fails, whatever the verdicts
on the claims. Recordings stay in the folder, so the same command continues an interrupted run.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from papaya.cli.output import (
    Commands,
    FormatOptions,
    Progress,
    add_format,
    bind,
    make_folder,
    note,
    plural,
    print_data,
    print_json,
    resumable,
    table,
    whole,
    writing,
)
from papaya.cli.simulate.options import add_ray
from papaya.errors import OperatorError
from papaya.study.experiments.reproduce import EXPERIMENTS, as_data, reproduce
from papaya.study.experiments.result import Result
from papaya.study.experiments.runs import SCALES, Scale, tuning_seeds
from papaya.study.experiments.tables import verdicts
from papaya.study.lab import LabStep
from papaya.study.workloads.text import LIBRARY_NAME, open_corpus

_WORK = {"traces": "recording", "runs": "learning"}


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions(FormatOptions):
    what: list[str]
    scale: str = "quick"
    seeds: int | None = None
    first_seed: int = 1
    jobs: int = 2
    ray: str | None = None
    data: str = LIBRARY_NAME
    output: Path = Path("runs/reproduce")


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "reproduce",
        description="Reproduce figures and tables of the paper in the simulator, and compare "
        "the numbers. Exits with 1 if a check of method fails, because results are then "
        "unreliable; claims of the paper that differ do not change the exit code.",
    )
    parser.add_argument(
        "what",
        nargs="+",
        metavar="EXPERIMENT",
        help=f"experiments to run: all, or any of {', '.join(EXPERIMENTS)}",
    )
    parser.add_argument(
        "--scale",
        choices=SCALES,
        help="size of the experiments: quick takes about 10 minutes on two cores; deep trains five "
        "times as long, and takes hours; full is the paper's size and takes days",
    )
    parser.add_argument(
        "--seeds",
        type=whole(1),
        metavar="N",
        help="number of repetitions (default: 5)",
    )
    parser.add_argument(
        "--first-seed",
        type=whole(1),
        metavar="S",
        help="seed of the first repetition; each further one adds 1. To check results with other "
        "seeds, choose another one, and another --output: the results there are replaced",
    )
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="real text beside the synthetic language: a folder with texts (a client per file), "
        f"LEAF's JSON (a client per user), {LIBRARY_NAME} (the docstrings of Python's standard "
        "library, a client per file), or none",
    )
    parser.add_argument("--jobs", type=whole(1), metavar="N", help="number of processes")
    add_ray(parser, "run")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for results")
    add_format(parser)
    bind(parser, ReproduceOptions, run)


def run(options: ReproduceOptions) -> int:
    scale = SCALES[options.scale]
    keys = _keys(options.what, scale)
    seeds = _seeds(options.first_seed, options.seeds or scale.seeds, scale)
    folder = make_folder(options.output / scale.name)
    started = time.monotonic()
    corpus = None if options.data == "none" else open_corpus(options.data)
    if corpus is not None:
        note(f"real text: {corpus.about}")
    with writing(folder), resumable(), Progress() as progress:

        def tell(step: LabStep) -> None:
            if missing := step.total - step.kept:
                words = f"{step.done - step.kept} of {missing} runs"
                progress.update(_WORK[step.kind], step.share, words)

        def ended(result: Result) -> None:
            progress.say(f"{result.title}: {_verdict(result)}")

        results = reproduce(
            keys,
            scale,
            seeds,
            folder,
            jobs=options.jobs,
            ray=options.ray,
            corpus=corpus,
            tell=tell,
            ended=ended,
        )
    if options.is_json:
        print_json([as_data(result) for result in results])
    else:
        print_data("\n\n".join(map(_described, results)))
    minutes = (time.monotonic() - started) / 60
    cpu_s = sum(os.times()[:4])  # of this process and of those that it has waited for
    note(f"\nreport: {folder / 'report.html'} ({minutes:.1f} minutes, {cpu_s:.0f} CPU-seconds)")
    return 0 if all(check.holds for result in results for check in result.checks) else 1


def _seeds(first: int, count: int, scale: Scale) -> range:
    seeds, tuning = range(first, first + count), tuning_seeds(scale)
    if seeds.start < tuning.stop and tuning.start < seeds.stop:
        raise OperatorError(
            f"the seeds {first} to {seeds[-1]} contain {tuning[0]}, which is kept for tuning rates",
            hint=f"choose seeds below {tuning[0]}, or --first-seed {tuning.stop}",
        )
    return seeds


def _keys(what: list[str], scale: Scale) -> list[str]:
    if "all" in what:
        if left_out := [key for key in scale.left_out if key not in what]:
            note(f"not part of all at this scale, run by name: {', '.join(left_out)}")
        return [key for key in EXPERIMENTS if key not in left_out]
    if unknown := [key for key in what if key not in EXPERIMENTS]:
        close = get_close_matches(unknown[0], EXPERIMENTS, n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        raise OperatorError(
            f"there is no experiment {unknown[0]!r}",
            hint=f"{meant}use all, or any of {', '.join(EXPERIMENTS)}",
        )
    return what


def _verdict(result: Result) -> str:
    failed = sum(not check.holds for check in result.checks)
    checks = f"; {failed} of {plural(len(result.checks), 'check')} of method fail" if failed else ""
    return verdicts(result.claims) + checks


def _described(result: Result) -> str:
    claims = [(c.statement, c.paper, str(c), c.verdict) for c in result.claims]
    rows = [
        (f.name, f.paper, str(f) + (" (calibrated input)" if f.kind == "input" else ""))
        for f in result.findings
    ]
    checks = [
        f"  {'holds' if check.holds else 'FAILS'}: {check.rule}: {check.detail}"
        for check in result.checks
    ]
    notes = [f"  note: {text}" for text in result.notes]
    tables = [table((result.title, "paper", "here", "verdict"), claims)] if claims else []
    if rows:
        tables.append(table(("other numbers" if claims else result.title, "paper", "here"), rows))
    return "\n".join([*tables, *checks, *notes])
