"""Papaya's own trainer and aggregation: what `papaya.study.replay` does for a round.

The trainer is that of `papaya.study.workloads`, on one thread; weighted sum and step are the
aggregator's. The updates of a cohort are checked together for NaN and infinity, where a server
admits each by itself: the peers check nothing. Runs in the virtual environment of Papaya.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import ClassVar

import numpy as np
from common import BATCH, RATE, SHAPES, Array, Data, serve

from papaya.config import OptimizerConfig
from papaya.learning.definition import ClientSGD
from papaya.learning.kernels import compiled
from papaya.learning.parameters import Vector
from papaya.learning.server_optimizer import server_optimizer
from papaya.learning.weighting import Admitted, Contribution, WeightedSum
from papaya.study.workloads.lstm_trainers import LstmSizes, fastest

# PyTorch's layout, which Papaya keeps, has a row for each output; `common` has a column.
_TURNED = ("output", "input", "recurrent")


class Papaya:
    """Federated averaging with the server's own arithmetic."""

    versions: ClassVar[dict[str, str]] = {
        name: version(name) for name in ("papaya-fl", "numpy", "numba")
    }

    def __init__(self, data: Data) -> None:
        # A sequence of 21 words is 20 inputs and 20 targets.
        words = np.concatenate([data.inputs, data.targets[:, -1:]], axis=1)
        self._tokens = np.ascontiguousarray(words, np.int32)
        self._offsets = data.offsets
        self._examples = np.diff(data.offsets).tolist()
        self._trainer = fastest(LstmSizes())
        self._sgd = ClientSGD(rate=RATE, batch_size=BATCH)
        self._kernel = compiled()
        self._optimizer = server_optimizer(OptimizerConfig(kind="fedavg"))
        pieces = [_turned(name, data.first_model[name]).ravel() for name in SHAPES]
        self._model: Vector = np.concatenate(pieces)
        self._state = self._optimizer.initial_state(len(self._model))

    def train(self, cohort: range) -> None:
        offsets = self._offsets[cohort.start : cohort.stop + 1]
        start = np.zeros(len(cohort), np.int64)
        tokens = self._tokens[offsets[0] : offsets[-1]]
        updates = self._trainer.train([self._model], start, tokens, offsets - offsets[0], self._sgd)
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
        for name, shape in SHAPES.items():
            end = at + int(np.prod(shape))
            piece = self._model[at:end]
            found[name] = piece.reshape(shape[::-1]).T if name in _TURNED else piece.reshape(shape)
            at = end
        return found


def _turned(name: str, value: Array) -> Array:
    return value.T if name in _TURNED else value


if __name__ == "__main__":
    serve(Papaya)
