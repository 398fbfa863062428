"""Trainers of small perceptrons: pure functions of start models, features and labels.

The model is that of torch.nn.Sequential(Linear, ReLU, Linear, ReLU, ..., Linear) with the softmax
cross-entropy, averaged over a batch; its vector holds each layer's weight (by outputs) and bias.

`CompiledPerceptron` (needs `papaya-fl[numba]`) treats each client on its own: the same bits in any
batch and on any number of threads. `StackedPerceptron` is numpy's: clients with about as much data
are multiplied together, so its last bits depend on who shares a stack; they agree within rounding.

Refused: momentum, labels of no class, features of another width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from papaya.config.checks import require
from papaya.errors import InvariantError
from papaya.learning.definition import ClientSGD
from papaya.learning.parameters import FLOAT32, Manifest, Vector
from papaya.sim.draws import Floats, Ints
from papaya.study.workloads.base import Matrix
from papaya.study.workloads.lstm_trainers import in_threads, refuse_momentum

PerceptronLabels = npt.NDArray[np.int32]
Stack = npt.NDArray[np.float32]

_BATCH: Final = 64  # examples that are judged together
_STACKED: Final = 64  # clients
_MAX_SIZE: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class PerceptronExamples:
    """Client i has the rows offsets[i] to offsets[i + 1], in the order of training."""

    features: Matrix
    labels: PerceptronLabels
    offsets: Ints


@dataclass(frozen=True, slots=True)
class PerceptronSizes:
    """Features, hidden layers, classes. The default has 2,410 parameters."""

    layers: tuple[int, ...] = (64, 32, 10)

    def __post_init__(self) -> None:
        fits = len(self.layers) >= 2 and all(1 <= size <= _MAX_SIZE for size in self.layers)
        problem = f"must be two sizes or more, each from 1 to {_MAX_SIZE}"
        require(fits, "layers", self.layers, problem, "use (64, 32, 10)")

    @property
    def manifest(self) -> Manifest:
        tensors: list[tuple[str, tuple[int, ...]]] = []
        for index, (inward, outward) in enumerate(pairwise(self.layers)):
            tensors.append((f"{2 * index}.weight", (outward, inward)))
            tensors.append((f"{2 * index}.bias", (outward,)))
        return Manifest(tuple(tensors))


class PerceptronTrainer(Protocol):
    name: str

    def train(
        self, models: Sequence[Vector], start: Ints, examples: PerceptronExamples, sgd: ClientSGD
    ) -> Matrix:
        """Row i: what client i changed, from models[start[i]]."""

    def losses(self, parameters: Vector, features: Matrix, labels: PerceptronLabels) -> Floats:
        """The loss of each example."""


def fastest(sizes: PerceptronSizes, threads: int = 1) -> PerceptronTrainer:
    """The compiled trainer, or numpy's where numba is not installed."""
    try:
        return CompiledPerceptron(sizes, threads)
    except ImportError:
        return StackedPerceptron(sizes)


def _check(sizes: PerceptronSizes, features: Matrix, labels: PerceptronLabels) -> None:
    if features.shape != (len(labels), sizes.layers[0]) or features.dtype != FLOAT32:
        raise InvariantError(f"features of {features.shape} {features.dtype} for {sizes}")
    if labels.size and not 0 <= labels.min() <= labels.max() < sizes.layers[-1]:
        raise InvariantError(f"labels {labels.min()} to {labels.max()} of {sizes.layers[-1]}")


