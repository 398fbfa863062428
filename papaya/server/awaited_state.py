"""The state store for coroutines: the same thread and order as the machines' own operations."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from papaya.messages.storage import Outcome, Row, Transaction
from papaya.server.state_thread import StateThread

T = TypeVar("T")


class AwaitedState:
    """Reads and transactions that can be awaited."""

    def __init__(self, thread: StateThread) -> None:
        self._thread = thread

    async def read(self, prefixes: tuple[str, ...]) -> dict[str, Row]:
        rows: asyncio.Future[dict[str, Row]] = asyncio.get_running_loop().create_future()
        self._thread.read(prefixes, lambda found: _settle(rows, found))
        return await rows

    async def transact(self, transaction: Transaction) -> Outcome:
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._thread.transact(transaction, lambda found: _settle(outcome, found))
        return await outcome


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.done():  # whoever waited may have been cancelled
        future.set_result(result)
