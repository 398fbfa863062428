"""Names that clients may have chosen: how many are looked up, and for how long answers are used."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from papaya.http import lookups
from papaya.http.lookups import Found, Lookups
from papaya.http.sockets import Address
from tests.unit.http.loopback import LOOPS, PATIENCE_S, run

both_loops = pytest.mark.parametrize("loop", LOOPS)

A, B = ("a.internal", 8750), ("b.internal", 8750)
SOMEWHERE = ("192.0.2.21", 8750)
REAL = lookups._addresses


class Names:
    """Takes the place of the resolver: every name leads to SOMEWHERE, once it may answer."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.at_once = 0  # threads that wait for an answer now
        self.most = 0  # likewise, at any time
        self.may_answer = threading.Event()
        self.error: OSError | None = None  # what it answers instead
        self._lock = threading.Lock()

    def addresses(self, where: Address, flags: int = 0) -> Found:
        if flags:  # an IP address?
            return REAL(where, flags)
        with self._lock:
            self.asked.append(where[0])
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        self.may_answer.wait()
        with self._lock:
            self.at_once -= 1
        if self.error is not None:
            raise self.error
        return REAL(SOMEWHERE)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    made = Names()
    monkeypatch.setattr(lookups, "_addresses", made.addresses)
    monkeypatch.setattr(lookups, "_LOOKUP_S", 10 * PATIENCE_S)
    yield made
    made.may_answer.set()  # no thread is left waiting


