"""Frozen tensors, which a model holds but does not train, in a file of their own.

A base model is often much larger than the parameters that are trained on top of it. Its tensors
travel to devices in one safetensors file, apart from the program, so that a device downloads them
once. The file has exactly one encoding: no metadata; tensors by the size of their elements, the
largest first, then by name, so that every tensor is aligned; data from a multiple of 64 bytes on.

Devices map the file into memory and copy nothing. Refused (OperatorError): any other encoding, and
types that an engine does not have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from papaya.errors import OperatorError

MAX_FROZEN_BYTES: Final = 1 << 30
ITEM_BYTES: Final = {
    **dict.fromkeys(("F64", "I64"), 8),
    **dict.fromkeys(("F32", "I32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL"), 1),
}
"""The types of elements, as safetensors names them."""

_ALIGNMENT: Final = 64
_LENGTH_BYTES: Final = 8
_MAX_HEADER_BYTES: Final = 4 << 20
_AGAIN: Final = "the owner has to submit the task again"
_Count = Annotated[int, Meta(ge=0, le=2**40)]


class FrozenTensor(NamedTuple):
    """One tensor: the type and number of its elements, and its bytes, row by row."""

    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]


class _Entry(Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[_Count, ...], Meta(max_length=16)]
    data_offsets: tuple[_Count, _Count]


_entries = msgspec.json.Decoder(dict[str, _Entry])


def encode_frozen(tensors: Mapping[str, FrozenTensor]) -> bytes:
    """The file of these tensors. OperatorError if one of them has a type that devices lack."""
    for name, tensor in tensors.items():
        if tensor.dtype not in ITEM_BYTES:
            raise OperatorError(
                f"the frozen tensor {name!r} is {tensor.dtype}, which devices do not support",
                hint=f"convert it to one of {', '.join(ITEM_BYTES)}",
            )
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    data = (tensors[name].data.data for name in _order(shapes))
    encoded = b"".join((_header(shapes), *data))
    if len(encoded) > MAX_FROZEN_BYTES:
        raise OperatorError(
            f"the frozen tensors have {len(encoded)} bytes, the limit is {MAX_FROZEN_BYTES}",
            hint="use a smaller base model, or a smaller type such as float16",
        )
    return encoded


def map_frozen(path: Path) -> dict[str, FrozenTensor]:
    """The tensors of a file, as views on it. What is written to them stays in this process."""
    try:
        data = np.memmap(path, np.uint8, "c")
    except (OSError, ValueError) as error:
        raise OperatorError(f"cannot read the frozen tensors: {error}", hint=_AGAIN) from error
    return decode_frozen(data)


def decode_frozen(data: npt.NDArray[np.uint8]) -> dict[str, FrozenTensor]:
    """The tensors in these bytes, as views. OperatorError for another encoding."""
    length = int.from_bytes(data[:_LENGTH_BYTES].tobytes(), "little")
    start = _LENGTH_BYTES + length
    if not 2 <= length <= min(_MAX_HEADER_BYTES, data.size - _LENGTH_BYTES):
        raise _invalid(f"{data.size} bytes with a header of {length}")
    header = data[:start].tobytes()
    try:
        entries = _entries.decode(header[_LENGTH_BYTES:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _invalid(str(error)[:200]) from None
    if unknown := [entry.dtype for entry in entries.values() if entry.dtype not in ITEM_BYTES]:
        raise _invalid(f"elements of type {unknown[0][:20]!r}")
    if _header({name: (entry.dtype, entry.shape) for name, entry in entries.items()}) != header:
        raise _invalid("not in canonical encoding")
    end = max((entry.data_offsets[1] for entry in entries.values()), default=0)
    if data.size != start + end:
        raise _invalid(f"{data.size} bytes, the header says {start + end}")
    return {
        name: FrozenTensor(
            entry.dtype,
            entry.shape,
            data[start + entry.data_offsets[0] : start + entry.data_offsets[1]],
        )
        for name, entry in entries.items()
    }


def _order(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> Iterable[str]:
    return sorted(shapes, key=lambda name: (-ITEM_BYTES[shapes[name][0]], name))


def _header(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    entries: dict[str, Any] = {}
    start = 0
    for name in _order(shapes):
        dtype, shape = shapes[name]
        end = start + ITEM_BYTES[dtype] * math.prod(shape)
        entries[name] = _Entry(dtype, shape, (start, end))
        start = end
    text = msgspec.json.encode(entries)
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _invalid(problem: str) -> OperatorError:
    return OperatorError(f"invalid file of frozen tensors: {problem}", hint=_AGAIN)
