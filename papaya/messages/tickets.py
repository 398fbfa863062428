"""Tickets: with them the next stage goes on at any server (paper, "virtual sessions").

    AssignmentTicket   from the Selector   session, task, sequence number, confirm-by
    SessionTicket      from join           + initial version, parameters, expiry
    UploadTicket       from report         + frozen staleness, examples, upload-by, offer

Sealed with HMAC-SHA256 under keys that have ids, so that they can be changed. Opening raises
TicketError for anything that was not sealed here as this kind; expiry is the caller's rule, it
knows the time.
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
_encoder = msgspec.msgpack.Encoder()


class Ticket(Struct, frozen=True, gc=False, tag=True, array_like=True):
    task: TaskId
    session: SessionId
    seq: int


class AssignmentTicket(Ticket, frozen=True):
    confirm_by: float


class SessionTicket(Ticket, frozen=True):
    version: int
    parameters: BlobKey
    expires: float


class UploadTicket(SessionTicket, frozen=True):
    staleness: int
    examples: int
    upload_by: float
    offer: int = -1


AnyTicket = AssignmentTicket | SessionTicket | UploadTicket
T = TypeVar("T", AssignmentTicket, SessionTicket, UploadTicket)
_decoder = msgspec.msgpack.Decoder(AnyTicket)


class Keyring:
    """Ticket keys by id: one seals, all of them open. Machines hold it while keys come and go."""

    def __init__(self, keys: Mapping[int, bytes]) -> None:
        self.replace(keys, sealing=max(keys))

    def replace(self, keys: Mapping[int, bytes], sealing: int) -> None:
        """From here on these keys open, and the one with the id `sealing` seals."""
        self._macs = {key_id: hmac.new(key, digestmod="sha256") for key_id, key in keys.items()}
        self._sealing = sealing

    def seal(self, ticket: AnyTicket) -> bytes:
        signed = self._sealing.to_bytes(4, "big") + _encoder.encode(ticket)
        return _mac(self._macs[self._sealing], signed) + signed

    def open(self, sealed: bytes, kind: type[T]) -> T:
        mac = self._macs.get(int.from_bytes(sealed[_MAC_BYTES:_HEADER_BYTES], "big"))
        if mac is None or len(sealed) <= _HEADER_BYTES:
            raise TicketError("the ticket was not sealed by this system")
        if not hmac.compare_digest(_mac(mac, sealed[_MAC_BYTES:]), sealed[:_MAC_BYTES]):
            raise TicketError("the ticket's seal is broken")
        ticket = _decode(sealed)
        if type(ticket) is not kind:
            raise TicketError(f"this is a {type(ticket).__name__}, not a {kind.__name__}")
        return ticket


def _mac(keyed: hmac.HMAC, signed: bytes) -> bytes:
    mac = keyed.copy()  # the key is hashed once, not for every ticket
    mac.update(signed)
    return mac.digest()


@lru_cache(maxsize=1 << 12)  # a client shows its ticket again with every request
def claim_of(sealed: bytes) -> AnyTicket:
    """What a ticket claims. Unverified: good for routing and for finding the session."""
    return _decode(sealed)


def _decode(sealed: bytes) -> AnyTicket:
    try:
        ticket: AnyTicket = _decoder.decode(memoryview(sealed)[_HEADER_BYTES:])
        return ticket
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TicketError("the ticket cannot be read") from error
