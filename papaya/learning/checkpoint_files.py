"""Checkpoints: a model's tensors by name, as a plain safetensors file.

Inside the system, parameters are one vector (`papaya/learning/parameters.py`). Owners have
checkpoints with names, and can export any version with names. The safetensors library reads files
of any writer, in any order of tensors. Writing is ours, because the library writes metadata of more
than one key in a random order.

Refused: everything except exactly the manifest's tensors in float32; files with holes, overlaps or
unused bytes. Pickles are never read, whatever their suffix.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import safetensors

from papaya.errors import OperatorError, ProtocolError
from papaya.learning.frozen_file import FrozenTensor, map_frozen
from papaya.learning.parameters import FLOAT32, Manifest, Vector, decode

_METADATA: Final = "__metadata__"
_OWN: Final = ["parameters"]


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
    """Replace the file atomically: a reader sees the old file or the whole new one."""
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
    """Read a checkpoint: tensors by name, or a parameters file that Papaya wrote."""
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


def read_frozen(path: Path) -> dict[str, FrozenTensor]:
    """The tensors in a file that an owner or a device has. A file as devices get it is mapped into
    memory; one of another writer is read.
    """
    with suppress(OperatorError):
        return map_frozen(path)
    try:
        found = dict(safetensors.deserialize(path.read_bytes()))  # type: ignore[no-untyped-call]
    except FileNotFoundError as error:
        raise OperatorError(
            f"cannot read the frozen tensors: there is no file {path}",
            hint="the path in the task file is relative to the folder of that file; save the "
            "tensors there with safetensors.torch.save_file",
        ) from error
    except (OSError, safetensors.SafetensorError) as error:
        raise OperatorError(
            f"cannot read the frozen tensors in {path}: {error}",
            hint="save them with safetensors.torch.save_file",
        ) from error
    return {
        name: FrozenTensor(
            entry["dtype"], tuple(entry["shape"]), np.frombuffer(bytearray(entry["data"]), np.uint8)
        )
        for name, entry in found.items()
    }


def decode_named(data: bytes, manifest: Manifest) -> Vector:
    """The vector of these tensors in manifest order, or OperatorError."""
    try:
        found = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise OperatorError(
            f"not a safetensors file, or a damaged one: {error}",
            hint="save the model with safetensors.torch.save_file; pickles are never read",
        ) from error
    if list(found) == _OWN and manifest.tensors[0][0] != _OWN[0]:
        try:
            return decode(data, manifest.length)
        except ProtocolError as error:
            raise OperatorError(
                f"parameters of another model: {error}", hint="give a checkpoint of this model"
            ) from error
    tensors: dict[str, Any] = {}
    for name, entry in found.items():
        if entry["dtype"] != "F32":
            raise OperatorError(
                f"tensor {name!r} is {entry['dtype']}, parameters are F32",
                hint=f"cast {name!r} to float32 and save the checkpoint again",
            )
        tensors[name] = np.frombuffer(entry["data"], FLOAT32).reshape(entry["shape"])
    return manifest.flatten(tensors)
