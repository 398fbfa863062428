"""Events that a device reports to its app or command.

Events are not sent to a server. They contain tasks and reasons, never tokens or tickets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from msgspec import Struct

from papaya.client.work import Ending


class Event(Struct, frozen=True, tag=True, tag_field="event"):
    """An event of `device`, at `at` seconds since 1970."""

    device: str
    at: float


class StageReached(Event, frozen=True):
    """A visit reached a stage, one of `papaya.client.client.Stage`."""

    stage: str
    task: str | None


class StepsTrained(Event, frozen=True):
    """A long training or evaluation has done this many of its steps."""

    task: str
    done: int
    steps: int


class VisitEnded(Event, frozen=True, tag="Ended"):
    """A visit is over; `task` is None if none was assigned.

    `reason` is what a server knows, or its text. `detail` (a line) and `explanation` (a traceback)
    are not sent to any server; errors of a task's code may quote examples.
    """

    ending: Ending
    reason: str
    task: str | None
    detail: str = ""
    explanation: str = ""


class VisitScheduled(Event, frozen=True, tag="Waiting"):
    """The next visit starts after `seconds`."""

    seconds: float


class NotEligible(Event, frozen=True):
    reasons: tuple[str, ...]


class Troubled(Event, frozen=True):
    """The device cannot use its own files; it will retry."""

    problem: str


class SelectorUnreachable(Event, frozen=True, tag="Unreachable"):
    """A server stopped answering. Reported once, until it answers again."""

    server: str
    problem: str
    hint: str = ""  # empty if there is nothing to suggest


class SelectorReachable(Event, frozen=True, tag="Reachable"):
    server: str


class UploadRerouted(Event, frozen=True):
    """A direct upload failed, or the address of the aggregator is not allowed. The upload goes on
    through a selector.

    `reason`: `not_allowed`, or that of `papaya.client.work.DirectUploadFailed`.
    """

    server: str
    reason: str
    problem: str
    hint: str = ""  # empty if there is nothing to suggest


Notify: TypeAlias = Callable[[Event], None]


def nobody(event: Event) -> None:
    """No-op."""
