"""What an experiment found, beside what the paper says.

A *claim* is a statement of the paper with its number. One rule gives the verdicts on all claims
(`PaperClaim.verdict`). It was written down before the runs to which it is applied. A verdict
changes no exit code. A *check* is about our method: if one fails, the numbers of its experiment are
unreliable. A *finding* is any other number. Findings of kind *input* were calibrated to the paper
or taken from it, so their agreement proves nothing. No outcome is hard-coded here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Final, Literal, NamedTuple, TypeAlias

from msgspec import Struct

ClaimVerdict: TypeAlias = Literal["agrees", "differs", "not comparable"]
Bound: TypeAlias = Literal["", "at most", "at least"]
"""What is known of a number if a run ended before its target; empty if the number is exact."""

TOLERANCE: Final = 0.25
_LEAST_SEEDS: Final = 3
# Student's t for 95 %, by degrees of freedom; from 30 on, the normal distribution is close enough.
_STUDENT: Final = (
    math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179,
    2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060,
    2.056, 2.052, 2.048, 2.045,
)  # fmt: skip
_NORMAL: Final = 1.960


class Seeds(Struct, frozen=True, kw_only=True):
    """One number for each seed. None, as JSON has it, stands for what is no number, such as hours
    to a target that was not reached. `bound`: the mean is only known to be at most or at least that
    of the values.
    """

    values: tuple[float | None, ...]
    unit: str = ""
    bound: Bound = ""

    @property
    def numbers(self) -> tuple[float, ...]:
        return tuple(math.nan if value is None else value for value in self.values)

    @property
    def mean(self) -> float:
        return fmean(self.numbers)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the mean over seeds, open on the side of a bound; not a
        number with one seed.
        """
        count = len(self.numbers)
        if count < 2 or not all(map(math.isfinite, self.numbers)):
            return math.nan, math.nan
        student = _STUDENT[count - 1] if count <= len(_STUDENT) else _NORMAL
        half = student * stdev(self.numbers) / math.sqrt(count)
        low = -math.inf if self.bound == "at most" else self.mean - half
        high = math.inf if self.bound == "at least" else self.mean + half
        return low, high

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        low, high = self.interval
        if self.bound:
            return f"{self.bound} {number(self.mean)}{unit}"
        if not math.isfinite(low):
            return number(self.mean) + unit
        return f"{number(self.mean)}{unit} ({number(low)} to {number(high)})"


class Finding(Seeds, frozen=True, kw_only=True):
    """A number without a claim: `paper` is what the paper says, in its own words, or a dash."""

    name: str
    paper: str = "–"
    kind: Literal["outcome", "input"] = "outcome"


class PaperClaim(Seeds, frozen=True, kw_only=True):
    """A statement of the paper.

    expected   the paper's number
    relation   whether ours should be about the same, or above or below it
    incomparable   why the two numbers cannot be compared, if they cannot
    no_effect  if it is a ratio or a change: the value that it has if both sides are equal
    """

    statement: str
    paper: str
    expected: float
    relation: Literal["about", "above", "below"] = "about"
    incomparable: str = ""
    no_effect: float | None = None

    @property
    def verdict(self) -> ClaimVerdict:
        """One rule for all claims.

        *About*: agrees if the paper's number lies in our interval, or our mean within a quarter of
        the paper's number. *Above* and *below*: agrees if the whole interval does, differs if none
        of it does. Where a run ended before its target, our number is a bound, the interval is open
        on one side, and an *about* can only differ. Not comparable: fewer than three seeds, neither
        of two runs at its target, an interval that decides nothing, or a stated reason.
        """
        low, high = self.interval
        if self.incomparable or len(self.values) < _LEAST_SEEDS or math.isnan(low):
            return "not comparable"
        if self.relation == "about":
            is_near = abs(self.mean - self.expected) <= TOLERANCE * abs(self.expected)
            if not (is_near or low <= self.expected <= high):
                return "differs"
            return "not comparable" if self.bound else "agrees"
        if low <= self.expected <= high:
            return "not comparable"
        return "agrees" if (low > self.expected) == (self.relation == "above") else "differs"

    @property
    def why(self) -> str:
        """Why it is not comparable; empty if it is."""
        if self.incomparable or self.verdict != "not comparable":
            return self.incomparable
        if not all(map(math.isfinite, self.numbers)):
            return "runs ended before they reached their targets"
        if self.bound:
            return "a run ended before it reached its target, and the bound does not decide"
        if len(self.values) < _LEAST_SEEDS:
            return f"fewer than {_LEAST_SEEDS} seeds"
        return "the interval over seeds contains the paper's bound"

    @property
    def share_of_effect(self) -> Seeds | None:
        """Our effect in percent of the paper's, as information: it decides no verdict. None if the
        paper has no number, or ours is unknown.
        """
        if self.no_effect is None or self.relation != "about" or self.incomparable:
            return None
        if not all(map(math.isfinite, self.numbers)):
            return None
        papers = self.expected - self.no_effect
        values = tuple(100 * (value - self.no_effect) / papers for value in self.numbers)
        return Seeds(
            values=values, unit="%", bound=self.bound if papers > 0 else _INVERSE[self.bound]
        )

    @property
    def as_ratio(self) -> Ratios | None:
        """Of a ratio, or of a change in percent. None if it is neither."""
        if self.no_effect is None:
            return None
        known = (math.nan,) * len(self.values) if self.incomparable else self.numbers
        return Ratios(tuple(map(self._ratio, known)), self.bound)

    @property
    def papers_ratio(self) -> Ratios:
        """The paper's number in the unit of `as_ratio`."""
        bounds: dict[str, Bound] = {"about": "", "above": "at least", "below": "at most"}
        return Ratios((self._ratio(self.expected),), bounds[self.relation])

    def _ratio(self, value: float) -> float:
        return 1 + value / 100 if self.unit == "%" else value


