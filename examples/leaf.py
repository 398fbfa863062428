"""A task for data in LEAF's format: two numbers, and to which of two kinds they belong.

    papaya simulate examples/leaf.py --data leaf:FOLDER

An example is the bytes {"x":…,"y":…}, both values as in the file.
"""

import json

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from papaya.learning.task import AsyncFL, ClientSGD, Examples, OptimizerConfig, Task


def to_tensors(examples: list[bytes]) -> tuple[Tensor, Tensor]:
    pairs = [json.loads(example) for example in examples]
    # torch makes integer tensors from integers, and a file may have 1 instead of 1.0.
    inputs = torch.tensor([[float(number) for number in pair["x"]] for pair in pairs])
    kinds = torch.tensor([float(pair["y"]) for pair in pairs])  # for cross_entropy: int(…)
    return inputs, kinds


def loss(module: nn.Module, inputs: Tensor, kinds: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(module(inputs)[:, 0], kinds)


task = Task(
    name="two-kinds",
    model=lambda: nn.Linear(2, 1),
    loss=loss,
    batch=to_tensors,
    examples=Examples("pairs"),
    client=ClientSGD(rate=0.5),
    regime=AsyncFL(aggregation_goal=5),
    concurrency=20,
    optimizer=OptimizerConfig(kind="fedavg"),
    sample=[b'{"x":[1,0],"y":1}', b'{"x":[0.5,-2],"y":0}'],
)
