"""Writes and reads the audit trail (`papaya/messages/audit_trail.py`).

A change and its row are one transaction that requires the head of the trail. If another change was
first, only the row is made anew: the change itself still requires the rows that it was made from.
The trail grows by one row per change or refused attempt; of one actor's refused attempts, at most
20 in an hour and a process have a row, and the next row says how many had none. `prune` deletes
rows that were exported, and keeps the number and digest where the rest continues.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from papaya.errors import OperatorError, PapayaError
from papaya.messages.audit_trail import (
    AUDIT_HEAD_KEY,
    AUDIT_START_KEY,
    DONE,
    ROWS_PER_PAGE,
    Attempt,
    AuditHeadRow,
    AuditRow,
    AuditStartRow,
    audit_key,
    page_prefix,
    recorded,
)
from papaya.messages.events import ChangeMade, ChangeRefused
from papaya.messages.storage import Outcome, Transaction
from papaya.server.admin.problems import Conflict, Uncertain
from papaya.server.admin.views import AuditPage, PruneTrail
from papaya.server.logs import log
from papaya.server.state_thread import AsyncState

logger = logging.getLogger("papaya.admin")

_ATTEMPTS = 20
_MAX_MADE = 100
MAX_REFUSED_PER_HOUR = 20
_HOUR_S = 3600.0
_MAX_ACTORS = 1000


class Refusals:
    """Limits the rows of refused attempts: somebody with any token could add rows without end."""

    def __init__(self) -> None:
        # By actor: when the hour ends, and attempts in it with and without a row.
        self._seen: dict[str, tuple[float, int, int]] = {}

    def count(self, actor: str, now: float) -> int | None:
        """None if this attempt gets no row; else how many of the actor before it got none."""
        if len(self._seen) >= _MAX_ACTORS:
            self._seen = {name: seen for name, seen in self._seen.items() if now < seen[0]}
        ends, listed, unlisted = self._seen.get(actor, (now + _HOUR_S, 0, 0))
        if now >= ends:
            ends, listed = now + _HOUR_S, 0
        if listed >= MAX_REFUSED_PER_HOUR:
            self._seen[actor] = (ends, listed, unlisted + 1)
            return None
        self._seen[actor] = (ends, listed + 1, 0)
        return unlisted


class AuditTrail:
    """The trail in one state store. Several processes may write to it at the same time."""

    def __init__(self, state: AsyncState, now: Callable[[], float]) -> None:
        self._state = state
        self._now = now
        self._writing = asyncio.Lock()
        # The last changes that were made: what fails after one does not make it a refused one.
        self._made: deque[Attempt] = deque(maxlen=_MAX_MADE)
        self._refusals = Refusals()

    async def transact(self, attempt: Attempt, change: Transaction, result: str = DONE) -> Outcome:
        """Commit a change with its row."""
        async with self._writing:
            for _ in range(_ATTEMPTS):
                head = await self._head()
                row = recorded(change, head, attempt, self._now(), result)
                outcome = await self._state.transact(row)
                if outcome == "committed":
                    if result == DONE:
                        self._made.append(attempt)
                    _tell(attempt, 1 + (0 if head is None else head.number), result)
                if outcome != "refused" or await self._head() == head:
                    return outcome
        return "refused"

    async def refuse(self, attempt: Attempt, error: Exception) -> None:
        """Record an attempt that changed nothing. If it did change something and only its answer
        failed, its own row tells; so it does if the outcome is unknown, once the store answers.
        """
        if isinstance(error, Uncertain) or any(made is attempt for made in self._made):
            return
        problem = str(error) if isinstance(error, PapayaError) else "internal server error"
        unlisted = self._refusals.count(attempt.actor, self._now())
        if unlisted is None:
            log(ChangeRefused(attempt.actor, attempt.action, attempt.target, f"refused: {problem}"))
            return
        more = f"; {unlisted} more refused attempts before it have no row" if unlisted else ""
        if await self.transact(attempt, Transaction(), f"refused: {problem}{more}") != "committed":
            logger.error("the audit trail has no row for the refused %s", attempt.action)

    async def page(self, after: int) -> AuditPage:
        """The rows after this number that still exist, up to the end of their page."""
        found = await self._state.read((AUDIT_HEAD_KEY, AUDIT_START_KEY))
        start, head = found.get(AUDIT_START_KEY), found.get(AUDIT_HEAD_KEY)
        start = start if isinstance(start, AuditStartRow) else AuditStartRow()
        head = head if isinstance(head, AuditHeadRow) else AuditHeadRow()
        after = max(after, start.number)
        rows = (await self._state.read((page_prefix(after + 1),))).values()
        return AuditPage(
            start,
            head,
            tuple(r for r in rows if isinstance(r, AuditRow) and after < r.number <= head.number),
        )

    async def prune(self, request: PruneTrail, attempt: Attempt) -> AuditPage:
        """Delete rows from the oldest on, a page per transaction. Each is an entry of the trail."""
        last = (await self._state.read((audit_key(request.number),))).get(audit_key(request.number))
        if not isinstance(last, AuditRow):
            raise Conflict(
                f"the audit trail has no row {request.number}", hint="papaya audit-trail"
            )
        if last.digest != request.digest:
            raise OperatorError(
                f"row {request.number} of the audit trail differs from the exported one",
                hint="keep the export, and find out who changed the state store",
            )
        start = (await self.page(0)).start
        while start.number < request.number:
            start = await self._prune_page(start, request.number, attempt)
        return await self.page(start.number)

    async def _prune_page(self, start: AuditStartRow, last: int, attempt: Attempt) -> AuditStartRow:
        # Read before the page: if somebody else prunes meanwhile, this row changes.
        found = (await self._state.read((AUDIT_START_KEY,))).get(AUDIT_START_KEY)
        rows = (await self.page(start.number)).rows
        rows = tuple(row for row in rows if row.number <= last)[:ROWS_PER_PAGE]
        if not rows:
            raise Conflict(
                f"row {start.number + 1} of the audit trail is missing", hint="papaya audit-trail"
            )
        following = AuditStartRow(rows[-1].number, rows[-1].digest)
        change = Transaction(
            require=((AUDIT_START_KEY, found),),
            put=((AUDIT_START_KEY, following),),
            delete=tuple(audit_key(row.number) for row in rows),
        )
        outcome = await self.transact(attempt, change)
        if outcome == "unknown":
            raise Uncertain(
                "the outcome is unknown: the state store did not answer",
                hint="run the command again when it does; see the server's log",
            )
        if outcome == "refused":
            raise Conflict("the audit trail changed while this command ran", hint="run it again")
        return following

    async def _head(self) -> AuditHeadRow | None:
        found = (await self._state.read((AUDIT_HEAD_KEY,))).get(AUDIT_HEAD_KEY)
        return found if isinstance(found, AuditHeadRow) else None


def _tell(attempt: Attempt, number: int, result: str) -> None:
    by = (attempt.actor, attempt.action, attempt.target)
    log(ChangeMade(*by, number, attempt.why) if result == DONE else ChangeRefused(*by, result))
