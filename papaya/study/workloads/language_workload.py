"""Two models of the synthetic language (language.py), embedding and bigram, and what they share.

Data is drawn while a client trains, from the hash of its device. Each client is trained on its
own, in float32 and in a fixed order: the same bits in any batch. With numba a compiled loop does it
(compiled_language.py), without it numpy; they agree within float tolerance.

Refused: momentum on the client.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from typing import ClassVar, Final, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from papaya.errors import ConfigError
from papaya.learning.definition import ClientSGD
from papaya.learning.parameters import FLOAT32, Vector
from papaya.sim.draws import Floats, HashWords, Ints, splitmix64_words
from papaya.sim.population import DEFAULT, PopulationConfig
from papaya.study.workloads.base import Clients, Matrix, Quality
from papaya.study.workloads.language import GRAIN, Judge, Language

KernelName: TypeAlias = Literal["fastest", "numpy"]

_COIN: Final = 2.0**32
WIDTH: Final = 12
_INITIAL: Final = 0.1
_Real = TypeVar("_Real", np.float32, np.float64)


class LanguageWorkload(ABC):
    """`seed` names the data of the devices; a population of the same volumes judges.

    `kernel`: numpy trains one example at a time in Python, for comparison.
    """

    name: ClassVar[str]

    def __init__(
        self,
        population: PopulationConfig = DEFAULT,
        language: Language | None = None,
        *,
        seed: int = 0,
        kernel: KernelName = "fastest",
    ) -> None:
        self.language = Language() if language is None else language
        self.judge = Judge(self.language, population)
        self._state = np.uint64(self.language.state(seed))
        self._loop = _compiled(self.name) if kernel == "fastest" else None

    @property
    @abstractmethod
    def length(self) -> int:
        """How many parameters."""

    @abstractmethod
    def initial(self, seed: int) -> Vector:
        """Version 0."""

    @abstractmethod
    def logits(self, parameters: Floats) -> Floats:
        """Of every word (column) to follow every word (row)."""

    @abstractmethod
    def _descend(self, model: Vector, words: Ints, following: Ints, rate: float) -> None:
        """One step of SGD on one batch, in place."""

    def train(
        self, models: Sequence[Vector], start: Ints, clients: Clients, sgd: ClientSGD
    ) -> Matrix:
        """Client i trains from models[start[i]] on its own data: row i is its update."""
        if sgd.momentum:
            raise ConfigError.of("client.momentum", sgd.momentum, "is not trained here", "use 0")
        updates = np.empty((len(start), self.length), FLOAT32)
        if not len(start):
            return updates
        hashes, coins = self.hashes(clients.device), self.coins(clients.examples)
        examples = np.minimum(clients.examples, sgd.max_examples)
        if self._loop is None:
            with np.errstate(all="ignore"):  # who gets the update sees that it is not finite
                for row in range(len(start)):
                    model = models[start[row]]
                    drawn = self.examples(int(hashes[row]), int(coins[row]), int(examples[row]))
                    np.subtract(self._trained(model, *drawn, sgd), model, out=updates[row])
        else:
            tables = (self.language.contexts, self.language.following)
            how = (np.float32(sgd.rate), sgd.epochs, sgd.batch_size)
            self._loop(np.stack(models), start, hashes, coins, examples, *tables, *how, updates)
        return updates

    def evaluate(self, parameters: Vector) -> Quality:
        """Exactly, over the whole population."""
        logits = self.logits(parameters.astype(np.float64))
        top = logits.max(axis=1, keepdims=True)
        log_odds = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
        return self.judge.quality(log_odds)

    def hashes(self, device: Ints) -> HashWords:
        """From which the data of these devices are drawn."""
        return splitmix64_words(self._state, device.astype(np.uint64))

    def coins(self, examples: Ints) -> HashWords:
        """Of 2^32 draws, how many are in dialect on a device with so many examples, whatever a
        task takes of them.
        """
        strengths = self.language.strength(examples)
        return np.minimum(strengths * _COIN, _COIN - 1).astype(np.uint64)

    def examples(self, device_hash: int, coin: int, count: int) -> tuple[Ints, Ints]:
        """(word, next word) of one device."""
        words = splitmix64_words(np.uint64(device_hash), np.arange(count, dtype=np.uint64))
        context = self.language.contexts[_bits(words, 0)]
        spoken = ((words >> np.uint64(32)) < np.uint64(coin)).astype(np.int64)
        following = self.language.following[spoken, context, _bits(words, 12)]
        return context.astype(np.int64), following.astype(np.int64)

    def _trained(self, model: Vector, words: Ints, following: Ints, sgd: ClientSGD) -> Vector:
        trained = model.copy()
        for _ in range(sgd.epochs):
            for first in range(0, len(words), sgd.batch_size):
                batch = slice(first, first + sgd.batch_size)
                self._descend(trained, words[batch], following[batch], sgd.rate)
        return trained


def error(logits: Matrix, following: Ints, rate: float) -> Matrix:
    """The gradient of the mean loss by the logits, times the rate."""
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    odds[np.arange(len(following)), following] -= 1
    result: Matrix = odds * FLOAT32.type(rate / len(following))
    return result


def _bits(words: HashWords, shift: int) -> Ints:
    return ((words >> np.uint64(shift)) & np.uint64(GRAIN - 1)).astype(np.int64)


@cache
def _compiled(name: str) -> Callable[..., None] | None:
    """None without numba. The first call compiles, or finds it compiled in numba's cache."""
    try:
        from papaya.study.workloads import compiled_language
    except ImportError:
        return None
    loops: dict[str, Callable[..., None]] = {
        "embedding": compiled_language.embedding,
        "bigram": compiled_language.bigram,
    }
    return loops[name]


