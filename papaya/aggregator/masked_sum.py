"""Secure aggregation at the aggregator: sums of masked vectors, and their unmasking.

Paper, "Asynchronous Secure Aggregation": the server adds masked vectors as they arrive. From the
TSA it learns the sum of their masks and nothing else. Additions are modulo 2^32 or 2^16. A norm or
a NaN is not visible under a mask, so only the size of an update is checked here. After unmasking, a
sum that honest clients cannot have produced is refused and its buffer is dropped.

    Fold   the TSA accepts the seed into the group of the target version, then the words are added
    Step   the TSA releases the masks of exactly the record's members, at least the threshold
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
from papaya.learning.parameters import decode_tensors, encode_tensors
from papaya.learning.weighting import BytesLike
from papaya.messages.participation import SecureOffer
from papaya.messages.storage import RecordRow
from papaya.secagg.parameters import PublicParameters
from papaya.secagg.unmask import TakeBlock, Unmasking
from papaya.secagg.words import RING_32, Ring, Words

LOST = "trusted_party_lost"


class TsaError(Exception):
    """The TSA refused, is UNREACHABLE, or is LOST: it was restarted and no longer has the seeds.

    `group` is set if the TSA already has this seed in another group that is open.
    """

    def __init__(self, reason: str, message: str, group: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.group = group


class Tsa(Protocol):
    """What an aggregator asks of the TSA. Every call may raise TsaError."""

    def offers(
        self, parameters: PublicParameters, count: int
    ) -> tuple[tuple[StockedOffer, ...], SecureOffer]: ...

    def accept(self, parameters: PublicParameters, index: int, group: int, sealed: bytes) -> None:
        """Idempotent."""
        ...

    def reach(self, parameters: PublicParameters) -> None:
        """Raise TsaError if no answer can be expected. It is cheap and promises nothing: a TSA that
        answers may freeze at the next call.
        """
        ...

    def release(
        self, parameters: PublicParameters, group: int, members: Sequence[int], take: TakeBlock
    ) -> None:
        """Pass the sum of the members' masks to `take` in blocks, starting at the first word.

        If the connection breaks, it starts again at the first word.
        """
        ...

    def forget(self, parameters: PublicParameters) -> None:
        """The task is over. No-op if the TSA does not know the task or cannot be reached."""
        ...


class MaskedSum:
    """A sum of masked vectors. `weight` only counts them: their own weights are masked too."""

    __slots__ = ("vector", "weight")

    def __init__(self, vector: Words, weight: float) -> None:
        self.vector = vector
        self.weight = weight

    @classmethod
    def zero(cls, words: int, ring: Ring = RING_32) -> MaskedSum:
        return cls(np.zeros(words, ring.word), 0.0)

    def add_all(self, members: Sequence[Sequence[BytesLike]], kernel: Kernel) -> None:
        """Each member is an upload in pieces. `kernel` is not used: it is for weighted sums."""
        for pieces in members:
            start = 0
            for piece in pieces:
                words = np.frombuffer(piece, self.vector.dtype)
                part = self.vector[start : start + words.size]
                np.add(part, words, out=part)
                start += words.size
            self.weight += 1.0

    def clear(self) -> None:
        """Make it the sum of no vectors again, in the same memory."""
        self.vector.fill(0)
        self.weight = 0.0

    def __iadd__(self, other: MaskedSum) -> MaskedSum:
        np.add(self.vector, other.vector, out=self.vector)
        self.weight += other.weight
        return self

    def encode(self) -> bytes:
        return encode_tensors({"masked": self.vector}, {"members": repr(self.weight)})

    @classmethod
    def decode(cls, data: bytes, words: int, ring: Ring = RING_32) -> MaskedSum:
        tensors, metadata = decode_tensors(data, ["masked"], words, ring.word)
        return cls(tensors["masked"].copy(), float(metadata["members"]))


def masked_update(config: TaskConfig, pieces: Sequence[BytesLike]) -> Sequence[BytesLike]:
    """The upload as it is, if it has the right length."""
    size = sum(memoryview(piece).nbytes for piece in pieces)
    if size != config.update_bytes:
        message = f"masked update has {size} bytes, expected {config.update_bytes}"
        raise UpdateRefused("wrong_size", message)
    return pieces


def group_members(parameters: PublicParameters, record: RecordRow) -> list[int]:
    """The offers of the record's members, in order. Raises TsaError if seeds are surely lost."""
    members = sorted(member.offer for member in record.members)
    if any(a == b for a, b in pairwise(members)):
        # One TSA never uses an index twice, so the seeds are at two different ones.
        raise TsaError(LOST, "the seeds of this buffer were accepted by two TSAs")
    if len(members) < parameters.aggregation_goal:
        raise TsaError(LOST, "the buffer was closed before it was full: its seeds are lost")
    return members


def unmasked(config: TaskConfig, record: RecordRow, total: MaskedSum, tsa: Tsa) -> Unmasking:
    """The sum without its masks, not checked yet. Raises TsaError or Implausible."""
    parameters = config.public_parameters
    assert parameters is not None
    members = group_members(parameters, record)
    unmasking = Unmasking(total.vector, len(members), parameters)
    tsa.release(parameters, record.target, members, unmasking.take)
    return unmasking
