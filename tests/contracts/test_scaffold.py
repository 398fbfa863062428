"""examples/scaffold.py against SCAFFOLD in plain PyTorch, written here again.

Who took part in which round is the input (a trace), and so are the seeds of the clients' batches.
Everything that learns is independent of Papaya.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import papaya
from papaya.learning.task import ClientSGD
from papaya.sim.draws import splitmix64
from papaya.sim.population import PopulationConfig
from papaya.study.data.partition import Dirichlet
from papaya.study.data.source import Memory
from papaya.study.data.tables import table_source
from papaya.study.run import record_plan
from papaya.study.trace import Trace

RATE, EPOCHS, BATCH = 0.2, 2, 8
SERVER_RATE = 0.8
SEED = 4
ORDER = 111  # of the seeds of batches, among all that is drawn


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "examples" / "scaffold.py"
    spec = importlib.util.spec_from_file_location("scaffold_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def control_change(
    net: nn.Module, start: list[Tensor], c: list[Tensor], c_i: list[Tensor], batches: Any
) -> list[Tensor]:
    """Trains `net` from `start` in place. Equation (4) of the paper, option II: c_i+ − c_i."""
    weights = list(net.parameters())
    steps = 0
    with torch.no_grad():
        for weight, value in zip(weights, start, strict=True):
            weight.copy_(value)
    for inputs, kinds in batches:
        net.zero_grad()
        torch.autograd.backward(cross_entropy(net(inputs), kinds))
        with torch.no_grad():
            for weight, server, own in zip(weights, c, c_i, strict=True):
                assert weight.grad is not None
                weight.sub_(RATE * (weight.grad + server - own))
        steps += 1
    found = zip(start, weights, c, strict=True)
    return [(x - y.detach()) / (steps * RATE) - server for x, y, server in found]


def scaffold(
    trace: Trace, last: int, data: Memory, example: ModuleType, initial: list[Tensor]
) -> tuple[list[Tensor], list[Tensor], int]:
    """The weights and the server's control variate after round `last`, and how many clients took
    part more than once.
    """
    net, x = nn.Linear(example.NUMBERS, example.KINDS), initial
    c = [torch.zeros_like(value) for value in x]
    owned: dict[int, list[Tensor]] = {}
    returned = 0
    for version in range(1, last + 1):
        members = trace.members(version)
        sum_y, sum_c = ([torch.zeros_like(value) for value in x] for _ in range(2))
        for member in range(members.start, members.stop):
            device, visit = trace.clients.device[member], trace.clients.participation[member]
            seed = splitmix64(splitmix64(splitmix64(SEED, ORDER), int(device)), int(visit))
            client = int(device) % len(data.volumes)
            inputs, kinds = example.to_tensors(data.training(client))
            rng = np.random.default_rng(seed)
            orders = [torch.from_numpy(rng.permutation(len(kinds))) for _ in range(EPOCHS)]
            parts = [part for order in orders for part in torch.split(order, BATCH)]
            returned += client in owned
            c_i = owned.get(client) or [torch.zeros_like(value) for value in x]
            change = control_change(net, x, c, c_i, [(inputs[p], kinds[p]) for p in parts])
            owned[client] = [old + new for old, new in zip(c_i, change, strict=True)]
            for at, weight in enumerate(net.parameters()):
                sum_y[at] += weight.detach() - x[at]
                sum_c[at] += change[at]
        size = members.stop - members.start
        x = [old + SERVER_RATE * new / size for old, new in zip(x, sum_y, strict=True)]
        share = size / example.CLIENTS
        c = [old + share * new / size for old, new in zip(c, sum_c, strict=True)]
    return x, c, returned


def test_the_example_is_scaffold_within_rounding(example: ModuleType) -> None:
    data = table_source(
        example.some_points(300), Dirichlet(clients=example.CLIENTS, alpha=0.3, seed=2)
    )
    assert len(data.volumes) < example.CLIENTS or data.volumes.min() > 0
    task = structs.replace(
        example.task,
        client=ClientSGD(rate=RATE, epochs=EPOCHS, batch_size=BATCH),
        optimizer=structs.replace(example.task.optimizer, rate=SERVER_RATE),
    )
    run = papaya.simulate(
        task,
        data,
        updates=10 * example.PER_ROUND,
        evaluations=1,
        seed=SEED,
        population=PopulationConfig(size=10_000, latency_mean_s=5.0),
        progress=False,
    )
    trace, _ = record_plan(run.result.run.recording_plan)
    torch.manual_seed(SEED)
    initial = [value.detach() for value in example.Controlled().net.parameters()]
    x, c, returned = scaffold(trace, run.result.versions, data, example, initial)
    assert run.result.versions >= 8
    assert returned > 20, "clients come back with what they have kept"
    ours = list(run.model.values())
    for found, expected in zip(ours, [*x, *c], strict=True):
        assert float((found - expected).abs().max()) < 1e-6
    assert max(float(value.abs().max()) for value in c) > 0.05


def test_scaffold_corrects_the_drift_of_skewed_clients(example: ModuleType) -> None:
    plain, corrected = example.compare(0.1, rounds=6)
    assert corrected < plain
