"""The channel opens for the one offer that a seed was sealed for, and for nothing else."""

from __future__ import annotations

import pytest

from papaya.secagg import channel
from papaya.secagg.channel import SEALED_BYTES
from papaya.secagg.errors import ChannelError, OfferRefused
from papaya.secagg.offer import OFFER_BYTES, Offer, context
from tests.unit.secagg.builders import NOW, Deployment, entropy, with_byte_changed

DRAW = entropy("channel")
TRUSTED, DEVICE, SEED = DRAW(32), DRAW(32), DRAW(16)
OFFERED = channel.public_key(TRUSTED)
CONTEXT = context(bytes(32), 3, OFFERED, 99)
SEALED = channel.seal(SEED, DEVICE, OFFERED, CONTEXT)

PRIME = 2**255 - 19
# The points of small order, in every spelling (RFC 7748, section 6.1; Curve25519's own page).
ORDER_EIGHT = (
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
)
LOW_ORDER = [0, 1, *ORDER_EIGHT, PRIME - 1]
NOT_CANONICAL = [PRIME, PRIME + 1, PRIME + 5, 2**255 - 1, 2**255 + 9, 2**256 - 1]


def point(coordinate: int) -> bytes:
    return coordinate.to_bytes(32, "little")


def reason_of(sealed: bytes, bound_to: bytes = CONTEXT) -> str:
    with pytest.raises(ChannelError) as caught:
        channel.unseal(sealed, TRUSTED, bound_to)
    return caught.value.reason


def test_a_seed_arrives() -> None:
    assert channel.unseal(SEALED, TRUSTED, CONTEXT) == (SEED, b"")
    assert len(SEALED) == SEALED_BYTES == 64


def test_every_changed_byte_is_noticed() -> None:
    for position in range(SEALED_BYTES):
        for bit in range(8):
            changed = with_byte_changed(SEALED, position, 1 << bit)
            assert reason_of(changed) in {"tampered", "point"}


@pytest.mark.parametrize("size", [0, 32, 63, 65, 1000])
def test_a_sealed_seed_of_another_length(size: int) -> None:
    assert reason_of((SEALED * 20)[:size]) == "length"


@pytest.mark.parametrize("coordinate", LOW_ORDER)
def test_a_point_of_low_order_is_refused_by_both_sides(coordinate: int) -> None:
    assert reason_of(point(coordinate) + SEALED[32:]) == "low_order"
    with pytest.raises(ChannelError):
        channel.seal(SEED, DEVICE, point(coordinate), CONTEXT)


@pytest.mark.parametrize("coordinate", NOT_CANONICAL)
def test_a_point_with_a_second_spelling_is_refused(coordinate: int) -> None:
    assert reason_of(point(coordinate) + SEALED[32:]) == "point"
    with pytest.raises(ChannelError):
        channel.seal(SEED, DEVICE, point(coordinate), CONTEXT)


def test_a_seal_is_bound_to_every_field_of_its_offer() -> None:
    other_hash = context(bytes(31) + b"1", 3, OFFERED, 99)
    other_index = context(bytes(32), 4, OFFERED, 99)
    other_expiry = context(bytes(32), 3, OFFERED, 100)
    other_key = context(bytes(32), 3, channel.public_key(DEVICE), 99)
    for changed in (other_hash, other_index, other_expiry, other_key, CONTEXT + b"\0"):
        assert reason_of(SEALED, changed) == "tampered"


def test_another_tsa_cannot_open_it() -> None:
    with pytest.raises(ChannelError):
        channel.unseal(SEALED, DRAW(32), CONTEXT)


def test_neither_side_takes_a_seed_or_key_of_another_length() -> None:
    with pytest.raises(ChannelError):
        channel.seal(SEED + b"1", DEVICE, OFFERED, CONTEXT)
    with pytest.raises(ChannelError):
        channel.seal(SEED, DEVICE, OFFERED[:31], CONTEXT)


def test_an_offer_survives_its_encoding_and_nothing_else_does() -> None:
    offer = Deployment().offer()
    assert Offer.decode(offer.encode()) == offer
    for size in (0, OFFER_BYTES - 1, OFFER_BYTES + 1):
        with pytest.raises(ChannelError):
            Offer.decode((offer.encode() * 2)[:size])


def test_every_changed_byte_of_an_offer_is_refused() -> None:
    deployment = Deployment()
    data = deployment.offer().encode()
    key = deployment.tsa.identity_public_key
    Offer.decode(data).verify(key, deployment.hash, NOW)
    for position in range(len(data)):
        with pytest.raises(OfferRefused) as caught:
            Offer.decode(with_byte_changed(data, position)).verify(key, deployment.hash, NOW)
        assert caught.value.reason == "signature"


def test_an_offer_ends_at_its_expiry() -> None:
    deployment = Deployment()
    offer = deployment.offer()
    key = deployment.tsa.identity_public_key
    offer.verify(key, deployment.hash, offer.expires - 0.001)
    with pytest.raises(OfferRefused) as caught:
        offer.verify(key, deployment.hash, float(offer.expires))
    assert caught.value.reason == "expired"


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(32), b"\xff" * 32])
def test_an_identity_that_is_no_key_vouches_for_nothing(key: bytes) -> None:
    deployment = Deployment()
    with pytest.raises(OfferRefused):
        deployment.offer().verify(key, deployment.hash, NOW)
