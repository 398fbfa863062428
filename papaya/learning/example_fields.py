"""Fields: how the bytes of a stored example become arrays, described as data instead of code.

    batch=(Numbers(3), Numbers(1, start=3))         "0.5,2,7,1"  ->  float32[3], float32[1]
    batch=(WordPlaces(11, places=2048, known=VOCABULARY),)
    batch=(JsonNumbers("x", (2,)), JsonNumbers("y", ()))
    batch=(Binary("uint8", (1, 28, 28)), Binary("int64", (), start=784))

A device without torch and without the owner's code can read them (`papaya/learning/executorch`).
Further steps, such as windows, logarithms or one-hot vectors, belong into the loss, which is
compiled into the task's program. Every example gives arrays of the same shape, float32 or int64.

Refused (OperatorError): an example that does not fit its field. The message describes the field and
never the content of the example; `papaya client --explain` quotes it on the device.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar, Final, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from papaya.config.checks import MAX_COUNT, require, require_choice, require_count
from papaya.errors import OperatorError

Array: TypeAlias = npt.NDArray[Any]
NumberKind = Literal["float32", "int64"]
_NUMBER_KINDS = ("float32", "int64")
_STORED_KINDS = ("float32", "int64", "uint8")


class Numbers(Struct, frozen=True, tag="numbers", forbid_unknown_fields=True):
    """`count` numbers of a line of text, from the number at `start` on."""

    count: int
    start: int = 0
    kind: NumberKind = "float32"
    separator: str = ","

    def __post_init__(self) -> None:
        require_count("Numbers.count", self.count)
        _require_start("Numbers.start", self.start)
        require_choice("Numbers.kind", self.kind, _NUMBER_KINDS)
        remedy = "use a comma or a space"
        problem = "must be one character"
        require(len(self.separator) == 1, "Numbers.separator", self.separator, problem, remedy)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count,)

    def read(self, example: bytes) -> Array:
        parts = example.decode().split(self.separator)[self.start : self.start + self.count]
        number = int if self.kind == "int64" else float
        return np.array([number(part) for part in parts], self.kind)


class WordPlaces(Struct, frozen=True, tag="words", forbid_unknown_fields=True):
    """The places of `count` words that are separated by single spaces.

    The words in `known` have the first places, in their order. All others share the places after
    `reserved`, by CRC-32 modulo their number.
    """

    count: int
    places: int
    known: tuple[str, ...] = ()
    reserved: int = 0

    kind: ClassVar[NumberKind] = "int64"

    def __post_init__(self) -> None:
        require_count("WordPlaces.count", self.count)
        require_count("WordPlaces.places", self.places)
        require(
            len(self.known) <= self.reserved < self.places,
            "WordPlaces.reserved",
            self.reserved,
            f"must be at least {len(self.known)}, the number of known words, "
            f"and below {self.places}, the number of places",
            "reserve as many places as there are known words",
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count,)

    def read(self, example: bytes) -> Array:
        known = _places_of(self.known)
        shared = self.places - self.reserved
        places = [
            known.get(word, self.reserved + zlib.crc32(word) % shared)
            for word in example.split(b" ")
        ]
        return np.array(places, np.int64)


class JsonNumbers(Struct, frozen=True, tag="json", forbid_unknown_fields=True):
    """The numbers under one key of a JSON object, as lists of lists of the given shape."""

    key: str
    shape: tuple[int, ...]
    kind: NumberKind = "float32"

    def __post_init__(self) -> None:
        _require_shape("JsonNumbers.shape", self.shape)
        require_choice("JsonNumbers.kind", self.kind, _NUMBER_KINDS)

    def read(self, example: bytes) -> Array:
        found = np.array(msgspec.json.decode(example)[self.key])
        if found.dtype.kind not in ("iu" if self.kind == "int64" else "iuf"):
            raise ValueError(f"not {self.kind}")
        return found.astype(self.kind)


class Binary(Struct, frozen=True, tag="binary", forbid_unknown_fields=True):
    """A little-endian array that starts at byte `start`. "uint8" becomes float32, 0 to 255."""

    stored: Literal["float32", "int64", "uint8"]
    shape: tuple[int, ...]
    start: int = 0

    def __post_init__(self) -> None:
        require_choice("Binary.stored", self.stored, _STORED_KINDS)
        _require_shape("Binary.shape", self.shape)
        _require_start("Binary.start", self.start)

    @property
    def kind(self) -> NumberKind:
        return "int64" if self.stored == "int64" else "float32"

    def read(self, example: bytes) -> Array:
        stored = np.dtype(self.stored).newbyteorder("<")
        found = np.frombuffer(example, stored, math.prod(self.shape), self.start)
        return found.astype(self.kind).reshape(self.shape)

    def read_all(self, examples: Sequence[bytes]) -> Array | None:
        """A row for each example, without a call for each; None if their lengths differ."""
        length = len(examples[0]) if examples else 0
        stored = np.dtype(self.stored).newbyteorder("<")
        end = self.start + stored.itemsize * math.prod(self.shape)
        if length < end or set(map(len, examples)) != {length}:
            return None
        rows = np.frombuffer(b"".join(examples), np.uint8).reshape(len(examples), length)
        numbers = rows[:, self.start : end].copy().view(stored)
        return numbers.astype(self.kind, copy=False).reshape(len(examples), *self.shape)


ExampleField: TypeAlias = Numbers | WordPlaces | JsonNumbers | Binary
_QUOTED_BYTES: Final = 200


def read_fields(fields: Sequence[ExampleField], examples: Sequence[bytes]) -> tuple[Array, ...]:
    """One array for each field; the first dimension is the number of the example."""
    return tuple(_column(number, field, examples) for number, field in enumerate(fields))


def _column(number: int, field: ExampleField, examples: Sequence[bytes]) -> Array:
    if isinstance(field, Binary) and (together := field.read_all(examples)) is not None:
        if field.kind == "float32" and not np.isfinite(together).all():
            is_finite = np.isfinite(together).reshape(len(examples), -1).all(axis=1)
            raise DoesNotFit(number, field, examples[int(is_finite.argmin())])
        return together
    column = np.empty((len(examples), *field.shape), field.kind)
    for index, example in enumerate(examples):
        try:
            array = field.read(example)
        except (ValueError, TypeError, KeyError, OverflowError, msgspec.DecodeError):
            raise DoesNotFit(number, field, example) from None
        if array.shape != field.shape or not np.isfinite(array).all():
            raise DoesNotFit(number, field, example)
        column[index] = array
    return column


class DoesNotFit(OperatorError):
    """`quote`: the beginning of the example, for the device's own log only."""

    def __init__(self, number: int, field: ExampleField, example: bytes) -> None:
        super().__init__(
            f"an example does not fit field {number} of the task, "
            f"{type(field).__name__} of shape {list(field.shape)}",
            hint="store examples in the format that the task's fields describe",
        )
        more = len(example) - _QUOTED_BYTES
        rest = f" and {more} more bytes" if more > 0 else ""
        self.quote = f"the example is {example[:_QUOTED_BYTES]!r}{rest}"


@lru_cache(maxsize=8)
def _places_of(known: tuple[str, ...]) -> dict[bytes, int]:
    return {word.encode(): place for place, word in enumerate(known)}


def _require_start(field: str, start: int) -> None:
    require(0 <= start <= MAX_COUNT, field, start, "must not be negative", "count from zero")


def _require_shape(field: str, shape: tuple[int, ...]) -> None:
    is_valid = len(shape) <= 8 and all(0 < size <= MAX_COUNT for size in shape)
    require(
        is_valid, field, shape, "must have at most 8 sizes, all positive", "use () for a number"
    )
