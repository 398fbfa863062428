"""Every kernel gives the bits of the simple loop, whatever the updates are views of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.errors import InvariantError
from papaya.learning import kernels
from papaya.learning.kernels import Kernel
from papaya.learning.parameters import FLOAT32, FLOAT64, Tensor, Vector

KERNELS = [kernels.NUMPY, kernels.compiled()]
LENGTHS = [kernels._SMALL + size for size in (0, 7, 8)] + [
    kernels._BLOCK - 1,
    kernels._BLOCK + 8,
    3 * kernels._BLOCK - 5,
]
each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: str(kernel.name))


def simple_loop(total: Tensor, updates: Sequence[Vector], factors: Sequence[float]) -> Tensor:
    """One update after the other, each product rounded before it is added."""
    result = total.copy()
    for update, factor in zip(updates, factors, strict=True):
        result = result + update.astype(total.dtype) * total.dtype.type(factor)
    return result


def cut(update: Vector, place: int) -> list[Vector]:
    return [update[:place], update[place:]]


def updates_of(rng: np.random.Generator, count: int, length: int) -> list[Vector]:
    return [rng.standard_normal(length).astype(np.float32) for _ in range(count)]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, list[Vector], list[float], int]:
    """A total, up to twenty updates, their factors, and a place to cut at."""
    length, count = draw(st.integers(1, 40)), draw(st.integers(0, 20))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    magnitude = 10.0 ** draw(st.integers(-45, 38))
    dtype: np.dtype[Any] = draw(st.sampled_from([FLOAT32, FLOAT64]))
    updates = [(rng.uniform(-1, 1, length) * magnitude).astype(np.float32) for _ in range(count)]
    factors = [draw(st.floats(0, 2.0**32)) for _ in updates]
    total = (rng.uniform(-1, 1, length) * magnitude).astype(dtype)
    return total, updates, factors, draw(st.integers(0, length))


@each_kernel
@given(problem=problems())
def test_the_bits_are_those_of_the_simple_loop(
    kernel: Kernel, problem: tuple[Tensor, list[Vector], list[float], int]
) -> None:
    total, updates, factors, place = problem
    with np.errstate(all="ignore"):  # a kernel adds whatever it is given
        expected = simple_loop(total, updates, factors)
        kernel.add_all(total, [cut(update, place) for update in updates], factors)
    assert np.array_equal(total, expected, equal_nan=True)


@each_kernel
@given(places=st.lists(st.integers(0, 30), max_size=18))
def test_updates_may_be_cut_at_different_places(kernel: Kernel, places: list[int]) -> None:
    updates = [np.arange(30, dtype=np.float32) * 2**i for i in range(len(places))]
    total = np.zeros(30, np.float32)
    pieces = [cut(update, place) for update, place in zip(updates, places, strict=True)]
    kernel.add_all(total, pieces, [1.0] * len(places))
    assert np.array_equal(total, np.arange(30) * (2 ** len(places) - 1))


@each_kernel
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("count", [1, 8, 9])
def test_every_block_and_every_stream_is_added_once(
    kernel: Kernel, length: int, count: int
) -> None:
    rng = np.random.default_rng(length + count)
    updates = updates_of(rng, count, length)
    factors = [float(rng.integers(1, 100)) for _ in updates]
    total = rng.standard_normal(length).astype(np.float32)
    expected = simple_loop(total, updates, factors)
    kernel.add_all(total, [cut(update, 7) for update in updates], factors)
    assert np.array_equal(total, expected)


@each_kernel
def test_small_integers_sum_exactly_and_name_their_members(kernel: Kernel) -> None:
    updates = [np.full(100, 2.0**member, np.float32) for member in range(20)]
    total = np.zeros(100, np.float32)
    kernel.add_all(total, [[update] for update in updates], [1.0] * 20)
    assert np.all(total == 2**20 - 1)


@each_kernel
def test_updates_may_be_read_only_and_start_anywhere_in_memory(kernel: Kernel) -> None:
    expected = np.arange(50, dtype=np.float32)
    raw = b"x" + expected.tobytes()
    views = [
        np.frombuffer(raw[1:], FLOAT32),
        np.frombuffer(raw, FLOAT32, offset=1),
        np.frombuffer(memoryview(bytearray(raw))[1:], FLOAT32),
        expected,
    ]
    assert not views[1].flags.aligned
    total = np.zeros(50, np.float32)
    kernel.add_all(total, [[view] for view in views], [1.0] * 4)
    assert np.array_equal(total, 4 * expected)


@each_kernel
@pytest.mark.parametrize(
    "wrong",
    [
        [np.zeros(9, np.float32)],
        [np.zeros(11, np.float32)],
        [np.zeros(1, np.float32)],
        [np.zeros((1, 10), np.float32)],
        [np.zeros(10, np.float64)],
        [np.zeros(10, np.uint32)],
        [np.zeros(5, np.float32), np.zeros(6, np.float32)],
        [],
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_added(
    kernel: Kernel, wrong: list[Vector]
) -> None:
    total = np.zeros(10, np.float32)
    with pytest.raises(InvariantError):
        kernel.add_all(total, [[np.ones(10, np.float32)], wrong], [1.0, 1.0])
    for count in (1, 3):
        with pytest.raises(InvariantError):
            kernel.add_all(total, [[np.ones(10, np.float32)]] * 2, [1.0] * count)
    assert not total.any()


def test_the_choice_is_made_once_and_has_a_name() -> None:
    assert kernels.fastest() is kernels.compiled()
    assert [kernel.name for kernel in KERNELS] == ["numpy", "numba"]
