"""The weight of an update, and the weighted sum that a buffer is.

Paper, "AsyncFL Algorithm": "Each client update is weighted by the number of examples the client
trained on and a factor depending on the staleness of the update"; appendix "Handling Staleness":
w = 1 / sqrt(1 + s). A task may choose another w (`Staleness`) and another n (`Weighting`).

    step = sum of n * w(s) * delta / sum of n

The mean by examples, damped by staleness: dividing by the damped weights would cancel the damping
whenever all members are equally stale. `WeightedSum` holds numerator and denominator; it is closed
under addition, so shards and buffers combine in any order.

Refused (UpdateRefused, counted by the caller): an update of another size, one with NaN or
infinity, one whose norm is above the clip. `admit` checks all of it before the fold, so that the
fold cannot fail half-way and no buffer of admitted updates overflows to infinity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from papaya.config import Staleness, TaskConfig
from papaya.errors import InvariantError, ProtocolError, UpdateRefused
from papaya.learning import extensions
from papaya.learning.kernels import NUMPY, Kernel
from papaya.learning.parameters import (
    FLOAT32,
    FLOAT64,
    Tensor,
    Vector,
    blocks,
    decode_tensors,
    tensor_pieces,
)

BytesLike: TypeAlias = bytes | bytearray | memoryview

PAPERS: Final = Staleness()

# Norm x examples x members stays below 2**124, and the largest float32 is just below 2**128.
# Without these bounds one finite but absurd update could turn a task without a clip to infinity.
MAX_NORM: Final = 2.0**60
MAX_EXAMPLES: Final = 2**32

_TINY: Final = 16  # coordinates: below this, a call into numpy costs more than the arithmetic
_ROW: Final = 8192  # coordinates: BLAS starts no threads of its own for a dot of this length
_SMALLEST_CLEAR_LIMIT: Final = 2.0**-40
_JUST_BELOW: Final = 1 - 2.0**-23


def model_update(trained: Vector, initial: Vector) -> Vector:
    """What a client uploads: the trained model minus the one that it was given."""
    if trained.shape != initial.shape:
        raise InvariantError(f"trained {trained.shape} from a model of {initial.shape}")
    return np.subtract(trained, initial, dtype=FLOAT32)


def staleness_weight(staleness: int, function: Staleness = PAPERS) -> float:
    """The factor by which an update is damped; by default the paper's w = 1 / sqrt(1 + s)."""
    if staleness < 0:
        raise InvariantError(f"staleness = {staleness}: must be at least 0")
    return _factor(staleness, function)


@lru_cache(maxsize=4096)
def _factor(staleness: int, function: Staleness) -> float:
    damping = function.damping
    return extensions.damping(function, staleness) if damping is None else damping.factor(staleness)


@lru_cache(maxsize=4096)
def _rounded_factor(staleness: int, function: Staleness) -> float:
    """Rounded to float32 once, so that a float64 sum of integer updates is exact, damped or not."""
    return float(np.float32(staleness_weight(staleness, function)))


def counted_examples(config: TaskConfig, examples: int) -> int:
    """The weight of an update before it is damped: no client outweighs `max_examples`."""
    if not examples >= 1:
        raise ProtocolError(f"examples = {examples}: must be at least 1")
    privacy, weighting = config.privacy, config.weighting
    if weighting.kind == "equal" or (privacy is not None and privacy.weighting == "equal"):
        return 1
    return min(examples, weighting.cap or config.max_examples)


def norm(vector: Vector) -> float:
    """The L2 norm in float64, where no float32 overflows. Refuses a vector that is not finite."""
    return _norm([vector])


def _norm(pieces: Sequence[Vector]) -> float:
    if len(pieces) == 1 and pieces[0].size <= _TINY:
        found = math.hypot(*pieces[0].tolist())
    else:
        # Any peer can send a signalling NaN, which makes numpy warn as it widens.
        with np.errstate(invalid="ignore"):
            squares = (_squared_norm(p[block]) for p in pieces for block in blocks(p.size))
            found = math.sqrt(sum(squares))
    if not math.isfinite(found):
        raise UpdateRefused("not_finite", "update contains NaN or infinity")
    return found


