"""Audits a log step by step, and reports the steps that could not be done.

    "Request for the latest log snapshot via the same API. Request for all the records [...] Check
    if the source code can be used to build the expected trust binaries." (paper, "Auditing")

The audit reads the log through the same `LogReader` as a device. The caller passes the build
function; it raises `CannotBuild` if it cannot run here, and `NoSource` if the source does not
contain the record's revision. Hardware measurements are compared with those that the auditor made;
without them the step is `not done`. A step that depends on a step that was not done is `not done`
too: dependencies are checked only in a rebuild. If the log is unreachable, the step that reads
it is `not done`, and the audit ends. The same holds if there is no checkpoint, even if one is
remembered: a wrong address looks the same. A missing tile is `failed`, because a signed checkpoint
implies it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

from papaya.verifiable_log.anchor import AuditAnchor, decode_entry
from papaya.verifiable_log.checkpoint import LogPolicy
from papaya.verifiable_log.errors import (
    LogError,
    LogSourceUnreachable,
    MalformedNote,
    NoCheckpoint,
    TooFewWitnesses,
    UnknownSigner,
)
from papaya.verifiable_log.reader import LogReader
from papaya.verifiable_log.record import Record

CHECK_CLONE = "run git fsck in the clone"
UNUSED = "unused measurement"  # the step that reports a measurement of no record

StepOutcome: TypeAlias = Literal["passed", "failed", "not done"]
Rebuild: TypeAlias = Callable[[Record], "Built"]


class CannotBuild(Exception):
    """The build cannot run here. The message says why."""


class NoSource(Exception):
    """The source does not contain what the record names. `check_first`: as in `AuditStep`."""

    def __init__(self, what: str, check_first: str = "") -> None:
        super().__init__(what)
        self.check_first = check_first


@dataclass(frozen=True)
class Built:
    """The hash of a built artifact.

    `without_dependencies`: why the dependencies were not checked, if so. `wrong_dependency`: why
    they fail, if so: one has a wrong hash, or all of them are too large. `check_first`: as in
    `AuditStep`.
    """

    artifact: str
    without_dependencies: str = ""
    wrong_dependency: str = ""
    check_first: str = ""


@dataclass(frozen=True)
class AuditStep:
    """One step of an audit.

    `index` is the record's, for steps about one record. `insecure`: the record accepts software
    evidence, which anyone can make. `check_first`: if a mistake of the auditor may have caused the
    failure, what the auditor should do before blaming the operator of the log.
    """

    name: str
    outcome: StepOutcome
    detail: str
    index: int | None = None
    insecure: bool = False
    check_first: str = ""


def audit(
    reader: LogReader,
    policy: LogPolicy,
    rebuild: Rebuild,
    now: float,
    measured: Mapping[tuple[int, str, str], str] = MappingProxyType({}),
) -> Iterator[AuditStep]:
    """Yield each step when it is done. The audit ends if the log itself fails a check.

    `measured`: by record, platform and field, the measurement that the auditor computed with the
    platform's own tools from the rebuilt artifact.
    """
    known = reader.remembered is not None
    old_size = reader.checkpoint.size if known else 0
    try:
        checkpoint = reader.refresh(now)
    except LogSourceUnreachable as error:
        yield AuditStep("checkpoint", "not done", str(error))
        return
    except NoCheckpoint as error:
        before = f"; the remembered one has size {old_size}" if known else ""
        yield AuditStep("checkpoint", "not done", f"{error}{before}")
        return
    except LogError as error:
        first = check_first(error, is_key_right=known)
        yield AuditStep("checkpoint", "failed", str(error), check_first=first)
        return
    yield AuditStep("checkpoint", "passed", f"size {checkpoint.size}, signed by {policy.key.name}")
    yield _witnessed(policy)
    if known:
        yield AuditStep("consistency", "passed", f"extends the remembered log of size {old_size}")
    else:
        yield AuditStep("consistency", "not done", "no earlier checkpoint is stored here")
    try:
        entries = reader.entries()
    except LogSourceUnreachable as error:
        yield AuditStep("entries", "not done", str(error))
        return
    except LogError as error:
        yield AuditStep("entries", "failed", str(error))
        return
    yield AuditStep("entries", "passed", f"all {len(entries)} hash to the checkpoint's root")
    unused = dict(measured)
    for index, entry in enumerate(entries):
        yield from _audit_record(index, entry, rebuild, unused)
    for index, platform, field in unused:
        detail = f"record {index} has no {platform}.{field}: nothing was compared with --measured"
        yield AuditStep(UNUSED, "not done", detail, index)


def _witnessed(policy: LogPolicy) -> AuditStep:
    if not policy.quorum:
        return AuditStep(
            "witnesses", "not done", "no witnesses are configured, so a fork could be hidden"
        )
    detail = f"at least {policy.quorum} of {len(policy.witnesses)} have cosigned"
    return AuditStep("witnesses", "passed", detail)


def check_first(error: LogError, *, is_key_right: bool) -> str:
    """As in `AuditStep`, for a checkpoint. `is_key_right`: the key has verified another one."""
    if isinstance(error, MalformedNote) or (isinstance(error, UnknownSigner) and is_key_right):
        return "check the address of the log"
    if isinstance(error, UnknownSigner):
        return "check --log-key"
    if isinstance(error, TooFewWitnesses):
        return "check --witness, --quorum, --max-age and the clock, or ask the witnesses to sign"
    return ""


def _audit_record(
    index: int, entry: bytes, rebuild: Rebuild, measured: dict[tuple[int, str, str], str]
) -> Iterator[AuditStep]:
    """Takes out of `measured` what was compared."""
    try:
        record = decode_entry(entry)
    except LogError as error:
        yield AuditStep("record", "failed", str(error), index)
        return
    if isinstance(record, AuditAnchor):
        anchor = f"head {record.number}:{record.digest} of an audit trail"
        yield AuditStep("record", "passed", anchor, index)
        return
    detail = f"revision {record.revision}, for {', '.join(sorted(record.measurements))}"
    insecure = "software" in record.measurements
    if insecure:
        detail += "; INSECURE: software evidence proves nothing about hardware"
    yield AuditStep("record", "passed", detail, index, insecure)
    try:
        built = rebuild(record)
    except CannotBuild as error:
        yield AuditStep("rebuild", "not done", str(error), index)
        yield _without_build(index)
    except NoSource as error:
        yield AuditStep("rebuild", "failed", str(error), index, check_first=error.check_first)
        yield _without_build(index)
    else:
        yield from _compared(record, built, index)
    for platform in sorted(record.measurements.keys() - {"software"}):
        for field, logged in sorted(record.measurements[platform].items()):
            found = measured.pop((index, platform, field), None)
            yield _measured(f"{platform}.{field}", logged, found, index)


def _without_build(index: int) -> AuditStep:
    return AuditStep("dependencies", "not done", "the release was not rebuilt", index)


def _measured(name: str, logged: str, found: str | None, index: int) -> AuditStep:
    if found is None:
        detail = (
            f"{name} was not compared: compute it with the platform's tools (docs/deploy-tsa.md) "
            f"and pass it as --measured {index}:{name}=HEX"
        )
        return AuditStep("measurement", "not done", detail, index)
    if found != logged:
        detail = f"{name} of the artifact is {found}, the record says {logged}"
        return AuditStep("measurement", "failed", detail, index)
    return AuditStep("measurement", "passed", f"{name} is {found}", index)


def _compared(record: Record, built: Built, index: int) -> Iterator[AuditStep]:
    if built.artifact == record.artifact:
        yield AuditStep("rebuild", "passed", f"the source gives {built.artifact}", index)
    else:
        detail = f"the source gives {built.artifact}, the record says {record.artifact}"
        yield AuditStep("rebuild", "failed", detail, index, check_first=CHECK_CLONE)
    # The operator of the log chooses the hashes in the lock: a wrong one is a finding.
    if built.wrong_dependency:
        yield AuditStep(
            "dependencies",
            "failed",
            built.wrong_dependency,
            index,
            check_first=built.check_first,
        )
    elif built.without_dependencies:
        yield AuditStep("dependencies", "not done", built.without_dependencies, index)
    else:
        yield AuditStep(
            "dependencies", "passed", "all match the hashes in papaya/tsa/enclave.toml", index
        )
