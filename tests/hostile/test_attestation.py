"""A server lies about its TSA; each attack is refused with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from papaya.attestation.policy import AttestationError, DevicePolicy
from papaya.attestation.software import make_collateral, make_quote
from papaya.attestation.verify import Evidence, report_data
from papaya.secagg.errors import OfferRefused
from papaya.secagg.parameters import PublicParameters
from papaya.secagg.participant import ParticipantPolicy, Terms
from papaya.verifiable_log.checkpoint import LogPolicy
from papaya.verifiable_log.reader import LogReader
from tests.unit.attestation.builders import (
    IDENTITY_KEY,
    MEASUREMENT,
    PARAMETERS_HASH,
    Device,
    a_device,
    a_policy,
    software_evidence,
    the_record,
)
from tests.unit.verifiable_log.builders import (
    KEY,
    NOW,
    POLICY,
    WITNESSES,
    Served,
    a_log,
    a_reader,
    a_record,
)

DAY = 86_400
DEFAULT = DevicePolicy(log_key=str(KEY.verifier))


def refused(device: Device, evidence: Evidence) -> AttestationError:
    with pytest.raises(AttestationError) as refusal:
        device.verify(evidence)
    return refusal.value


def test_a_default_client_refuses_software_evidence(tmp_path: Path) -> None:
    error = refused(a_device(tmp_path, policy=DEFAULT), software_evidence())
    assert error.reason == "platform"
    assert "allow_insecure_software" in error.hint


@pytest.mark.parametrize("label", ["sgx", "tdx"])
def test_software_evidence_under_another_label(tmp_path: Path, label: Any) -> None:
    """The format is Intel's; the root is not."""
    evidence = software_evidence()
    relabelled = Evidence(label, evidence.quote, evidence.collateral)
    assert refused(a_device(tmp_path), relabelled).reason == "quote"


@pytest.mark.parametrize("label", ["", "SGX", "sev", "x" * 10_000])
def test_a_platform_that_does_not_exist(tmp_path: Path, label: Any) -> None:
    evidence = software_evidence()
    error = refused(a_device(tmp_path), Evidence(label, evidence.quote, evidence.collateral))
    assert error.reason == "platform"
    assert len(str(error)) < 200


def test_a_quote_of_another_binary(tmp_path: Path) -> None:
    error = refused(a_device(tmp_path), software_evidence(measurement=b"x" * 32))
    assert error.reason == "measurement"
    assert "not of the binary in record 1" in str(error)


def test_a_quote_of_an_older_binary_that_is_in_the_log(tmp_path: Path) -> None:
    """Honestly logged once; its owner has told the device not to believe it any more."""
    old = bytes.fromhex("ab" * 32)
    device = a_device(tmp_path, leaf_index=0)
    assert device.verify(software_evidence(old)).leaf_index == 0
    device.policy = a_policy(oldest_record=1)
    assert refused(device, software_evidence(old)).reason == "measurement"


def test_a_measurement_of_one_platform_for_another(tmp_path: Path) -> None:
    """The record's SGX measurement does not vouch for software that claims the same number."""
    sgx = bytes.fromhex(the_record().measurements["sgx"]["mrenclave"])
    assert refused(a_device(tmp_path), software_evidence(sgx)).reason == "measurement"


def test_a_debug_quote(tmp_path: Path) -> None:
    assert refused(a_device(tmp_path), software_evidence(debug=True)).reason == "debug"


@pytest.mark.parametrize("shift", [-DAY, 31 * DAY])
def test_an_expired_quote(tmp_path: Path, shift: float) -> None:
    """By the device's own clock: collateral is good for thirty days from its issue."""
    device = a_device(tmp_path, now=NOW + shift)
    assert refused(device, software_evidence()).reason == "quote"


def test_fresh_collateral_for_a_revoked_processor(tmp_path: Path) -> None:
    error = refused(a_device(tmp_path), software_evidence(revoked=True))
    assert error.reason == "quote"
    assert "certificate" in str(error)


@pytest.mark.parametrize("status", ["OutOfDate", "Revoked", "SWHardeningNeeded", "Nonsense"])
def test_a_processor_with_known_holes(tmp_path: Path, status: str) -> None:
    error = refused(a_device(tmp_path), software_evidence(tcb_status=status))
    assert error.reason == "quote"


def test_old_collateral_from_before_the_revocation(tmp_path: Path) -> None:
    """The server may keep old collateral; it ends after thirty days, and with it the attack."""
    device = a_device(tmp_path)
    stale = software_evidence(now=NOW - 29 * DAY)
    device.verify(stale)
    device.now += 2 * DAY
    assert refused(device, stale).reason == "quote"


def test_collateral_with_a_changed_statement(tmp_path: Path) -> None:
    lying = make_collateral(NOW, tcb_status="OutOfDate").replace(b"OutOfDate", b"UpToDate")
    quote = software_evidence().quote
    assert refused(a_device(tmp_path), Evidence("software", quote, lying)).reason == "quote"


