"""Aggregation rules against slow references, and what a hostile minority can do to them."""

from __future__ import annotations

import math
import statistics
import tracemalloc
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papaya.config import Aggregation
from papaya.errors import ConfigError
from papaya.learning import extensions
from papaya.learning.aggregation_rules import (
    BufferMembers,
    MemberRows,
    SumRule,
    aggregation_rule,
    combined,
    shortened,
)
from papaya.learning.weighting import Admitted

RULES = [
    Aggregation("median"),
    Aggregation("trimmed_mean", trim=0.2),
    Aggregation("trimmed_mean", trim=0.49),
    Aggregation("norm_bound"),
    Aggregation("norm_bound", factor=0.25),
]

Rows = list[list[float]]


SMALLEST = float(np.finfo(np.float32).smallest_subnormal)


def buffers(least: int = 1) -> st.SearchStrategy[tuple[Rows, list[int]]]:
    def of_shape(shape: tuple[int, int]) -> st.SearchStrategy[tuple[Rows, list[int]]]:
        members, length = shape
        row = st.lists(st.floats(-1e6, 1e6, width=32), min_size=length, max_size=length)
        rows = st.lists(row, min_size=members, max_size=members)
        weights = st.lists(st.integers(1, 1000), min_size=members, max_size=members)
        return st.tuples(rows, weights)

    return st.tuples(st.integers(least, 12), st.integers(1, 7)).flatmap(of_shape)


def reference(rule: Aggregation, rows: Rows, weights: list[int]) -> list[float]:
    columns = list(zip(*rows, strict=True))
    match rule.kind:
        case "median":
            return [statistics.median(column) for column in columns]
        case "trimmed_mean":
            cut = math.floor(rule.trim * len(rows))
            kept = [sorted(column)[cut : len(rows) - cut] for column in columns]
            return [math.fsum(values) / len(values) for values in kept]
    norms = [math.hypot(*row) for row in rows]
    bound = rule.factor * statistics.median(norms)
    scales = [min(1.0, bound / norm) if norm else 1.0 for norm in norms]
    return [
        math.fsum(n * scale * x for n, scale, x in zip(weights, scales, column, strict=True))
        / sum(weights)
        for column in columns
    ]


def in_blocks(rows: MemberRows, weights: list[int], block_bytes: int) -> BufferMembers:
    def read(member: int, part: slice) -> Any:
        return rows[member, part]

    return BufferMembers(weights, rows.shape[1], read, block_bytes)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=30)
@given(buffer=buffers())
def test_a_rule_is_its_reference(rule: Aggregation, buffer: tuple[Rows, list[int]]) -> None:
    rows, weights = buffer
    found = combined(rule, BufferMembers.of_matrix(weights, np.array(rows, np.float32)))
    largest = max(abs(x) for row in rows for x in row)
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx(
        reference(rule, rows, weights), rel=1e-5, abs=1e-6 * largest + SMALLEST
    )


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=20)
@given(buffer=buffers(), block_bytes=st.integers(1, 200))
def test_blocks_do_not_show(
    rule: Aggregation, buffer: tuple[Rows, list[int]], block_bytes: int
) -> None:
    rows, weights = np.array(buffer[0], np.float32), buffer[1]
    whole = combined(rule, BufferMembers.of_matrix(weights, rows))
    found = combined(rule, in_blocks(rows, weights, block_bytes))
    error = 1e-9 * float(np.abs(rows).max()) + SMALLEST
    assert found == pytest.approx(whole, rel=1e-6, abs=error)


@pytest.mark.parametrize("rule", RULES[:3])
@settings(max_examples=20)
@given(buffer=buffers(), seed=st.integers(0, 100))
def test_the_order_of_members_does_not_show(
    rule: Aggregation, buffer: tuple[Rows, list[int]], seed: int
) -> None:
    """A successor may have folded them in another order: the version has the same bits."""
    rows = np.array(buffer[0], np.float32)
    shuffled = list(range(len(rows)))
    Random(seed).shuffle(shuffled)
    first = combined(rule, BufferMembers.of_matrix(buffer[1], rows))
    other = combined(rule, BufferMembers.of_matrix(buffer[1], rows[shuffled]))
    assert np.array_equal(first, other)


