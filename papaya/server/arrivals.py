"""Which bodies are on their way to an aggregator, by upload.

A ticket names one upload, and an upload has a bounded number of bodies under way: else one ticket
could hold every buffer of the pool. When the machine takes an upload's slot back, what arrives for
it is broken off, because nobody wants the rest.
"""

from __future__ import annotations

from typing import Protocol

from papaya.aggregator.upload import ARRIVING, Owner
from papaya.messages.base import SessionId, TaskId


class Body(Protocol):
    def break_off(self) -> None:
        """Answers the peer and takes no more of the body."""
        ...


class ArrivingBodies:
    """Invariant: at most `ARRIVING` bodies for each upload."""

    def __init__(self) -> None:
        self._bodies: dict[Owner, list[Body]] = {}

    def has_room(self, owner: Owner) -> bool:
        return len(self._bodies.get(owner, ())) < ARRIVING

    def add(self, owner: Owner, body: Body) -> None:
        self._bodies.setdefault(owner, []).append(body)

    def remove(self, owner: Owner, body: Body) -> None:
        """It is whole or broken."""
        bodies = self._bodies.get(owner, [])
        if body in bodies:
            bodies.remove(body)
            if not bodies:
                del self._bodies[owner]

    def break_off(self, task: TaskId, session: SessionId | None) -> None:
        """Those of one session, or all of the task."""
        if session is not None:
            owners = [(task, session)]
        else:
            owners = [owner for owner in self._bodies if owner[0] == task]
        for owner in owners:
            for body in self._bodies.pop(owner, ()):
                body.break_off()
