"""Trainers of the LSTM language model: pure functions of start models and sequences.

The model is that of

    torch.nn.Embedding(vocabulary, embedding), torch.nn.LSTM(embedding, hidden), torch.nn.Linear

and its vector holds, in this order and each by rows: embedding.weight, lstm.weight_ih_l0,
lstm.weight_hh_l0, lstm.bias_ih_l0, lstm.bias_hh_l0, out.weight, out.bias. Gates are in PyTorch's
order i, f, g, o; both biases are trained. A sequence of steps + 1 words is that many predictions of
the next word, from a state of zeros; the loss is the mean over all words of a batch.

`CompiledLstm` (needs `papaya-fl[numba]`) treats each client alone: the same bits in any batch and
on any number of threads. `TorchLstm` is the fallback, and agrees within rounding.

Refused: momentum, a word outside the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from papaya.config.checks import require
from papaya.errors import InvariantError, OperatorError
from papaya.learning.definition import ClientSGD
from papaya.learning.parameters import FLOAT32, Manifest, Vector
from papaya.sim.draws import Floats, Ints
from papaya.study.workloads.base import Matrix, require_plain_sgd

Tokens = npt.NDArray[np.int32]

_BATCH: Final = 32  # sequences that are judged together
_MAX_SIZE: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class LstmSizes:
    """The default has 34,788 parameters."""

    vocabulary: int = 100
    embedding: int = 32
    hidden: int = 64
    steps: int = 20

    def __post_init__(self) -> None:
        for field in ("vocabulary", "embedding", "hidden", "steps"):
            value = getattr(self, field)
            fits = 1 <= value <= _MAX_SIZE
            require(fits, field, value, f"must be from 1 to {_MAX_SIZE}", "use the default")

    @property
    def manifest(self) -> Manifest:
        gates = 4 * self.hidden
        return Manifest(
            (
                ("embedding.weight", (self.vocabulary, self.embedding)),
                ("lstm.weight_ih_l0", (gates, self.embedding)),
                ("lstm.weight_hh_l0", (gates, self.hidden)),
                ("lstm.bias_ih_l0", (gates,)),
                ("lstm.bias_hh_l0", (gates,)),
                ("out.weight", (self.vocabulary, self.hidden)),
                ("out.bias", (self.vocabulary,)),
            )
        )


class LstmTrainer(Protocol):
    """Client i has the sequences tokens[offsets[i] : offsets[i + 1]], in the order of training."""

    name: str

    def train(
        self,
        models: Sequence[Vector],
        start: Ints,
        tokens: Tokens,
        offsets: Ints,
        sgd: ClientSGD,
    ) -> Matrix:
        """Row i: what client i changed, from models[start[i]]."""

    def losses(self, parameters: Vector, tokens: Tokens) -> Floats:
        """The mean loss of each sequence."""


def fastest(sizes: LstmSizes, threads: int = 1) -> LstmTrainer:
    """The compiled trainer, or torch's where numba is not installed."""
    try:
        return CompiledLstm(sizes, threads)
    except ImportError:
        pass
    try:
        return TorchLstm(sizes)
    except ImportError as error:
        hint = "pip install 'papaya-fl[numba]'"
        raise OperatorError("the LSTM needs numba, or torch", hint=hint) from error


def _check(sizes: LstmSizes, tokens: Tokens) -> None:
    if tokens.ndim != 2 or tokens.shape[1] != sizes.steps + 1 or tokens.dtype != np.int32:
        raise InvariantError(f"sequences of {tokens.shape} {tokens.dtype}, not of {sizes}")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < sizes.vocabulary:
        raise InvariantError(f"words {tokens.min()} to {tokens.max()} of {sizes.vocabulary}")


