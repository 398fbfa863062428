"""`papaya audit`: check a log and every release in it, as anyone can, and say what was not checked.

Each record is built anew from its revision and compared, for which `--source` must be a git clone:
a folder or this installation may hold the same sources, but nothing shows of which revision they
are. Exit code 2 if the log cannot be reached; 3 if anything failed, also if the clone does not have
a revision; 4 if a release was not built anew, because such an audit has checked a log's form and no
binary. Other steps that could not be done are listed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from papaya.cli.log.source import (
    LogUnreachable,
    add_reading,
    keeping,
    now,
    policy_of,
    reader_of,
)
from papaya.cli.output import Commands, add_format, note, plural, print_data, print_json
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
    """Nothing failed, but releases were not built anew: nobody has compared them with a source."""

    exit_code = 4
    default_hint = "clone the source and name it: --source DIR; or accept it with --allow-not-done"


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "audit",
        description="Fetch a log as anyone can, check every record, rebuild every release.",
    )
    parser.set_defaults(run=run)
    add_reading(parser)
    parser.add_argument(
        "--source", type=Path, metavar="DIR", help="a git clone that has the logged revisions"
    )
    parser.add_argument(
        "--wheels", type=Path, metavar="DIR", help="dependencies, if pip has no network"
    )
    parser.add_argument(
        "--allow-not-done", action="store_true", help="releases need not be built anew"
    )
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    policy = policy_of(options)
    reader = reader_of(options, policy)
    rebuild = _rebuild(options.source, options.wheels)
    with keeping():
        steps = list(audit(reader, policy, rebuild, now()))
    failed = [step for step in steps if step.outcome == "failed"]
    open_steps = [step for step in steps if step.outcome == "not done"]
    if options.format == "json":
        print_json([asdict(step) for step in steps])
    else:
        print_data(_listed(steps))
    if failed:
        hint = "do not trust this log, and tell others what you found"
        raise ProtocolError(f"{plural(len(failed), 'step')} of the audit failed", hint=hint)
    unread = [step for step in open_steps if step.name in _READING]
    if unread:
        raise LogUnreachable(unread[0].detail)
    unbuilt = [step for step in open_steps if step.name == "rebuild"]
    if unbuilt and not options.allow_not_done:
        raise NotRebuilt(f"{plural(len(unbuilt), 'release')} could not be built anew here")
    note(f"nothing failed; {plural(len(open_steps), 'step')} could not be done here")
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
                raise NoSource(f"{error}. If it is newer than the clone: git fetch") from error
            raise CannotBuild(str(error)) from error
        if not is_clone:
            where = "this installation" if source is None else str(source)
            gives = "the same artifact" if found == record.artifact else "another artifact"
            raise CannotBuild(
                f"{where} gives {gives}; revision {record.revision} was not checked: --source CLONE"
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
