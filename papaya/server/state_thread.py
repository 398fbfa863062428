"""A state store on one thread, for machines that live on an asyncio loop.

    loop ── Transact, Read ──▶ queue ──▶ thread ──▶ store (it blocks: syncs, waits for locks)
         ◀── done(outcome | rows), in the order in which they were asked ──

Transactions that wait together share one sync. A read that fails is repeated until it succeeds, as
papaya/machine.py promises; everything behind it waits. It refuses nothing: machines keep few
operations on their way, so the queue needs no bound.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from queue import SimpleQueue
from threading import Event, Thread
from typing import NamedTuple, Protocol

from papaya.errors import PapayaError
from papaya.messages.storage import Outcome, Row, Transaction

logger = logging.getLogger("papaya.store")

MAX_SHARED = 64
FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 5.0
_READ_FAILED = "the last read failed"


class StateStore(Protocol):
    """What is asked of a store. An error of a write is an outcome, an error of a read is raised."""

    def transact_all(self, transactions: Sequence[Transaction]) -> list[Outcome]: ...

    def read(self, prefixes: tuple[str, ...]) -> dict[str, Row]: ...

    def close(self) -> None: ...


class _Write(NamedTuple):
    transaction: Transaction
    done: Callable[[Outcome], None]


class _Read(NamedTuple):
    prefixes: tuple[str, ...]
    done: Callable[[dict[str, Row]], None]


class StateThread:
    """Owns the store: `close` closes it. To be made and called on the loop."""

    def __init__(self, store: StateStore, *, first_retry_s: float = FIRST_RETRY_S) -> None:
        self._store = store
        self._first_retry_s = first_retry_s
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[_Write | _Read | None] = SimpleQueue()
        self.problem = ""  # why the last commit or read failed; empty when it did not
        self._closing = Event()
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._thread = Thread(target=self._run, name="papaya-state", daemon=True)
        self._thread.start()

    def transact(self, transaction: Transaction, done: Callable[[Outcome], None]) -> None:
        self._queue.put(_Write(transaction, done))

    def read(self, prefixes: tuple[str, ...], done: Callable[[dict[str, Row]], None]) -> None:
        self._queue.put(_Read(prefixes, done))

    async def close(self) -> None:
        """Finish what was given, then close the store. A read that fails now is not repeated."""
        if not self._closing.is_set():
            self._closing.set()
            self._queue.put(None)
        await asyncio.shield(self._closed)
        self._thread.join()  # it has nothing left to do

    def _run(self) -> None:
        """However it ends, the store is closed and whoever waits for that is told."""
        try:
            with closing(self._store):
                self._serve()
        except Exception:
            self.problem = "the state store's thread has failed"
            logger.exception(self.problem)
        finally:
            with suppress(RuntimeError):  # the loop is gone: nobody waits
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
        """Commit it together with the writes that wait behind it; give back what comes next."""
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
            outcomes = self._store.transact_all([write.transaction for write in writes])
        except Exception:  # a bug in the store must not stop the machines without a word
            logger.exception("the state store failed in %d transactions", len(writes))
            outcomes = ["unknown"] * len(writes)
        self.problem = "the last commit failed" if "unknown" in outcomes else ""
        for write, outcome in zip(writes, outcomes, strict=True):
            self._loop.call_soon_threadsafe(write.done, outcome)

    def _read(self, read: _Read) -> None:
        wait_s = self._first_retry_s
        while True:
            try:
                rows = self._store.read(read.prefixes)
            except PapayaError as error:
                self.problem = _READ_FAILED
                logger.error("%s; again in %.1f s; hint: %s", error, wait_s, error.hint)
            except Exception:
                self.problem = _READ_FAILED
                logger.exception("a read of %s failed; again in %.1f s", read.prefixes, wait_s)
            else:
                if self.problem == _READ_FAILED:
                    self.problem = ""
                self._loop.call_soon_threadsafe(read.done, rows)
                return
            if self._closing.wait(wait_s):
                return
            wait_s = min(2 * wait_s, LONGEST_RETRY_S)
