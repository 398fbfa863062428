"""Signed notes (C2SP signed-note) with Ed25519 keys, and witness cosignatures on them.

    text, which ends with a newline
    (an empty line)
    — <key name> base64(key id, 4 bytes || signature)

A log signs the text (type 0x01). A witness signs `cosignature/v1`, a time and the text (type 0x04,
C2SP tlog-cosignature). Signatures of unknown keys are ignored, as the specification demands; a note
with a wrong signature by a known key is refused. Keys are written `name+id+base64` for verifiers
and `PRIVATE+KEY+name+id+base64` for signers.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from papaya.verifiable_log.errors import LogError, MalformedNote, SignatureError, UnknownSigner

LOG_SIGNATURE = 0x01
COSIGNATURE = 0x04

MAX_NOTE_BYTES = 64 * 1024
MAX_SIGNATURES = 64
_ID_BYTES = 4
_KEY_BYTES = 32
_SIGNATURE_BYTES = 64
_TIME_BYTES = 8
_MAX_TIME = 2**63 - 1
_DASH = "— "
_PRIVATE = "PRIVATE+KEY+"
_SHOWN_IDS = 4  # of the keys that signed a note


@dataclass(frozen=True)
class VerifierKey:
    """The public key of a log (type 0x01) or of a witness (type 0x04), with its name."""

    name: str
    public_key: bytes
    kind: int = LOG_SIGNATURE

    def __post_init__(self) -> None:
        _check_name(self.name)
        if self.kind not in (LOG_SIGNATURE, COSIGNATURE) or len(self.public_key) != _KEY_BYTES:
            raise LogError(f"the key of {self.name} is not an Ed25519 key of a log or a witness")

    @property
    def key_id(self) -> bytes:
        hashed = self.name.encode() + b"\n" + bytes([self.kind]) + self.public_key
        return hashlib.sha256(hashed).digest()[:_ID_BYTES]

    def __str__(self) -> str:
        encoded = base64.b64encode(bytes([self.kind]) + self.public_key).decode()
        return f"{self.name}+{self.key_id.hex()}+{encoded}"

    @classmethod
    def parse(cls, text: str) -> VerifierKey:
        if text.startswith(_PRIVATE):
            raise LogError("this is a private key; use the file that ends with .pub")
        name, key_id, kind, key = _parse_key(text)
        parsed = cls(name, key, kind)
        if parsed.key_id.hex() != key_id:
            raise LogError(f"the key of {name} does not have the id {key_id}")
        return parsed

    def verify(self, text: str, signature: bytes) -> int | None:
        """The time of a cosignature, None for a log's signature. Raises if it is wrong."""
        message, time = text.encode(), None
        if self.kind == COSIGNATURE:
            time = int.from_bytes(signature[:_TIME_BYTES])
            signature = signature[_TIME_BYTES:]
            if time > _MAX_TIME:
                raise SignatureError(f"invalid time in the cosignature of {self.name}")
            message = _cosigned(text, time)
        try:
            Ed25519PublicKey.from_public_bytes(self.public_key).verify(signature, message)
        except (InvalidSignature, ValueError) as error:
            raise SignatureError(f"the signature of {self.name} is wrong") from error
        return time


@dataclass(frozen=True)
class SignerKey:
    """The private key of a log or a witness, made from 32 random bytes."""

    name: str
    seed: bytes = field(repr=False)
    kind: int = LOG_SIGNATURE

    def __post_init__(self) -> None:
        if len(self.seed) != _KEY_BYTES:
            raise LogError(f"a private key must have {_KEY_BYTES} bytes")
        _ = self.verifier

    @property
    def verifier(self) -> VerifierKey:
        public = Ed25519PrivateKey.from_private_bytes(self.seed).public_key()
        return VerifierKey(self.name, public.public_bytes_raw(), self.kind)

    def reveal(self) -> str:
        """The private key as text, for a file that only its owner may read."""
        encoded = base64.b64encode(bytes([self.kind]) + self.seed).decode()
        return f"{_PRIVATE}{self.name}+{self.verifier.key_id.hex()}+{encoded}"

    @classmethod
    def parse(cls, text: str) -> SignerKey:
        if not text.startswith(_PRIVATE):
            raise LogError("not the private key of a log or a witness")
        name, key_id, kind, seed = _parse_key(text.removeprefix(_PRIVATE))
        parsed = cls(name, seed, kind)
        if parsed.verifier.key_id.hex() != key_id:
            raise LogError(f"the private key of {name} does not have the id {key_id}")
        return parsed

    def signature_line(self, text: str, time: int | None = None) -> str:
        """One signature line of a note. A witness must pass the time."""
        key = Ed25519PrivateKey.from_private_bytes(self.seed)
        if self.kind == COSIGNATURE:
            if time is None:
                raise LogError("a cosignature needs a time")
            signature = time.to_bytes(_TIME_BYTES) + key.sign(_cosigned(text, time))
        else:
            signature = key.sign(text.encode())
        encoded = base64.b64encode(self.verifier.key_id + signature).decode()
        return f"{_DASH}{self.name} {encoded}\n"


