"""Sums of masked words of 16 bits in a simulation: the rounding of the devices, without masks.

Masks cancel out, so they are left out. Everything else is what devices and aggregators compute: the
weight, the damping, rounding at random (`papaya/secagg/rounding.py`) and the mean of the sum. With
words of 32 bits rounding is negligible, and simulations leave it out too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from papaya.config import SecureAggregation, TaskConfig
from papaya.errors import ConfigError
from papaya.learning.parameters import Vector
from papaya.learning.weighting import clipped
from papaya.secagg.errors import ParametersError
from papaya.secagg.mask import SEED_BYTES
from papaya.secagg.parameters import PublicParameters
from papaya.secagg.participant import weight_and_damping
from papaya.secagg.rounding import RandomEncoder
from papaya.secagg.unmask import UnmaskedSum
from papaya.secagg.words import RING_16, blocks
from papaya.study.precision import norms_of, suggested_clip

_Steps = npt.NDArray[np.int32]


class MaskedRounding(Struct, frozen=True):
    """What masked words of 16 bits do to updates within `clip`, with so many `levels` to either
    side of zero: the L2 norm of the error as a share of the norm of what is rounded. `update`: root
    mean square over clients. `mean`: of the weighted mean of the buffer.
    """

    clip: float
    levels: int
    update: float
    mean: float


class MaskedClient(Struct, frozen=True):
    """What a device knows when it masks an update that is within the clip."""

    update: Vector
    examples: int
    staleness: int
    seed: int


def mean_in_16_bits(agreed: PublicParameters, clients: Sequence[MaskedClient]) -> Vector:
    """What the server optimizer gets."""
    total = np.zeros(agreed.length + 1, np.int32)
    for client in clients:
        total += _steps(agreed, client)
    weight = float(total[-1]) / agreed.levels
    return UnmaskedSum(total[:-1], agreed.step, weight, len(clients)).mean()


def masked_rounding(
    task: TaskConfig, clients: Sequence[MaskedClient], norms: Sequence[float]
) -> MaskedRounding | None:
    """Of these clients, at the task's clip and K, or at the clip that `norms` suggest. None if the
    task cannot have words of 16 bits.
    """
    found = norms_of(norms)
    if found is None or task.privacy is not None or not task.aggregation.is_mean:
        return None
    try:
        agreed = parameters_in_16_bits(
            structs.replace(
                task,
                secure_aggregation=SecureAggregation(),
                clip=task.clip or suggested_clip(found),
                requirements=structs.replace(task.requirements, upload_bits=16),
            ),
            clients[0].update.size,
        )
    except (ConfigError, ParametersError):
        return None
    within = [structs.replace(c, update=clipped(c.update, agreed.clip)) for c in clients]
    weights = [weight_and_damping(agreed, c.examples, c.staleness) for c in within]
    exact = [w * d * c.update.astype(np.float64) for (w, d), c in zip(weights, within, strict=True)]
    mean = np.sum(exact, axis=0) / sum(w for w, _ in weights)
    if not mean.any():
        return None
    rounded = [_steps(agreed, c)[:-1] * agreed.step for c in within]
    errors = np.array(rounded) - np.array(exact)
    return MaskedRounding(
        clip=agreed.clip,
        levels=agreed.levels,
        update=float(np.linalg.norm(errors) / np.linalg.norm(exact)),
        mean=float(np.linalg.norm(mean_in_16_bits(agreed, within) - mean) / np.linalg.norm(mean)),
    )


def parameters_in_16_bits(task: TaskConfig, length: int) -> PublicParameters:
    """Of a model of this length; a recorded task has another one."""
    agreed = task.public_parameters
    assert agreed is not None
    return replace(agreed, length=length)


def _steps(agreed: PublicParameters, client: MaskedClient) -> _Steps:
    """The words of a client without its mask: the update, then the weight."""
    weight, damping = weight_and_damping(agreed, client.examples, client.staleness)
    words = np.empty(agreed.length + 1, RING_16.word)
    seed = client.seed.to_bytes(SEED_BYTES, "big")
    encoder = RandomEncoder(weight * damping * agreed.scale, agreed.levels, seed)
    encoder.encode_weight_into(weight * agreed.levels, words[-1:])
    for block in blocks(agreed.length):
        encoder.encode_into(client.update[block], words[:-1][block])
    return words.view(RING_16.signed).astype(np.int32)
