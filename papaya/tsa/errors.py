"""What the TSA refuses. The code crosses the wire; the message has values, no secret."""

from __future__ import annotations

from enum import IntEnum


class RefusalReason(IntEnum):
    """Why. Numbers are part of the wire format: never reused, never renumbered."""

    MALFORMED = 1
    INTERNAL = 2
    PARAMETERS = 3
    UNKNOWN_PARAMETERS = 4
    TOO_MANY_TASKS = 5
    TOO_MUCH_MEMORY = 6
    TOO_MANY_OFFERS = 7
    UNKNOWN_INDEX = 10
    INDEX_USED = 11
    REPLAYED = 12
    OFFER_EXPIRED = 13
    SEAL = 14
    OTHER_GROUP = 15
    SAME_DEVICE = 16
    GROUP_FULL = 20
    TOO_MANY_GROUPS = 21
    GROUP_CLOSED = 22
    UNKNOWN_GROUP = 23
    BELOW_THRESHOLD = 30
    ABOVE_GOAL = 31
    NOT_A_MEMBER = 32
    OTHER_LIST = 33
    NO_EVIDENCE = 40
    NOT_AUTHENTICATED = 50
    OTHER_CLUSTER = 51


class TsaRefused(Exception):
    """A request that the TSA does not fulfil. Its state is as before.

    OTHER_GROUP, and nothing else, names the open `group` that has exactly this seed.
    """

    def __init__(self, reason: RefusalReason, message: str, group: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.group = group


class Unavailable(Exception):
    """The TSA cannot be reached, or went away: what it held may be lost."""
