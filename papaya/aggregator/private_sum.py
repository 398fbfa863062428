"""Noise in the clear: the step of a private task without secure aggregation.

The mechanism is that of docs/privacy.md, with a sum of float32 numbers in place of whole ones. The
operator of the servers sees every update and is trusted to add the noise. It is drawn from a key of
the step, by the sampler of the TSA, so that there is one sampler to check.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Final

import numpy as np

from papaya.config import Privacy, TaskConfig
from papaya.learning.parameters import FLOAT32, FLOAT64, Vector
from papaya.learning.weighting import WeightedSum
from papaya.secagg.noise import Noise
from papaya.secagg.words import SIGNED, WORD, blocks

_SIGMA: Final = 2**24  # steps of the grid on which the noise is drawn


def noised_mean(config: TaskConfig, total: WeightedSum, members: int, key: bytes) -> Vector:
    """The sum of the updates plus noise, divided by the public divisor."""
    privacy = config.privacy
    assert privacy is not None
    terms, unit = privacy.terms, _largest_weight(config, privacy)
    sigma = terms.noise_multiplier * privacy.clip * unit
    divisor = members * terms.expected_weight * unit
    words = np.zeros(total.vector.size, WORD)
    Noise(key, Fraction(_SIGMA)).add_to(words, 0, words.size)
    mean = np.empty(words.size, FLOAT32)
    for block in blocks(words.size):
        noise = words[block].view(SIGNED).astype(FLOAT64)
        noise *= sigma / _SIGMA
        noise += total.vector[block]
        np.divide(noise, divisor, out=mean[block], casting="same_kind")
    return mean


def _largest_weight(config: TaskConfig, privacy: Privacy) -> int:
    return 1 if privacy.weighting == "equal" else config.max_examples
