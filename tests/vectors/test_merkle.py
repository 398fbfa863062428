"""Merkle proofs by vectors: ours everywhere, transparency-dev's where they are at hand."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from papaya.verifiable_log.errors import ProofError
from papaya.verifiable_log.merkle import verify_consistency, verify_inclusion
from tests.vectors.merkle_cases import Consistency, Inclusion, consistencies, inclusions
from tests.vectors.public import public


@pytest.mark.parametrize("case", list(inclusions()), ids=lambda case: case.what)
def test_our_inclusion_vectors(case: Inclusion) -> None:
    arguments = (case.leaf, case.index, case.size, case.proof, case.root)
    if case.valid:
        verify_inclusion(*arguments)
    else:
        with pytest.raises(ProofError):
            verify_inclusion(*arguments)


@pytest.mark.parametrize("case", list(consistencies()), ids=lambda case: case.what)
def test_our_consistency_vectors(case: Consistency) -> None:
    arguments = (case.old, case.new, case.proof, case.old_root, case.new_root)
    if case.valid:
        verify_consistency(*arguments)
    else:
        with pytest.raises(ProofError):
            verify_consistency(*arguments)


def published(kind: str) -> list[dict[str, Any]]:
    files = sorted(public(f"merkle/{kind}").rglob("*.json"))
    return [json.loads(file.read_text()) | {"file": str(file)} for file in files]


def decoded(text: str | None) -> bytes:
    return base64.b64decode(text or "")


def test_the_published_inclusion_vectors() -> None:
    outcomes = {}
    cases = published("inclusion")
    for case in cases:
        proof = [decoded(item) for item in case["proof"] or []]
        leaf, root = decoded(case["leafHash"]), decoded(case["root"])
        try:
            verify_inclusion(leaf, case["leafIdx"], case["treeSize"], proof, root)
            outcomes[case["file"]] = False
        except ProofError:
            outcomes[case["file"]] = True
    assert outcomes == {case["file"]: case["wantErr"] for case in cases}
    assert len(cases) > 30


def test_the_published_consistency_vectors() -> None:
    outcomes = {}
    cases = published("consistency")
    for case in cases:
        proof = [decoded(item) for item in case["proof"] or []]
        roots = decoded(case["root1"]), decoded(case["root2"])
        try:
            verify_consistency(case["size1"], case["size2"], proof, *roots)
            outcomes[case["file"]] = False
        except ProofError:
            outcomes[case["file"]] = True
    assert outcomes == {case["file"]: case["wantErr"] for case in cases}
    assert len(cases) > 30
