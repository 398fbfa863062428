"""The keys of owners: who may say what devices train.

An owner has an Ed25519 key. A device pins its public half, and optionally that of a recovery key
that the owner keeps offline. Keys change by signed statements:

    KeySuccessor     "use this key from now on", signed by the key or by the recovery key
    KeyRevocation    "never trust this key again", signed by the key or by the recovery key

A statement is JSON in one encoding (keys sorted, no spaces), and what is signed is a label for its
kind and these bytes, so that no signature is valid for a statement of another kind. Statements can
be repeated and arrive in any order. A second, different successor by the same key is refused and
reported: somebody else may have the key. A successor by the recovery key replaces whatever the key
has said, and resets what the device remembers of runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import ClassVar, Final, Self, TypeVar

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Struct

from papaya.bundle.errors import BundleError
from papaya.errors import ConfigError

KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
MAX_STATEMENTS: Final = 64
_ID_CHARS: Final = 32


def key_id(public_key: bytes) -> str:
    """The name of a key: 128 bits of its hash, in hex."""
    return hashlib.sha256(b"papaya owner key\n" + public_key).hexdigest()[:_ID_CHARS]


class SignedStatement(Struct, frozen=True):
    """The bytes of a statement, the key that signed it, and the signature."""

    body: bytes
    key: bytes
    signature: bytes


class Statement(Struct, frozen=True, forbid_unknown_fields=True):
    """What an owner signs. Every kind has its own label and a limit on its size."""

    label: ClassVar[bytes]
    max_bytes: ClassVar[int] = 1024

    def encode(self) -> bytes:
        """The one encoding."""
        return msgspec.json.encode(self, order="sorted")

    def sign(self, key: Ed25519PrivateKey) -> SignedStatement:
        body = self.encode()
        public = key.public_key().public_bytes_raw()
        return SignedStatement(body, public, key.sign(self.label + body))

    @classmethod
    def verify(cls, signed: SignedStatement) -> Self:
        """The statement, if the key that it names has signed it. Says nothing about that key."""
        if len(signed.body) > cls.max_bytes:
            raise BundleError(
                "encoding", f"{cls.__name__}: {len(signed.body)} bytes, at most {cls.max_bytes}"
            )
        try:
            key = Ed25519PublicKey.from_public_bytes(signed.key)
            key.verify(signed.signature, cls.label + signed.body)
        except (InvalidSignature, ValueError):
            raise BundleError("signature", f"{cls.__name__}: the signature is invalid") from None
        return decode(cls, signed.body)


S = TypeVar("S", bound=Statement)


def decode(kind: type[S], body: bytes) -> S:
    """Parse a statement and refuse any other encoding of the same values."""
    try:
        statement = msgspec.json.decode(body, type=kind)
        if statement.encode() == body:
            return statement
    except (msgspec.MsgspecError, ConfigError, ValueError, RecursionError) as error:
        raise BundleError("encoding", f"invalid {kind.__name__}: {str(error)[:200]}") from None
    raise BundleError("encoding", f"{kind.__name__}: not the canonical encoding of its values")


class KeySuccessor(Statement, frozen=True):
    """`new` replaces `old`. Both are key ids; the key itself is in `public_key`."""

    label = b"papaya successor\n"

    old: str
    new: str
    public_key: bytes


class KeyRevocation(Statement, frozen=True):
    label = b"papaya revocation\n"

    key: str


class OwnerPin(Struct, frozen=True):
    """What a device's policy says of an owner: its key, and the recovery key if there is one."""

    key: bytes
    recovery: bytes | None = None

    @property
    def owner(self) -> str:
        """The owner's id: that of the key that was pinned, whichever key signs for it now."""
        return key_id(self.key)


