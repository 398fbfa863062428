"""Twin of the TSA: the TSA of papaya/tsa under virtual time, which may crash.

Like the real one it keeps nothing across a crash: it comes back with a new identity, no groups and
no offers. Until then it is unreachable. It may also be cut off, or be frozen, and lose nothing. A
frozen process finds the requests in its socket when it goes on, although nobody waits for its
answers. Its evidence is empty and simulated devices accept that; attestation is tested elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from random import Random
from typing import Protocol

import numpy as np

from papaya.aggregator.tsa import TsaAdapter, TsaEvidence
from papaya.client.work import Seal, Sealed
from papaya.learning.parameters import FLOAT32
from papaya.secagg.channel import DEVICE_TAG_BYTES
from papaya.secagg.offer import Offer
from papaya.secagg.parameters import MAX_STALENESS, PublicParameters
from papaya.secagg.participant import ParticipantPolicy, Terms, UnsealedUpdate
from papaya.secagg.unmask import TakeBlock, give_in_blocks
from papaya.secagg.words import Words
from papaya.tsa.errors import RefusalReason, TsaRefused, Unavailable
from papaya.tsa.tsa import DEFAULT_LIMITS, TSA, TsaLimits


class VirtualClock(Protocol):
    @property
    def now(self) -> float: ...


class TsaTwin:
    """`on_accepted` is called for every seed taken, `on_released` for every sum released."""

    def __init__(
        self, clock: VirtualClock, rng: Random, limits: TsaLimits = DEFAULT_LIMITS
    ) -> None:
        self.on_accepted: Callable[[int, int], None] = lambda index, group: None
        self.on_released: Callable[[bytes, int, tuple[int, ...], Words], None] = lambda *_: None
        self._clock = clock
        self._rng = rng
        self._limits = limits
        self._failures = 0
        self._unread: list[Callable[[], None]] = []
        self._is_frozen = False
        self.crash()
        self.adapter = TsaAdapter(self, lambda digest: TsaEvidence("software", b"", b"", -1))

    def crash(self, away_s: float = 0.0) -> None:
        """Lose everything, and be unreachable for `away_s`."""
        self._tsa = TSA(self._rng.randbytes, self._limits)
        self.identity_public_key = self._tsa.identity_public_key
        self._back_at = self._clock.now + away_s
        self._unread = []
        self._is_frozen = False

    def freeze(self, away_s: float) -> None:
        """Keep everything, but answer nothing for `away_s`; take the seeds of that time later."""
        self.cut_off(away_s)
        self._is_frozen = True

    def cut_off(self, away_s: float) -> None:
        """Keep everything, but be unreachable for `away_s`."""
        self._back_at = max(self._back_at, self._clock.now + away_s)

    def fail(self, releases: int) -> None:
        """Fail at the next releases, as a TSA that is out of memory does."""
        self._failures = releases

    def come_back(self) -> None:
        self._back_at = self._clock.now
        self._failures = 0

    def register(self, parameters: PublicParameters) -> bytes:
        return self._reached().register(parameters.encode())

    def offers(self, parameters_hash: bytes, count: int) -> list[Offer]:
        return self._reached().offers(parameters_hash, count, self._clock.now)

    def accept(self, index: int, group: int, sealed: bytes) -> None:
        if self._is_frozen and self._clock.now < self._back_at:
            self._unread.append(partial(self._accept, index, group, sealed))
        self._reached()
        self._accept(index, group, sealed)

    def _accept(self, index: int, group: int, sealed: bytes) -> None:
        self._tsa.accept(index, group, sealed, self._clock.now)
        self.on_accepted(index, group)

    def release(
        self, parameters: PublicParameters, group: int, members: Sequence[int], take: TakeBlock
    ) -> None:
        tsa = self._reached()
        if self._failures > 0:
            self._failures -= 1
            raise TsaRefused(RefusalReason.INTERNAL, "internal error of the TSA")
        masks = tsa.release(parameters.digest(), group, members)
        self.on_released(parameters.digest(), group, tuple(members), masks)
        give_in_blocks(masks, take)

    def open_groups(self, parameters_hash: bytes) -> list[int]:
        status = self._reached().status(parameters_hash)
        return [number for number, _ in status.groups]

    def drop(self, parameters_hash: bytes, group: int) -> int:
        return self._reached().drop(parameters_hash, group)

    def forget(self, parameters_hash: bytes) -> int:
        return self._reached().forget(parameters_hash)

    def _reached(self) -> TSA:
        if self._clock.now < self._back_at:
            raise Unavailable("the TSA is away")
        self._is_frozen = False
        unread, self._unread = self._unread, []
        for request in unread:
            with suppress(TsaRefused):
                request()
        return self._tsa


def sealed(work: Seal, now: float, rng: Random, manifest: str = "", device: int = 0) -> Sealed:
    """What an honest device sends for an offer and an update that is already clipped.

    `manifest`: the digest of the manifest under which it has trained.
    """
    parameters = PublicParameters.decode(work.offer.parameters)
    policy = ParticipantPolicy(
        task=work.task,
        length=parameters.length,
        clip=parameters.clip,
        max_examples=parameters.max_examples,
        max_staleness=parameters.max_staleness,
        minimum_threshold=1,
        maximum_staleness=MAX_STALENESS,
        weighting=parameters.weighting,
        damping=parameters.damping,
        manifest=manifest,
        kind=parameters.kind,
        scheme=parameters.scheme,
        noise_multiplier=parameters.noise_multiplier,
        delta=parameters.delta,
        max_participations=parameters.max_participations,
        expected_weight=parameters.expected_weight,
    )
    terms = Terms(work.offer.identity, parameters, policy)
    update = UnsealedUpdate(np.frombuffer(work.update, FLOAT32), work.examples, work.version)
    offer = Offer.decode(work.offer.offer)
    tag = _tag(device, parameters) if parameters.is_private else b""
    done = update.seal(terms, offer, work.current, now, rng.randbytes, tag)
    return Sealed(done.masked.tobytes(), done.sealed)


def _tag(device: int, parameters: PublicParameters) -> bytes:
    """As if the device had drawn it once for these parameters, and kept it."""
    return sha256(f"{device}/".encode() + parameters.digest()).digest()[:DEVICE_TAG_BYTES]
