"""A log-bilinear model of the synthetic language: the odds of the next word from one embedding.

    logits = outputs @ inputs[word] + bias        inputs, outputs: vocabulary x width

Small enough for sweeps over millions of clients, and not convex, so that rates and staleness
matter as they do for larger models. Its data is drawn inside the kernel, from the device's hash.
`BigramWorkload` (bigram.py) is the same with one table of logits.

Each client is trained on its own, in float32 and in a fixed order: the same bits in any batch.
With numba a compiled loop does it (compiled_language.py), without it numpy; they agree within
float tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from papaya.errors import ConfigError
from papaya.learning.definition import ClientSGD
from papaya.learning.parameters import FLOAT32, Vector
from papaya.sim.draws import Floats, Words, splitmix64_words
from papaya.sim.population import DEFAULT, PopulationConfig
from papaya.sim.workloads.base import Clients, Ints, Matrix, Quality
from papaya.sim.workloads.language import GRAIN, Judge, Language

_INITIAL: Final = 0.1
_COIN: Final = 2.0**32


class LanguageWorkload:
    """What models of the synthetic language share: data, batches, the judge.

    `seed` names the data of the devices; a population of the same volumes judges.
    """

    name: str
    length: int

    def __init__(
        self,
        population: PopulationConfig = DEFAULT,
        language: Language | None = None,
        *,
        seed: int = 0,
    ) -> None:
        self.language = Language() if language is None else language
        self.judge = Judge(self.language, population)
        self._state = np.uint64(self.language.state(seed))

    def train(
        self, models: Sequence[Vector], start: Ints, clients: Clients, sgd: ClientSGD
    ) -> Matrix:
        """Client i trains from models[start[i]] on its own data: row i is its update."""
        if sgd.momentum:
            raise ConfigError.of("client.momentum", sgd.momentum, "is not trained here", "use 0")
        examples = np.minimum(clients.examples, sgd.max_examples)
        hashes = splitmix64_words(self._state, clients.device.astype(np.uint64))
        # The dialect is the device's, whatever the task takes of its data.
        strengths = self.language.strength(clients.examples)
        coins = np.minimum(strengths * _COIN, _COIN - 1).astype(np.uint64)
        return self._train(np.stack(models), start, hashes, coins, examples, sgd)

    def evaluate(self, parameters: Vector) -> Quality:
        """Exactly, over the whole population."""
        logits = self.logits(parameters.astype(np.float64))
        top = logits.max(axis=1, keepdims=True)
        log_odds = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
        return self.judge.quality(log_odds)

    def examples(self, device_hash: int, coin: int, count: int) -> tuple[Ints, Ints]:
        """(word, next word) of one device."""
        words = splitmix64_words(np.uint64(device_hash), np.arange(count, dtype=np.uint64))
        context = self.language.contexts[_bits(words, 0)]
        spoken = ((words >> np.uint64(32)) < np.uint64(coin)).astype(np.int64)
        following = self.language.following[spoken, context, _bits(words, 12)]
        return context.astype(np.int64), following.astype(np.int64)

    def logits(self, parameters: Floats) -> Floats:
        """Of every word (row) to follow every word."""
        raise NotImplementedError

    def _train(
        self,
        models: Matrix,
        start: Ints,
        hashes: Words,
        coins: Words,
        examples: Ints,
        sgd: ClientSGD,
    ) -> Matrix:
        kernel = _compiled(self.name)
        updates = np.empty((len(start), self.length), FLOAT32)
        if kernel is not None:
            tables = (self.language.contexts, self.language.following)
            rate = np.float32(sgd.rate)
            kernel(
                models, start, hashes, coins, examples, *tables, rate, sgd.epochs, sgd.batch_size,
                updates,
            )  # fmt: skip
            return updates
        for i in range(len(start)):
            model = models[start[i]]
            trained = model.copy()
            words, following = self.examples(int(hashes[i]), int(coins[i]), int(examples[i]))
            for _ in range(sgd.epochs):
                for first in range(0, len(words), sgd.batch_size):
                    batch = slice(first, first + sgd.batch_size)
                    self._descend(trained, words[batch], following[batch], sgd.rate)
            np.subtract(trained, model, out=updates[i])
        return updates

    def _descend(self, model: Vector, words: Ints, following: Ints, rate: float) -> None:
        """One step of SGD on one batch, in place."""
        raise NotImplementedError


class EmbeddingWorkload(LanguageWorkload):
    """Parameters: inputs, outputs, bias."""

    name = "embedding"

    def __init__(
        self,
        population: PopulationConfig = DEFAULT,
        language: Language | None = None,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__(population, language, seed=seed)
        self.length = self.language.vocabulary * (2 * WIDTH + 1)

    def initial(self, seed: int) -> Vector:
        """Small random embeddings, no bias."""
        vocabulary = self.language.vocabulary
        rng = np.random.Generator(np.random.PCG64([seed, 1]))
        vector = rng.normal(0.0, _INITIAL, self.length).astype(FLOAT32)
        vector[2 * vocabulary * WIDTH :] = 0
        return vector

    def logits(self, parameters: Floats) -> Floats:
        inputs, outputs, bias = _split(parameters, self.language.vocabulary)
        result: Floats = inputs @ outputs.T + bias
        return result

    def _descend(self, model: Vector, words: Ints, following: Ints, rate: float) -> None:
        inputs, outputs, bias = _split(model, self.language.vocabulary)
        entered = inputs[words]
        error = _error(entered @ outputs.T + bias, following, rate)
        back = error @ outputs
        outputs -= error.T @ entered
        bias -= error.sum(axis=0)
        np.subtract.at(inputs, words, back)


WIDTH: Final = 12


def _split(vector: Floats | Vector, vocabulary: int) -> tuple[Matrix, Matrix, Vector]:
    """Views of the parameters."""
    size = vocabulary * WIDTH
    inputs, outputs = vector[:size], vector[size : 2 * size]
    shape = (vocabulary, WIDTH)
    return inputs.reshape(shape), outputs.reshape(shape), vector[2 * size :]  # type: ignore[return-value]


def _error(logits: Matrix, following: Ints, rate: float) -> Matrix:
    """The gradient of the mean loss by the logits, times the rate."""
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    odds[np.arange(len(following)), following] -= 1
    return odds * FLOAT32.type(rate / len(following))


def _bits(words: Words, shift: int) -> Ints:
    return ((words >> np.uint64(shift)) & np.uint64(GRAIN - 1)).astype(np.int64)


def _compiled(name: str):  # type: ignore[no-untyped-def]
    try:
        from papaya.sim.workloads import compiled_language
    except ImportError:
        return None
    return getattr(compiled_language, name)
