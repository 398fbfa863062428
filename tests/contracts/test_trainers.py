"""Every trainer of the simulator against the simple loop: plain PyTorch, client by client.

Compiled trainers give the same bits for a client whoever trains beside it; stacked ones agree
within rounding.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from papaya.errors import ConfigError, InvariantError, OperatorError
from papaya.learning.definition import ClientSGD
from papaya.learning.parameters import FLOAT32, Vector
from papaya.learning.task import LoadedTask, load_task
from papaya.learning.torch.processor import CPU
from papaya.sim.draws import Ints
from papaya.study import workloads
from papaya.study.replay import Rates, learn
from papaya.study.workloads.base import Clients, Matrix
from papaya.study.workloads.lstm import Lstm
from papaya.study.workloads.lstm_trainers import (
    CompiledLstm,
    LstmSizes,
    LstmTrainer,
    Tokens,
    TorchLstm,
    fastest,
)
from papaya.study.workloads.shipped_task import ShippedTask
from papaya.study.workloads.torch_task import TorchWorkload
from papaya.study.workloads.torch_workers import JudgedClient, judged_in_worker
from tests.unit.study.learners import Kept, a_trace

# n = 1, n below, at and above a batch, batches that do not divide n
VOLUMES = np.array([1, 2, 5, 32, 33, 7, 64, 1, 40, 13])
OFFSETS: Ints = np.concatenate([[0], np.cumsum(VOLUMES)])
STARTS: Ints = np.arange(len(VOLUMES)) % 3
ONCE = ClientSGD(rate=0.5)
OFTEN = ClientSGD(rate=0.3, epochs=3, batch_size=7)


def random_models(length: int) -> list[Vector]:
    draw = np.random.default_rng(1)
    return [draw.uniform(-0.3, 0.3, length).astype(FLOAT32) for _ in range(3)]


def simple_loop(
    parts: Sequence[torch.nn.Module],
    loss: Any,
    models: list[Vector],
    data: Sequence[torch.Tensor],
    sgd: ClientSGD,
) -> Matrix:
    """What all others must agree with."""
    parameters = [value for part in parts for value in part.parameters()]
    updates = []
    for client, (first, last) in enumerate(pairwise(OFFSETS.tolist())):
        model = torch.from_numpy(models[STARTS[client]].copy())
        torch.nn.utils.vector_to_parameters(model, parameters)
        for _ in range(sgd.epochs):
            for done in range(first, last, sgd.batch_size):
                rows = slice(done, min(done + sgd.batch_size, last))
                gradients = torch.autograd.grad(loss(*(each[rows] for each in data)), parameters)
                with torch.no_grad():
                    for value, gradient in zip(parameters, gradients, strict=True):
                        value.sub_(gradient, alpha=sgd.rate)
        trained = torch.nn.utils.parameters_to_vector(parameters).detach()
        updates.append((trained - torch.from_numpy(models[STARTS[client]])).numpy())
    return np.stack(updates)


def assert_agree(found: Matrix, expected: Matrix) -> None:
    """Relative to the largest change of each client."""
    scale = np.abs(expected).max(axis=1, keepdims=True)
    assert np.abs(found - expected).max(initial=0, where=scale > 0) <= 2e-5 * scale.max()
    np.testing.assert_array_less(np.abs(found - expected) / scale, 1e-4)


# --- LSTM ---------------------------------------------------------------------------------------

SMALL = LstmSizes(vocabulary=21, embedding=5, hidden=19, steps=6)
LSTMS = {"numba": CompiledLstm, "torch": TorchLstm}


def random_tokens(sizes: LstmSizes) -> Tokens:
    draw = np.random.default_rng(3)
    shape = int(OFFSETS[-1]), sizes.steps + 1
    return draw.integers(0, sizes.vocabulary, shape).astype(np.int32)


@pytest.mark.parametrize("kind", LSTMS)
@pytest.mark.parametrize(
    ("sizes", "sgd"), [(SMALL, ONCE), (SMALL, OFTEN), (LstmSizes(), ONCE)], ids=str
)
def test_an_lstm_trains_as_the_simple_loop(kind: str, sizes: LstmSizes, sgd: ClientSGD) -> None:
    models, tokens = random_models(sizes.manifest.length), random_tokens(sizes)
    embedding = torch.nn.Embedding(sizes.vocabulary, sizes.embedding)
    lstm = torch.nn.LSTM(sizes.embedding, sizes.hidden, batch_first=True)
    out = torch.nn.Linear(sizes.hidden, sizes.vocabulary)

    def loss(words: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        scores = out(lstm(embedding(words[:, :-1]))[0])
        return cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten(), reduction=reduction)

    words = torch.from_numpy(tokens.astype(np.int64))
    expected = simple_loop([embedding, lstm, out], loss, models, [words], sgd)
    trainer: LstmTrainer = LSTMS[kind](sizes)
    assert_agree(trainer.train(models, STARTS, tokens, OFFSETS, sgd), expected)
    modules = torch.nn.ModuleList([embedding, lstm, out])
    torch.nn.utils.vector_to_parameters(torch.from_numpy(models[0].copy()), modules.parameters())
    losses = loss(words, "none").detach().numpy().reshape(len(tokens), -1).mean(axis=1)
    np.testing.assert_allclose(trainer.losses(models[0], tokens), losses, rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_client_of_the_compiled_lstm_has_the_same_bits_in_any_batch(threads: int) -> None:
    models, tokens = random_models(SMALL.manifest.length), random_tokens(SMALL)
    together = CompiledLstm(SMALL, threads).train(models, STARTS, tokens, OFFSETS, OFTEN)
    trainer = CompiledLstm(SMALL)
    for client in range(len(VOLUMES)):
        start, offsets = STARTS[client : client + 1], OFFSETS[client : client + 2]
        found = trainer.train(models, start, tokens, offsets, OFTEN)
        assert found.tobytes() == together[client : client + 1].tobytes()


@pytest.mark.parametrize("kind", LSTMS)
def test_a_model_may_be_a_view_or_of_other_numbers(kind: str) -> None:
    models, tokens = random_models(SMALL.manifest.length), random_tokens(SMALL)
    trainer: LstmTrainer = LSTMS[kind](SMALL)
    expected = trainer.train(models, STARTS, tokens, OFFSETS, ONCE)
    apart = np.repeat(np.stack(models), 2, axis=1)
    apart[:, 1::2] = np.nan
    wide: list[Any] = [model.astype(np.float64) for model in models]
    for same in (list(apart[:, ::2]), wide):
        assert_agree(trainer.train(same, STARTS, tokens, OFFSETS, ONCE), expected)
        losses = trainer.losses(models[0], tokens)
        np.testing.assert_allclose(trainer.losses(same[0], tokens), losses, rtol=1e-5)


def test_the_compiled_lstm_reads_no_further_than_its_model() -> None:
    models, tokens = random_models(SMALL.manifest.length), random_tokens(SMALL)
    with pytest.raises(InvariantError, match="a model of"):
        CompiledLstm(SMALL).train([m[:-1] for m in models], STARTS, tokens, OFFSETS, ONCE)


@pytest.mark.parametrize("kind", LSTMS)
def test_an_lstm_refuses_what_it_cannot_train(kind: str) -> None:
    trainer: LstmTrainer = LSTMS[kind](SMALL)
    models, start = random_models(SMALL.manifest.length), np.zeros(1, np.int64)
    tokens, offsets = np.zeros((1, SMALL.steps + 1), np.int32), np.array([0, 1])
    with pytest.raises(ConfigError, match="momentum"):
        trainer.train(models, start, tokens, offsets, ClientSGD(rate=1, momentum=0.5))
    with pytest.raises(InvariantError, match="words"):
        trainer.train(models, start, tokens + SMALL.vocabulary, offsets, ONCE)
    with pytest.raises(InvariantError, match="sequences"):
        trainer.train(models, start, tokens[:, 1:], offsets, ONCE)


def test_without_numba_torch_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(workloads, "compiled_lstm", raising=False)
    monkeypatch.setitem(sys.modules, "papaya.study.workloads.compiled_lstm", None)
    assert fastest(SMALL).name == "torch"
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(OperatorError, match="needs numba, or torch"):
        fastest(SMALL)


# --- The workloads ------------------------------------------------------------------------------


def some_clients(count: int = 12) -> Clients:
    draw = np.random.default_rng(4)
    volumes = np.rint(20 * np.exp(draw.normal(size=count))).astype(np.int64)
    return Clients(draw.integers(0, 10**8, count), np.arange(count), np.maximum(volumes, 1))


def test_the_lstm_learns_and_an_update_does_not_depend_on_its_batch() -> None:
    workload, clients = Lstm(), some_clients()
    model = workload.initial(0)
    start, sgd = np.zeros(len(clients), np.int64), ClientSGD(rate=0.2, max_examples=30)
    updates = workload.train([model], start, clients, sgd)
    assert updates.shape == (len(clients), workload.length)
    back = np.arange(len(clients))[::-1]
    again = workload.train([model], start, clients.take(back), sgd)
    assert again.tobytes() == updates[back].tobytes()
    before, after = workload.evaluate(model), workload.evaluate(model + updates.mean(axis=0))
    assert after.all < before.all
    assert workload.train([model], start[:0], clients.take(back[:0]), sgd).shape[0] == 0


def test_more_examples_than_the_most_change_nothing() -> None:
    workload, clients = Lstm(), some_clients()
    models, start = [workload.initial(0)], np.zeros(len(clients), np.int64)
    few, ours = workload.source.sequences(clients, 5)
    all_of_them, theirs = workload.source.sequences(clients, 1500)
    for client, volume in enumerate(clients.examples.tolist()):
        count = min(5, volume)
        assert ours[client + 1] - ours[client] == count
        same = all_of_them[theirs[client] : theirs[client] + count]
        assert np.array_equal(few[ours[client] : ours[client + 1]], same)
    limited = workload.train(models, start, clients, ClientSGD(rate=0.1, max_examples=5))
    direct = workload.trainer.train(models, start, few, ours, ClientSGD(rate=0.1))
    assert limited.tobytes() == direct.tobytes()


# --- Any torch module ---------------------------------------------------------------------------

TASK = """
import torch
from papaya.learning.task import ClientSGD, Examples, Task

