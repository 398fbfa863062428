"""A perceptron that learns to tell classes apart: the small workload for long runs.

A class has a prototype; an example is that and noise. A device sees one class, its favourite, more
often than the others, and an accent that depends on its data volume: a device with n examples draws
a share of them, logistic in ln(n), with the prototypes of some classes exchanged. So no model
serves all devices, and a bias against those with much data shows. What `PrototypesConfig` says is
an input; what it does to a model under this or that protocol is an outcome.

Examples are a function of (seed, device), drawn when they are needed. Over all devices the labels
are uniform, so a model is judged on two fixed sets, without and with accent, weighted by the exact
shares of accent in the population.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, Protocol

import numpy as np
from msgspec import Struct

from papaya.config.checks import require
from papaya.learning.definition import ClientSGD
from papaya.learning.parameters import FLOAT32, Vector
from papaya.sim.draws import Floats, HashWords, Ints, counters, splitmix64, splitmix64_words
from papaya.sim.population import DEFAULT, PopulationConfig, volume_quantiles
from papaya.study.workloads.base import Clients, Matrix, Quality
from papaya.study.workloads.perceptron_trainers import (
    PerceptronExamples,
    PerceptronLabels,
    PerceptronSizes,
    PerceptronTrainer,
    fastest,
)

_LossesOf = Callable[[Matrix, PerceptronLabels], Floats]
"""The loss of each example, given features and labels."""

_DATA, _HELD_OUT, _PROTOTYPES = 121, 122, 123  # apart from the quantities of `Population`
_QUANTILES: Final = 1 << 16
_JUDGED: Final = 2048  # examples of each held-out set


class ExampleSource(Protocol):
    """Where clients have their examples from, and what they are judged on."""

    def examples(self, clients: Clients, most: int) -> PerceptronExamples:
        """The first examples of each client, at most so many of each, always the same."""

    def quality(self, losses_of: _LossesOf) -> Quality:
        """How good a model with these losses is for the whole population."""


class PrototypesConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Shares: `favourite` of one class on a device, `exchanged` of classes in the accent."""

    noise: float = 2.0
    favourite: float = 0.3
    exchanged: float = 0.3
    accent_volume: float = 100.0
    accent_width: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        for field in ("favourite", "exchanged"):
            value = getattr(self, field)
            require(0 <= value <= 1, field, value, "must be from 0 to 1", "use 0.3")
        for field in ("noise", "accent_volume", "accent_width"):
            value = getattr(self, field)
            require(0 < value < 1e9, field, value, "must be above 0", "use the default")


