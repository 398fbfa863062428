"""Evidence of the platform that the TSA runs on: a quote over 64 bytes of report data.

    "the Intel SGX enclave, playing the role of the TSA, generates an attestation quote
    [...] It consists of the DH key exchange request, the hash of running TSA binary, and the
    hash of public parameters" (paper, "Deployment with Intel SGX")

The report data is the TSA's identity key, then the hash of the public parameters.
`Gramine` asks the library OS of an SGX enclave, `Tdx` the kernel of a TDX guest (configfs-tsm,
Linux 6.7 or newer). Collateral is the server's business: it is the vendor's, public and signed.
Refused: a quote that does not carry the report data that was asked for, and a platform other than
the one meant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

REPORT_DATA_BYTES = 64

_GRAMINE = "dev/attestation"
_TSM = "sys/kernel/config/tsm/report/papaya-tsa"
_TDX_PROVIDER = "tdx_guest"


class EvidenceError(Exception):
    """The platform gives no quote, or not the one that was asked for."""


class Platform(Protocol):
    """What vouches for the TSA; `name` tells a device how to verify its quotes."""

    @property
    def name(self) -> str: ...

    def quote(self, report_data: bytes) -> bytes: ...


class Gramine:
    """SGX under Gramine, whose manifest says `sgx.remote_attestation = "dcap"`."""

    name = "sgx"

    def __init__(self, root: Path = Path("/")) -> None:
        self._folder = root / _GRAMINE

    def quote(self, report_data: bytes) -> bytes:
        _check_length(report_data)
        try:
            kind = (self._folder / "attestation_type").read_text().strip()
            if kind != "dcap":
                raise EvidenceError(f"Gramine attests by {kind!r}, not by dcap")
            (self._folder / "user_report_data").write_bytes(report_data)
            quote = (self._folder / "quote").read_bytes()
        except OSError as error:
            raise EvidenceError(f"not in an SGX enclave of Gramine: {error}") from error
        return _checked(quote, report_data)


class Tdx:
    """A TDX guest. The kernel counts writes, so that another process's request is noticed."""

    name = "tdx"

    def __init__(self, root: Path = Path("/")) -> None:
        self._folder = root / _TSM

    def quote(self, report_data: bytes) -> bytes:
        _check_length(report_data)
        try:
            self._folder.mkdir(exist_ok=True)
            provider = (self._folder / "provider").read_text().strip()
            if provider != _TDX_PROVIDER:
                raise EvidenceError(f"reports come from {provider!r}, not from {_TDX_PROVIDER}")
            (self._folder / "inblob").write_bytes(report_data)
            generation = (self._folder / "generation").read_text()
            quote = (self._folder / "outblob").read_bytes()
            if (self._folder / "generation").read_text() != generation:
                raise EvidenceError("another process asked for a report at the same time")
        except OSError as error:
            raise EvidenceError(f"not in a TDX guest with configfs-tsm: {error}") from error
        return _checked(quote, report_data)


def _check_length(report_data: bytes) -> None:
    if len(report_data) != REPORT_DATA_BYTES:
        raise EvidenceError(f"report data has {REPORT_DATA_BYTES} bytes, not {len(report_data)}")


def _checked(quote: bytes, report_data: bytes) -> bytes:
    if report_data not in quote:
        raise EvidenceError("the quote does not carry the report data that was asked for")
    return quote
