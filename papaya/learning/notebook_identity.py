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
from functools import cached_property, lru_cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
from msgspec import Struct, structs

from papaya.learning.definition import Task

_PLAIN: Final = (type(None), bool, int, float, complex, str, type(...))
_CONTAINERS: Final = (list, tuple, dict, set, frozenset)
_NAMED: Final = (FunctionType, BuiltinFunctionType, type)
_CACHED: Final = type(lru_cache(len))
_PICKLED: Final = 4  # the protocol
_GLOBAL: Final = ("LOAD_GLOBAL", "LOAD_NAME")
_NOT_OF_A_CLASS: Final = (
    *("__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__"),
    *("__static_attributes__", "_abc_impl", "__annotate__", "__annotations__"),
    *("__annotate_func__", "__annotations_cache__"),  # of Python 3.14
    "__slotnames__",  # which copying adds
)


def notebook_identity(task: Task) -> bytes:
    """A digest of what decides how a client trains and is evaluated, beside the settings that a
    run has itself.
    """
    functions = (task.model, task.loss, task.batch, dict(task.metrics), task.train)
    found = _Walk(task)
    try:
        found.add((*functions, tuple(task.personal), task.batch_norm))
    except Exception:  # whatever objects raise that cannot be copied, or are nested too deeply
        return os.urandom(32)
    return found.digest()


class _Walk:
    """Follows references once, and hashes what it finds in the order in which it finds it."""

    def __init__(self, task: Task) -> None:
        metrics = task.metric_functions
        own = (task.model, task.loss, task.batch, task.train, *metrics)
        self._modules = set(map(_module_of, own))
        self._hasher = hashlib.sha256()
        self._seen: dict[int, tuple[int, object]] = {}  # keeps objects, and so their ids

    def digest(self) -> bytes:
        return self._hasher.digest()

    def add(self, value: object) -> None:
        if isinstance(value, bytes | memoryview):
            self._bytes(value)
        elif isinstance(value, _PLAIN):
            self._text(f"{type(value).__name__} {value!r}")
        elif type(value) in (tuple, frozenset):
            # Whether equal constants are one object depends on how code is divided into cells.
            self._add_parts(value)
        elif id(value) in self._seen:
            self._text(f"again {self._seen[id(value)][0]}")
        else:
            self._seen[id(value)] = len(self._seen), value
            self._add_parts(value)

    def _add_parts(self, value: object) -> None:
        self._text(type(value).__name__)
        for part in self._parts(value):
            self.add(part)
        self._text("end")

    def _text(self, text: str) -> None:
        self._bytes(text.encode("utf-8", "surrogatepass"))

    def _bytes(self, content: bytes | memoryview) -> None:
        size = content.nbytes if isinstance(content, memoryview) else len(content)
        self._hasher.update(size.to_bytes(8, "big"))
        self._hasher.update(content)

    def _parts(self, value: Any) -> Iterator[object]:
        """What this value consists of."""
        match value:
            case list() | tuple() | set() | frozenset() | Mapping():
                yield from _items(value)
            case FunctionType() if value.__module__ in self._modules:
                yield from self._function(value)
            case type() if value.__module__ in self._modules:
                yield from self._class(value)
            case FunctionType() | type() | BuiltinFunctionType():
                yield _name(value)
            case ModuleType():
                yield value.__name__
            case MethodType():
                yield from (value.__func__, value.__self__)
            case partial():
                yield from (value.func, value.args, value.keywords)
            case CodeType():
                yield from _code(value)
            case staticmethod() | classmethod():
                yield value.__func__
            case property():
                yield from (value.fget, value.fset)
            case cached_property():
                yield value.func
            case _ if isinstance(value, _CACHED):
                yield value.__wrapped__
            case np.ndarray() if type(value) in (np.ndarray, np.memmap):
                yield from _array(value)
            case Struct():
                yield from (type(value), structs.asdict(value))
            case _ if _is_dense(value):
                yield from _tensor(value)
            case _:
                yield from _object(value)

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


def _module_of(function: object) -> object:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__module__", None)


def _items(value: Any) -> Iterator[object]:
    if type(value) not in _CONTAINERS:
        yield from (type(value), getattr(value, "__dict__", None))
    if isinstance(value, set | frozenset):
        yield from sorted(value, key=_order)
    elif isinstance(value, Mapping):
        for item in value.items():
            yield from item
    else:
        yield from value


def _order(member: object) -> str:
    """By what the members of a set are sorted, which is the same in every process."""
    if isinstance(member, _PLAIN) or type(member) is bytes:
        return f"{type(member).__name__} {member!r}"
    if isinstance(member, tuple | frozenset):
        return f"{type(member).__name__} {list(map(_order, _items(member)))}"
    if isinstance(member, _NAMED):
        return _name(member)
    if isinstance(name := member.__reduce_ex__(_PICKLED), str):
        return name
    raise TypeError(f"a set with members of type {type(member).__name__} has no order")


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _code(value: CodeType) -> Iterator[object]:
    counts = (value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount)
    yield from (*counts, value.co_flags, value.co_varnames[: counts[0] + counts[2]])
    yield from (value.co_code, value.co_names, value.co_consts)


def _array(value: np.ndarray[Any, Any]) -> Iterator[object]:
    yield from (str(value.dtype), value.shape)
    if value.dtype.hasobject:  # its bytes are addresses
        yield value.tolist()
    else:
        yield np.ascontiguousarray(value).reshape(-1).view(np.uint8).data


def _is_dense(value: object) -> bool:
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_quantized
    )


def _tensor(value: Any) -> Iterator[object]:
    """NumPy does not have all types of torch."""
    yield from (type(value), str(value.dtype), tuple(value.shape), value.requires_grad)
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    yield plain.view(sys.modules["torch"].uint8).numpy().data


def _object(value: Any) -> Iterator[object]:
    """As it would be copied or pickled."""
    yield type(value)
    made = value.__reduce_ex__(_PICKLED)
    yield made if isinstance(made, str) else [_listed(part) for part in made]


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
