"""Our own Merkle vectors, most of them invalid, after the manner of transparency-dev's.

Each proof that holds is changed in one way at a time: sizes, index, roots, and the proof itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from papaya.verifiable_log.merkle import consistency_proof, inclusion_proof, leaf_hash
from tests.unit.verifiable_log.builders import SlowNodes, slow_root

GARBAGE = hashlib.sha256(b"garbage").digest()


@dataclass(frozen=True)
class Inclusion:
    what: str
    valid: bool
    leaf: bytes
    index: int
    size: int
    proof: tuple[bytes, ...]
    root: bytes


@dataclass(frozen=True)
class Consistency:
    what: str
    valid: bool
    old: int
    new: int
    proof: tuple[bytes, ...]
    old_root: bytes
    new_root: bytes


def inclusions() -> Iterator[Inclusion]:
    for index, size in ((0, 1), (0, 8), (5, 8), (2, 3), (1, 5), (6, 7)):
        entries = [b"%d" % i for i in range(size)]
        proof = tuple(inclusion_proof(SlowNodes(entries), index, size))
        leaf, root = leaf_hash(entries[index]), slow_root(entries)
        good = Inclusion(f"{index} of {size}", True, leaf, index, size, proof, root)
        yield good

        def bad(what: str, good: Inclusion = good, **changes: object) -> Inclusion:
            return replace(good, what=f"{good.what}: {what}", valid=False, **changes)  # type: ignore[arg-type]

        for moved in (index - 1, index + 1, index ^ 2):
            yield bad(f"index {moved}", index=moved)
        yield bad("twice the size", size=2 * size)
        if size > 1:
            yield bad("half the size", size=size // 2)
        yield bad("wrong leaf", leaf=leaf_hash(b"another"))
        yield bad("random root", root=GARBAGE)
        yield bad("empty root", root=b"")
        for what, changed in _changed_proofs(proof, root):
            yield bad(what, proof=changed)


def consistencies() -> Iterator[Consistency]:
    for old, new in ((1, 1), (1, 8), (6, 8), (2, 5), (6, 7), (4, 8), (3, 4)):
        entries = [b"%d" % i for i in range(new)]
        proof = tuple(consistency_proof(SlowNodes(entries), old, new))
        roots = slow_root(entries[:old]), slow_root(entries)
        good = Consistency(f"{old} to {new}", True, old, new, proof, *roots)
        yield good

        def bad(what: str, good: Consistency = good, **changes: object) -> Consistency:
            return replace(good, what=f"{good.what}: {what}", valid=False, **changes)  # type: ignore[arg-type]

        for moved in (0, old - 1, old + 1, old ^ 2):
            yield bad(f"old size {moved}", old=moved)
        yield bad("twice the size", new=2 * new)
        yield bad("half the size", new=new // 2)
        yield bad("wrong old root", old_root=GARBAGE)
        yield bad("wrong new root", new_root=GARBAGE)
        if old != new:
            yield bad("swapped roots", old_root=roots[1], new_root=roots[0])
        for what, changed in _changed_proofs(proof, *roots):
            yield bad(what, proof=changed)


def _changed_proofs(
    proof: tuple[bytes, ...], *roots: bytes
) -> Iterator[tuple[str, tuple[bytes, ...]]]:
    for name, extra in [("garbage", GARBAGE), *((f"root {r.hex()[:4]}", r) for r in roots)]:
        yield f"trailing {name}", (*proof, extra)
        yield f"preceding {name}", (extra, *proof)
    if proof:
        yield "truncated", proof[:-1]
        yield "empty", ()
    for i, item in enumerate(proof):
        changed = bytes([item[0] ^ 16]) + item[1:]
        yield f"modified {i}", (*proof[:i], changed, *proof[i + 1 :])