@dataclass(frozen=True)
class Note:
    """A note with its verified signatures; `times` are None except for cosignatures.

    `unknown` are the ids of the keys whose signatures were not verified.
    """

    text: str
    signed_by: tuple[VerifierKey, ...]
    times: tuple[int | None, ...]
    unknown: tuple[str, ...] = ()


def signed_note(text: str, lines: Iterable[str]) -> bytes:
    return f"{text}\n{''.join(lines)}".encode()


def open_note(raw: bytes, known: Iterable[VerifierKey]) -> Note:
    """Check every signature by a known key; refuse a note that has none."""
    text, lines = _split(raw)
    by_identity = {(key.name, key.key_id): key for key in known}
    verified: dict[VerifierKey, int | None] = {}
    unknown: list[str] = []
    for line in lines:
        name, key_id, signature = _parse_line(line)
        key = by_identity.get((name, key_id))
        if key is None:
            unknown.append(key_id.hex())
        elif key not in verified:
            verified[key] = key.verify(text, signature)
    if not verified:
        raise UnknownSigner(
            f"no known key has signed this note: {signed_by(unknown, by_identity.values())}"
        )
    return Note(text, tuple(verified), tuple(verified.values()), tuple(unknown))


def signed_by(found: Sequence[str], wanted: Iterable[VerifierKey]) -> str:
    """Which keys signed a note, by id, and which should have signed it: for error messages."""
    shown = ", ".join(found[:_SHOWN_IDS]) + (", …" if len(found) > _SHOWN_IDS else "")
    ids = ", ".join(key.key_id.hex() for key in wanted)
    return f"its signature lines name the keys {shown}, but not {ids}"


def split_note(raw: bytes) -> tuple[str, list[str]]:
    """Text and signature lines, not verified. Only for adding a signature."""
    text, lines = _split(raw)
    return text, [f"{line}\n" for line in lines]


def _split(raw: bytes) -> tuple[str, list[str]]:
    if len(raw) > MAX_NOTE_BYTES:
        raise MalformedNote(f"a note of {len(raw)} bytes is longer than {MAX_NOTE_BYTES}")
    try:
        whole = raw.decode()
    except UnicodeDecodeError as error:
        raise MalformedNote("the note is not UTF-8 text") from error
    if any(ord(character) < 0x20 and character != "\n" for character in whole):
        raise MalformedNote("the note contains control characters")
    text, separator, signatures = whole.rpartition("\n\n")
    if not separator or not signatures.endswith("\n"):
        raise MalformedNote("the note is not text, an empty line and signatures")
    lines = signatures[:-1].split("\n")
    if len(lines) > MAX_SIGNATURES:
        raise MalformedNote(
            f"the note has {len(lines)} signatures, above the limit of {MAX_SIGNATURES}"
        )
    return f"{text}\n", lines


def _parse_line(line: str) -> tuple[str, bytes, bytes]:
    parts = line.removeprefix(_DASH).split(" ")
    if not line.startswith(_DASH) or len(parts) != 2:
        raise MalformedNote(f"malformed signature line: {line[:80]!r}")
    _check_name(parts[0])
    decoded = decode_base64(parts[1])
    if len(decoded) <= _ID_BYTES:
        raise LogError(f"the signature of {parts[0]!r} is too short")
    return parts[0], decoded[:_ID_BYTES], decoded[_ID_BYTES:]


def _parse_key(text: str) -> tuple[str, str, int, bytes]:
    parts = text.strip().split("+", 2)
    if len(parts) != 3:
        raise LogError("malformed key, expected name+id+base64")
    decoded = decode_base64(parts[2])
    if len(decoded) != 1 + _KEY_BYTES:
        raise LogError(f"the key of {parts[0]!r} is not an Ed25519 key")
    return parts[0], parts[1], decoded[0], decoded[1:]


def _check_name(name: str) -> None:
    if not name or "+" in name or any(character.isspace() for character in name):
        raise LogError(f"a key's name must not contain spaces or plus signs: {name!r}")


def _cosigned(text: str, time: int) -> bytes:
    return f"cosignature/v1\ntime {time}\n{text}".encode()


def decode_base64(text: str) -> bytes:
    """The standard alphabet with padding; one encoding per value."""
    try:
        decoded = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        # The text is not quoted: it may be a private key.
        raise LogError(f"{len(text)} characters that are not base64") from error
    if base64.b64encode(decoded).decode() != text:
        raise LogError(f"{len(text)} characters that are not canonical base64")
    return decoded
