"""A device's policy: strict unless its owner says otherwise, and free of contradictions."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from papaya.attestation.policy import DevicePolicy
from papaya.errors import ConfigError
from tests.unit.verifiable_log.builders import KEY, WITNESSES

LOG_KEY = str(KEY.verifier)


def test_defaults_are_strict() -> None:
    policy = DevicePolicy(log_key=LOG_KEY)
    assert not policy.accepts("software")
    assert policy.accepts("sgx")
    assert policy.accepts("tdx")
    assert policy.tcb_statuses == ("UpToDate",)
    assert policy.minimum_threshold == 10
    assert policy.maximum_staleness == 1000
    machine = (policy.allow_smt, policy.allow_cached_keys, policy.allow_dynamic_platform)
    assert machine == (False, False, False)


def test_software_evidence_needs_its_own_word() -> None:
    with pytest.raises(ConfigError, match="proves nothing"):
        DevicePolicy(log_key=LOG_KEY, platforms=("software",))
    policy = DevicePolicy(log_key=LOG_KEY, platforms=("software",), allow_insecure_software=True)
    assert policy.accepts("software")
    assert not policy.accepts("sgx")


def test_what_is_allowed_is_not_believed_unless_it_is_among_the_platforms() -> None:
    """An owner who says `platforms = ["sgx"]` means it, whatever else a copied file allows."""
    policy = DevicePolicy(log_key=LOG_KEY, platforms=("sgx",), allow_insecure_software=True)
    assert not policy.accepts("software")
    assert not policy.accepts("tdx")


def test_a_policy_can_be_read_from_a_file_of_the_owner() -> None:
    fields = {
        "log_key": LOG_KEY,
        "witnesses": [str(WITNESSES[0].verifier)],
        "witness_quorum": 1,
        "platforms": ["sgx"],
        "tcb_statuses": ["UpToDate", "SWHardeningNeeded"],
    }
    policy = msgspec.convert(fields, DevicePolicy)
    assert policy.log_policy().quorum == 1
    assert not policy.accepts("tdx")


@pytest.mark.parametrize(
    "fields",
    [
        {"tcb_statuses": ["Revoked"]},
        {"platforms": ["sev"]},
        {"unknown": 1},
        {"minimum_threshold": "ten"},
    ],
)
def test_a_file_with_anything_else_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"log_key": LOG_KEY} | fields, DevicePolicy)


def test_old_cosignatures_count_only_if_the_owner_says_so() -> None:
    assert DevicePolicy(log_key=LOG_KEY).log_policy().max_cosignature_age_s == 7 * 24 * 3600
    document = f"log_key = '{LOG_KEY}'\nmax_cosignature_age_s = inf"
    policy = msgspec.toml.decode(document, type=DevicePolicy)
    assert policy.log_policy().max_cosignature_age_s == math.inf


@pytest.mark.parametrize(
    "fields",
    [
        {"log_key": "nonsense"},
        {"log_key": str(WITNESSES[0].verifier)},
        {"witnesses": (str(WITNESSES[0].verifier),)},
        {"witness_quorum": 1},
        {"platforms": ()},
        {"minimum_threshold": 0},
        {"maximum_staleness": -1},
        {"oldest_record": -1},
        {"max_cosignature_age_s": 0.0},
    ],
)
def test_contradictions_are_told_with_a_remedy(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        DevicePolicy(**({"log_key": LOG_KEY} | fields))
    assert refused.value.hint
