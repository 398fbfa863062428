"""Test vectors of the evidence for a TSA: software quotes and their collateral."""

from __future__ import annotations

import json
from collections.abc import Iterator

from papaya.attestation.policy import DevicePolicy
from papaya.attestation.software import make_collateral, make_quote
from papaya.attestation.verify import Evidence, report_data, verify_quote, verify_report_data
from papaya.conformance.vectors.cases import (
    IDENTITY_KEY,
    LOG_KEY,
    MEASUREMENT,
    NOW,
    PUBLIC,
    Case,
    VectorFormat,
    case_of,
    flipped,
)


def _evidence() -> Iterator[Case]:
    digest = PUBLIC.digest()
    bound = report_data(IDENTITY_KEY, digest)
    quote, collateral = make_quote(MEASUREMENT, bound), make_collateral(NOW)
    known = {
        "platform": "software",
        "quote": quote.hex(),
        "collateral": collateral.decode(),
        "identity": IDENTITY_KEY.hex(),
        "parameters_sha256": digest.hex(),
        "now": NOW,
    }
    yield case_of("valid", "software evidence", **known, mrenclave=MEASUREMENT.hex())
    debug = make_quote(MEASUREMENT, bound, debug=True)
    other = make_quote(MEASUREMENT, report_data(IDENTITY_KEY, bytes(32)))
    old_tcb = make_collateral(NOW, tcb_status="OutOfDate").decode()
    for name, change in (
        ("another version", {"quote": flipped(quote, 0).hex()}),
        ("a changed measurement", {"quote": flipped(quote, 120).hex()}),
        ("changed report data", {"quote": flipped(quote, 370).hex()}),
        ("a changed signature", {"quote": flipped(quote, 440).hex()}),
        ("a changed attestation key", {"quote": flipped(quote, 510).hex()}),
        ("a changed report of the quoting enclave", {"quote": flipped(quote, 570).hex()}),
        ("a changed certificate", {"quote": flipped(quote, 1500).hex()}),
        ("cut short", {"quote": quote[:1000].hex()}),
        ("empty", {"quote": ""}),
        ("a debug enclave", {"quote": debug.hex()}),
        ("of other parameters", {"quote": other.hex()}),
        ("another identity", {"identity": flipped(IDENTITY_KEY, 1).hex()}),
        ("collateral that has expired", {"now": NOW + 400 * 86400}),
        ("a revoked processor", {"collateral": make_collateral(NOW, revoked=True).decode()}),
        ("an old TCB", {"collateral": old_tcb}),
        ("collateral that is not JSON", {"collateral": collateral.decode()[:-1]}),
        ("collateral of another signer", {"collateral": _other_signature(collateral)}),
        ("software evidence that claims to be SGX", {"platform": "sgx"}),
        ("an unknown platform", {"platform": "paper"}),
    ):
        yield case_of("invalid", name, **{**known, **change})


def _other_signature(collateral: bytes) -> str:
    fields = json.loads(collateral)
    first = fields["tcb_info_signature"]
    fields["tcb_info_signature"] = ("1" if first[0] == "0" else "0") + first[1:]
    return json.dumps(fields)


def _check_evidence(case: Case) -> object:
    policy = DevicePolicy(
        log_key=str(LOG_KEY.verifier),
        platforms=("sgx", "software"),
        allow_insecure_software=True,
        allow_smt=True,
    )
    quote, collateral = bytes.fromhex(case["quote"]), case["collateral"].encode()
    quoted = verify_quote(Evidence(case["platform"], quote, collateral), policy, case["now"])
    digest = bytes.fromhex(case["parameters_sha256"])
    verify_report_data(quoted, bytes.fromhex(case["identity"]), digest)
    return {"mrenclave": quoted.registers["mrenclave"]}


FORMATS: dict[str, VectorFormat] = {"evidence": (_evidence, _check_evidence)}
