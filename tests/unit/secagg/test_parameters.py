"""Public parameters: one encoding, one hash, and bounds that nobody can get around."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.secagg.errors import ParametersError
from papaya.secagg.parameters import HASH_BYTES, MAX_GOAL, MAX_LENGTH, PublicParameters
from papaya.tsa import wire
from tests.unit.secagg.builders import a_task

GOOD = a_task()
DIGEST = "0123456789abcdef" * 4
SIGNED = a_task(manifest=DIGEST, kind="train")


def test_what_is_encoded_is_decoded() -> None:
    assert PublicParameters.decode(GOOD.encode()) == GOOD


@given(
    st.builds(
        a_task,
        task=st.from_regex(r"[a-z0-9][a-z0-9_-]{0,63}", fullmatch=True),
        length=st.integers(1, 10**6),
        aggregation_goal=st.integers(50, 1000),
        threshold=st.integers(1, 50),
        clip=st.floats(1e-6, 1e6),
        max_examples=st.integers(1, 5000),
        max_staleness=st.integers(0, 10**6),
    )
    | st.builds(
        a_task,
        aggregation_goal=st.integers(50, 1000),
        clip=st.integers(1, 10**6).map(float),
        weighting=st.just("none"),
        manifest=st.just(DIGEST),
        kind=st.just("evaluate"),
        number=st.integers(0, 2**53),
    )
    | st.builds(
        a_task,
        manifest=st.binary(min_size=32, max_size=32).map(bytes.hex),
        kind=st.just("train"),
    )
)
def test_the_encoding_is_one_to_one(parameters: PublicParameters) -> None:
    encoded = parameters.encode()
    assert encoded.isascii()
    assert PublicParameters.decode(encoded) == parameters
    assert (parameters.digest() == GOOD.digest()) == (parameters == GOOD)


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"null",
        b"[]",
        b"[" * 1000,
        b"\xff",
        b"9" * 1000,
        GOOD.encode() + b"\n",
        b" " + GOOD.encode(),
        GOOD.encode().replace(b":1.0", b":1"),
        GOOD.encode().replace(b":1.0", b":1.00"),
        GOOD.encode().replace(b":1.0", b":NaN"),
        GOOD.encode().replace(b":100", b":100.0"),
        GOOD.encode().replace(b":5,", b':5,"length":5,'),
        GOOD.encode().replace(b"next-word", b"next\\u002dword"),
        GOOD.encode()[:-1] + b',"weight":1}',
        json.dumps(json.loads(GOOD.encode())).encode(),
        GOOD.encode() + b" " * 1024,
        GOOD.encode().replace(b'"length"', b'"kind":"","length"'),
        GOOD.encode().replace(b'"max_ex', b'"manifest":"","max_ex'),
        SIGNED.encode().replace(b',"number":0', b""),
        SIGNED.encode().replace(DIGEST.encode(), b""),
    ],
)
def test_every_other_encoding_is_refused(encoded: bytes) -> None:
    with pytest.raises(ParametersError) as caught:
        PublicParameters.decode(encoded)
    assert len(str(caught.value)) < 200


def test_a_task_that_nobody_has_signed_is_encoded_as_before_there_were_manifests() -> None:
    """Devices of protocol version 1 read it, and its hash stays the same."""
    names = sorted(json.loads(GOOD.encode()))
    assert names == sorted(json.loads(SIGNED.encode()).keys() - {"manifest", "kind", "number"})
    assert SIGNED.digest() != GOOD.digest()


@given(st.binary(max_size=200) | st.text().map(str.encode))
def test_nothing_but_parameters_error_comes_out(data: bytes) -> None:
    with pytest.raises(ParametersError):
        PublicParameters.decode(data)


BAD: list[dict[str, Any]] = [
    {"scheme": "papaya-secagg-0"},
    {"task": ""},
    {"task": "Next word"},
    {"task": "x" * 65},
    {"task": 5},
    {"length": 0},
    {"length": MAX_LENGTH + 1},
    {"length": 5.0},
    {"length": True},
    {"aggregation_goal": 0},
    {"threshold": 0},
    {"threshold": 5},
    {"threshold": True},
    {"clip": 0.0},
    {"clip": -1.0},
    {"clip": 1},
    {"clip": float("inf")},
    {"clip": float("nan")},
    {"clip": 1e-35},
    {"clip": 3e38},
    {"max_examples": 0},
    {"max_examples": 2**30},
    {"max_staleness": -1},
    {"max_staleness": None},
    {"weighting": "server"},
    {"weighting": []},
    {"aggregation_goal": MAX_GOAL + 1},
    {"weighting": "none", "clip": 0.5},
    {"weighting": "none", "clip": 2.0**30},
    {"aggregation_goal": 10**6, "length": 10**6},
    {"manifest": "0" * 63, "kind": "train"},
    {"manifest": "A" * 64, "kind": "train"},
    {"manifest": 5, "kind": "train"},
    {"kind": "train"},
    {"kind": [], "manifest": DIGEST},
    {"kind": "evaluate", "manifest": DIGEST},
    {"kind": "train", "manifest": DIGEST, "weighting": "none"},
    {"number": 1, "kind": "train", "manifest": DIGEST},
    {"number": -1, "kind": "evaluate", "manifest": DIGEST, "weighting": "none"},
    {"number": 1},
]


@pytest.mark.parametrize("changes", BAD, ids=str)
def test_values_out_of_bounds_are_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ParametersError) as caught:
        a_task(**changes)
    assert caught.value.reason in {*changes, "aggregation_goal"}


def test_a_task_without_precision_is_told_the_largest_goal() -> None:
    a_task(length=10**8, aggregation_goal=53685)
    with pytest.raises(ParametersError, match="at most 53685"):
        a_task(length=10**8, aggregation_goal=53686)


def test_the_largest_goal_is_what_one_request_for_a_release_can_name() -> None:
    """More could be summed and never be released."""
    members = range(MAX_GOAL)
    request = wire.release_request(bytes(HASH_BYTES), 1, members)
    assert len(request) - wire.LENGTH.size <= wire.MAX_REQUEST_BYTES
    longer = wire.release_request(bytes(HASH_BYTES), 1, range(MAX_GOAL + 1))
    assert len(longer) - wire.LENGTH.size > wire.MAX_REQUEST_BYTES


def test_counts_are_scaled_by_nothing() -> None:
    counts = a_task(weighting="none", clip=8191.0, aggregation_goal=MAX_GOAL)
    assert (counts.scale, counts.step, counts.most_steps) == (1.0, 1.0, 8191)
    with pytest.raises(ParametersError, match="whole number"):
        a_task(weighting="none", clip=float(counts.levels + 1), aggregation_goal=MAX_GOAL)
