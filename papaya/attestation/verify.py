"""The device's checks of a TSA, in order, before it masks anything.

    "upon receiving an attestation quote [...] the client verifies the quote to ensure: the hash of
    the running TSA binary is the same as the one published with the open sourced code; the hash
    of the public parameters provided by the server matches the hash included in the attestation
    quote. The client aborts if any of these conditions cannot be verified." (paper)

1. the quote: vendor's root, certificates, revocation lists, TCB by the device's policy, no debug;
2. the measurement: it is that of a record in the log, which is read where auditors read it;
3. the report data: exactly this identity key and the hash of exactly these parameters.

The device's policy on the parameters and the signature of the offer follow in `papaya/secagg`. All
times are by the device's own clock. Quotes are malleable outside the part that is signed, so
nothing here, and nothing anywhere else, may be keyed on the bytes or the hash of a quote: what
counts is `Verified`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import dcap_qvl  # type: ignore[import-untyped]
import msgspec
from cryptography.hazmat.primitives import serialization

from papaya.attestation.errors import AttestationError, AttestationReason
from papaya.attestation.policy import PLATFORMS, DevicePolicy, PlatformName
from papaya.attestation.software import root_certificate
from papaya.verifiable_log.errors import LogError
from papaya.verifiable_log.reader import LogReader
from papaya.verifiable_log.record import Record

MAX_QUOTE_BYTES = 16 * 1024
MAX_COLLATERAL_BYTES = 256 * 1024
KEY_BYTES = HASH_BYTES = 32

_SGX, _TDX = 0, 0x81
_TEE_TYPES: Mapping[PlatformName, int] = {"sgx": _SGX, "software": _SGX, "tdx": _TDX}
_DEBUG_BITS: Mapping[PlatformName, int] = {"sgx": 0x02, "software": 0x02, "tdx": 0x01}
_TD_REGISTERS = {f"rtmr{i}": f"rt_mr{i}" for i in range(4)} | {"mrtd": "mr_td"}


@dataclass(frozen=True)
class Evidence:
    """What a TSA shows: a quote, and the vendor's collateral that the server relays."""

    platform: PlatformName
    quote: bytes
    collateral: bytes


@dataclass(frozen=True)
class Quoted:
    """What a quote says and the vendor's signatures vouch for."""

    platform: PlatformName
    registers: Mapping[str, str]
    report_data: bytes
    tcb_status: str
    advisories: tuple[str, ...]


@dataclass(frozen=True)
class Verified:
    """A TSA that passed all checks: this key speaks for this binary and parameters."""

    quoted: Quoted
    record: Record
    leaf_index: int
    identity_key: bytes
    parameters_hash: bytes

    @property
    def insecure(self) -> bool:
        """True for evidence that proves nothing. Whoever shows anything about it says so."""
        return self.quoted.platform == "software"


def report_data(identity_key: bytes, parameters_hash: bytes) -> bytes:
    """The 64 bytes that a quote binds: the identity key, then the hash of the parameters."""
    if len(identity_key) != KEY_BYTES or len(parameters_hash) != HASH_BYTES:
        raise AttestationError("report_data", "invalid key or hash: expected 32 bytes each")
    return identity_key + parameters_hash


def verify_evidence(
    evidence: Evidence,
    *,
    identity_key: bytes,
    parameters_hash: bytes,
    leaf_index: int,
    policy: DevicePolicy,
    reader: LogReader,
    now: float,
) -> Verified:
    """All checks in order; the first that fails raises. `reader` remembers the log's checkpoint."""
    quoted = verify_quote(evidence, policy, now)
    record = verify_logged(quoted, leaf_index, policy, reader, now)
    verify_report_data(quoted, identity_key, parameters_hash)
    return Verified(quoted, record, leaf_index, identity_key, parameters_hash)


