"""The server optimizer of a task."""

from __future__ import annotations

import math

from papaya.config.checks import MAX_COUNT, Settings, require, require_numbers
from papaya.config.combining import ExtensionParameters, require_name, require_parameters

OPTIMIZERS = ("fedavg", "fedsgd", "fedadam", "fedyogi", "fedadagrad")


class OptimizerConfig(Settings, frozen=True):
    """The server optimizer. None means the default of its kind."""

    kind: str = "fedadam"
    rate: float | None = None
    momentum: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float | None = None
    averaged: int = 0
    parameters: ExtensionParameters = ()

    def __post_init__(self) -> None:
        require_numbers(self, "optimizer.")
        require(
            0 <= self.averaged <= MAX_COUNT,
            "optimizer.averaged",
            self.averaged,
            f"must be at least 0 and at most {MAX_COUNT}",
            "leave it out: it follows from batch_norm in the task file",
        )
        require_name("optimizer.kind", self.kind, OPTIMIZERS)
        require_parameters("optimizer", self.parameters, is_built_in=self.is_built_in)
        for field, value in (("rate", self.rate), ("epsilon", self.epsilon)):
            require(
                value is None or (math.isfinite(value) and value > 0),
                f"optimizer.{field}",
                value,
                "must be finite and above zero",
                f"leave optimizer.{field} out to take the default of {self.kind}",
            )
        for field, value in (
            ("momentum", self.momentum),
            ("beta1", self.beta1),
            ("beta2", self.beta2),
        ):
            require(
                0 <= value < 1,
                f"optimizer.{field}",
                value,
                "must be at least 0 and below 1",
                f"choose optimizer.{field} in [0, 1), for example 0.9",
            )

    @property
    def is_built_in(self) -> bool:
        return self.kind in OPTIMIZERS
