"""Weights and the weighted sum, against a naive float64 reference."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from papaya.config import Staleness, TaskConfig, Weighting
from papaya.errors import InvariantError, ProtocolError
from papaya.learning.parameters import BLOCK, FLOAT32, FLOAT64, Vector, encode_tensors
from papaya.learning.weighting import (
    MAX_EXAMPLES,
    Admitted,
    Contribution,
    WeightedSum,
    admit,
    counted_examples,
    model_update,
    staleness_weight,
)

Member = tuple[list[float], int, int]
DTYPES = [FLOAT32, FLOAT64]

# Lengths on both sides of every branch: tiny, one block, several blocks.
LENGTHS = [1, 16, 17, BLOCK, BLOCK + 1, 3 * BLOCK - 5]


def reference_step(members: list[Member]) -> list[float]:
    """sum n * delta / sqrt(1 + s) / sum n, one coordinate at a time."""
    weight = sum(examples for _, examples, _ in members)
    return [
        math.fsum(n * x / math.sqrt(1 + s) for (_, n, s), x in zip(members, column, strict=True))
        / weight
        for column in zip(*(delta for delta, _, _ in members), strict=True)
    ]


def folded(members: list[Member], dtype: np.dtype[Any] = FLOAT32) -> WeightedSum:
    total = WeightedSum.zero(len(members[0][0]), dtype)
    for delta, examples, staleness in members:
        total.add(np.array(delta, np.float32), examples, staleness)
    return total


def members_of(coordinates: st.SearchStrategy[float]) -> st.SearchStrategy[list[Member]]:
    def of_length(length: int) -> st.SearchStrategy[list[Member]]:
        deltas = st.lists(coordinates, min_size=length, max_size=length)
        member = st.tuples(deltas, st.integers(1, 50), st.integers(0, 1023))
        return st.lists(member, min_size=1, max_size=8)

    return st.integers(1, 20).flatmap(of_length)


SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
real_members = members_of(st.floats(-100, 100, width=32))
integer_members = members_of(st.integers(-100, 100).map(float))


def test_staleness_weights_by_hand() -> None:
    assert [staleness_weight(s) for s in (0, 3, 8, 15, 99)] == [1, 1 / 2, 1 / 3, 1 / 4, 1 / 10]
    assert staleness_weight(1) == 1 / math.sqrt(2)


@pytest.mark.parametrize(
    ("function", "factors"),
    [
        (Staleness(), [1, 1 / math.sqrt(2), 1 / 3, 1 / 10]),
        (Staleness("polynomial", exponent=1.0), [1, 1 / 2, 1 / 9, 1 / 100]),
        (Staleness("polynomial", exponent=0.0), [1, 1, 1, 1]),
        (Staleness("hinge", slope=0.5, grace=4), [1, 1, 1 / 3, 1 / 48.5]),
        (Staleness("hinge"), [1, 1, 1 / 41, 1 / 951]),
        (Staleness("constant"), [1, 1, 1, 1]),
    ],
)
def test_staleness_functions_by_hand(function: Staleness, factors: list[float]) -> None:
    found = [staleness_weight(s, function) for s in (0, 1, 8, 99)]
    assert found == pytest.approx(factors, rel=1e-15)


@given(st.integers(0, 1023), st.integers(1, 50), st.floats(0, 4))
def test_an_update_is_damped_by_the_function_of_its_task(s: int, n: int, exponent: float) -> None:
    function = Staleness("polynomial", exponent=exponent)
    total = WeightedSum.zero(1, FLOAT64)
    update = Admitted([np.array([3.0], np.float32)], 1.0)
    total.add_all([Contribution(update, n, s, function)])
    assert total.mean().tolist() == pytest.approx([3 * (1 + s) ** -exponent], rel=1e-6)


def test_no_client_is_ahead_of_the_server() -> None:
    with pytest.raises(InvariantError):
        staleness_weight(-1)
    total = folded([([1.0], 1, 0)])
    with pytest.raises(InvariantError):
        total.add(np.ones(1, np.float32), 1, -1)
    assert total == folded([([1.0], 1, 0)])


def a_config(weighting: Weighting) -> TaskConfig:
    return TaskConfig(task="t", concurrency=1, model_length=1, max_examples=10, weighting=weighting)


@pytest.mark.parametrize(
    ("weighting", "counted"),
    [
        (Weighting(), [1, 9, 10, 10, 10]),
        (Weighting("equal"), [1, 1, 1, 1, 1]),
        (Weighting("capped", 4), [1, 4, 4, 4, 4]),
    ],
)
def test_the_examples_that_count(weighting: Weighting, counted: list[int]) -> None:
    config = a_config(weighting)
    assert [counted_examples(config, n) for n in (1, 9, 10, 11, 10**12)] == counted


@pytest.mark.parametrize("examples", [0, -1, -(10**12)])
def test_an_update_of_no_examples_is_refused(examples: int) -> None:
    with pytest.raises(ProtocolError):
        counted_examples(a_config(Weighting()), examples)


def test_a_model_update_is_a_difference_of_equal_models() -> None:
    trained, initial = np.array([3, 5], np.float32), np.array([1, 7], np.float32)
    assert model_update(trained, initial).tolist() == [2, -2]
    assert model_update(trained, initial).dtype == np.float32
    with pytest.raises(InvariantError):
        model_update(trained, initial[:1])


# The sum.


def test_two_clients_by_hand() -> None:
    """The damping must survive the division: dividing by the damped weights would give 1."""
    assert folded([([1.0], 1, 3), ([1.0], 1, 3)]).mean().tolist() == [0.5]


def test_examples_and_staleness_by_hand() -> None:
    total = folded([([4.0, 0.0], 3, 0), ([0.0, 8.0], 1, 3)])
    assert total.vector.tolist() == [12, 4]
    assert total.weight == 4
    assert total.mean().tolist() == [3, 1]
    assert total.mean().dtype == np.float32


@given(real_members, st.sampled_from(DTYPES))
def test_the_mean_is_that_of_the_naive_reference(
    members: list[Member], dtype: np.dtype[Any]
) -> None:
    found = folded(members, dtype).mean()
    largest = max(abs(x) for delta, _, _ in members for x in delta)
    error = largest * 1e-5 + SMALLEST
    assert found.tolist() == pytest.approx(reference_step(members), rel=1e-5, abs=error)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_block_is_folded_once(length: int, dtype: np.dtype[Any]) -> None:
    delta = np.random.default_rng(1).standard_normal(length).astype(np.float32)
    total = WeightedSum.zero(length, dtype)
    total.add(delta, 3, 0)
    total.add(delta, 2, 3)
    assert np.allclose(total.vector, delta.astype(np.float64) * 4, rtol=1e-6)
    assert total.vector.dtype == dtype


@given(real_members, st.integers(0, 8), st.sampled_from(DTYPES))
def test_sums_are_closed_under_addition(
    members: list[Member], cut: int, dtype: np.dtype[Any]
) -> None:
    left, right = members[:cut], members[cut:]
    assume(left and right)
    parts = folded(left, dtype) + folded(right, dtype)
    whole = folded(members, dtype)
    assert parts.weight == whole.weight
    scale = sum(n * max(map(abs, delta)) for delta, n, _ in members)
    error = scale * 1e-6 + len(members) * SMALLEST
    assert np.allclose(parts.vector, whole.vector, rtol=0, atol=error)


@given(integer_members, st.randoms(use_true_random=False))
def test_integers_sum_exactly_in_any_order(members: list[Member], random: Random) -> None:
    fresh = [(delta, examples, 0) for delta, examples, _ in members]
    counts = [examples for _, examples, _ in members]
    expected = [
        sum(n * x for n, x in zip(counts, column, strict=True))
        for column in zip(*(delta for delta, _, _ in members), strict=True)
    ]
    assert folded(fresh).vector.tolist() == expected
    assert folded(random.sample(fresh, len(fresh))) == folded(fresh)


@given(integer_members, st.integers(0, 8), st.randoms(use_true_random=False))
def test_damped_integers_sum_exactly_in_any_order_and_sharding_in_float64(
    members: list[Member], cut: int, random: Random
) -> None:
    shuffled = random.sample(members, len(members))
    total = WeightedSum.zero(len(members[0][0]), FLOAT64)
    for shard in (shuffled[:cut], shuffled[cut:]):
        if shard:
            total += folded(shard, FLOAT64)
    assert total == folded(members, FLOAT64)
    assert total.encode() == folded(members, FLOAT64).encode()


def test_a_missing_update_can_be_named() -> None:
    """Each client uploads its own power of two: the sum says who is in it."""
    ids = [2.0**i for i in range(20)]
    for absent in ids:
        total = folded([([i], 1, 0) for i in ids if i != absent])
        assert 2**20 - 1 - total.vector[0] == absent


def test_plus_leaves_both_sides_alone_and_plus_equals_works_in_place() -> None:
    left, right = folded([([1.0, 2.0], 1, 0)]), folded([([3.0, 4.0], 2, 0)])
    total = left + right
    assert total == WeightedSum(np.array([7, 10], np.float32), 3)
    assert left == folded([([1.0, 2.0], 1, 0)])
    assert right == folded([([3.0, 4.0], 2, 0)])
    vector = left.vector
    left += right
    assert left == total
    assert left.vector is vector


def test_only_sums_of_one_kind_add_up() -> None:
    total = WeightedSum.zero(2)
    for other in (WeightedSum.zero(1), WeightedSum.zero(3), WeightedSum.zero(2, FLOAT64)):
        assert total != other
        with pytest.raises(InvariantError):
            total += other
        with pytest.raises(InvariantError):
            other + total
    assert total == WeightedSum.zero(2)
    assert total != 0


@pytest.mark.parametrize("examples", [-1, MAX_EXAMPLES + 1])
def test_impossible_examples_leave_the_sum_as_it_was(examples: int) -> None:
    total = folded([([1.0], 1, 0)])
    with pytest.raises(InvariantError):
        total.add(np.ones(1, np.float32), examples, 0)
    assert total == folded([([1.0], 1, 0)])


@pytest.mark.parametrize("shape", [(1,), (2,), (4,), (1, 3)])
def test_nothing_is_broadcast_into_the_sum(shape: tuple[int, ...]) -> None:
    total = WeightedSum.zero(3)
    with pytest.raises(InvariantError):
        total.add(np.ones(shape, np.float32), 1, 0)
    assert total == WeightedSum.zero(3)


def test_the_sum_of_nobody_has_no_mean() -> None:
    with pytest.raises(InvariantError):
        WeightedSum.zero(3).mean()


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_is_finite_and_not_negative(weight: float) -> None:
    with pytest.raises(InvariantError):
        WeightedSum(np.zeros(1, np.float32), weight)


LONG = 16 * BLOCK


@pytest.mark.parametrize(
    "work",
    [
        lambda total, data: total.add(np.frombuffer(data, np.float32), 2, 3),
        lambda total, data: admit([data], LONG, 1e9),
        lambda total, data: total.__iadd__(total),
    ],
    ids=["add", "admit", "merge"],
)
def test_folding_needs_no_second_model(work: Callable[[WeightedSum, bytes], object]) -> None:
    total, data = WeightedSum.zero(LONG), np.ones(LONG, np.float32).tobytes()
    tracemalloc.start()
    try:
        work(total, data)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < len(data) / 3


# The durable record of a buffer.


@given(real_members, st.sampled_from(DTYPES))
def test_encode_and_decode_are_inverse(members: list[Member], dtype: np.dtype[Any]) -> None:
    total = folded(members, dtype)
    length = total.vector.size
    again = WeightedSum.decode(total.encode(), length, dtype)
    assert again == total
    assert again.encode() == total.encode()
    again.add(np.ones(length, np.float32), 1, 0)  # a successor goes on filling the buffer
    assert again.weight == total.weight + 1


def _record(vector: Vector, metadata: dict[str, str], name: str = "sum") -> bytes:
    return encode_tensors({name: vector}, metadata)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        WeightedSum.zero(3).encode(),
        WeightedSum.zero(2, FLOAT64).encode(),
        WeightedSum.zero(2).encode() + b"\0",
        _record(np.zeros(2, np.float32), {"weight": "1.0"}, name="parameters"),
        *(
            _record(np.zeros(2, np.float32), metadata)
            for metadata in (
                {},
                {"weight": "1"},
                {"weight": "1.00"},
                {"weight": " 1.0"},
                {"weight": "-1.0"},
                {"weight": "nan"},
                {"weight": "inf"},
                {"weight": "x"},
                {"weight": "1.0", "more": ""},
                {"Weight": "1.0"},
            )
        ),
        _record(np.array([0, np.inf], np.float32), {"weight": "1.0"}),
    ],
)
def test_any_other_record_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        WeightedSum.decode(data, 2)


@given(st.binary(max_size=150))
def test_arbitrary_bytes_raise_protocol_error_and_nothing_else(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        WeightedSum.decode(data, 2)


def test_every_bit_flip_is_refused_or_canonical() -> None:
    good = folded([([1.5, 2.0], 3, 1)]).encode()
    for position, bit in itertools.product(range(len(good)), range(8)):
        flipped = bytearray(good)
        flipped[position] ^= 1 << bit
        try:
            found = WeightedSum.decode(bytes(flipped), 2)
        except ProtocolError:
            continue
        assert found.encode() == bytes(flipped)
