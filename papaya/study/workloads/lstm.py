"""The LSTM language model on the synthetic language: the workload of the headline curves.

A sequence is a walk: its first word is drawn from the language's contexts, each next one from what
follows the word before. A sequence is in dialect or not as a whole, with the share that the
language gives a device of its volume. Sequences are a function of (seed, device).

The loss of an LSTM depends on the whole walk, so it is not a finite sum over pairs of words. It is
judged on two fixed sets of walks, in the common language and in the dialect, weighted by the exact
shares of dialect in the population.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Final, Protocol

import numpy as np

from papaya.learning.definition import ClientSGD
from papaya.learning.parameters import FLOAT32, Vector
from papaya.sim.draws import Floats, HashWords, Ints, counters, splitmix64, splitmix64_words
from papaya.sim.population import DEFAULT, PopulationConfig
from papaya.study.workloads.base import Clients, Matrix, Quality
from papaya.study.workloads.language import GRAIN, Judge, Language, LanguageConfig
from papaya.study.workloads.lstm_trainers import LstmSizes, LstmTrainer, Tokens, fastest

_LossesOf = Callable[[Tokens], Floats]
"""The mean loss of each sequence."""

_WALKS, _HELD_OUT = 131, 132  # apart from the quantities of `Population`
_JUDGED: Final = 512  # walks of each held-out set
_SPREAD: Final = 3**0.5  # uniform within it has the variance 1, as torch.nn.Embedding draws


class SequenceSource(Protocol):
    """Where clients have their sequences from, and what they are judged on."""

    def sequences(self, clients: Clients, most: int) -> tuple[Tokens, Ints]:
        """(tokens, offsets): client i has the rows offsets[i] to offsets[i + 1] of tokens, the
        first of its sequences, at most `most`; always the same.
        """

    def quality(self, losses_of: _LossesOf) -> Quality:
        """How good a model with these losses is for the whole population."""


class Walks:
    """Sequences of steps + 1 words of a language; `seed` names the data of the devices."""

    def __init__(
        self,
        language: Language,
        steps: int = 20,
        population: PopulationConfig = DEFAULT,
        *,
        seed: int = 0,
    ) -> None:
        self.language = language
        self.steps = steps
        self._judge = Judge(language, population)
        self._state = splitmix64(language.state(seed), _WALKS)
        self._judged = np.uint64(splitmix64(language.state(seed), _HELD_OUT))  # no device's

    def sequences(self, clients: Clients, most: int) -> tuple[Tokens, Ints]:
        counts = np.minimum(clients.examples, most)
        owner = np.repeat(np.arange(len(clients)), counts)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        number = np.arange(len(owner)) - offsets[owner]
        hashes = splitmix64_words(np.uint64(self._state), counters(clients.device))
        states = splitmix64_words(hashes[owner], number.astype(np.uint64))
        coins = (self.language.strength(clients.examples) * 2.0**32).astype(np.uint64)
        dialect = (states >> np.uint64(32)) < coins[owner]
        return self._walks(states, dialect.astype(np.int64)), offsets

    def quality(self, losses_of: _LossesOf) -> Quality:
        common, dialect = (float(losses_of(walks).mean()) for walks in self._held_out)
        return Quality(*((1 - share) * common + share * dialect for share in self._judge.shares))

    @cached_property
    def _held_out(self) -> tuple[Tokens, Tokens]:
        states = splitmix64_words(self._judged, np.arange(_JUDGED, dtype=np.uint64))
        common, dialect = np.zeros(_JUDGED, np.int64), np.ones(_JUDGED, np.int64)
        return self._walks(states, common), self._walks(states, dialect)

    def _walks(self, states: HashWords, dialect: Ints) -> Tokens:
        tokens = np.empty((len(states), self.steps + 1), np.int32)
        mask = np.uint64(GRAIN - 1)
        for step in range(self.steps + 1):
            drawn = splitmix64_words(states, np.full(len(states), step, np.uint64)) & mask
            if step == 0:
                tokens[:, 0] = self.language.contexts[drawn]
            else:
                tokens[:, step] = self.language.following[dialect, tokens[:, step - 1], drawn]
        return tokens


class Lstm:
    """The workload. `source` must have sequences of these sizes."""

    name = "lstm"

    def __init__(
        self,
        source: SequenceSource | None = None,
        sizes: LstmSizes = LstmSizes(),  # noqa: B008 - frozen
        *,
        trainer: LstmTrainer | None = None,
    ) -> None:
        self.sizes = sizes
        language = LanguageConfig(vocabulary=sizes.vocabulary)
        self.source = source or Walks(Language(language), sizes.steps)
        self.trainer = trainer or fastest(sizes)

    @property
    def length(self) -> int:
        return self.sizes.manifest.length

    def initial(self, seed: int) -> Vector:
        """As large as torch draws: within one over the root of the hidden units, but for words."""
        draw = np.random.Generator(np.random.PCG64(seed))
        vector = draw.uniform(-1, 1, self.length)
        words = self.sizes.vocabulary * self.sizes.embedding
        vector[:words] *= _SPREAD
        vector[words:] /= self.sizes.hidden**0.5
        return vector.astype(FLOAT32)

    def train(
        self, models: Sequence[Vector], start: Ints, clients: Clients, sgd: ClientSGD
    ) -> Matrix:
        tokens, offsets = self.source.sequences(clients, sgd.max_examples)
        return self.trainer.train(models, start, tokens, offsets, sgd)

    def evaluate(self, parameters: Vector) -> Quality:
        return self.source.quality(lambda tokens: self.trainer.losses(parameters, tokens))
