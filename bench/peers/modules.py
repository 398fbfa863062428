"""The torch module of a data file, for the systems that train with PyTorch."""

from __future__ import annotations

import torch
import torch_models
from common import BATCH, Array, Data
from torch import Tensor, nn


def first_module(data: Data) -> nn.Module:
    module = torch_models.make(data.model, data.form)
    set_parameters(module, data.trained | data.frozen)
    return module


def set_parameters(module: nn.Module, values: dict[str, Array]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            module.get_parameter(name).copy_(torch.from_numpy(value))


def trained(module: nn.Module) -> dict[str, Array]:
    found = ((name, value) for name, value in module.named_parameters() if value.requires_grad)
    return {name: value.detach().numpy() for name, value in found}


def frozen(module: nn.Module) -> dict[str, Array]:
    found = ((name, value) for name, value in module.named_parameters() if not value.requires_grad)
    return {name: value.detach().numpy() for name, value in found}


def tensors(data: Data) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of every client, as views on two tensors."""
    inputs, targets = torch.from_numpy(data.inputs), torch.from_numpy(data.targets)
    return [(inputs[rows], targets[rows]) for rows in map(data.slice, range(data.clients))]


class PlainLoop:
    """A tuned loop: one module and one optimizer for all clients, views instead of loaders, one
    fused call for a step.
    """

    def __init__(self, data: Data) -> None:
        torch.set_num_threads(1)
        self.module = first_module(data)
        self.learnt: list[Tensor] = [
            value for value in self.module.parameters() if value.requires_grad
        ]
        self._optimizer = torch.optim.SGD(self.learnt, lr=data.rate, foreach=True)

    def train(self, inputs: Tensor, targets: Tensor) -> None:
        some = inputs.split(BATCH), targets.split(BATCH)  # type: ignore[no-untyped-call]
        batches = zip(*some, strict=True)
        for some_inputs, some_targets in batches:
            self._optimizer.zero_grad()
            loss = torch_models.loss(self.module, some_inputs, some_targets)
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
