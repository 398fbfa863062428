"""Threads that take jobs from the same place, and what they do at a limit on threads.

    there is work ──▶ wake ──▶ a thread that waits, or a new one ──▶ find ──▶ job() ──▶ find ──▶ …

A thread starts when there is work, and ends when there has been none for a while. At a limit
(pids.max, TasksMax, ulimit -u) a crew goes on with the threads that it has. If it has none, it
calls `on_limit` and tries again with back-off.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Condition, RLock, Thread, current_thread
from typing import Final, TypeVar

logger = logging.getLogger("papaya.workers")

FIRST_RETRY_S: Final = 0.1
LONGEST_RETRY_S: Final = 5.0

CrewJob = Callable[[], object]
Found = TypeVar("Found")


class NoThread(OSError):
    """No thread can start: this process is at a limit of the operating system."""


def call_on(
    loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object
) -> None:
    """Call it on the loop, from any thread. No-op if the loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)


async def on_thread(function: Callable[..., Found], *arguments: object) -> Found:
    """`asyncio.to_thread`, but at a limit it raises NoThread and does not make the call."""
    made: Future[Found] = Future()
    try:
        asyncio.get_running_loop().run_in_executor(None, _make, [made], function, arguments)
    except (RuntimeError, MemoryError) as error:
        # The executor has queued the call before it needs a thread, so another one may make it.
        if made.cancel():
            raise NoThread(str(error)) from error
    waiting = asyncio.wrap_future(made)
    try:
        return await waiting
    finally:
        del made, waiting  # an exception that they hold would keep this frame alive, and so itself


def _make(
    given: list[Future[Found]], function: Callable[..., Found], arguments: tuple[object, ...]
) -> None:
    """Make a call, unless its future was cancelled. The future is taken out of `given`, because it
    may hold an exception, which holds the frames of its callers.
    """
    made = given.pop()
    if not made.set_running_or_notify_cancel():
        return
    try:
        found = function(*arguments)
    except BaseException as error:
        made.set_exception(error)
        del made
    else:
        made.set_result(found)


def retry_delay_s(attempts: int, first_s: float = FIRST_RETRY_S) -> float:
    """The delay before the next attempt, after `attempts` failed ones."""
    return min(first_s * 2.0 ** min(attempts - 1, 100), LONGEST_RETRY_S)


def _ignore(attempts: int, why: str | None) -> None:
    """No-op."""


class Crew:
    """Up to `most` threads. Call it with `lock` held, on any thread."""

    def __init__(
        self,
        name: str,
        most: int,
        find: Callable[[], CrewJob | None],
        lock: RLock,
        loop: asyncio.AbstractEventLoop,
        *,
        life_s: float | None = None,
        first_retry_s: float = FIRST_RETRY_S,
        on_limit: Callable[[int, str | None], None] = _ignore,
    ) -> None:
        """`find` returns a job that may run now, or None. It is called with `lock` held.

        `life_s`: how long a thread waits for work. None: forever. `on_limit` is called each time
        that the first thread cannot start, with the number of failed attempts and the reason, and
        once when it has started, with None as the reason.
        """
        self._name = name
        self._most = most
        self._find = find
        self._lock = lock
        self._changed = Condition(lock)
        self._life_s = life_s
        self._first_retry_s = first_retry_s
        self._on_limit = on_limit
        self._loop = loop
        self._threads: set[Thread] = set()
        self._waiting = 0  # threads that wait for work
        self._attempts = 0  # failed attempts to start the first thread
        self._is_stopped = False
        self._ending: tuple[Thread, ...] = ()  # those that `ended` waits for
        self._has_ended = asyncio.Event()

    @property
    def size(self) -> int:
        return len(self._threads)

    @property
    def is_in_use(self) -> bool:
        """It has threads, or tries to start one."""
        return bool(self._threads or self._attempts)

    def fill(self) -> None:
        """Start all threads. Raises RuntimeError at a limit."""
        while len(self._threads) < self._most:
            self._start()

    def wake(self) -> None:
        """Call it when there is work. If more work may run beside the job that `find` returns,
        `find` must call it too. It does not raise, so that `find` does not lose the job.
        """
        if self._waiting:
            self._changed.notify()
        elif self._threads or not self._attempts:
            self._enlarge()

    def stop(self) -> None:
        """Let all threads end after their job; `ended` waits for them."""
        self._is_stopped = True
        self._ending = tuple(self._threads)
        self._changed.notify_all()
        if not self._threads:
            self._has_ended.set()

    async def ended(self) -> None:
        """Call it without the lock. Needs no thread, so that it works at a limit."""
        await self._has_ended.wait()
        for thread in self._ending:
            thread.join()  # it has nothing left to do

    # -- starting threads -------------------------------------------------------------------

    def _enlarge(self) -> None:
        if self._is_stopped or len(self._threads) >= self._most:
            return
        try:
            self._start()
        except (RuntimeError, MemoryError) as error:
            if not self._threads:
                self._attempts += 1
                delay_s = retry_delay_s(self._attempts, self._first_retry_s)
                call_on(self._loop, self._loop.call_later, delay_s, self._try_again)
                self._tell(self._attempts, str(error))
            return
        if self._attempts:
            attempts, self._attempts = self._attempts, 0
            self._tell(attempts, None)

    def _tell(self, attempts: int, why: str | None) -> None:
        try:
            self._on_limit(attempts, why)
        except Exception:
            logger.exception("the limit on threads of %s cannot be reported", self._name)

    def _try_again(self) -> None:
        with self._lock:
            self._enlarge()

    def _start(self) -> None:
        thread = Thread(target=self._run, name=self._name, daemon=True)
        thread.start()
        self._threads.add(thread)

    # -- on the threads ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                try:
                    job()
                except Exception:
                    logger.exception("a job of %s failed unexpectedly", self._name)
        except Exception:
            logger.exception("a thread of %s cannot find a job, and ends", self._name)
            with self._lock:
                self._leave()

    def _next(self) -> CrewJob | None:
        """Wait for a job. None means that the thread has to end."""
        is_over = False
        with self._lock:
            while not self._is_stopped:
                job = self._find()
                if job is not None:
                    return job
                if is_over:
                    break
                self._waiting += 1
                try:
                    is_over = not self._changed.wait(self._life_s)
                finally:
                    self._waiting -= 1
            self._leave()
            return None

    def _leave(self) -> None:
        self._threads.remove(current_thread())
        if self._is_stopped and not self._threads:
            call_on(self._loop, self._has_ended.set)
