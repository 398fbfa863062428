"""A synthetic language with known entropy, whose dialect depends on a device's data volume.

Every device draws pairs (word, next word). In a `conflict` share of all contexts the dialect has
another next word where the common language has its own, so that no model serves both: without such
a conflict a bias against slow devices is forgotten with more training. A device with n examples
speaks the dialect in a share of its examples that is logistic in ln(n):

    strength(n) = 1 / (1 + exp(-(ln n - ln dialect_volume) / dialect_width))

`conflict`, `dialect_volume` and `dialect_width` are inputs; what they do to a model in this or that
regime is an outcome.

Probabilities are multiples of 1/4096, so drawing is a table look-up and the loss of a model is a
finite sum: it is evaluated exactly, over the whole population, not on a sample. Data is a pure
function of (seed, device): nothing is stored. Two models learn it, embedding and bigram: each
client is trained on its own, in float32 and in a fixed order, so the bits do not depend on the
batch. With numba a compiled loop trains (compiled_language.py), without it numpy; they agree within
float tolerance. Momentum on the client is refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import ClassVar, Final, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from papaya.config.checks import require
from papaya.learning.definition import ClientSGD
from papaya.learning.parameters import FLOAT32, Vector
from papaya.sim.draws import Floats, HashWords, Ints, splitmix64, splitmix64_words
from papaya.sim.population import DEFAULT, PopulationConfig, volume_quantiles
from papaya.study.workloads.base import Clients, Matrix, Quality, require_plain_sgd

WordIds = npt.NDArray[np.uint8]
KernelName: TypeAlias = Literal["fastest", "numpy"]
_Real = TypeVar("_Real", np.float32, np.float64)

GRAIN: Final = 4096
_QUANTILES: Final = 1 << 16
_MAX_VOCABULARY: Final = 256
_FACTORS: Final = 6
_SHARPNESS: Final = 2.2
_COIN: Final = 2.0**32
WIDTH: Final = 12
_INITIAL: Final = 0.1
_DATA: Final = 101  # apart from the quantities of `Population`


class LanguageConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Two languages of `vocabulary` words that differ in a `conflict` share of contexts."""

    vocabulary: int = 96
    conflict: float = 0.25
    dialect_volume: float = 100.0
    dialect_width: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        problem = f"must be from 4 to {_MAX_VOCABULARY} words"
        fits = 4 <= self.vocabulary <= _MAX_VOCABULARY
        require(fits, "vocabulary", self.vocabulary, problem, "use 96")
        is_share = 0 <= self.conflict <= 1
        require(is_share, "conflict", self.conflict, "must be from 0 to 1", "use 0.25")
        for field in ("dialect_volume", "dialect_width"):
            value = getattr(self, field)
            require(0 < value < 1e9, field, value, "must be above 0", "use 100 and 0.3")


class Language:
    """`contexts` and `following` are tables to draw from, `context` and `next_*` their odds."""

    def __init__(self, config: LanguageConfig = LanguageConfig()) -> None:  # noqa: B008 - frozen
        self.config = config
        size = config.vocabulary
        rng = np.random.Generator(np.random.PCG64(config.seed))
        popularity = 1.0 / np.arange(4.0, size + 4.0)
        logits = rng.normal(size=(size, _FACTORS)) @ rng.normal(size=(_FACTORS, size))
        logits = _SHARPNESS * logits / np.sqrt(_FACTORS) + np.log(popularity)
        common = np.exp(logits - logits.max(axis=1, keepdims=True))
        context_counts = _counts(popularity)
        common_counts = np.stack([_counts(row) for row in common])
        dialect_counts = common_counts.copy()
        for word in _conflicting(context_counts, config.conflict, rng):
            dialect_counts[word] = common_counts[word][rng.permutation(size)]
        self.context: Floats = context_counts / GRAIN
        self.next_common: Floats = common_counts / GRAIN
        self.next_dialect: Floats = dialect_counts / GRAIN
        self.contexts = _table(context_counts)
        self.following = np.stack(
            [np.stack([_table(row) for row in c]) for c in (common_counts, dialect_counts)]
        )

    @property
    def vocabulary(self) -> int:
        return self.config.vocabulary

    def strength(self, examples: Ints) -> Floats:
        """The share of a device's examples that is in dialect."""
        distance = np.log(examples) - np.log(self.config.dialect_volume)
        with np.errstate(over="ignore"):  # far below the volume, the dialect is not used
            share: Floats = 1.0 / (1.0 + np.exp(-distance / self.config.dialect_width))
        return share

    def state(self, seed: int) -> int:
        """Where the hash of every device's data starts."""
        return splitmix64(splitmix64(seed, _DATA), self.config.seed)

    def losses(self, log_odds: Floats) -> tuple[float, float]:
        """The cross-entropies of a model in the common language and in the dialect."""
        common = -(self.context @ (self.next_common * log_odds).sum(axis=1))
        dialect = -(self.context @ (self.next_dialect * log_odds).sum(axis=1))
        return float(common), float(dialect)

    def entropy(self, strength: float) -> float:
        """Of a device that speaks the dialect in this share: no model has less loss there."""
        mixed = (1 - strength) * self.next_common + strength * self.next_dialect
        surprise = np.where(mixed > 0, -np.log(np.where(mixed > 0, mixed, 1.0)), 0.0)
        return float(self.context @ (mixed * surprise).sum(axis=1))


