"""Evidence that holds is believed, whatever made it, and checks come in their order."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.attestation.policy import AttestationError
from papaya.attestation.verify import (
    MAX_COLLATERAL_BYTES,
    MAX_QUOTE_BYTES,
    Evidence,
    report_data,
    verify_quote,
)
from papaya.tsa.tsa import report_data as trusted_report_data
from tests.unit.attestation.builders import (
    IDENTITY_KEY,
    MEASUREMENT,
    PARAMETERS_HASH,
    a_device,
    a_policy,
    software_evidence,
    the_record,
)
from tests.unit.verifiable_log.builders import NOW


def test_evidence_that_holds_is_believed(tmp_path: Path) -> None:
    verified = a_device(tmp_path).verify(software_evidence())
    assert verified.record == the_record()
    assert verified.quoted.registers == {"mrenclave": MEASUREMENT.hex()}
    assert verified.quoted.tcb_status == "UpToDate"
    assert (verified.identity_key, verified.parameters_hash) == (IDENTITY_KEY, PARAMETERS_HASH)
    assert verified.insecure


def test_both_sides_bind_the_same_bytes() -> None:
    bound = report_data(IDENTITY_KEY, PARAMETERS_HASH)
    assert bound == trusted_report_data(IDENTITY_KEY, PARAMETERS_HASH)
    assert len(bound) == 64


@pytest.mark.parametrize(("key", "digest"), [(b"k" * 31, b"h" * 33), (b"k" * 64, b"")])
def test_parts_of_other_lengths_are_not_bound(key: bytes, digest: bytes) -> None:
    """Else a byte could move from the hash into the key."""
    with pytest.raises(AttestationError, match="32 bytes each"):
        report_data(key, digest)


def test_the_first_failure_is_the_one_that_is_told(tmp_path: Path) -> None:
    """The order: quote, then measurement in the log, then parameters."""
    device = a_device(tmp_path, identity_key=b"x" * 32, leaf_index=0)
    reasons = []
    for evidence in (
        software_evidence(debug=True),
        software_evidence(),
        software_evidence(bytes.fromhex("ab" * 32)),
    ):
        with pytest.raises(AttestationError) as refused:
            device.verify(evidence)
        reasons.append(refused.value.reason)
    assert reasons == ["debug", "measurement", "report_data"]


def test_nothing_is_fetched_for_a_quote_that_does_not_hold(tmp_path: Path) -> None:
    device = a_device(tmp_path)
    with pytest.raises(AttestationError):
        device.verify(software_evidence(debug=True))
    assert device.reader.remembered is None


def test_quotes_are_malleable_and_what_they_say_is_not() -> None:
    """Other bytes, same meaning: nothing may be keyed on a quote's bytes or hash."""
    evidence = software_evidence()
    longer = Evidence("software", evidence.quote + b"\x00", evidence.collateral)
    found = verify_quote(longer, a_policy(), NOW)
    assert longer.quote != evidence.quote
    assert found == verify_quote(evidence, a_policy(), NOW)


@given(at=st.integers(0, 431), bit=st.integers(0, 7))
def test_a_changed_signed_part_is_refused(at: int, bit: int) -> None:
    evidence = software_evidence()
    quote = bytearray(evidence.quote)
    quote[at] ^= 1 << bit
    with pytest.raises(AttestationError):
        verify_quote(Evidence("software", bytes(quote), evidence.collateral), a_policy(), NOW)


@given(quote=st.binary(max_size=700), collateral=st.binary(max_size=300))
def test_arbitrary_bytes_are_refused_and_nothing_else_happens(
    quote: bytes, collateral: bytes
) -> None:
    good = software_evidence()
    for evidence in (
        Evidence("software", quote, good.collateral),
        Evidence("software", good.quote, collateral),
    ):
        with pytest.raises(AttestationError) as refused:
            verify_quote(evidence, a_policy(), NOW)
        assert refused.value.reason == "quote"


def test_what_is_too_long_is_not_parsed() -> None:
    good = software_evidence()
    for evidence in (
        Evidence("software", bytes(MAX_QUOTE_BYTES + 1), good.collateral),
        Evidence("software", good.quote, bytes(MAX_COLLATERAL_BYTES + 1)),
    ):
        with pytest.raises(AttestationError, match="too long"):
            verify_quote(evidence, a_policy(), NOW)


@pytest.mark.parametrize("now", [-1.0, 1e30, float(2**64)])
def test_a_clock_that_is_nonsense_refuses(now: float) -> None:
    with pytest.raises(AttestationError):
        verify_quote(software_evidence(), a_policy(), now)
