"""What a task of a notebook consists of: its code, and all values that the code uses.

A task file is identified by its bytes. Functions of a notebook refer to other functions, classes
and variables, and kept results must not be taken for those of a task in which one of them differs.
So globals and closures are followed, as far as they are defined in the module of the task's own
functions. Functions and classes of other modules are identified by their names: like a task file,
this does not cover installed packages and files that are imported. What cannot be identified, such
as an open file, makes each task another one.
"""

from __future__ import annotations

import dis
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
from msgspec import Struct, structs

from papaya.learning.definition import Task

_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, type(...))
_PICKLED: Final = 4  # the protocol
_GLOBAL: Final = ("LOAD_GLOBAL", "LOAD_NAME")
_NOT_OF_A_CLASS: Final = (
    *("__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__"),
    *("__static_attributes__", "_abc_impl", "__annotate__", "__annotations__"),
    "__slotnames__",  # which copying adds
)


def notebook_identity(task: Task) -> bytes:
    """A digest of what decides how a client trains and is evaluated, beside the settings that a
    run has itself.
    """
    functions = (task.model, task.loss, task.batch, dict(task.metrics), task.train)
    found = _Walk(task)
    found.add((*functions, tuple(task.personal), task.batch_norm))
    return found.digest()


class _Walk:
    """Follows references once, and hashes what it finds in the order in which it finds it."""

    def __init__(self, task: Task) -> None:
        metrics = task.metric_functions
        own = (task.model, task.loss, task.batch, task.train, *metrics)
        self._modules = {getattr(each, "__module__", None) for each in own}
        self._hasher = hashlib.sha256()
        self._seen: dict[int, tuple[int, object]] = {}  # keeps objects, and so their ids

    def digest(self) -> bytes:
        return self._hasher.digest()

    def add(self, value: object) -> None:
        if isinstance(value, _PLAIN):
            self._text(f"{type(value).__name__} {value!r}")
        elif id(value) in self._seen:
            self._text(f"again {self._seen[id(value)][0]}")
        else:
            self._seen[id(value)] = len(self._seen), value
            self._text(type(value).__name__)
            for part in self._parts(value):
                self.add(part)
            self._text("end")

    def _text(self, text: str) -> None:
        encoded = text.encode("utf-8", "surrogatepass")
        self._hasher.update(len(encoded).to_bytes(8, "big") + encoded)

    def _parts(self, value: Any) -> Iterator[object]:
        """What this value consists of."""
        match value:
            case list() | tuple():
                yield from value
            case set() | frozenset():
                yield from sorted(map(repr, value))
            case Mapping():
                for item in value.items():
                    yield from item
            case FunctionType() if value.__module__ in self._modules:
                yield from self._function(value)
            case type() if value.__module__ in self._modules:
                yield from self._class(value)
            case FunctionType() | type() | BuiltinFunctionType():
                yield f"{value.__module__}.{value.__qualname__}"
            case ModuleType():
                yield value.__name__
            case MethodType():
                yield from (value.__func__, value.__self__)
            case partial():
                yield from (value.func, value.args, value.keywords)
            case CodeType():
                yield from (value.co_code, value.co_names, value.co_consts)
            case staticmethod() | classmethod():
                yield value.__func__
            case property():
                yield from (value.fget, value.fset)
            case np.ndarray():
                yield from (str(value.dtype), value.shape, value.tobytes())
            case Struct():
                yield from (type(value), structs.asdict(value))
            case _:
                yield from self._object(value)

    def _function(self, value: FunctionType) -> Iterator[object]:
        yield from (value.__code__, value.__defaults__, value.__kwdefaults__)
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # it is empty
                yield cell.cell_contents
        for name in sorted(set(_global_names(value.__code__))):
            if name in value.__globals__:
                yield from (name, value.__globals__[name])

    def _class(self, value: type) -> Iterator[object]:
        yield from (value.__qualname__, value.__bases__)
        for name, attribute in vars(value).items():
            if name not in _NOT_OF_A_CLASS:
                yield from (name, attribute)

    def _object(self, value: Any) -> Iterator[object]:
        """As it would be copied or pickled."""
        yield type(value)
        try:
            if _is_tensor(value):
                yield value.detach().cpu().double().numpy()
                return
            made = value.__reduce_ex__(_PICKLED)
            yield made if isinstance(made, str) else [_listed(part) for part in made]
        except Exception:  # such as an open file
            yield os.urandom(16)


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _listed(part: object) -> object:
    """The items of lists and dicts come as iterators."""
    return list(part) if isinstance(part, Iterator) else part


def _global_names(code: CodeType) -> Iterator[str]:
    for step in dis.get_instructions(code):
        if step.opname in _GLOBAL:
            yield step.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)
