"""A TSA under software evidence, a log that names it, and a device that checks both."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from papaya.attestation.policy import DevicePolicy
from papaya.attestation.software import make_collateral, make_quote
from papaya.attestation.verify import Evidence, Verified, report_data, verify_evidence
from papaya.verifiable_log.reader import LogReader
from papaya.verifiable_log.record import Record
from tests.unit.verifiable_log.builders import KEY, NOW, a_log, a_reader, a_record

MEASUREMENT = bytes(range(32))
IDENTITY_KEY = b"i" * 32
PARAMETERS_HASH = b"p" * 32


def a_policy(**changes: Any) -> DevicePolicy:
    wanted: dict[str, Any] = {
        "log_key": str(KEY.verifier),
        "platforms": ("sgx", "tdx", "software"),
        "allow_insecure_software": True,
    }
    return DevicePolicy(**(wanted | changes))


def software_evidence(
    measurement: bytes = MEASUREMENT,
    bound: bytes = report_data(IDENTITY_KEY, PARAMETERS_HASH),
    *,
    debug: bool = False,
    now: float = NOW,
    **collateral: Any,
) -> Evidence:
    quote = make_quote(measurement, bound, debug=debug)
    return Evidence("software", quote, make_collateral(now, **collateral))


@dataclass
class Device:
    """What a device knows and is told; a test changes one thing."""

    reader: LogReader
    policy: DevicePolicy = field(default_factory=a_policy)
    now: float = NOW
    identity_key: bytes = IDENTITY_KEY
    parameters_hash: bytes = PARAMETERS_HASH
    leaf_index: int = 1

    def verify(self, evidence: Evidence) -> Verified:
        return verify_evidence(
            evidence,
            identity_key=self.identity_key,
            parameters_hash=self.parameters_hash,
            leaf_index=self.leaf_index,
            policy=self.policy,
            reader=self.reader,
            now=self.now,
        )


def the_record() -> Record:
    return a_record(MEASUREMENT.hex())


def a_device(folder: Path, **changes: Any) -> Device:
    log = a_log(folder / "log", [a_record().encode(), the_record().encode()])
    return Device(a_reader(log), **changes)
