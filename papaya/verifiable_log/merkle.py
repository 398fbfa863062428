"""Merkle trees and their proofs as in RFC 6962: pure functions on hashes.

    "An inclusion proof can be generated to demonstrate a record is indeed included in the log. A
    consistency check can be performed between two snapshots" (paper, verifiable logs)

Proofs are built from a `Nodes` function that gives the hash of any complete subtree: `(level,
index)` covers leaves [index << level, (index + 1) << level). Verification (RFC 9162, 2.1.3.2 and
2.1.4.2) raises `ProofError`; nothing here returns a bool. A consistency proof from an empty tree is
refused: it would prove nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

from papaya.verifiable_log.errors import ProofError

Nodes: TypeAlias = Callable[[int, int], bytes]

HASH_BYTES = 32
MAX_SIZE = 2**63 - 1
EMPTY_ROOT = hashlib.sha256(b"").digest()


def leaf_hash(entry: bytes) -> bytes:
    return hashlib.sha256(b"\x00" + entry).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


# --- Building


def tree_root(nodes: Nodes, size: int) -> bytes:
    return _subtree_root(nodes, 0, size) if size else EMPTY_ROOT


def inclusion_proof(nodes: Nodes, index: int, size: int) -> list[bytes]:
    """RFC 6962, 2.1.1: siblings from the leaf upwards."""
    if not 0 <= index < size:
        raise ProofError(f"there is no leaf {index} in a tree of {size}")
    return _path(nodes, index, 0, size)


def consistency_proof(nodes: Nodes, old_size: int, new_size: int) -> list[bytes]:
    """RFC 6962, 2.1.2: the subtrees from which both roots can be computed."""
    if not 0 < old_size <= new_size:
        raise ProofError(f"there is no consistency proof from size {old_size} to size {new_size}")
    return _old_path(nodes, old_size, 0, new_size, whole=True)


def _split(size: int) -> int:
    """The largest power of two below `size`: where RFC 6962 splits a tree."""
    return 1 << ((size - 1).bit_length() - 1)


def _subtree_root(nodes: Nodes, start: int, end: int) -> bytes:
    size = end - start
    if size & (size - 1) == 0:
        level = size.bit_length() - 1
        return nodes(level, start >> level)
    middle = start + _split(size)
    return node_hash(_subtree_root(nodes, start, middle), _subtree_root(nodes, middle, end))


def _path(nodes: Nodes, index: int, start: int, end: int) -> list[bytes]:
    if end - start == 1:
        return []
    middle = start + _split(end - start)
    if index < middle:
        return [*_path(nodes, index, start, middle), _subtree_root(nodes, middle, end)]
    return [*_path(nodes, index, middle, end), _subtree_root(nodes, start, middle)]


def _old_path(nodes: Nodes, old_end: int, start: int, end: int, *, whole: bool) -> list[bytes]:
    if old_end == end:
        return [] if whole else [_subtree_root(nodes, start, end)]
    middle = start + _split(end - start)
    if old_end <= middle:
        proof = _old_path(nodes, old_end, start, middle, whole=whole)
        return [*proof, _subtree_root(nodes, middle, end)]
    proof = _old_path(nodes, old_end, middle, end, whole=False)
    return [*proof, _subtree_root(nodes, start, middle)]


# --- Verifying


def verify_inclusion(
    leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes
) -> None:
    """Raise unless the leaf hash `leaf` is at `index` of the tree with this size and root."""
    _check_hashes(leaf, root, *proof)
    if not 0 <= index < size <= MAX_SIZE:
        raise ProofError(f"there is no leaf {index} in a tree of {size}")
    here, last = index, size - 1
    found = leaf
    for sibling in proof:
        if last == 0:
            raise ProofError("the inclusion proof is too long")
        if here & 1 or here == last:
            found = node_hash(sibling, found)
            here, last = _to_right_child(here, last)
        else:
            found = node_hash(found, sibling)
        here, last = here >> 1, last >> 1
    if last:
        raise ProofError("the inclusion proof is too short")
    if found != root:
        raise ProofError(f"leaf {index} is not under the root of this tree of {size}")


def verify_consistency(
    old_size: int, new_size: int, proof: Sequence[bytes], old_root: bytes, new_root: bytes
) -> None:
    """Raise unless the tree of `new_size` begins with the tree of `old_size`."""
    _check_hashes(old_root, new_root, *proof)
    if not 0 < old_size <= new_size <= MAX_SIZE:
        raise ProofError(f"there is no consistency proof from size {old_size} to size {new_size}")
    if old_size == new_size:
        if proof:
            raise ProofError("a consistency proof between trees of the same size must be empty")
        if old_root != new_root:
            raise ProofError(f"two trees of size {old_size} have different roots")
        return
    shared = [old_root, *proof] if old_size & (old_size - 1) == 0 else list(proof)
    if not shared or not proof:
        raise ProofError("the consistency proof is empty")
    here, last = old_size - 1, new_size - 1
    while here & 1:
        here, last = here >> 1, last >> 1
    found_old = found_new = shared[0]
    for sibling in shared[1:]:
        if last == 0:
            raise ProofError("the consistency proof is too long")
        if here & 1 or here == last:
            found_old = node_hash(sibling, found_old)
            found_new = node_hash(sibling, found_new)
            here, last = _to_right_child(here, last)
        else:
            found_new = node_hash(found_new, sibling)
        here, last = here >> 1, last >> 1
    if last:
        raise ProofError("the consistency proof is too short")
    if found_old != old_root:
        raise ProofError(f"the proof does not belong to the old root, of size {old_size}")
    if found_new != new_root:
        raise ProofError(f"the tree of {new_size} does not begin with the tree of {old_size}")


def _to_right_child(here: int, last: int) -> tuple[int, int]:
    """Skip the levels where the rightmost node has no sibling."""
    while here and not here & 1:
        here, last = here >> 1, last >> 1
    return here, last


def _check_hashes(*hashes: bytes) -> None:
    if any(len(item) != HASH_BYTES for item in hashes):
        raise ProofError(f"invalid hash: expected {HASH_BYTES} bytes")
