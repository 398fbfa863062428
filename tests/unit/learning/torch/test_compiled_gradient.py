"""A traced gradient is that of eager PyTorch; a compiled one agrees, and repeats its bits."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor, nn
from torch.nn import functional

from papaya.errors import CannotCompile, Diverged
from papaya.learning.definition import ClientSGD, Examples, Task
from papaya.learning.example_fields import Binary, read_fields
from papaya.learning.parameters import Vector
from papaya.learning.schedules import LinearDecay
from papaya.learning.task import LoadedTask, load_task
from papaya.learning.torch import compiled_gradient
from papaya.learning.torch.compiled_engine import CompiledEngine
from papaya.learning.torch.compiled_gradient import (
    TOLERANCE,
    CompiledGradient,
    Library,
    compile_gradient,
    flat_gradient,
    trace_gradient,
)
from papaya.learning.torch.engine import TorchEngine
from papaya.learning.torch.fast_operators import FAST_OPERATORS
from papaya.learning.torch.gradient_runtime import ClientSteps
from papaya.learning.torch.module import make_module, read_batch
from papaya.learning.torch.parts import parts_of
from papaya.sim.draws import Ints
from papaya.study.replay import Rates, learn
from papaya.study.workloads.base import Clients
from papaya.study.workloads.torch_task import TorchWorkload
from tests.unit.study.learners import Kept, a_trace

Loss = Callable[..., Tensor]


def cross_entropy(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(module(inputs).flatten(0, -2), targets.flatten())


def a_task(model: Callable[[], nn.Module], loss: Loss = cross_entropy, **client: Any) -> Task:
    return Task(
        name="any",
        model=model,
        loss=loss,
        batch=lambda examples: (),
        examples=Examples("any"),
        client=ClientSGD(rate=0.1, **client),
        concurrency=10,
    )


class Images(nn.Module):
    """Windows and images of sizes that do not divide each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 3, (3, 2), bias=False)
        self.output = nn.Linear(3 * 3 * 2, 5)

    def forward(self, images: Tensor) -> Any:
        hidden = functional.max_pool2d(torch.relu(self.first(images)), 2)
        hidden = functional.max_pool2d(self.second(hidden), (1, 2))
        return self.output(hidden.flatten(1))


