"""Signed notes: the published example, keys that survive writing, and every way to be malformed."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.verifiable_log.errors import LogError, SignatureError
from papaya.verifiable_log.note import (
    COSIGNATURE,
    MAX_NOTE_BYTES,
    MAX_SIGNATURES,
    SignerKey,
    VerifierKey,
    open_note,
    signed_note,
    split_note,
)
from tests.unit.verifiable_log.builders import KEY, NOW, WITNESSES

# The example of the Go package golang.org/x/mod/sumdb/note.
PUBLISHED_KEY = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
PUBLISHED_PRIVATE = "PRIVATE+KEY+PeterNeumann+c74f20a3+AYEKFALVFGyNhPJEMzD1QIDr+Y7hfZx09iUvxdXHKDFz"
PUBLISHED = """If you think cryptography is the answer to your problem,
then you don't know what your problem is.

— PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=
""".encode()  # noqa: E501
TEXT = "a text\nof two lines\n"


def a_note(*signers: SignerKey, text: str = TEXT) -> bytes:
    return signed_note(text, [signer.signature_line(text, NOW) for signer in signers])


def test_the_published_note_is_read_and_made() -> None:
    key = VerifierKey.parse(PUBLISHED_KEY)
    assert open_note(PUBLISHED, [key]).signed_by == (key,)
    signer = SignerKey.parse(PUBLISHED_PRIVATE)
    assert signer.verifier == key
    text, _ = split_note(PUBLISHED)
    assert signed_note(text, [signer.signature_line(text)]) == PUBLISHED


@pytest.mark.parametrize("key", [KEY, *WITNESSES])
def test_keys_survive_writing(key: SignerKey) -> None:
    assert SignerKey.parse(key.reveal()) == key
    assert VerifierKey.parse(str(key.verifier)) == key.verifier


def test_a_private_key_is_not_shown_by_accident() -> None:
    assert KEY.seed.hex() not in repr(KEY)
    assert str(KEY.seed) not in repr(KEY)


def test_cosignatures_carry_their_time() -> None:
    note = open_note(a_note(KEY, WITNESSES[0]), [KEY.verifier, WITNESSES[0].verifier])
    assert note.text == TEXT
    assert dict(zip(note.signed_by, note.times, strict=True)) == {
        KEY.verifier: None,
        WITNESSES[0].verifier: NOW,
    }


def test_a_cosignature_is_over_header_time_and_text() -> None:
    """C2SP tlog-cosignature: "cosignature/v1", "time …", then the whole note body."""
    line = WITNESSES[0].signature_line(TEXT, NOW)
    signature = base64.b64decode(line.split()[-1])
    assert signature[:4] == WITNESSES[0].verifier.key_id
    assert int.from_bytes(signature[4:12]) == NOW
    plain = SignerKey(WITNESSES[0].name, WITNESSES[0].seed)
    plain_line = plain.signature_line(f"cosignature/v1\ntime {NOW}\n{TEXT}")
    assert base64.b64decode(plain_line.split()[-1])[4:] == signature[12:]


def test_signatures_of_unknown_keys_are_ignored() -> None:
    assert open_note(a_note(WITNESSES[0], KEY), [KEY.verifier]).signed_by == (KEY.verifier,)


def test_a_note_that_no_known_key_signed_is_refused() -> None:
    with pytest.raises(SignatureError, match="no known key"):
        open_note(a_note(WITNESSES[0]), [KEY.verifier])


def test_one_wrong_signature_of_a_known_key_refuses_the_note() -> None:
    text, lines = split_note(a_note(KEY, WITNESSES[0]))
    other = WITNESSES[0].signature_line("another text\n", NOW)
    with pytest.raises(SignatureError, match="is wrong"):
        open_note(signed_note(text, [lines[0], other]), [KEY.verifier, WITNESSES[0].verifier])


def test_a_key_of_the_same_name_is_another_key() -> None:
    impostor = SignerKey(KEY.name, bytes(32))
    with pytest.raises(SignatureError, match="no known key"):
        open_note(a_note(impostor), [KEY.verifier])


@given(at=st.integers(0, len(a_note(KEY)) - 1), byte=st.integers(0, 255))
def test_a_changed_note_is_never_accepted(at: int, byte: int) -> None:
    raw = bytearray(a_note(KEY))
    if raw[at] == byte:
        return
    raw[at] = byte
    with pytest.raises(LogError):
        open_note(bytes(raw), [KEY.verifier])


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused_and_nothing_else_happens(raw: bytes) -> None:
    with pytest.raises(LogError):
        open_note(raw, [KEY.verifier])


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "text, an empty line and signatures"),
        (b"no signatures\n\n", "text, an empty line and signatures"),
        (b"no end\n\n\xe2\x80\x94 x AAAAAAAA", "text, an empty line and signatures"),
        (b"\xff\n\n", "UTF-8"),
        (b"a\tb\n\n\xe2\x80\x94 x AAAAAAAA\n", "control characters"),
        (b"a\r\n\n\xe2\x80\x94 x AAAAAAAA\n", "control characters"),
        (b"a\n\n- x AAAAAAAA\n", "malformed signature line"),
        (b"a\n\n\xe2\x80\x94 x y AAAAAAAA\n", "malformed signature line"),
        (b"a\n\n\xe2\x80\x94  AAAAAAAA\n", "must not contain spaces or plus"),
        (b"a\n\n\xe2\x80\x94 x+y AAAAAAAA\n", "must not contain spaces or plus"),
        (b"a\n\n\xe2\x80\x94 x AAAA\n", "too short"),
        (b"a\n\n\xe2\x80\x94 x AAAAAAA\n", "not base64"),
        (b"a\n\n\xe2\x80\x94 x AAAAAAB=\n", "not canonical base64"),
        (b"a" * (MAX_NOTE_BYTES + 1), "longer than"),
        (b"a\n\n" + b"\xe2\x80\x94 x AAAAAAAA\n" * (MAX_SIGNATURES + 1), "above the limit"),
    ],
)
def test_malformed_notes_are_refused(raw: bytes, problem: str) -> None:
    with pytest.raises(LogError, match=problem):
        open_note(raw, [KEY.verifier])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "name",
        "name+00000000",
        "name+00000000+AAAA",
        str(KEY.verifier).replace("example", "exbmple"),
        str(KEY.verifier).replace("+", " "),
        "na me+" + str(KEY.verifier).split("+", 1)[1],
    ],
)
def test_malformed_keys_are_refused(text: str) -> None:
    with pytest.raises(LogError):
        VerifierKey.parse(text)
    with pytest.raises(LogError):
        SignerKey.parse(text)
    with pytest.raises(LogError):
        SignerKey.parse(f"PRIVATE+KEY+{text}")


def test_other_kinds_of_keys_are_refused() -> None:
    with pytest.raises(LogError, match="not an Ed25519 key"):
        VerifierKey("x", bytes(32), 0x02)
    with pytest.raises(LogError, match="32 bytes"):
        SignerKey("x", bytes(31))


def test_a_cosignature_without_a_time_is_not_made() -> None:
    with pytest.raises(LogError, match="needs a time"):
        WITNESSES[0].signature_line(TEXT)


def test_a_cosignature_from_beyond_time_is_refused() -> None:
    key = VerifierKey("witness", WITNESSES[0].verifier.public_key, COSIGNATURE)
    with pytest.raises(SignatureError, match="invalid time"):
        key.verify(TEXT, b"\xff" * 72)
