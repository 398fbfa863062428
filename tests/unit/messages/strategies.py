"""Any message of any type, drawn from its own type annotations: a new message needs no new test.

Reads what msgspec knows of a type, bounds included. Refuses to guess: an unknown kind of field is
a NotImplementedError, so that it is noticed.
"""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

from hypothesis import strategies as st
from msgspec import Struct, inspect

from papaya.config import AsyncFL, SecureAggregation, SyncFL, TaskConfig
from papaya.messages import storage, wire
from papaya.messages.base import Message

FROM_DEVICE: tuple[type[Message], ...] = get_args(wire.FromDevice)
TO_DEVICE: tuple[type[Message], ...] = get_args(wire.ToDevice)
BETWEEN_SERVERS: tuple[type[Message], ...] = get_args(wire.BetweenServers)
ROWS: tuple[type[storage.Row], ...] = tuple(
    value
    for value in vars(storage).values()
    if isinstance(value, type) and issubclass(value, storage.Row) and value is not storage.Row
)

# Whole numbers that JSON carries exactly, and finite floats: it has no others.
_LARGEST = 2**53
_SHORT = 12
_DIGEST = 64  # the longest text that a pattern requires


def a_message(*kinds: type[Message]) -> st.SearchStrategy[Message]:
    return st.one_of([_struct(kind) for kind in kinds])


def a_row(*kinds: type[storage.Row]) -> st.SearchStrategy[storage.Row]:
    return st.one_of([_struct(kind) for kind in kinds])


def with_unknown_fields(document: Any) -> Any:
    """The document with a field in every object that only a later version knows."""
    match document:
        case dict():
            known = {name: with_unknown_fields(value) for name, value in document.items()}
            return known | {"of_a_later_version": [{"type": "Join"}, None, 1.5]}
        case list():
            return [with_unknown_fields(each) for each in document]
    return document


def task_configs() -> st.SearchStrategy[TaskConfig]:
    """Configurations keep rules that their field types do not show: a few good ones."""
    base: dict[str, Any] = {"task": "next-word", "concurrency": 100, "model_length": 10}
    return st.sampled_from(
        [
            TaskConfig(**base),
            TaskConfig(**base, regime=SyncFL(0.1), max_participations=2),
            TaskConfig(**base, regime=AsyncFL(7, 9), clip=2.5),
            TaskConfig(**base, secure_aggregation=SecureAggregation(3), clip=1.0),
        ]
    )


@cache
def _struct(kind: type[Struct]) -> st.SearchStrategy[Any]:
    if kind is TaskConfig:
        return task_configs()
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return st.builds(kind, **{field.name: _value(field.type) for field in info.fields})


def _value(kind: inspect.Type) -> st.SearchStrategy[Any]:
    match kind:
        case inspect.Metadata(type=inner):
            return _value(inner)
        case inspect.StructType(cls=cls):
            return _struct(cls)
        case inspect.UnionType(types=types):
            return st.one_of([_value(one) for one in types])
        case inspect.VarTupleType(item_type=item):
            return st.lists(_value(item), max_size=4).map(tuple)
        case inspect.TupleType(item_types=items):
            return st.tuples(*[_value(item) for item in items])
        case inspect.DictType(key_type=key, value_type=item):
            return st.dictionaries(_value(key), _value(item), max_size=4)
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
    return _scalar(kind)


def _scalar(kind: inspect.Type) -> st.SearchStrategy[Any]:
    match kind:
        case inspect.NoneType():
            return st.none()
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType(ge=ge, le=le, lt=lt):
            above = -_LARGEST if ge is None else ge
            below = _LARGEST if le is None and lt is None else le if lt is None else lt - 1
            return st.integers(above, below)
        case inspect.FloatType(ge=ge):
            return st.floats(ge, allow_nan=False, allow_infinity=False)
        case inspect.StrType(max_length=longest, pattern=None):
            return st.text(max_size=min(_SHORT, longest or _SHORT))
        case inspect.StrType(pattern=str(pattern)):
            return st.from_regex(pattern, fullmatch=True).filter(lambda text: len(text) <= _DIGEST)
        case inspect.BytesType(min_length=shortest, max_length=longest):
            least = shortest or 0
            most = max(least, min(4 * _SHORT, longest or 4 * _SHORT))
            return st.binary(min_size=least, max_size=most)
    raise NotImplementedError(kind)
