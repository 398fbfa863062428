"""A model's tensors by name, as a plain safetensors file: how models come in and go out.

Parameters inside the system are one vector (`papaya/learning/parameters.py`). Owners have
checkpoints with names, and want to have any version with names. Any safetensors reader reads what
is written here; what is read may come from any safetensors writer, in any order of tensors.

Refused: everything that is not exactly the manifest's tensors in float32. A file has no holes, no
overlaps and no bytes that no tensor names. Pickles are never read, whatever their suffix.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from papaya.errors import OperatorError, ProtocolError
from papaya.learning.parameters import FLOAT32, Manifest, Vector, decode

_MAX_HEADER_BYTES: Final = 1 << 24
_METADATA: Final = "__metadata__"
_OWN: Final = ["parameters"]


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def encode_named(
    manifest: Manifest, vector: Vector, metadata: Mapping[str, str] | None = None
) -> bytes:
    """A safetensors file of the model's tensors under their own names."""
    tensors = manifest.unflatten(vector)
    entries: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        shape = list(tensor.shape)
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
        start = end
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % 8)
    return b"".join((len(header).to_bytes(8, "little"), header, vector.astype(FLOAT32).data))


def save_named(
    path: Path, manifest: Manifest, vector: Vector, metadata: Mapping[str, str] | None = None
) -> None:
    """Write it beside the target first: a reader sees the old file or the whole new one."""
    data = encode_named(manifest, vector, metadata)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OperatorError(
            f"cannot write {path}: {error.strerror}", hint="choose a folder that can be written"
        ) from error


def read_checkpoint(path: Path, manifest: Manifest) -> Vector:
    """The model in a checkpoint: tensors by name, or a parameters file that Papaya wrote."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise OperatorError(
            f"cannot read checkpoint {path}: {error.strerror}", hint="check the path"
        ) from error
    try:
        return decode_named(data, manifest)
    except OperatorError as error:
        raise OperatorError(f"{path}: {error}", hint=error.hint) from error


def decode_named(data: bytes, manifest: Manifest) -> Vector:
    """The vector of these tensors in manifest order, or OperatorError."""
    entries, body = _parse(data)
    if list(entries) == _OWN and manifest.tensors[0][0] != _OWN[0]:
        try:
            return decode(data, manifest.length)
        except ProtocolError as error:
            raise OperatorError(
                f"parameters of another model: {error}", hint="give a checkpoint of this model"
            ) from error
    tensors: dict[str, Any] = {}
    for name, entry in entries.items():
        if entry.dtype != "F32":
            raise OperatorError(
                f"tensor {name!r} is {entry.dtype}, parameters are F32",
                hint=f"cast {name!r} to float32 and save the checkpoint again",
            )
        start, end = entry.data_offsets
        tensors[name] = np.frombuffer(body[start:end], FLOAT32).reshape(entry.shape)
    return manifest.flatten(tensors)


def _parse(data: bytes) -> tuple[dict[str, _Entry], memoryview]:
    header_bytes = int.from_bytes(data[:8], "little")
    if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, len(data) - 8):
        raise OperatorError(
            f"not a safetensors file: {len(data)} bytes, header of {header_bytes}",
            hint="save the model with safetensors.torch.save_file; pickles are never read",
        )
    try:
        raw = msgspec.json.decode(data[8 : 8 + header_bytes], type=dict[str, msgspec.Raw])
        if _METADATA in raw:
            msgspec.json.decode(raw.pop(_METADATA), type=dict[str, str])
        entries = {name: msgspec.json.decode(text, type=_Entry) for name, text in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise OperatorError(
            f"unreadable safetensors header: {error}", hint="save the checkpoint again"
        ) from error
    body = memoryview(data)[8 + header_bytes :]
    _check_layout(entries, len(body))
    return entries, body


def _check_layout(entries: Mapping[str, _Entry], body_bytes: int) -> None:
    """Every byte belongs to exactly one tensor, which has as many bytes as its shape says."""
    place = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, end = entry.data_offsets
        size = 4 * math.prod(entry.shape) if entry.dtype == "F32" else end - start
        if start != place or end - start != size or size < 0 or min(entry.shape, default=0) < 0:
            raise OperatorError(
                f"tensor {name!r} of shape {entry.shape} cannot lie at bytes {start} to {end}",
                hint="the file is damaged: save the checkpoint again",
            )
        place = end
    if place != body_bytes:
        raise OperatorError(
            f"tensors take {place} bytes, the file has {body_bytes}",
            hint="the file is cut short or damaged: save the checkpoint again",
        )
