"""Decodes from the model who was counted how often, and compares it with what devices were told.

Each participation of `papaya load --update digit` adds 1 to a coordinate of its own. An update is
damped by its staleness, which its device knows, so that

    coordinate * K = the sum of damping(staleness) over the times that it was counted

in the newest version, with the sums of open buffers added. Servers are not asked: the state store
and the blobs are read. An update must be counted as its device was told:

    counted      exactly once, unless its buffer is a documented loss (a TSA that died)
    discarded    never
    aborted      never
    otherwise    at most once: the answer was lost, or the device gave up

A device whose upload was granted several times knows several values of staleness. With the paper's
1/sqrt(1 + s), one update of staleness 0 and two of staleness 3 add the same. So the tasks of the
tests use `DAMPING`, by which one update adds more than 0.5 and at most 1, and several add more than
1, for every staleness up to 1,000. A coordinate that several numbers of updates explain is a
problem of its own. Coordinates do not add up, so nothing is carried from one to the next, and what
is lost of one update is not hidden by another one that is counted twice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations_with_replacement
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from papaya.config import TaskConfig
from papaya.config.combining import Staleness
from papaya.device.load import LoadOutcome
from papaya.learning import parameters
from papaya.learning.weighting import WeightedSum
from papaya.messages.base import SessionId
from papaya.messages.storage import (
    ConsumedRow,
    RecordRow,
    Row,
    TaskRow,
    VersionRow,
    holder_prefixes,
    task_key,
)
from papaya.store.blobs import Blobs

Exact: TypeAlias = NDArray[np.float64]
R = TypeVar("R", bound=Row)
DAMPING = Staleness(exponent=0.1)
# float32 has 1e-7, and the fixed point of a masked task 3e-6 for each of its versions that counts.
_ROUNDING = 1e-4
_MOST_TIMES = 4
_ONCE, _NEVER, _AT_MOST_ONCE = (1,), (0,), (0, 1)
_ALLOWED = {"counted": _ONCE, "discarded": _NEVER, "aborted": _NEVER}


class Model(NamedTuple):
    """The newest version of a task with its open buffers: `digits` as sums of damped ones.

    `open`: sessions whose update is in a masked buffer that is still open, and not in `digits`.
    `lost`: sessions of masked buffers that were given up.
    """

    config: TaskConfig
    version: int
    digits: Exact
    open: frozenset[SessionId]
    lost: frozenset[SessionId]


class Stored(NamedTuple):
    """All rows of a cluster, and its blobs."""

    rows: Mapping[str, Row]
    blobs: Blobs

    def model(self, task: str) -> Model:
        row = self.rows[task_key(task)]
        assert isinstance(row, TaskRow)
        config, length = row.config, row.config.model_length
        versions = {r.version: r for r in self._all(VersionRow, task)}
        newest = max(versions)
        data = self.blobs.get(versions[newest].parameters)
        digits = parameters.decode(data, length).astype(np.float64) * config.aggregation_goal
        in_records: set[SessionId] = set()
        for record in self._all(RecordRow, task):
            if config.is_secure:
                in_records.update(member.session for member in record.members)
            else:
                total = WeightedSum.decode(self.blobs.get(record.sum), length)
                digits += total.vector.astype(np.float64)
        lost = {
            member.session
            for consumed in self._all(ConsumedRow, task)
            if config.is_secure and _is_given_up(versions, consumed.version)
            for member in consumed.members
        }
        return Model(config, newest, digits, frozenset(in_records), frozenset(lost))

    def _all(self, kind: type[R], task: str) -> list[R]:
        prefixes = holder_prefixes(task)
        return [
            row
            for key, row in self.rows.items()
            if isinstance(row, kind) and key.startswith(prefixes)
        ]


def _is_given_up(versions: Mapping[int, VersionRow], version: int) -> bool:
    """A given-up buffer publishes the version before it once more."""
    before, found = versions.get(version - 1), versions.get(version)
    return before is not None and found is not None and before.parameters == found.parameters


class Verdict(NamedTuple):
    """`told`: participations by what their devices were told and how often they were counted."""

    problems: list[str]
    told: dict[str, Counter[int]]
    lost: int


def read_outcomes(*files: Path) -> list[LoadOutcome]:
    lines = (line for file in files for line in file.read_bytes().splitlines())
    return [msgspec.json.decode(line, type=LoadOutcome) for line in lines]


def judge(model: Model, outcomes: Iterable[LoadOutcome]) -> Verdict:
    verdict = Verdict([], {}, 0)
    lost = 0
    damping = model.config.staleness.damping
    assert damping is not None
    known = [o for o in outcomes if o.task == model.config.task and o.number >= 0]
    for outcome in known:
        value = float(model.digits[outcome.number])
        explained = _times(value, [damping.factor(each) for each in outcome.staleness])
        if len(explained) != 1:
            words = (
                " or ".join(f"{n} times" for n in sorted(explained)) or "by no number of updates"
            )
            verdict.problems.append(
                f"{_named(outcome)}: its coordinate is {value:.6f}, explained {words}"
            )
            continue
        times = explained.pop() + (outcome.session in model.open)
        verdict.told.setdefault(outcome.ending, Counter())[times] += 1
        if times == 0 and outcome.session in model.lost:
            lost += 1
        elif times not in _ALLOWED.get(outcome.ending, _AT_MOST_ONCE):
            verdict.problems.append(f"{_named(outcome)}: counted {times} times")
    used = {outcome.number for outcome in known}
    unused = ~(np.abs(model.digits) <= _ROUNDING)  # also if it is not a number
    foreign = [i for i in np.flatnonzero(unused) if int(i) not in used]
    if foreign:
        verdict.problems.append(
            f"{len(foreign)} coordinates that no device used, the first {foreign[0]}"
        )
    return verdict._replace(lost=lost)


def _times(value: float, factors: Sequence[float]) -> set[int]:
    """Every number of updates that explains the value, each damped by one of the factors."""
    found = set()
    if abs(value) <= _ROUNDING:
        found.add(0)
    for times in range(1, _MOST_TIMES + 1):
        for each in combinations_with_replacement(factors, times):
            if abs(value - math.fsum(each)) <= _ROUNDING:
                found.add(times)
    if not found and math.isfinite(value):
        found = {
            n for f in factors if (n := round(value / f)) > 0 and abs(value - n * f) <= _ROUNDING
        }
    return found


def _named(outcome: LoadOutcome) -> str:
    told = f"{outcome.ending}: {outcome.reason}" if outcome.reason else outcome.ending
    return f"{outcome.task} {outcome.session} (number {outcome.number}), told {told!r}"
