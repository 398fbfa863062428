"""Training of many simulated clients with a compiled gradient, one client at a time.

The batches, the optimizer and the update are those of the engine that devices run. The gradient is
the compiled one (compiled_gradient.py), and the parameters are one vector, so that a step of the
optimizer is a few operations whatever the number of tensors. A batch of another form than the
compiled one takes PyTorch's own gradient.

What surrounds the steps is done for many clients together: their seeds are hashed, their examples
are read at once, and losses and models are checked after the last client. Plain SGD runs in the
runtime (gradient_runtime.py), without Python between steps. Other optimizers, and batches that a
function makes, take a call for each step.

Clients train one after the other. The runtime's products do not depend on addresses; torch's do, so
parameters and batches start at a multiple of 64 bytes. So an update has the same bits whichever
clients are trained together.

A client that diverges is refused all the same, a few clients later.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from math import gcd
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from papaya.learning.client_generators import generators
from papaya.learning.client_training import (
    diverged,
    training_batches,
    training_orders,
    used_examples,
)
from papaya.learning.parameters import FLOAT32, Vector, is_finite
from papaya.learning.task import LoadedTask
from papaya.learning.torch.client_optimizer import TorchClientOptimizer
from papaya.learning.torch.compiled_gradient import CompiledGradient, Library, flat_gradient
from papaya.learning.torch.engine import TorchEngine
from papaya.learning.torch.gradient_runtime import ClientSteps
from papaya.learning.torch.module import Batch, batch_loss, read_batch, seeded

_LINE: Final = 64  # bytes; torch allocates tensors at multiples of it
_READ_TOGETHER: Final = 4 << 20  # bytes of examples, about as many as stay in a cache
_TRIM_THRESHOLD: Final = -1  # of mallopt(3)
_MMAP_THRESHOLD: Final = -3
_MOST: Final = (1 << 31) - 1


class ClientJob(Protocol):
    """What one client trains on, and from which model; the seed draws its batches."""

    @property
    def model(self) -> Vector: ...

    @property
    def examples(self) -> Sequence[bytes]: ...

    @property
    def seed(self) -> int: ...


class CompiledEngine(TorchEngine):
    """A TorchEngine that also trains many clients, with a compiled gradient."""

    def __init__(self, loaded: LoadedTask, library: Library) -> None:
        super().__init__(loaded)
        _keep_freed_memory()
        self._compiled = CompiledGradient(library, self._module)
        self._trained = torch.empty(self.manifest.length)

    @property
    def is_compiled(self) -> bool:
        """Whether the compiled gradient is that of this task's clients.

        It is float32. A parameter without a gradient is not decayed; in one vector it would be.
        """
        client = self.task.client
        decays_too_much = client.weight_decay and self._compiled.library.is_partial
        return not client.precision and not decays_too_much

    @torch.no_grad()
    @np.errstate(over="ignore", invalid="ignore")
    def train_all(self, jobs: Sequence[ClientJob]) -> npt.NDArray[np.float32]:
        """A row for each client: its update, before it is clipped."""
        with _without_collector():
            return self._train_all(jobs)

    def _train_all(self, jobs: Sequence[ClientJob]) -> npt.NDArray[np.float32]:
        train = self._train_by_runtime if self._is_plain else self._train_by_steps
        updates = np.empty((len(jobs), self.manifest.length), FLOAT32)
        losses = [train(some, updates[rows]) for rows, some in _read_together(jobs)]
        if not all(map(is_finite, losses)):
            raise diverged("loss")
        if not is_finite(updates):
            raise diverged("model")
        return updates

    @property
    def _is_plain(self) -> bool:
        """Whether the runtime makes the steps of clients, without Python between them."""
        client = self.task.client
        return (
            self._compiled.runtime is not None
            and self._compiled.library.least_examples == 1
            and not callable(self.task.batch)
            and client.beyond_plain.keys() <= {"schedule"}
        )

    def _train_by_runtime(
        self, jobs: Sequence[ClientJob], updates: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float32]:
        """Write the clients' updates; their losses."""
        assert self._compiled.runtime is not None
        client = self.task.client
        used = [used_examples(job.examples, client) for job in jobs]
        columns = read_batch(self.task, list(chain.from_iterable(used)))
        orders: list[npt.NDArray[np.int64]] = []
        batches: list[int] = []
        rates: list[float] = []
        start = 0
        for examples, rng in zip(used, generators([job.seed for job in jobs]), strict=True):
            count = len(examples)
            orders += [rows + start for rows in training_orders(count, client, rng)]
            full, rest = divmod(count, client.batch_size)
            of_epoch = [client.batch_size] * full + [rest] * (rest > 0)
            steps = client.epochs * len(of_epoch)
            batches += of_epoch * client.epochs
            rates += [client.rate_at(step, steps) for step in range(steps)]
            start += count
        steps_made = ClientSteps(
            np.array([client.steps(len(examples)) for examples in used]),
            np.array(batches),
            np.concatenate(orders),
            np.array(rates, FLOAT32),
        )
        return self._compiled.runtime.train(
            [job.model for job in jobs], columns, steps_made, updates
        )

    def _train_by_steps(
        self, jobs: Sequence[ClientJob], updates: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float32]:
        """Write the clients' updates; their losses."""
        losses: list[Tensor] = []
        trained = self._trained.numpy()
        for row, job, of_client in zip(updates, jobs, self._batches(jobs), strict=True):
            np.copyto(trained, job.model)
            self._steps(of_client, losses)
            np.subtract(trained, job.model, out=row)
        return torch.stack(losses).numpy()

    def _steps(self, batches: Sequence[Batch], losses: list[Tensor]) -> None:
        """Train on these batches and note their losses."""
        optimizer = TorchClientOptimizer(self.task.client, [self._trained], len(batches))
        for batch in batches:
            gradient = self._compiled if self._is_compiled_for(batch) else self._eager
            loss, step = gradient(self._trained, batch)
            optimizer.step_without_graph([step])
            losses.append(loss)

    def _is_compiled_for(self, batch: Batch) -> bool:
        if callable(self.task.batch):
            return self._compiled.takes(batch)
        return bool(batch[0].shape[0] >= self._compiled.library.least_examples)

    def _eager(self, parameters: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        self._set(parameters.numpy())
        self._module.train()
        values = self._parts.shared_parameters
        with torch.enable_grad():
            loss = batch_loss(self.task, self._module, batch, len(batch[0]))
            gradients = torch.autograd.grad(loss, values, allow_unused=True)
        return loss.detach(), flat_gradient(values, gradients)

    def _batches(self, jobs: Sequence[ClientJob]) -> Iterator[list[Batch]]:
        """The batches of each client, in the order of its steps."""
        client = self.task.client
        used = [used_examples(job.examples, client) for job in jobs]
        if callable(self.task.batch):
            for examples, job in zip(used, jobs, strict=True):
                with seeded(job.seed):  # a function that makes batches may draw numbers
                    chosen = training_batches(examples, client, job.seed)
                    batches = [read_batch(self.task, some) for some in chosen]
                yield batches
            return
        columns = read_batch(self.task, list(chain.from_iterable(used)))
        unit = max(map(_rows_per_line, columns))
        # Rows of the columns; the gaps between batches repeat row 0.
        places: list[npt.NDArray[np.int64]] = []
        sizes: list[int] = []  # of a batch and of the gap after it, in turn
        gaps = np.zeros(unit, np.int64)
        start = 0
        for examples, rng in zip(used, generators([job.seed for job in jobs]), strict=True):
            for rows in training_orders(len(examples), client, rng):
                rows += start
                for first in range(0, len(rows), client.batch_size):
                    batch = rows[first : first + client.batch_size]
                    gap = -len(batch) % unit
                    places += (batch, gaps[:gap])
                    sizes += (len(batch), gap)
            start += len(examples)
        index = torch.from_numpy(np.concatenate(places))
        ordered = (column.index_select(0, index) for column in columns)
        parts = zip(*(column.split(sizes)[::2] for column in ordered), strict=True)
        for examples in used:
            yield [next(parts) for _ in range(client.steps(len(examples)))]


def _read_together(jobs: Sequence[ClientJob]) -> Iterator[tuple[slice, Sequence[ClientJob]]]:
    """Neighbours whose examples have about `_READ_TOGETHER` bytes, and their places."""
    first = size = 0
    for number, job in enumerate(jobs, 1):
        size += len(job.examples) * len(job.examples[0]) if job.examples else 0
        if size >= _READ_TOGETHER or number == len(jobs):
            yield slice(first, number), jobs[first:number]
            first, size = number, 0


def _rows_per_line(column: Tensor) -> int:
    """The least number of rows that ends at a multiple of `_LINE` bytes."""
    return _LINE // gcd(_LINE, column.element_size() * column[0].numel())


@contextmanager
def _without_collector() -> Iterator[None]:
    """Python's collector of cycles looks at all objects of torch every few hundred batches, which
    takes a large share of the time of small models. Training makes no cycles.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@cache
def _keep_freed_memory() -> None:
    """Without this, glibc gives the memory of large tensors back to the kernel after every step,
    and gets it again page by page, at every step.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(_TRIM_THRESHOLD, _MOST)
        mallopt(_MMAP_THRESHOLD, 1 << 30)
