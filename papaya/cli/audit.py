"""`papaya audit`: check a public log and every release in it, and say what was not checked.

Each release is rebuilt from its revision and compared with its record. `--source` must be a git
clone for this: a folder or this installation may hold the same sources, but nothing shows which
revision they are, and the record of a demonstration names none. Exits with 2 if the log cannot be
reached, if there is none at the address, or if an option is wrong; with 3 if a step failed, which
includes a revision that the clone lacks, a lock that makes no sense, and dependencies that are too
large or whose hash is not the one in the lock; with 4 if a step was not done and the auditor did
not ask to skip it. A step that is skipped is something that the auditor trusts instead of checking,
and the output says what. A step that failed cannot be skipped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

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
    Dependencies,
    LargeWheels,
    NoGit,
    NotInClone,
    WrongWheel,
    artifact_hash,
    checked_lock,
    from_folder,
    from_revision,
    require_repository,
)
from papaya.errors import OperatorError, PapayaError, ProtocolError
from papaya.tsa.measurement import LOCK, ReadSource, installed
from papaya.verifiable_log.auditor import (
    CHECK_CLONE,
    UNUSED,
    AuditStep,
    Built,
    CannotBuild,
    NoSource,
    Rebuild,
    audit,
)
from papaya.verifiable_log.record import REGISTERS, Record

_READING = ("checkpoint", "entries")
_MEASURED = re.compile(r"([0-9]{1,9}):([a-z]+)\.([a-z0-9_]+)=([0-9a-f]{2,256})")


TRUSTED: Final = {
    "witnesses": "the operator of the log shows everyone the same log",
    "consistency": "the log was never rewritten before this audit",
    "rebuild": "the logged binaries were built from the published source",
    "dependencies": "the dependencies of the TSA are the published ones",
    "measurement": "the logged measurements belong to the logged binaries",
}
"""What an auditor trusts who skips a step."""


class NotChecked(PapayaError):
    """No step failed, but some were not done."""

    exit_code = 4


@dataclass(frozen=True, kw_only=True)
class AuditOptions(LogReadOptions, FormatOptions):
    source: Path | None = None
    wheels: Path | None = None
    measured: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "audit",
        description="Read a public log, check every record and rebuild every release in it. Exits "
        "with 2 if the log cannot be reached, if there is none at the address, or if an option is "
        "wrong; with 3 if a check failed; and with 4 if a check was not done and is not skipped.",
    )
    add_reading(parser)
    parser.add_argument(
        "--source", type=Path, metavar="DIR", help="git clone that contains the logged revisions"
    )
    parser.add_argument(
        "--wheels",
        type=Path,
        metavar="DIR",
        help="folder with the dependency wheels (default: download them with pip)",
    )
    parser.add_argument(
        "--measured",
        action="append",
        metavar="RECORD:PLATFORM.FIELD=HEX",
        help="measurement of a rebuilt release, computed with the platform's tools, to compare "
        "with the record; may be repeated",
    )
    parser.add_argument(
        "--skip",
        action="append",
        choices=tuple(TRUSTED),
        help="accept that this check is not done; the output says what you then trust; may be "
        "repeated",
    )
    add_format(parser)
    bind(parser, AuditOptions, run)


def run(options: AuditOptions) -> int:
    policy = policy_of(options)
    measured = measured_of(options.measured)
    _check_folders(options.source, options.wheels)
    reader = reader_of(options, policy)
    rebuild = _rebuild(options.source, options.wheels)
    with keeping():
        steps = list(audit(reader, policy, rebuild, now(), measured))
    failed = [step for step in steps if step.outcome == "failed"]
    open_steps = [step for step in steps if step.outcome == "not done"]
    if options.is_json:
        print_json([asdict(step) for step in steps])
    else:
        print_data(_listed(steps))
    if insecure := [str(step.index) for step in steps if step.insecure]:
        note(
            f"INSECURE: {plural(len(insecure), 'record')} for software evidence (index "
            f"{', '.join(insecure)}): anyone can make such evidence, so it proves nothing about "
            "hardware"
        )
    if failed:
        hint = "do not trust this log, and publish what you found"
        if all(checks := sorted({step.check_first for step in failed})):
            hint = f"{' and '.join(checks)}; if it still fails, {hint}"
        raise ProtocolError(f"{plural(len(failed), 'step')} of the audit failed", hint=hint)
    unread = [step for step in open_steps if step.name in _READING]
    if unread:
        raise LogUnreachable(unread[0].detail)
    if unused := [step for step in open_steps if step.name == UNUSED]:
        raise OperatorError(
            unused[0].detail, hint="check the index and the platform in the `record` steps above"
        )
    skipped = [name for name in TRUSTED if any(step.name == name for step in open_steps)]
    for name in skipped:
        note(f"not checked: {name}; you trust that {TRUSTED[name]}")
    if missing := [name for name in skipped if name not in options.skip]:
        options_to_skip = " ".join(f"--skip {name}" for name in missing)
        raise NotChecked(
            f"the audit did not check: {', '.join(missing)}",
            hint=f"see the steps above for what each needs, or accept it: {options_to_skip}",
        )
    note(f"no step failed; {plural(len(open_steps), 'step')} skipped")
    return 0


def measured_of(given: Sequence[str]) -> dict[tuple[int, str, str], str]:
    """Of each `RECORD:PLATFORM.FIELD=HEX`."""
    found: dict[tuple[int, str, str], str] = {}
    for text in given:
        match = _MEASURED.fullmatch(text)
        if match is None:
            raise OperatorError(
                f"--measured {text!r} is not RECORD:PLATFORM.FIELD=HEX",
                hint="for example --measured 0:sgx.mrenclave=5f1b…, in lower case",
            )
        _check_register(text, match[2], match[3], match[4])
        register = int(match[1]), match[2], match[3]
        if register in found:
            raise OperatorError(
                f"--measured {text!r}: {match[2]}.{match[3]} of record {match[1]} was given twice",
                hint="pass each measurement once",
            )
        found[register] = match[4]
    return found


def _check_register(text: str, platform: str, field: str, value: str) -> None:
    hardware = {name: fields for name, fields in REGISTERS.items() if name != "software"}
    expected = hardware.get(platform, {}).get(field)
    if expected is None:
        known = ", ".join(f"{name}.{field}" for name in hardware for field in hardware[name])
        raise OperatorError(
            f"--measured {text!r}: unknown hardware measurement: {platform}.{field}",
            hint=f"use one of {known}",
        )
    if len(value) != 2 * expected:
        raise OperatorError(
            f"--measured {text!r}: {platform}.{field} has {2 * expected} hexadecimal digits, "
            f"not {len(value)}",
            hint="pass the whole measurement, as the platform's tools print it",
        )


def _check_folders(source: Path | None, wheels: Path | None) -> None:
    """A wrong path is a mistake of the auditor, not a step that could not be done."""
    for option, folder in (("--source", source), ("--wheels", wheels)):
        if folder is not None and not folder.is_dir():
            raise OperatorError(
                f"{option} {folder}: there is no such folder", hint="check the path"
            )
    if source is not None and not (source / ".git").exists() and not (source / LOCK).is_file():
        raise OperatorError(
            f"--source {source} is neither a git clone nor a folder with the sources of Papaya",
            hint="pass the folder that contains papaya/",
        )
    if source is not None and (source / ".git").exists():
        with suppress(NoGit):  # what cannot be rebuilt without git is not checked
            require_repository(source)


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
    dependencies = Dependencies(wheels)
    has_revisions = source is not None and (source / ".git").exists()

    def rebuild(record: Record) -> Built:
        is_clone = has_revisions and not record.is_demonstration
        try:
            read = _reading(source, record.revision, is_clone=is_clone)
            found = artifact_hash(read)
        except NotInClone as error:
            first = "check that this is a clone of Papaya, and run git fetch in it"
            raise NoSource(str(error), f"{first} (--unshallow if it is shallow)") from error
        except OperatorError as error:
            if is_clone and not isinstance(error, NoGit):
                raise NoSource(str(error), CHECK_CLONE) from error
            raise CannotBuild(str(error)) from error
        if not is_clone:
            where = "this installation" if source is None else str(source)
            gives = "the same artifact" if found == record.artifact else "another artifact"
            why = (
                "the record names no revision"
                if record.is_demonstration
                else f"revision {record.revision} was not checked; add --source CLONE"
            )
            raise CannotBuild(f"{where} gives {gives}, but {why}")
        try:
            dependencies.check(checked_lock(read))
        except WrongWheel as error:
            wrong = f"{error}; {error.hint}"
            return Built(found, wrong_dependency=wrong, check_first="download the wheels again")
        except LargeWheels as error:
            wrong, check = f"{error}; {error.hint}", "check the files in --wheels" if wheels else ""
            return Built(found, wrong_dependency=wrong, check_first=check)
        except OperatorError as error:  # no wheels, or git failed meanwhile
            return Built(found, str(error))
        return Built(found)

    return rebuild


def _reading(source: Path | None, revision: str, *, is_clone: bool) -> ReadSource:
    if source is None:
        return installed
    return from_revision(source, revision) if is_clone else from_folder(source)
