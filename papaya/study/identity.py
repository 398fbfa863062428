"""Names of kept files: a digest of all that decides their content, our own code included.

A file of another configuration, data, seed or code has another name, so an outdated file is never
used and users need not delete any. The code is the import closure of the recorder and the trainers:
a change to a command or a plot keeps the name.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

import papaya

ROOTS: Final = ("study/lab.py", "study/workloads/*.py")
"""The lab records and replays; a workload trains, and is found by name."""
EXPERIMENTS: Final = (*ROOTS, "study/experiments/*.py")
"""An experiment draws its conclusion from runs, so its result also depends on its own code."""
_PACKAGE: Final = Path(papaya.__file__).parent
_DIGITS: Final = 24


def digest(value: Struct, roots: tuple[str, ...] = ROOTS) -> str:
    """Of a value, and of the code that these files execute."""
    encoded = msgspec.json.encode((code_digest(roots=roots), value), order="deterministic")
    return hashlib.sha256(encoded).hexdigest()[:_DIGITS]


@cache
def code_digest(package: Path = _PACKAGE, roots: tuple[str, ...] = ROOTS) -> str:
    """Of every source that a run may execute; read once, when a process first asks."""
    hasher = hashlib.sha256()
    for path in closure(package, roots):
        content = path.read_bytes()
        name = path.relative_to(package).as_posix()
        hasher.update(f"{name} {len(content)}\n".encode() + content)
    return hasher.hexdigest()


def closure(package: Path, roots: tuple[str, ...] = ROOTS) -> list[Path]:
    """The files that the roots import, and those that these import, with their packages."""
    found: dict[Path, None] = {}
    waiting = [path for root in roots for path in package.glob(root)]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found[path] = None
            for module in _imports(package, path):
                waiting += _files(package, module)
    return sorted(found)


def _imports(package: Path, path: Path) -> Iterator[str]:
    if path == package / "__init__.py":
        return  # what it offers to users of the package, no run executes
    folders = ("papaya", *path.relative_to(package).parts[:-1])
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # One dot is the folder of the file, each further dot the folder above.
            base = folders[: len(folders) + 1 - node.level] if node.level else ()
            module = ".".join(filter(None, (*base, node.module)))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _files(package: Path, module: str) -> Iterator[Path]:
    """The file of a module of ours and the files of the packages around it."""
    top, *parts = module.split(".")
    if top != "papaya":
        return
    for length in range(len(parts) + 1):
        inner = package.joinpath(*parts[:length])
        for path in (inner / "__init__.py", inner.with_suffix(".py")):
            if path.is_file():
                yield path
