"""Twin of the trusted party: the very object of papaya/tsa, under virtual time, that may crash.

It keeps nothing across a crash, as the real one: a new identity, no groups, no offers. Its evidence
is empty, and simulated devices believe it: attestation has tests of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from papaya.aggregator.trusted import Evidence, TrustedPartyOverTsa
from papaya.client.work import Seal, Sealed
from papaya.learning.parameters import FLOAT32
from papaya.secagg.offer import Offer
from papaya.secagg.parameters import PublicParameters
from papaya.secagg.participant import Policy, Terms, UnsealedUpdate
from papaya.secagg.words import Words
from papaya.sim.engine import Engine
from papaya.tsa.trusted_aggregator import TrustedAggregator


class TrustedTwin:
    def __init__(self, engine: Engine, rng: Random) -> None:
        self._engine = engine
        self._rng = rng
        self.crashes = -1
        self.crash()
        self.party = TrustedPartyOverTsa(self, lambda digest: Evidence("software", b"", b"", -1))

    def crash(self) -> None:
        """And back at once, with nothing."""
        self.crashes += 1
        self._tsa = TrustedAggregator(self._rng.randbytes)

    @property
    def identity_public_key(self) -> bytes:
        return self._tsa.identity_public_key

    def register(self, parameters: PublicParameters) -> bytes:
        return self._tsa.register(parameters.encode())

    def offers(self, parameters_hash: bytes, count: int) -> list[Offer]:
        return self._tsa.offers(parameters_hash, count, self._engine.now)

    def accept(self, index: int, group: int, sealed: bytes) -> None:
        self._tsa.accept(index, group, sealed, self._engine.now)

    def release(self, parameters: PublicParameters, group: int, members: Sequence[int]) -> Words:
        return self._tsa.release(parameters.digest(), group, members)


def sealed(work: Seal, now: float, rng: Random) -> Sealed:
    """What an honest device makes of an offer."""
    parameters = PublicParameters.decode(work.offer.parameters)
    policy = Policy(
        task=work.task,
        length=parameters.length,
        clip=parameters.clip,
        max_examples=parameters.max_examples,
        max_staleness=parameters.max_staleness,
        minimum_threshold=1,
        weighting=parameters.weighting,
    )
    terms = Terms(work.offer.identity, parameters, policy)
    update = UnsealedUpdate(np.frombuffer(work.update, FLOAT32), work.examples, work.version)
    offer = Offer.decode(work.offer.offer)
    done = update.seal(terms, offer, work.current, now, rng.randbytes)
    return Sealed(done.masked.tobytes(), done.sealed)
