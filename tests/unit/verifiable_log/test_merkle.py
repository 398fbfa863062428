"""Proofs against a tree that is computed as RFC 6962 defines it; every changed proof is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.verifiable_log.errors import ProofError
from papaya.verifiable_log.merkle import (
    EMPTY_ROOT,
    consistency_proof,
    inclusion_proof,
    leaf_hash,
    tree_root,
    verify_consistency,
    verify_inclusion,
)
from tests.unit.verifiable_log.builders import SlowNodes, slow_root

SIZES = st.integers(1, 40)


def leaves(size: int) -> list[bytes]:
    return [b"entry %d" % i for i in range(size)]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 7, 8, 9, 31, 32, 33])
def test_the_root_is_that_of_rfc_6962(size: int) -> None:
    assert tree_root(SlowNodes(leaves(size)), size) == slow_root(leaves(size))


def test_the_root_of_nothing_is_the_hash_of_nothing() -> None:
    assert EMPTY_ROOT.hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@given(size=SIZES, data=st.data())
def test_every_leaf_has_a_proof_that_holds(size: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, size - 1))
    entries = leaves(size)
    proof = inclusion_proof(SlowNodes(entries), index, size)
    verify_inclusion(leaf_hash(entries[index]), index, size, proof, slow_root(entries))


@given(size=SIZES, data=st.data())
def test_every_prefix_has_a_proof_that_holds(size: int, data: st.DataObject) -> None:
    old = data.draw(st.integers(1, size))
    entries = leaves(size)
    proof = consistency_proof(SlowNodes(entries), old, size)
    verify_consistency(old, size, proof, slow_root(entries[:old]), slow_root(entries))


def changed(data: st.DataObject, proof: list[bytes]) -> list[bytes]:
    """Another proof: a flipped bit, a hash more or less, two in another order."""
    kind = data.draw(st.sampled_from(["flip", "drop", "add", "swap"]))
    at = data.draw(st.integers(0, max(0, len(proof) - 1)))
    if kind == "flip" and proof:
        bit = data.draw(st.integers(0, 255))
        flipped = int.from_bytes(proof[at]) ^ (1 << bit)
        return [*proof[:at], flipped.to_bytes(32), *proof[at + 1 :]]
    if kind == "drop" and proof:
        return proof[:at] + proof[at + 1 :]
    if kind == "swap" and len(proof) > 1:
        return proof[1:] + proof[:1]
    return [*proof[:at], data.draw(st.binary(min_size=32, max_size=32)), *proof[at:]]


@given(size=SIZES, data=st.data())
def test_a_changed_inclusion_proof_is_refused(size: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, size - 1))
    entries = leaves(size)
    proof = changed(data, inclusion_proof(SlowNodes(entries), index, size))
    with pytest.raises(ProofError):
        verify_inclusion(leaf_hash(entries[index]), index, size, proof, slow_root(entries))


@given(size=SIZES, data=st.data())
def test_a_leaf_is_proven_at_its_own_place_only(size: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, size - 1))
    claimed = data.draw(st.integers(-1, size + 1).filter(lambda i: i != index))
    entries = leaves(size)
    proof = inclusion_proof(SlowNodes(entries), index, size)
    with pytest.raises(ProofError):
        verify_inclusion(leaf_hash(entries[index]), claimed, size, proof, slow_root(entries))


@given(size=st.integers(2, 40), data=st.data())
def test_a_changed_consistency_proof_is_refused(size: int, data: st.DataObject) -> None:
    old = data.draw(st.integers(1, size))
    entries = leaves(size)
    proof = changed(data, consistency_proof(SlowNodes(entries), old, size))
    with pytest.raises(ProofError):
        verify_consistency(old, size, proof, slow_root(entries[:old]), slow_root(entries))


@given(size=st.integers(2, 40), data=st.data())
def test_a_rewritten_history_has_no_proof(size: int, data: st.DataObject) -> None:
    old = data.draw(st.integers(1, size))
    entries = leaves(size)
    forked = list(entries)
    forked[data.draw(st.integers(0, old - 1))] = b"rewritten"
    proof = consistency_proof(SlowNodes(forked), old, size)
    with pytest.raises(ProofError):
        verify_consistency(old, size, proof, slow_root(entries[:old]), slow_root(forked))


@pytest.mark.parametrize(("old", "new"), [(0, 3), (0, 0), (4, 3), (-1, 3)])
def test_nothing_leads_from_an_empty_or_larger_tree(old: int, new: int) -> None:
    with pytest.raises(ProofError):
        consistency_proof(SlowNodes(leaves(3)), old, new)
    with pytest.raises(ProofError):
        verify_consistency(old, new, [], slow_root(leaves(3)), slow_root(leaves(3)))


def test_a_leaf_that_is_not_there_has_no_proof() -> None:
    with pytest.raises(ProofError, match="no leaf 3"):
        inclusion_proof(SlowNodes(leaves(3)), 3, 3)


@pytest.mark.parametrize("short", [b"", bytes(31), bytes(33)])
def test_hashes_have_their_length(short: bytes) -> None:
    """Else the ends of two hashes could move into each other."""
    root: Any = slow_root(leaves(2))
    for arguments in (
        (short, 0, 2, [bytes(32)], root),
        (bytes(32), 0, 2, [short], root),
        (bytes(32), 0, 2, [bytes(32)], short),
    ):
        with pytest.raises(ProofError, match="32 bytes"):
            verify_inclusion(*arguments)
