"""Looks up names that clients may have chosen, and starts the threads that look up all others.

Lookups of names that clients may have chosen have threads of their own, so strangers delay nobody
else. The threads are daemons: a lookup that hangs does not delay the end of the process.
Connections for one name share a lookup, and its answer is used for 10 s. It is used for longer only
while the resolver does not answer.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

from papaya.http.sockets import Address

Found = list[tuple[Any, ...]]
"""What `getaddrinfo` returns."""

_AT_ONCE = 2
_MAX_LOOKUPS = 64  # that wait or run
_LOOKUP_S = 1.0
_FRESH_S = 10.0
_MAX_KNOWN = 4096
_MAX_THREADS = 1024  # MAX_THREADPOOL_SIZE of libuv
_END_S = 10.0

_Answer = asyncio.Future[Found]


class Lookups:
    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Address, _Answer] | None] = SimpleQueue()
        self._threads = 0
        self._open: dict[Address, _Answer] = {}  # lookups that have not ended
        self._known: dict[Address, tuple[Found, float]] = {}  # with the time when it gets old

    async def find(self, where: Address) -> Found:
        """At least one address. Raises OSError; `gaierror` if the name is the reason."""
        with suppress(socket.gaierror):  # an IP address needs no lookup
            return _addresses(where, socket.AI_NUMERICHOST)
        known = self._known.get(where)
        if known is not None and asyncio.get_running_loop().time() < known[1]:
            return known[0]
        try:
            answer = self._begin(where)
            await asyncio.wait((answer,), timeout=_LOOKUP_S)
            if not answer.done():
                raise _unresolved(f"its name was not resolved within {_LOOKUP_S:g} s")
            return answer.result()
        except socket.gaierror as error:
            if known is not None and _is_temporary(error):
                return known[0]  # strangers can delay lookups, and servers rarely move
            raise

    def close(self) -> None:
        for _ in range(_AT_ONCE):
            self._queue.put(None)

    def _begin(self, where: Address) -> _Answer:
        answer = self._open.get(where)
        if answer is None:
            if len(self._open) >= _MAX_LOOKUPS:
                raise _unresolved("too many names are being looked up")
            self._start_threads()
            answer = asyncio.get_running_loop().create_future()
            answer.add_done_callback(partial(self._ended, where))
            self._open[where] = answer
            self._queue.put((where, answer))
        return answer

    def _start_threads(self) -> None:
        """At a limit of the operating system, go on with those that run."""
        while self._threads < _AT_ONCE:
            try:
                Thread(target=_work, args=(self._queue,), daemon=True).start()
            except (RuntimeError, MemoryError) as error:
                if not self._threads:
                    raise _unresolved(f"its name cannot be looked up: {error}") from error
                return
            self._threads += 1

    def _ended(self, where: Address, answer: _Answer) -> None:
        del self._open[where]
        error = answer.exception()
        if error is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            fresh_until = asyncio.get_running_loop().time() + _FRESH_S
            self._known[where] = (answer.result(), fresh_until)
        elif not _is_temporary(error):
            self._known.pop(where, None)  # its address may belong to another server by now


def _work(queue: SimpleQueue[tuple[Address, _Answer] | None]) -> None:
    while (work := queue.get()) is not None:
        where, answer = work
        give: partial[None]
        try:
            give = partial(answer.set_result, _addresses(where))
        except Exception as error:
            give = partial(answer.set_exception, error)
        with suppress(RuntimeError):  # the loop has ended
            answer.get_loop().call_soon_threadsafe(give)


async def start_lookup_threads() -> None:
    """uvloop looks names up on threads that start at its first lookup. If one of them cannot start
    then, at a limit on threads, libuv aborts the process. So a server starts them first of all.
    Raises RuntimeError if too few threads can start.
    """
    _try_threads(_threads_of_libuv())
    # An address needs no resolver, which may be slow. Without a type of socket, uvloop uses its
    # threads even for an address.
    with suppress(OSError):
        await asyncio.get_running_loop().getaddrinfo("127.0.0.1", None, flags=socket.AI_NUMERICHOST)


def _threads_of_libuv() -> int:
    """As libuv reads UV_THREADPOOL_SIZE: text after the number is ignored, a negative number means
    the maximum, and 0 or no number means 1.
    """
    found = re.match(r"\s*[+-]?[0-9]+", os.environ.get("UV_THREADPOOL_SIZE", "4"))
    number = int(found[0]) if found else 0
    return _MAX_THREADS if number < 0 else min(max(number, 1), _MAX_THREADS)


def _try_threads(count: int) -> None:
    """Raises RuntimeError unless `count` threads can run at the same time."""
    may_end = Event()
    started: list[Thread] = []
    try:
        for _ in range(count):
            thread = Thread(target=may_end.wait, daemon=True)
            thread.start()
            started.append(thread)
    except (RuntimeError, MemoryError) as error:
        raise RuntimeError(f"only {len(started)} of {count} threads start: {error}") from error
    finally:
        may_end.set()
        for thread in started:
            thread.join()
            _await_end(thread)


def _await_end(thread: Thread) -> None:
    """Wait until the operating system no longer counts the thread: `join` may return before."""
    until = time.monotonic() + _END_S
    while os.path.exists(f"/proc/self/task/{thread.native_id}") and time.monotonic() < until:
        time.sleep(0.001)


def _addresses(where: Address, flags: int = 0) -> Found:
    return list(socket.getaddrinfo(*where, type=socket.SOCK_STREAM, flags=flags))


def _unresolved(why: str) -> socket.gaierror:
    return socket.gaierror(socket.EAI_AGAIN, why)


def _is_temporary(error: BaseException) -> bool:
    """The resolver has not answered. Otherwise there is no such name."""
    return isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
