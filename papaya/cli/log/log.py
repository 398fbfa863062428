"""`papaya log`: write a verifiable log of TSA binaries, show it, and check it.

`append` measures the sources itself, so a record names the artifact that the sources give. The
private key is kept in its own file, outside the folder that is served; a key file is readable by
its owner only and is never overwritten. A witness signs only a continuation of the checkpoint that
it signed before, so `cosign` requires a file to remember that checkpoint. `verify` and `show` check
signatures, proofs and records, and trust nothing else.
"""

from __future__ import annotations

import argparse
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from papaya.cli.log.source import (
    LogReadOptions,
    LogShowOptions,
    add_reading,
    folder_of,
    keeping,
    now,
    own_log,
    policy_of,
    private_key,
    public_key,
    reader_of,
    refusals,
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
    writing,
)
from papaya.cli.tsa import artifact_hash, reading
from papaya.errors import OperatorError
from papaya.verifiable_log.anchor import AuditAnchor, decode_entry
from papaya.verifiable_log.errors import LogError
from papaya.verifiable_log.folder import LogFolder
from papaya.verifiable_log.note import COSIGNATURE, LOG_SIGNATURE, SignerKey
from papaya.verifiable_log.reader import LogReader
from papaya.verifiable_log.record import REGISTERS, Record
from papaya.verifiable_log.tiles import CHECKPOINT

_RECORD_HINT = "--revision takes what `git rev-parse HEAD` prints; add --sgx, --tdx or --software"


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "log",
        description="Write, show and check the public log of TSA binaries, which devices and "
        "auditors read.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    _add_publishing(actions)
    _add_witnessing(actions)
    show = actions.add_parser(
        "show",
        help="print the records of a log",
        description="Check a log's signatures and proofs, then print its records.",
    )
    verify = actions.add_parser(
        "verify",
        help="check signatures, proofs and records of a log",
        description="Check the signatures, proofs and records of a log. With --remember, also "
        "check that the log continues the checkpoint that was seen last.",
    )
    for action in (show, verify):
        add_reading(action)
        add_format(action)
    bind(show, LogShowOptions, run_show)
    bind(verify, LogShowOptions, run_verify)


def run_show(options: LogShowOptions) -> int:
    reader, entries = _read(options)
    shown = [{"index": i, **_fields(entry)} for i, entry in enumerate(entries)]
    if options.is_json:
        print_json({"checkpoint": _checkpoint(reader), "records": shown})
        return 0
    checkpoint = reader.checkpoint
    print_data(f"{checkpoint.origin}: {plural(checkpoint.size, 'record')}")
    for fields in shown:
        print_data("")
        for name, value in fields.items():
            print_data(f"{name:18} {value}")
    return 0


def run_verify(options: LogShowOptions) -> int:
    reader, entries = _read(options)
    with refusals():
        for index, entry in enumerate(entries):
            try:
                decode_entry(entry)
            except LogError as error:
                raise LogError(f"record {index}: {error}") from error
    if options.is_json:
        print_json({"checkpoint": _checkpoint(reader), "records": len(entries)})
    else:
        print_data(f"{reader.checkpoint.origin}: {plural(len(entries), 'record')}, all valid")
    if not options.witness:
        note("no --witness was given: others may be shown a different log")
    return 0


def _read(options: LogReadOptions) -> tuple[LogReader, list[bytes]]:
    reader = reader_of(options, policy_of(options))
    with refusals(), keeping():
        reader.refresh(now())
        return reader, reader.entries()


def _checkpoint(reader: LogReader) -> dict[str, str | int]:
    found = reader.checkpoint
    return {"origin": found.origin, "size": found.size, "root": found.root.hex()}


def _fields(entry: bytes) -> dict[str, str]:
    """A record as names and values for people. An invalid one is shown as bytes, with the error."""
    try:
        record = decode_entry(entry)
    except LogError as error:
        return {"invalid": str(error), "bytes": ascii(entry[:400])}
    if isinstance(record, AuditAnchor):
        return {"audit trail": f"{record.number}:{record.digest}"}
    measured = {
        f"{platform} {register}": value
        for platform, registers in sorted(record.measurements.items())
        for register, value in sorted(registers.items())
    }
    return {
        "artifact": record.artifact,
        "repository": record.repository,
        "revision": record.revision,
        "recipe": record.recipe,
        **measured,
    }


