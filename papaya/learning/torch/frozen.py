"""The frozen tensors of a module: all that it holds and does not train, and their digest.

Clients upload the trainable parameters only, so the rest must be the same on every device: an
update of LoRA weights is useless on another base model. The digest is part of a task's identity
(docs/adr/0040). It is SHA-256 of

    papaya-frozen-tensors-1\\n
    ["name","dtype",[shape],null]\\n  and the bytes: little-endian, row by row
    ["name","dtype",[shape],"first name"]\\n  for another name of a tensor, without bytes

in the order of names, by code point. Lines are JSON in ASCII, without spaces. A module that holds
no such tensor has an empty digest.

Found: parameters without gradient, buffers (persistent or not), other attributes that are tensors,
and all of these in lists, tuples, dicts and modules that are attributes. Not found: global
variables of the task file, closures, and objects of other types.

A task file may name a file with their values (`Task.frozen`), which travels to devices beside the
program.

Refused (OperatorError): a tensor without plain bytes in memory (sparse, or on another device); a
file with a tensor that the model does not have, that it trains, or of another shape or type.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

from papaya.errors import OperatorError
from papaya.learning.checkpoint_files import read_frozen
from papaya.learning.frozen_file import FrozenTensor, encode_frozen

_DOMAIN: Final = b"papaya-frozen-tensors-1\n"
# Where a module keeps its parts; their names follow without these.
_REGISTERED: Final = ("_parameters", "_buffers", "_modules")
_TYPE_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def frozen_tensors(
    module: torch.nn.Module, changing: Iterable[torch.Tensor] = ()
) -> dict[str, torch.Tensor]:
    """What the module holds and training does not change, by name.

    `changing`: statistics, which training changes without a gradient.
    """
    trained = {id(value) for value in module.parameters() if value.requires_grad}
    apart = trained | {id(value) for value in changing}
    found = _tensors(module, "", ())
    return {name: value for name, value in found if id(value) not in apart}


def frozen_digest(module: torch.nn.Module, changing: Iterable[torch.Tensor] = ()) -> bytes:
    """32 bytes, or none if training changes all that the module holds."""
    tensors = sorted(frozen_tensors(module, changing).items())
    if not tensors:
        return b""
    hasher = hashlib.sha256(_DOMAIN)
    first: dict[int, str] = {}
    for name, value in tensors:
        seen = first.setdefault(id(value), name)
        other = None if seen == name else seen
        dtype = str(value.dtype).removeprefix("torch.")
        line = json.dumps([name, dtype, list(value.shape), other], separators=(",", ":"))
        hasher.update(f"{line}\n".encode())
        if other is None:
            hasher.update(_bytes(name, value).numpy().data)
    return hasher.digest()


def fill_frozen(module: torch.nn.Module, path: Path) -> None:
    """Give frozen tensors the values in a safetensors file, which is mapped into memory."""
    held = frozen_tensors(module)
    for name, stored in read_frozen(path).items():
        if name not in held:
            raise OperatorError(
                f"{path} has a tensor {name!r}, which the model does not have or trains",
                hint="save only tensors that the model does not train, under the names that they "
                "have in its state_dict()",
            )
        expected = held[name]
        if (stored.dtype, stored.shape) != (_type_name(expected), tuple(expected.shape)):
            raise OperatorError(
                f"{name!r} is {stored.dtype} {list(stored.shape)} in {path}, and "
                f"{_type_name(expected)} {list(expected.shape)} in the model",
                hint="save the base model that this task file makes",
            )
        values = torch.from_numpy(stored.data).view(expected.dtype)
        expected.data = values.reshape(expected.shape)


def frozen_bytes(module: torch.nn.Module, names: Iterable[str]) -> bytes:
    """The file of frozen tensors that devices get, with these tensors of the module: frozen ones,
    and personal parameters, whose initial values they are.
    """
    held = frozen_tensors(module) | dict(module.named_parameters())
    return encode_frozen({name: _as_stored(name, held[name]) for name in names})


def _as_stored(name: str, value: torch.Tensor) -> FrozenTensor:
    return FrozenTensor(_type_name(value), tuple(value.shape), _bytes(name, value).numpy())


def _type_name(value: torch.Tensor) -> str:
    return _TYPE_NAMES.get(value.dtype, str(value.dtype))


def first_difference(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> str | None:
    """The name of a tensor that is not the same, byte by byte, in both."""
    for name in sorted(some.keys() | others.keys()):
        one, other = some.get(name), others.get(name)
        if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
            return name
        if not torch.equal(_bytes(name, one), _bytes(name, other)):  # NaN equals itself
            return name
    return None


def _bytes(name: str, value: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, without a copy if they lie row by row."""
    try:
        if value.device.type != "cpu":
            raise TypeError(value.device)
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        return plain.reshape(-1).view(torch.uint8)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise OperatorError(
            f"the frozen tensor {name!r} cannot be compared between devices: it is "
            f"{value.dtype}, {value.layout}, on {value.device}",
            hint="make it a dense tensor on the CPU",
        ) from error


def _tensors(value: Any, name: str, inside: tuple[int, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that is reached from `value`. `inside`: ids of what is around it."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif id(value) not in inside:
        for inner, part in _parts(value, name):
            yield from _tensors(part, inner, (*inside, id(value)))


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.nn.Module):
        for attribute, part in vars(value).items():
            named = part if attribute in _REGISTERED else {attribute: part}
            yield from ((f"{name}.{key}".lstrip("."), each) for key, each in named.items())
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{name}[{index}]", part) for index, part in enumerate(value))
