"""Who has no key cannot make, change, stretch or exchange a ticket, and learns nothing trying."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.errors import TicketError
from papaya.messages.tickets import (
    AnyTicket,
    AssignmentTicket,
    Keyring,
    SessionTicket,
    UploadTicket,
    claim_of,
)

KEY, OTHER_KEY = bytes(range(32)), bytes(range(100, 132))
KEYRING = Keyring({3: OTHER_KEY, 7: KEY})
TICKETS: list[AnyTicket] = [
    AssignmentTicket("next-word", "s-secret", 3, confirm_by=1030.0),
    SessionTicket("next-word", "s-secret", 3, 12, "sha256-ab", expires=1250.5),
    UploadTicket("next-word", "s-secret", 3, 12, "sha256-ab", 1250.5, 2, 20, upload_by=1370.5),
]
KINDS: list[Any] = [AssignmentTicket, SessionTicket, UploadTicket]
every_ticket = pytest.mark.parametrize("ticket", TICKETS, ids=lambda t: type(t).__name__)


def refused(sealed: bytes, kind: Any) -> str:
    """The words of the refusal: from the ticket, the key and the MAC they repeat nothing."""
    with pytest.raises(TicketError) as caught:
        KEYRING.open(sealed, kind)
    said = f"{caught.value} {caught.value.hint}"
    for secret in (KEY, OTHER_KEY, sealed[:32], sealed[36:]):
        shapes = (secret.hex(), base64.b64encode(secret).decode(), repr(secret)[2:-1])
        assert len(secret) < 8 or not any(shape in said for shape in shapes)
    assert "s-secret" not in said
    return said


@every_ticket
def test_every_flipped_bit_is_noticed(ticket: AnyTicket) -> None:
    sealed = KEYRING.seal(ticket)
    for position in range(len(sealed)):
        for bit in range(8):
            forged = bytearray(sealed)
            forged[position] ^= 1 << bit
            refused(bytes(forged), type(ticket))


@every_ticket
def test_a_ticket_cannot_be_cut_or_stretched(ticket: AnyTicket) -> None:
    sealed = KEYRING.seal(ticket)
    for length in range(len(sealed)):
        refused(sealed[:length], type(ticket))
    for tail in (b"\x00", b"\xc0", sealed):
        refused(sealed + tail, type(ticket))
        refused(tail + sealed, type(ticket))


@every_ticket
@pytest.mark.parametrize("kind", KINDS)
def test_a_ticket_of_one_stage_is_no_ticket_of_another(ticket: AnyTicket, kind: Any) -> None:
    """An assignment must not upload, and an upload ticket must not begin another session."""
    sealed = KEYRING.seal(ticket)
    if kind.__name__ == type(ticket).__name__:
        assert KEYRING.open(sealed, kind) == ticket
    else:
        said = refused(sealed, kind)
        assert type(ticket).__name__ in said
        assert kind.__name__ in said


@every_ticket
def test_a_stranger_cannot_seal(ticket: AnyTicket) -> None:
    for key_id in (3, 7):
        refused(Keyring({key_id: b"guessed"}).seal(ticket), type(ticket))
        refused(Keyring({key_id: b""}).seal(ticket), type(ticket))


@every_ticket
@pytest.mark.parametrize("key_id", [0, 1, 8, 2**32 - 1])
def test_an_unknown_key_is_refused_whatever_it_sealed(ticket: AnyTicket, key_id: int) -> None:
    refused(Keyring({key_id: KEY}).seal(ticket), type(ticket))


@every_ticket
def test_a_seal_names_its_key(ticket: AnyTicket) -> None:
    """The id is under the seal: a leaked, retired key cannot be passed off as another."""
    sealed = KEYRING.seal(ticket)
    renamed = sealed[:32] + (3).to_bytes(4, "big") + sealed[36:]
    refused(renamed, type(ticket))
    retired = Keyring({3: OTHER_KEY}).seal(ticket)
    refused(retired[:32] + (7).to_bytes(4, "big") + retired[36:], type(ticket))


def test_the_seal_of_one_ticket_does_not_fit_another() -> None:
    mine = KEYRING.seal(TICKETS[0])
    yours = KEYRING.seal(AssignmentTicket("next-word", "s-other", 3, confirm_by=1030.0))
    refused(mine[:32] + yours[32:], AssignmentTicket)
    refused(yours[:32] + mine[32:], AssignmentTicket)


@pytest.mark.parametrize(
    "mac",
    [
        lambda signed: hashlib.sha256(KEY[:0] + signed).digest(),
        lambda signed: hashlib.sha256(signed).digest(),
        lambda signed: hmac.digest(b"", signed, "sha256"),
        lambda signed: hmac.digest(KEY, signed[4:], "sha256"),
        lambda signed: hmac.digest(KEY, signed, "sha512")[:32],
        lambda signed: bytes(32),
    ],
)
def test_other_ways_to_compute_a_seal_are_refused(mac: Callable[[bytes], bytes]) -> None:
    signed = KEYRING.seal(TICKETS[0])[32:]
    refused(mac(signed) + signed, AssignmentTicket)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x90",
        b"\xc0",
        b"\x95" * 100,
        b'{"type":"AssignmentTicket"}',
        msgspec.msgpack.encode(["AssignmentTicket", "t", "s", "not a number", 1.0]),
        msgspec.msgpack.encode(["AssignmentTicket", "t", "s"]),
        msgspec.msgpack.encode(["GoldenTicket", "t", "s", 1, 1.0]),
        b"\x95\xb0AssignmentTicket\xa1\xff\xa1s\x01\xcb" + bytes(8),
    ],
)
def test_nonsense_under_a_good_seal_is_still_refused(body: bytes) -> None:
    """Another system that shares the key, or an older one: the seal alone makes no ticket."""
    signed = (7).to_bytes(4, "big") + body
    refused(hmac.digest(KEY, signed, "sha256") + signed, AssignmentTicket)
    with pytest.raises(TicketError):
        claim_of(bytes(32) + signed)


# --- Claims are read before any seal is checked: their bytes are anybody's


@given(st.binary(max_size=200) | st.binary(max_size=80).map(lambda body: bytes(36) + body))
def test_any_bytes_are_a_ticket_or_a_ticket_error(data: bytes) -> None:
    for kind in KINDS:
        refused(data, kind)
    with suppress(TicketError):
        claim_of(data)


@every_ticket
@given(st.data())
def test_a_damaged_claim_is_a_ticket_or_a_ticket_error(
    ticket: AnyTicket, data: st.DataObject
) -> None:
    sealed = bytearray(KEYRING.seal(ticket))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(36, len(sealed) - 1))
        sealed[position] = data.draw(st.integers(0, 255))
    with suppress(TicketError):
        claim_of(bytes(sealed))


def deep(calls: int, read: Callable[[], AnyTicket]) -> AnyTicket:
    """A driver reads tickets from some depth of its own."""
    return read() if calls == 0 else deep(calls - 1, read)


@pytest.mark.parametrize("calls", [0, 100])
def test_a_ticket_nested_to_the_limit_is_read_or_refused(calls: int) -> None:
    """1024 bytes are enough to nest deeper than the interpreter likes to go."""
    claim = b"\x96\xb0AssignmentTicket\xa0\xa0\x01\x00"
    bomb = bytes(36) + claim + b"\x91" * (1024 - 36 - len(claim) - 1) + b"\x00"
    with suppress(TicketError):
        assert deep(calls, lambda: claim_of(bomb)).seq == 1


def test_printing_a_keyring_shows_no_key() -> None:
    shown = f"{KEYRING!r} {KEYRING!s}"
    assert KEY.hex() not in shown
    assert repr(KEY)[2:-1] not in shown