def _squared_norm(block: Vector) -> float:
    wide = block.astype(FLOAT64)
    return float(wide.dot(wide))


def clipped(delta: Vector, clip: float) -> Vector:
    """The update itself if its norm is at most `clip`, else a copy scaled to just below it."""
    found = norm(delta)
    return _scaled(delta, found, clip) if found > clip else delta


def _scaled(delta: Vector, found: float, clip: float) -> Vector:
    # Rounding to float32 must not lift the norm above the clip: what a device has clipped, the
    # server must not refuse.
    scale = clip / found * _JUST_BELOW
    result = np.empty_like(delta)
    return np.multiply(delta, scale, out=result, dtype=FLOAT64, casting="same_kind")


class Admitted(NamedTuple):
    """An update that is safe to fold: views of the received bytes, to be multiplied by `scale`.

    The scale is 1 unless the norm was clipped. Nothing is copied.
    """

    pieces: list[Vector]
    scale: float


def admit(
    chunks: Sequence[BytesLike],
    length: int,
    clip: float | None = None,
    rule: Literal["refuse", "clip"] = "refuse",
) -> Admitted:
    """An upload's chunks, in order, as an update that is safe to fold."""
    size_bytes = sum(memoryview(chunk).nbytes for chunk in chunks)
    if size_bytes != 4 * length:
        raise UpdateRefused("wrong_size", f"update has {size_bytes} bytes, expected {4 * length}")
    pieces = _vectors(chunks)
    limit = MAX_NORM if clip is None else min(clip, MAX_NORM)
    if length > _TINY and _is_clearly_within(pieces, limit):
        return Admitted(pieces, 1.0)
    found = _norm(pieces)
    if clip is not None and found > clip and rule == "clip":
        # Clip as a device does, see `_scaled`; the clipped norm must still be below the limit.
        scale, found = clip / found * _JUST_BELOW, clip
    else:
        scale = 1.0
    if found > limit:
        raise UpdateRefused("over_norm", f"update has norm {found:g}, at most {limit:g} is allowed")
    return Admitted(pieces, scale)


def _vectors(chunks: Sequence[BytesLike]) -> list[Vector]:
    if any(memoryview(chunk).nbytes % 4 for chunk in chunks):
        chunks = [b"".join(chunks)]  # a server whose chunks cut coordinates in two
    return [np.frombuffer(chunk, FLOAT32) for chunk in chunks]


def _is_clearly_within(pieces: Sequence[Vector], limit: float) -> bool:
    """A fast check: True only if all values are finite and the norm is surely within the limit.

    Sums of squares in float32, one per row. NaN and infinity stay what they are, an overflow gives
    infinity. Rounding is off by at most row x 2**-24 of the sum, far less than the margin, and
    underflow by at most 2**-126 per coordinate, far less than the margin of the smallest limit.
    """
    if limit < _SMALLEST_CLEAR_LIMIT:
        return False
    squares = 0.0
    with np.errstate(all="ignore"):
        for piece in pieces:
            whole = piece.size - piece.size % _ROW
            rows, rest = piece[:whole].reshape(-1, _ROW), piece[whole:]
            squares += float(np.vecdot(rows, rows).sum(dtype=FLOAT64)) + float(rest.dot(rest))
    return squares <= limit * limit * (1 - 2.0**-8)


class Contribution(NamedTuple):
    """One admitted update, its weight, and its staleness with the function that damps it."""

    update: Admitted
    examples: int
    staleness: int
    function: Staleness = PAPERS

    @property
    def factor(self) -> float:
        if not 0 <= self.examples <= MAX_EXAMPLES:
            raise InvariantError(f"examples = {self.examples}, at most {MAX_EXAMPLES} are allowed")
        return self.examples * self.damping * self.update.scale

    @property
    def damping(self) -> float:
        return _rounded_factor(self.staleness, self.function)


