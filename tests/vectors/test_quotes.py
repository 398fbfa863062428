"""Real quotes of Intel hardware, with Intel's own collateral, through the device's code."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from papaya.attestation.policy import AttestationError, PlatformName
from papaya.attestation.verify import Evidence, verify_quote
from tests.unit.attestation.builders import a_policy, software_evidence
from tests.vectors.public import public

NOW = 1_750_338_000  # 2025-06-19T13:00Z
DAY = 86_400
SGX_STATUS = "ConfigurationAndSWHardeningNeeded"
ANY_MACHINE = {"allow_dynamic_platform": True, "allow_cached_keys": True, "allow_smt": True}


def real(platform: PlatformName) -> Evidence:
    return Evidence(
        platform,
        public(f"attestation/{platform}_quote").read_bytes(),
        public(f"attestation/{platform}_quote_collateral.json").read_bytes(),
    )


def refusal(evidence: Evidence, *, now: float = NOW, **policy: Any) -> str:
    with pytest.raises(AttestationError) as refused:
        verify_quote(evidence, a_policy(**policy), now)
    return str(refused.value)


def test_a_strict_device_refuses_the_sgx_quote_for_its_tcb_status() -> None:
    assert SGX_STATUS in refusal(real("sgx"))


def test_an_owner_can_accept_that_status() -> None:
    quoted = verify_quote(real("sgx"), a_policy(tcb_statuses=("UpToDate", SGX_STATUS)), NOW)
    assert quoted.report_data == b"Hello, world!".ljust(64, b"\x00")
    assert quoted.registers["mrenclave"].startswith("33d8736d")
    assert quoted.tcb_status == SGX_STATUS
    assert quoted.advisories == ("INTEL-SA-00289", "INTEL-SA-00615")


def test_an_owner_can_still_refuse_an_advisory() -> None:
    policy: dict[str, Any] = {
        "tcb_statuses": (SGX_STATUS,),
        "rejected_advisories": ("INTEL-SA-00615",),
    }
    assert "INTEL-SA-00615" in refusal(real("sgx"), **policy)


def test_the_tdx_quote_is_up_to_date_on_a_machine_that_the_owner_accepts() -> None:
    quoted = verify_quote(real("tdx"), a_policy(**ANY_MACHINE), NOW)
    assert quoted.tcb_status == "UpToDate"
    assert quoted.registers["mrtd"].startswith("91eb2b44")
    assert quoted.registers["rtmr3"] == "00" * 48
    assert quoted.registers.keys() == {"mrtd", "rtmr0", "rtmr1", "rtmr2", "rtmr3"}


@pytest.mark.parametrize("missing", sorted(ANY_MACHINE))
def test_each_property_of_the_machine_is_the_owners_choice(missing: str) -> None:
    assert "not allowed by policy" in refusal(real("tdx"), **(ANY_MACHINE | {missing: False}))


def test_old_evaluations_can_be_refused() -> None:
    verify_quote(real("tdx"), a_policy(**ANY_MACHINE, minimum_tcb_evaluation=17), NOW)
    assert "17" in refusal(real("tdx"), **ANY_MACHINE, minimum_tcb_evaluation=18)


@pytest.mark.parametrize(("platform", "now"), [("sgx", NOW - DAY), ("tdx", NOW + 40 * DAY)])
def test_collateral_counts_only_while_it_is_valid(platform: PlatformName, now: float) -> None:
    refusal(real(platform), now=now, **ANY_MACHINE, tcb_statuses=("UpToDate", SGX_STATUS))


def test_a_quote_is_not_taken_for_another_platforms() -> None:
    tdx, policy = real("tdx"), a_policy(**ANY_MACHINE)
    with pytest.raises(AttestationError) as refused:
        verify_quote(Evidence("sgx", tdx.quote, tdx.collateral), policy, NOW)
    assert refused.value.reason == "platform"


def test_hardware_quotes_are_not_under_the_insecure_root() -> None:
    tdx = real("tdx")
    refusal(Evidence("software", tdx.quote, tdx.collateral), **ANY_MACHINE)


def test_collateral_of_another_platform_is_refused() -> None:
    refusal(Evidence("tdx", real("tdx").quote, real("sgx").collateral), **ANY_MACHINE)


def test_an_insecure_quote_cannot_borrow_parts_of_intels_collateral() -> None:
    """Each part of it from Intel or from us: no mixture is believed under Intel's root."""
    insecure, intel = software_evidence(), real("sgx")
    ours, theirs = json.loads(insecure.collateral), json.loads(intel.collateral)
    for mixture in itertools.product((ours, theirs), repeat=3):
        parts = ("pck_crl", "tcb_info", "qe_identity")
        mixed = {"root_ca_crl": theirs["root_ca_crl"]}
        for name, source in zip(parts, mixture, strict=True):
            mixed |= {key: value for key, value in source.items() if key.startswith(name)}
        assert mixed.keys() == theirs.keys()
        evidence = Evidence("sgx", insecure.quote, json.dumps(mixed).encode())
        refusal(evidence, tcb_statuses=("UpToDate", SGX_STATUS))
