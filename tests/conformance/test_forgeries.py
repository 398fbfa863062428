"""Each forgery fails exactly one of the device's checks, so a client that skips it is caught."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from papaya.attestation.policy import DevicePolicy
from papaya.attestation.software import make_collateral, make_quote
from papaya.attestation.verify import (
    KEY_BYTES,
    Evidence,
    report_data,
    verify_quote,
)
from papaya.conformance.kit import record_releases
from papaya.conformance.scenarios import SCENARIOS, Forgery, NoOffer
from papaya.conformance.vectors.cases import IDENTITY, IDENTITY_KEY, PUBLIC
from papaya.errors import PapayaError
from papaya.messages.participation import SecureOffer
from papaya.secagg.errors import SecureAggregationError
from papaya.secagg.offer import Offer
from papaya.secagg.parameters import PublicParameters
from papaya.secagg.participant import ParticipantPolicy
from papaya.tsa.measurement import measure
from papaya.verifiable_log.errors import LogError
from papaya.verifiable_log.folder import LogFolder
from papaya.verifiable_log.reader import LogReader
from papaya.verifiable_log.record import Record

NOW = time.time()
AGREED = ParticipantPolicy(
    task=PUBLIC.task,
    length=PUBLIC.length,
    clip=PUBLIC.clip,
    max_examples=PUBLIC.max_examples,
    max_staleness=PUBLIC.max_staleness,
    minimum_threshold=PUBLIC.threshold,
)
FORGERIES = [kind for kind in SCENARIOS if issubclass(kind, Forgery) and kind is not NoOffer]
FOUND_BY = {
    "forged-quote": "the quote",
    "forged-leaf": "the log",
    "forged-record": "the measurement",
    "forged-identity": "the identity in the quote",
    "forged-parameters": "the parameters in the quote",
    "forged-offer": "the signature of the offer",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with the log of the kit."""
    folder = tmp_path_factory.mktemp("data")
    record_releases(folder)
    return folder


def honest(data: Path) -> SecureOffer:
    offer = Offer.signed(IDENTITY, PUBLIC.digest(), 3, bytes([9, *bytes(31)]), int(NOW) + 600)
    _, leaf = (data / "log.leaf").read_text().split()
    return SecureOffer(
        PUBLIC.encode(),
        offer.encode(),
        IDENTITY_KEY,
        "software",
        make_quote(measure(), report_data(IDENTITY_KEY, PUBLIC.digest())),
        make_collateral(NOW),
        int(leaf),
    )


class Checks:
    """The device's checks, each without the others."""

    def __init__(self, data: Path, offered: SecureOffer) -> None:
        self.offered = offered
        self.parameters = PublicParameters.decode(offered.parameters)
        self.policy = DevicePolicy(
            log_key=(data / "log.key.pub").read_text().strip(),
            platforms=("software",),
            allow_insecure_software=True,
            allow_smt=True,
        )
        self.reader = LogReader(LogFolder(data / "log").fetch, self.policy.log_policy())
        self.reader.refresh(NOW)
        # From the quote, as read by a client that does not verify its signature.
        self.measured, self.bound = offered.evidence[112:144], offered.evidence[368:432]

    def failed(self) -> Iterator[str]:
        checks: dict[str, Callable[[], object]] = {
            "the quote": self.quote,
            "the log": lambda: self.reader.entry(self.offered.leaf),
            "the measurement": self.measurement,
            "the identity in the quote": self.identity,
            "the parameters in the quote": self.digest,
            "the agreed terms": lambda: AGREED.check(self.parameters),
            "the signature of the offer": self.signature,
        }
        for name, check in checks.items():
            try:
                check()
            except (PapayaError, LogError, SecureAggregationError, AssertionError):
                yield name

    def quote(self) -> None:
        evidence = Evidence("software", self.offered.evidence, self.offered.collateral)
        verify_quote(evidence, self.policy, NOW)

    def measurement(self) -> None:
        if self.offered.leaf < self.reader.checkpoint.size:
            record = Record.decode(self.reader.entry(self.offered.leaf))
            record.check_measured("software", {"mrenclave": self.measured.hex()})

    def identity(self) -> None:
        assert self.bound[:KEY_BYTES] == self.offered.identity

    def digest(self) -> None:
        assert self.bound[KEY_BYTES:] == self.parameters.digest()

    def signature(self) -> None:
        offer = Offer.decode(self.offered.offer)
        offer.verify(self.offered.identity, self.parameters.digest(), NOW)


def test_an_honest_offer_fails_no_check(data: Path) -> None:
    assert list(Checks(data, honest(data)).failed()) == []


@pytest.mark.parametrize("kind", FORGERIES, ids=lambda kind: kind.name)
def test_a_forgery_fails_exactly_one_check(kind: type[Forgery], data: Path) -> None:
    async def restart() -> None:
        raise AssertionError

    forged = kind(1.0, restart).forge(honest(data))
    assert forged is not None
    assert list(Checks(data, forged).failed()) == [FOUND_BY[kind.name]]
