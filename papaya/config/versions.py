"""Versions of training engines: "2.6" < "2.13.0" = "2.13"."""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta

EngineVersion = Annotated[str, Meta(pattern=r"\A[0-9]{1,4}(\.[0-9]{1,4}){0,3}\Z")]

_NUMBERS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})*")


def version_number(text: str) -> tuple[int, ...]:
    """A version to compare with others. A suffix after the numbers, as in "2.13.0+cpu", is ignored;
    a text without numbers is lower than every version.
    """
    found = _NUMBERS.match(text)
    if found is None:
        return ()
    parts = [int(part) for part in found[0].split(".")]
    while parts and not parts[-1]:
        del parts[-1]
    return tuple(parts)


def is_at_least(version: str, minimum: str | None) -> bool:
    return minimum is None or version_number(version) >= version_number(minimum)
