"""What all test vectors share: the form of a case, keys, and the parameters of a TSA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from papaya.secagg.parameters import PublicParameters
from papaya.verifiable_log.note import LOG_SIGNATURE, SignerKey

Case = dict[str, Any]
VectorFormat = tuple[Callable[[], Iterator[Case]], Callable[[Case], object]]
"""What makes the cases of a format, and what runs one of them through our own code."""

NOW = 1_700_000_000
IDENTITY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
IDENTITY_KEY = IDENTITY.public_key().public_bytes_raw()
MEASUREMENT = sha256(b"a TSA").digest()
PUBLIC = PublicParameters(
    task="next-word",
    length=5,
    aggregation_goal=4,
    threshold=2,
    clip=1.0,
    max_examples=100,
    max_staleness=8,
)
LOG_KEY = SignerKey("example.org/log", bytes(32), LOG_SIGNATURE)


def case_of(verdict: str, name: str, **fields: Any) -> Case:
    return {"name": name, "verdict": verdict, **fields}


def flipped(data: bytes, at: int) -> bytes:
    at %= len(data)
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def as_json(value: object) -> str:
    return msgspec.json.encode(value).decode()
