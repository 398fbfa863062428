"""Finds or builds the shim: the ExecuTorch runtime behind a C interface (`shim.cc`).

A device package has it, with the runtime's libraries, in the folder `lib` beside this file.
Elsewhere it is compiled once, against the headers and libraries of the installed `executorch`
package, and kept in the user's cache under a digest of its inputs. The Python part of that package
is never imported: it would import torch.

Refused (OperatorError): no executorch package of the right version, no C++ compiler.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from papaya.errors import OperatorError
from papaya.learning.executorch.program_file import EXECUTORCH_VERSION

RUNTIME_LIBRARIES: Final = ("executorch", "executorch_kernels_optimized", "executorch_threadpool")
SHIM_NAME: Final = "libpapaya_executorch.so"
_SOURCE: Final = Path(__file__).with_name("shim.cc")
_PACKAGED: Final = Path(__file__).with_name("lib") / SHIM_NAME
_TORCH: Final = "or train with task files: --engine torch"
_COMPILE_S: Final = 1200.0  # seconds on an idle machine, minutes on a loaded one


def shim_library() -> Path:
    """The shim of this machine, built if necessary."""
    if _PACKAGED.exists():
        return _PACKAGED
    package = executorch_package()
    compiler = os.environ.get("CXX", "c++")
    inputs = [_SOURCE.read_text(), EXECUTORCH_VERSION, str(package), compiler]
    digest = hashlib.sha256("\0".join(inputs).encode()).hexdigest()[:16]
    target = cache_folder() / "shim" / digest / SHIM_NAME
    if not target.exists():
        build(target, package, compiler, runpath=str(package / "lib"))
    return target


def executorch_package() -> Path:
    """The folder of the installed executorch package."""
    spec = importlib.util.find_spec("executorch")
    if spec is None or not spec.submodule_search_locations:
        raise OperatorError(
            "the executorch engine needs the executorch package, which is not installed",
            hint=f"pip install --no-deps executorch=={EXECUTORCH_VERSION}, {_TORCH}",
        )
    if (version := importlib.metadata.version("executorch")) != EXECUTORCH_VERSION:
        raise OperatorError(
            f"the executorch package is version {version}, expected {EXECUTORCH_VERSION}",
            hint=f"pip install --no-deps executorch=={EXECUTORCH_VERSION}, {_TORCH}",
        )
    return Path(spec.submodule_search_locations[0])


def cache_folder() -> Path:
    """The user's cache of what Papaya builds."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "papaya"


def build(target: Path, package: Path, compiler: str, runpath: str) -> None:
    """Compile the shim. Processes that build it at the same time do not disturb each other."""
    include = package / "include"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / SHIM_NAME
        _compile(
            [
                *(compiler, "-std=c++17", "-O2", "-fPIC", "-shared", str(_SOURCE), "-o", str(made)),
                *("-isystem", str(include)),
                *("-isystem", str(include / "executorch/runtime/core/portable_type/c10")),
                "-DC10_USING_CUSTOM_GENERATED_MACROS",
                # The kernels register themselves when they are loaded; the shim names none of them.
                *(f"-L{package / 'lib'}", "-Wl,--no-as-needed"),
                *(f"-l{name}" for name in RUNTIME_LIBRARIES),
                f"-Wl,-rpath,{runpath}",
            ]
        )
        made.replace(target)


def _compile(command: Sequence[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_S)
    except FileNotFoundError as error:
        raise OperatorError(
            f"the executorch engine needs a C++ compiler; there is no {command[0]!r}",
            hint=f"apt install g++, or set CXX, {_TORCH}",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise OperatorError(
            f"cannot compile {_SOURCE.name}: {command[0]!r} did not end within {_COMPILE_S:g} s",
            hint=f"try again when the machine is less busy, {_TORCH}",
        ) from error
    except subprocess.CalledProcessError as error:
        first = error.stderr.decode(errors="replace").strip().splitlines()[:1]
        raise OperatorError(
            f"cannot compile {_SOURCE.name}: {' '.join(first) or error}",
            hint=f"use a C++17 compiler: set CXX, {_TORCH}",
        ) from error
