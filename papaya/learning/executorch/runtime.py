"""The ExecuTorch runtime through ctypes: a loaded program and its memory as numpy arrays.

Loading a malformed program can abort the process (1 of 100 bit flips did): load programs whose
digest was checked, and in a child process only.

Refused (OperatorError): operators that the runtime lacks, by name; a program that does not fit its
header; a run that fails.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from papaya.errors import OperatorError
from papaya.learning.executorch.program_file import EXECUTORCH_VERSION, ProgramFile, ProgramHeader
from papaya.learning.executorch.shim import shim_library
from papaya.learning.frozen_file import FrozenTensor
from papaya.learning.parameters import Vector

_ALIGNMENT: Final = 16
_OUT_OF_MEMORY: Final = 0x21  # Error::MemoryAllocationFailed
_AGAIN: Final = "compile the program again: papaya task compile TASK.py"
_FLOAT32: Final = "F32"
# ExecuTorch's ScalarType.
_TYPES: Final = {
    "U8": 0,
    "I8": 1,
    "I16": 2,
    "I32": 3,
    "I64": 4,
    "F16": 5,
    _FLOAT32: 6,
    "F64": 7,
    "BOOL": 11,
    "BF16": 15,
}


class _Named(ctypes.Structure):
    """`PapayaTensor` in shim.cc."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("sizes", ctypes.POINTER(ctypes.c_int32)),
        ("dimensions", ctypes.c_uint64),
        ("type", ctypes.c_int32),
        ("values", ctypes.c_void_p),
        ("placed", ctypes.c_void_p),
    )


class LoadedProgram:
    """A program in this process. `parameters` are views on its memory: change them in place."""

    def __init__(
        self,
        file: ProgramFile,
        parameters: dict[str, Vector],
        frozen: Mapping[str, FrozenTensor] | None = None,
    ) -> None:
        """`parameters`: shared and personal ones. `frozen`: the tensors that the header names."""
        self._library = library(shim_library())
        self._header = file.header
        # The runtime keeps a pointer to the program's bytes.
        self._program = _aligned(file.program)
        self._shapes = dict((*file.header.manifest.tensors, *file.header.personal))
        self._handle = ctypes.c_void_p()
        self._frozen = frozen or {}
        if tuple(sorted(self._frozen)) != tuple(sorted(file.header.frozen)):
            raise OperatorError(
                f"the program needs the frozen tensors {list(file.header.frozen)[:5]}, "
                f"there are {list(self._frozen)[:5]}",
                hint=_AGAIN,
            )
        self.parameters = self._load(parameters)

    def _load(self, parameters: dict[str, Vector]) -> dict[str, Vector]:
        # The runtime keeps a pointer to it, and to the frozen tensors.
        self._given = given = (_Named * (len(self._shapes) + len(self._frozen)))()
        named = [
            *((n, s, _FLOAT32, parameters[n].ctypes.data) for n, s in self._shapes.items()),
            *((n, f.shape, f.dtype, f.data.ctypes.data) for n, f in self._frozen.items()),
        ]
        for entry, (name, shape, dtype, values) in zip(given, named, strict=True):
            entry.name = _exported(name).encode()
            entry.sizes = (ctypes.c_int32 * len(shape))(*shape)
            entry.dimensions = len(shape)
            entry.type = _TYPES[dtype]
            entry.values = values
        status = self._library.papaya_load(
            self._program.ctypes.data,
            self._program.nbytes,
            given,
            len(given),
            ctypes.byref(self._handle),
        )
        if status:
            raise self._failure("cannot load the program", status)
        places = {name: entry.placed for name, entry in zip(self._shapes, given, strict=False)}
        if lost := [name for name, place in places.items() if not place]:
            raise OperatorError(f"the program does not use the parameters {lost}", hint=_AGAIN)
        return {name: _view(place, self._shapes[name]) for name, place in places.items()}

    def run(
        self, inputs: Sequence[npt.NDArray[np.generic]]
    ) -> tuple[float, list[float], dict[str, Vector]]:
        """The loss, the metrics and the gradients, which are views that the next run overwrites."""
        arrays = [np.ascontiguousarray(array) for array in inputs]
        status = self._library.papaya_run(
            self._handle,
            (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays)),
            (ctypes.c_uint64 * len(arrays))(*(array.nbytes for array in arrays)),
            len(arrays),
        )
        if status:
            raise self._failure("the program failed", status)
        count = 1 + len(self._header.terms.metric_bounds)
        loss, *metrics = (float(self._output(index, ())[()]) for index in range(count))
        names = enumerate(self._header.gradients, count)
        return loss, metrics, {n: self._output(i, self._shapes[n]) for i, n in names}

    def close(self) -> None:
        """Free the program's memory. Its views must not be used afterwards."""
        self._library.papaya_free(self._handle)
        self._handle = ctypes.c_void_p()

    def _output(self, index: int, shape: tuple[int, ...]) -> Vector:
        address = self._library.papaya_output(self._handle, index, 4 * math.prod(shape))
        if not address:
            raise OperatorError(
                f"output {index} of the program is not float32 of shape {list(shape)}", hint=_AGAIN
            )
        return _view(address, shape)

    def _failure(self, what: str, status: int) -> Exception:
        if status == _OUT_OF_MEMORY:
            return MemoryError(what)
        text = self._library.papaya_last_error().decode(errors="replace") or "no message"
        return OperatorError(f"{what}: {text} (ExecuTorch error {status})", hint=_AGAIN)


def require_operators(header: ProgramHeader) -> None:
    """Refuse operators that the runtime lacks. This loads the runtime, not the program."""
    has = library(shim_library()).papaya_has_operator
    if missing := [name for name in header.operators if not has(name.encode())]:
        raise OperatorError(
            f"ExecuTorch {EXECUTORCH_VERSION} lacks the operators {', '.join(missing)}",
            hint="change the layers of the model that need them",
        )


def _exported(name: str) -> str:
    """The exporter wraps the owner's module, as the attribute `module` of another one."""
    return f"module.{name}"


def _view(address: int, shape: tuple[int, ...]) -> Vector:
    memory = (ctypes.c_float * math.prod(shape)).from_address(address)
    view: Vector = np.ctypeslib.as_array(memory).reshape(shape)
    return view


def _aligned(data: bytes) -> npt.NDArray[np.uint8]:
    memory = np.empty(len(data) + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    aligned = memory[start : start + len(data)]
    aligned[:] = np.frombuffer(data, np.uint8)
    return aligned


@cache
def library(path: Path) -> ctypes.CDLL:
    """The shim, with the types of its functions."""
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise OperatorError(
            f"cannot load {path}: {error}", hint="install this package for this machine again"
        ) from error
    pointer, number = ctypes.c_void_p, ctypes.c_uint64
    for name, result, arguments in (
        ("papaya_last_error", ctypes.c_char_p, ()),
        ("papaya_has_operator", ctypes.c_bool, (ctypes.c_char_p,)),
        ("papaya_load", ctypes.c_int, (pointer, number, pointer, number, pointer)),
        ("papaya_run", ctypes.c_int, (pointer, pointer, pointer, number)),
        ("papaya_output", pointer, (pointer, number, number)),
        ("papaya_free", None, (pointer,)),
    ):
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded
