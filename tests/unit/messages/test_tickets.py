"""Tickets: what was sealed opens as what it is, under every key that is still known."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papaya.errors import TicketError
from papaya.messages import wire
from papaya.messages.participation import Heartbeat
from papaya.messages.tickets import (
    AnyTicket,
    AssignmentTicket,
    Keyring,
    SessionTicket,
    UploadTicket,
    claim_of,
    pseudonym_of,
)

KEY = bytes(range(32))
KEYRING = Keyring({7: KEY})

# Key 7 is the bytes 0 to 31. A seal is HMAC-SHA256 over the key's id (4 bytes, big-endian) and the
# MessagePack of the ticket; then the id, then the ticket. Checked by hand with hmac and struct.
PHONE = bytes(range(16))
MANIFEST = bytes(range(32, 64))
LAST: Any = {"pseudonym": PHONE, "manifest": MANIFEST}
VECTORS: list[tuple[AnyTicket, str]] = [
    (
        AssignmentTicket("next-word", "s-1", 3, 1030.0, version=12, **LAST, epoch=5),
        (
            "600c2b47e4226f6047a6e692222e9289e45f6629141818c4db86cda4516a79f5"
            "00000007"
            "99b041737369676e6d656e745469636b6574a96e6578742d776f7264a3732d3103cb409018000000"
            "00000cc410000102030405060708090a0b0c0d0e0fc420202122232425262728292a2b2c2d2e2f30"
            "3132333435363738393a3b3c3d3e3f05"
        ),
    ),
    (
        SessionTicket("next-word", "s-1", 3, 12, "sha256-ab", 1250.5, **LAST, kept_until=1300.5),
        (
            "39702dd829b1575cab1bd91e552fc31b143c7b94616d9ff0f5aec7aada0163f3"
            "00000007"
            "9aad53657373696f6e5469636b6574a96e6578742d776f7264a3732d31030ca97368613235362d61"
            "62cb40938a0000000000c410000102030405060708090a0b0c0d0e0fc42020212223242526272829"
            "2a2b2c2d2e2f303132333435363738393a3b3c3d3e3fcb4094520000000000"
        ),
    ),
    (
        UploadTicket(
            *("next-word", "s-1", 3, 12, "sha256-ab", 1250.5, 2, 20, 1370.5),
            **LAST,
            kept_until=1400.5,
        ),
        (
            "667c8f812cde61f3f5f80fa7251a8677bd38e7c1a5169149b3ca9ea8667d353e"
            "00000007"
            "9eac55706c6f61645469636b6574a96e6578742d776f7264a3732d31030ca97368613235362d6162"
            "cb40938a00000000000214cb40956a0000000000ffc410000102030405060708090a0b0c0d0e0fc4"
            "20202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3fcb4095e2000000"
            "0000"
        ),
    ),
]

# Sealed by servers that knew no epochs and no manifests, and kept no session past its deadline; and
# by servers of version 0.3.0, which knew neither pseudonyms nor versions of assignments.
OLDER_VECTORS: list[tuple[AnyTicket, str]] = [
    (
        AssignmentTicket("next-word", "s-1", 3, 1030.0, version=12, pseudonym=PHONE),
        (
            "b20446216495c50818f03ee64094cb4cb4eb3a8bfe50c612f6b753263ef9d10a"
            "00000007"
            "97b041737369676e6d656e745469636b6574a96e6578742d776f7264a3732d3103cb409018000000"
            "00000cc410000102030405060708090a0b0c0d0e0f"
        ),
    ),
    (
        SessionTicket("next-word", "s-1", 3, 12, "sha256-ab", expires=1250.5, pseudonym=PHONE),
        (
            "fffa1df0d195ed8755ede918fd6a6fab48af2b8f098cb63b32bf440dfb1fa1e2"
            "00000007"
            "98ad53657373696f6e5469636b6574a96e6578742d776f7264a3732d31030ca97368613235362d61"
            "62cb40938a0000000000c410000102030405060708090a0b0c0d0e0f"
        ),
    ),
    (
        UploadTicket(
            "next-word", "s-1", 3, 12, "sha256-ab", 1250.5, 2, 20, 1370.5, pseudonym=PHONE
        ),
        (
            "1d63d090dae83ff117ac7f0af58a75e757bf5ee00f2bf8d7e67f7682d48bdf2f"
            "00000007"
            "9cac55706c6f61645469636b6574a96e6578742d776f7264a3732d31030ca97368613235362d6162"
            "cb40938a00000000000214cb40956a0000000000ffc410000102030405060708090a0b0c0d0e0f"
        ),
    ),
    (
        AssignmentTicket("next-word", "s-1", 3, confirm_by=1030.0),
        (
            "944f31337dcb50a2a998fc1079e2f9fd9fdd24d1e99eebd57b12c73168f96113"
            "00000007"
            "95b041737369676e6d656e745469636b6574a96e6578742d776f7264a3732d3103cb4090180000000000"
        ),
    ),
    (
        SessionTicket("next-word", "s-1", 3, 12, "sha256-ab", expires=1250.5),
        (
            "b38a9afe4f9ee29544983f40950c1ae9b443e4c325575db38fd3b3152d82ad0b"
            "00000007"
            "97ad53657373696f6e5469636b6574a96e6578742d776f7264a3732d31030ca97368613235362d6162"
            "cb40938a0000000000"
        ),
    ),
    (
        UploadTicket("next-word", "s-1", 3, 12, "sha256-ab", 1250.5, 2, 20, upload_by=1370.5),
        (
            "507dda3a69148d393c225446828ea8e73c53a1829949132bb9ad7f4aba4fb814"
            "00000007"
            "9bac55706c6f61645469636b6574a96e6578742d776f7264a3732d31030ca97368613235362d6162"
            "cb40938a00000000000214cb40956a0000000000ff"
        ),
    ),
]
TICKETS = [ticket for ticket, _ in VECTORS]


@pytest.mark.parametrize(("ticket", "sealed"), VECTORS)
def test_a_published_vector_seals_and_opens(ticket: AnyTicket, sealed: str) -> None:
    assert KEYRING.seal(ticket).hex() == sealed
    kind: Any = type(ticket)
    assert KEYRING.open(bytes.fromhex(sealed), kind) == ticket


@pytest.mark.parametrize(("ticket", "sealed"), OLDER_VECTORS)
def test_a_ticket_of_an_earlier_version_still_opens(ticket: AnyTicket, sealed: str) -> None:
    kind: Any = type(ticket)
    assert KEYRING.open(bytes.fromhex(sealed), kind) == ticket


def test_a_pseudonym_is_half_a_mac_of_the_device_under_the_key_of_the_task() -> None:
    """HMAC-SHA256, test case 2 of RFC 4231."""
    found = pseudonym_of("what do ya want for nothing?", b"Jefe")
    assert found.hex() == "5bdcc146bf60754e6a042426089575c7"


@pytest.mark.parametrize(("device", "key"), [("", KEY), ("phone-7", b""), ("", b"")])
def test_who_is_not_identified_has_no_pseudonym(device: str, key: bytes) -> None:
    assert pseudonym_of(device, key) == b""


def test_there_are_vectors_for_every_kind_of_ticket() -> None:
    assert list(get_args(AnyTicket)) == [type(ticket) for ticket in TICKETS]


TEXT = st.text(max_size=20)
NUMBER = st.integers(0, 2**53)
TIME = st.floats(0, 1e12)


@settings(max_examples=50)
@given(
    st.builds(AssignmentTicket, TEXT, TEXT, NUMBER, TIME)
    | st.builds(SessionTicket, TEXT, TEXT, NUMBER, NUMBER, TEXT, TIME)
    | st.builds(UploadTicket, TEXT, TEXT, NUMBER, NUMBER, TEXT, TIME, NUMBER, NUMBER, TIME)
)
def test_a_ticket_opens_as_it_was_sealed(ticket: AnyTicket) -> None:
    sealed = KEYRING.seal(ticket)
    kind: Any = type(ticket)
    assert KEYRING.open(sealed, kind) == ticket
    assert claim_of(sealed) == ticket
    assert KEYRING.seal(ticket) == sealed


@pytest.mark.parametrize("ticket", TICKETS)
def test_the_newest_key_seals_and_the_older_ones_still_open(ticket: AnyTicket) -> None:
    """A key is rotated while sessions sealed under the old one are still training."""
    kind: Any = type(ticket)
    before = Keyring({7: KEY})
    during = Keyring({7: KEY, 8: bytes(32)})
    after = Keyring({8: bytes(32)})
    old, new = before.seal(ticket), during.seal(ticket)
    assert new == after.seal(ticket) != old
    assert during.open(old, kind) == during.open(new, kind) == after.open(new, kind) == ticket
    with pytest.raises(TicketError, match="sealed with an unknown key"):
        after.open(old, kind)
    with pytest.raises(TicketError, match="sealed with an unknown key"):
        before.open(new, kind)


def test_the_newest_key_is_that_of_the_highest_id_in_whatever_order() -> None:
    keys = {9: b"nine" * 8, 300: b"last" * 8, 12: b"twelve"}
    assert Keyring(keys).seal(TICKETS[0])[32:36] == (300).to_bytes(4, "big")


def test_a_keyring_does_not_change_under_the_hands_of_its_maker() -> None:
    keys = {7: KEY}
    keyring = Keyring(keys)
    keys[7] = bytes(32)
    assert keyring.seal(TICKETS[0]) == KEYRING.seal(TICKETS[0])


def test_claims_are_read_without_any_key() -> None:
    """Routing needs no secret: whether it is true is for the aggregator to judge."""
    unsealed = bytes(32) + KEYRING.seal(TICKETS[1])[32:]
    assert claim_of(unsealed) == TICKETS[1]
    with pytest.raises(TicketError):
        KEYRING.open(unsealed, SessionTicket)


def test_the_largest_ticket_that_we_make_fits_the_wire() -> None:
    largest = UploadTicket(
        64 * "t",
        64 * "s",
        2**53,
        2**53,
        80 * "b",
        1e12,
        2**31,
        2**31,
        upload_by=1e12,
        pseudonym=PHONE,
    )
    message = Heartbeat(KEYRING.seal(largest))
    assert wire.from_device.parse(wire.encode(message)) == message
