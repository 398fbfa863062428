"""How a client's learning rate changes while it trains: a factor for each local step.

A schedule counts the steps of one training on one device, over all its epochs. The number of steps
follows from the number of examples, so a decay ends with the training of every client, whatever
its volume. Without warm-up the factors are those of `torch.optim.lr_scheduler`: StepLR, LinearLR
from 1, and CosineAnnealingLR.
"""

from __future__ import annotations

import math
from typing import TypeAlias

from papaya.config.checks import MAX_COUNT, Settings, require, require_count


class ConstantRate(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="constant"):
    """The rate rises in equal parts during `warmup_steps` steps, and then stays the same."""

    warmup_steps: int = 0

    def __post_init__(self) -> None:
        require(
            0 <= self.warmup_steps <= MAX_COUNT,
            "client.schedule.warmup_steps",
            self.warmup_steps,
            f"must be at least 0 and at most {MAX_COUNT}",
            "leave it out to start with the full rate",
        )

    def factor(self, step: int, steps: int) -> float:
        """What the rate is multiplied by in this one of `steps` steps; the first step is 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return self._after_warmup(step - self.warmup_steps, steps - self.warmup_steps)

    def _after_warmup(self, step: int, steps: int) -> float:
        return 1.0


class _Decay(ConstantRate, frozen=True, kw_only=True):
    """`end`: the share of the rate that would be reached one step after the last one."""

    end: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0 <= self.end <= 1,
            "client.schedule.end",
            self.end,
            "must be from 0 to 1",
            "leave it out for a decay to zero",
        )


class LinearDecay(_Decay, frozen=True, kw_only=True, tag="linear"):
    """A constant decrease per step, after the warm-up."""

    def _after_warmup(self, step: int, steps: int) -> float:
        return 1 + (self.end - 1) * step / steps


class CosineDecay(_Decay, frozen=True, kw_only=True, tag="cosine"):
    """Half a period of a cosine, after the warm-up."""

    def _after_warmup(self, step: int, steps: int) -> float:
        return self.end + (1 - self.end) * (1 + math.cos(math.pi * step / steps)) / 2


class StepDecay(ConstantRate, frozen=True, kw_only=True, tag="step"):
    """After the warm-up, the rate is multiplied by `decay` after every `every_steps` steps."""

    every_steps: int
    decay: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("client.schedule.every_steps", self.every_steps)
        require(
            0 < self.decay <= 1,
            "client.schedule.decay",
            self.decay,
            "must be above 0 and at most 1",
            "leave it out for 0.1",
        )

    def _after_warmup(self, step: int, steps: int) -> float:
        power: float = self.decay ** (step // self.every_steps)
        return power


Schedule: TypeAlias = ConstantRate | LinearDecay | CosineDecay | StepDecay