def batch(examples):
    rows = torch.tensor([list(example) for example in examples]) / 255.0
    return rows[:, :3], rows[:, 3:]

task = Task(
    name="line",
    model=lambda: torch.nn.Linear(3, 1),
    loss=lambda module, x, y: ((module(x) - y) ** 2).mean(),
    batch=batch,
    examples=Examples("rows"),
    client=ClientSGD(rate=0.1),
    concurrency=10,
    clip=1e-9,
)
"""


@pytest.fixture
def line(tmp_path: Path) -> LoadedTask:
    path = tmp_path / "line.py"
    path.write_text(TASK)
    return load_task(path)


def rows_of(device: int, n: int) -> list[bytes]:
    drawn = np.random.default_rng(device).integers(0, 256, (n, 4), np.uint8)
    return [row.tobytes() for row in drawn]


def test_a_torch_task_trains_as_the_simple_loop(line: LoadedTask) -> None:
    """With one batch per epoch the engine's order of examples does not matter."""
    workload = TorchWorkload(line, rows_of, some_clients(5))
    clients, models = some_clients(), [workload.initial(0), workload.initial(1)]
    start = np.arange(len(clients)) % 2
    sgd = ClientSGD(rate=0.1, momentum=0.5, epochs=3, batch_size=1000, max_examples=25)
    updates = workload.train(models, start, clients, sgd)
    module = torch.nn.Linear(3, 1)
    for client in range(len(clients)):
        model = torch.from_numpy(models[start[client]].copy())
        torch.nn.utils.vector_to_parameters(model, module.parameters())
        velocity = torch.zeros(4)
        n = min(25, int(clients.examples[client]))
        assert callable(line.task.batch)
        x, y = line.task.batch(rows_of(int(clients.device[client]), n))
        for _ in range(3):
            loss = line.task.loss(module, x, y)
            gradients = torch.autograd.grad(loss, list(module.parameters()))
            velocity = 0.5 * velocity + torch.cat([each.flatten() for each in gradients])
            model = model - 0.1 * velocity
            torch.nn.utils.vector_to_parameters(model, module.parameters())
        expected = model.numpy() - models[start[client]]
        np.testing.assert_allclose(updates[client], expected, atol=1e-6)


