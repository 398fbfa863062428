"""Makes `vectors.json`: run `python -m tests.unit.secagg.vectors` after a change of the scheme.

Masks, fixed point and key derivation come from the slow reference beside this file, so that another
implementation can be checked against numbers that no line of `papaya/secagg` has made.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tests.unit.secagg import reference

FILE = Path(__file__).with_name("vectors.json")
PARAMETERS = (
    '{"aggregation_goal":4,"clip":1.0,"length":5,"max_examples":100,"max_staleness":8,'
    '"scheme":"papaya-secagg-1","task":"next-word","threshold":2,"weighting":"examples"}'
)
LEVELS = (2**31 - 1) // 4 - 1
PARAMETERS_16 = PARAMETERS.replace("papaya-secagg-1", "papaya-secagg-3")
LEVELS_16 = (2**15 - 1) // 4 - 1
DELTA = [0.0, 0.25, -0.25, 0.875, -0.0078125]  # its norm is below the clip


def made() -> dict[str, Any]:
    digest = hashlib.sha256(PARAMETERS.encode()).digest()
    identity = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    trusted = X25519PrivateKey.from_private_bytes(bytes(range(32, 64)))
    device = X25519PrivateKey.from_private_bytes(bytes(range(64, 96)))
    seed = bytes(range(96, 112))
    offered, own = trusted.public_key().public_bytes_raw(), device.public_key().public_bytes_raw()
    index, expires = 7, 1_700_003_600
    context = b"papaya secagg 1 offer\0" + digest + index.to_bytes(8, "big")
    context += offered + expires.to_bytes(8, "big")
    secret = device.exchange(X25519PublicKey.from_public_bytes(offered))
    derived = reference.hkdf_sha256(secret, b"papaya secagg 1 seal\0" + context + own, 44)
    ciphertext = AESGCM(derived[:32]).encrypt(derived[32:], seed, context)
    weight, damping = 50 / 100, 0.5
    factor = weight * damping * (LEVELS / 1.0)
    plain = [reference.encoded(value, factor, LEVELS) for value in DELTA]
    plain += [round(weight * LEVELS), 1]
    words = reference.mask(seed, 7)
    masks = {key.hex(): reference.mask(key, 9) for key in (bytes(16), bytes(range(16)), seed)}
    plain_16 = reference.encoded_16(
        DELTA, weight, weight * damping * (LEVELS_16 / 1.0), LEVELS_16, seed
    )
    plain_16.append(1)
    words_16 = reference.mask(seed, 7, 16)
    return {
        "parameters": PARAMETERS,
        "parameters_sha256": digest.hex(),
        "masks": masks,
        "identity_private_key": bytes(range(32)).hex(),
        "identity_public_key": identity.public_key().public_bytes_raw().hex(),
        "offer_private_key": bytes(range(32, 64)).hex(),
        "offer": {"index": index, "expires": expires, "key": offered.hex()},
        "offer_signature": identity.sign(context).hex(),
        "seal_private_key": bytes(range(64, 96)).hex(),
        "seed": seed.hex(),
        "sealed": (own + ciphertext).hex(),
        "update": DELTA,
        "examples": 50,
        "staleness": 3,
        "encoded": plain,
        "masked": [(a + b) % 2**32 for a, b in zip(plain, words, strict=True)],
        "in_16_bits": {
            "parameters": PARAMETERS_16,
            "parameters_sha256": hashlib.sha256(PARAMETERS_16.encode()).hexdigest(),
            "encoded": plain_16,
            "masked": [(a + b) % 2**16 for a, b in zip(plain_16, words_16, strict=True)],
        },
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(made(), indent=1) + "\n", encoding="utf-8")
