"""Generators for many seeds draw the numbers of `default_rng`."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from papaya.learning.client_generators import generators

_seeds = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**64 - 1])


@given(st.lists(_seeds, max_size=5))
def test_generators_of_many_seeds_are_those_of_default_rng(seeds: list[int]) -> None:
    for seed, found in zip(seeds, generators(seeds), strict=True):
        expected = np.random.default_rng(seed)
        assert found.bit_generator.state == expected.bit_generator.state
        # Half of a number stays in the generator; the next seed must not get it.
        assert found.integers(0, 9, dtype=np.uint32) == expected.integers(0, 9, dtype=np.uint32)
        assert found.permutation(37).tolist() == expected.permutation(37).tolist()
