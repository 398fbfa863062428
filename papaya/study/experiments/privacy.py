"""What differential privacy costs: perplexity by epsilon, aggregation goal and clip.

The paper has no privacy beyond secure aggregation, so there is nothing to compare with. The sums
and the noise are those of an aggregator (papaya/aggregator/private_sum.py).

Inputs, fixed before any result:

- The same number of steps for every K, at the rate of the paper's protocol and with Adam's own
  first moment. K grows by repeating a recorded run at K = `scale.goal`: each participation stands
  for as many devices with data of their own, so staleness does not depend on K.
- epsilon is for `PARTICIPATIONS` participations of a device, at a delta below one divided by the
  devices of the population.
- Clips: a quarter of the median norm of updates, the median, and four times the median, as measured
  without privacy on a seed that is not reported.
- Runs at the largest K are long: `--seeds 1` takes a fifth of the time of five.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

from msgspec import structs

from papaya.config import AsyncFL, Privacy, SyncFL
from papaya.sim.jobs import write_whole
from papaya.study.experiments import charts
from papaya.study.experiments.result import Check, Finding, Result, number
from papaya.study.experiments.runs import (
    OVER_SELECTION,
    TUNING_SEED,
    RegimeName,
    Scale,
    learning,
    name_of,
    perplexity,
    rates,
    until_versions,
)
from papaya.study.lab import Lab
from papaya.study.replay import Rates
from papaya.study.run import RecordingPlan, Run, RunResult

KEY = "privacy"
COPIES: Final = (1, 10, 100)
REGIMES: Final[tuple[RegimeName, ...]] = ("AsyncFL", "SyncFL")
PARTICIPATIONS: Final = 10
DELTA: Final = 1e-9
_EPSILONS: Final = (1.0, 8.0)
_FULL_EPSILONS: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
_CLIPS: Final = (0.25, 1.0, 4.0)  # medians
_ADAMS_MOMENT: Final = 0.9
_EVALUATIONS: Final = 4


class PrivacyCase(NamedTuple):
    """One line of the table: `epsilon` is None without privacy, `clip` is in medians."""

    data: str
    regime: RegimeName
    copies: int
    epsilon: float | None = None
    clip: float = 0.0


def plans(scale: Scale, seeds: Sequence[int]) -> list[RecordingPlan]:
    chosen = [*seeds, TUNING_SEED]
    return [_plan(scale, regime, seed) for regime in REGIMES for seed in chosen]


def run(lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
    cases = list(_cases(scale))
    medians = {
        (data, regime): _median(lab, scale, data, regime)
        for data, regime in product(scale.data, REGIMES)
    }
    runs = [_run(scale, case, seed, medians) for case in cases for seed in seeds]
    outcomes = iter(lab.learn(runs))
    found = {case: [next(outcomes) for _ in seeds] for case in cases}
    ends = {case: [perplexity(r.end.all) for r in results] for case, results in found.items()}
    table = "\n".join(_table(scale, ends, medians))
    path = lab.folder / f"{KEY}.md"
    write_whole(path, partial(Path.write_text, data=table, encoding="utf-8"))
    diverged = [case for case, results in found.items() if any(r.curve.diverged for r in results)]
    return Result(
        key=KEY,
        title="Perplexity by epsilon, aggregation goal and clip",
        paper="Not in the paper, which leaves differential privacy to future work",
        checks=(
            Check("no run diverges", not diverged, f"{len(diverged)} of {len(found)} do"),
            _more_noise_is_not_better(ends),
        ),
        findings=tuple(_findings(scale, ends, medians)),
        plots=(charts.lines(lab.folder, KEY, "epsilon", _panels(scale, ends), ratios=True),),
        notes=(_note(scale, path.name),),
    )


def _note(scale: Scale, file: str) -> str:
    return (
        f"ε is for {PARTICIPATIONS} participations of a device at δ = {DELTA:g}. All runs make "
        f"{scale.rounds} steps. {file} has a table with the best of the three clips."
    )


def _plan(scale: Scale, regime: RegimeName, seed: int) -> RecordingPlan:
    if regime == "AsyncFL":
        return until_versions(AsyncFL(scale.goal), scale.concurrency, seed, scale.rounds)
    clients = round((1 + OVER_SELECTION) * scale.goal)
    return until_versions(SyncFL(OVER_SELECTION), clients, seed, scale.rounds)


def _cases(scale: Scale) -> Iterator[PrivacyCase]:
    epsilons = _FULL_EPSILONS if scale.name == "full" else _EPSILONS
    for data, regime, copies in product(scale.data, REGIMES, COPIES):
        yield PrivacyCase(data, regime, copies)
        for epsilon, clip in product(epsilons, _CLIPS):
            yield PrivacyCase(data, regime, copies, epsilon, clip)


_Medians = dict[tuple[str, RegimeName], float]


def _run(scale: Scale, case: PrivacyCase, seed: int, medians: _Medians) -> Run:
    chosen = _rates(scale)
    if case.epsilon is not None:
        privacy = Privacy(
            clip=case.clip * medians[case.data, case.regime],
            max_participations=PARTICIPATIONS,
            delta=DELTA,
            epsilon=case.epsilon,
        )
        chosen = structs.replace(chosen, privacy=privacy)
    return _learning(scale, case, seed, chosen)


def _learning(scale: Scale, case: PrivacyCase, seed: int, chosen: Rates) -> Run:
    plan = _plan(scale, case.regime, seed)
    updates = scale.rounds * plan.cluster.tasks[0].aggregation_goal
    found = learning(plan, chosen, data=case.data, updates=updates, evaluations=_EVALUATIONS)
    return structs.replace(found, updates=updates, copies=case.copies)


def _rates(scale: Scale) -> Rates:
    return rates(scale.common_rate, _ADAMS_MOMENT)


def _median(lab: Lab, scale: Scale, data: str, regime: RegimeName) -> float:
    """Of the norms of updates, to two digits."""
    [outcome] = lab.learn(
        [_learning(scale, PrivacyCase(data, regime, 1), TUNING_SEED, _rates(scale))]
    )
    return float(f"{_norm(outcome):.2g}")


def _norm(outcome: RunResult) -> float:
    assert outcome.norms is not None
    return outcome.norms.p50


def _more_noise_is_not_better(ends: dict[PrivacyCase, list[float]]) -> Check:
    """At the smallest K, where noise is largest: otherwise it has no effect, and is not there."""
    epsilons = sorted({case.epsilon for case in ends if case.epsilon is not None})
    smallest, largest = epsilons[0], epsilons[-1]
    wrong = [
        case
        for case in ends
        if (case.epsilon, case.copies) == (smallest, COPIES[0])
        and fmean(ends[case]) <= fmean(ends[case._replace(epsilon=largest)])
    ]
    rule = f"at the smallest K, ε = {smallest:g} is worse than ε = {largest:g} for every clip"
    return Check(rule, not wrong, f"{len(wrong)} exceptions")


def _findings(
    scale: Scale, ends: dict[PrivacyCase, list[float]], medians: _Medians
) -> Iterator[Finding]:
    for case, values in ends.items():
        goal = scale.goal * case.copies
        what = "without privacy"
        if case.epsilon is not None:
            clip = case.clip * medians[case.data, case.regime]
            what = f"ε = {case.epsilon:g}, clip = {number(clip)}"
        name = f"{name_of(case.data)}, {case.regime}, K = {goal:,}, {what}"
        yield Finding(name=name, values=tuple(values))


def _best(ends: dict[PrivacyCase, list[float]], case: PrivacyCase) -> tuple[float, PrivacyCase]:
    """The lowest perplexity over clips; the case itself if it has none."""
    same = [each for each in ends if each._replace(clip=0.0) == case._replace(clip=0.0)]
    return min((fmean(ends[each]), each) for each in same)


def _panels(scale: Scale, ends: dict[PrivacyCase, list[float]]) -> list[charts.Panel]:
    epsilons = sorted({case.epsilon for case in ends if case.epsilon is not None})
    panels = []
    for data in scale.data:
        lines = {}
        for regime, copies in product(REGIMES, COPIES):
            best = (
                _best(ends, PrivacyCase(data, regime, copies, epsilon))[1] for epsilon in epsilons
            )
            label = f"{regime}, K = {scale.goal * copies:,}"
            lines[label] = [(e, ends[case]) for e, case in zip(epsilons, best, strict=True)]
        panels.append(charts.Panel(name_of(data), "perplexity", lines, from_zero=False))
    return panels


def _table(scale: Scale, ends: dict[PrivacyCase, list[float]], medians: _Medians) -> Iterator[str]:
    """Perplexity with the best clip, as Markdown."""
    epsilons = sorted({case.epsilon for case in ends if case.epsilon is not None})
    header = ["data", "regime", "K", "without privacy"]
    header += [f"ε = {epsilon:g} (best clip ÷ median norm)" for epsilon in reversed(epsilons)]
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" * len(header)
    for data, regime, copies in product(scale.data, REGIMES, COPIES):
        cells = [name_of(data), regime, f"{scale.goal * copies:,}"]
        cells.append(number(fmean(ends[PrivacyCase(data, regime, copies)])))
        for epsilon in reversed(epsilons):
            value, best = _best(ends, PrivacyCase(data, regime, copies, epsilon))
            cells.append(f"{number(value)} ({best.clip:g})")
        yield f"| {' | '.join(cells)} |"
    norms = ", ".join(f"{name_of(d)} {r} {number(m)}" for (d, r), m in medians.items())
    yield f"\nMedian norms of updates: {norms}; {scale.rounds} steps.\n"
