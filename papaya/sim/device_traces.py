"""Measured devices in FedScale's format: how fast they are, and when they are available.

    capacity       client -> {"computation": ms per example, "communication": kbit/s}
    availability   client -> {"active": [s, …], "inactive": [s, …], "finish_time": s, …}

A device is available from each `active` to the `inactive` of the same place, again and again with
the period `finish_time`; time 0 of a run is time 0 of the file. FedScale's files are pickles
(`client_device_capacity`, `client_behave_trace`); JSON of the same shape is read too. A pickle can
run any code, so only pickles of dicts, lists, numbers and texts are read.

Entries without a usable value are left out and counted. Refused: files of another shape, and files
that differ from the digest that a configuration names.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import pickle
from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from msgspec import Struct

from papaya.errors import OperatorError
from papaya.sim.draws import Floats, HashWords, Ints

_MAX_BYTES: Final = 2 << 30
_TRAINING_PER_INFERENCE: Final = 3.0  # FedScale: a backward pass takes twice a forward pass
_FOREVER_S: Final = math.inf


class TraceFile(Struct, frozen=True, forbid_unknown_fields=True):
    """A file by its content, so that a configuration decides a run wherever the file is."""

    path: str
    digest: str

    @classmethod
    def of(cls, path: Path) -> TraceFile:
        return cls(str(path), _digest(_content(path)))

    def read(self) -> dict[Any, Any]:
        content = _content(Path(self.path))
        if _digest(content) != self.digest:
            raise OperatorError(
                f"{self.path} has changed: its digest is {_digest(content)}, not {self.digest}",
                hint="use the file with which the run was made",
            )
        return _parsed(Path(self.path), content)


class Capacities(NamedTuple):
    """Of each entry: seconds that training takes per example, and kbit/s of its connection."""

    example_s: Floats
    kbit_s: Floats
    left_out: int


class Availabilities:
    """When the devices of each entry are available: intervals within a period."""

    def __init__(self, entries: list[tuple[float, list[tuple[float, float]]]], left_out: int):
        self.left_out = left_out
        self._periods_s = [period_s for period_s, _ in entries]
        self._starts_s = [[start for start, _ in intervals] for _, intervals in entries]
        self._ends_s = [[end for _, end in intervals] for _, intervals in entries]

    def __len__(self) -> int:
        return len(self._periods_s)

    @property
    def mean(self) -> float:
        """The mean share of time in which an entry is available."""
        shares = [
            sum(self._ends_s[entry]) - sum(self._starts_s[entry]) for entry in range(len(self))
        ]
        return float(np.mean(np.array(shares) / np.array(self._periods_s)))

    def remaining_s(self, entry: int, now: float) -> float:
        """For how long the entry stays available from now on; 0 if it is not available."""
        at = now % self._periods_s[entry]
        place = bisect_right(self._starts_s[entry], at) - 1
        if place < 0:
            return 0.0
        end = self._ends_s[entry][place]
        if end >= self._periods_s[entry] and self._starts_s[entry][0] <= 0:
            if len(self._starts_s[entry]) == 1:
                return _FOREVER_S
            end += self._ends_s[entry][0]  # it goes on in the next period
        return max(0.0, end - at)


@lru_cache(maxsize=4)
def capacities(file: TraceFile) -> Capacities:
    found, left_out = _entries(file, _capacity)
    example_ms, kbit_s = np.array(found, np.float64).T
    return Capacities(_TRAINING_PER_INFERENCE * example_ms / 1000, kbit_s, left_out)


@lru_cache(maxsize=4)
def availabilities(file: TraceFile) -> Availabilities:
    return Availabilities(*_entries(file, _availability))


def entry_of(words: HashWords, entries: int) -> Ints:
    """The entry of a device, from its random word."""
    chosen: Ints = (words % np.uint64(entries)).astype(np.int64)
    return chosen


def _entries(file: TraceFile, read: Callable[[Any], Any]) -> tuple[list[Any], int]:
    """In the order of the file, and how many were left out."""
    found, left_out = [], 0
    for value in file.read().values():
        try:
            found.append(read(value))
        except (KeyError, TypeError, ValueError):
            left_out += 1
    if not found:
        raise OperatorError(
            f"{file.path} has no usable entry among {left_out:,}",
            hint="see docs/simulator.md for the format of device traces",
        )
    return found, left_out


def _capacity(value: Any) -> tuple[float, float]:
    speeds = float(value["computation"]), float(value["communication"])
    if not all(math.isfinite(speed) and speed > 0 for speed in speeds):
        raise ValueError(speeds)
    return speeds


def _availability(value: Any) -> tuple[float, list[tuple[float, float]]]:
    period_s = float(value["finish_time"])
    pairs = zip(map(float, value["active"]), map(float, value["inactive"]), strict=False)
    intervals = [(max(0.0, start), min(end, period_s)) for start, end in sorted(pairs)]
    intervals = [(start, end) for start, end in intervals if start < end]
    overlap = any(before[1] > after[0] for before, after in pairwise(intervals))
    if not (math.isfinite(period_s) and period_s > 0 and intervals) or overlap:
        raise ValueError(value)
    return period_s, intervals


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it contains {module}.{name}")


def _parsed(path: Path, content: bytes) -> dict[Any, Any]:
    try:
        if content[:1] == b"\x80":
            found = _PlainUnpickler(io.BytesIO(content)).load()
        else:
            found = json.loads(content)
    except Exception as error:  # a pickle that is cut off can raise anything
        raise OperatorError(
            f"cannot read device trace {path}: {error}",
            hint="only dicts, lists, numbers and texts are read, as JSON or as a pickle",
        ) from error
    if not isinstance(found, dict):
        raise OperatorError(
            f"device trace {path} is a {type(found).__name__}, expected a dict by client",
            hint="see docs/simulator.md for the format of device traces",
        )
    return found


def _content(path: Path) -> bytes:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise OperatorError(
                f"{path} has more than {_MAX_BYTES >> 30} GiB", hint="take a sample of its devices"
            )
        return path.read_bytes()
    except OSError as error:
        raise OperatorError(
            f"cannot read device trace {path}: {error.strerror}", hint="check the path"
        ) from error


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
