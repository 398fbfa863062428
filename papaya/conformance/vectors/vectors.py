"""Test vectors of every format that a client reads or writes, most of them invalid.

Each case has a `name`, a `verdict` (`valid` or `invalid`) and its inputs; a valid one may have the
expected outputs. Bytes are hexadecimal. `check` runs a case through the code that the servers and
the reference client run; the tests compare its verdict with the one stated here. Keys and seeds are
fixed, so the files are the same every time.
"""

from __future__ import annotations

from papaya.conformance.vectors import (
    evidence,
    messages,
    public_log,
    secure_aggregation,
    updates,
)
from papaya.conformance.vectors.cases import Case, VectorFormat
from papaya.errors import PapayaError
from papaya.secagg.errors import SecureAggregationError
from papaya.verifiable_log.errors import LogError

REFUSALS = (PapayaError, SecureAggregationError, LogError)
"""What `check` raises for an invalid case."""

FORMATS: dict[str, VectorFormat] = {
    **messages.FORMATS,
    **updates.FORMATS,
    **secure_aggregation.FORMATS,
    **evidence.FORMATS,
    **public_log.FORMATS,
}
"""By the name of its file."""


def all_vectors() -> dict[str, list[Case]]:
    """The cases of each format, by the name of its file."""
    return {name: list(make()) for name, (make, _) in FORMATS.items()}


def check(name: str, case: Case) -> object:
    """The outputs of a case, or one of `REFUSALS`."""
    return FORMATS[name][1](case)