@pytest.mark.parametrize("hundredths", range(1, 50))
def test_the_share_that_is_trimmed_is_meant_as_it_is_written(hundredths: int) -> None:
    rule = Aggregation("trimmed_mean", trim=hundredths / 100)
    for members in range(1, 1001):
        assert rule.trimmed(members) == hundredths * members // 100


def test_trimming_leaves_a_value() -> None:
    rule = Aggregation("trimmed_mean", trim=math.nextafter(0.5, 0.0))
    assert [rule.trimmed(members) for members in (1, 2, 3, 4)] == [0, 0, 1, 1]


@given(buffer=buffers(least=5), evil=st.sampled_from([-3e38, -1.0, 0.0, 1e6, 3e38]))
def test_a_minority_cannot_leave_the_range_of_the_others(
    buffer: tuple[Rows, list[int]], evil: float
) -> None:
    rows = np.array(buffer[0], np.float32)
    count = math.floor(0.2 * len(rows))
    rows[:count] = evil
    honest = rows[count:]
    for rule in (RULES[0], RULES[1]):
        found = combined(rule, BufferMembers.of_matrix(buffer[1], rows))
        slack = 1e-6 * np.abs(honest).max(axis=0)
        assert np.all(honest.min(axis=0) - slack <= found)
        assert np.all(found <= honest.max(axis=0) + slack)


def test_one_long_update_moves_a_bounded_mean_no_further_than_the_median_norm() -> None:
    rows = np.zeros((9, 2), np.float32)
    rows[:8, 0] = 1.0
    rows[8] = (0.0, 1e30)
    found = combined(Aggregation("norm_bound"), BufferMembers.of_matrix([1] * 9, rows))
    assert found.tolist() == pytest.approx([8 / 9, 1 / 9])


def test_updates_of_zeros_stay_zeros() -> None:
    for rule in RULES:
        found = combined(rule, BufferMembers.of_matrix([1, 1, 1], np.zeros((3, 4), np.float32)))
        assert found.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("rule", [RULES[0], RULES[1], RULES[3]])
def test_memory_is_bounded_by_the_block_and_not_by_the_buffer(rule: Aggregation) -> None:
    """50 members of 400 kB: 20 MB, of which 1 MB is in memory at a time."""
    members, length, block_bytes = 50, 100_000, 1 << 20

    def read(member: int, part: slice) -> Any:
        return np.full(part.stop - part.start, member, np.float32)

    buffer = BufferMembers([1] * members, length, read, block_bytes)
    tracemalloc.start()
    try:
        combined(rule, buffer)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * length + 5 * block_bytes


class Squeezed(SumRule):
    def scale(self, length: float) -> float:
        return self.parameters["to"] / length


def test_a_sum_rule_shortens_by_the_norm_after_the_clip() -> None:
    extensions.add("aggregation_rules", "squeezed", Squeezed)
    rule = Aggregation("squeezed", parameters=(("to", 1.0),))
    pieces = [np.array([3, 0], np.float32), np.array([4], np.float32)]
    assert shortened(Admitted(pieces, 0.5), rule).scale == pytest.approx(0.2)
    assert shortened(Admitted(pieces, 0.5), Aggregation()).scale == 0.5
    with pytest.raises(ConfigError, match=r"squeezed returned the scale 2\."):
        shortened(Admitted(pieces, 0.1), rule)


@pytest.mark.parametrize("made", [lambda config: None, lambda: None, 3])
def test_what_is_no_rule_is_refused(made: Any) -> None:
    extensions.add("aggregation_rules", "nothing", made)
    with pytest.raises(ConfigError, match="nothing cannot be made"):
        aggregation_rule(Aggregation("nothing"))
