"""The published vectors: our own code gives the stated verdict and outputs for every case."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from papaya.conformance.vectors.cases import Case
from papaya.conformance.vectors.vectors import FORMATS, REFUSALS, all_vectors, check
from papaya.learning.compression import encode_update
from tests.unit.secagg import reference

VECTORS = all_vectors()
CASES = [(name, case) for name, cases in VECTORS.items() for case in cases]


def refused(name: str, case: Case) -> str | None:
    try:
        check(name, case)
    except REFUSALS as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", FORMATS)
def test_every_case_has_the_verdict_that_it_states(name: str) -> None:
    wrong = [
        (case["name"], problem)
        for case in VECTORS[name]
        if ((problem := refused(name, case)) is None) is not (case["verdict"] == "valid")
    ]
    assert wrong == []


@pytest.mark.parametrize("name", FORMATS)
def test_valid_cases_have_the_outputs_that_they_state(name: str) -> None:
    for case in VECTORS[name]:
        if case["verdict"] == "valid":
            found: Any = check(name, case)
            stated = {key: case[key] for key in found} if isinstance(found, dict) else found
            assert stated == found, case["name"]


@pytest.mark.parametrize("name", FORMATS)
def test_most_cases_are_invalid_and_none_is_repeated(name: str) -> None:
    cases = VECTORS[name]
    invalid = [case for case in cases if case["verdict"] == "invalid"]
    assert len(invalid) > len(cases) / 2
    inputs = [json.dumps({**case, "name": ""}, sort_keys=True) for case in cases]
    assert len(set(inputs)) == len(inputs)


def test_no_draw_changes_an_update_in_fewer_bits() -> None:
    """So a client that draws from another generator has to encode the same bytes."""
    for case in VECTORS["updates_in_fewer_bits"]:
        if case["verdict"] == "valid":
            values = np.array(case["values"], np.float32)
            for seed in range(8):
                encoded = encode_update(values, case["bits"], seed, case["clip"])
                assert encoded.hex() == case["update"], case["name"]


def test_masks_and_words_are_those_of_the_slow_reference() -> None:
    for case in VECTORS["masks"]:
        if case["verdict"] == "valid":
            assert case["words"] == reference.mask(bytes.fromhex(case["seed"]), 9)
    for case in VECTORS["masked_updates"]:
        if case["verdict"] == "valid":
            bits = 16 if "papaya-secagg-3" in case["parameters"] else 32
            levels = (2 ** (bits - 1) - 1) // 4 - 1
            weight = min(case["examples"], 100) / 100
            staleness = case["version"] - case["initial_version"]
            factor = weight * (1 / (1 + staleness) ** 0.5) * levels
            values = [float(value) for value in case["update"]]
            seed = bytes.fromhex(case["seed"])
            if bits == 16:
                words = [*reference.encoded_16(values, weight, factor, levels, seed), 1]
            else:
                words = [reference.encoded(value, factor, levels) for value in values]
                words += [round(weight * levels), 1]
            assert case["words"] == words
            mask = reference.mask(seed, 7, bits)
            masked = [(a + b) % 2**bits for a, b in zip(words, mask, strict=True)]
            assert case["masked"] == masked
