"""The device's side: its own policy, its own weight, and one seal per update.

Paper, "Protocol Detail", steps 3 and 4: "client i validates the signature and aborts if not valid
[...] picks a random seed s_i [...] and sends v_i + m_i". Three rules that close attacks:

- *A client seals the seed of an update once.* If it were sealed for two groups, their sums would
  differ by this one client. `UnsealedUpdate.seal` consumes the update. The client
  (`papaya/client/client.py`) never makes a second one from the same numbers, even if a server says
  that it lost the first: a retry sends the same bytes, and after a restart nothing is sent.
- *A client computes its own weight*, from its examples and from the version that the server
  reports, within limits that are public parameters.
- *The device has its own policy*, because attested parameters may still be too weak. For example, a
  server that lies about versions can damp updates by up to sqrt(1 + max_staleness), so that the one
  it wants to learn about dominates the sum. The limit on the staleness limits this factor for every
  damping function.

- *A device is in a private sum once.* It seals a tag with each seed, the same one for all its
  updates under the same public parameters, and the TSA takes a tag into a group once. And its words
  are never longer than the noise allows for: the sum of their squares is checked in whole numbers.

The device checks evidence (attestation), then `Terms` (policy), then the offer, and masks nothing
before all have passed. The caller clips the norm of the update. Here single coordinates are
clamped, and NaN and infinity are refused. Counts are not weighted: they are refused if they would
be rounded or clamped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NoReturn

import numpy as np

from papaya.secagg import channel
from papaya.secagg.damping import PAPERS, Damping
from papaya.secagg.errors import OfferRefused, UpdateError
from papaya.secagg.fixed_point import Encoder
from papaya.secagg.mask import SEED_BYTES, Mask
from papaya.secagg.offer import KEY_BYTES, Offer
from papaya.secagg.parameters import SCHEME, PublicParameters
from papaya.secagg.rounding import RandomEncoder
from papaya.secagg.words import BLOCK, RING_16, SIGNED, Entropy, Reals, Words, blocks

DEFAULT_MINIMUM_THRESHOLD: Final = 10
DEFAULT_MAXIMUM_STALENESS: Final = 1000
_A_LITTLE_LESS: Final = 1 - 2.0**-20
_OPTIONAL: Final = ("aggregation_goal", "threshold")
# Not `number`: the device cannot know it, and no cost depends on it.
_COMPARED: Final = (
    *("scheme", "manifest", "kind", "task", "length", "clip", "max_examples", "max_staleness"),
    *("weighting", "damping"),
    *("noise_multiplier", "delta", "max_participations", "expected_weight"),
    *_OPTIONAL,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParticipantPolicy:
    """What this device agrees to: its own task file or signed manifest, and its owner's limits.

    `manifest`: the digest of the manifest that the device has verified; empty for a task file. The
    quote binds the parameters, so a TSA that shows another digest serves another task. `kind`: what
    the device was asked for under this manifest; empty without one.
    `aggregation_goal` and `threshold` are those that the manifest states; None if any is allowed.
    """

    task: str
    length: int
    clip: float
    max_examples: int
    max_staleness: int
    minimum_threshold: int = DEFAULT_MINIMUM_THRESHOLD
    maximum_staleness: int = DEFAULT_MAXIMUM_STALENESS
    weighting: str = "examples"
    manifest: str = ""
    kind: str = ""
    aggregation_goal: int | None = None
    threshold: int | None = None
    scheme: str = SCHEME
    noise_multiplier: float = 0.0
    delta: float = 0.0
    max_participations: int = 0
    expected_weight: float = 0.0
    damping: Damping = PAPERS

    def check(self, parameters: PublicParameters) -> None:
        """Raises OfferRefused at the first difference."""
        if parameters.threshold < self.minimum_threshold:
            message = f"threshold = {parameters.threshold}, this device requires "
            raise OfferRefused("threshold", f"{message}at least {self.minimum_threshold}")
        if parameters.max_staleness > self.maximum_staleness:
            message = f"max_staleness = {parameters.max_staleness}, this device allows "
            raise OfferRefused("max_staleness", f"{message}at most {self.maximum_staleness}")
        smallest = parameters.damping.factor(parameters.max_staleness)
        if smallest < PAPERS.factor(self.maximum_staleness):
            message = f"damping by up to {smallest:.3g}, this device allows "
            raise OfferRefused("damping", f"{message}{PAPERS.factor(self.maximum_staleness):.3g}")
        source = "the manifest of its owner" if self.manifest else "this device's task file"
        for name in _COMPARED:
            found, wanted = getattr(parameters, name), getattr(self, name)
            if found != wanted and (wanted is not None or name not in _OPTIONAL):
                raise OfferRefused(name, f"{name} = {found!r}, {source} says {wanted!r}")


@dataclass(frozen=True, slots=True)
class Terms:
    """An attested identity key and attested parameters that pass the device's policy."""

    identity_public_key: bytes
    parameters: PublicParameters
    policy: ParticipantPolicy

    def __post_init__(self) -> None:
        self.policy.check(self.parameters)