class OwnerKeys:
    """Which key signs for a pinned owner, after all statements that the device has accepted."""

    def __init__(self, pin: OwnerPin, accepted: Iterable[SignedStatement] = ()) -> None:
        self._pin = pin
        self._recovery = None if pin.recovery is None else key_id(pin.recovery)
        self._successors: dict[str, tuple[str, bytes]] = {}
        self._recovered: dict[str, tuple[str, bytes]] = {}
        self._revoked: dict[str, None] = {}
        self.accepted: list[SignedStatement] = []
        # The keys that have ever spoken for the owner, or may: others have nothing to say here.
        self._known: dict[str, None] = {pin.owner: None}
        self.learn(accepted)

    @property
    def owner(self) -> str:
        return self._pin.owner

    def has(self, name: str) -> bool:
        """Is this the id of a key that speaks for the owner, or did?"""
        return name in self._known

    @property
    def recoveries(self) -> int:
        """How often the recovery key has named a successor."""
        return len(self._recovered)

    @property
    def current(self) -> bytes:
        """The key that signs for the owner now. BundleError if it was revoked."""
        name, public_key, seen = self.owner, self._pin.key, dict.fromkeys([self.owner])
        while (following := self._after(name)) is not None and following[0] not in seen:
            name, public_key = following
            seen[name] = None
        if name in self._revoked:
            raise BundleError(
                "revoked",
                f"the key {name} of owner {self.owner} was revoked",
                hint="pin the owner's new key",
            )
        return public_key

    def learn(self, statements: Iterable[SignedStatement]) -> BundleError | None:
        """Accept what is about keys of this owner, in whatever order it comes; ignore the rest.

        Whoever passes statements on may add some of strangers, which must not count. Returns the
        conflict, if there is one.
        """
        conflict: BundleError | None = None
        pending = [signed for signed in statements if signed not in self.accepted]
        count = len(pending) + 1
        while len(pending) < count:
            count, left = len(pending), []
            for signed in pending:
                try:
                    self.accept(signed)
                except BundleError as error:
                    left.append(signed)
                    conflict = error if error.reason == "conflict" else conflict
            pending = left
        return conflict

    def accept(self, signed: SignedStatement) -> None:
        """Take a statement into account. One that is known already changes nothing."""
        if signed in self.accepted:
            return
        if len(self.accepted) >= MAX_STATEMENTS:
            raise BundleError(
                "conflict", f"owner {self.owner} has made more than {MAX_STATEMENTS} statements"
            )
        signer = key_id(signed.key)
        if signed.body.startswith(b'{"key":'):
            self._revoke(signer, KeyRevocation.verify(signed))
        else:
            self._succeed(signer, KeySuccessor.verify(signed))
        self.accepted.append(signed)

    def _after(self, name: str) -> tuple[str, bytes] | None:
        return self._recovered.get(name) or self._successors.get(name)

    def _revoke(self, signer: str, statement: KeyRevocation) -> None:
        self._require_standing(signer, statement.key)
        self._revoked[statement.key] = None

    def _succeed(self, signer: str, statement: KeySuccessor) -> None:
        self._require_standing(signer, statement.old)
        if key_id(statement.public_key) != statement.new:
            raise BundleError("encoding", f"KeySuccessor: {statement.new} is not the id of its key")
        known = self._recovered if signer == self._recovery else self._successors
        successor = (statement.new, statement.public_key)
        if known.setdefault(statement.old, successor) != successor:
            raise BundleError(
                "conflict",
                f"key {statement.old} has named two successors, {known[statement.old][0]} and "
                f"{statement.new}",
                hint="ask the owner: somebody else may have the key",
            )
        self._known[statement.new] = None

    def _require_standing(self, signer: str, about: str) -> None:
        """A key signs statements about itself, the recovery key about every key of the owner."""
        if about not in self._known:
            raise BundleError("signature", f"key {about} is not one of owner {self.owner}")
        if signer not in (about, self._recovery):
            raise BundleError(
                "signature", f"key {signer} may not sign statements about key {about}"
            )
