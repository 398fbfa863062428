"""The TSA's messages: length, one byte, fixed fields. Nothing else is ever parsed.

    request    length: u32 | operation: u8 | fields
    answer     length: u32 | 0            | fields            done
               length: u32 | reason: u8   | text              refused
               length: u32 | OTHER_GROUP  | group: u64, text  refused: the seed is in that group

    IDENTITY                                        → version: u8, key: 32, challenge: 32 bytes
    AUTHENTICATE  cluster key: 32, signature: 64    →            first on every connection
    REGISTER   parameters: JSON                     → hash: 32 bytes
    OFFERS     hash, count: u16                     → count × offer (112 bytes)
    ACCEPT     index: u64, group: u64, sealed: 64   →            85 bytes, frame and all
                                   or sealed: 80   →            for a task with noise
    RELEASE    hash, group: u64, members × u64      → words: little-endian u32, or u16
    DROP       hash, group: u64                     → seeds: u32
    FORGET     hash                                 → seeds: u32
    STATUS     hash                                 → see `encode_status`
    EVIDENCE   hash                                 → evidence, as its platform makes it

A connection begins with IDENTITY and AUTHENTICATE: the client proves that it holds the private key
of a cluster, by an Ed25519 signature over `proof_of`. All other requests are about tasks that this
cluster registered.

Numbers are big-endian, apart from the words, which are not touched on their way. A length above the
limit ends the connection before a byte of it is read; fields of a wrong size are MALFORMED.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final

from papaya.secagg.channel import SEALED_BYTES, TAGGED_BYTES
from papaya.secagg.offer import KEY_BYTES, OFFER_BYTES, SIGNATURE_BYTES, Offer
from papaya.secagg.parameters import HASH_BYTES
from papaya.tsa.errors import RefusalReason, TsaRefused
from papaya.tsa.tsa import TsaStatus

VERSION: Final = 2
DONE: Final = 0
MAX_REQUEST_BYTES: Final = 1 << 20
MAX_OFFERS: Final = 1024  # per request
MAX_TEXT_BYTES: Final = 400
CHALLENGE_BYTES: Final = 32
LENGTH: Final = struct.Struct(">I")

_PROOF_LABEL: Final = b"papaya-tsa-connection-1\0"
_AUTHENTICATE: Final = struct.Struct(f">{KEY_BYTES}s{SIGNATURE_BYTES}s")
_ACCEPT: Final = struct.Struct(f">QQ{SEALED_BYTES}s")
_ACCEPT_TAGGED: Final = struct.Struct(f">QQ{TAGGED_BYTES}s")
_OFFERS: Final = struct.Struct(f">{HASH_BYTES}sH")
_GROUP: Final = struct.Struct(f">{HASH_BYTES}sQ")
_HASH: Final = struct.Struct(f">{HASH_BYTES}s")
_STATUS: Final = struct.Struct(">IIqH")
_STATUS_GROUP: Final = struct.Struct(">QI")
_COUNT: Final = struct.Struct(">I")
_NUMBER: Final = struct.Struct(">Q")
_NUMBER_BYTES: Final = 8


class Operation(IntEnum):
    """Part of the wire format: never renumbered."""

    IDENTITY = 1
    REGISTER = 2
    OFFERS = 3
    ACCEPT = 4
    RELEASE = 5
    DROP = 6
    FORGET = 7
    STATUS = 8
    EVIDENCE = 9
    AUTHENTICATE = 10


def frame(first: int, *parts: bytes) -> bytes:
    """A whole small message."""
    size = 1 + sum(len(part) for part in parts)
    return b"".join((LENGTH.pack(size), bytes((first,)), *parts))


def frame_head(first: int, body_bytes: int) -> bytes:
    """The start of a large message, whose body is sent as it lies in memory."""
    return LENGTH.pack(1 + body_bytes) + bytes((first,))


# --- Requests ------------------------------------------------------------------------------------


def _packed(fields: struct.Struct, *values: bytes | int) -> bytes:
    """Refuses what would not come out again: struct pads and cuts byte strings in silence."""
    try:
        packed = fields.pack(*values)
    except struct.error as error:
        raise TsaRefused(RefusalReason.MALFORMED, f"cannot encode this request: {error}") from None
    if fields.unpack(packed) != values:
        raise TsaRefused(
            RefusalReason.MALFORMED, "cannot encode this request: a field has the wrong length"
        )
    return packed


def identity_request() -> bytes:
    return frame(Operation.IDENTITY)


def proof_of(identity_public_key: bytes, challenge: bytes) -> bytes:
    """What a cluster signs: good for this TSA and this connection only."""
    return _PROOF_LABEL + identity_public_key + challenge


def authenticate_request(cluster: bytes, signature: bytes) -> bytes:
    return frame(Operation.AUTHENTICATE, _packed(_AUTHENTICATE, cluster, signature))


def register_request(encoded_parameters: bytes) -> bytes:
    return frame(Operation.REGISTER, encoded_parameters)


def offers_request(parameters_hash: bytes, count: int) -> bytes:
    return frame(Operation.OFFERS, _packed(_OFFERS, parameters_hash, count))


def accept_request(index: int, group: int, sealed: bytes) -> bytes:
    fields = _ACCEPT_TAGGED if len(sealed) == TAGGED_BYTES else _ACCEPT
    return frame(Operation.ACCEPT, _packed(fields, index, group, sealed))


def release_request(parameters_hash: bytes, group: int, members: Sequence[int]) -> bytes:
    listed = _packed(struct.Struct(f">{len(members)}Q"), *members)
    return frame(Operation.RELEASE, _packed(_GROUP, parameters_hash, group), listed)


def group_request(operation: Operation, parameters_hash: bytes, group: int) -> bytes:
    return frame(operation, _packed(_GROUP, parameters_hash, group))


def task_request(operation: Operation, parameters_hash: bytes) -> bytes:
    return frame(operation, _packed(_HASH, parameters_hash))


# --- What the TSA parses ---------------------------------------------------------------


def read_operation(request: bytes) -> Operation:
    try:
        return Operation(request[0])
    except (IndexError, ValueError):
        raise TsaRefused(RefusalReason.MALFORMED, "no such operation") from None


def read_authenticate(body: bytes) -> tuple[bytes, bytes]:
    cluster, signature = _exactly(_AUTHENTICATE, body)
    return cluster, signature


def read_task(body: bytes) -> bytes:
    (parameters_hash,) = _exactly(_HASH, body)
    return bytes(parameters_hash)


def read_offers(body: bytes) -> tuple[bytes, int]:
    parameters_hash, count = _exactly(_OFFERS, body)
    if count > MAX_OFFERS:
        raise TsaRefused(
            RefusalReason.TOO_MANY_OFFERS, f"{count} offers requested; request at most {MAX_OFFERS}"
        )
    return parameters_hash, count


def read_accept(body: bytes) -> tuple[int, int, bytes]:
    fields = _ACCEPT_TAGGED if len(body) == _ACCEPT_TAGGED.size else _ACCEPT
    index, group, sealed = _exactly(fields, body)
    return index, group, sealed


def read_group(body: bytes) -> tuple[bytes, int]:
    parameters_hash, group = _exactly(_GROUP, body)
    return parameters_hash, group


def read_release(body: bytes) -> tuple[bytes, int, tuple[int, ...]]:
    listed = body[_GROUP.size :]
    if len(listed) % _NUMBER_BYTES:
        raise TsaRefused(RefusalReason.MALFORMED, f"invalid list of members: {len(listed)} bytes")
    parameters_hash, group = read_group(body[: _GROUP.size])
    return parameters_hash, group, struct.unpack(f">{len(listed) // _NUMBER_BYTES}Q", listed)


def _exactly(fields: struct.Struct, body: bytes) -> tuple[Any, ...]:
    if len(body) != fields.size:
        raise TsaRefused(
            RefusalReason.MALFORMED, f"{len(body)} bytes of fields, expected {fields.size}"
        )
    return fields.unpack(body)


# --- Answers -------------------------------------------------------------------------------------


def encode_offers(offers: Sequence[Offer]) -> bytes:
    return b"".join(offer.encode() for offer in offers)


def decode_offers(body: bytes) -> list[Offer]:
    return [Offer.decode(body[at : at + OFFER_BYTES]) for at in range(0, len(body), OFFER_BYTES)]


def encode_count(count: int) -> bytes:
    return _COUNT.pack(count)


def decode_count(body: bytes) -> int:
    (count,) = _COUNT.unpack(body)
    return int(count)


def encode_status(status: TsaStatus) -> bytes:
    """Offers: u32, waiting seeds: u32, released group or -1: i64, n: u16, n × (u64, u32)."""
    released = -1 if status.released_group is None else status.released_group
    numbers = (status.outstanding_offers, status.waiting_seeds, released, len(status.groups))
    groups = (_STATUS_GROUP.pack(*group) for group in status.groups)
    return b"".join((_STATUS.pack(*numbers), *groups))


def decode_status(body: bytes) -> TsaStatus:
    offers, waiting, released, groups = _STATUS.unpack_from(body)
    found = tuple(_STATUS_GROUP.iter_unpack(body[_STATUS.size :]))
    if len(found) != groups:
        raise struct.error(f"{len(found)} groups, not {groups}")
    return TsaStatus(offers, waiting, None if released < 0 else released, found)


def encode_refusal(refused: TsaRefused) -> bytes:
    group = b"" if refused.group is None else _NUMBER.pack(refused.group)
    return frame(refused.reason, (group + str(refused).encode())[:MAX_TEXT_BYTES])


def decode_refusal(code: int, body: bytes) -> TsaRefused:
    group = None
    if code == RefusalReason.OTHER_GROUP and len(body) >= _NUMBER_BYTES:
        (group,) = _NUMBER.unpack_from(body)
        body = body[_NUMBER_BYTES:]
    text = body[:MAX_TEXT_BYTES].decode(errors="replace")
    try:
        return TsaRefused(RefusalReason(code), text, group)
    except ValueError:
        return TsaRefused(RefusalReason.INTERNAL, f"reason {code}: {text}")