def weight_and_damping(
    parameters: PublicParameters, examples: int, staleness: int
) -> tuple[float, float]:
    """min(n, max_examples)/max_examples or 1, and the factor by staleness; both at most 1."""
    if not examples >= 1:
        raise UpdateError("examples", f"examples = {examples}: an update needs at least one")
    if not 0 <= staleness <= parameters.max_staleness:
        message = f"staleness = {staleness}, outside 0 to {parameters.max_staleness}"
        raise OfferRefused("staleness", message)
    if parameters.weighting == "none":
        return 1.0, 1.0
    damping = parameters.damping.factor(staleness)
    if parameters.weighting == "equal":
        return 1.0, damping
    return min(examples, parameters.max_examples) / parameters.max_examples, damping


class UnsealedUpdate:
    """An update that has not left the device. Sealing consumes it; it cannot be copied."""

    __slots__ = ("_delta", "_examples", "_initial_version")

    def __init__(self, delta: Reals, examples: int, initial_version: int) -> None:
        self._delta: Reals | None = delta
        self._examples = examples
        self._initial_version = initial_version

    def seal(
        self,
        terms: Terms,
        offer: Offer,
        current_version: int,
        now: float,
        entropy: Entropy,
        tag: bytes = b"",
    ) -> SealedUpdate:
        """Masks the update and seals its seed for this offer. Raising leaves it unsealed.

        `tag`: what this device has drawn for these public parameters, if they are private.
        """
        if self._delta is None:
            message = "this update was already sealed: send the same bytes again, or drop it"
            raise UpdateError("already_sealed", message)
        parameters = terms.parameters
        if len(tag) != (channel.DEVICE_TAG_BYTES if parameters.is_private else 0):
            raise UpdateError("tag", f"a tag of {len(tag)} bytes for {parameters.scheme}")
        parameters_hash = parameters.digest()
        offer.verify(terms.identity_public_key, parameters_hash, now)
        staleness = current_version - self._initial_version
        weight, damping = weight_and_damping(parameters, self._examples, staleness)
        seed, private_key = entropy(SEED_BYTES), entropy(KEY_BYTES)
        masked = _masked(self._delta, weight, damping, parameters, seed)
        sealed = channel.seal(seed, private_key, offer.key, offer.context(parameters_hash), tag)
        self._delta = None
        return SealedUpdate(parameters_hash, offer.index, sealed, masked)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # Covers copy, deepcopy and pickle: a copy could be sealed a second time.
        raise TypeError("an unsealed update cannot be copied")


def _masked(
    delta: Reals, weight: float, damping: float, parameters: PublicParameters, seed: bytes
) -> Words:
    """The update times its weight, then the weight unless there is noise, then 1; all of it plus
    the mask.
    """
    if delta.shape != (parameters.length,):
        message = f"update of shape {delta.shape} for {parameters.length} parameters"
        raise UpdateError("length", message)
    if parameters.weighting == "none":
        _check_counts(delta, parameters.clip)
    factor = weight * damping * parameters.scale
    masked = np.empty(parameters.vector_words, parameters.ring.word)
    masked[-1] = 1
    encoder: Encoder | RandomEncoder = Encoder(factor, parameters.most_steps)
    if parameters.is_private:
        _encode_within(delta, factor, parameters.levels, masked[:-1])
    elif parameters.ring == RING_16:
        encoder = RandomEncoder(factor, parameters.levels, seed)
        encoder.encode_weight_into(weight * parameters.levels, masked[-2:-1])
    else:
        masked[-2] = round(weight * parameters.levels)
    mask = Mask(seed)
    scratch = np.empty(min(masked.size, BLOCK), parameters.ring.word)
    for block in blocks(masked.size):
        part = masked[block]
        values = delta[block]
        if values.size and not parameters.is_private:
            encoder.encode_into(values, part[: values.size])
        words = scratch[: part.size]
        mask.next_into(words)
        np.add(part, words, out=part)
    masked.flags.writeable = False
    return masked


def _encode_within(delta: Reals, factor: float, longest: int, words: Words) -> None:
    """Encode, and shrink the update until its words are not longer than this."""
    while True:
        encoder = Encoder(factor, longest)
        for block in blocks(delta.size):
            encoder.encode_into(delta[block], words[block])
        found = squared_length(words)
        if found <= longest * longest:
            return
        factor *= longest / math.sqrt(found) * _A_LITTLE_LESS


def squared_length(words: Words) -> int:
    """The sum of the squares of signed words, exactly."""
    total = 0
    for block in blocks(words.size):
        values = words[block].view(SIGNED).astype(np.int64)
        high, low = values >> 16, values & 0xFFFF
        # Each product is below 2^32, and a block has 2^17 words.
        squares, crossed, rest = int(high @ high), int(high @ low), int(low @ low)
        total += (squares << 32) + (crossed << 17) + rest
    return total


def _check_counts(values: Reals, most: float) -> None:
    """Refuses NaN and infinity too."""
    with np.errstate(invalid="ignore"):
        are_counts = (np.rint(values) == values) & (np.abs(values) <= most)
    if not are_counts.all():
        raise UpdateError("not_a_count", f"not whole numbers of at most {most:.0f}")


@dataclass(frozen=True, slots=True, eq=False)
class SealedUpdate:
    """What leaves the device. Only the TSA can learn anything from it."""

    parameters_hash: bytes
    index: int
    sealed: bytes
    masked: Words
