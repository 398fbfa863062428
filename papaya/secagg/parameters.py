"""The public parameters of one task: what device, enclave and auditor must agree on.

Paper, "Deployment with Intel SGX": the quote holds "the hash of public parameters for the
protocol", which the paper lists as the group, the vector length and the threshold. Here they are
all that decides what a sum reveals: also the limits by which a client computes its own weight.
`scheme` names the group, the ciphers, the layout of the vector and every rule of this package; code
that computes anything else must use another name. For a task that its owner has signed they also
name the signed manifest, so that no server can show a device another task than the TSA's quote.

`papaya-secagg-2` is the scheme of differential privacy (docs/privacy.md): the TSA adds noise to
every sum, and the weight is not part of the vector. `papaya-secagg-3` has words of 16 bits, to
which clients round at random (ADR 0087).

One encoding: JSON, keys sorted, no spaces, ASCII, floats as their shortest decimal. The hash is
SHA-256 of exactly these bytes, so `sha256sum` on the published file gives it. Refused
(ParametersError): any other encoding of the same values, values out of bounds, parameters that
leave no fixed-point precision.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Literal, TypeAlias

from papaya.secagg import fixed_point
from papaya.secagg.damping import PAPERS, Damping
from papaya.secagg.errors import ParametersError
from papaya.secagg.words import RING_16, RING_32, Ring

SCHEME: Final = "papaya-secagg-1"
PRIVATE_SCHEME: Final = "papaya-secagg-2"
SCHEME_16: Final = "papaya-secagg-3"
HASH_BYTES: Final = 32
MAX_ENCODED_BYTES: Final = 1024
MAX_LENGTH: Final = 2**30  # coordinates: 4 GiB
EXTRA_WORDS: Final = 2  # after the update: the weight, and the constant 1
PRIVATE_EXTRA_WORDS: Final = 1  # the constant 1
MIN_DELTA: Final = 1e-15
MAX_DELTA: Final = 0.1
MIN_PRIVATE_GOAL: Final = 2
MAX_STALENESS: Final = 2**31
MAX_GOAL: Final = 131_066  # members that one request for a release can name
MAX_NUMBER: Final = 2**53
_TASK: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_MANIFEST: Final = re.compile(r"[0-9a-f]{64}")
_SIGNED: Final = ("manifest", "kind", "number")
_PRIVATE: Final = ("noise_multiplier", "delta", "max_participations", "expected_weight")
_WEIGHTINGS: Final = {
    SCHEME: ("examples", "none", "equal"),
    PRIVATE_SCHEME: ("equal", "capped"),
    SCHEME_16: ("examples", "equal"),
}
_FLOAT32_TINY: Final = 2.0**-126
_FLOAT32_MAX: Final = 2.0**128 * (1 - 2.0**-24)


SumWeighting: TypeAlias = Literal["examples", "none", "equal", "capped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicParameters:
    """Checked when made: whoever holds one holds sensible values.

    `weighting`: "examples" multiplies an update by min(n, max_examples)/max_examples, "equal" gives
    every update the same weight; "none" sums whole numbers of at most `clip` as they are, as an
    evaluation does: nothing is rounded, clamped or damped. With noise: "equal", or "capped", which
    multiplies as "examples" does.

    `damping`: the factor by staleness. The paper's is left out of the encoding.

    `noise_multiplier`, `delta`, `max_participations`, `expected_weight`: of the private scheme
    only. The noise has a standard deviation of `noise_multiplier` x clip. A step is the sum divided
    by members x `expected_weight`, the mean weight that the owner expects. The other two say how
    often a device takes part, and what epsilon refers to.

    `manifest`: the digest of the manifest that the task's owner has signed, in hex; empty if nobody
    has. An evaluation has the manifest of the task that it evaluates, the kind "evaluate", and the
    version that it evaluates as its `number`. Without a manifest the three fields are left out of
    the encoding.
    """

    task: str
    length: int
    aggregation_goal: int
    threshold: int
    clip: float
    max_examples: int
    max_staleness: int
    weighting: SumWeighting = "examples"
    scheme: str = SCHEME
    manifest: str = ""
    kind: Literal["", "train", "evaluate"] = ""
    number: int = 0
    noise_multiplier: float = 0.0
    delta: float = 0.0
    max_participations: int = 0
    expected_weight: float = 0.0
    damping: Damping = PAPERS

    def __post_init__(self) -> None:
        known = self.scheme in tuple(_WEIGHTINGS)  # of any type
        _require("scheme", self.scheme, known, " or ".join(_WEIGHTINGS))
        _require("task", self.task, _is_task(self.task), "1-64 of a-z, 0-9, - and _")
        weightings = _WEIGHTINGS[self.scheme]
        known = self.weighting in weightings
        _require("weighting", self.weighting, known, " or ".join(weightings))
        self._check_signed()
        _require_count("length", self.length, 1, MAX_LENGTH)
        smallest = MIN_PRIVATE_GOAL if self.is_private else 1
        _require_count("aggregation_goal", self.aggregation_goal, smallest, MAX_GOAL)
        _require_count("threshold", self.threshold, 1, self.aggregation_goal)
        _require_count("max_examples", self.max_examples, 1, 2**31 - 1)
        _require_count("max_staleness", self.max_staleness, 0, MAX_STALENESS)
        self._check_private()
        self._check_precision()
        _require("clip", self.clip, _is_positive(self.clip), "a finite number above zero")
        fits = self.step >= _FLOAT32_TINY and self.aggregation_goal * self.clip <= _FLOAT32_MAX
        _require("clip", self.clip, fits, "a clip whose sums and steps are float32")
        counts = self.weighting != "none" or (self.clip.is_integer() and self.clip <= self.levels)
        _require("clip", self.clip, counts, f"a whole number of at most {self.levels} levels")

    def _check_private(self) -> None:
        z, weight = self.noise_multiplier, self.expected_weight
        if not self.is_private:
            none = all(getattr(self, name) == 0 for name in _PRIVATE)
            _require("noise_multiplier", z, none, f"none in {self.scheme}")
            return
        _require("noise_multiplier", z, _is_positive(z), "a finite number above zero")
        known = _is_positive(self.delta) and MIN_DELTA <= self.delta <= MAX_DELTA
        _require("delta", self.delta, known, f"from {MIN_DELTA} to {MAX_DELTA}")
        _require_count("max_participations", self.max_participations, 1, 2**31 - 1)
        largest = 1.0 if self.weighting == "capped" else None
        wanted = "1.0 for equal weights, above 0 and at most 1 for capped ones"
        fits = _is_positive(weight) and (weight <= largest if largest else weight == 1)
        _require("expected_weight", weight, fits, wanted)

    def _check_precision(self) -> None:
        if not self.is_private:
            needed = fixed_point.needed_levels(self.length, self.max_examples, self.ring)
            largest = fixed_point.largest_goal(needed, self.ring)
            enough = self.aggregation_goal <= largest
            why = f"at most {largest}, or no fixed-point precision is left"
            _require("aggregation_goal", self.aggregation_goal, enough, why)
            return
        needed = fixed_point.needed_levels(self.length, 1)
        smallest = fixed_point.SMALLEST_SIGMA
        enough = self.levels >= needed and self.sigma >= smallest
        why = (
            f"with aggregation_goal = {self.aggregation_goal}, leaves {self.levels} levels and "
            f"noise of {float(self.sigma):.3g}; needed are {needed} and {smallest}"
        )
        _require("noise_multiplier", self.noise_multiplier, enough, why)

    def _check_signed(self) -> None:
        named = self.manifest == "" or _is_manifest(self.manifest)
        _require("manifest", self.manifest, named, "64 hex digits")
        kind = "" if not self.manifest else "evaluate" if self.weighting == "none" else "train"
        kinds = ("train", "evaluate") if self.manifest and self.is_private else (kind,)
        _require("kind", self.kind, self.kind in kinds, " or ".join(map(repr, kinds)))
        largest = MAX_NUMBER if self.kind == "evaluate" else 0
        _require_count("number", self.number, 0, largest)

    @property
    def is_private(self) -> bool:
        """Does the TSA add noise?"""
        return self.scheme == PRIVATE_SCHEME

    @property
    def ring(self) -> Ring:
        """Where the words are added."""
        return RING_16 if self.scheme == SCHEME_16 else RING_32

    @property
    def levels(self) -> int:
        """Steps that one coordinate of one client has to either side of zero. With noise, also the
        longest update in steps.
        """
        if self.is_private:
            return fixed_point.private_levels(self.aggregation_goal, self.noise_multiplier)
        return fixed_point.levels(self.aggregation_goal, self.ring)

    @property
    def sigma(self) -> Fraction:
        """The standard deviation of the noise in steps, exactly."""
        return Fraction(self.noise_multiplier) * self.levels

    @property
    def step(self) -> float:
        """What one step of an update's coordinate is worth."""
        return 1.0 if self.weighting == "none" else self.clip / self.levels

    @property
    def scale(self) -> float:
        """The paper's c: steps for a coordinate of 1."""
        return 1.0 if self.weighting == "none" else self.levels / self.clip

    @property
    def most_steps(self) -> int:
        """Of one coordinate of one client, to either side of zero."""
        return int(self.clip) if self.weighting == "none" else self.levels

    @property
    def vector_words(self) -> int:
        """Words of a masked vector: the update, the weight unless there is noise, the constant."""
        return self.length + (PRIVATE_EXTRA_WORDS if self.is_private else EXTRA_WORDS)

    @property
    def vector_bytes(self) -> int:
        return self.vector_words * self.ring.word_bytes

    def encode(self) -> bytes:
        """The one encoding."""
        fields = dataclasses.asdict(self) | {"damping": self.damping.encoded()}
        for name in _left_out(
            is_signed=bool(self.manifest),
            is_private=self.is_private,
            is_damped_otherwise=self.damping != PAPERS,
        ):
            del fields[name]
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    def digest(self) -> bytes:
        """The hash that offers, seals and quotes are bound to."""
        return hashlib.sha256(self.encode()).digest()

    @classmethod
    def decode(cls, data: bytes) -> PublicParameters:
        """Parses bytes from anyone; raises ParametersError and nothing else."""
        if len(data) > MAX_ENCODED_BYTES:
            message = f"{len(data)} bytes, at most {MAX_ENCODED_BYTES}"
            raise ParametersError("encoding", message)
        try:
            fields: Any = json.loads(data)
        except (ValueError, RecursionError):
            raise ParametersError("encoding", "not JSON") from None
        names = sorted(field.name for field in dataclasses.fields(cls))
        found = fields if isinstance(fields, dict) else {}
        is_private = found.get("scheme") == PRIVATE_SCHEME
        left_out = _left_out(
            is_signed="manifest" in found,
            is_private=is_private,
            is_damped_otherwise="damping" in found,
        )
        expected = [name for name in names if name not in left_out]
        if sorted(found) != expected:
            raise ParametersError("encoding", f"not an object of {', '.join(expected)}")
        if "damping" in found:
            found["damping"] = Damping.decoded(found["damping"])
        parameters = cls(**found)
        if parameters.encode() != data:
            raise ParametersError("encoding", "not the canonical encoding of these values")
        return parameters


def _left_out(*, is_signed: bool, is_private: bool, is_damped_otherwise: bool) -> tuple[str, ...]:
    """Fields that are not encoded."""
    return (
        *(() if is_signed else _SIGNED),
        *(() if is_private else _PRIVATE),
        *(() if is_damped_otherwise else ("damping",)),
    )


def _is_task(value: object) -> bool:
    return isinstance(value, str) and _TASK.fullmatch(value) is not None


def _is_manifest(value: object) -> bool:
    return isinstance(value, str) and _MANIFEST.fullmatch(value) is not None


def _is_positive(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value > 0


def _require(field: str, value: object, holds: bool, wanted: str) -> None:
    if not holds:
        raise ParametersError(field, f"{field} = {str(value)[:80]!r}: {wanted}")


def _require_count(field: str, value: object, low: int, high: int) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    _require(field, value, whole, f"a whole number from {low} to {high}")
