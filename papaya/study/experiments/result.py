"""What an experiment found, beside what the paper says.

An *input* was calibrated to the paper or taken from it, so its agreement proves nothing. An
*outcome* is a result of the simulation. A *check* is a claim that must hold, or the reproduction
has failed. No outcome is hard-coded here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Literal

from msgspec import Struct


class Finding(Struct, frozen=True, kw_only=True):
    """One number: the paper's in its own words, ours for each seed. None, as JSON has it, stands
    for what is no number, such as hours to a target that was not met.
    """

    name: str
    paper: str
    values: tuple[float | None, ...]
    unit: str = ""
    kind: Literal["outcome", "input"] = "outcome"

    @property
    def numbers(self) -> tuple[float, ...]:
        return tuple(math.nan if value is None else value for value in self.values)

    @property
    def mean(self) -> float:
        return fmean(self.numbers)

    @property
    def spread(self) -> tuple[float, float]:
        """The lowest and the highest of the seeds."""
        return min(self.numbers), max(self.numbers)


class Check(Struct, frozen=True):
    """`detail` has the numbers on which it was decided."""

    claim: str
    holds: bool
    detail: str


class Result(Struct, frozen=True, kw_only=True):
    """One figure or table. `plots` are file names beside the JSON file of the result.

    `made_of` is a digest of scale, seeds and code: one report holds results of the same.
    """

    key: str
    title: str
    paper: str
    findings: tuple[Finding, ...]
    checks: tuple[Check, ...] = ()
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
    """Seed by seed; not a number where `below` was never reached."""
    pairs = zip(above, below, strict=True)
    return tuple(a / b if b and math.isfinite(b) else math.nan for a, b in pairs)
