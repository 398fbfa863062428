"""A table of logits for the synthetic language: each word has a row of odds of the next.

The plainest model that can learn the language: convex, each context on its own, and no smaller
loss is possible than its own. It has most parameters that a client does not touch.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from papaya.learning.parameters import FLOAT32, Vector
from papaya.sim.draws import Floats, Ints
from papaya.study.workloads.language_workload import LanguageWorkload, error


class BigramWorkload(LanguageWorkload):
    """Parameters: the table, row by row. Version 0 finds all words alike."""

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
