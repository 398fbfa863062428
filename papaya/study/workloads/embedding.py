"""A log-bilinear model of the synthetic language: the odds of the next word from one embedding.

    logits = outputs @ inputs[word] + bias        inputs, outputs: vocabulary x WIDTH

Small enough for sweeps over millions of clients, and not convex, so that rates and staleness
matter as they do for larger models. `BigramWorkload` (bigram.py) has one table of logits instead.
"""

from __future__ import annotations

from typing import ClassVar, Final, TypeVar

import numpy as np
import numpy.typing as npt

from papaya.learning.parameters import FLOAT32, Vector
from papaya.sim.draws import Floats, Ints
from papaya.study.workloads.language_workload import LanguageWorkload, error

WIDTH: Final = 12
_INITIAL: Final = 0.1

_Real = TypeVar("_Real", np.float32, np.float64)


class EmbeddingWorkload(LanguageWorkload):
    """Parameters: inputs, outputs, bias."""

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
