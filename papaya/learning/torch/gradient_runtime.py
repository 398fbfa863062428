"""Compiled gradients without torch's tensors: builds and calls `gradient_runtime.cc`.

The runtime is compiled once for a machine and kept beside the libraries of models, which are linked
with it. It runs single gradients, and the plain SGD of many clients without Python between steps.
It takes torch's place for the functions that it defines; a library which calls others is refused by
`is_enough` and has to be linked with torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import stat
import subprocess
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_int64, c_size_t, c_void_p
from functools import cache, lru_cache
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from papaya.errors import CannotCompile
from papaya.learning.parameters import FLOAT32, Vector

_SOURCE: Final = Path(__file__).with_suffix(".cc")
_OPTIONS: Final = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-shared")
_COMPILE_S: Final = 300.0
# The numbers that c10::ScalarType gives to the types of tensors which the runtime takes.
DTYPES: Final = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bool: 11,
    torch.bfloat16: 15,
}
# Functions of torch that take no tensors: a library may call them beside those of the runtime.
_WITHOUT_TENSORS: Final = r"aoti_torch_(dtype|device_type|layout|grad_mode)_\w+|aoti_torch_check"


class _Blob(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("sizes", c_void_p),
        ("strides", c_void_p),
        ("dimensions", c_int64),
        ("dtype", c_int64),
    )


class ClientSteps(NamedTuple):
    """The steps of many clients: how many each makes, the examples in each batch, and the rows of
    the columns that they are, one batch after the other; and the rate of each step.
    """

    of_client: npt.NDArray[np.int64]
    batches: npt.NDArray[np.int64]
    order: npt.NDArray[np.int64]
    rates: npt.NDArray[np.float32]


class RuntimeGradient:
    """A library that is linked with the runtime, and the frozen tensors of a module."""

    def __init__(self, library: Path, runtime: Path, frozen: Sequence[Tensor]) -> None:
        self._calls = _runtime(runtime)
        if hasattr(ctypes.CDLL(None), "aoti_torch_empty_strided"):
            raise CannotCompile("torch was loaded with RTLD_GLOBAL, which hides the runtime")
        code = _loaded(library)
        self._container = c_void_p()
        if code.AOTInductorModelContainerCreateWithDevice(
            ctypes.byref(self._container), c_size_t(1), c_char_p(b"cpu"), None
        ):
            raise CannotCompile(f"{library} cannot be loaded")
        weakref.finalize(self, code.AOTInductorModelContainerDelete, self._container)
        self._last_error = code.AOTInductorGetLastError
        self._run = ctypes.cast(code.AOTInductorModelContainerRunSingleThreaded, c_void_p)
        self._frozen = frozen

    def gradient(self, parameters: Tensor, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The loss and its gradient."""
        loss, gradient = torch.empty(()), torch.empty(len(parameters))
        inputs = _Inputs([parameters, *self._frozen, *batch])
        if self._calls.papaya_gradient(
            *(self._run, self._container, inputs.blobs, len(inputs.tensors), len(parameters)),
            *(loss.data_ptr(), gradient.data_ptr()),
        ):
            raise self._failure()
        return loss, gradient

    def train(
        self,
        models: Sequence[Vector],
        columns: Sequence[Tensor],
        steps: ClientSteps,
        updates: npt.NDArray[np.float32],
    ) -> npt.NDArray[np.float32]:
        """Plain SGD: write the update of each client to its row. The losses of all steps."""
        length = updates.shape[1]
        losses = np.empty(len(steps.batches), FLOAT32)
        inputs = _Inputs([torch.empty(length), *self._frozen, *columns])
        # Many clients start from one version.
        starts = {id(model): np.ascontiguousarray(model, FLOAT32) for model in models}
        places = {name: start.ctypes.data for name, start in starts.items()}
        addresses = np.array([places[id(model)] for model in models], np.uintp)
        if self._calls.papaya_train(
            *(self._run, self._container, inputs.blobs, len(inputs.tensors), len(columns), length),
            *(len(models), addresses.ctypes.data),
            *(each.ctypes.data for each in steps),
            *(updates.ctypes.data, losses.ctypes.data),
        ):
            raise self._failure()
        return losses

    def _failure(self) -> RuntimeError:
        """As torch raises it, for example if an index of the batch is out of bounds."""
        message = c_char_p()
        self._last_error(ctypes.byref(message))
        return RuntimeError((message.value or b"the runtime failed").decode(errors="replace"))