class Prototypes:
    """The synthetic source: `seed` names the data of the devices."""

    def __init__(
        self,
        features: int = 64,
        classes: int = 10,
        config: PrototypesConfig = PrototypesConfig(),  # noqa: B008 - frozen
        population: PopulationConfig = DEFAULT,
        *,
        seed: int = 0,
    ) -> None:
        self.config = config
        self._population = population
        self._classes, self._features = classes, features
        self._state = splitmix64(splitmix64(seed, _DATA), config.seed)
        judged = splitmix64(splitmix64(seed, _HELD_OUT), config.seed)
        self._judged = np.uint64(judged)  # no device's
        self._step = FLOAT32.type(config.noise * np.sqrt(12) / 65536)
        around = np.random.Generator(np.random.PCG64([config.seed, _PROTOTYPES]))
        self._prototypes = (around.random((classes, features)) * 2 - 1).astype(FLOAT32)
        few = round(config.exchanged * classes)
        self._shown = np.arange(classes)
        self._shown[:few] = (self._shown[:few] + 1) % max(few, 1)
        self._draw = _compiled_draw()

    def examples(self, clients: Clients, most: int) -> PerceptronExamples:
        counts = np.minimum(clients.examples, most)
        owner = np.repeat(np.arange(len(clients)), counts)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        number = np.arange(len(owner)) - offsets[owner]
        hashes = splitmix64_words(np.uint64(self._state), counters(clients.device))
        favourites = ((hashes >> np.uint64(32)) % np.uint64(self._classes)).astype(np.int64)
        states = splitmix64_words(hashes[owner], number.astype(np.uint64))
        accent = self.strength(clients.examples)[owner]
        labels, accented = self._labels(states, favourites[owner], accent)
        return PerceptronExamples(self._vectors(states, labels, accented), labels, offsets)

    def strength(self, examples: Ints) -> Floats:
        """The share of a device's examples that has the accent."""
        distance = np.log(examples) - np.log(self.config.accent_volume)
        share: Floats = 1.0 / (1.0 + np.exp(-distance / self.config.accent_width))
        return share

    def quality(self, losses_of: _LossesOf) -> Quality:
        plain, accented = (float(losses_of(*each).mean()) for each in self._held_out)
        return Quality(*((1 - share) * plain + share * accented for share in self._shares))

    @cached_property
    def _shares(self) -> tuple[float, ...]:
        """Of the accent: in all examples, from the 75th and 99th percentile on, of a client."""
        volumes = volume_quantiles(self._population, _QUANTILES)  # ascending
        strength = self.strength(volumes)
        tails = [slice(int(level * _QUANTILES), None) for level in (0.0, 0.75, 0.99)]
        by_examples = [np.average(strength[tail], weights=volumes[tail]) for tail in tails]
        return (*map(float, by_examples), float(strength.mean()))

    @cached_property
    def _held_out(self) -> tuple[tuple[Matrix, PerceptronLabels], tuple[Matrix, PerceptronLabels]]:
        states = splitmix64_words(self._judged, np.arange(_JUDGED, dtype=np.uint64))
        labels = (np.arange(_JUDGED) % self._classes).astype(np.int32)
        plain, accented = np.zeros(_JUDGED, np.int64), np.ones(_JUDGED, np.int64)
        return (
            (self._vectors(states, labels, plain), labels),
            (self._vectors(states, labels, accented), labels),
        )

    def _labels(
        self, states: HashWords, favourites: Ints, accent: Floats
    ) -> tuple[PerceptronLabels, Ints]:
        word = splitmix64_words(states, np.full(len(states), 2**32, np.uint64))
        of_favourite = (word & np.uint64(0xFFFFFFFF)) < np.uint64(self.config.favourite * 2**32)
        other = ((word >> np.uint64(32)) & np.uint64(0xFFFF)) * np.uint64(self._classes)
        labels = np.where(of_favourite, favourites, (other >> np.uint64(16)).astype(np.int64))
        accented = (word >> np.uint64(48)) < (accent * 65536).astype(np.uint64)
        return labels.astype(np.int32), accented.astype(np.int64)

    def _vectors(self, states: HashWords, labels: PerceptronLabels, accented: Ints) -> Matrix:
        shown = np.where(accented, self._shown[labels], labels)
        centres = self._prototypes[shown]
        if self._draw is not None:
            features = np.empty_like(centres)
            self._draw(states, centres, self._step, features)
            return features
        fours = np.arange(-(-self._features // 4), dtype=np.uint64)
        words = splitmix64_words(states[:, None], fours)
        parts = (words[..., None] >> np.arange(0, 64, 16, dtype=np.uint64)) & np.uint64(0xFFFF)
        drawn = parts.reshape(len(states), -1)[:, : self._features].astype(FLOAT32)
        noisy: Matrix = centres + self._step * (drawn - FLOAT32.type(32767.5))
        return noisy


def _compiled_draw() -> Callable[..., Any] | None:
    try:
        from papaya.study.workloads._kernels_perceptron import draw_features
    except ImportError:
        return None
    return draw_features  # type: ignore[no-any-return]


class Perceptron:
    """The workload. `source` must have features and classes of these sizes."""

    name = "perceptron"

    def __init__(
        self,
        source: ExampleSource | None = None,
        sizes: PerceptronSizes = PerceptronSizes(),  # noqa: B008 - frozen
        *,
        trainer: PerceptronTrainer | None = None,
    ) -> None:
        self.sizes = sizes
        self.source = source or Prototypes(sizes.layers[0], sizes.layers[-1])
        self.trainer = trainer or fastest(sizes)

    @property
    def length(self) -> int:
        return self.sizes.manifest.length

    def initial(self, seed: int) -> Vector:
        """Uniform within one over the root of a layer's inputs, as torch.nn.Linear draws."""
        draw = np.random.Generator(np.random.PCG64(seed))
        parts = [
            draw.uniform(-1, 1, outward * (inward + 1)) / np.sqrt(inward)
            for inward, outward in pairwise(self.sizes.layers)
        ]
        return np.concatenate(parts).astype(FLOAT32)

    def train(
        self, models: Sequence[Vector], start: Ints, clients: Clients, sgd: ClientSGD
    ) -> Matrix:
        examples = self.source.examples(clients, sgd.max_examples)
        return self.trainer.train(models, start, examples, sgd)

    def evaluate(self, parameters: Vector) -> Quality:
        return self.source.quality(
            lambda features, labels: self.trainer.losses(parameters, features, labels)
        )