@dataclass(frozen=True, kw_only=True)
class LogKeyOptions:
    name: str
    output: Path
    witness: bool = False


@dataclass(frozen=True, kw_only=True)
class LogWriteOptions:
    """The options of every command that writes to a log; `_add_writing` describes them."""

    log: Path
    key: Path


@dataclass(frozen=True, kw_only=True)
class LogAppendOptions(LogWriteOptions, FormatOptions):
    repository: str
    revision: str
    recipe: str = "papaya tsa build"
    source: Path | None = None
    software: bool = False
    sgx: str | None = None
    tdx: str | None = None


@dataclass(frozen=True, kw_only=True)
class LogAnchorOptions(LogWriteOptions, FormatOptions):
    head: str


@dataclass(frozen=True, kw_only=True)
class LogCosignOptions(LogReadOptions):
    key: Path


@dataclass(frozen=True, kw_only=True)
class LogAddCosignatureOptions(LogWriteOptions):
    witness: str
    line: str


def _add_publishing(actions: Commands) -> None:
    key = _add(actions, "key", "create a key for a log or a witness")
    key.add_argument(
        "--name",
        required=True,
        metavar="NAME",
        help="name of the log or witness, such as example.org/tsa-log",
    )
    key.add_argument(
        "--output",
        required=True,
        type=Path,
        metavar="FILE",
        help="file for the private key; the public key is written next to it, with .pub added",
    )
    key.add_argument("--witness", action="store_true", help="create a key for a witness")
    bind(key, LogKeyOptions, run_key)

    create = _add(actions, "create", "create an empty log")
    _add_writing(create)
    bind(create, LogWriteOptions, run_create)

    append = _add(actions, "append", "add a release of the TSA binary to a log")
    _add_writing(append)
    _add_record(append)
    add_format(append)
    bind(append, LogAppendOptions, run_append)

    anchor = _add(actions, "anchor", "add the head of an audit trail to a log")
    _add_writing(anchor)
    anchor.add_argument(
        "--head",
        required=True,
        metavar="NUMBER:DIGEST",
        help="head of the trail, as printed by `papaya audit-trail show`",
    )
    add_format(anchor)
    bind(anchor, LogAnchorOptions, run_anchor)


def _add_witnessing(actions: Commands) -> None:
    cosign = _add(actions, "cosign", "sign the checkpoint of a log, as a witness")
    add_reading(cosign)
    cosign.add_argument(
        "--key", required=True, type=Path, metavar="FILE", help="private key of the witness"
    )
    bind(cosign, LogCosignOptions, run_cosign)

    add = _add(actions, "add-cosignature", "publish a witness's signature")
    _add_writing(add)
    add.add_argument(
        "--witness",
        required=True,
        metavar="KEY",
        help="public key of the witness, or a file with it",
    )
    add.add_argument(
        "--line",
        required=True,
        metavar="TEXT",
        help="cosignature to publish, as printed by `papaya log cosign`",
    )
    bind(add, LogAddCosignatureOptions, run_add_cosignature)


def _add(actions: Commands, name: str, words: str) -> argparse.ArgumentParser:
    description = f"{words[0].upper()}{words[1:]}."
    parser: argparse.ArgumentParser = actions.add_parser(name, help=words, description=description)
    return parser


def _add_writing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log",
        required=True,
        type=Path,
        metavar="DIR",
        help="folder of the log; publish it with a web server",
    )
    parser.add_argument(
        "--key", required=True, type=Path, metavar="FILE", help="private key of the log"
    )


def _add_record(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--repository", required=True, metavar="URL", help="address of the source repository"
    )
    parser.add_argument(
        "--revision", required=True, metavar="REV", help="full git revision of the source"
    )
    parser.add_argument("--recipe", metavar="TEXT", help="command that builds the binary")
    parser.add_argument(
        "--source",
        type=Path,
        metavar="DIR",
        help="git clone in which to measure --revision (default: measure this installation)",
    )
    parser.add_argument(
        "--software",
        action="store_true",
        help="record a measurement for `software` evidence, which is INSECURE",
    )
    parser.add_argument("--sgx", metavar="HEX", help="MRENCLAVE of the signed SGX enclave")
    parser.add_argument(
        "--tdx",
        metavar="REGISTER=HEX,...",
        help=f"TDX registers; all of {', '.join(REGISTERS['tdx'])} are required",
    )


