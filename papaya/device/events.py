"""What a device tells its own side, an app or a command, about what it does.

Events stay on the device. They name tasks and reasons, never tokens, tickets or examples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from msgspec import Struct

from papaya.client.work import Ending


class Event(Struct, frozen=True, tag=True, tag_field="event"):
    """Something happened at `device`, at `at` seconds since 1970."""

    device: str
    at: float


class StageReached(Event, frozen=True):
    """A visit went on; `stage` is one of `papaya.client.client.Stage`."""

    stage: str
    task: str | None


class VisitEnded(Event, frozen=True, tag="Ended"):
    """A visit is over. `detail` is what the server is not told; `task` is None if none was given
    to the device.
    """

    ending: Ending
    reason: str
    task: str | None
    detail: str = ""


class VisitScheduled(Event, frozen=True, tag="Waiting"):
    """The next visit starts in so many seconds."""

    seconds: float


class NotEligible(Event, frozen=True):
    reasons: tuple[str, ...]


class Troubled(Event, frozen=True):
    """The device's own files cannot be used; it tries again later."""

    problem: str


class SelectorUnreachable(Event, frozen=True, tag="Unreachable"):
    """A server stopped answering. Sent once, until the server answers again."""

    server: str
    problem: str
    hint: str = ""  # empty if there is nothing to suggest


class SelectorReachable(Event, frozen=True, tag="Reachable"):
    server: str


Notify: TypeAlias = Callable[[Event], None]


def nobody(event: Event) -> None:
    """For a device that nobody watches."""
