"""Client utilization of AsyncFL and SyncFL, as each is configured in the paper.

Paper, figure "AsyncFL achieves high client utilization while SyncFL client utilization
fluctuates". Every replacement goes through check-in, assignment and join of the real machines.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from msgspec import structs

from papaya.sim import plots
from papaya.sim.report import RunReport, Series
from papaya.study.experiments.result import Finding, PaperClaim, Result, ratios
from papaya.study.experiments.runs import Scale, async_plan, plain_plan, sync_plan
from papaya.study.lab import Lab
from papaya.study.run import RecordingPlan

KEY = "utilization"
_ASYNC, _OVER = "AsyncFL", "SyncFL with over-selection"


def plans(scale: Scale, seeds: Sequence[int]) -> list[RecordingPlan]:
    return [plan for found in _regimes(scale, seeds).values() for plan in found]


def _regimes(scale: Scale, seeds: Sequence[int]) -> dict[str, list[RecordingPlan]]:
    at = scale.concurrency
    return {
        _ASYNC: [async_plan(scale, at, seed) for seed in seeds],
        _OVER: [sync_plan(scale, at, seed) for seed in seeds],
        f"SyncFL without over-selection, C = {scale.large_goal}": [
            plain_plan(scale, seed) for seed in seeds
        ],
    }


def run(lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
    reports = {
        name: [recording.report for recording in lab.record(found)]
        for name, found in _regimes(scale, seeds).items()
    }
    used = {n: tuple(r.tasks[0].utilization for r in found) for n, found in reports.items()}
    plot = lab.folder / f"{KEY}.png"
    drawn = {name: found[0] for name, found in reports.items()}
    shortest_s = min(report.until_s for report in drawn.values())
    drawn = {name: _beginning(report, shortest_s) for name, report in drawn.items()}
    plots.draw(drawn, plot, "Client utilization")
    return Result(
        key=KEY,
        title=f"Client utilization at concurrency {scale.concurrency}",
        paper="Figure 7: number of active clients over time",
        claims=(
            PaperClaim(
                statement="AsyncFL keeps nearly all of its client slots busy",
                paper="near 1",
                expected=1.0,
                values=used[_ASYNC],
            ),
            PaperClaim(
                statement="SyncFL with over-selection uses a smaller share of its slots",
                paper="below AsyncFL's",
                expected=1.0,
                relation="below",
                values=ratios(used[_OVER], used[_ASYNC]),
            ),
        ),
        findings=tuple(
            Finding(name=name, values=found) for name, found in used.items() if name != _ASYNC
        ),
        plots=(plot.name,),
        notes=(
            (
                "Active clients as the aggregator counts them ÷ concurrency. A device that "
                "vanished counts until its heartbeats are missed."
            ),
        ),
    )


def _beginning(report: RunReport, seconds: float) -> RunReport:
    """The series of all are drawn for as long as the shortest run took."""
    [task] = report.tasks
    count = bisect_right(task.series.time_s, seconds)
    series = Series(*(column[:count] for column in structs.astuple(task.series)))
    return structs.replace(report, tasks=(structs.replace(task, series=series),))
