"""Evidence from fake device files: the right bytes in, the right quote out, or an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from papaya.tsa.evidence import EvidenceError, Gramine, Platform, Tdx

REPORT_DATA = bytes(range(64))
QUOTE = b"header" + REPORT_DATA + b"signature"


@pytest.fixture
def gramine(tmp_path: Path) -> Path:
    folder = tmp_path / "dev/attestation"
    folder.mkdir(parents=True)
    (folder / "attestation_type").write_text("dcap")
    (folder / "user_report_data").write_bytes(bytes(64))
    (folder / "quote").write_bytes(QUOTE)
    return folder


@pytest.fixture
def tsm(tmp_path: Path) -> Path:
    folder = tmp_path / "sys/kernel/config/tsm/report/papaya-tsa"
    folder.mkdir(parents=True)
    (folder / "provider").write_text("tdx_guest\n")
    (folder / "generation").write_text("3\n")
    (folder / "inblob").write_bytes(b"")
    (folder / "outblob").write_bytes(QUOTE)
    return folder


def test_gramine_quotes_the_report_data(tmp_path: Path, gramine: Path) -> None:
    platform: Platform = Gramine(tmp_path)
    assert platform.name == "sgx"
    assert platform.quote(REPORT_DATA) == QUOTE
    assert (gramine / "user_report_data").read_bytes() == REPORT_DATA


def test_a_tdx_guest_quotes_the_report_data(tmp_path: Path, tsm: Path) -> None:
    platform: Platform = Tdx(tmp_path)
    assert platform.name == "tdx"
    assert platform.quote(REPORT_DATA) == QUOTE
    assert (tsm / "inblob").read_bytes() == REPORT_DATA


def test_a_quote_over_something_else_is_not_passed_on(
    tmp_path: Path, gramine: Path, tsm: Path
) -> None:
    for platform in (Gramine(tmp_path), Tdx(tmp_path)):
        with pytest.raises(EvidenceError, match="does not carry the report data"):
            platform.quote(bytes(64)[:-1] + b"x")


def test_another_kind_of_attestation_is_not_taken_for_dcap(tmp_path: Path, gramine: Path) -> None:
    (gramine / "attestation_type").write_text("epid")
    with pytest.raises(EvidenceError, match="'epid', not by dcap"):
        Gramine(tmp_path).quote(REPORT_DATA)


def test_another_confidential_guest_is_not_taken_for_tdx(tmp_path: Path, tsm: Path) -> None:
    (tsm / "provider").write_text("sev_guest")
    with pytest.raises(EvidenceError, match="'sev_guest', not from tdx_guest"):
        Tdx(tmp_path).quote(REPORT_DATA)


def test_outside_of_an_enclave_there_is_no_evidence(tmp_path: Path) -> None:
    for platform in (Gramine(tmp_path), Tdx(tmp_path)):
        with pytest.raises(EvidenceError, match="not in a"):
            platform.quote(REPORT_DATA)


@pytest.mark.parametrize("size", [0, 63, 65])
def test_report_data_has_its_length(tmp_path: Path, gramine: Path, tsm: Path, size: int) -> None:
    for platform in (Gramine(tmp_path), Tdx(tmp_path)):
        with pytest.raises(EvidenceError, match="64 bytes"):
            platform.quote(bytes(size))
