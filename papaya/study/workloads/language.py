"""A synthetic language with known entropy, whose dialect depends on a device's data volume.

Every device draws pairs (word, next word). In a `conflict` share of all contexts the dialect has
another next word where the common language has its own, so that no model serves both: without such
a conflict a bias against slow devices is forgotten with more training. A device with n examples
speaks the dialect in a share of its examples that is logistic in ln(n):

    strength(n) = 1 / (1 + exp(-(ln n - ln dialect_volume) / dialect_width))

`conflict`, `dialect_volume` and `dialect_width` are inputs, calibrated and declared as such; what
they do to a model in this or that regime is an outcome.

Probabilities are multiples of 1/4096, so drawing is a table look-up and the loss of a model is a
finite sum: it is evaluated exactly, over the whole population, not on a sample. Data is a pure
function of (seed, device): nothing is stored.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from papaya.config.checks import require
from papaya.sim.draws import Floats, Ints, splitmix64
from papaya.sim.population import PopulationConfig, volume_quantiles
from papaya.study.workloads.base import Quality

WordIds = npt.NDArray[np.uint8]

GRAIN: Final = 4096
_QUANTILES: Final = 1 << 16
_MAX_VOCABULARY: Final = 256
_FACTORS: Final = 6
_SHARPNESS: Final = 2.2
_DATA: Final = 101  # apart from the quantities of `Population`


class LanguageConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Two languages of `vocabulary` words that differ in a `conflict` share of contexts."""

    vocabulary: int = 96
    conflict: float = 0.4
    dialect_volume: float = 150.0
    dialect_width: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        problem = f"must be from 4 to {_MAX_VOCABULARY} words"
        fits = 4 <= self.vocabulary <= _MAX_VOCABULARY
        require(fits, "vocabulary", self.vocabulary, problem, "use 96")
        is_share = 0 <= self.conflict <= 1
        require(is_share, "conflict", self.conflict, "must be from 0 to 1", "use 0.4")
        for field in ("dialect_volume", "dialect_width"):
            value = getattr(self, field)
            require(0 < value < 1e9, field, value, "must be above 0", "use 150 and 0.2")


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