def test_a_torch_task_in_processes_gives_the_same_bits(line: LoadedTask) -> None:
    here = TorchWorkload(line, rows_of, some_clients(5), seed=3)
    clients, model = some_clients(), here.initial(0)
    start, sgd = np.zeros(len(clients), np.int64), ClientSGD(rate=0.1, batch_size=8)
    with TorchWorkload(line, rows_of, some_clients(5), seed=3, processes=2) as there:
        updates = there.train([model], start, clients, sgd)
        assert updates.tobytes() == here.train([model], start, clients, sgd).tobytes()
        assert there.evaluate(model) == here.evaluate(model)
        assert there.train([model], start[:0], clients.take(slice(0)), sgd).shape == (0, 4)
    better = here.evaluate(model + updates.mean(axis=0))
    assert better.all < here.evaluate(model).all


def test_learning_in_processes_gives_the_same_bits(line: LoadedTask) -> None:
    """Their clients train ahead (training_ahead.py)."""
    trace, rates = a_trace(10, 6, stale=3), Rates(ClientSGD(rate=0.1, batch_size=8))
    here = Kept(TorchWorkload(line, rows_of, some_clients(5)))
    expected = learn(trace, here, rates)
    judged = []
    with TorchWorkload(line, rows_of, some_clients(5), processes=2) as there:
        found = learn(trace, there, rates, judged=lambda _, model: judged.append(model.tobytes()))
    assert found == expected
    assert judged == [model.tobytes() for model in here.judged]


