"""Records: one encoding per release, every register named, and nothing that drives a terminal."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.verifiable_log.errors import LogError
from papaya.verifiable_log.record import MAX_RECORD_BYTES, REGISTERS, Record
from tests.unit.verifiable_log.builders import ARTIFACT, a_record

TDX = {name: "ef" * size for name, size in REGISTERS["tdx"].items()}


def encoded(**changes: Any) -> bytes:
    fields = json.loads(a_record().encode()) | changes
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def test_a_record_comes_back() -> None:
    assert Record.decode(a_record().encode()) == a_record()
    assert encoded() == a_record().encode()


def test_a_record_is_canonical_json() -> None:
    assert a_record().encode().decode() == (
        f'{{"artifact":"{ARTIFACT}","format":"papaya-tsa-release/v1",'
        f'"measurements":{{"sgx":{{"mrenclave":"{"cd" * 32}"}},'
        f'"software":{{"mrenclave":"{ARTIFACT}"}}}},"recipe":"papaya tsa build",'
        f'"repository":"https://example.org/papaya","revision":"{"12" * 20}"}}'
    )


@pytest.mark.parametrize(
    "raw",
    [
        a_record().encode() + b"\n",
        a_record().encode().replace(b":", b": ", 1),
        a_record().encode().replace(b'"recipe"', b'"recip\\u0065"'),
        a_record().encode().replace(b"{", b'{"artifact":"x",', 1),
        json.dumps(json.loads(a_record().encode())).encode(),
    ],
)
def test_another_encoding_of_the_same_record_is_refused(raw: bytes) -> None:
    with pytest.raises(LogError, match="canonical"):
        Record.decode(raw)


@pytest.mark.parametrize(
    "changes",
    [
        {"artifact": "ab" * 31},
        {"artifact": "AB" * 32},
        {"artifact": 7},
        {"format": "papaya-tsa-release/v2"},
        {"more": "fields"},
        {"measurements": {}},
        {"measurements": []},
        {"measurements": {"sev": {"launch": "ab" * 48}}},
        {"measurements": {"sgx": {}}},
        {"measurements": {"sgx": "ab" * 32}},
        {"measurements": {"sgx": {"mrenclave": "ab" * 33}}},
        {"measurements": {"sgx": {"mrenclave": "cd" * 32, "mrsigner": "cd" * 32}}},
        {"measurements": {"tdx": {"mrtd": "ab" * 48}}},
        {"measurements": {"tdx": TDX | {"rtmr2": ""}}},
        {"measurements": {"software": {"mrenclave": "cd" * 32}}},
        {"revision": "main"},
        {"revision": "12" * 19},
        {"revision": None},
        {"repository": ""},
        {"repository": "x" * 1001},
        {"recipe": "two\nlines"},
        {"recipe": "\x1b[2J"},
        {"recipe": "\u202ebackwards"},
        {"recipe": ["a"]},
    ],
)
def test_records_that_say_too_little_or_too_much_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(LogError):
        Record.decode(encoded(**changes))


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"null", b"\xff", b"{", b"[" * 10_000, b" " * (MAX_RECORD_BYTES + 1)]
)
def test_what_is_not_a_record_is_refused(raw: bytes) -> None:
    with pytest.raises(LogError):
        Record.decode(raw)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_and_nothing_else_happens(raw: bytes) -> None:
    with pytest.raises(LogError):
        Record.decode(raw)


def test_a_measurement_is_compared_register_by_register() -> None:
    record = Record(ARTIFACT, {"tdx": TDX}, "https://example.org", "12" * 20, "build")
    record.check_measured("tdx", TDX)
    record.check_measured("tdx", TDX | {"mrseam": "not looked at"})
    for name in TDX:
        with pytest.raises(LogError, match=name):
            record.check_measured("tdx", TDX | {name: "00" * 48})
        with pytest.raises(LogError, match=name):
            record.check_measured("tdx", {other: TDX[other] for other in TDX if other != name})


def test_a_platform_that_the_record_does_not_name_is_not_vouched_for() -> None:
    with pytest.raises(LogError, match="no measurement for tdx"):
        a_record().check_measured("tdx", TDX)