class BigramWorkload(LanguageWorkload):
    """A table of logits: each word has a row of odds of the next.

    Convex, and each context is learnt on its own. A client touches few of its parameters.

    Parameters: the table, row by row. Version 0 gives all words the same odds.
    """

    name: ClassVar[str] = "bigram"

    @property
    def length(self) -> int:
        return self.language.vocabulary**2

    def initial(self, seed: int) -> Vector:
        return np.zeros(self.length, FLOAT32)

    def logits(self, parameters: Floats) -> Floats:
        return parameters.reshape(self.language.vocabulary, -1)

    def _descend(self, model: Vector, words: Ints, following: Ints, rate: float) -> None:
        table = model.reshape(self.language.vocabulary, -1)
        np.subtract.at(table, words, error(table[words], following, rate))


class EmbeddingWorkload(LanguageWorkload):
    """A log-bilinear model: the odds of the next word from one embedding.

        logits = outputs @ inputs[word] + bias        inputs, outputs: vocabulary x WIDTH

    Small enough for sweeps over millions of clients, and not convex, so that rates and staleness
    matter as they do for larger models.

    Parameters: inputs, outputs, bias.
    """

    name: ClassVar[str] = "embedding"

    @property
    def length(self) -> int:
        return self.language.vocabulary * (2 * WIDTH + 1)

    def initial(self, seed: int) -> Vector:
        """Small random embeddings, no bias."""
        rng = np.random.Generator(np.random.PCG64([seed, 1]))
        vector = rng.normal(0.0, _INITIAL, self.length).astype(FLOAT32)
        vector[2 * self.language.vocabulary * WIDTH :] = 0
        return vector

    def logits(self, parameters: Floats) -> Floats:
        inputs, outputs, bias = _split(parameters, self.language.vocabulary)
        result: Floats = inputs @ outputs.T + bias
        return result

    def _descend(self, model: Vector, words: Ints, following: Ints, rate: float) -> None:
        inputs, outputs, bias = _split(model, self.language.vocabulary)
        entered = inputs[words]
        wrong = error(entered @ outputs.T + bias, following, rate)
        back = wrong @ outputs
        outputs -= wrong.T @ entered
        bias -= wrong.sum(axis=0)
        np.subtract.at(inputs, words, back)


def _split(
    vector: npt.NDArray[_Real], vocabulary: int
) -> tuple[npt.NDArray[_Real], npt.NDArray[_Real], npt.NDArray[_Real]]:
    """Views of the parameters: inputs, outputs, bias."""
    size, shape = vocabulary * WIDTH, (vocabulary, WIDTH)
    inputs, outputs = vector[:size], vector[size : 2 * size]
    return inputs.reshape(shape), outputs.reshape(shape), vector[2 * size :]
