"""The published vectors, and public ones of the primitives that the scheme is made of."""

from __future__ import annotations

import json

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from papaya.secagg import channel
from papaya.secagg.mask import Mask, sum_masks
from papaya.secagg.offer import Offer
from papaya.secagg.parameters import PublicParameters
from papaya.secagg.participant import Terms, UnsealedUpdate
from papaya.secagg.words import WORD
from tests.unit.secagg.builders import NOW, a_policy, encoded
from tests.unit.secagg.vectors import FILE, made

VECTORS = json.loads(FILE.read_text(encoding="utf-8"))
PARAMETERS = PublicParameters.decode(VECTORS["parameters"].encode())


def hexed(name: str) -> bytes:
    return bytes.fromhex(VECTORS[name])


def an_offer() -> Offer:
    fields = VECTORS["offer"]
    key, signature = bytes.fromhex(fields["key"]), hexed("offer_signature")
    return Offer(fields["index"], fields["expires"], key, signature)


def test_the_published_file_is_what_its_generator_makes() -> None:
    assert made() == VECTORS


def test_the_published_update_is_within_its_clip() -> None:
    """A device never masks a longer one: it would scale it down first."""
    assert np.linalg.norm(VECTORS["update"]) <= PARAMETERS.clip


def test_parameters_hash() -> None:
    assert PARAMETERS.digest().hex() == VECTORS["parameters_sha256"]


@pytest.mark.parametrize("seed", VECTORS["masks"])
def test_masks(seed: str) -> None:
    words = VECTORS["masks"][seed]
    assert sum_masks([bytes.fromhex(seed)], len(words)).tolist() == words


# NIST AESAVS (VarKey, KeySbox: plaintext zero) and the GCM specification's test cases 1 and 2,
# whose tag and ciphertext are the key stream at counters 1 and 2.
NIST = {
    "80000000000000000000000000000000": "0edd33d3c621e546455bd8ba1418bec8",
    "10a58869d74be5a374cf867cfb473859": "6d251e6944b051e04eaa6fb4dbf78465",
    "00000000000000000000000000000000": "66e94bd4ef8a2c3b884cfa59ca342b2e"
    "58e2fccefa7e3061367f1d57a4e7455a0388dace60b6a392f328c2b971b2fe78",
}


@pytest.mark.parametrize(("key", "stream"), NIST.items())
def test_public_vectors_of_the_keystream(key: str, stream: str) -> None:
    expected = np.frombuffer(bytes.fromhex(stream), WORD)
    found = np.empty(expected.size, WORD)
    Mask(bytes.fromhex(key)).next_into(found)
    assert found.tolist() == expected.tolist()


def test_public_vector_of_x25519() -> None:
    """RFC 7748, section 6.1: Bob."""
    private = "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"
    public = "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    assert channel.public_key(bytes.fromhex(private)).hex() == public


def test_the_offer_is_signed_as_published() -> None:
    identity = Ed25519PrivateKey.from_private_bytes(hexed("identity_private_key"))
    fields = VECTORS["offer"]
    key = channel.public_key(hexed("offer_private_key"))
    made_here = Offer.signed(identity, PARAMETERS.digest(), fields["index"], key, fields["expires"])
    assert made_here == an_offer()


def test_a_whole_update_is_sealed_as_published() -> None:
    draws = iter((hexed("seed"), hexed("seal_private_key")))
    terms = Terms(hexed("identity_public_key"), PARAMETERS, a_policy(PARAMETERS))
    delta = np.array(VECTORS["update"], np.float32)
    update = UnsealedUpdate(delta, VECTORS["examples"], 10)
    sealed = update.seal(terms, an_offer(), 10 + VECTORS["staleness"], NOW, lambda _: next(draws))
    assert sealed.sealed == hexed("sealed")
    assert sealed.masked.tolist() == VECTORS["masked"]
    opened = channel.unseal(
        sealed.sealed, hexed("offer_private_key"), an_offer().context(PARAMETERS.digest())
    )
    assert opened == (hexed("seed"), b"")


def test_fixed_point_is_as_published() -> None:
    levels = PARAMETERS.levels
    delta = np.array(VECTORS["update"], np.float32)
    found = encoded(delta, 0.25 * levels, levels)
    assert found.tolist() == VECTORS["encoded"][:-2]
