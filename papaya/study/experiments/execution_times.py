"""How long clients train, and how long a synchronous round takes.

Paper, figure of client execution times: they span more than two orders of magnitude, and a round
takes 21 times the mean. The population is calibrated to this: it is an input of all that follows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from papaya.sim.population import Population
from papaya.sim.report import everyone
from papaya.study.experiments import charts
from papaya.study.experiments.result import Check, Finding, Result, number
from papaya.study.experiments.runs import Scale, plain_plan
from papaya.study.lab import Lab
from papaya.study.run import RecordingPlan

KEY = "execution-times"


def plans(scale: Scale, seeds: Sequence[int]) -> list[RecordingPlan]:
    return [plain_plan(scale, seed) for seed in seeds]


def run(lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
    recordings = lab.record(plans(scale, seeds))
    rounds, means, spans = [], [], []
    sample: list[float] = []
    for recording in recordings:
        trace = recording.trace
        population = Population(trace.config.population, trace.seed)
        execution_s, _ = everyone(population, trace.task.training_timeout_s)
        rounds.append(float(np.diff(trace.created_s).mean()))
        means.append(float(execution_s.mean()))
        spans.append(float(np.percentile(execution_s, 99.5) / np.percentile(execution_s, 0.5)))
        sample = execution_s.tolist()
    times = tuple(r / m for r, m in zip(rounds, means, strict=True))
    mean = sum(times) / len(times)
    return Result(
        key=KEY,
        title="Client execution times and the synchronous round",
        paper="Figure 2: distribution of client execution times; mean round ÷ mean execution 21x",
        findings=(
            Finding(name="mean round ÷ mean execution", paper="21x", values=times, kind="input"),
            Finding(name="mean round", values=tuple(rounds), unit="s", kind="input"),
            Finding(
                name="99.5th ÷ 0.5th percentile of execution",
                paper="more than two orders of magnitude",
                values=tuple(spans),
                kind="input",
            ),
        ),
        checks=(
            Check(
                "the population is calibrated: mean round ÷ mean execution is 21 within 15 %",
                abs(mean / 21 - 1) <= 0.15,
                number(mean),
            ),
        ),
        plots=(
            charts.histograms(
                lab.folder,
                KEY,
                "Client execution time",
                "execution time (s)",
                {"clients": sample},
                {
                    "mean execution": means[0],
                    "mean round, here": rounds[0],
                    "mean round, the paper (21 x)": 21 * means[0],
                },
            ),
        ),
        notes=(
            (
                f"SyncFL without over-selection, {scale.large_goal} clients per round. "
                "Execution times are of devices that can take part: within the timeout, not "
                "dropping out."
            ),
        ),
    )
