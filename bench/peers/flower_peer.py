"""Flower without its engine: NumPyClient and the strategy FedAvg in one process, PyTorch.

Flower's own simulation gives every client to a Ray worker and its model through an object store;
that is several times slower on one core. So the server's loop is written out here: each client is
asked through Flower's own `Client.fit` (which decodes and encodes the model, as a client of Flower
must), and `FedAvg.aggregate_fit` combines the answers. All clients share a module and an optimizer.
"""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Any, ClassVar

import torch
from common import Array, Data, serve
from flwr.client import NumPyClient
from flwr.common import FitIns, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.strategy import FedAvg
from modules import PlainLoop, tensors, trained
from torch import Tensor

logging.getLogger("flwr").setLevel(logging.ERROR)


class Device(NumPyClient):
    """One client: its data, and the module that all clients of the process use in turn."""

    def __init__(self, trainer: Trainer, inputs: Tensor, targets: Tensor) -> None:
        self._trainer = trainer
        self._inputs, self._targets = inputs, targets

    def fit(
        self, parameters: list[Array], config: dict[str, Any]
    ) -> tuple[list[Array], int, dict[str, Any]]:
        self._trainer.load(parameters)
        self._trainer.train(self._inputs, self._targets)
        return self._trainer.arrays(), len(self._inputs), {}


class Trainer(PlainLoop):
    """The tuned loop, which takes and gives arrays."""

    def load(self, arrays: list[Array]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.learnt, arrays, strict=True):
                parameter.copy_(torch.from_numpy(value))

    def arrays(self) -> list[Array]:
        return [parameter.detach().numpy() for parameter in self.learnt]


class Flower:
    """The server's loop."""

    versions: ClassVar[dict[str, str]] = {name: version(name) for name in ("flwr", "torch")}

    def __init__(self, data: Data) -> None:
        self._trainer = Trainer(data)
        self._clients = [Device(self._trainer, *pair).to_client() for pair in tensors(data)]
        self._strategy = FedAvg(inplace=True)
        self._parameters = ndarrays_to_parameters(self._trainer.arrays())
        self._round = 0

    def train(self, cohort: range) -> None:
        self._round += 1
        asked = FitIns(self._parameters, {})
        results: list[Any] = [(None, self._clients[client].fit(asked)) for client in cohort]
        parameters, _ = self._strategy.aggregate_fit(self._round, results, [])
        self._parameters = parameters

    def parameters(self) -> dict[str, Array]:
        self._trainer.load(parameters_to_ndarrays(self._parameters))
        return trained(self._trainer.module)


if __name__ == "__main__":
    serve(Flower)