def test_learning_in_processes_ends_where_it_ends_in_one(line: LoadedTask) -> None:
    """At a target, and at the version that has a client without data."""
    trace, rates = a_trace(12, 6, stale=3), Rates(ClientSGD(rate=0.1, batch_size=8))
    span = trace.members(9)
    lacks = int(trace.clients.device[span][trace.start[span] < 7][0])

    def incomplete(device: int, n: int) -> list[bytes]:
        return rows_of(device, n)[device == lacks :]

    def judged_versions(processes: int, target: float | None) -> list[int]:
        seen: list[int] = []
        with TorchWorkload(line, incomplete, some_clients(5), processes=processes) as workload:
            try:
                learn(trace, workload, rates, target=target, judged=lambda v, _: seen.append(v))
            except OperatorError as error:
                seen.append(-int("the data source gives" in str(error)))
            workload.evaluate(workload.initial(0))  # it can still be used
        return seen

    assert judged_versions(2, None) == judged_versions(1, None) == [*range(9), -1]
    assert judged_versions(2, 100.0) == judged_versions(1, 100.0) == [*range(4)]


def test_a_killed_worker_is_reported(line: LoadedTask) -> None:
    with TorchWorkload(line, rows_of, some_clients(5), processes=2) as workload:
        clients, model = some_clients(), workload.initial(0)
        start, sgd = np.zeros(len(clients), np.int64), ClientSGD(rate=0.1)
        workload.train([model], start, clients, sgd)
        for worker in active_children():
            worker.kill()
        with pytest.raises(OperatorError, match="worker process was killed") as refused:
            workload.train([model], start, clients, sgd)
    assert "--training-processes" in str(refused.value.hint)


def test_workers_that_cannot_start_are_reported_as_such(tmp_path: Path) -> None:
    path = tmp_path / "kills.py"
    kill = "def batch(examples):\n    os.kill(os.getpid(), signal.SIGKILL)"
    path.write_text("import os, signal\n" + TASK.replace("def batch(examples):", kill))
    with (
        TorchWorkload(load_task(path), rows_of, some_clients(5), processes=2) as workload,
        pytest.raises(OperatorError, match="ended before any had done its work") as refused,
    ):
        workload.evaluate(workload.initial(0))
    assert '__name__ == "__main__"' in str(refused.value.hint)


def test_workers_end_with_their_parent(line: LoadedTask, tmp_path: Path) -> None:
    """Also if it is killed, and without waiting for what they are doing if it fails."""
    program = f"""
from multiprocessing import active_children
from os import getpid, kill
from pathlib import Path
from signal import SIGKILL
from papaya.learning.task import load_task
from papaya.study.workloads.torch_task import TorchWorkload
from tests.contracts.test_trainers import rows_of, some_clients

if __name__ == "__main__":
    line = load_task(Path({str(line.path)!r}))
    workload = TorchWorkload(line, rows_of, some_clients(5), processes=2)
    workload.evaluate(workload.initial(0))
    print(*(worker.pid for worker in active_children()), flush=True)
    kill(getpid(), SIGKILL)
"""
    script = tmp_path / "script.py"
    script.write_text(program)
    # The workers hold the other end of its output: it ends when the last of them has exited.
    killed = subprocess.run(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
        timeout=1200,
    )
    assert killed.returncode == -signal.SIGKILL
    assert len(killed.stdout.split()) == 2


def test_a_torch_task_that_changed_is_refused_by_a_worker(line: LoadedTask) -> None:
    """A file that changes later is no problem: its content has been sent."""
    shipped, parameters = ShippedTask.of(line), line.initial_parameters()
    judged, client = [JudgedClient(rows_of(0, 1), b"")], line.task.client
    before = judged_in_worker(shipped, CPU, parameters, client, judged)
    line.path.write_text(TASK + "# changed\n")
    other = replace(shipped, path=line.path.with_name("missing.py"))
    for sent in (shipped, other):
        assert judged_in_worker(sent, CPU, parameters, client, judged).tolist() == before.tolist()
    with pytest.raises(OperatorError, match="changed during the simulation"):
        judged_in_worker(ShippedTask.of(line), CPU, parameters, client, judged)


def test_a_source_with_too_few_examples_is_refused(line: LoadedTask) -> None:
    workload = TorchWorkload(line, lambda device, n: rows_of(device, n - 1), some_clients(5))
    with pytest.raises(OperatorError, match="examples of device"):
        workload.evaluate(workload.initial(0))
