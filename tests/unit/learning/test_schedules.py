"""Schedules against torch.optim.lr_scheduler, and their bounds."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, StepLR

from papaya.errors import ConfigError
from papaya.learning.schedules import ConstantRate, CosineDecay, LinearDecay, Schedule, StepDecay

STEPS = 12


def torchs_own(schedule: Schedule, optimizer: SGD) -> LRScheduler:
    if isinstance(schedule, LinearDecay):
        return LinearLR(optimizer, 1.0, schedule.end, STEPS)
    if isinstance(schedule, CosineDecay):
        return CosineAnnealingLR(optimizer, STEPS, schedule.end)
    assert isinstance(schedule, StepDecay)
    return StepLR(optimizer, schedule.every_steps, schedule.decay)


@pytest.mark.parametrize(
    "schedule",
    [
        LinearDecay(),
        LinearDecay(end=0.25),
        CosineDecay(),
        CosineDecay(end=0.1),
        StepDecay(every_steps=5),
        StepDecay(every_steps=1, decay=0.5),
    ],
)
def test_a_decay_is_that_of_torch(schedule: Schedule) -> None:
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    reference = torchs_own(schedule, optimizer)
    expected = []
    for _ in range(STEPS):
        expected.append(reference.get_last_lr()[0])
        optimizer.step()
        reference.step()
    assert [schedule.factor(step, STEPS) for step in range(STEPS)] == pytest.approx(expected)


def test_the_rate_rises_to_its_full_value_and_the_decay_starts_after_it() -> None:
    schedule = LinearDecay(warmup_steps=4)
    factors = [schedule.factor(step, 8) for step in range(8)]
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]


@pytest.mark.parametrize("kind", [ConstantRate, LinearDecay, CosineDecay])
def test_a_training_that_is_shorter_than_its_warm_up_only_rises(kind: type[ConstantRate]) -> None:
    schedule = kind(warmup_steps=10)
    assert [schedule.factor(step, 3) for step in range(3)] == [0.1, 0.2, 0.3]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: ConstantRate(warmup_steps=-1), "client.schedule.warmup_steps"),
        (lambda: LinearDecay(end=1.5), "client.schedule.end"),
        (lambda: CosineDecay(end=float("nan")), "client.schedule.end"),
        (lambda: StepDecay(every_steps=0), "client.schedule.every_steps"),
        (lambda: StepDecay(every_steps=1, decay=0.0), "client.schedule.decay"),
    ],
)
def test_a_schedule_that_cannot_work_is_refused(make: object, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make()  # type: ignore[operator]