class _Inputs:
    """Tensors as the runtime takes them; they stay alive as long as this does."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        self.tensors = [value.contiguous() for value in given]
        self._shapes = [_sizes_and_strides(value.shape) for value in self.tensors]
        blobs = map(_blob, self.tensors, self._shapes)
        self.blobs = (_Blob * len(given))(*blobs)


def _blob(value: Tensor, shape: ctypes.Array[c_int64]) -> _Blob:
    sizes, dimensions = ctypes.addressof(shape), value.dim()
    return _Blob(value.data_ptr(), sizes, sizes + 8 * dimensions, dimensions, DTYPES[value.dtype])


@lru_cache(maxsize=256)
def _sizes_and_strides(shape: tuple[int, ...]) -> ctypes.Array[c_int64]:
    """Of a contiguous tensor."""
    strides = [prod(shape[place + 1 :]) for place in range(len(shape))]
    return (c_int64 * (2 * len(shape)))(*shape, *strides)


def machine_digest() -> str:
    """What compiled code depends on beside its source."""
    machine = torch.backends.cpu.get_cpu_capability()
    about = (torch.__version__, machine, _compiler(), _macros(_compiler()))
    return hashlib.sha256(repr(about).encode()).hexdigest()


def make_private(folder: Path) -> None:
    """A folder for libraries that this process loads. Raises CannotCompile if all users can write
    to it, because then they could run their code here.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_mode & stat.S_IWOTH:
        raise CannotCompile(f"all users can write to {folder}", hint=f"chmod o-w {folder}")


def built_runtime(folder: Path) -> Path:
    """The runtime in this folder, compiled if it is not there. Raises CannotCompile."""
    make_private(folder)
    about = (machine_digest(), _OPTIONS, _SOURCE.read_text())
    digest = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    # Libraries of models name the file without its folder, so they can be used with any version.
    target = folder / f"runtime-{digest}" / "libpapaya_gradient.so"
    if target.exists():
        return target
    target.parent.mkdir(exist_ok=True, mode=0o700)
    torch_libraries = Path(torch.__file__).parent / "lib"
    with tempfile.TemporaryDirectory(dir=target.parent) as place:
        made = Path(place) / target.name
        command = [
            *(_compiler(), *_OPTIONS, str(_SOURCE), "-o", str(made)),
            f"-Wl,-soname,{target.name}",
            # For the mathematical functions of vectors, which libraries of models call.
            *("-Wl,--no-as-needed", f"-L{torch_libraries}", "-ltorch_cpu"),
        ]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_S)
        except (OSError, subprocess.SubprocessError) as error:
            raise CannotCompile(f"cannot compile {_SOURCE.name}: {error}") from error
        made.replace(target)
    return target


def is_enough(code: str) -> bool:
    """Whether the runtime has all functions on tensors that this C++ code calls."""
    called = set(re.findall(r"\baoti_torch_\w+", code))
    own = set(re.findall(r"^int32_t (aoti_torch_\w+)", _SOURCE.read_text(), re.MULTILINE))
    return all(re.fullmatch(_WITHOUT_TENSORS, name) for name in called - own)


@contextmanager
def linked_with(runtime: Path) -> Iterator[dict[str, Any]]:
    """Inductor's settings for libraries that are linked with the runtime instead of torch."""
    name = "LIBRARY_PATH"
    before = os.environ.get(name)
    os.environ[name] = os.pathsep.join(filter(None, [str(runtime.parent), before]))
    try:
        yield {
            "aot_inductor.link_libtorch": False,
            "aot_inductor.custom_op_libs": [f":{runtime.name}"],
        }
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


@cache
def _macros(compiler: str) -> str:
    """What the compiler defines on this machine: its version, and all instructions that it uses.
    Machines that share a folder may differ in both. Empty without a compiler.
    """
    command = [compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    try:
        done = subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_S)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace")


def _loaded(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library), mode=os.RTLD_NOW)
    except OSError as error:
        raise CannotCompile(
            f"cannot load {library}: {error}", hint="delete the file, and run it again"
        ) from error


@cache
def _runtime(path: Path) -> Any:
    calls = _loaded(path)
    first: list[Any] = [c_void_p, c_void_p, POINTER(_Blob), c_int64]
    calls.papaya_gradient.argtypes = [*first, c_int64, c_void_p, c_void_p]
    calls.papaya_train.argtypes = [*first, *[c_int64] * 3, *[c_void_p] * 7]
    return calls
