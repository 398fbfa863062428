"""A program file: everything that a device needs to train a task, without the owner's code.

    16 bytes   papaya-program-1
     8 bytes   length of the header, little-endian
    header     `ProgramHeader` as canonical JSON: parse, encode again, compare
    program    an ExecuTorch program; the header has its size and its SHA-256

Tensors that the model does not train are in a file of their own, if they have names
(`papaya/learning/frozen_file.py`); the header has its SHA-256.

A device reads the whole file once. The hash of these bytes names the file in check-ins, as that of
a Python file does, and the digest in the header is checked before the runtime sees the program.
A malformed program can end a process, so it is loaded in a job's child process only.

Refused (OperatorError): a file of another format, a header that is not canonical, a program of
another size or digest, a header that contradicts itself.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from papaya.errors import OperatorError
from papaya.learning.definition import ClientSGD, Examples, TaskTerms, module_hash
from papaya.learning.example_fields import ExampleField
from papaya.learning.parameters import Manifest

EXECUTORCH_VERSION: Final = "1.5.1"
"""The version that exports and runs programs. It has no stable format for training programs."""

_MAGIC: Final = b"papaya-program-1"
_LENGTH_BYTES: Final = 8
_MAX_HEADER_BYTES: Final = 4 << 20
_MAX_FILE_BYTES: Final = 1 << 30
_AGAIN: Final = "compile it again: papaya task compile TASK.py"


class ProgramHeader(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What a program is for, and how to call it."""

    task: str
    source: str  # the hash of the Python file that it was compiled from
    executorch: str  # the version of the exporter
    terms: TaskTerms
    examples: Examples
    fields: tuple[ExampleField, ...]  # the program's inputs, after the weights of the examples
    client: ClientSGD  # its batch size is the program's
    manifest: Manifest
    # The program's outputs, after the loss and the metrics of the terms: parameters by name.
    gradients: tuple[str, ...]
    operators: tuple[str, ...]  # what the runtime must have
    program_bytes: int
    program_sha256: str
    # The names of the tensors in the file of frozen tensors, and its SHA-256; none without a file.
    frozen: tuple[str, ...] = ()
    frozen_sha256: str = ""
    # Parameters that stay on the device, as in a manifest. Their initial values are in the file of
    # frozen tensors, after those that `frozen` names.
    personal: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def personal_layout(self) -> Manifest | None:
        return Manifest(self.personal) if self.personal else None

    @property
    def file_names(self) -> tuple[str, ...]:
        """The tensors in the file of frozen tensors."""
        return (*self.frozen, *(name for name, _ in self.personal))


class ProgramFile(Struct, frozen=True):
    """A checked program file. `name` is its hash, as devices and servers know it."""

    name: str
    header: ProgramHeader
    program: bytes


def encode_program(header: ProgramHeader, program: bytes) -> bytes:
    """The bytes of a program file. The header's size and digest are filled in."""
    complete = msgspec.structs.replace(
        header, program_bytes=len(program), program_sha256=hashlib.sha256(program).hexdigest()
    )
    text = msgspec.json.encode(complete)
    return b"".join((_MAGIC, len(text).to_bytes(_LENGTH_BYTES, "little"), text, program))


def frozen_beside(path: Path) -> Path:
    """Where the frozen tensors of a program file are, unless they came with a bundle."""
    return path.with_name(path.name + ".frozen")


def is_program(path: Path) -> bool:
    """Whether the file starts as a program file does."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def read_program(path: Path) -> ProgramFile:
    """Read and check a program file. Raises OperatorError."""
    try:
        with path.open("rb") as file:
            # read(limit) would allocate the limit, which is more than a job may have.
            data = file.read(min(os.fstat(file.fileno()).st_size, _MAX_FILE_BYTES) + 1)
    except OSError as error:
        raise OperatorError(
            f"cannot read program file {path}: {error.strerror}", hint="check the path"
        ) from error
    try:
        return decode_program(data)
    except OperatorError as error:
        raise OperatorError(f"{path}: {error}", hint=error.hint) from error


def decode_program(data: bytes) -> ProgramFile:
    """The program file with these bytes. Raises OperatorError."""
    start = len(_MAGIC) + _LENGTH_BYTES
    if not data.startswith(_MAGIC):
        raise OperatorError("not a program file", hint=_AGAIN)
    length = int.from_bytes(data[len(_MAGIC) : start], "little")
    if len(data) > _MAX_FILE_BYTES or not 0 < length <= min(_MAX_HEADER_BYTES, len(data) - start):
        raise OperatorError(
            f"a program file of {len(data)} bytes with a header of {length}", hint=_AGAIN
        )
    header = _header(data[start : start + length])
    program = data[start + length :]
    if len(program) != header.program_bytes:
        raise OperatorError(
            f"the program has {len(program)} bytes, its header says {header.program_bytes}",
            hint=_AGAIN,
        )
    if hashlib.sha256(program).hexdigest() != header.program_sha256:
        raise OperatorError("the program does not have the digest in its header", hint=_AGAIN)
    return ProgramFile(module_hash(data), header, program)


def _header(text: bytes) -> ProgramHeader:
    try:
        header = msgspec.json.decode(text, type=ProgramHeader)
    except (msgspec.DecodeError, UnicodeDecodeError, OperatorError, RecursionError) as error:
        raise OperatorError(f"invalid header of a program file: {error}", hint=_AGAIN) from error
    if msgspec.json.encode(header) != text:
        raise OperatorError("the header of the program file is not canonical", hint=_AGAIN)
    try:
        trained = [name for name, _ in (*header.manifest.tensors, *header.personal)]
        known = Manifest((*header.manifest.tensors, *header.personal))
    except ValueError as error:
        raise OperatorError(f"invalid personal parameters: {error}", hint=_AGAIN) from error
    if sorted(header.gradients) != sorted(trained) or 4 * known.length > _MAX_FILE_BYTES:
        raise OperatorError(
            "the gradients of the program are not those of its parameters", hint=_AGAIN
        )
    if header.terms.model_length != header.manifest.length:
        raise OperatorError(
            f"the model has {header.manifest.length} parameters, "
            f"the terms say {header.terms.model_length}",
            hint=_AGAIN,
        )
    if header.terms.max_examples != header.client.max_examples:
        raise OperatorError(
            f"the program trains on {header.client.max_examples} examples, "
            f"the terms say {header.terms.max_examples}",
            hint=_AGAIN,
        )
    if header.client.precision:
        raise OperatorError(
            f"programs train in float32, not in {header.client.precision}",
            hint="leave client.precision out, or train with task files: --engine torch",
        )
    if header.executorch != EXECUTORCH_VERSION:
        raise OperatorError(
            f"the program was compiled with ExecuTorch {header.executorch}, "
            f"this device has {EXECUTORCH_VERSION}",
            hint=_AGAIN,
        )
    return header
