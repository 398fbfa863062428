"""All experiments, in the order of the report."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Final, Protocol, cast

from papaya.study.experiments import (
    designs,
    execution_times,
    goal_sweep,
    model_quality,
    sampling_bias,
    server_updates,
    speedup,
    stale_limit,
    sync_scaling,
    tee_transfer,
    training_curves,
    utilization,
)
from papaya.study.experiments.result import Result
from papaya.study.experiments.scale import Scale
from papaya.study.lab import Lab
from papaya.study.run import RecordingPlan


class Experiment(Protocol):
    """A module of this package."""

    KEY: str

    def plans(self, scale: Scale, seeds: Sequence[int]) -> list[RecordingPlan]:
        """The runs of the machines that it needs."""

    def run(self, lab: Lab, scale: Scale, seeds: Sequence[int]) -> Result:
        """What came of them."""


_MODULES: Final[tuple[ModuleType, ...]] = (
    execution_times,
    sync_scaling,
    utilization,
    server_updates,
    speedup,
    goal_sweep,
    sampling_bias,
    model_quality,
    training_curves,
    designs,
    tee_transfer,
    stale_limit,
)
EXPERIMENTS: Final[dict[str, Experiment]] = {
    module.KEY: cast(Experiment, module) for module in _MODULES
}
