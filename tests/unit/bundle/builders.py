"""A valid bundle, and the keys that sign it."""

from __future__ import annotations

from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from papaya.bundle import archive
from papaya.bundle.manifest import LEASE_S, BlobRef, Lease, Participation, TaskManifest
from papaya.bundle.owner import OwnerPin, SignedStatement
from papaya.learning.definition import ClientSGD, Examples

NOW = 1_763_312_400.0
ARCHIVE = archive.pack({"task.py": b"task = 1\n", "tools/words.py": b"words = ()\n"})


def a_key(number: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)


def public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


KEY, NEXT, THIRD, RECOVERY, STRANGER = (a_key(number) for number in range(1, 6))
PIN = OwnerPin(public(KEY), public(RECOVERY))


def a_manifest(**changes: Any) -> TaskManifest:
    values: dict[str, Any] = {
        "owner": PIN.owner,
        "task": "digits",
        "run": int(NOW * 1000) - 5000,
        "revision": 3,
        "engine": "torch",
        "engine_version": "2.6",
        "program": BlobRef(archive.digest(ARCHIVE), len(ARCHIVE)),
        "frozen": None,
        "layout": (("weight", (2, 3)), ("bias", (3,))),
        "client": ClientSGD(rate=0.1),
        "examples": Examples("digits"),
        "training_timeout_s": 240.0,
        "secure": None,
        "weighting": "examples",
        "clip": 1.0,
        "max_staleness": 50,
        "upload_timeout_s": 120.0,
        "participation": Participation(3600.0, None, "task"),
        "evaluation_clients": 20,
        "privacy": None,
    }
    return TaskManifest(**(values | changes))


def a_lease(
    manifest: TaskManifest, key: Ed25519PrivateKey = KEY, issued: float = NOW
) -> SignedStatement:
    return Lease(manifest.digest, issued, issued + LEASE_S).sign(key)