class ThreadLimit:
    """The operating system refuses to start more than `left` further threads."""

    def __init__(self, start: Callable[[threading.Thread], None]) -> None:
        self.left = 0
        self.error: Exception = RuntimeError("can't start new thread")
        self.started: list[threading.Thread] = []
        self._start = start

    def start(self, thread: threading.Thread) -> None:
        if not self.left:
            raise self.error
        self.left -= 1
        self._start(thread)
        self.started.append(thread)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> ThreadLimit:
    made = ThreadLimit(threading.Thread.start)

    def start(thread: threading.Thread) -> None:
        made.start(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    return made


async def until_waiting(names: Names, count: int) -> None:
    while names.at_once != count:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(("fresh_s", "asked"), [(10 * PATIENCE_S, 1), (0.0, 3)])
@both_loops
def test_an_answer_is_used_for_a_while(
    loop: str, fresh_s: float, asked: int, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "_FRESH_S", fresh_s)
    names.may_answer.set()

    async def main() -> None:
        own = Lookups()
        for _ in range(3):
            assert await own.find(A) == REAL(SOMEWHERE)
        assert names.asked == [A[0]] * asked
        await own.find(B)
        assert names.asked[asked:] == [B[0]]
        own.close()

    run(main(), loop)


@both_loops
def test_few_names_are_looked_up_at_once(
    loop: str, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One too many fails at once and does not wait for the others."""
    monkeypatch.setattr(lookups, "_MAX_LOOKUPS", 3)

    async def main() -> None:
        own = Lookups()
        finding = [asyncio.create_task(own.find((f"{each}.internal", 1))) for each in range(3)]
        await until_waiting(names, 2)
        with pytest.raises(socket.gaierror, match="too many names are being looked up"):
            await own.find(A)
        names.may_answer.set()
        await asyncio.gather(*finding)
        assert names.most == 2, "each takes a thread"
        await own.find(A)
        own.close()

    run(main(), loop)


@both_loops
def test_all_who_wait_for_a_name_share_a_lookup(
    loop: str, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All devices come back at once after a restart."""
    monkeypatch.setattr(lookups, "_MAX_LOOKUPS", 1)

    async def main() -> None:
        own = Lookups()
        finding = [asyncio.create_task(own.find(A)) for _ in range(20)]
        await until_waiting(names, 1)
        names.may_answer.set()
        assert await asyncio.gather(*finding) == [REAL(SOMEWHERE)] * 20
        assert names.asked == [A[0]]
        own.close()

    run(main(), loop)


@pytest.mark.parametrize("where", [("127.0.0.1", 80), ("::1", 80)])
def test_an_ip_address_needs_no_lookup(
    where: Address, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So names that strangers choose cannot delay it."""
    monkeypatch.setattr(lookups, "_MAX_LOOKUPS", 0)
    assert run(Lookups().find(where))[0][4][:2] == where
    assert names.asked == []


@both_loops
def test_a_resolver_that_does_not_answer_is_given_up(
    loop: str, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "_LOOKUP_S", 0.1)

    async def main() -> None:
        own = Lookups()
        with pytest.raises(socket.gaierror, match=r"not resolved within 0\.1 s"):
            await own.find(A)
        own.close()

    run(main(), loop)


@pytest.mark.parametrize(
    ("code", "is_used"), [(socket.EAI_AGAIN, True), (socket.EAI_NONAME, False)]
)
@both_loops
def test_an_old_answer_is_used_only_while_the_resolver_does_not_answer(
    loop: str, code: int, is_used: bool, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address of a name that is gone may belong to another server."""
    monkeypatch.setattr(lookups, "_FRESH_S", 0.0)
    names.may_answer.set()

    async def main() -> None:
        own = Lookups()
        await own.find(A)
        names.error = socket.gaierror(code, "the resolver's reason")
        for _ in range(2):
            if is_used:
                assert await own.find(A) == REAL(SOMEWHERE)
            else:
                with pytest.raises(socket.gaierror, match="the resolver's reason"):
                    await own.find(A)
        if not is_used:  # and it is forgotten
            names.error = socket.gaierror(socket.EAI_AGAIN, "the resolver is down")
            with pytest.raises(socket.gaierror, match="the resolver is down"):
                await own.find(A)
        own.close()

    run(main(), loop)


def test_what_is_remembered_is_bounded(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "_MAX_KNOWN", 2)
    monkeypatch.setattr(lookups, "_FRESH_S", 10 * PATIENCE_S)
    names.may_answer.set()

    async def main() -> None:
        own = Lookups()
        for each in range(7):
            await own.find((f"{each}.internal", 1))
            assert len(own._known) <= 2
        await own.find(("6.internal", 1))
        assert len(names.asked) == 7
        own.close()

    run(main())


@both_loops
def test_the_threads_end_and_do_not_keep_the_process_alive(loop: str, names: Names) -> None:
    async def main() -> list[threading.Thread]:
        before = set(threading.enumerate())
        own = Lookups()
        finding = asyncio.create_task(own.find(A))
        await until_waiting(names, 1)
        started = [thread for thread in threading.enumerate() if thread not in before]
        own.close()
        names.may_answer.set()
        await finding
        return started

    started = run(main(), loop)
    assert len(started) == 2
    assert all(thread.daemon for thread in started)
    for thread in started:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@both_loops
def test_names_are_looked_up_again_after_a_limit_on_threads(
    loop: str, names: Names, limit: ThreadLimit
) -> None:
    async def main() -> None:
        own = Lookups()
        with pytest.raises(socket.gaierror, match="can't start new thread"):
            await own.find(A)
        limit.left = 1
        finding = [asyncio.create_task(own.find(where)) for where in (A, B)]
        await until_waiting(names, 1)
        names.may_answer.set()
        assert await asyncio.gather(*finding) == [REAL(SOMEWHERE)] * 2
        assert names.most == 1
        own.close()

    run(main(), loop)


@pytest.mark.parametrize(
    ("left", "error"), [(0, RuntimeError("no thread")), (3, MemoryError("no memory"))]
)
def test_the_preparation_raises_if_fewer_threads_can_start_than_libuv_starts(
    left: int, error: Exception, limit: ThreadLimit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libuv would abort the process, so no lookup may begin."""
    monkeypatch.delenv("UV_THREADPOOL_SIZE", raising=False)
    limit.left, limit.error = left, error
    with pytest.raises(RuntimeError, match=f"only {left} of 4 threads start: {error}"):
        run(lookups.start_lookup_threads())
    assert len(limit.started) == left
    assert not any(thread.is_alive() for thread in limit.started)


COUNTED = """
import asyncio, os, threading
import uvloop
from papaya.http.lookups import start_lookup_threads

tried = []
start = threading.Thread.start

def counted(thread):
    tried.append(thread)
    start(thread)

threading.Thread.start = counted

async def main():
    before = len(os.listdir("/proc/self/task"))
    await start_lookup_threads()
    print(len(tried), len(os.listdir("/proc/self/task")) - before)

uvloop.run(main())
"""


@pytest.mark.parametrize("setting", ["", " 6 of them"])
def test_as_many_threads_are_tried_as_libuv_starts(setting: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", COUNTED],
        env=os.environ | {"UV_THREADPOOL_SIZE": setting},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    tried, started = ended.stdout.split()
    assert tried == started


@pytest.mark.parametrize(
    ("setting", "count"), [("0", 1), ("1024", 1024), ("1025", 1024), ("-1", 1024)]
)
def test_the_threads_of_libuv_are_bounded(
    setting: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_THREADPOOL_SIZE", setting)
    assert lookups._threads_of_libuv() == count


AT_A_LIMIT = """
import asyncio, resource, sys, threading
import uvloop
from papaya.http.errors import PeerUnavailable
from papaya.http.lookups import start_lookup_threads
from papaya.http.pool import ConnectionPool

"".encode("idna")  # a codec that the lookup would have to load
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

def limit_threads():
    with open("/proc/self/statm") as sizes:
        used = int(sizes.read().split()[0]) * resource.getpagesize()
    # Room for everything except the stacks of threads: 1 GiB for one of Python, and 8 MiB for each
    # of the 32 of libuv.
    most = used + (128 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, most))
    threading.stack_size(1 << 30)

async def main():
    if sys.argv[1] == "prepared":
        await start_lookup_threads()
    limit_threads()
    if sys.argv[1] == "too late":
        try:
            await start_lookup_threads()
        except RuntimeError as error:
            sys.exit(str(error))
    pool = ConnectionPool()
    try:
        await pool.request("localhost:1", "GET", "/")
    except PeerUnavailable:
        print("unavailable", flush=True)
    await pool.close()

uvloop.run(main())
"""


def at_a_limit(how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", AT_A_LIMIT, how],
        env=os.environ | {"UV_THREADPOOL_SIZE": "32"},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


def test_a_lookup_at_a_limit_on_threads_does_not_end_the_process() -> None:
    """libuv aborts a process that cannot start threads at its first lookup."""
    ended = at_a_limit("prepared")
    assert ended.stdout == "unavailable\n", ended.stderr
    assert at_a_limit("not prepared").returncode == -signal.SIGABRT


def test_without_threads_the_preparation_raises() -> None:
    ended = at_a_limit("too late")
    assert ended.returncode == 1
    assert "can't start new thread" in ended.stderr