class CompiledLstm:
    """The loops of compiled_lstm.py. ImportError without numba."""

    name = "numba"

    def __init__(self, sizes: LstmSizes, threads: int = 1) -> None:
        from papaya.study.workloads import compiled_lstm

        self._loops: Any = compiled_lstm
        self._sizes = sizes
        self._shape = (sizes.vocabulary, sizes.embedding, sizes.hidden)
        self._length = sizes.manifest.length
        self._threads = threads

    def train(
        self,
        models: Sequence[Vector],
        start: Ints,
        tokens: Tokens,
        offsets: Ints,
        sgd: ClientSGD,
    ) -> Matrix:
        require_plain_sgd(sgd)
        _check(self._sizes, tokens)
        updates = np.empty((len(start), self._length), FLOAT32)
        stacked = self._stacked(models)
        rate = np.float32(sgd.rate)

        def work(first: int, last: int) -> None:
            self._loops.train(
                *self._shape, stacked, start[first:last], tokens, offsets[first : last + 1],
                rate, sgd.epochs, sgd.batch_size, updates[first:last],
            )  # fmt: skip

        _in_threads(self._threads, offsets, work)
        return updates

    def losses(self, parameters: Vector, tokens: Tokens) -> Floats:
        _check(self._sizes, tokens)
        found = np.zeros(len(tokens))
        model = self._stacked([parameters])[0]
        self._loops.losses(*self._shape, model, tokens, _BATCH, found)
        return found / self._sizes.steps

    def _stacked(self, models: Sequence[Vector]) -> Matrix:
        """Contiguous float32, and long enough: the loops do not check their indices."""
        stacked = np.empty((len(models), self._length), FLOAT32)
        for row, model in zip(stacked, models, strict=True):
            if model.shape != row.shape:
                raise InvariantError(f"a model of {model.shape}, not of {row.shape}")
            row[:] = model
        return stacked


def _in_threads(threads: int, offsets: Ints, work: Any) -> None:
    """work(first, last) on shares of the clients with about as many examples each."""
    clients = len(offsets) - 1
    edges = np.searchsorted(offsets, offsets[-1] * np.arange(1, threads) / threads)
    cuts = np.unique(np.concatenate([[0], edges, [clients]])).tolist()
    shares = list(pairwise(cuts))
    if len(shares) == 1:
        work(*shares[0])
    elif shares:
        with ThreadPoolExecutor(len(shares)) as pool:
            list(pool.map(work, *zip(*shares, strict=True)))


class TorchLstm:
    """A plain loop over clients and batches, with one module for all. ImportError without torch."""

    name = "torch"

    def __init__(self, sizes: LstmSizes) -> None:
        import torch

        torch.set_num_threads(1)
        self._sizes = sizes
        self._torch: Any = torch
        self._embedding = torch.nn.Embedding(sizes.vocabulary, sizes.embedding)
        self._lstm = torch.nn.LSTM(sizes.embedding, sizes.hidden, batch_first=True)
        self._out = torch.nn.Linear(sizes.hidden, sizes.vocabulary)
        parts = (self._embedding, self._lstm, self._out)
        self._parameters = [value for part in parts for value in part.parameters()]
        self._lengths = [value.numel() for value in self._parameters]

    def train(
        self,
        models: Sequence[Vector],
        start: Ints,
        tokens: Tokens,
        offsets: Ints,
        sgd: ClientSGD,
    ) -> Matrix:
        require_plain_sgd(sgd)
        _check(self._sizes, tokens)
        updates = np.empty((len(start), sum(self._lengths)), FLOAT32)
        words = self._torch.from_numpy(tokens.astype(np.int64))
        for client, (first, last) in enumerate(pairwise(offsets.tolist())):
            initial = models[start[client]]
            self._set(initial)
            for _ in range(sgd.epochs):
                for batch in words[first:last].split(sgd.batch_size):
                    self._step(batch, sgd.rate)
            trained = [value.detach().numpy().ravel() for value in self._parameters]
            updates[client] = np.concatenate(trained) - initial
        return updates

    def losses(self, parameters: Vector, tokens: Tokens) -> Floats:
        _check(self._sizes, tokens)
        self._set(parameters)
        words = self._torch.from_numpy(tokens.astype(np.int64))
        with self._torch.no_grad():
            parts = [self._loss(batch, "none") for batch in words.split(_BATCH)]
        flat = self._torch.cat(parts).reshape(len(tokens), -1)
        found: Floats = flat.mean(1, dtype=self._torch.float64).numpy()
        return found

    def _set(self, model: Vector) -> None:
        pieces = self._torch.from_numpy(model.copy()).split(self._lengths)
        with self._torch.no_grad():
            for value, piece in zip(self._parameters, pieces, strict=True):
                value.copy_(piece.view_as(value))

    def _loss(self, words: Any, reduction: str = "mean") -> Any:
        states, _ = self._lstm(self._embedding(words[:, :-1]))
        scores = self._out(states).flatten(0, 1)
        return self._torch.nn.functional.cross_entropy(
            scores, words[:, 1:].flatten(), reduction=reduction
        )

    def _step(self, words: Any, rate: float) -> None:
        gradients = self._torch.autograd.grad(self._loss(words), self._parameters)
        with self._torch.no_grad():
            self._torch._foreach_add_(self._parameters, gradients, alpha=-rate)
