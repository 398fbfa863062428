"""Secure aggregation at the aggregator: sums of masked vectors, and what takes the masks off.

Paper, "Asynchronous Secure Aggregation": the server adds masked vectors as they come and learns,
from the TSA, the sum of their masks and nothing else. Words of Z_2^32 wrap around by
themselves; no norm and no NaN can be seen under a mask, so only the size is checked here. After
unmasking, a sum that no honest clients can have made is refused, and its buffer dropped.

    Fold   the TSA takes the seed into the group of the target version, then words add up
    Step   it releases the masks of exactly the record's members, at least the threshold
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np

from papaya.aggregator.work import StockedOffer
from papaya.config import TaskConfig
from papaya.errors import UpdateRefused
from papaya.learning.kernels import Kernel
from papaya.learning.parameters import Vector, decode_tensors, encode_tensors
from papaya.learning.weighting import BytesLike
from papaya.messages.participation import SecureOffer
from papaya.messages.storage import RecordRow
from papaya.secagg.parameters import PublicParameters
from papaya.secagg.unmask import TakeBlock, Unmasking
from papaya.secagg.words import WORD, Words

LOST = "trusted_party_lost"


class TsaError(Exception):
    """It refused, or is LOST: gone, or no longer the one that took the seeds.

    `group` is set when it has this very seed in another group, which is open.
    """

    def __init__(self, reason: str, message: str, group: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.group = group


class Tsa(Protocol):
    """What an aggregator asks of the TSA; every call may raise TsaError."""

    def offers(
        self, parameters: PublicParameters, count: int
    ) -> tuple[tuple[StockedOffer, ...], SecureOffer]: ...

    def accept(self, index: int, group: int, sealed: bytes) -> None:
        """Said twice it is done once."""
        ...

    def release(
        self, parameters: PublicParameters, group: int, members: Sequence[int], take: TakeBlock
    ) -> None:
        """`take` hears the sum of the members' masks in blocks, from the first word on.

        If the connection breaks meanwhile, it hears it again from the first word on.
        """
        ...

    def forget(self, parameters: PublicParameters) -> None:
        """The task is over. Unknown to it, or unreachable, it is left alone: nobody waits."""
        ...


class MaskedSum:
    """Masked vectors added up. `weight` only counts them: theirs is under the mask."""

    __slots__ = ("vector", "weight")

    def __init__(self, vector: Words, weight: float) -> None:
        self.vector = vector
        self.weight = weight

    @classmethod
    def zero(cls, words: int) -> MaskedSum:
        return cls(np.zeros(words, WORD), 0.0)

    def add_all(self, members: Sequence[Sequence[BytesLike]], kernel: Kernel) -> None:
        """Each member is an upload in pieces. `kernel` is for numbers that can be weighted."""
        for pieces in members:
            start = 0
            for piece in pieces:
                words = np.frombuffer(piece, WORD)
                part = self.vector[start : start + words.size]
                np.add(part, words, out=part)
                start += words.size
            self.weight += 1.0

    def __iadd__(self, other: MaskedSum) -> MaskedSum:
        np.add(self.vector, other.vector, out=self.vector)
        self.weight += other.weight
        return self

    def encode(self) -> bytes:
        return encode_tensors({"masked": self.vector}, {"members": repr(self.weight)})

    @classmethod
    def decode(cls, data: bytes, words: int) -> MaskedSum:
        tensors, metadata = decode_tensors(data, ["masked"], words, WORD)
        return cls(tensors["masked"].copy(), float(metadata["members"]))


def masked_update(config: TaskConfig, pieces: Sequence[BytesLike]) -> Sequence[BytesLike]:
    """The upload itself, if it is as long as it should be."""
    size = sum(memoryview(piece).nbytes for piece in pieces)
    if size != config.update_bytes:
        message = f"masked update has {size} bytes, expected {config.update_bytes}"
        raise UpdateRefused("wrong_size", message)
    return pieces


def unmasked_mean(config: TaskConfig, record: RecordRow, total: MaskedSum, tsa: Tsa) -> Vector:
    """The server's step: weighted updates by weights. Raises TsaError, or Implausible."""
    parameters = config.public_parameters
    assert parameters is not None
    members = sorted(member.offer for member in record.members)
    if any(a == b for a, b in pairwise(members)):
        # An index is drawn once in the life of a TSA.
        raise TsaError(LOST, "the seeds of this buffer were taken by two TSAs")
    if len(members) < parameters.aggregation_goal:
        raise TsaError(LOST, "given up before it was full: its seeds are lost")
    unmasking = Unmasking(total.vector, len(members), parameters)
    tsa.release(parameters, record.target, members, unmasking.take)
    return unmasking.result().mean()
