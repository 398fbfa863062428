"""Fields turn examples into arrays, the same as a `batch` function would, or refuse them."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

from papaya.errors import ConfigError
from papaya.learning.example_fields import (
    Binary,
    DoesNotFit,
    ExampleField,
    JsonNumbers,
    Numbers,
    WordPlaces,
    read_fields,
)


def one(field: ExampleField, *examples: bytes) -> Any:
    (array,) = read_fields((field,), examples)
    return array


def test_numbers_of_a_line() -> None:
    first, last = read_fields(
        (Numbers(2), Numbers(1, start=2, kind="int64")), [b"1.5,-2,7", b"0,1e1,8"]
    )
    assert first.dtype == np.float32
    assert first.tolist() == [[1.5, -2], [0, 10]]
    assert last.dtype == np.int64
    assert last.tolist() == [[7], [8]]
    assert one(Numbers(2, separator=" "), b"3 4").tolist() == [[3, 4]]


def test_words_have_places() -> None:
    field = WordPlaces(3, places=100, known=("the", "a"), reserved=10)
    shared = 10 + zlib.crc32(b"mango") % 90
    assert one(field, b"a mango the").tolist() == [[1, shared, 0]]


def test_numbers_in_json() -> None:
    x, y = JsonNumbers("x", (2, 2)), JsonNumbers("y", (), "int64")
    first, last = read_fields((x, y), [b'{"x":[[1,2],[3,4.5]],"y":2}'])
    assert first.tolist() == [[[1, 2], [3, 4.5]]]
    assert last.tolist() == [2]


def test_binary_arrays() -> None:
    example = np.array([1, 255], np.uint8).tobytes() + np.int64(-3).tobytes()
    first, last = read_fields((Binary("uint8", (2,)), Binary("int64", (), 2)), [example])
    assert first.dtype == np.float32
    assert first.tolist() == [[1, 255]]
    assert last.dtype == np.int64
    assert last.tolist() == [-3]


@pytest.mark.parametrize(
    ("field", "example"),
    [
        (Numbers(3), b"secret,2"),
        (Numbers(3), b"1,2"),
        (Numbers(1), b"nan"),
        (Numbers(1), b"1e999"),
        (Numbers(1), b"\xff"),
        (Numbers(1, kind="int64"), b"99999999999999999999999"),
        (Numbers(1, kind="int64"), b"1.5"),
        (WordPlaces(3, 10), b"two words"),
        (JsonNumbers("x", ()), b"{"),
        (JsonNumbers("x", ()), b"[1]"),
        (JsonNumbers("x", ()), b'{"y":1}'),
        (JsonNumbers("x", ()), b'{"x":"1"}'),
        (JsonNumbers("x", ()), b'{"x":null}'),
        (JsonNumbers("x", ()), b'{"x":true}'),
        (JsonNumbers("x", (2,)), b'{"x":[1,[2]]}'),
        (JsonNumbers("x", (), "int64"), b'{"x":1.0}'),
        (Binary("float32", (2,)), b"1234567"),
        (Binary("float32", (1,), start=9), b"12345678"),
        (Binary("float32", ()), b"\xff\xff\xff\xff"),
    ],
)
def test_an_example_that_does_not_fit_is_refused_and_not_repeated(
    field: ExampleField, example: bytes
) -> None:
    with pytest.raises(DoesNotFit, match=r"^an example does not fit field 0") as refused:
        read_fields((field,), [example])
    assert "secret" not in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.quote == f"the example is {example!r}"


def test_the_quote_is_of_the_first_example_that_does_not_fit_and_its_beginning_only() -> None:
    finite, infinite = np.float32(1).tobytes(), np.float32("inf").tobytes()
    with pytest.raises(DoesNotFit) as refused:
        read_fields((Binary("float32", ()),), [finite, infinite, finite])
    assert refused.value.quote == f"the example is {infinite!r}"
    with pytest.raises(DoesNotFit) as refused:
        read_fields((Numbers(1),), [b"1", b"x" * 1000])
    assert refused.value.quote == f"the example is {b'x' * 200!r} and 800 more bytes"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Numbers(0),
        lambda: Numbers(1, start=-1),
        lambda: Numbers(1, separator=""),
        lambda: WordPlaces(1, places=2, known=("a", "b"), reserved=2),
        lambda: WordPlaces(1, places=9, known=("a", "b"), reserved=1),
        lambda: JsonNumbers("x", (0,)),
        lambda: Binary("uint8", (1,) * 9),
    ],
)
def test_a_field_that_cannot_work_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()
