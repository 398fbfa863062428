"""A device that seals by its owner's policy, a real TSA, and a log on a disk over HTTP.

The server between them is the attacker: it shows which log, which evidence and which offer it
likes. Evidence is of software, which anyone can make; every check of it is the real one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from papaya.attestation.verify import report_data
from papaya.client.work import Seal, Sealed
from papaya.device.trust import Trust
from papaya.learning.definition import TaskTerms
from papaya.learning.parameters import FLOAT32
from papaya.messages.participation import SecureOffer
from papaya.secagg.parameters import PublicParameters
from papaya.secagg.unmask import UnmaskedSum, unmask
from papaya.secagg.words import WORD
from papaya.tsa.tsa import TSA
from papaya.verifiable_log.folder import LogFolder
from tests.unit.attestation.builders import MEASUREMENT, a_policy, software_evidence
from tests.unit.secagg.builders import entropy
from tests.unit.verifiable_log.builders import NOW, a_log, a_record
from tests.unit.verifiable_log.hosts import serving

OLD, GOOD, EVIL = bytes.fromhex("ab" * 32), MEASUREMENT, b"evil" * 8
TASK = PublicParameters(
    task="next-word",
    length=3,
    aggregation_goal=1,
    threshold=1,
    clip=1.0,
    max_examples=100,
    max_staleness=8,
)
TERMS = TaskTerms(
    secure=True,
    model_length=TASK.length,
    max_examples=TASK.max_examples,
    max_staleness=TASK.max_staleness,
    clip=TASK.clip,
    threshold=TASK.threshold,
)
SECRET = np.array([0.5, -0.25, 0.125], np.float32)
UPDATE = SECRET.astype(FLOAT32).tobytes()


class World:
    """One device's disk, and what the server shows to it."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        self.address = address
        self.now: float = NOW
        self.tsa = TSA(entropy("TSA"))
        self.checkpoint = folder / "device.db.log-checkpoint"
        self._logs = 0
        self.show(OLD, GOOD)

    def log(self, *measurements: bytes) -> LogFolder:
        self._logs += 1
        records = [a_record(measured.hex()).encode() for measured in measurements]
        return a_log(self.folder / f"log-{self._logs}", records)

    def show(self, *measurements: bytes) -> LogFolder:
        """From now on the log's host serves a log of these binaries, signed by the true key."""
        shown, log = self.folder / "shown", self.log(*measurements)
        shown.unlink(missing_ok=True)
        shown.symlink_to(f"log-{self._logs}")
        return log

    def device(
        self, *, log_s: float = 300.0, certificates: Path | None = None, **changes: Any
    ) -> Trust:
        """As it is after a start: what it knows comes from its owner and its disk."""
        policy = a_policy(
            log_url=f"{self.address}/shown",
            platforms=("software",),
            allow_smt=True,
            minimum_threshold=1,
        )
        changed = structs.replace(policy, **changes)
        return Trust(
            changed, self.checkpoint, lambda: self.now, log_s=log_s, certificates=certificates
        )

    def offer(
        self, parameters: PublicParameters = TASK, binary: bytes = GOOD, leaf: int = 1
    ) -> SecureOffer:
        digest = self.tsa.register(parameters.encode())
        [offer] = self.tsa.offers(digest, 1, self.now)
        identity = self.tsa.identity_public_key
        evidence = software_evidence(binary, report_data(identity, digest))
        return SecureOffer(
            parameters.encode(),
            offer.encode(),
            identity,
            "software",
            evidence.quote,
            evidence.collateral,
            leaf,
        )

    def work(self, offer: SecureOffer | None = None, **changes: Any) -> Seal:
        work = Seal("next-word", offer or self.offer(), UPDATE, 20, 6, 6)
        return structs.replace(work, **changes)

    def seal(self, device: Trust, offer: SecureOffer | None = None, **changes: Any) -> Sealed:
        return device.seal(self.work(offer, **changes), TERMS, evaluates=False)

    def opened(self, work: Seal, sealed: Sealed) -> UnmaskedSum:
        """The sum of this one update: its task has a threshold of 1, so that a test can look."""
        parameters = PublicParameters.decode(work.offer.parameters)
        index = int.from_bytes(work.offer.offer[:8], "big")
        self.tsa.accept(index, 1, sealed.sealed, self.now)
        masks = self.tsa.release(parameters.digest(), 1, [index])
        return unmask(np.frombuffer(sealed.update, WORD).copy(), masks, 1, parameters)


@contextmanager
def a_world(folder: Path) -> Iterator[World]:
    with serving(folder) as address:
        yield World(folder, address)
