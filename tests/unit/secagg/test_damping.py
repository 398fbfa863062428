"""Functions of staleness: formulas, one encoding, and what a device refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.secagg.damping import PAPERS, Damping
from papaya.secagg.errors import OfferRefused, ParametersError
from papaya.secagg.parameters import PublicParameters
from papaya.secagg.participant import Terms, weight_and_damping
from tests.unit.secagg.builders import Deployment, a_policy, a_private_task, a_task, decoded

HINGE = Damping("hinge", 0.0, 0.5, 3)
FUNCTIONS = [PAPERS, Damping("polynomial", 0.25), HINGE, Damping("constant", 0.0)]

dampings = st.one_of(
    st.floats(0, 8).map(lambda exponent: Damping("polynomial", exponent)),
    st.builds(
        lambda slope, grace: Damping("hinge", 0.0, slope, grace),
        st.floats(0, 1e6),
        st.integers(0, 2**31),
    ),
    st.just(Damping("constant", 0.0)),
)


@given(dampings, st.integers(0, 2**31), st.integers(0, 2**31))
def test_factors_start_at_one_and_never_rise(damping: Damping, one: int, other: int) -> None:
    early, late = sorted((one, other))
    assert damping.factor(0) == 1
    assert 0 <= damping.factor(late) <= damping.factor(early) <= 1


def test_the_papers_function_has_its_own_bits() -> None:
    assert all(PAPERS.factor(s) == 1.0 / math.sqrt(1.0 + s) for s in range(2000))


@pytest.mark.parametrize("make", [a_task, a_private_task])
@pytest.mark.parametrize("damping", FUNCTIONS)
def test_public_parameters_have_one_encoding(make: Any, damping: Damping) -> None:
    parameters = make(damping=damping)
    assert PublicParameters.decode(parameters.encode()) == parameters
    assert (b"damping" in parameters.encode()) == (damping != PAPERS)


@pytest.mark.parametrize(
    "found",
    [
        b'"hinge"',
        b'{"exponent":0.5,"kind":"polynomial"}',  # the paper's, which is left out
        b'{"exponent":1,"kind":"polynomial"}',
        b'{"exponent":9.0,"kind":"polynomial"}',
        b'{"exponent":NaN,"kind":"polynomial"}',
        b'{"exponent":-1.0,"kind":"polynomial"}',
        b'{"kind":"polynomial"}',
        b'{"grace":3,"kind":"hinge","slope":true}',
        b'{"grace":3.0,"kind":"hinge","slope":0.5}',
        b'{"grace":-1,"kind":"hinge","slope":0.5}',
        b'{"exponent":1.0,"grace":3,"kind":"hinge","slope":0.5}',
        b'{"kind":"constant","slope":0.0}',
        b'{"kind":"exponential"}',
        b'{"kind":["hinge"]}',
        b"null",
        b"{}",
    ],
)
def test_any_other_encoding_is_refused(found: bytes) -> None:
    known = a_task(damping=HINGE).encode()
    part = b'{"grace":3,"kind":"hinge","slope":0.5}'
    assert part in known
    with pytest.raises(ParametersError):
        PublicParameters.decode(known.replace(part, found))


@pytest.mark.parametrize("damping", FUNCTIONS)
def test_a_device_damps_by_the_agreed_function(damping: Damping) -> None:
    found = [weight_and_damping(a_task(damping=damping), 50, s) for s in range(9)]
    assert found == [(0.5, damping.factor(s)) for s in range(9)]


def test_equal_weights_are_the_same_for_all() -> None:
    found = [weight_and_damping(a_task(weighting="equal"), n, 0) for n in (1, 50, 10**6)]
    assert found == [(1.0, 1.0)] * 3


def test_a_device_refuses_another_function_than_it_has_agreed_to() -> None:
    parameters = a_task(damping=HINGE)
    with pytest.raises(OfferRefused, match="damping"):
        Terms(b"", parameters, a_policy(parameters, damping=PAPERS))


def test_a_device_refuses_a_function_that_damps_more_than_its_limit_on_staleness_allows() -> None:
    """Otherwise a server could damp all updates but one nearly to nothing, within any limit."""
    steep = Damping("polynomial", 4.0)
    allowed = a_task(damping=steep, max_staleness=4)  # 1/625, and 1/sqrt(1001) is the limit
    with pytest.raises(OfferRefused) as caught:
        Terms(b"", allowed, a_policy(allowed))
    assert caught.value.reason == "damping"
    gentle = a_task(damping=steep, max_staleness=1)
    Terms(b"", gentle, a_policy(gentle))


@pytest.mark.parametrize("damping", FUNCTIONS)
@pytest.mark.parametrize("weighting", ["examples", "equal"])
def test_the_unmasked_mean_is_weighted_and_damped(damping: Damping, weighting: str) -> None:
    deployment = Deployment(a_task(damping=damping, weighting=weighting))
    deltas = np.array([[0.5, -0.5, 0.25, 0.0, 1.0], [0.1, 0.2, -0.3, 0.0, -1.0]], np.float32)
    sealed = [
        deployment.accept(deployment.sealed(delta, n, current=s))
        for delta, n, s in zip(deltas, (20, 100), (0, 6), strict=True)
    ]
    found = decoded(deployment.unmasked(sealed), 2, deployment.parameters).mean()
    weights = [1.0, 1.0] if weighting == "equal" else [0.2, 1.0]
    expected = weights[0] * deltas[0] + weights[1] * damping.factor(6) * deltas[1]
    assert found == pytest.approx(expected / sum(weights), abs=1e-6)
