"""Tickets carry the state of a virtual session, so any server can continue it (paper).

    AssignmentTicket   from the Selector   session, task, sequence number, confirm-by, version, and
                                           the epoch of the leader
    SessionTicket      from join           + initial version, parameters, expiry
    UploadTicket       from report         + frozen staleness, examples, upload-by, offer

A ticket is sealed with HMAC-SHA256. Keys have ids, so that they can be rotated. Opening raises
TicketError for anything that was not sealed as this kind of ticket by one of the keys. Callers
check the expiry, since they know the time.

Tickets carry a pseudonym of the device if its token identifies it, so that one device can be
limited (docs/adr/0035). Only whoever has the task's key can tell which device it belongs to. They
also carry the digest of the signed manifest under which the client trains (docs/adr/0045).
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from functools import lru_cache
from typing import TypeVar

import msgspec
from msgspec import Struct

from papaya.errors import TicketError
from papaya.messages.base import BlobKey, SessionId, TaskId

_MAC_BYTES = 32
_HEADER_BYTES = _MAC_BYTES + 4
_PSEUDONYM_BYTES = 16
PSEUDONYM_KEY_BYTES = 32
_encoder = msgspec.msgpack.Encoder()


def pseudonym_of(device: str, key: bytes) -> bytes:
    """The device's name within one task; empty if the device or the key is unknown.

    `device` is the identity that the device's token shows, `key` the task's `pseudonym_key`.
    """
    if not device or not key:
        return b""
    return hmac.digest(key, device.encode(), "sha256")[:_PSEUDONYM_BYTES]


class _LastElements(Struct, frozen=True, gc=False, tag=True, array_like=True, kw_only=True):
    """Come after all other elements except those that were added later, in every ticket.

    `pseudonym` is empty if tokens do not identify devices, `manifest` if nobody signed the task.
    """

    pseudonym: bytes = b""
    manifest: bytes = b""


class Ticket(_LastElements, frozen=True):
    task: TaskId
    session: SessionId
    seq: int


class _Confirmable(Ticket, frozen=True):
    confirm_by: float
    version: int = 0


class AssignmentTicket(_Confirmable, frozen=True, kw_only=True):
    """`version`: not newer than the one the session will start from.

    `epoch`: of the leader that made the assignment. Last, because tickets of the version before do
    not have it; then it is 0.
    """

    epoch: int = 0


class _Expiring(Ticket, frozen=True):
    version: int
    parameters: BlobKey
    expires: float


class SessionTicket(_Expiring, frozen=True, kw_only=True):
    """`kept_until`: the session continues until then, past its deadline (`Retry.keep_s`). Last,
    because tickets of the version before do not have it.
    """

    kept_until: float = 0.0


class UploadTicket(SessionTicket, frozen=True):
    staleness: int
    examples: int
    upload_by: float
    offer: int = -1


AnyTicket = AssignmentTicket | SessionTicket | UploadTicket
T = TypeVar("T", AssignmentTicket, SessionTicket, UploadTicket)
_decoder = msgspec.msgpack.Decoder(AnyTicket)


class Keyring:
    """Ticket keys by id: one seals, all of them open. Machines share it; keys may be replaced."""

    def __init__(self, keys: Mapping[int, bytes]) -> None:
        self.replace(keys, sealing=max(keys))

    def replace(self, keys: Mapping[int, bytes], sealing: int) -> None:
        """Use these keys to open tickets, and the key with the id `sealing` to seal them."""
        self._macs = {key_id: hmac.new(key, digestmod="sha256") for key_id, key in keys.items()}
        self._sealing = sealing

    def seal(self, ticket: AnyTicket) -> bytes:
        signed = self._sealing.to_bytes(4, "big") + _encoder.encode(ticket)
        return _mac(self._macs[self._sealing], signed) + signed

    def open(self, sealed: bytes, kind: type[T]) -> T:
        mac = self._macs.get(int.from_bytes(sealed[_MAC_BYTES:_HEADER_BYTES], "big"))
        if mac is None or len(sealed) <= _HEADER_BYTES:
            raise TicketError("the ticket was sealed with an unknown key")
        if not hmac.compare_digest(_mac(mac, sealed[_MAC_BYTES:]), sealed[:_MAC_BYTES]):
            raise TicketError("the ticket's seal is invalid")
        ticket = _decode(sealed)
        if type(ticket) is not kind:
            raise TicketError(f"expected a {kind.__name__}, got a {type(ticket).__name__}")
        return ticket


def _mac(keyed: hmac.HMAC, signed: bytes) -> bytes:
    mac = keyed.copy()  # avoids hashing the key for every ticket
    mac.update(signed)
    return mac.digest()


@lru_cache(maxsize=1 << 12)  # a client sends the same ticket with every request
def claim_of(sealed: bytes) -> AnyTicket:
    """What a ticket claims, without verifying it. Use it only to route and find the session."""
    return _decode(sealed)


def _decode(sealed: bytes) -> AnyTicket:
    try:
        ticket: AnyTicket = _decoder.decode(memoryview(sealed)[_HEADER_BYTES:])
        return ticket
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TicketError("the ticket cannot be read") from error