def verify_quote(evidence: Evidence, policy: DevicePolicy, now: float) -> Quoted:
    """The vendor vouches for this quote, and the platform is as good as the policy demands."""
    platform = evidence.platform
    if platform not in PLATFORMS or not policy.accepts(platform):
        hint = None
        if platform == "software":
            hint = (
                "software evidence proves nothing; to accept it, set "
                'allow_insecure_software = true and add "software" to platforms'
            )
        message = f"this device does not accept {platform[:20]!r} evidence"
        raise AttestationError("platform", message, hint=hint)
    if len(evidence.quote) > MAX_QUOTE_BYTES or len(evidence.collateral) > MAX_COLLATERAL_BYTES:
        raise AttestationError("quote", "the quote or its collateral is too long")
    root = _insecure_root() if platform == "software" else None
    try:
        collateral = dcap_qvl.QuoteCollateralV3.from_json(evidence.collateral.decode())
        claims = dcap_qvl.QuoteVerifier(root).verify_with_policy(
            evidence.quote, collateral, int(now), _quote_policy(policy, int(now))
        )
    except (ValueError, OverflowError) as error:
        reason: AttestationReason = "debug" if "Debug mode" in str(error) else "quote"
        raise AttestationError(reason, f"the {platform} quote is refused: {error}") from error
    return _quoted(platform, msgspec.json.decode(claims.to_json()))


def verify_logged(
    quoted: Quoted, leaf_index: int, policy: DevicePolicy, reader: LogReader, now: float
) -> Record:
    """The binary that was measured is the one of record `leaf_index` of the public log."""
    try:
        reader.refresh(now)
        record = Record.decode(reader.entry(leaf_index))
    except LogError as error:
        raise AttestationError("log", f"the log cannot be verified: {error}") from error
    if leaf_index < policy.oldest_record:
        message = f"record {leaf_index} is older than {policy.oldest_record}, the oldest allowed"
        raise AttestationError("measurement", message)
    try:
        record.check_measured(quoted.platform, quoted.registers)
    except LogError as error:
        message = f"the quote is not of the binary in record {leaf_index}: {error}"
        raise AttestationError("measurement", message) from error
    return record


def verify_report_data(quoted: Quoted, identity_key: bytes, parameters_hash: bytes) -> None:
    """The quote binds this key and these parameters, so no server can exchange either."""
    expected = report_data(identity_key, parameters_hash)
    if quoted.report_data[:KEY_BYTES] != expected[:KEY_BYTES]:
        raise AttestationError("report_data", "the quote is for another identity key")
    if quoted.report_data[KEY_BYTES:] != expected[KEY_BYTES:]:
        raise AttestationError("report_data", "the quote is for other public parameters")


def _quote_policy(policy: DevicePolicy, now: int) -> dcap_qvl.QuotePolicy:
    strict = dcap_qvl.QuotePolicy.strict(now)
    for status in policy.tcb_statuses:
        strict = strict.allow_status(status)
    strict = strict.reject_advisories(list(policy.rejected_advisories))
    if policy.minimum_tcb_evaluation is not None:
        strict = strict.min_tcb_eval_data_number(policy.minimum_tcb_evaluation)
    strict = strict.allow_dynamic_platform(policy.allow_dynamic_platform)
    strict = strict.allow_cached_keys(policy.allow_cached_keys)
    return strict.allow_smt(policy.allow_smt)


def _quoted(platform: PlatformName, claims: dict[str, Any]) -> Quoted:
    if claims["tee_type"] != _TEE_TYPES[platform]:
        raise AttestationError("platform", f"this is not a quote of {platform}")
    [report] = claims["report"].values()
    while "base" in report:  # later versions of a TD report wrap the earlier ones
        report = report["base"]
    attributes = bytes.fromhex(report["td_attributes" if platform == "tdx" else "attributes"])
    if attributes[0] & _DEBUG_BITS[platform]:
        raise AttestationError("debug", "the host can read this enclave: it runs in debug mode")
    if platform == "tdx":
        registers = {name: str(report[field]) for name, field in _TD_REGISTERS.items()}
    else:
        registers = {"mrenclave": str(report["mr_enclave"])}
    return Quoted(
        platform,
        registers,
        bytes.fromhex(report["report_data"]),
        str(claims["tcb"]["status"]),
        tuple(claims["tcb"]["advisory_ids"]),
    )


@cache
def _insecure_root() -> bytes:
    return root_certificate().public_bytes(serialization.Encoding.DER)
