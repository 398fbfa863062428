"""Runs a state store on one thread, for machines and coroutines on an asyncio loop.

    loop ── transact, read ──▶ queue ──▶ thread ──▶ store (blocks on disk syncs and locks)
         ◀── futures, completed in the order of the calls ──

Transactions that wait in the queue together share one disk sync. A read that fails is repeated
until it succeeds, as papaya/machine.py promises; the operations behind it wait. If the store has
lost history, the read raises LostHistory instead, and the process must stop. A write that was not
sent, because there is no connection, is repeated too; no other write is. The queue has no bound:
machines keep few operations in flight.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing, suppress
from queue import SimpleQueue
from threading import Event, Thread
from time import perf_counter
from typing import NamedTuple, Protocol, TypeVar

from papaya.errors import LostHistory, PapayaError, StateUnreachable
from papaya.messages.storage import Outcome, Row, Transaction
from papaya.server.logs import Trouble

logger = logging.getLogger("papaya.store")

MAX_SHARED = 64
FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 0.5  # work goes on soon after a database is back
_READ_FAILED = "the last read failed"
_UNREACHABLE = "the state store cannot be reached"

T = TypeVar("T")


class StateStore(Protocol):
    """A store that blocks. A failed write is an outcome, a failed read raises. Both may raise
    StateUnreachable, if nothing was sent, and LostHistory.
    """

    def transact_all(self, transactions: Sequence[Transaction]) -> list[Outcome]: ...

    def read(self, prefixes: tuple[str, ...]) -> dict[str, Row]: ...

    def close(self) -> None: ...


class AsyncState(Protocol):
    """The same store as code on the loop uses it."""

    def transact(self, transaction: Transaction) -> Awaitable[Outcome]: ...

    def read(self, prefixes: tuple[str, ...]) -> Awaitable[dict[str, Row]]: ...


class _Write(NamedTuple):
    transaction: Transaction
    outcome: asyncio.Future[Outcome]
    asked_at: float


class _Read(NamedTuple):
    prefixes: tuple[str, ...]
    rows: asyncio.Future[dict[str, Row]]


def _unobserved(seconds: float, outcome: Outcome) -> None:
    """No-op."""


class StateThread:
    """Owns the store: `close` closes it. Create and call it on the loop."""

    def __init__(
        self,
        store: StateStore,
        *,
        observe: Callable[[float, Outcome], None] = _unobserved,
        first_retry_s: float = FIRST_RETRY_S,
    ) -> None:
        """`observe` is called on the loop with the duration and the outcome of each transaction."""
        self._store = store
        self._observe = observe
        self._first_retry_s = first_retry_s
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[_Write | _Read | None] = SimpleQueue()
        self.problem = ""  # why the last commit or read failed; empty if it succeeded
        self._trouble = Trouble("state")
        self._closing = Event()
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._thread = Thread(target=self._run, name="papaya-state", daemon=True)
        self._thread.start()

    def transact(self, transaction: Transaction) -> asyncio.Future[Outcome]:
        outcome: asyncio.Future[Outcome] = self._loop.create_future()
        self._queue.put(_Write(transaction, outcome, perf_counter()))
        return outcome

    def read(self, prefixes: tuple[str, ...]) -> asyncio.Future[dict[str, Row]]:
        rows: asyncio.Future[dict[str, Row]] = self._loop.create_future()
        self._queue.put(_Read(prefixes, rows))
        return rows

    async def close(self) -> None:
        """Finish all queued operations, then close the store.

        A read that fails from now on is not repeated, and its future never completes.
        """
        if not self._closing.is_set():
            self._closing.set()
            self._queue.put(None)
        await asyncio.shield(self._closed)
        self._thread.join()  # `_closed` is the last thing the thread sets

    # -- on the loop ------------------------------------------------------------------------

    def _on_outcomes(self, writes: list[_Write], outcomes: Sequence[Outcome]) -> None:
        for write, outcome in zip(writes, outcomes, strict=True):
            _complete(write.outcome, outcome)
        for write, outcome in zip(writes, outcomes, strict=True):
            self._observe(perf_counter() - write.asked_at, outcome)

    # -- on the thread ----------------------------------------------------------------------

    def _run(self) -> None:
        """Close the store and complete `_closed`, even after an error."""
        try:
            with closing(self._store):
                self._serve()
        except Exception:
            self.problem = "the state store's thread has failed"
            logger.exception(self.problem)
        finally:
            with suppress(RuntimeError):  # the loop is closed: nothing waits for this
                self._loop.call_soon_threadsafe(self._closed.set_result, None)

    def _serve(self) -> None:
        asked = self._queue.get()
        while asked is not None:
            if isinstance(asked, _Write):
                asked = self._write(asked)
            else:
                self._read(asked)
                asked = self._queue.get()

    def _write(self, first: _Write) -> _Write | _Read | None:
        """Commit `first` with the writes queued behind it; return the operation after them."""
        writes = [first]
        while len(writes) < MAX_SHARED and not self._queue.empty():
            asked = self._queue.get()
            if not isinstance(asked, _Write):
                self._commit(writes)
                return asked
            writes.append(asked)
        self._commit(writes)
        return self._queue.get()

    def _commit(self, writes: list[_Write]) -> None:
        try:
            outcomes = self._transact([write.transaction for write in writes])
        except PapayaError as error:
            logger.error("%s; hint: %s", error, error.hint)
            outcomes = ["unknown"] * len(writes)
        except Exception:  # a bug in the store must not leave the machines without an outcome
            logger.exception("the state store failed in %d transactions", len(writes))
            outcomes = ["unknown"] * len(writes)
        if len(outcomes) != len(writes):
            logger.error("the state store gave %d of %d outcomes", len(outcomes), len(writes))
            outcomes = ["unknown"] * len(writes)
        if "unknown" in outcomes:
            self.problem = "the last commit failed"
            self._trouble.begins(self.problem)
        else:
            self._works()
        self._loop.call_soon_threadsafe(self._on_outcomes, writes, outcomes)

    def _transact(self, transactions: list[Transaction]) -> list[Outcome]:
        wait_s = self._first_retry_s
        while True:
            try:
                return self._store.transact_all(transactions)
            except StateUnreachable as error:
                self._on_unreachable(error)
                if self._closing.wait(wait_s):
                    raise
            wait_s = min(2 * wait_s, LONGEST_RETRY_S)

    def _read(self, read: _Read) -> None:
        wait_s = self._first_retry_s
        while True:
            try:
                rows = self._store.read(read.prefixes)
            except LostHistory as error:
                self.problem = str(error)
                self._trouble.begins(self.problem)
                self._loop.call_soon_threadsafe(_fail, read.rows, error)
                return
            except StateUnreachable as error:
                self._on_unreachable(error)
            except PapayaError as error:
                self.problem = _READ_FAILED
                self._trouble.begins(str(error))
                logger.error("%s; retrying in %.1f s; hint: %s", error, wait_s, error.hint)
            except Exception:
                self.problem = _READ_FAILED
                self._trouble.begins(_READ_FAILED)
                logger.exception("cannot read %s; retrying in %.1f s", read.prefixes, wait_s)
            else:
                if self.problem in (_READ_FAILED, _UNREACHABLE):
                    self._works()
                self._loop.call_soon_threadsafe(_complete, read.rows, rows)
                return
            if self._closing.wait(wait_s):
                return
            wait_s = min(2 * wait_s, LONGEST_RETRY_S)

    def _works(self) -> None:
        self.problem = ""
        self._trouble.ends()

    def _on_unreachable(self, error: StateUnreachable) -> None:
        if self.problem != _UNREACHABLE:  # log the first attempt of a long failure only
            self.problem = _UNREACHABLE
            self._trouble.begins(str(error))
            logger.error("%s; retrying; hint: %s", error, error.hint)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _complete(future: asyncio.Future[T], result: T) -> None:
    if not future.done():  # a coroutine that waited for it may have been cancelled
        future.set_result(result)
