"""Tokens that were guessed, forged, stretched or stolen: none opens anything."""

from __future__ import annotations

import base64
import hashlib
import hmac
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.credentials.token_files import Secret
from papaya.server.auth import DAY_S, DeviceAuth, SharedToken, SignedTokens, admits, bearer

KEY = Secret("the-key-in-the-data-folder-0123456789")
SHARED = Secret("the-token-of-all-devices-0123456789")
NOW = 1_700_000_000.0
SIGNED = SignedTokens(KEY, lambda: NOW)
GOOD = SIGNED.make("phone-7", days=30).reveal()
_, DEVICE, EXPIRES, MAC = GOOD.split(".")
ALPHABET = string.ascii_letters + string.digits + "._~+/-="


def verdict(token: str) -> object:
    return DeviceAuth(SIGNED).verify_now(f"Bearer {token}")


def test_the_good_token_is_good() -> None:
    """Otherwise nothing below would say anything."""
    assert verdict(GOOD) == "phone-7"


@pytest.mark.parametrize(
    "token",
    [
        f"papaya1.phone-8.{EXPIRES}.{MAC}",
        f"papaya1.{DEVICE}.{int(EXPIRES) + 1}.{MAC}",
        f"papaya1.{DEVICE}.0{EXPIRES}.{MAC}",
        f"papaya2.{DEVICE}.{EXPIRES}.{MAC}",
        f"papaya1.{DEVICE}.{EXPIRES}.{MAC}=",
        f"papaya1.{DEVICE}.{EXPIRES}.{MAC[:-1]}",
        f"papaya1.{DEVICE}.{EXPIRES}.{'A' * 43}",
        f"papaya1.{DEVICE}.{EXPIRES}.",
        f"papaya1.{DEVICE}.{EXPIRES}",
        f"papaya1..{EXPIRES}.{MAC}",
        f"papaya1.{DEVICE}.-1.{MAC}",
        f"papaya1.{DEVICE}.{'9' * 400}.{MAC}",
        f"{GOOD}.{MAC}",
        f"papaya1.{GOOD}",
        GOOD.upper(),
        MAC,
    ],
)
def test_a_token_with_anything_changed_is_refused(token: str) -> None:
    assert verdict(token) is None


@given(st.integers(0, len(GOOD) - 1), st.sampled_from(ALPHABET))
def test_no_single_character_can_be_changed(place: int, character: str) -> None:
    changed = GOOD[:place] + character + GOOD[place + 1 :]
    assert verdict(changed) == ("phone-7" if changed == GOOD else None)


@pytest.mark.parametrize("key", [b"", b"guess", GOOD.encode(), b"phone-7"])
def test_a_token_signed_with_another_key_is_refused(key: bytes) -> None:
    signed = f"papaya1.{DEVICE}.{int(NOW + DAY_S)}"
    mac = hmac.new(key, signed.encode(), hashlib.sha256).digest()
    forged = f"{signed}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"
    assert verdict(forged) is None


def test_the_last_character_has_one_spelling() -> None:
    """The last of 43 base64 characters carries 4 bits: three others decode to the same bytes."""
    padded = MAC + "="
    spellings = [
        MAC[:-1] + last
        for last in string.ascii_letters + string.digits + "-_"
        if base64.urlsafe_b64decode(MAC[:-1] + last + "=") == base64.urlsafe_b64decode(padded)
    ]
    assert len(spellings) == 4
    accepted = [mac for mac in spellings if verdict(f"papaya1.{DEVICE}.{EXPIRES}.{mac}")]
    assert accepted == [MAC]


def test_an_expired_token_is_refused_though_its_seal_is_good() -> None:
    old = SignedTokens(KEY, lambda: NOW - 31 * DAY_S).make("phone-7", days=30).reveal()
    assert verdict(old) is None


def test_the_token_of_one_kind_opens_no_other_door() -> None:
    assert not admits(SHARED, f"Bearer {GOOD}")
    assert not admits(SHARED, f"Bearer {KEY.reveal()}")
    assert verdict(SHARED.reveal()) is None
    assert verdict(KEY.reveal()) is None


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        f"Bearer  {SHARED.reveal()}",
        f"Bearer {SHARED.reveal()} ",
        f"Bearer {SHARED.reveal()},",
        f"Bearer {SHARED.reveal()}\n",
        f"Bearer\t{SHARED.reveal()}",
        f" Bearer {SHARED.reveal()}",
        f"Basic {SHARED.reveal()}",
        f"Bearer {SHARED.reveal()}, Bearer {SHARED.reveal()}",
        f"Bearer {SHARED.reveal()}\x00",
        f"Bearer {SHARED.reveal()[:-1]}",
        f"Bearer {SHARED.reveal()}é",
        "Bearer " + "a" * 513,
        "Bearer " + "a" * 10_000_000,
        "Bearer " + "=" * 100,
        "Bearer \N{KELVIN SIGN}" + "a" * 30,
    ],
)
def test_a_header_that_is_not_exactly_the_token_is_refused(header: str) -> None:
    assert not admits(SHARED, header)
    assert DeviceAuth(SharedToken(SHARED)).verify_now(header) is None


@given(st.text(max_size=600) | st.text(alphabet=ALPHABET + " Bbear", max_size=600))
def test_whatever_stands_in_the_header_nothing_is_raised(header: str) -> None:
    for text in (header, f"Bearer {header}"):
        found = bearer(text)
        assert found is None or (16 <= len(found) <= 512 and found.isascii())
        assert DeviceAuth(SharedToken(SHARED)).verify_now(text) is None
        assert DeviceAuth(SIGNED).verify_now(text) is None
