"""Papaya's own trainers and its own aggregation, as `papaya.sim.replay` uses them for a round.

The trainers are those of `papaya.sim.workloads`, on one thread; admission, weighted sum and step
are the aggregator's. Runs in the virtual environment of Papaya.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, Protocol

import numpy as np
from common import BATCH, SHAPES, Array, Data, serve

from papaya.config import OptimizerConfig
from papaya.learning.definition import ClientSGD
from papaya.learning.kernels import compiled
from papaya.learning.parameters import Vector
from papaya.learning.server_optimizer import server_optimizer
from papaya.learning.weighting import Contribution, WeightedSum, admit

# PyTorch's layout, which Papaya keeps, has a row for each output; `common` has a column.
_TURNED = ("hidden", "output", "input", "recurrent")


class Trainer(Protocol):
    name: str

    def updates(self, model: Vector, cohort: range, sgd: ClientSGD) -> Array:
        """A row for each client of the cohort."""


class Words:
    """The LSTM: sequences of 21 words, of which inputs and targets are 20 each."""

    def __init__(self, data: Data) -> None:
        from papaya.sim.workloads.lstm_trainers import LstmSizes, fastest

        words = np.concatenate([data.inputs, data.targets[:, -1:]], axis=1)
        self._tokens = np.ascontiguousarray(words, np.int32)
        self._offsets = data.offsets
        self._trainer = fastest(LstmSizes())
        self.name = self._trainer.name

    def updates(self, model: Vector, cohort: range, sgd: ClientSGD) -> Array:
        offsets = self._offsets[cohort.start : cohort.stop + 1]
        start = np.zeros(len(cohort), np.int64)
        return self._trainer.train([model], start, self._tokens, offsets, sgd)


_TRAINERS: dict[str, Any] = {"lstm": Words}


class Papaya:
    """Federated averaging with the server's own arithmetic."""

    versions = {name: version(name) for name in ("papaya", "numpy", "numba")}

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
        length = len(self._model)
        updates = self._trainer.updates(self._model, cohort, self._sgd)
        members = [
            Contribution(admit([row.data], length), self._examples[client], staleness=0)
            for client, row in zip(cohort, updates, strict=True)
        ]
        total = WeightedSum.zero(length)
        total.add_all(members, self._kernel)
        self._model, self._state = self._optimizer.step(self._model, total.mean(), self._state)

    def parameters(self) -> dict[str, Array]:
        found, at = {}, 0
        for name, shape in self._shapes.items():
            end = at + int(np.prod(shape))
            piece = self._model[at:end]
            found[name] = (
                piece.reshape(shape[::-1]).T if name in _TURNED else piece.reshape(shape)
            )
            at = end
        return found


def _turned(name: str, value: Array) -> Array:
    return value.T if name in _TURNED else value


if __name__ == "__main__":
    serve(Papaya)