class CompiledPerceptron:
    """The kernel of _kernels_perceptron.py. ImportError without numba."""

    name = "numba"

    def __init__(self, sizes: PerceptronSizes, threads: int = 1) -> None:
        from papaya.study.workloads import _kernels_perceptron

        kernel: Any = _kernels_perceptron
        self._sizes = sizes
        self._threads = threads
        self._kernel = kernel
        widths = [-(-size // kernel.WIDTH) * kernel.WIDTH for size in sizes.layers]
        matrices = [a * b for a, b in pairwise(widths)]
        ends = np.cumsum([0, *matrices, *matrices, *widths[1:]])
        self._length = int(ends[-1])
        self._parameters = sizes.manifest.length
        self._layers = np.zeros(len(matrices), kernel.LAYER)
        columns = (
            *(sizes.layers[:-1], sizes.layers[1:]),
            *(widths[:-1], widths[1:]),
            *np.split(ends[:-1], 3),
            *(np.cumsum([0, *widths[:-2]]), np.cumsum(widths[:-1])),
        )
        for name, column in zip(kernel.LAYER.names, columns, strict=True):
            self._layers[name] = column

    def _packed(self, models: Sequence[Vector]) -> Vector:
        """One after the other."""
        packed = np.zeros((len(models), self._length), FLOAT32)
        packed[:, self._layers["bias"][-1] :] = self._kernel.NO_ODDS  # the padding keeps it
        flat = packed.reshape(-1)
        for index, model in enumerate(models):
            if model.shape != (self._parameters,):
                raise InvariantError(f"a model of {model.shape} for {self._sizes}")
            plain = np.ascontiguousarray(model, FLOAT32)  # the kernel reads memory as it is
            self._kernel.pack(self._layers, plain, flat, index * self._length)
        return flat

    def train(
        self, models: Sequence[Vector], start: Ints, examples: PerceptronExamples, sgd: ClientSGD
    ) -> Matrix:
        refuse_momentum(sgd)
        _check(self._sizes, examples.features, examples.labels)
        updates = np.empty((len(start), self._parameters), FLOAT32)
        packed = self._packed(models)
        features = np.ascontiguousarray(examples.features).reshape(-1)
        rate = np.float32(sgd.rate)

        def work(first: int, last: int) -> None:
            self._kernel.train(
                self._layers, self._length, packed, start[first:last], features, examples.labels,
                examples.offsets[first : last + 1], rate, sgd.epochs, sgd.batch_size,
                updates[first:last].reshape(-1),
            )  # fmt: skip

        in_threads(self._threads, examples.offsets, work)
        return updates

    def losses(self, parameters: Vector, features: Matrix, labels: PerceptronLabels) -> Floats:
        _check(self._sizes, features, labels)
        packed = self._packed([parameters])
        flat = np.ascontiguousarray(features).reshape(-1)
        found: Floats = self._kernel.losses(self._layers, packed, flat, labels, _BATCH)
        return found


class StackedPerceptron:
    """Numpy over stacked clients, with the backward pass written out."""

    name = "numpy"

    def __init__(self, sizes: PerceptronSizes) -> None:
        self._sizes = sizes
        self._length = sizes.manifest.length

    def train(
        self, models: Sequence[Vector], start: Ints, examples: PerceptronExamples, sgd: ClientSGD
    ) -> Matrix:
        refuse_momentum(sgd)
        _check(self._sizes, examples.features, examples.labels)
        updates = np.empty((len(start), self._length), FLOAT32)
        together = np.stack(models) if models else updates
        order = np.argsort(np.diff(examples.offsets), kind="stable")
        for first in range(0, len(order), _STACKED):
            rows = order[first : first + _STACKED]
            trained = together[start[rows]]
            for _ in range(sgd.epochs):
                self._epoch(trained, rows, examples, sgd)
            updates[rows] = trained - together[start[rows]]
        return updates

    def _epoch(
        self, trained: Matrix, rows: Ints, examples: PerceptronExamples, sgd: ClientSGD
    ) -> None:
        """Clients are in the order of their volumes: those with more batches are the last ones."""
        begin, end = examples.offsets[rows], examples.offsets[rows + 1]
        for done in range(0, int((end - begin).max(initial=0)), sgd.batch_size):
            left = np.clip(end - begin - done, 0, sgd.batch_size)
            active = slice(int(np.count_nonzero(left == 0)), None)
            counts = left[active]
            place = np.arange(counts.max())
            index = np.minimum((begin[active] + done)[:, None] + place, (end[active] - 1)[:, None])
            weight = np.where(place < counts[:, None], 1 / counts[:, None], 0).astype(FLOAT32)
            self._step(
                trained[active],
                examples.features[index],
                examples.labels[index],
                weight,
                FLOAT32.type(sgd.rate),
            )

    def _step(
        self,
        models: Matrix,
        features: Stack,
        labels: PerceptronLabels,
        weight: Matrix,
        rate: np.float32,
    ) -> None:
        """One step of SGD of every model of the stack, in place."""
        parts = self._parts(models)
        values = self._values(parts, features)
        change = _odds(values[-1])
        np.put_along_axis(
            change,
            labels[..., None].astype(np.int64),
            np.take_along_axis(change, labels[..., None].astype(np.int64), 2) - 1,
            2,
        )
        change *= weight[..., None]
        for index in range(len(parts) - 1, -1, -1):
            matrix, bias = parts[index]
            lower = np.matmul(change, matrix) * (values[index] > 0) if index else change
            matrix -= rate * np.matmul(change.transpose(0, 2, 1), values[index])
            bias -= rate * change.sum(axis=1)
            change = lower

    def _parts(self, models: Matrix) -> list[tuple[Stack, Matrix]]:
        """Views of each layer's matrices and biases."""
        parts, at = [], 0
        for inward, outward in pairwise(self._sizes.layers):
            end = at + inward * outward
            matrix = models[:, at:end].reshape(len(models), outward, inward)
            parts.append((matrix, models[:, end : end + outward]))
            at = end + outward
        return parts

    def _values(self, parts: list[tuple[Stack, Matrix]], features: Stack) -> list[Stack]:
        values = [features]
        for matrix, bias in parts:
            below = values[-1] if len(values) == 1 else np.maximum(values[-1], 0, out=values[-1])
            values.append(np.matmul(below, matrix.transpose(0, 2, 1)) + bias[:, None])
        return values

    def losses(self, parameters: Vector, features: Matrix, labels: PerceptronLabels) -> Floats:
        _check(self._sizes, features, labels)
        scores = self._values(self._parts(parameters[None]), features[None])[-1][0]
        top = scores.max(axis=1, keepdims=True).astype(np.float64)
        wanted = np.take_along_axis(scores, labels[:, None].astype(np.int64), 1) - top
        found: Floats = np.log(np.exp(scores - top).sum(axis=1)) - wanted[:, 0]
        return found


def _odds(scores: Stack) -> Stack:
    odds: Stack = np.exp(scores - scores.max(axis=2, keepdims=True))
    odds /= odds.sum(axis=2, keepdims=True)
    return odds
