"""Will a notification be opened? Logistic regression on what a phone knows about the moment.

One example is one line of text: the hour of the day, the minutes since the phone was last used,
and whether the notification was opened.

    8.5,3,1
    23.0,240,0
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from papaya.learning.task import (
    AsyncFL,
    ClientSGD,
    EvaluationPlan,
    Examples,
    OptimizerConfig,
    StopRule,
    Task,
)


def to_tensors(examples: list[bytes]) -> tuple[Tensor, Tensor]:
    rows = [[float(value) for value in line.split(b",")] for line in examples]
    features = [
        [math.sin(hour * math.pi / 12), math.cos(hour * math.pi / 12), math.log1p(minutes)]
        for hour, minutes, _ in rows
    ]
    return torch.tensor(features), torch.tensor([[opened] for _, _, opened in rows])


def loss(module: nn.Module, features: Tensor, opened: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(module(features), opened)


def accuracy(module: nn.Module, features: Tensor, opened: Tensor) -> Tensor:
    """1 for each example that is classified correctly, else 0."""
    return ((module(features) > 0) == (opened > 0.5)).float().squeeze(1)


task = Task(
    name="opened",
    model=lambda: nn.Linear(3, 1),
    batch=to_tensors,
    loss=loss,
    metrics={"accuracy": accuracy},
    examples=Examples("notifications"),
    client=ClientSGD(rate=0.1),
    regime=AsyncFL(aggregation_goal=2),  # or SyncFL(over_selection=0.3)
    concurrency=4,
    optimizer=OptimizerConfig(kind="fedadam", rate=0.05),
    evaluation=EvaluationPlan(every_versions=5, clients=4),
    stop=StopRule(versions=40),
    sample=[b"8.5,3,1", b"23.0,240,0"],
)
