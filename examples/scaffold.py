"""SCAFFOLD (Karimireddy et al. 2020, option II): client updates without drift on skewed data.

    python examples/scaffold.py

With several local steps, a client moves towards the minimum of its own loss and away from that of
all clients. SCAFFOLD subtracts an estimate of that drift: the server keeps a control variate c, and
every client i its own c_i.

    client    y ← y − rate · (gradient(y) − c_i + c)          for each batch, from y = x
              Δc_i = (x − y) / (steps · rate) − c             and then c_i ← c_i + Δc_i
    server    x ← x + rate · mean of (y − x)
              c ← c + (clients of a round / all clients) · mean of Δc_i

Everything comes from parts that a task can replace:

    c      a shared parameter that no gradient reaches: it travels with the model, both ways
    c_i    a personal parameter: it stays on the device, and is kept once the update is counted
    steps  a training loop of the task: Task(train=…)
    server a server optimizer, which steps the two halves of the vector in their own ways

A server needs the class `Scaffold` as an installed entry point that its operator allows, in a
module without torch: see "Extensions of servers" in docs/train-your-own-model.md.
"""

from __future__ import annotations

import json
from typing import cast

import numpy as np
import torch
from msgspec import structs
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import papaya
from papaya.learning import extensions
from papaya.learning.server_optimizer import ServerOptimizer
from papaya.learning.task import ClientSGD, Examples, OptimizerConfig, SyncFL, Task, Weighting
from papaya.learning.torch.local_training import LocalTraining
from papaya.progress import Progress
from papaya.study.data.partition import Dirichlet
from papaya.study.data.tables import table_source

CLIENTS = 20
PER_ROUND = 10
NUMBERS, KINDS = 8, 5


class Controlled(nn.Module):
    """A model with the control variates of the server and of this client."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(NUMBERS, KINDS)
        self.control = nn.ParameterList(map(torch.zeros_like, self.net.parameters()))
        self.own_control = nn.ParameterList(map(torch.zeros_like, self.net.parameters()))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)  # type: ignore[no-any-return]


def train(local: LocalTraining) -> None:
    module, rate = cast(Controlled, local.module), local.client.rate
    weights, control, own = list(module.net.parameters()), module.control, module.own_control
    start = [weight.detach().clone() for weight in weights]
    for batch in local.batches():
        gradients = torch.autograd.grad(local.loss(batch), weights)
        with torch.no_grad():
            for weight, gradient, c, c_i in zip(weights, gradients, control, own, strict=True):
                weight.sub_(rate * (gradient - c_i + c))
    with torch.no_grad():
        for x, y, c, c_i in zip(start, weights, control, own, strict=True):
            change = (x - y) / (local.steps * rate) - c
            c_i.add_(change)
            c.add_(change)  # the client uploads the difference


class Scaffold(ServerOptimizer):
    """The first half of the model are its weights, the second half is the control variate."""

    initial_moments = ()

    def change(self, steps, parameters, step, moments):  # type: ignore[no-untyped-def]
        half = parameters.size // 2
        rates = np.full(parameters.size, self.rate, np.float32)
        rates[half:] = self.parameters["share"]
        return parameters + rates * step, ()


extensions.add("server_optimizers", "scaffold", Scaffold)


def to_tensors(examples: list[bytes]) -> tuple[Tensor, Tensor]:
    rows = [json.loads(example) for example in examples]
    return torch.tensor([row["x"] for row in rows]), torch.tensor([row["y"] for row in rows])


def loss(module: nn.Module, inputs: Tensor, kinds: Tensor) -> Tensor:
    return cross_entropy(module(inputs), kinds)


task = Task(
    name="scaffold",
    model=Controlled,
    loss=loss,
    batch=to_tensors,
    train=train,
    personal=["own_control.*"],
    examples=Examples("points"),
    client=ClientSGD(rate=0.1, epochs=10, batch_size=1500),  # ten steps on all examples
    regime=SyncFL(over_selection=0.0),
    concurrency=PER_ROUND,
    weighting=Weighting("equal"),
    optimizer=OptimizerConfig(
        kind="scaffold", rate=1.0, parameters=(("share", PER_ROUND / CLIENTS),)
    ),
    sample=[b'{"x":[0.5,1,0,1,0,1,0,1],"y":2}'],
)


def fedavg() -> Task:
    """The same without control variates."""
    return structs.replace(
        task,
        name="fedavg",
        model=lambda: nn.Linear(NUMBERS, KINDS),
        train=None,
        personal=(),
        optimizer=OptimizerConfig(kind="fedavg", rate=1.0),
    )


def some_points(count: int = 400) -> list[tuple[list[float], int]]:
    """Points around a centre for each kind, so near to each other that they overlap."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(KINDS, NUMBERS))
    kinds = rng.integers(0, KINDS, count)
    points = centres[kinds] + rng.normal(size=(count, NUMBERS))
    return list(zip(points.round(3).tolist(), kinds.tolist(), strict=True))


def compare(alpha: float, rounds: int = 30) -> list[float]:
    """What FedAvg and SCAFFOLD reach on a Dirichlet partition: the mean over all clients of their
    losses, which is what both minimise.
    """
    data = table_source(some_points(), Dirichlet(clients=CLIENTS, alpha=alpha))
    batches = [to_tensors(data.training(client)) for client in range(len(data.volumes))]
    found = []
    for method in (fedavg(), task):
        run = papaya.simulate(
            method, data, updates=rounds * PER_ROUND, evaluations=1, progress=False
        )
        net = method.model()
        net.load_state_dict(run.model, strict=False)
        found.append(sum(loss(net, *batch).item() for batch in batches) / len(batches))
    return found


def main() -> None:
    alphas, rows = (0.1, 100.0), []
    with Progress() as progress:
        for done, alpha in enumerate(alphas):
            partition = f"Dirichlet({alpha:g})"
            progress.update("comparisons", done / len(alphas), f"training on {partition}")
            plain, corrected = compare(alpha)
            rows.append(f"{partition:22} {plain:10.4f} {corrected:10.4f}")
        progress.update("comparisons", 1.0, "done")
    print("mean loss of the clients   FedAvg   SCAFFOLD", *rows, sep="\n")


if __name__ == "__main__":
    main()