class WeightedSum:
    """The sum of n * w(s) * delta over members, and of n. One thread at a time may add to it.

    A sum of integers is exact in any order: in float32 while no member is damped and it stays
    below 2**24, in float64 (`dtype`) with staleness up to 1023 and below 2**25.
    """

    __slots__ = ("vector", "weight")

    def __init__(self, vector: Tensor, weight: float) -> None:
        """Takes ownership of the vector: the caller must not write to it any more."""
        if not 0 <= weight < math.inf:
            raise InvariantError(f"total weight = {weight}")
        self.vector = vector
        self.weight = weight

    @classmethod
    def zero(cls, length: int, dtype: np.dtype[Any] = FLOAT32) -> WeightedSum:
        """The sum of no updates."""
        return cls(np.zeros(length, dtype), 0.0)

    def add(self, delta: Vector, examples: int, staleness: int) -> None:
        """Fold one admitted update in. Raising leaves the sum as it was."""
        self.add_all([Contribution(Admitted([delta], 1.0), examples, staleness)])

    def add_all(self, members: Sequence[Contribution], kernel: Kernel = NUMPY) -> None:
        """Fold admitted updates in, together. Raising leaves the sum as it was."""
        factors = [member.factor for member in members]
        kernel.add_all(self.vector, [member.update.pieces for member in members], factors)
        self.weight += sum(member.examples for member in members)

    def clear(self) -> None:
        """Make it the sum of no updates again, in the same memory."""
        self.vector.fill(0)
        self.weight = 0.0

    def __iadd__(self, other: WeightedSum) -> WeightedSum:
        if not self._fits(other):
            raise InvariantError(f"cannot add {other!r} to {self!r}")
        self.vector += other.vector
        self.weight += other.weight
        return self

    def __add__(self, other: WeightedSum) -> WeightedSum:
        result = WeightedSum(self.vector.copy(), self.weight)
        result += other
        return result

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, WeightedSum)
            and self._fits(other)
            and self.weight == other.weight
            and np.array_equal(self.vector, other.vector)
        )

    __hash__ = None  # type: ignore[assignment]  # a sum changes

    def __repr__(self) -> str:
        kind = f"{self.vector.size} x {self.vector.dtype.name}"
        return f"<WeightedSum of {kind}, weight {self.weight:g}>"

    def mean(self) -> Vector:
        """The server's step, in float32."""
        if self.weight == 0:
            raise InvariantError("cannot take the mean of no examples")
        result = np.empty(self.vector.size, FLOAT32)
        return np.divide(self.vector, self.weight, out=result, casting="same_kind")

    def encode(self) -> bytes:
        """The one encoding of this sum."""
        return b"".join(self.pieces())

    def pieces(self) -> list[bytes | memoryview]:
        """The encoding without a copy: nothing may be added until it is written."""
        return tensor_pieces({"sum": self.vector}, {"weight": repr(float(self.weight))})

    @classmethod
    def decode(cls, data: bytes, length: int, dtype: np.dtype[Any] = FLOAT32) -> WeightedSum:
        """A sum that can be added to, or ProtocolError."""
        tensors, metadata = decode_tensors(data, ["sum"], length, dtype)
        weight = _weight(metadata)
        return cls(tensors["sum"].copy(), weight)

    def _fits(self, other: WeightedSum) -> bool:
        ours, theirs = self.vector, other.vector
        return ours.shape == theirs.shape and ours.dtype == theirs.dtype


def _weight(metadata: dict[str, str]) -> float:
    try:
        weight = float(metadata["weight"])
    except (KeyError, ValueError):
        weight = math.nan
    if not 0 <= weight < math.inf or metadata != {"weight": repr(weight)}:
        raise ProtocolError(f"the metadata of a sum must be its weight, not {metadata}")
    return weight
