"""An offer: the initial message of one key exchange, signed by the TSA.

Paper, "Protocol Detail", step 1: "obtains N DH key exchange initial messages. The trusted
party then sends these initial messages with their indices and signatures to the server." The
signature covers label, hash of the public parameters, index, X25519 key and expiry; the same bytes
are the context of the seal. So a server that holds offers of two tasks under one identity key can
neither swap them nor extend an expiry.

Refused: bytes of another length; a signature by anyone else or over anything else; an offer that is
over. Every field has a fixed size, so two different offers never have one context.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from papaya.secagg.errors import ChannelError, OfferRefused
from papaya.secagg.parameters import HASH_BYTES

KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
_FIELDS: Final = struct.Struct(f">QQ{KEY_BYTES}s{SIGNATURE_BYTES}s")
OFFER_BYTES: Final = _FIELDS.size
_LABEL: Final = b"papaya secagg 1 offer\0"
_CONTEXT: Final = struct.Struct(f">{len(_LABEL)}s{HASH_BYTES}sQ{KEY_BYTES}sQ")


def context(parameters_hash: bytes, index: int, key: bytes, expires: int) -> bytes:
    """What is signed, and what a sealed seed is bound to."""
    if len(parameters_hash) != HASH_BYTES or len(key) != KEY_BYTES:
        raise ChannelError("length", "a parameters hash and a key have 32 bytes each")
    return _CONTEXT.pack(_LABEL, parameters_hash, index, key, expires)


@dataclass(frozen=True, slots=True)
class Offer:
    """`key` is the TSA's X25519 key of this index alone; `expires` in Unix seconds."""

    index: int
    expires: int
    key: bytes
    signature: bytes

    @classmethod
    def signed(
        cls,
        identity: Ed25519PrivateKey,
        parameters_hash: bytes,
        index: int,
        key: bytes,
        expires: int,
    ) -> Offer:
        """The TSA's side."""
        signature = identity.sign(context(parameters_hash, index, key, expires))
        return cls(index, expires, key, signature)

    def context(self, parameters_hash: bytes) -> bytes:
        return context(parameters_hash, self.index, self.key, self.expires)

    def verify(self, identity_public_key: bytes, parameters_hash: bytes, now: float) -> None:
        """The device's side: raises OfferRefused, or all that the signature covers is as said."""
        try:
            identity = Ed25519PublicKey.from_public_bytes(identity_public_key)
            identity.verify(self.signature, self.context(parameters_hash))
        except (InvalidSignature, ValueError):
            message = f"offer {self.index} is not signed by this TSA for this task"
            raise OfferRefused("signature", message) from None
        if not now < self.expires:
            raise OfferRefused(
                "expired", f"offer {self.index} ended {now - self.expires:.0f} s ago"
            )

    def encode(self) -> bytes:
        return _FIELDS.pack(self.index, self.expires, self.key, self.signature)

    @classmethod
    def decode(cls, data: bytes) -> Offer:
        """Parses bytes from anyone."""
        if len(data) != OFFER_BYTES:
            raise ChannelError("length", f"an offer has {OFFER_BYTES} bytes, not {len(data)}")
        return cls(*_FIELDS.unpack(data))
