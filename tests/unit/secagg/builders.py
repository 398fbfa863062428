"""Small parameters, drawn bytes that repeat, and a TSA with devices around it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np

from papaya.secagg.fixed_point import Encoder
from papaya.secagg.offer import Offer
from papaya.secagg.parameters import PRIVATE_SCHEME, PublicParameters
from papaya.secagg.participant import ParticipantPolicy, SealedUpdate, Terms, UnsealedUpdate
from papaya.secagg.unmask import UnmaskedSum, unmask
from papaya.secagg.words import WORD, Entropy, Reals, Words, blocks
from papaya.tsa.tsa import DEFAULT_LIMITS, TSA, TsaLimits

NOW = 1_700_000_000.0


def entropy(seed: object) -> Entropy:
    """Bytes that look drawn and are the same for the same seed."""
    drawn = 0

    def draw(size: int) -> bytes:
        nonlocal drawn
        drawn += 1
        return hashlib.shake_256(f"{seed}/{drawn}".encode()).digest(size)

    return draw


def a_task(**changes: Any) -> PublicParameters:
    fields: dict[str, Any] = {
        "task": "next-word",
        "length": 5,
        "aggregation_goal": 4,
        "threshold": 2,
        "clip": 1.0,
        "max_examples": 100,
        "max_staleness": 8,
    }
    return PublicParameters(**(fields | changes))


def a_private_task(**changes: Any) -> PublicParameters:
    """With noise of twice the clip."""
    fields: dict[str, Any] = {
        "scheme": PRIVATE_SCHEME,
        "weighting": "equal",
        "noise_multiplier": 2.0,
        "delta": 1e-6,
        "max_participations": 1,
        "expected_weight": 1.0,
    }
    return a_task(**(fields | changes))


def a_policy(parameters: PublicParameters, **changes: Any) -> ParticipantPolicy:
    """A device that agrees, however small the threshold is."""
    fields: dict[str, Any] = {"minimum_threshold": 1, "weighting": parameters.weighting}
    compared = ("task", "length", "clip", "max_examples", "max_staleness", "scheme")
    private = ("noise_multiplier", "delta", "max_participations", "expected_weight", "damping")
    for name in compared + private:
        fields[name] = getattr(parameters, name)
    return ParticipantPolicy(**(fields | changes))


def encoded(values: Reals, factor: float, limit: int) -> Words:
    """The group elements of a whole vector, without a mask."""
    words = np.empty(values.size, WORD)
    encoder = Encoder(factor, limit)
    for block in blocks(values.size):
        encoder.encode_into(values[block], words[block])
    return words


def decoded(words: Words, members: int, parameters: PublicParameters) -> UnmaskedSum:
    """What an aggregator makes of a sum that has no masks on it any more."""
    return unmask(words, np.zeros_like(words), members, parameters)


class Deployment:
    """One TSA, one task, and devices that do as they should."""

    def __init__(
        self, parameters: PublicParameters | None = None, limits: TsaLimits = DEFAULT_LIMITS
    ) -> None:
        self.parameters = parameters or a_task()
        self.tsa = TSA(entropy("TSA"), limits)
        self.hash = self.tsa.register(self.parameters.encode())
        self.draw = entropy("devices")

    def terms(self, **changes: Any) -> Terms:
        policy = a_policy(self.parameters, **changes)
        return Terms(self.tsa.identity_public_key, self.parameters, policy)

    def offer(self) -> Offer:
        [offer] = self.tsa.offers(self.hash, 1, NOW)
        return offer

    def sealed(
        self,
        delta: Reals,
        examples: int = 100,
        initial: int = 0,
        current: int = 0,
        tag: bytes | None = None,
    ) -> SealedUpdate:
        """Of another device each time, unless a tag is given."""
        update = UnsealedUpdate(delta, examples, initial)
        if tag is None:
            tag = self.draw(16) if self.parameters.is_private else b""
        return update.seal(self.terms(), self.offer(), current, NOW, self.draw, tag)

    def any_sealed(self, value: float = 0.5) -> SealedUpdate:
        return self.sealed(np.full(self.parameters.length, value, np.float32))

    def accept(self, update: SealedUpdate, group: int = 0) -> SealedUpdate:
        self.tsa.accept(update.index, group, update.sealed, NOW)
        self.tsa.check()
        return update

    def accepted(self, count: int, group: int = 0, value: float = 0.5) -> list[SealedUpdate]:
        return [self.accept(self.any_sealed(value), group) for _ in range(count)]

    def unmasked(self, updates: list[SealedUpdate], group: int = 0) -> Words:
        """What an aggregator computes: folds, releases, unmasks."""
        total = np.zeros(self.parameters.vector_words, self.parameters.ring.word)
        for update in updates:
            total += update.masked
        members = sorted(update.index for update in updates)
        unmasked: Words = total - self.tsa.release(self.hash, group, members)
        return unmasked


def with_byte_changed(data: bytes, position: int, by: int = 1) -> bytes:
    changed = bytearray(data)
    changed[position] ^= by
    return bytes(changed)


def tampered(update: SealedUpdate, position: int) -> SealedUpdate:
    return replace(update, sealed=with_byte_changed(update.sealed, position))
