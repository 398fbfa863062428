"""Papaya's own trainers and its own aggregation: what `papaya.study.replay` does for a round.

The trainers are those of `papaya.study.workloads`, on one thread; weighted sum and step are the
aggregator's. The updates of a cohort are checked together for NaN and infinity, where a server
admits each by itself: the peers check nothing. Runs in the virtual environment of Papaya.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import ClassVar, Protocol

import numpy as np
from common import BATCH, SHAPES, Array, Data, serve

from papaya.config import OptimizerConfig
from papaya.learning.definition import ClientSGD
from papaya.learning.kernels import compiled
from papaya.learning.parameters import Vector
from papaya.learning.server_optimizer import server_optimizer
from papaya.learning.weighting import Admitted, Contribution, WeightedSum
from papaya.study.workloads import lstm_trainers as lstm
from papaya.study.workloads import perceptron_trainers as perceptron

# PyTorch's layout, which Papaya keeps, has a row for each output; `common` has a column.
_TURNED = ("hidden", "output", "input", "recurrent")


class Trainer(Protocol):
    def updates(self, model: Vector, cohort: range, sgd: ClientSGD) -> Array:
        """A row for each client of the cohort."""


class Vectors:
    """The perceptron."""

    def __init__(self, data: Data) -> None:
        self._data = data
        self._trainer = perceptron.fastest(perceptron.PerceptronSizes())

    def updates(self, model: Vector, cohort: range, sgd: ClientSGD) -> Array:
        rows, offsets = _rows(self._data, cohort)
        examples = perceptron.PerceptronExamples(
            self._data.inputs[rows], self._data.targets[rows], offsets
        )
        return self._trainer.train([model], np.zeros(len(cohort), np.int64), examples, sgd)


class Words:
    """The LSTM: sequences of 21 words, of which inputs and targets are 20 each."""

    def __init__(self, data: Data) -> None:
        words = np.concatenate([data.inputs, data.targets[:, -1:]], axis=1)
        self._tokens = np.ascontiguousarray(words, np.int32)
        self._data = data
        self._trainer = lstm.fastest(lstm.LstmSizes())

    def updates(self, model: Vector, cohort: range, sgd: ClientSGD) -> Array:
        rows, offsets = _rows(self._data, cohort)
        start = np.zeros(len(cohort), np.int64)
        return self._trainer.train([model], start, self._tokens[rows], offsets, sgd)


def _rows(data: Data, cohort: range) -> tuple[slice, Array]:
    """The examples of a cohort, and where each of its clients begins in them."""
    offsets = data.offsets[cohort.start : cohort.stop + 1]
    return slice(int(offsets[0]), int(offsets[-1])), offsets - offsets[0]


_TRAINERS: dict[str, type[Vectors | Words]] = {"perceptron": Vectors, "lstm": Words}


class Papaya:
    """Federated averaging with the server's own arithmetic."""

    versions: ClassVar[dict[str, str]] = {
        name: version(name) for name in ("papaya", "numpy", "numba")
    }

    def __init__(self, data: Data) -> None:
        self._shapes = SHAPES[data.model]
        self._examples = np.diff(data.offsets).tolist()
        self._trainer: Trainer = _TRAINERS[data.model](data)
        self._sgd = ClientSGD(rate=data.rate, batch_size=BATCH)
        self._kernel = compiled()
        self._optimizer = server_optimizer(OptimizerConfig(kind="fedavg"))
        pieces = [_turned(name, data.first_model[name]).ravel() for name in self._shapes]
        self._model: Vector = np.concatenate(pieces)
        self._state = self._optimizer.initial_state(len(self._model))

    def train(self, cohort: range) -> None:
        updates = self._trainer.updates(self._model, cohort, self._sgd)
        if not np.isfinite(np.vecdot(updates, updates)).all():
            raise FloatingPointError("an update is not finite")
        members = [
            Contribution(Admitted([row], 1.0), self._examples[client], 0)
            for client, row in zip(cohort, updates, strict=True)
        ]
        total = WeightedSum.zero(len(self._model))
        total.add_all(members, self._kernel)
        self._model, self._state = self._optimizer.step(self._model, total.mean(), self._state)

    def parameters(self) -> dict[str, Array]:
        found, at = {}, 0
        for name, shape in self._shapes.items():
            end = at + int(np.prod(shape))
            piece = self._model[at:end]
            found[name] = piece.reshape(shape[::-1]).T if name in _TURNED else piece.reshape(shape)
            at = end
        return found


def _turned(name: str, value: Array) -> Array:
    return value.T if name in _TURNED else value


if __name__ == "__main__":
    serve(Papaya)
