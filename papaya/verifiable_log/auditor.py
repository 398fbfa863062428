"""What an auditor does with a log, step by step, and which steps could not be done.

    "Request for the latest log snapshot via the same API. Request for all the records [...] Check
    if the source code can be used to build the expected trust binaries." (paper, "Auditing")

The audit reads the log through the same `LogReader` as a device. Building is not done here: it is a
function that is given, and raises `CannotBuild` where it could not be tried, `NoSource` where the
source does not have what the record names. A step that was not done is never reported as done:
measurements of hardware are not checked here, and it says so. A log that cannot be reached has not
failed: the step that wanted to read it is `not done`, and the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from papaya.verifiable_log.checkpoint import LogPolicy
from papaya.verifiable_log.errors import LogError, Unreachable
from papaya.verifiable_log.reader import LogReader
from papaya.verifiable_log.record import Record

Outcome: TypeAlias = Literal["passed", "failed", "not done"]
Rebuild: TypeAlias = Callable[[Record], "Built"]


class CannotBuild(Exception):
    """The build could not be tried here; says why."""


class NoSource(Exception):
    """The source is here, and nothing can be built from the record's revision of it; says why."""


@dataclass(frozen=True)
class Built:
    """What a build gave: the artifact's hash, and why it has no dependencies, if it has none."""

    artifact: str
    without_dependencies: str = ""


@dataclass(frozen=True)
class Step:
    """One step of an audit; `index` is the record's, for steps about one record."""

    name: str
    outcome: Outcome
    detail: str
    index: int | None = None


def audit(reader: LogReader, policy: LogPolicy, rebuild: Rebuild, now: float) -> Iterator[Step]:
    """Every step as it is done. After a failure of the log itself nothing more is believed."""
    known = reader.remembered is not None
    old_size = reader.checkpoint.size if known else 0
    try:
        checkpoint = reader.refresh(now)
    except Unreachable as error:
        yield Step("checkpoint", "not done", str(error))
        return
    except LogError as error:
        yield Step("checkpoint", "failed", str(error))
        return
    yield Step("checkpoint", "passed", f"size {checkpoint.size}, signed by {policy.key.name}")
    yield _witnessed(policy)
    if known:
        yield Step("consistency", "passed", f"continues the remembered log of size {old_size}")
    else:
        yield Step("consistency", "not done", "no earlier checkpoint is remembered here")
    try:
        entries = reader.entries()
    except Unreachable as error:
        yield Step("entries", "not done", str(error))
        return
    except LogError as error:
        yield Step("entries", "failed", str(error))
        return
    yield Step("entries", "passed", f"all {len(entries)} hash to the checkpoint's root")
    for index, entry in enumerate(entries):
        yield from _audit_record(index, entry, rebuild)


def _witnessed(policy: LogPolicy) -> Step:
    if not policy.quorum:
        return Step("witnesses", "not done", "no witnesses were named: a fork could be hidden")
    detail = f"at least {policy.quorum} of {len(policy.witnesses)} have cosigned"
    return Step("witnesses", "passed", detail)


def _audit_record(index: int, entry: bytes, rebuild: Rebuild) -> Iterator[Step]:
    try:
        record = Record.decode(entry)
    except LogError as error:
        yield Step("record", "failed", str(error), index)
        return
    platforms = ", ".join(sorted(record.measurements))
    yield Step("record", "passed", f"revision {record.revision}, for {platforms}", index)
    try:
        built = rebuild(record)
    except CannotBuild as error:
        yield Step("rebuild", "not done", str(error), index)
    except NoSource as error:
        yield Step("rebuild", "failed", str(error), index)
    else:
        yield from _compared(record, built, index)
    for platform in sorted(record.measurements.keys() - {"software"}):
        detail = f"the measurement for {platform} comes from its own tools: see docs/deploy-tsa.md"
        yield Step("measurement", "not done", detail, index)


def _compared(record: Record, built: Built, index: int) -> Iterator[Step]:
    if built.artifact == record.artifact:
        yield Step("rebuild", "passed", f"the source gives {built.artifact}", index)
    else:
        detail = f"the source gives {built.artifact}, the record says {record.artifact}"
        yield Step("rebuild", "failed", detail, index)
    if built.without_dependencies:
        yield Step("dependencies", "not done", built.without_dependencies, index)
    else:
        yield Step("dependencies", "passed", "all have the hashes of the lock", index)
