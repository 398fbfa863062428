"""Server model updates per hour: AsyncFL with K = 100 against SyncFL with over-selection.

Paper: about 30 times more at concurrency 2300.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from papaya.config import AsyncFL, SyncFL
from papaya.study.experiments import charts
from papaya.study.experiments.result import Finding, PaperClaim, Result, ratios
from papaya.study.experiments.runs import (
    OVER_SELECTION,
    Scale,
    async_plan,
    sync_plan,
    until_versions,
    versions_per_hour,
)
from papaya.study.lab import Lab
from papaya.study.run import RecordingPlan

KEY = "server-updates"


def plans(scale: Scale, seeds: Sequence[int]) -> list[RecordingPlan]:
    return [plan for pair in _pairs(scale, seeds).values() for side in pair for plan in side]


def _pairs(
    scale: Scale, seeds: Sequence[int]
) -> dict[int, tuple[list[RecordingPlan], list[RecordingPlan]]]:
    """Concurrency -> plans of AsyncFL and of SyncFL, shared with learning runs."""
    pairs = {
        c: (
            [async_plan(scale, c, seed) for seed in seeds],
            [sync_plan(scale, c, seed) for seed in seeds],
        )
        for c in scale.concurrencies
    }
    # Nothing is learnt at the largest concurrency, so a third of the rounds is enough; AsyncFL has
    # as many updates.
    most, over = scale.most_clients, SyncFL(OVER_SELECTION)
    sync = [until_versions(over, most, seed, scale.rounds // 3) for seed in seeds]
    versions = sync[0].updates // scale.goal
    pairs[most] = (
        [until_versions(AsyncFL(scale.goal), most, seed, versions) for seed in seeds],
        sync,
    )
    return dict(sorted(pairs.items()))


def run(lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
    rates = {
        c: tuple([versions_per_hour(lab, plan) for plan in side] for side in pair)
        for c, pair in _pairs(scale, seeds).items()
    }
    most = ratios(*rates[scale.most_clients])
    lines = {
        f"AsyncFL, K = {scale.goal}": [(c, pair[0]) for c, pair in rates.items()],
        "SyncFL": [(c, pair[1]) for c, pair in rates.items()],
    }
    panel = charts.Panel(
        "Server model updates",
        "updates per hour",
        lines,
        log=True,
        paper=((scale.most_clients, 30 * fmean(rates[scale.most_clients][1])),),
        caption="star: 30 times our SyncFL",
    )
    return Result(
        key=KEY,
        title="Server model updates per hour",
        paper="Figure 8: server updates per hour; 30x more at concurrency 2300",
        claims=(
            PaperClaim(
                statement=f"AsyncFL makes more server updates per hour at {scale.most_clients}",
                paper="30x",
                expected=30.0,
                values=most,
                no_effect=1.0,
            ),
        ),
        findings=tuple(
            Finding(name=f"AsyncFL ÷ SyncFL at {c}", values=ratios(*pair))
            for c, pair in rates.items()
            if c != scale.most_clients
        ),
        plots=(charts.by_concurrency(lab.folder, KEY, [panel]),),
    )
