"""The private channel from a device to the TSA: one message, one 16-byte seed, with a tag of 16
bytes for a task with noise.

Paper, appendices "Diffie–Hellman Key Exchange Protocol" and "Protocol Detail": the device answers
an initial message with its own public key and the seed encrypted under the shared secret.

    secret     = X25519(own key, other's key)
    key, nonce = HKDF-SHA256(secret, info = label | context | device's key)      context: offer.py
    sealed     = device's key | AES-256-GCM(key, nonce, seed | tag, associated data = context)

Both public keys, the parameters hash, the index and the expiry are in the derivation and in the
associated data, so a sealed seed opens under one offer only. The device's key is drawn for one
seal: key and nonce are never used twice. `sealed` has 64 bytes, whatever the model, and 80 with a
tag.

Refused (ChannelError): a wrong length; a point that is not the canonical encoding of its
coordinate, which would give one key two spellings; a point of low order, whose secret everyone
knows; anything that was changed on the way.
"""

from __future__ import annotations

from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from papaya.secagg.errors import ChannelError
from papaya.secagg.mask import SEED_BYTES
from papaya.secagg.offer import KEY_BYTES

_LABEL: Final = b"papaya secagg 1 seal\0"
_TAG_BYTES: Final = 16
_CIPHER_KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_PRIME: Final = 2**255 - 19
DEVICE_TAG_BYTES: Final = 16
SEALED_BYTES: Final = KEY_BYTES + SEED_BYTES + _TAG_BYTES
TAGGED_BYTES: Final = SEALED_BYTES + DEVICE_TAG_BYTES


def public_key(private_key: bytes) -> bytes:
    """The X25519 public key of drawn bytes."""
    return X25519PrivateKey.from_private_bytes(private_key).public_key().public_bytes_raw()


def seal(
    seed: bytes, private_key: bytes, offered_key: bytes, context: bytes, tag: bytes = b""
) -> bytes:
    """The device's side; `private_key` is 32 bytes drawn for this seal and used for no other."""
    if len(seed) != SEED_BYTES:
        raise ChannelError("seed_length", f"a seed has {SEED_BYTES} bytes, not {len(seed)}")
    if len(tag) not in (0, DEVICE_TAG_BYTES):
        raise ChannelError("tag_length", f"a tag has {DEVICE_TAG_BYTES} bytes, not {len(tag)}")
    own = public_key(private_key)
    cipher, nonce = _derived(_shared(private_key, offered_key), context, own)
    return own + cipher.encrypt(nonce, seed + tag, context)


def unseal(
    sealed: bytes, private_key: bytes, context: bytes, *, is_tagged: bool = False
) -> tuple[bytes, bytes]:
    """The TSA's side: the seed and the tag, or ChannelError."""
    expected = TAGGED_BYTES if is_tagged else SEALED_BYTES
    if len(sealed) != expected:
        message = f"a sealed seed has {expected} bytes, not {len(sealed)}"
        raise ChannelError("length", message)
    device_key = sealed[:KEY_BYTES]
    cipher, nonce = _derived(_shared(private_key, device_key), context, device_key)
    try:
        opened = cipher.decrypt(nonce, sealed[KEY_BYTES:], context)
    except InvalidTag:
        message = "the sealed seed was changed, or sealed for another offer"
        raise ChannelError("tampered", message) from None
    return opened[:SEED_BYTES], opened[SEED_BYTES:]


def _shared(private_key: bytes, point: bytes) -> bytes:
    if len(point) != KEY_BYTES or int.from_bytes(point, "little") >= _PRIME:
        raise ChannelError("point", "an X25519 key is 32 bytes, a number below 2^255 - 19")
    try:
        return X25519PrivateKey.from_private_bytes(private_key).exchange(
            X25519PublicKey.from_public_bytes(point)
        )
    except ValueError:  # the secret is zero
        raise ChannelError("low_order", "invalid X25519 key: it is a point of low order") from None


def _derived(secret: bytes, context: bytes, device_key: bytes) -> tuple[AESGCM, bytes]:
    size = _CIPHER_KEY_BYTES + _NONCE_BYTES
    info = _LABEL + context + device_key
    derived = HKDF(algorithm=SHA256(), length=size, salt=None, info=info).derive(secret)
    return AESGCM(derived[:_CIPHER_KEY_BYTES]), derived[_CIPHER_KEY_BYTES:]