class Judge:
    """The exact quality of a model of a language, over a whole population."""

    def __init__(self, language: Language, population: PopulationConfig) -> None:
        self.language = language
        self._population = population

    @cached_property
    def shares(self) -> tuple[float, float, float, float]:
        """The dialect's share: of all examples, of those at or above the 75th and the 99th
        percentile of volume, and of the mean client.
        """
        volumes = volume_quantiles(self._population, _QUANTILES)  # ascending
        strength = self.language.strength(volumes)
        tails = [slice(int(level * _QUANTILES), None) for level in (0.0, 0.75, 0.99)]
        by_examples = [np.average(strength[tail], weights=volumes[tail]) for tail in tails]
        return (*map(float, by_examples), float(strength.mean()))  # type: ignore[return-value]

    def quality(self, log_odds: Floats) -> Quality:
        common, dialect = self.language.losses(log_odds)
        return Quality(*((1 - share) * common + share * dialect for share in self.shares))


def _counts(weights: Floats) -> Ints:
    """Whole numbers in proportion to the weights, at least 1 each, that add up to GRAIN."""
    free = GRAIN - len(weights)
    exact = weights / weights.sum() * free
    counts: Ints = np.floor(exact).astype(np.int64)
    missing = free - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    return counts + 1


def _table(counts: Ints) -> WordIds:
    return np.repeat(np.arange(len(counts), dtype=np.uint8), counts)


def _conflicting(counts: Ints, share: float, rng: np.random.Generator) -> list[int]:
    """Contexts, in random order, until they make up the share of all examples."""
    chosen, mass = [], 0
    for word in rng.permutation(len(counts)).tolist():
        if mass >= share * GRAIN:
            break
        chosen.append(word)
        mass += int(counts[word])
    return chosen


# --- Models -------------------------------------------------------------------------------------


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
        self._loop = compiled_loop(self.name) if kernel == "fastest" else None

    @property
    def floor(self) -> float:
        """The entropy of what all devices hold: no model of one word of context has less loss."""
        return self.language.entropy(self.judge.shares[0])

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
        require_plain_sgd(sgd)
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
        return self.judge.quality(log_odds_of(self.logits(parameters.astype(np.float64))))

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


def log_odds_of(logits: Floats) -> Floats:
    """Of every word (column) to follow every word (row)."""
    top = logits.max(axis=1, keepdims=True)
    found: Floats = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
    return found


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
def compiled_loop(name: str) -> Callable[..., None] | None:
    """None without numba. The first call compiles, or finds it compiled in numba's cache."""
    try:
        from papaya.study.workloads import compiled_language
    except ImportError:
        return None
    loops: dict[str, Callable[..., None]] = {
        "embedding": compiled_language.embedding,
        "bigram": compiled_language.bigram,
        "embedding_of_pairs": compiled_language.embedding_of_pairs,
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
