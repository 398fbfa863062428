"""Faults one after the other, and how long acknowledgements took to resume after each.

What happens is drawn from a seed; when the system recovers is measured. A run is invalid if the
machine itself was late by more than half a heartbeat: then a server that is alive may look dead,
and recovery times say nothing about the servers. Whether updates were counted right is judged in
any case.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

from papaya.device.load import LoadOutcome
from tests.chaos.oracle import read_outcomes

_POLL_S = 0.05
_TICK_S = 0.02


class Fault(NamedTuple):
    """`begin` breaks something for `seconds`; `end` returns when it is repaired.

    `end` may be called although `begin` failed.
    """

    name: str
    seconds: float
    begin: Callable[[], None]
    end: Callable[[], None]


class Recovery(NamedTuple):
    """Seconds until an update was acknowledged: after the fault began, and after its end."""

    fault: str
    from_begin_s: float
    from_end_s: float


class Acknowledgements:
    """The times of `counted` in files that `papaya load` writes."""

    def __init__(self, *files: Path) -> None:
        self._files = files

    def outcomes(self) -> list[LoadOutcome]:
        return read_outcomes(*(file for file in self._files if file.exists()))

    def since(self, at: float) -> list[float]:
        return sorted(o.at for o in self.outcomes() if o.ending == "counted" and o.at > at)

    def until(self, count: int, at: float, seconds: float, what: str) -> float:
        """The time of the `count`-th acknowledgement after `at`, in Unix time."""
        ends_at = time.monotonic() + seconds
        while len(found := self.since(at)) < count:
            if time.monotonic() > ends_at:
                raise AssertionError(f"no update was counted for {seconds:g} s after {what}")
            time.sleep(_POLL_S)
        return found[count - 1]


class Stalls:
    """How late this machine wakes a thread that wants to run: the longest delay so far."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._over = Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Stalls:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.is_set():
            before = time.monotonic()
            time.sleep(_TICK_S)
            self.longest_s = max(self.longest_s, time.monotonic() - before - _TICK_S)


def play(
    faults: Iterable[Fault], acknowledged: Acknowledgements, recover_s: float
) -> list[Recovery]:
    """Fails if no update is acknowledged within `recover_s` after the end of a fault."""
    found = []
    for fault in faults:
        began_at = time.time()
        say(f"fault: {fault.name}, for {fault.seconds:.1f} s")
        try:
            fault.begin()
            time.sleep(fault.seconds)
        finally:
            fault.end()
        ended_at = time.time()
        resumed_at = acknowledged.until(1, ended_at, recover_s, fault.name)
        [first, *_] = acknowledged.since(began_at + _TICK_S)
        found.append(Recovery(fault.name, first - began_at, resumed_at - ended_at))
    return found


def in_words(recoveries: list[Recovery], stall_s: float, heartbeat_s: float) -> str:
    """The distribution of recovery times, by kind of fault, and whether the run is valid."""
    kinds: dict[str, list[float]] = {}
    for recovery in recoveries:
        kinds.setdefault(recovery.fault.split(":")[0], []).append(recovery.from_end_s)
    kinds["all"] = [recovery.from_end_s for recovery in recoveries]
    lines = [f"{'seconds to the next acknowledgement':<38}  count  median    max"]
    lines += [
        f"{kind:<38}  {len(found):>5}  {statistics.median(found):>6.2f}  {max(found):>5.2f}"
        for kind, found in kinds.items()
        if found
    ]
    if stall_s > heartbeat_s / 2:
        lines.append(
            f"INVALID: this machine was late by {stall_s:.2f} s, more than half a heartbeat of "
            f"{heartbeat_s:g} s: the times above say nothing about the servers"
        )
    return "\n".join(lines)


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()