def run_key(options: LogKeyOptions) -> int:
    kind = COSIGNATURE if options.witness else LOG_SIGNATURE
    try:
        key = SignerKey(options.name, secrets.token_bytes(32), kind)
    except LogError as error:
        raise OperatorError(str(error), hint="use a name like example.org/tsa-log") from error
    if options.output.exists():
        hint = "choose another file with --output"
        raise OperatorError(f"{options.output} already exists; keys are not overwritten", hint=hint)
    with writing(options.output):
        handle = os.open(options.output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(f"{key.reveal()}\n")
        public = options.output.with_name(f"{options.output.name}.pub")
        public.write_text(f"{key.verifier}\n")
    print_data(str(key.verifier))
    note(f"the private key is in {options.output}; keep it outside the folder of the log")
    return 0


def run_create(options: LogWriteOptions) -> int:
    key = private_key(options.key)
    if (options.log / CHECKPOINT).exists():
        hint = f"to add a record to it: papaya log append --log {options.log} --key FILE"
        raise OperatorError(f"{options.log} already contains a log", hint=hint)
    with writing(options.log), own_log(options.log):
        LogFolder(options.log).create(key)
    print_data(str(key.verifier))
    return 0


def run_append(options: LogAppendOptions) -> int:
    key = private_key(options.key)
    revision = options.revision if options.source is not None else None
    artifact = artifact_hash(reading(options.source, revision))
    try:
        record = Record(
            artifact,
            _measurements(options, artifact),
            options.repository,
            options.revision,
            options.recipe,
        )
    except LogError as error:
        raise OperatorError(str(error), hint=_RECORD_HINT) from error
    with own_log(options.log), writing(options.log):
        checkpoint = folder_of(options.log).append([record.encode()], key)
    if options.is_json:
        index = checkpoint.size - 1
        print_json({"index": index, "artifact": artifact, "root": checkpoint.root.hex()})
    else:
        print_data(f"record {checkpoint.size - 1}: {artifact}")
    if options.source is None:
        note(
            f"measured this installation; it was not verified to be revision {options.revision}. "
            "To measure that revision, add --source CLONE"
        )
    return 0


def run_anchor(options: LogAnchorOptions) -> int:
    key = private_key(options.key)
    number, _, digest = options.head.partition(":")
    try:
        anchor = AuditAnchor(int(number) if number.isdecimal() else 0, digest)
    except LogError as error:
        raise OperatorError(str(error), hint="papaya audit-trail show prints the head") from error
    with own_log(options.log), writing(options.log):
        checkpoint = folder_of(options.log).append([anchor.encode()], key)
    index = checkpoint.size - 1
    if options.is_json:
        print_json({"index": index, "root": checkpoint.root.hex()})
    else:
        print_data(f"record {index}: head {options.head} of an audit trail")
    return 0


def run_cosign(options: LogCosignOptions) -> int:
    if options.remember is None:
        hint = "add --remember FILE, with the same file each time"
        raise OperatorError("a witness must remember the checkpoint that it signed", hint=hint)
    key = private_key(options.key)
    if key.kind != COSIGNATURE:
        raise OperatorError(
            f"{options.key} is not the key of a witness",
            hint="papaya log key --witness --name NAME --output FILE",
        )
    reader = reader_of(options, policy_of(options))
    with refusals(), keeping():
        checkpoint = reader.refresh(now())  # saved first: a witness never signs two histories
    print_data(key.signature_line(checkpoint.text, int(now())).rstrip("\n"))
    return 0


def run_add_cosignature(options: LogAddCosignatureOptions) -> int:
    witness = public_key(options.witness)
    with own_log(options.log), writing(options.log):
        folder = folder_of(options.log)
        folder.add_cosignature(f"{options.line}\n", witness, private_key(options.key))
    note(f"the checkpoint now has the signature of {witness.name}")
    return 0


def _measurements(options: LogAppendOptions, artifact: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    if options.software:
        found["software"] = {"mrenclave": artifact}
    if options.sgx:
        found["sgx"] = {"mrenclave": options.sgx}
    if options.tdx:
        pairs = [part.partition("=") for part in options.tdx.split(",")]
        found["tdx"] = {name.strip(): value.strip() for name, _, value in pairs}
    return found
