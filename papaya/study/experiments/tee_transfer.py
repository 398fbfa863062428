"""Bytes and time across the boundary of the TSA: ours against naive TEE aggregation.

Paper, figure on data transfer time: naive aggregation moves K models into the enclave, O(K m);
asynchronous secure aggregation moves K seeds in and one sum out, O(K + m).
"""

from __future__ import annotations

from collections.abc import Sequence

from papaya.study.experiments.result import Check, Finding, Result, number
from papaya.study.experiments.scale import Scale
from papaya.study.lab import Lab
from papaya.study.run import RecordingPlan
from papaya.study.tee_transfer import (
    DESIGNS,
    GOALS,
    MODEL_BYTES,
    bytes_into_tee,
    measure_transfer,
)
from papaya.study.transfer_plot import draw_transfer

KEY = "tee-transfer"
MEASURED = 100


def courses(scale: Scale, seeds: Sequence[int]) -> list[RecordingPlan]:
    return []


def run(lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
    moved = measure_transfer(naive_up_to=MEASURED)
    seconds = {(one.design, one.k): one.seconds for one in moved if one.seconds is not None}
    size = {(one.design, one.k): one.bytes_in + one.bytes_out for one in moved}
    ours, naive = DESIGNS
    last = GOALS[-1]
    fewer = size[naive, last] / size[ours, last]
    faster = seconds[naive, MEASURED] / seconds[ours, MEASURED]
    per_client = bytes_into_tee(2, MODEL_BYTES, ours) - bytes_into_tee(1, MODEL_BYTES, ours)
    return Result(
        key=KEY,
        title="What crosses into the TSA",
        paper="Figure 6: data transfer time by K, naive TEE aggregation or asynchronous SecAgg",
        findings=(
            Finding(name="bytes into the TSA per client", paper="constant", values=(per_client,)),
            Finding(name=f"naive ÷ ours, bytes at K = {last}", paper="–", values=(fewer,)),
            Finding(name=f"naive ÷ ours, time at K = {MEASURED}", paper="–", values=(faster,)),
        ),
        checks=(
            Check("at most 256 bytes per client", per_client <= 256, number(per_client)),
            Check(f"far fewer bytes at K = {last}", fewer >= 100, f"{number(fewer)} times"),
        ),
        plots=(draw_transfer(moved, lab.folder / f"{KEY}.png").name,),
        notes=(
            (
                "A model of 20 MB. Times are of bytes between two processes on this machine, "
                f"naive up to K = {MEASURED}; an enclave's boundary is slower, for both."
            ),
        ),
    )