class Check(Struct, frozen=True):
    """A rule of method. `detail` has the numbers on which it was decided."""

    rule: str
    holds: bool
    detail: str


class Result(Struct, frozen=True, kw_only=True):
    """One figure or table. `plots` are file names beside the JSON file of the result.

    `made_of` is a digest of scale, seeds and code: one report holds results of the same.
    """

    key: str
    title: str
    paper: str
    claims: tuple[PaperClaim, ...] = ()
    checks: tuple[Check, ...] = ()
    findings: tuple[Finding, ...] = ()
    plots: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    made_of: str = ""


def number(value: float) -> str:
    """Three digits that matter, thousands in groups."""
    if not math.isfinite(value):  # never reached, or unknown
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if value != 0 and abs(value) < 0.01:
        return f"{value:.1e}"
    return f"{value:.3g}"


def ratios(above: Sequence[float], below: Sequence[float]) -> tuple[float, ...]:
    """Seed by seed; not a number where one of them was never reached."""
    pairs = zip(above, below, strict=True)
    return tuple(
        a / b if b and math.isfinite(b) and math.isfinite(a) else math.nan for a, b in pairs
    )


class Ratios(NamedTuple):
    """One ratio for each seed; with a bound, the mean is at most or at least theirs."""

    values: tuple[float, ...]
    bound: Bound = ""

    @property
    def exact(self) -> tuple[float, ...]:
        """Not numbers if they are only bounds."""
        return (math.nan,) * len(self.values) if self.bound else self.values

    @property
    def changes(self) -> Ratios:
        """In percent."""
        return Ratios(tuple(100 * (value - 1) for value in self.values), self.bound)

    def over(self, other: Ratios) -> Ratios:
        """The ratios of two ratios."""
        return _bounded(ratios(self.values, other.values), self.bound, _INVERSE[other.bound])


_INVERSE: Final[dict[Bound, Bound]] = {"": "", "at most": "at least", "at least": "at most"}


def bounded_ratios(
    above: Sequence[tuple[float, bool]], below: Sequence[tuple[float, bool]]
) -> Ratios:
    """Seed by seed, of (number, whether it is exact): a number that is not is at least this."""
    values = ratios([value for value, _ in above], [value for value, _ in below])
    top: Bound = "" if all(is_exact for _, is_exact in above) else "at least"
    bottom: Bound = "" if all(is_exact for _, is_exact in below) else "at least"
    return _bounded(values, top, _INVERSE[bottom])


def _bounded(values: tuple[float, ...], above: Bound, below: Bound) -> Ratios:
    """`below` is the bound on one divided by what is below. Opposite bounds say nothing."""
    if above and below and above != below:
        return Ratios((math.nan,) * len(values))
    return Ratios(values, above or below)


def changes(after: Sequence[float], before: Sequence[float]) -> tuple[float, ...]:
    """In percent, seed by seed."""
    return tuple(100 * (ratio - 1) for ratio in ratios(after, before))
