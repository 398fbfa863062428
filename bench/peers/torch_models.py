"""The model as PyTorch users write it, for the peers that train with PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from common import CELLS, EMBEDDING, VOCABULARY, Array, Data
from torch import Tensor, nn
from torch.nn import functional


class WordModel(nn.Module):
    """One LSTM layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, EMBEDDING)
        self.lstm = nn.LSTM(EMBEDDING, CELLS, batch_first=True)
        self.output = nn.Linear(CELLS, VOCABULARY)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(inputs))
        return self.output(hidden)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())

    def metrics(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
        """pfl asks for it; it is never called in a round that counts."""
        return {}


# name in `common` -> (name in PyTorch, whether PyTorch keeps the transpose)
_NAMES = {
    "embedding": ("embedding.weight", False),
    "input": ("lstm.weight_ih_l0", True),
    "recurrent": ("lstm.weight_hh_l0", True),
    "input_bias": ("lstm.bias_ih_l0", False),
    "recurrent_bias": ("lstm.bias_hh_l0", False),
    "output": ("output.weight", True),
    "output_bias": ("output.bias", False),
}


def first_module(data: Data) -> nn.Module:
    module = WordModel()
    with torch.no_grad():
        for name, (theirs, turned) in _NAMES.items():
            value = data.first_model[name]
            turned_value = np.ascontiguousarray(value.T if turned else value)
            module.get_parameter(theirs).copy_(torch.from_numpy(turned_value))
    return module


def named(module: nn.Module) -> dict[str, Array]:
    """The parameters of a module under the names of `common`."""
    found = {}
    for name, (theirs, turned) in _NAMES.items():
        value = module.get_parameter(theirs).detach().numpy()
        found[name] = value.T if turned else value
    return found


def tensors(data: Data) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of every client, as views on two tensors."""
    inputs = torch.from_numpy(data.inputs)
    targets = torch.from_numpy(data.targets.astype(np.int64))
    return [(inputs[rows], targets[rows]) for rows in map(data.slice, range(data.clients))]
