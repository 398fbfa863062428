"""Who is in the buffer of a version to come (paper, "the aggregation goal").

A buffer holds exactly K; the next upload opens the next buffer. A member passes through three
states: folding (its place is taken), folded (it is in the sum), durable (it is in the committed
record, and only then acknowledged).
"""

from __future__ import annotations

from papaya.errors import InvariantError
from papaya.messages.base import SessionId
from papaya.messages.storage import Member, RecordRow


class Buffer:
    """Invariants: durable <= folded; folded + folding <= goal.

    A lost one had seeds at a TSA that is gone: no client's work is put into it any more,
    and it is given up as soon as what it holds is durable.
    """

    def __init__(self, target: int, goal: int) -> None:
        self.target = target
        self.goal = goal
        self.folding: dict[SessionId, Member] = {}
        self.folded: dict[SessionId, Member] = {}
        self.durable = 0
        self.is_lost = False

    @classmethod
    def of_record(cls, record: RecordRow, goal: int) -> Buffer:
        buffer = cls(record.target, goal)
        buffer.folded = {member.session: member for member in record.members}
        buffer.durable = len(record.members)
        return buffer

    @property
    def has_room(self) -> bool:
        return not self.is_lost and len(self.folded) + len(self.folding) < self.goal

    @property
    def is_full(self) -> bool:
        """It takes no more."""
        return self.is_lost or len(self.folded) >= self.goal

    @property
    def is_closed(self) -> bool:
        """Full and durable: ready to become a version."""
        is_settled = not self.folding and not self.is_dirty
        return self.durable >= self.goal or (self.is_lost and is_settled)

    @property
    def is_dirty(self) -> bool:
        return len(self.folded) > self.durable

    def has(self, session: SessionId) -> bool:
        return session in self.folding or session in self.folded

    def fold(self, session: SessionId) -> Member:
        """The update is in the sum. Says so again when a snapshot told it first."""
        if session in self.folding:
            self.folded[session] = self.folding.pop(session)
        return self.folded[session]

    def check(self) -> None:
        if self.durable > len(self.folded) or len(self.folded) + len(self.folding) > self.goal:
            raise InvariantError(
                f"buffer {self.target}: {self.durable} durable, {len(self.folded)} folded, "
                f"{len(self.folding)} folding, goal {self.goal}"
            )