class Attention(nn.Module):
    """A frozen table, a layer that the loss does not use, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 8)
        self.words.requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.norm = nn.LayerNorm(8)
        self.queries = nn.Linear(8, 24)
        self.output = nn.Linear(8, 5)
        self.scale = nn.Buffer(torch.tensor(0.5))

    def forward(self, words: Tensor) -> Any:
        split = self.queries(self.norm(self.words(words))).unflatten(2, (3, 2, 4))
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.output(found.transpose(1, 2).flatten(2) * self.scale)


class Cells(nn.Module):
    """A recurrent layer as it is."""

    def __init__(self, kind: Any = nn.GRU) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.cells = kind(4, 6, batch_first=True)
        self.output = nn.Linear(6, 5)

    def forward(self, words: Tensor) -> Any:
        return self.output(self.cells(self.words(words))[0])


def pictures(count: int) -> tuple[Tensor, ...]:
    return torch.randn(count, 2, 11, 10), torch.randint(0, 5, (count,))


def sentences(count: int) -> tuple[Tensor, ...]:
    return torch.randint(0, 7, (count, 3)), torch.randint(0, 5, (count, 3))


def eager(task: Task, module: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    values = parts_of(task, module).shared_parameters
    loss = task.loss(module, *batch).mean()
    gradients = torch.autograd.grad(loss, values, allow_unused=True)
    return loss.detach(), flat_gradient(values, gradients)


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (Images, pictures),
        (Attention, sentences),
        (Cells, sentences),
        (lambda: Cells(nn.LSTM), sentences),
    ],
)
def test_a_traced_gradient_is_that_of_eager_torch_for_any_batch_size(
    model: Callable[[], nn.Module], batch: Callable[[int], tuple[Tensor, ...]]
) -> None:
    torch.manual_seed(1)
    task = a_task(model)
    module = make_module(task).train()
    traced = trace_gradient(task, module, batch(4))
    assert traced.is_partial == (model is Attention)
    for count in (2, 4, 7):
        rows = batch(count)
        given = (*traced.inputs[: len(traced.inputs) - len(rows)], *rows)
        loss, gradient = traced.graph(*given)
        expected_loss, expected = eager(task, module, rows)
        torch.testing.assert_close(loss, expected_loss)
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_the_first_of_equal_maxima_gets_the_gradient() -> None:
    def loss(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        scaled = module(torch.ones_like(inputs[:, :1, :1, :1])) * inputs
        pooled, places = functional.max_pool2d(scaled, 2, return_indices=True)
        return (pooled * torch.arange(1.0, 5.0).view(2, 2) + 0 * places).flatten(1).sum(1)

    task = a_task(lambda: nn.Linear(1, 1, bias=False), loss)
    module = make_module(task)
    batch = (torch.ones(3, 1, 5, 4), torch.zeros(3))
    traced = trace_gradient(task, module, batch)
    torch.testing.assert_close(
        traced.graph(*traced.inputs)[1], eager(task, module, batch)[1], rtol=0, atol=0
    )


def test_an_equal_model_has_the_same_digest_and_another_loss_has_not() -> None:
    def scaled(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return 2 * cross_entropy(module, inputs, targets)

    def digest(loss: Loss = cross_entropy) -> str:
        task = a_task(lambda: nn.Linear(3, 5), loss)
        batch = (torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))
        return trace_gradient(task, make_module(task), batch).digest

    assert digest() == digest() != digest(scaled)


def test_another_setting_of_the_compiler_has_another_digest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = a_task(lambda: nn.Linear(3, 5))
    batch = (torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))
    traced = trace_gradient(task, make_module(task), batch)
    before = traced.digest
    monkeypatch.setitem(compiled_gradient._SETTINGS, "cpp.threads", 2)
    changed = traced.digest
    monkeypatch.setenv("CXX", "another-compiler")
    assert len({before, changed, traced.digest}) == 3


SEEN = torch.zeros(1)


def depends_on_size(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    factor = 2 if len(inputs) > 3 else 1
    return factor * cross_entropy(module, inputs, targets)


def depends_on_values(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    found = cross_entropy(module, inputs, targets)
    return found if found < 100 else 2 * found


def changes_a_tensor(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    SEEN.add_(1)
    return cross_entropy(module, inputs, targets)


@pytest.mark.parametrize(
    ("model", "loss", "reason"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 5), nn.Dropout()), cross_entropy, "random numbers"),
        (lambda: nn.Linear(3, 5), depends_on_size, "depends on the batch size"),
        (lambda: nn.Linear(3, 5), depends_on_values, "cannot be traced"),
        (lambda: nn.Linear(3, 5), changes_a_tensor, "changes a tensor"),
    ],
)
def test_what_compiled_code_would_do_differently_is_refused(
    model: Callable[[], nn.Module], loss: Loss, reason: str
) -> None:
    task = a_task(model, loss)
    batch = (torch.randn(4, 3), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(CannotCompile, match=reason):
        trace_gradient(task, make_module(task).train(), batch)


def test_a_batch_without_a_row_per_example_is_refused(tmp_path: Path) -> None:
    task = a_task(lambda: nn.Linear(3, 5))
    with pytest.raises(CannotCompile, match="needs 2 examples, found 1"):
        compile_gradient(task, [b"1"], tmp_path)


# -- compiled: one library for all of these tests -------------------------------------------------

TASK = """
import torch
from papaya.learning.example_fields import Binary
from papaya.learning.task import ClientSGD, Examples, Task

