"""The six models, as a user of PyTorch writes them. Papaya's task file is made of this text.

`FORM` is drawn from the benchmark's seed (`common.drawn_form`): depth, width and activation of the
perceptron. Imports torch and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES, PIXELS, FEATURES = 10, 28, 64
WORDS, STEPS = 100, 20


class Perceptron(nn.Module):
    """Of a drawn form."""

    def __init__(self, form: dict[str, Any]) -> None:
        super().__init__()
        widths = [FEATURES, *[form["width"]] * form["depth"]]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.output = nn.Linear(widths[-1], CLASSES)
        self.activation = getattr(torch, form["activation"])

    def forward(self, inputs: Tensor) -> Any:
        for layer in self.hidden:
            inputs = self.activation(layer(inputs))
        return self.output(inputs)


class Convolutions(nn.Module):
    """Two convolutions with pooling, then a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.output = nn.Linear(32 * (PIXELS // 4) ** 2, CLASSES)

    def forward(self, inputs: Tensor) -> Any:
        hidden = functional.max_pool2d(torch.relu(self.first(inputs)), 2)
        hidden = functional.max_pool2d(torch.relu(self.second(hidden)), 2)
        return self.output(hidden.flatten(1))


class Block(nn.Module):
    """Causal attention and a perceptron, each after a normalisation."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.queries = nn.Linear(width, 3 * width)
        self.mixed = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, inputs: Tensor) -> Any:
        count, steps, width = inputs.shape
        split = self.queries(self.before(inputs)).view(count, steps, 3, self.heads, -1)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        inputs = inputs + self.mixed(found.transpose(1, 2).reshape(count, steps, width))
        return inputs + self.narrow(functional.gelu(self.wide(self.between(inputs))))


class Transformer(nn.Module):
    """A language model of two blocks."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(torch.randn(STEPS, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(2))
        self.after = nn.LayerNorm(width)
        self.output: nn.Module = nn.Linear(width, WORDS)

    def forward(self, inputs: Tensor) -> Any:
        hidden = self.embedding(inputs) + self.places
        for block in self.blocks:
            hidden = block(hidden)
        return self.output(self.after(hidden))


class Adapted(nn.Module):
    """A frozen linear layer with a trained product of two thin matrices (LoRA)."""

    def __init__(self, base: Any, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, inputs: Tensor) -> Any:
        return self.base(inputs) + (inputs @ self.down.T) @ self.up.T


class AdaptedTransformer(Transformer):
    """A frozen base, twice as wide; the projections of attention and the output are adapted."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)  # the base is the same wherever it is made
            super().__init__(width=64)
        self.requires_grad_(False)
        for block in self.blocks:
            block.queries, block.mixed = Adapted(block.queries), Adapted(block.mixed)
        self.output = Adapted(self.output)


class Recurrent(nn.Module):
    """A language model of one recurrent layer."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32)
        self.cells = kind(32, 64, batch_first=True)
        self.output = nn.Linear(64, WORDS)

    def forward(self, inputs: Tensor) -> Any:
        return self.output(self.cells(self.embedding(inputs))[0])


def make(name: str, form: dict[str, Any]) -> nn.Module:
    makers: dict[str, Callable[[], nn.Module]] = {
        "perceptron": lambda: Perceptron(form),
        "cnn": Convolutions,
        "transformer": Transformer,
        "lora": AdaptedTransformer,
        "gru": lambda: Recurrent(nn.GRU),
        "lstm": lambda: Recurrent(nn.LSTM),
    }
    return makers[name]()


def loss(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(module(inputs).flatten(0, -2), targets.flatten())
