"""papaya/sim/draws.py: against published outputs and the standard library."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.sim.draws import exp, normals, splitmix64

WORDS = st.integers(0, 2**64 - 1)
# The ends, the middle, and the cells beside which the approximation of normals changes region.
EDGES = [round(p * (2**32 - 1)) + step for p in (0, 0.075, 0.5, 0.925, 1) for step in (-1, 0, 1)]


def test_splitmix64_gives_the_published_outputs() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [splitmix64(1234567, counter) for counter in range(3)] == published


@given(words=st.lists(WORDS | st.sampled_from([(cell % 2**32) << 32 for cell in EDGES])))
def test_normals_are_the_quantiles_of_the_middles_of_cells(words: list[int]) -> None:
    found = normals(np.array(words, dtype=np.uint64)).tolist()
    expected = [NormalDist().inv_cdf(((word >> 32) + 0.5) / 2**32) for word in words]
    assert found == pytest.approx(expected, rel=1e-13, abs=1e-15)


@given(x=st.floats(-120, 120))
def test_the_exponential_is_right_to_two_units_in_the_last_place(x: float) -> None:
    assert exp(np.array([x])).item() == pytest.approx(math.exp(x), rel=5e-16)