def test_the_quote_of_another_tsa(tmp_path: Path) -> None:
    """A true quote, but the server holds the private key that signs the offers."""
    device = a_device(tmp_path, identity_key=b"mine" * 8)
    error = refused(device, software_evidence())
    assert error.reason == "report_data"
    assert "identity key" in str(error)


def test_parameters_swapped_between_tasks_under_one_key(tmp_path: Path) -> None:
    device = a_device(tmp_path, parameters_hash=b"q" * 32)
    error = refused(device, software_evidence())
    assert error.reason == "report_data"
    assert "parameters" in str(error)


def test_a_quote_with_the_halves_exchanged(tmp_path: Path) -> None:
    swapped = software_evidence(bound=report_data(PARAMETERS_HASH, IDENTITY_KEY))
    assert refused(a_device(tmp_path), swapped).reason == "report_data"


def test_an_attested_threshold_below_the_devices_minimum(tmp_path: Path) -> None:
    """Everything is honestly attested, and still too weak for this device."""
    weak = PublicParameters(
        task="words",
        length=10,
        aggregation_goal=20,
        threshold=9,
        clip=1.0,
        max_examples=100,
        max_staleness=5,
    )
    device = a_device(tmp_path, parameters_hash=weak.digest())
    bound = report_data(IDENTITY_KEY, weak.digest())
    verified = device.verify(software_evidence(bound=bound))
    own = ParticipantPolicy(
        task="words",
        length=10,
        clip=1.0,
        max_examples=100,
        max_staleness=5,
        minimum_threshold=device.policy.minimum_threshold,
    )
    with pytest.raises(OfferRefused, match="at least 10") as refusal:
        Terms(verified.identity_key, weak, own)
    assert refusal.value.reason == "threshold"


def test_an_old_checkpoint_behind_good_evidence(tmp_path: Path) -> None:
    device = a_device(tmp_path)
    device.verify(software_evidence())
    older = a_log(tmp_path / "older", [a_record().encode()])
    device.reader = a_reader(older, device.reader.remembered)
    error = refused(device, software_evidence())
    assert error.reason == "log"
    assert "but had 2 before" in str(error)


def test_a_forked_log_behind_good_evidence(tmp_path: Path) -> None:
    """A log for this device alone, with a record of the server's own binary."""
    device = a_device(tmp_path)
    device.verify(software_evidence())
    mine = a_record("ef" * 32).encode()
    fork = a_log(tmp_path / "fork", [a_record().encode(), mine, the_record().encode()])
    device.reader, device.leaf_index = a_reader(fork, device.reader.remembered), 1
    error = refused(device, software_evidence(bytes.fromhex("ef" * 32)))
    assert error.reason == "log"
    assert "does not extend" in str(error)


def test_a_log_that_no_witness_has_seen(tmp_path: Path) -> None:
    log = a_log(tmp_path / "log", [the_record().encode()])
    policy = LogPolicy(KEY.verifier, (WITNESSES[0].verifier,), 1)
    device = Device(a_reader(log, policy=policy), leaf_index=0)
    error = refused(device, software_evidence())
    assert error.reason == "log"
    assert "only 0 valid cosignatures" in str(error)


@pytest.mark.parametrize("index", [-1, 2, 10**9])
def test_a_leaf_index_that_leads_nowhere(tmp_path: Path, index: int) -> None:
    assert refused(a_device(tmp_path, leaf_index=index), software_evidence()).reason == "log"


def test_a_log_entry_that_is_no_record(tmp_path: Path) -> None:
    log = a_log(tmp_path / "log", [b'{"artifact":"whatever"}'])
    device = Device(a_reader(log), leaf_index=0)
    assert refused(device, software_evidence()).reason == "log"


def test_a_log_that_withholds_its_tiles(tmp_path: Path) -> None:
    served = Served(a_log(tmp_path / "log", [a_record().encode(), the_record().encode()]))
    served.removed = {"tile/0/000.p/2", "tile/0/000"}
    device = Device(LogReader(served.fetch, POLICY))
    assert refused(device, software_evidence()).reason == "log"


def test_a_quote_whose_quoting_enclave_signed_another_key(tmp_path: Path) -> None:
    """The attestation key of one quote, grafted onto the certificates of another."""
    good = software_evidence()
    graft = bytearray(good.quote)
    graft[500:564] = bytes(64)  # the attestation key
    evidence = Evidence("software", bytes(graft), good.collateral)
    assert refused(a_device(tmp_path), evidence).reason == "quote"


def test_a_quote_cut_short_anywhere(tmp_path: Path) -> None:
    device, good = a_device(tmp_path), software_evidence()
    for end in range(0, len(good.quote), 97):
        evidence = Evidence("software", good.quote[:end], good.collateral)
        assert refused(device, evidence).reason == "quote"


def test_anyone_can_make_software_evidence(tmp_path: Path) -> None:
    """Beyond reach, and said so: its keys are public; who takes it trusts the server."""
    thief = b"thief" + bytes(27)
    forged = make_quote(MEASUREMENT, report_data(thief, PARAMETERS_HASH))
    device = a_device(tmp_path, identity_key=thief)
    assert device.verify(Evidence("software", forged, make_collateral(NOW))).insecure
