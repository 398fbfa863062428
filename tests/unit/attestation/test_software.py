"""The software platform: Intel's format, a root that says INSECURE, the same bytes every time."""

from __future__ import annotations

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from papaya.attestation.software import (
    SoftwarePlatform,
    make_collateral,
    make_quote,
    root_certificate,
)
from tests.unit.attestation.builders import MEASUREMENT
from tests.unit.verifiable_log.builders import NOW


def test_every_certificate_is_named_insecure() -> None:
    quote = make_quote(MEASUREMENT, bytes(64))
    chain = quote[quote.index(b"-----BEGIN") :]
    names = [c.subject.rfc4514_string() for c in x509.load_pem_x509_certificates(chain)]
    assert names == [
        "CN=Papaya INSECURE software pck",
        "CN=Papaya INSECURE software pck authority",
        "CN=Papaya INSECURE software root",
    ]


def test_the_root_is_the_same_everywhere() -> None:
    """Devices have it in their code; a change here would be noticed by nobody else."""
    assert (
        root_certificate().fingerprint(SHA256()).hex()
        == "cb7c74a1e8cd969dfbc17e83b9e6f9b4811f9864a4d220846cee2c26a288c35a"
    )


def test_quotes_and_collateral_are_the_same_bytes_every_time() -> None:
    platform = SoftwarePlatform(MEASUREMENT)
    assert platform.quote(bytes(64)) == platform.quote(bytes(64))
    assert platform.collateral(NOW) == make_collateral(NOW)
    assert len(platform.quote(bytes(64))) < 5_000


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_measurement_has_its_length(size: int) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        SoftwarePlatform(bytes(size))


@pytest.mark.parametrize("size", [0, 63, 65])
def test_report_data_has_its_length(size: int) -> None:
    with pytest.raises(ValueError, match="64 bytes"):
        SoftwarePlatform(MEASUREMENT).quote(bytes(size))
