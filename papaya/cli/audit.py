"""`papaya audit`: check a public log and every release in it, and say what was not checked.

Each release is rebuilt from its revision and compared with its record. `--source` must be a git
clone for this: a folder or this installation may hold the same sources, but nothing shows which
revision they are. Exits with 2 if the log cannot be reached; with 3 if a step failed, also if the
clone lacks a revision; with 4 if a release was not rebuilt, because then only the form of the log
was checked and no binary. Other steps that could not be done are listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from papaya.cli.log.source import (
    LogReadOptions,
    LogUnreachable,
    add_reading,
    keeping,
    now,
    policy_of,
    reader_of,
)
from papaya.cli.output import (
    Commands,
    FormatOptions,
    add_format,
    bind,
    note,
    plural,
    print_data,
    print_json,
)
from papaya.cli.tsa import (
    NoGit,
    NoWheels,
    artifact_hash,
    build,
    from_folder,
    from_revision,
)
from papaya.errors import OperatorError, PapayaError, ProtocolError
from papaya.tsa.measurement import ReadSource, installed
from papaya.verifiable_log.auditor import AuditStep, Built, CannotBuild, NoSource, Rebuild, audit
from papaya.verifiable_log.record import Record

_READING = ("checkpoint", "entries")


class NotRebuilt(PapayaError):
    """No step failed, but releases were not rebuilt, so they were not compared with any source."""

    exit_code = 4
    default_hint = "clone the sources and add --source DIR, or accept this with --allow-not-done"


@dataclass(frozen=True, kw_only=True)
class AuditOptions(LogReadOptions, FormatOptions):
    source: Path | None = None
    wheels: Path | None = None
    allow_not_done: bool = False


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "audit",
        description="Read a public log, check every record and rebuild every release in it. Exits "
        "with 2 if the log cannot be reached, with 3 if a check failed, and with 4 if a release "
        "was not rebuilt.",
    )
    add_reading(parser)
    parser.add_argument(
        "--source", type=Path, metavar="DIR", help="git clone that has the logged revisions"
    )
    parser.add_argument(
        "--wheels",
        type=Path,
        metavar="DIR",
        help="folder that has the dependencies (default: download them with pip)",
    )
    parser.add_argument(
        "--allow-not-done",
        action="store_true",
        help="exit with 0 even if releases could not be rebuilt",
    )
    add_format(parser)
    bind(parser, AuditOptions, run)


def run(options: AuditOptions) -> int:
    policy = policy_of(options)
    reader = reader_of(options, policy)
    rebuild = _rebuild(options.source, options.wheels)
    with keeping():
        steps = list(audit(reader, policy, rebuild, now()))
    failed = [step for step in steps if step.outcome == "failed"]
    open_steps = [step for step in steps if step.outcome == "not done"]
    if options.is_json:
        print_json([asdict(step) for step in steps])
    else:
        print_data(_listed(steps))
    if failed:
        hint = "do not trust this log, and publish what you found"
        raise ProtocolError(f"{plural(len(failed), 'step')} of the audit failed", hint=hint)
    unread = [step for step in open_steps if step.name in _READING]
    if unread:
        raise LogUnreachable(unread[0].detail)
    unbuilt = [step for step in open_steps if step.name == "rebuild"]
    if unbuilt and not options.allow_not_done:
        raise NotRebuilt(f"{plural(len(unbuilt), 'release')} could not be rebuilt here")
    note(f"no step failed; {plural(len(open_steps), 'step')} could not be done here")
    return 0


def _listed(steps: Sequence[AuditStep]) -> str:
    rows = [
        (
            "log" if step.index is None else f"record {step.index}",
            step.name,
            step.outcome,
            step.detail,
        )
        for step in steps
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    )


def _rebuild(source: Path | None, wheels: Path | None) -> Rebuild:
    is_clone = source is not None and (source / ".git").exists()

    def rebuild(record: Record) -> Built:
        try:
            read = _reading(source, record.revision, is_clone=is_clone)
            found = artifact_hash(read)
        except OperatorError as error:
            if is_clone and not isinstance(error, NoGit):
                raise NoSource(f"{error}; if it is newer than the clone, run git fetch") from error
            raise CannotBuild(str(error)) from error
        if not is_clone:
            where = "this installation" if source is None else str(source)
            gives = "the same artifact" if found == record.artifact else "another artifact"
            raise CannotBuild(
                f"{where} gives {gives}, but revision {record.revision} was not checked; "
                "add --source CLONE"
            )
        try:
            build(read, wheels)
        except NoWheels as error:
            return Built(found, str(error))
        return Built(found)

    return rebuild


def _reading(source: Path | None, revision: str, *, is_clone: bool) -> ReadSource:
    if source is None:
        return installed
    return from_revision(source, revision) if is_clone else from_folder(source)
