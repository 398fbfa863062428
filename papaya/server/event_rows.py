"""Keeps events as rows, so that every server can show what happened at any of them, also before a
restart (docs/adr/0084).

    log(event) ──▶ waiting (bounded) ──▶ one transaction every two seconds ──▶ rows `event/…`

Only events that a timeline needs are kept: no versions, no changes by people (the audit trail has
them), no evaluation without trouble, and of equal events the first ten within a minute.
Coordinators delete the oldest rows. If the state store is away, events wait for it with the times
at which they happened. A process that is killed loses those of its last two seconds; its log has
them, except perhaps the last one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import Final

import msgspec

from papaya.messages.base import TaskId
from papaya.messages.events import (
    ChangeMade,
    ChangeRefused,
    CredentialsRejected,
    ServerEvent,
    TaskFound,
    VersionPublished,
)
from papaya.messages.owner import is_evaluation_id
from papaya.messages.storage import EVENTS, EventRow, Row, Transaction, event_key
from papaya.server.logs import FewOfEach
from papaya.server.state_thread import AsyncState

MAX_ROWS: Final = 2000
MAX_WAITING: Final = 500
_EVERY_S: Final = 2.0
_PRUNE_EVERY_S: Final = 60.0
_AT_ONCE: Final = 200
_LEFT_OUT: Final = (
    VersionPublished,
    TaskFound,
    ChangeMade,
    ChangeRefused,
    CredentialsRejected,
)


class EventRows:
    """The events of one process. `offer` may be called by any thread."""

    def __init__(self, process: str, now: Callable[[], float] = time.time) -> None:
        self._process = process
        self._now = now
        self._state: AsyncState | None = None
        self._waiting: deque[tuple[str, EventRow]] = deque(maxlen=MAX_WAITING)
        self._few = FewOfEach()
        self._number = 0
        self._lock = Lock()

    def open(self, state: AsyncState) -> None:
        """Events that were offered before wait for this."""
        self._state = state

    def offer(self, event: ServerEvent, node: str) -> None:
        fields = {name: value for name, value in event.fields.items() if name != "settings"}
        if isinstance(event, _LEFT_OUT) or _is_routine(event, str(fields.get("task", ""))):
            return
        body, now = msgspec.json.encode(fields), self._now()
        row = EventRow(now, node or self._process, event.name(), event.level, body)
        with self._lock:
            if self._few.passes(event, now):
                self._number += 1
                self._waiting.append((event_key(now, self._process, self._number), row))

    async def run(self, *, prunes: bool) -> None:
        """Write until cancelled."""
        pruned_at = 0.0
        while True:
            await asyncio.sleep(_EVERY_S)
            await self.write()
            if prunes and self._now() >= pruned_at + _PRUNE_EVERY_S:
                pruned_at = self._now()
                await self.prune()

    async def write(self) -> None:
        """Write what waits. A transaction whose outcome is unknown is repeated: its keys are its
        own.
        """
        while self._waiting and self._state is not None:
            with self._lock:
                batch = tuple(self._waiting)[:_AT_ONCE]
            if await self._state.transact(Transaction(put=batch)) != "committed":
                return
            with self._lock:
                for written in batch:
                    if (
                        self._waiting and self._waiting[0] is written
                    ):  # else it was dropped meanwhile
                        self._waiting.popleft()

    async def write_last(self, seconds: float) -> None:
        """Before the process stops, unless the state store does not answer."""
        try:
            async with asyncio.timeout(seconds):
                await self.write()
        except TimeoutError:
            return

    async def prune(self) -> None:
        """Delete the oldest rows. Several processes may do it at the same time."""
        if self._state is None:
            return
        rows: dict[str, Row] = await self._state.read((EVENTS,))
        for start in range(0, max(0, len(rows) - MAX_ROWS), _AT_ONCE):
            old = tuple(rows)[start : min(start + _AT_ONCE, len(rows) - MAX_ROWS)]
            await self._state.transact(Transaction(delete=old))


def _is_routine(event: ServerEvent, task: TaskId) -> bool:
    """An evaluation comes and goes: there may be one a minute."""
    return event.level in ("debug", "info") and is_evaluation_id(task)
