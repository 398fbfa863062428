"""Faults, alone or two at once, and how long acknowledgements and versions took to resume.

What happens is drawn from a seed; when the system recovers is measured. A run is invalid if a
process waited for a core for more than half of a heartbeat: then a server that is alive may look
dead, and recovery times say nothing about the servers. Whether updates were counted right is
judged in any case.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

import msgspec
import psycopg

from papaya.device.load import LoadOutcome
from papaya.errors import OperatorError

_POLL_S = 0.05


class Fault(NamedTuple):
    """`begin` breaks something for `seconds`; `end` returns when it is repaired.

    `end` may be called although `begin` failed. `touches`: what is broken meanwhile.
    """

    name: str
    seconds: float
    begin: Callable[[], None]
    end: Callable[[], None]
    touches: frozenset[str] = frozenset()

    def carry_out(self) -> None:
        try:
            self.begin()
            time.sleep(self.seconds)
        finally:
            self.end()


def together(first: Fault, second: Fault, later_s: float) -> Fault:
    """Two faults in progress at once: the second begins `later_s` after the first."""
    assert not first.touches & second.touches
    threads = ThreadPoolExecutor(2)
    running: list[Future[None]] = []

    def second_later() -> None:
        time.sleep(later_s)
        second.carry_out()

    def begin() -> None:
        running.append(threads.submit(first.carry_out))
        running.append(threads.submit(second_later))

    def end() -> None:
        threads.shutdown()
        for each in running:
            each.result()

    name = f"two: {first.name}; {second.name}"
    return Fault(name, 0.0, begin, end, first.touches | second.touches)


class NotRecovered(AssertionError):
    """A task did not go on in time."""


class Recovery(NamedTuple):
    """Of the task that took longest: `after_s` from the end of the fault to the next
    acknowledgement, `silence_s` the longest time without one since the fault began. `first_s` is
    `after_s` of the task that took shortest. `version_s`: from the end of the fault until every
    task has made a version that did not exist then.
    """

    fault: str
    first_s: float
    after_s: float
    silence_s: float
    version_s: float


class Acknowledgements:
    """The times of `counted` in a file that `papaya load` writes, by task."""

    def __init__(self, file: Path, tasks: Sequence[str]) -> None:
        self._file = file
        self._read_bytes = 0
        self._times: dict[str, list[float]] = {task: [] for task in tasks}

    def since(self, task: str, at: float) -> list[float]:
        self._read()
        return [each for each in self._times[task] if each > at]

    def until(self, count: int, at: float, seconds: float, what: str) -> None:
        """Wait for so many acknowledgements after `at`, in Unix time, of every task."""
        ends_at = time.monotonic() + seconds
        while late := [task for task in self._times if len(self.since(task, at)) < count]:
            if time.monotonic() > ends_at:
                words = f"{', '.join(late)}: not {count} updates were counted"
                raise NotRecovered(f"{words} within {seconds:g} s after {what}")
            time.sleep(_POLL_S)

    def recovery(self, fault: str, began_at: float, ended_at: float, version_s: float) -> Recovery:
        after_s: list[float] = []
        silence_s = 0.0
        for task in self._times:
            resumed_at = self.since(task, ended_at)[0]
            heard = [began_at, *(t for t in self.since(task, began_at) if t <= resumed_at)]
            after_s.append(resumed_at - ended_at)
            silence_s = max(silence_s, *(b - a for a, b in pairwise(heard)))
        return Recovery(fault, min(after_s), max(after_s), silence_s, version_s)

    def _read(self) -> None:
        if not self._file.exists():
            return
        with self._file.open("rb") as file:
            file.seek(self._read_bytes)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.splitlines():
            outcome = msgspec.json.decode(line, type=LoadOutcome)
            if outcome.ending == "counted" and outcome.task in self._times:
                insort(self._times[outcome.task], outcome.at)


class Stalls:
    """How long processes that want to run wait for a core: the longest wait within one heartbeat.

    Of this process, and of `pids`; Linux counts it for each of them.
    """

    def __init__(self, heartbeat_s: float, pids: Callable[[], Sequence[int]] = lambda: ()) -> None:
        self.longest_s = 0.0
        self._heartbeat_s = heartbeat_s
        self._pids = pids
        self._over = Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Stalls:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def is_long(self) -> bool:
        """Whether a live process may have looked dead."""
        return self.longest_s > self._heartbeat_s / 2

    def _watch(self) -> None:
        waited, is_over = self._waited(), False
        while not is_over:
            is_over = self._over.wait(self._heartbeat_s)
            before, waited = waited, self._waited()
            for pid in before.keys() & waited.keys():
                self.longest_s = max(self.longest_s, waited[pid] - before[pid])

    def _waited(self) -> dict[int, float]:
        return {pid: _waited_s(pid) for pid in (os.getpid(), *self._pids())}


def _waited_s(pid: int) -> float:
    """For how long the main thread of a process has waited for a core."""
    try:
        text = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii")
    except OSError:
        return 0.0  # it has ended
    return int(text.split()[1]) / 1e9


class Versions:
    """The newest version of each task, by its rows. `read` is called again if it fails."""

    def __init__(self, read: Callable[[], Mapping[str, int]]) -> None:
        self._read = read

    def newest(self, seconds: float) -> Mapping[str, int]:
        ends_at = time.monotonic() + seconds
        while True:
            try:
                return self._read()
            except (OperatorError, psycopg.Error):
                if time.monotonic() > ends_at:
                    raise
                time.sleep(_POLL_S)

    def until_newer(self, than: Mapping[str, int], seconds: float, what: str) -> None:
        ends_at = time.monotonic() + seconds
        while late := [
            task for task, version in self.newest(seconds).items() if version <= than[task]
        ]:
            if time.monotonic() > ends_at:
                words = f"{', '.join(late)}: updates are counted, but no version was made"
                raise NotRecovered(f"{words} within {seconds:g} s after {what}")
            time.sleep(_POLL_S)


class Limits(NamedTuple):
    """How long a task may take after a fault: to acknowledge an update, and from then on to make a
    version.
    """

    acknowledge_s: float
    version_s: float


def play(
    faults: Iterable[Fault], acknowledged: Acknowledgements, versions: Versions, limits: Limits
) -> list[Recovery]:
    """Raises NotRecovered if a task does not go on within the limits after the end of a fault."""
    found = []
    for fault in faults:
        began_at = time.time()
        say(f"fault: {fault.name}, for {fault.seconds:.1f} s")
        fault.carry_out()
        ended_at = time.time()
        before = versions.newest(limits.acknowledge_s)
        acknowledged.until(1, ended_at, limits.acknowledge_s, fault.name)
        versions.until_newer(before, limits.version_s, fault.name)
        version_s = time.time() - ended_at
        found.append(acknowledged.recovery(fault.name, began_at, ended_at, version_s))
    return found


def in_words(recoveries: list[Recovery], stall_s: float, heartbeat_s: float) -> str:
    """The distribution of recovery times, by kind of fault, and whether the run is valid."""
    kinds: dict[str, list[Recovery]] = {}
    for recovery in recoveries:
        kinds.setdefault(recovery.fault.split(":")[0], []).append(recovery)
    kinds["all"] = recoveries
    lines = [
        "seconds to the next acknowledgement and to the next version of every task after a fault,",
        "and the longest time without an acknowledgement since it began:",
        f"{'fault':<12}  count  median     max  version: median     max  silence: median     max",
    ]
    for kind, found in kinds.items():
        after = [each.after_s for each in found] or [0.0]
        version = [each.version_s for each in found] or [0.0]
        silence = [each.silence_s for each in found] or [0.0]
        lines.append(
            f"{kind:<12}  {len(found):>5}  {statistics.median(after):>6.2f}  {max(after):>6.2f}"
            f"  {statistics.median(version):>15.2f}  {max(version):>6.2f}"
            f"  {statistics.median(silence):>15.2f}  {max(silence):>6.2f}"
        )
    if stall_s > heartbeat_s / 2:
        lines.append(
            f"INVALID: a process waited {stall_s:.2f} s for a core within one heartbeat, which is "
            f"{heartbeat_s:g} s: the times above say nothing about the servers"
        )
    return "\n".join(lines)


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()
