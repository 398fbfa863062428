"""The speedup with an LSTM on real text: does AsyncFL's advantage survive tuning?

The other experiments have a small model. Here the tuned protocol of the speedup is repeated with an
LSTM like the paper's: the same targets and grids of rates, and real text only (without one, the
synthetic language).

Its training is a hundred times as slow as that of the small model. So only its rates are tuned: its
first moments are those that were best for the small model. `all` includes it at `full` only; at
the other scales it runs by name, for two concurrencies and with a smaller LSTM. Every run is kept,
so it can be interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from papaya.study.experiments import charts
from papaya.study.experiments.result import PaperClaim, Result, number
from papaya.study.experiments.runs import (
    LSTM_CLIENT,
    PLANS,
    Reached,
    RegimeName,
    Scale,
    Tuned,
    best_of,
    hours_to,
    learning,
    met,
    name_of,
    rates,
    target_loss,
    target_of,
    tuned_for_time,
    tuning_seeds,
)
from papaya.study.experiments.speedup import Pair
from papaya.study.lab import Lab
from papaya.study.replay import Rates
from papaya.study.run import RecordingPlan, Run

KEY = "lstm-speedup"
_EVALUATIONS: Final = 40
_PAPERS: Final = {130: 2.0, 2600: 5.0}


def plans(scale: Scale, seeds: Sequence[int]) -> list[RecordingPlan]:
    every = {scale.concurrency, *scale.lstm_concurrencies}
    return [
        make(scale, c, seed)
        for make in PLANS.values()
        for c in sorted(every)
        for seed in (*seeds, *tuning_seeds(scale))
    ]


def run(lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
    data = scale.data[-1]
    share = target_of(lab, scale, scale.sync_grid, data).share
    pairs, checks = [], []
    for c in scale.lstm_concurrencies:
        tuned = {regime: _tuned(lab, scale, regime, c, share, data) for regime in PLANS}
        checks += [found.check(f"{regime} at {c}") for regime, found in tuned.items()]
        pairs.append(_pair(lab, scale, seeds, c, tuned, share, data))
    panel = charts.ratio_panel(
        f"Speedup, LSTM “{scale.lstm}”",
        "hours of SyncFL ÷ hours of AsyncFL",
        {f"{name_of(data)}, tuned rates": [(p.concurrency, p.speedup) for p in pairs]},
        paper=tuple((c, x) for c, x in _PAPERS.items() if c in scale.lstm_concurrencies),
    )
    return Result(
        key=KEY,
        title="Speedup of AsyncFL over SyncFL, an LSTM on real text",
        paper="Figure 9: hours to a target loss",
        claims=tuple(_claims(pairs)),
        checks=tuple(checks),
        plots=(charts.by_concurrency(lab.folder, KEY, [panel]),),
        notes=(
            (
                f"{name_of(data)}; the target is {share:.1%} of the reducible loss left, that of "
                "the small model's tuned protocol."
            ),
            *rounds(pairs),
        ),
    )


def _tuned(
    lab: Lab, scale: Scale, regime: RegimeName, concurrency: int, share: float, data: str
) -> Tuned:
    """The fewest hours to the target, with the first moment of the small model."""
    plans = [PLANS[regime](scale, concurrency, seed) for seed in tuning_seeds(scale)]
    grid = scale.sync_grid if regime == "SyncFL" else scale.async_grid
    whole = concurrency == scale.concurrency
    small = tuned_for_time(lab, plans, grid, share, data, whole=whole)

    def runs(chosen: Rates) -> list[Run]:
        return [_run(lab, scale, plan, chosen, share, data) for plan in plans]

    moments = (small.rates.optimizer.beta1,)
    return best_of(lab, grid, moments, runs, hours_to(lab, share, data), _lstm_rates)


_lstm_rates = partial(rates, client=LSTM_CLIENT)


def _run(
    lab: Lab, scale: Scale, plan: RecordingPlan, chosen: Rates, share: float, data: str
) -> Run:
    """It ends at its target: nothing else is read from it."""
    return learning(
        plan,
        chosen,
        model=scale.lstm,
        data=data,
        evaluations=_EVALUATIONS,
        target=target_loss(lab, plan, share, data),
    )


def _pair(
    lab: Lab,
    scale: Scale,
    seeds: Sequence[int],
    concurrency: int,
    tuned: dict[RegimeName, Tuned],
    share: float,
    data: str,
) -> Pair:
    sides = []
    for regime, make in PLANS.items():
        plans = [make(scale, concurrency, seed) for seed in seeds]
        chosen = tuned[regime].rates
        outcomes = lab.learn([_run(lab, scale, plan, chosen, share, data) for plan in plans])
        losses = [target_loss(lab, plan, share, data) for plan in plans]
        sides.append([met(o.curve, loss) for o, loss in zip(outcomes, losses, strict=True)])
    return Pair(concurrency, *sides)


def _claims(pairs: list[Pair]) -> list[PaperClaim]:
    """The paper has a number at its lowest and at its highest concurrency only."""
    return [
        PaperClaim(
            statement=f"C = {pair.concurrency}, speedup of tuned AsyncFL over tuned SyncFL",
            paper=f"{_PAPERS[pair.concurrency]:g}x" if pair.concurrency in _PAPERS else "above 1x",
            expected=_PAPERS.get(pair.concurrency, 1.0),
            relation="about" if pair.concurrency in _PAPERS else "above",
            values=pair.speedup.values,
            bound=pair.speedup.bound,
            no_effect=1.0,
        )
        for pair in pairs
    ]


def rounds(pairs: list[Pair]) -> list[str]:
    return [
        f"C = {pair.concurrency}: to the target, SyncFL needed {_versions(pair.sync)} rounds, "
        f"AsyncFL {_versions(pair.asynchronous)} versions"
        for pair in pairs
    ]


def _versions(runs: list[Reached]) -> str:
    return ", ".join(
        number(run.versions) if run.is_there else f"at least {number(run.versions)}" for run in runs
    )
