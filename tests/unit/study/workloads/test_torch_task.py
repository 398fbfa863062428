"""Task files as workloads: the personal tensors of clients over a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from papaya.errors import ConfigError
from papaya.learning.parameters import FLOAT32
from papaya.learning.settings import with_client
from papaya.learning.task import load_task
from papaya.learning.torch.engine import TorchEngine
from papaya.study.workloads.base import Clients
from papaya.study.workloads.torch_task import TorchWorkload

SOURCE = """
import torch
from torch import nn
from papaya.learning.example_fields import Numbers
from papaya.learning.task import ClientSGD, Examples, Task

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 3)
        self.head = nn.Linear(3, 1)
    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))

task = Task(
    name="own", model=Model, batch=(Numbers(2), Numbers(1, start=2)), personal=["head.*"],
    loss=lambda module, x, y: (module(x) - y).square().mean(),
    examples=Examples("numbers"), client=ClientSGD(rate=0.1, batch_size=4), concurrency=4,
)
"""
CLIENTS = 3


def examples_of(device: int, count: int) -> list[bytes]:
    owner = device % CLIENTS
    return [f"{i},{owner},{(i + owner) / 4}".encode() for i in range(count)]


@pytest.fixture
def workload(tmp_path: Path) -> TorchWorkload:
    path = tmp_path / "own.py"
    path.write_text(SOURCE)
    held_out = Clients(np.arange(CLIENTS), np.zeros(CLIENTS, np.int64), np.full(CLIENTS, 6))
    return TorchWorkload(load_task(path), examples_of, held_out, client_of=lambda d: d % CLIENTS)


def clients(*devices: int) -> Clients:
    return Clients(np.array(devices), np.zeros(len(devices), np.int64), np.full(len(devices), 6))


def test_each_client_continues_with_its_own_tensors(workload: TorchWorkload) -> None:
    """Device 0 and device 3 have the data of client 0; client 1 comes between."""
    client = workload.loaded.task.client
    start = workload.initial(0)
    updates = workload.train([start], np.zeros(4, np.int64), clients(0, 1, 3, 0), client)

    engine, state, expected = TorchEngine(workload.loaded), b"", []
    for device in (0, 3, 0):
        [seed] = workload._seeds(clients(device))
        engine.device_state = state
        update, _ = engine.train(start, examples_of(device, 6), seed)
        state = engine.device_state
        expected.append(np.frombuffer(update, FLOAT32))
    np.testing.assert_array_equal(updates[[0, 2, 3]], np.stack(expected))
    assert workload.device_states[0] == state
    assert sorted(workload.device_states) == [0, 1]


def test_clients_are_judged_with_their_own_tensors(workload: TorchWorkload) -> None:
    client, start = workload.loaded.task.client, workload.initial(0)
    before = workload.evaluate(start).all
    for _ in range(20):
        workload.train([start], np.zeros(3, np.int64), clients(0, 1, 2), client)
    assert workload.evaluate(start).all < before / 2


def test_a_new_run_starts_with_the_initial_tensors(workload: TorchWorkload) -> None:
    client, start = workload.loaded.task.client, workload.initial(0)
    first = workload.train([start], np.zeros(1, np.int64), clients(0), client)
    again = workload.train([start], np.zeros(1, np.int64), clients(0), client)
    assert (first != again).any()
    workload.initial(0)
    np.testing.assert_array_equal(
        workload.train([start], np.zeros(1, np.int64), clients(0), client), first
    )


def test_what_was_trained_before_does_not_change_an_evaluation(workload: TorchWorkload) -> None:
    """A sweep trains with other settings in the same process, one run after the other."""
    start = workload.initial(0)
    before = workload.evaluate(start)
    other = structs.replace(workload.loaded.task.client, max_examples=2, batch_size=1)
    workload.train([start], np.zeros(1, np.int64), clients(0), other)
    workload.initial(0)  # a new run
    assert workload.evaluate(start) == before


def test_processes_evaluate_with_the_settings_of_the_run(tmp_path: Path) -> None:
    """A process loads the file, in which `--set client.max_examples=2` is not written."""
    path = tmp_path / "own.py"
    path.write_text(SOURCE)
    loaded = with_client(load_task(path), ["max_examples=2"])
    held_out = clients(0, 1, 2)
    alone = TorchWorkload(loaded, examples_of, held_out, judged_on=partial(examples_of, count=6))
    start = alone.initial(0)
    with TorchWorkload(
        loaded, examples_of, held_out, judged_on=partial(examples_of, count=6), processes=2
    ) as spread:
        assert spread.evaluate(start) == alone.evaluate(start)


LOOP = """
def train(local):
    for x, y in local.batches():
        local.module.nothing(x)
"""


def test_a_loop_that_fails_is_named_with_its_line_and_its_client(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(LOOP + SOURCE.replace("personal=", "train=train, personal="))
    held_out = clients(0)
    workload = TorchWorkload(load_task(path), examples_of, held_out)
    problem = r"own\.py:4: AttributeError.*while trying examples of device 2: train"
    with pytest.raises(ConfigError, match=problem):
        workload.train(
            [workload.initial(0)], np.zeros(1, np.int64), clients(2), workload.loaded.task.client
        )