task = Task(
    name="small",
    model=lambda: torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 5)
    ),
    loss=lambda module, x, y: torch.nn.functional.cross_entropy(module(x), y, reduction="none"),
    batch=(Binary("float32", (3,)), Binary("int64", (), start=12)),
    examples=Examples("rows"),
    client=ClientSGD(rate=0.1, batch_size=8),
    concurrency=10,
)
"""


def rows_of(device: int, count: int) -> list[bytes]:
    draw = np.random.default_rng(device)
    inputs = draw.standard_normal((count, 3), np.float32)
    targets = draw.integers(0, 5, count)
    return [x.tobytes() + y.tobytes() for x, y in zip(inputs, targets, strict=True)]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedTask, Library]:
    folder = tmp_path_factory.mktemp("compiled")
    path = folder / "small.py"
    path.write_text(TASK)
    loaded = load_task(path)
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("needs a C++ compiler: apt-get install g++")
    return loaded, compile_gradient(loaded.task, rows_of(0, 4), folder)


class Job(NamedTuple):
    model: Vector
    examples: list[bytes]
    seed: int


def with_client(loaded: LoadedTask, client: ClientSGD) -> LoadedTask:
    return replace(loaded, task=structs.replace(loaded.task, client=client))


def test_clients_with_fewer_bits_are_not_compiled(
    small: tuple[LoadedTask, Library], tmp_path: Path
) -> None:
    client = ClientSGD(rate=0.1, batch_size=8, precision="bfloat16")
    with pytest.raises(CannotCompile, match="clients train with bfloat16"):
        compile_gradient(with_client(small[0], client).task, rows_of(0, 4), tmp_path)


@pytest.mark.parametrize(
    "client",
    [
        ClientSGD(rate=0.1, batch_size=8, epochs=2, schedule=LinearDecay()),
        ClientSGD(rate=0.1, batch_size=8, momentum=0.9, nesterov=True, weight_decay=0.01),
        ClientSGD(rate=0.01, batch_size=8, optimizer="adamw", proximal=0.1, max_gradient_norm=0.2),
    ],
)
def test_a_compiled_client_agrees_with_an_eager_one(
    small: tuple[LoadedTask, Library], client: ClientSGD
) -> None:
    loaded, library = small
    loaded = with_client(loaded, client)
    compiled, plain = CompiledEngine(loaded, library), TorchEngine(loaded)
    model = loaded.initial_parameters(seed=1)
    # 1 and 17 have a batch of one example
    jobs = [Job(model, rows_of(count, count), count) for count in (1, 2, 7, 17, 40)]
    assert compiled.is_compiled
    assert library.runtime is not None
    updates = compiled.train_all(jobs)
    for job, found in zip(jobs, updates, strict=True):
        expected = np.frombuffer(plain.train(*job)[0], np.float32)
        assert np.linalg.norm(found - expected) <= TOLERANCE * np.linalg.norm(expected)
    assert compiled.train_all(jobs[::-1])[::-1].tobytes() == updates.tobytes()


def test_batches_of_a_function_are_those_of_an_eager_client(
    small: tuple[LoadedTask, Library],
) -> None:
    loaded, library = small
    fields = loaded.task.batch
    assert not callable(fields)

    def noisy(examples: list[bytes]) -> tuple[Tensor, ...]:
        inputs, targets = map(torch.from_numpy, read_fields(fields, examples))
        return inputs + torch.randn_like(inputs), targets

    loaded = replace(loaded, task=structs.replace(loaded.task, batch=noisy))
    job = Job(loaded.initial_parameters(seed=1), rows_of(4, 21), 9)
    expected = np.frombuffer(TorchEngine(loaded).train(*job)[0], np.float32)
    [found] = CompiledEngine(loaded, library).train_all([job])
    assert np.linalg.norm(found - expected) <= TOLERANCE * np.linalg.norm(expected)


def test_a_compiled_workload_gives_the_same_bits_in_any_batching(
    small: tuple[LoadedTask, Library],
) -> None:
    loaded, library = small
    device: Ints = np.arange(6)
    clients = Clients(device, np.zeros_like(device), 3 + 5 * device)
    here = TorchWorkload(loaded, rows_of, clients, way=library)
    there = TorchWorkload(loaded, rows_of, clients, way=library)
    model, sgd = here.initial(0), loaded.task.client
    expected = here.train([model], np.zeros_like(device), clients, sgd)
    for client in (5, 2, 0):
        alone = clients.take(slice(client, client + 1))
        found = there.train([model], np.zeros(1, np.int64), alone, sgd)
        assert found.tobytes() == expected[client].tobytes()


def test_compiled_learning_in_processes_gives_the_same_bits(
    small: tuple[LoadedTask, Library],
) -> None:
    """Processes train clients ahead, in other groups than one process does (training_ahead.py)."""
    loaded, library = small
    device: Ints = np.arange(4)
    judges = Clients(device, np.zeros_like(device), 3 + device)
    trace, rates = a_trace(6, 5), Rates(loaded.task.client)
    here = Kept(TorchWorkload(loaded, rows_of, judges, way=library))
    expected = learn(trace, here, rates)
    judged: list[bytes] = []
    with TorchWorkload(loaded, rows_of, judges, way=library, processes=2) as there:
        found = learn(trace, there, rates, judged=lambda _, model: judged.append(model.tobytes()))
    assert found == expected
    assert judged == [model.tobytes() for model in here.judged]


def test_a_compiled_client_that_diverges_is_refused(small: tuple[LoadedTask, Library]) -> None:
    loaded, library = small
    wild = CompiledEngine(with_client(loaded, ClientSGD(rate=3e38, batch_size=2)), library)
    with pytest.raises(Diverged):
        wild.train_all([Job(loaded.initial_parameters(seed=1), rows_of(1, 30), 5)])
    assert gc.isenabled()


def test_a_failing_library_says_what_is_wrong(small: tuple[LoadedTask, Library]) -> None:
    loaded, library = small
    compiled = CompiledGradient(library, make_module(loaded.task))
    parameters, batch = torch.zeros(loaded.manifest.length), read_batch(loaded.task, rows_of(0, 4))
    with pytest.raises(RuntimeError, match="the runtime failed"):
        compiled(parameters, batch[:1])
    with pytest.raises(RuntimeError, match="mm_out"):
        compiled(parameters.double(), batch)


def test_a_batch_that_needs_too_much_memory_fails(small: tuple[LoadedTask, Library]) -> None:
    loaded, library = small
    runtime = CompiledGradient(library, make_module(loaded.task)).runtime
    assert runtime is not None
    length = loaded.manifest.length
    too_many = np.array([1 << 58])
    steps = ClientSteps(np.array([1]), too_many, np.array([0]), np.ones(1, np.float32))
    columns = read_batch(loaded.task, rows_of(0, 4))
    with pytest.raises(RuntimeError, match="the runtime failed"):
        runtime.train([np.zeros(length, np.float32)], columns, steps, np.zeros((1, length), "f4"))


def test_attention_that_sees_nothing_gives_zeros() -> None:
    scores = torch.randn(2, 3, 5)
    scores[0, 1] = -torch.inf
    scores[1, :, 2:] = -torch.inf
    ours = FAST_OPERATORS[torch.ops.aten._safe_softmax.default](scores, -1)
    torch.testing.assert_close(ours, torch.ops.aten._safe_softmax.default(scores, -1))
    assert ours[0, 1].count_nonzero() == 0


def test_a_compiled_library_is_used_again(small: tuple[LoadedTask, Library]) -> None:
    loaded, library = small
    before = library.path.stat().st_mtime_ns
    assert compile_gradient(loaded.task, rows_of(3, 5), library.path.parent) == library
    assert library.path.stat().st_mtime_ns == before


def test_examples_read_together_are_those_read_one_by_one() -> None:
    field = Binary("uint8", (2, 3), start=1)
    examples = [bytes(range(n, n + 8)) for n in (1, 7, 100)]
    together = field.read_all(examples)
    assert together is not None
    assert together.dtype == np.float32
    np.testing.assert_array_equal(together, [field.read(each) for each in examples])
    assert field.read_all([*examples, b"1234567890"]) is None
    assert field.read_all([b"123456"]) is None
