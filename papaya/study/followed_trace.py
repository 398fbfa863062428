"""A trace that another process is still recording, so that learning needs not wait for its end.

    with follow(plan) as followed:
        curve = learn(followed, workload, rates)     # waits for a version that is not there yet
        trace, report = followed.whole()

The machines run in a process of their own (record_process.py), which sends the columns of a trace
as they grow; a thread here collects them. The trace and all that is learnt along it are the same as
after a recording, bit for bit: only the time at which versions are known differs.

How many versions there will be has to be known beforehand, since it decides which of them are
judged: a plan is followed if it ends after a number of updates. Its versions have K members each.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

import papaya
from papaya.config import TaskConfig
from papaya.errors import InvariantError, OperatorError
from papaya.sim.report import RunReport
from papaya.study.trace import (
    MEMBER_KINDS,
    MOST_HOURS,
    UNBOUNDED,
    VERSION_KINDS,
    Trace,
    trace_of,
)

if TYPE_CHECKING:
    from papaya.study.run import RecordingPlan

_LENGTH_BYTES: Final = 8
_FIRST_ROWS: Final = 1024


class TracePart(Struct, tag="part"):
    """Rows that are new: the columns of versions and of members, and how far the recording is."""

    versions: list[bytes]
    members: list[bytes]
    now_s: float


class TraceEnd(Struct, tag="end"):
    """The recording is over; its report is encoded as in `Recording`."""

    report: bytes


def can_follow(plan: RecordingPlan) -> bool:
    """Whether it is known how many versions the plan records."""
    return plan.hours >= MOST_HOURS and plan.drain_s == 0 and plan.updates < UNBOUNDED


class FollowedTrace:
    """What has been recorded so far. One thread adds, another one waits and reads."""

    def __init__(self, plan: RecordingPlan) -> None:
        self._plan = plan
        self._versions = [_Growing(kind) for kind in VERSION_KINDS]
        self._members = [_Growing(kind) for kind in MEMBER_KINDS]
        self._changed = threading.Condition()
        self._report: RunReport | None = None
        self._problem: str | None = None
        self._known: Trace | None = None  # what was read last
        self.now_s = 0.0

    @property
    def seed(self) -> int:
        return self._plan.seed

    @property
    def task(self) -> TaskConfig:
        return self._plan.task

    @property
    def versions(self) -> int:
        """How many there will be, at least."""
        return math.ceil(self._plan.updates / self._plan.task.aggregation_goal)

    @property
    def counted(self) -> int:
        return len(self._members[0])

    def until(self, version: int) -> Trace:
        """The trace with at least this version. Waits for it."""
        if self._known is None or self._known.versions < version:
            with self._changed:
                self._changed.wait_for(lambda: len(self._versions[0]) >= version or self._is_over)
                if len(self._versions[0]) < version:
                    raise self._failure(f"it ended before version {version}")
                self._known = self._trace()
        return self._known

    def whole(self) -> tuple[Trace, RunReport]:
        """All of it. Waits for its end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over)
            if self._report is None:
                raise self._failure("there is no report")
            return self._trace(), self._report

    def collect(self, stream: IO[bytes], tell: Callable[[FollowedTrace], None]) -> None:
        """Read what the process sends, until it ends."""
        try:
            while len(length := stream.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
                found = msgspec.msgpack.decode(
                    stream.read(int.from_bytes(length, "big")), type=TracePart | TraceEnd
                )
                with self._changed:
                    self._add(found)
                    self._changed.notify_all()
                tell(self)
        finally:
            with self._changed:
                if self._report is None:
                    self._problem = "the process that records ended early"
                self._changed.notify_all()

    @property
    def _is_over(self) -> bool:
        return self._report is not None or self._problem is not None

    def _add(self, found: TracePart | TraceEnd) -> None:
        if isinstance(found, TraceEnd):
            self._report = msgspec.msgpack.decode(found.report, type=RunReport)
            return
        self.now_s = found.now_s
        # Members first: whoever knows of a version finds its members.
        for column, rows in zip(self._members, found.members, strict=True):
            column.extend(rows)
        for column, rows in zip(self._versions, found.versions, strict=True):
            column.extend(rows)

    def _trace(self) -> Trace:
        versions = [column.rows for column in self._versions]
        members = [column.rows for column in self._members]
        return trace_of(self._plan.cluster, self._plan.seed, versions, members)

    def _failure(self, what: str) -> OperatorError | InvariantError:
        if self._problem is None:
            return InvariantError(f"a recording of {self.counted} updates: {what}")
        return OperatorError(
            f"{self._problem}: see its messages above",
            hint="run the command again; if it was killed, the machine may be out of memory",
        )


class _Growing:
    """A column; its memory doubles, so that adding to it is cheap. Rows never change."""

    def __init__(self, kind: str) -> None:
        self._all: npt.NDArray[Any] = np.empty(_FIRST_ROWS, np.dtype(kind))
        self._used = 0

    def __len__(self) -> int:
        return self._used

    @property
    def rows(self) -> npt.NDArray[Any]:
        return self._all[: self._used]

    def extend(self, data: bytes) -> None:
        new = np.frombuffer(data, self._all.dtype)
        needed = self._used + len(new)
        if needed > len(self._all):
            larger = np.empty(max(needed, 2 * len(self._all)), self._all.dtype)
            larger[: self._used] = self.rows
            self._all = larger
        self._all[self._used : needed] = new
        self._used = needed


@contextmanager
def follow(
    plan: RecordingPlan, tell: Callable[[FollowedTrace], None] = lambda followed: None
) -> Iterator[FollowedTrace]:
    """Record in another process, which ends with the context. `tell` is called in a thread."""
    if not can_follow(plan):
        raise InvariantError("a recording of a number of hours cannot be followed")
    found = os.environ.get("PYTHONPATH")
    paths = [str(Path(papaya.__file__).parent.parent), *([found] if found else [])]
    process = subprocess.Popen(
        [sys.executable, "-m", "papaya.study.record_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        # Ctrl-C is for this process, which ends the other. Not a session of its own: the kernel
        # would share the processor between both sessions, whatever their priority (autogroups).
        process_group=0,
    )
    followed = FollowedTrace(plan)
    assert process.stdin is not None
    assert process.stdout is not None
    collector = threading.Thread(target=followed.collect, args=(process.stdout, tell), daemon=True)
    try:
        process.stdin.write(msgspec.json.encode(plan))
        process.stdin.close()
        collector.start()
        yield followed
    finally:
        process.kill()
        process.wait()
        if collector.ident is not None:
            collector.join()
        process.stdout.close()


def write_frame(stream: IO[bytes], found: TracePart | TraceEnd) -> None:
    data = msgspec.msgpack.encode(found)
    stream.write(len(data).to_bytes(_LENGTH_BYTES, "big"))
    stream.write(data)
    stream.flush()
