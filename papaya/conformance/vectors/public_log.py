"""Test vectors of the public log: checkpoints, proofs and records."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

from papaya.conformance.vectors.cases import (
    LOG_KEY,
    MEASUREMENT,
    NOW,
    Case,
    VectorFormat,
    case_of,
    flipped,
)
from papaya.verifiable_log.checkpoint import (
    Checkpoint,
    LogPolicy,
    open_checkpoint,
    sign_checkpoint,
)
from papaya.verifiable_log.merkle import (
    consistency_proof,
    inclusion_proof,
    leaf_hash,
    node_hash,
    tree_root,
    verify_consistency,
    verify_inclusion,
)
from papaya.verifiable_log.note import COSIGNATURE, LOG_SIGNATURE, SignerKey, VerifierKey
from papaya.verifiable_log.record import Record

_WITNESS = SignerKey("example.org/witness", bytes(range(32)), COSIGNATURE)


def _checkpoints() -> Iterator[Case]:
    checkpoint = Checkpoint(LOG_KEY.name, 5, sha256(b"root").digest())
    good = sign_checkpoint(checkpoint, LOG_KEY)
    cosigned = good + _WITNESS.signature_line(checkpoint.text, NOW - 60).encode()
    known = {"log_key": str(LOG_KEY.verifier), "witness": None, "now": NOW}
    found = {"size": 5, "root": checkpoint.root.hex()}
    yield case_of("valid", "a checkpoint", note=good.decode(), **known, **found)
    witnessed = {**known, "witness": str(_WITNESS.verifier)}
    yield case_of("valid", "with a cosignature", note=cosigned.decode(), **witnessed, **found)
    stranger = SignerKey(LOG_KEY.name, bytes([9]) * 32, LOG_SIGNATURE)
    text = good.decode()
    for name, note, setting in (
        ("signed by another key", sign_checkpoint(checkpoint, stranger).decode(), known),
        ("another size", text.replace("\n5\n", "\n6\n"), known),
        ("a size with a leading zero", text.replace("\n5\n", "\n05\n"), known),
        ("another origin", text.replace("example.org/log\n5", "example.com/log\n5"), known),
        ("without a signature", text.partition("\u2014")[0], known),
        ("without its empty line", text.replace("\n\n", "\n"), known),
        ("without its last line break", text[:-1], known),
        ("with carriage returns", text.replace("\n", "\r\n"), known),
        ("without the required cosignature", text, witnessed),
        ("empty", "", known),
    ):
        yield case_of("invalid", name, note=note, **setting)


def _check_checkpoint(case: Case) -> object:
    witness = case["witness"]
    witnesses = () if witness is None else (VerifierKey.parse(witness),)
    policy = LogPolicy(VerifierKey.parse(case["log_key"]), witnesses, len(witnesses))
    found = open_checkpoint(case["note"].encode(), policy, case["now"])
    return {"size": found.size, "root": found.root.hex()}


class _Leaves:
    """The hashes of a small tree, for `papaya/verifiable_log/merkle.py`."""

    def __init__(self, size: int) -> None:
        self.hashes = [leaf_hash(f"entry {index}".encode()) for index in range(size)]

    def __call__(self, level: int, index: int) -> bytes:
        if level == 0:
            return self.hashes[index]
        return node_hash(self(level - 1, 2 * index), self(level - 1, 2 * index + 1))


def _inclusion_proofs() -> Iterator[Case]:
    for size, index in ((1, 0), (5, 0), (5, 4), (8, 3), (11, 10)):
        nodes = _Leaves(size)
        root, proof = tree_root(nodes, size), inclusion_proof(nodes, index, size)
        known: Case = {
            "leaf": nodes.hashes[index].hex(),
            "index": index,
            "size": size,
            "proof": [item.hex() for item in proof],
            "root": root.hex(),
        }
        what = f"leaf {index} of {size}"
        yield case_of("valid", what, **known)
        changes: list[tuple[str, Case]] = [
            ("another leaf", {"leaf": flipped(nodes.hashes[index], 0).hex()}),
            ("another root", {"root": flipped(root, 31).hex()}),
            ("an index beyond the tree", {"index": size}),
            ("a proof that is too long", {"proof": [*known["proof"], "00" * 32]}),
            ("a hash of 31 bytes", {"leaf": known["leaf"][:-2]}),
        ]
        if proof:
            changes.append(("a proof that is too short", {"proof": known["proof"][:-1]}))
            changes.append(("a changed proof", {"proof": ["00" * 32, *known["proof"][1:]]}))
        for name, change in changes:
            yield case_of("invalid", f"{what}: {name}", **{**known, **change})


def _check_inclusion(case: Case) -> object:
    proof = [bytes.fromhex(item) for item in case["proof"]]
    leaf, root = bytes.fromhex(case["leaf"]), bytes.fromhex(case["root"])
    verify_inclusion(leaf, case["index"], case["size"], proof, root)
    return {}


def _consistency_proofs() -> Iterator[Case]:
    for old, new in ((1, 2), (3, 7), (4, 8), (6, 11)):
        nodes = _Leaves(new)
        known: Case = {
            "old_size": old,
            "new_size": new,
            "proof": [item.hex() for item in consistency_proof(nodes, old, new)],
            "old_root": tree_root(nodes, old).hex(),
            "new_root": tree_root(nodes, new).hex(),
        }
        what = f"from {old} to {new}"
        yield case_of("valid", what, **known)
        for name, change in (
            ("another old root", {"old_root": "00" * 32}),
            ("another new root", {"new_root": "00" * 32}),
            ("no proof", {"proof": []}),
            ("a proof that is too long", {"proof": [*known["proof"], "00" * 32]}),
            ("a log that shrank", {"old_size": new, "new_size": old}),
        ):
            yield case_of("invalid", f"{what}: {name}", **{**known, **change})


def _check_consistency(case: Case) -> object:
    proof = [bytes.fromhex(item) for item in case["proof"]]
    roots = bytes.fromhex(case["old_root"]), bytes.fromhex(case["new_root"])
    verify_consistency(case["old_size"], case["new_size"], proof, *roots)
    return {}


def _records() -> Iterator[Case]:
    measured = MEASUREMENT.hex()
    record = Record(
        measured,
        {"software": {"mrenclave": measured}, "sgx": {"mrenclave": "0a" * 32}},
        "https://example.org/papaya",
        "0b" * 20,
        "papaya tsa build",
    )
    good = record.encode().decode()
    yield case_of("valid", "a record", record=good, leaf=leaf_hash(good.encode()).hex())
    for name, text in (
        ("spaces", good.replace(":", ": ")),
        ("another format", good.replace("release/v1", "release/v2")),
        ("a hash in capitals", good.replace("0a" * 32, "0A" * 32)),
        ("a hash that is too short", good.replace("0a" * 32, "0a" * 31)),
        ("no measurements", good.replace(good[good.index("{", 1) : good.index(',"recipe')], "{}")),
        ("an unknown platform", good.replace('"sgx"', '"paper"')),
        ("a software measurement of another artifact", good.replace(measured, "00" * 32, 1)),
        ("a revision that is too short", good.replace("0b" * 20, "0b" * 19)),
        ("an unknown field", good[:-1] + ',"zz":1}'),
        ("not JSON", good[:-1]),
        ("a list", f"[{good}]"),
    ):
        yield case_of("invalid", name, record=text)


def _check_record(case: Case) -> object:
    raw = case["record"].encode()
    Record.decode(raw)
    return {"leaf": leaf_hash(raw).hex()}


FORMATS: dict[str, VectorFormat] = {
    "checkpoints": (_checkpoints, _check_checkpoint),
    "inclusion_proofs": (_inclusion_proofs, _check_inclusion),
    "consistency_proofs": (_consistency_proofs, _check_consistency),
    "records": (_records, _check_record),
}
