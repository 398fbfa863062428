"""The simulator against FedBuff and FedAvg in plain PyTorch, written here again.

Whose updates were counted, from which version and in which order, is the input (a trace), and so
are the seeds of the clients' batches. Everything that learns is independent of Papaya: local SGD,
differences, weights, damping by staleness, the mean and the server's step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import papaya
from papaya.learning.task import AsyncFL, ClientSGD, Examples, OptimizerConfig, SyncFL, Task
from papaya.sim.draws import splitmix64
from papaya.sim.population import PopulationConfig
from papaya.study.data.source import Memory
from papaya.study.run import record_plan
from papaya.study.simulation import SimulatedRun
from papaya.study.trace import Trace
from papaya.study.workloads.registry import Steps

RATE, EPOCHS, BATCH, MOST = 0.3, 2, 8, 40
SEED = 5
CLIENTS = 14
ORDER = 111  # of the seeds of batches, among all that is drawn
Step = Callable[[Tensor, Tensor], Tensor]


def a_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3))


def to_tensors(examples: Sequence[bytes]) -> tuple[Tensor, Tensor]:
    rows = [json.loads(example) for example in examples]
    return torch.tensor([row["x"] for row in rows]), torch.tensor([row["y"] for row in rows])


def loss(module: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(module(inputs), labels)


def some_data() -> Memory:
    """Three clusters of points, and clients of 5 to 83 examples."""
    rng = np.random.default_rng(8)
    clients = []
    for client in range(CLIENTS):
        labels = rng.integers(0, 3, 5 + 6 * client)
        points = (rng.normal(size=(len(labels), 4)) + 2 * np.eye(3, 4)[labels]).round(4).tolist()
        rows = zip(points, labels.tolist(), strict=True)
        clients.append([json.dumps({"x": x, "y": y}).encode() for x, y in rows])
    data = Memory("clusters", clients)
    assert len(data.volumes) == CLIENTS
    return data


# --- FedBuff, again ------------------------------------------------------------------------------


def flat(module: nn.Module) -> Tensor:
    return torch.cat([value.detach().flatten() for value in module.parameters()])


def fill(module: nn.Module, values: Tensor) -> None:
    nn.utils.vector_to_parameters(values.clone(), module.parameters())


def local_update(module: nn.Module, start: Tensor, examples: list[bytes], seed: int) -> Tensor:
    fill(module, start)
    inputs, labels = to_tensors(examples)
    orders = np.random.default_rng(seed)
    for _ in range(EPOCHS):
        order = torch.from_numpy(orders.permutation(len(examples)))
        for first in range(0, len(order), BATCH):
            chosen = order[first : first + BATCH]
            module.zero_grad()
            torch.autograd.backward(loss(module, inputs[chosen], labels[chosen]))
            with torch.no_grad():
                for value in module.parameters():
                    assert value.grad is not None
                    value.add_(value.grad, alpha=-RATE)  # the step of torch.optim.SGD
    return flat(module) - start


def fedbuff(trace: Trace, last: int, data: Memory, initial: Tensor, step: Step) -> Tensor:
    """Version `last`. A round of FedAvg is a buffer in which nobody is stale."""
    module, versions = a_model(), [initial]
    for version in range(1, last + 1):
        total, weight = torch.zeros_like(initial), 0
        members = trace.members(version)
        for member in range(members.start, members.stop):
            device, visit = trace.clients.device[member], trace.clients.participation[member]
            seed = splitmix64(splitmix64(splitmix64(SEED, ORDER), int(device)), int(visit))
            own = data.training(int(device) % CLIENTS)[:MOST]
            update = local_update(module, versions[trace.start[member]], own, seed)
            damping = torch.tensor(1 / math.sqrt(1 + int(trace.staleness[member])))
            total = total + (len(own) * damping) * update
            weight += len(own)
        versions.append(versions[-1] + step(versions[-1], total / weight))
    return versions[-1]


def plain(model: Tensor, mean: Tensor) -> Tensor:
    return mean


def adam(rate: float, beta1: float, beta2: float, epsilon: float) -> Step:
    state = {"m": torch.tensor(0.0), "v": torch.tensor(0.0), "t": torch.tensor(0.0)}

    def step(model: Tensor, mean: Tensor) -> Tensor:
        state["t"] += 1
        state["m"] = beta1 * state["m"] + (1 - beta1) * mean
        state["v"] = beta2 * state["v"] + (1 - beta2) * mean**2
        m, v = (state["m"] / (1 - beta1 ** state["t"]), state["v"] / (1 - beta2 ** state["t"]))
        return rate * m / (v.sqrt() + epsilon)

    return step


# --- both ----------------------------------------------------------------------------------------


def simulated(
    regime: AsyncFL | SyncFL, optimizer: OptimizerConfig, steps: Steps = "eager"
) -> SimulatedRun:
    task = Task(
        name="clusters",
        model=a_model,
        loss=loss,
        batch=to_tensors,
        examples=Examples("points"),
        client=ClientSGD(rate=RATE, epochs=EPOCHS, batch_size=BATCH, max_examples=MOST),
        regime=regime,
        concurrency=16,
        optimizer=optimizer,
    )
    population = PopulationConfig(size=10_000, latency_mean_s=5.0)
    return papaya.simulate(
        task,
        some_data(),
        updates=120,
        evaluations=2,
        seed=SEED,
        population=population,
        progress=False,
        steps=steps,
    )


def both(
    regime: AsyncFL | SyncFL, optimizer: OptimizerConfig, step: Step, steps: Steps = "eager"
) -> tuple[Trace, Tensor, Tensor]:
    run = simulated(regime, optimizer, steps)
    trace, _ = record_plan(run.result.run.recording_plan)
    assert 8 <= run.result.versions <= trace.versions, "it records to the end of a minute"
    torch.manual_seed(SEED)
    initial = flat(a_model())
    ours = torch.cat([value.flatten() for value in run.model.values()])
    assert run.loss < 0.7 * run.result.start.all
    return trace, ours, fedbuff(trace, run.result.versions, some_data(), initial, step)


def test_syncfl_is_fedavg_bit_for_bit() -> None:
    trace, ours, theirs = both(SyncFL(over_selection=0.3), OptimizerConfig(kind="fedavg"), plain)
    assert trace.staleness.max() == 0
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("optimizer", "step"),
    [
        (OptimizerConfig(kind="fedavg"), plain),
        (
            OptimizerConfig(kind="fedadam", rate=0.05, beta1=0.5, beta2=0.9, epsilon=1e-3),
            adam(0.05, 0.5, 0.9, 1e-3),
        ),
    ],
    ids=["fedavg", "fedadam"],
)
def test_asyncfl_is_fedbuff_within_rounding(optimizer: OptimizerConfig, step: Step) -> None:
    trace, ours, theirs = both(AsyncFL(aggregation_goal=4), optimizer, step)
    assert trace.staleness.max() > 0
    assert float((ours - theirs).abs().max()) < 1e-6


@pytest.mark.parametrize(
    "regime",
    [
        AsyncFL(aggregation_goal=4),
        # SyncFL may need a second compilation, which is slow.
        pytest.param(SyncFL(over_selection=0.3), marks=pytest.mark.soak),
    ],
)
def test_compiled_steps_are_the_same_within_rounding(regime: AsyncFL | SyncFL) -> None:
    _, ours, theirs = both(regime, OptimizerConfig(kind="fedavg"), plain, steps="compiled")
    assert float((ours - theirs).abs().max()) < 1e-6
