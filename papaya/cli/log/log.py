"""`papaya log`: write a verifiable log of TSA binaries, show it, and check it.

`append` measures the sources itself, so a record cannot name an artifact that they do not give. The
private key stays in a file of its own, never in the folder that is served. `verify` and `show`
believe a log only as far as its signatures, proofs and records go.
"""

from __future__ import annotations

import argparse
import os
import secrets
from pathlib import Path

from papaya.cli.log.source import (
    add_reading,
    folder_of,
    keeping,
    now,
    policy_of,
    private_key,
    public_key,
    reader_of,
    refusals,
)
from papaya.cli.output import Commands, add_format, note, plural, print_data, print_json, writing
from papaya.cli.tsa import artifact_hash, reading
from papaya.errors import OperatorError
from papaya.verifiable_log.errors import LogError
from papaya.verifiable_log.folder import LogFolder
from papaya.verifiable_log.note import COSIGNATURE, LOG_SIGNATURE, SignerKey
from papaya.verifiable_log.reader import LogReader
from papaya.verifiable_log.record import REGISTERS, Record


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "log",
        description="Write, show and check the log that devices and auditors read.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    _add_signing(actions)
    show = actions.add_parser(
        "show", help="print its records", description="Print the checkpoint and all records."
    )
    show.set_defaults(run=run_show)
    verify = actions.add_parser(
        "verify",
        help="check signatures, proofs and records",
        description="Check the checkpoint, that it continues the remembered one, and all records.",
    )
    verify.set_defaults(run=run_verify)
    for action in (show, verify):
        add_reading(action)
        add_format(action)


def run_show(options: argparse.Namespace) -> int:
    reader, entries = _read(options)
    shown = [{"index": i, **_fields(entry)} for i, entry in enumerate(entries)]
    if options.format == "json":
        print_json({"checkpoint": _checkpoint(reader), "records": shown})
        return 0
    checkpoint = reader.checkpoint
    print_data(f"{checkpoint.origin}: {plural(checkpoint.size, 'record')}")
    for fields in shown:
        print_data("")
        for name, value in fields.items():
            print_data(f"{name:18} {value}")
    return 0


def run_verify(options: argparse.Namespace) -> int:
    reader, entries = _read(options)
    with refusals():
        for index, entry in enumerate(entries):
            try:
                Record.decode(entry)
            except LogError as error:
                raise LogError(f"record {index}: {error}") from error
    if options.format == "json":
        print_json({"checkpoint": _checkpoint(reader), "records": len(entries)})
    else:
        print_data(f"{reader.checkpoint.origin}: {plural(len(entries), 'record')}, all in order")
    if not options.witness:
        note("no witnesses were named: this log could still show others another history")
    return 0


def _read(options: argparse.Namespace) -> tuple[LogReader, list[bytes]]:
    reader = reader_of(options, policy_of(options))
    with refusals(), keeping():
        reader.refresh(now())
        return reader, reader.entries()


def _checkpoint(reader: LogReader) -> dict[str, str | int]:
    found = reader.checkpoint
    return {"origin": found.origin, "size": found.size, "root": found.root.hex()}


def _fields(entry: bytes) -> dict[str, str]:
    """Of a record for people; one that is not in order is shown as it is, and said to be so."""
    try:
        record = Record.decode(entry)
    except LogError as error:
        return {"not in order": str(error), "bytes": ascii(entry[:400])}
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


_RECIPE = "papaya tsa build"

_RECORD_HINT = (
    "--revision is what `git rev-parse HEAD` prints; measurements are --sgx, --tdx or --software"
)


def _add_signing(actions: Commands) -> None:
    key = actions.add_parser("key", help="make the key of a log or of a witness")
    key.set_defaults(run=run_key)
    key.add_argument("--name", required=True, metavar="NAME", help="such as example.org/tsa-log")
    key.add_argument("--output", required=True, type=Path, metavar="FILE", help="the private key")
    key.add_argument("--witness", action="store_true", help="for a witness, not for a log")

    create = actions.add_parser("create", help="make an empty log")
    create.set_defaults(run=run_create)

    append = actions.add_parser("append", help="add a release of the TSA binary")
    append.set_defaults(run=run_append)
    append.add_argument("--repository", required=True, metavar="URL", help="where the source is")
    append.add_argument("--revision", required=True, metavar="REV", help="of the source, in full")
    append.add_argument("--recipe", default=_RECIPE, metavar="TEXT", help="how it was built")
    append.add_argument(
        "--source", type=Path, metavar="DIR", help="a clone: that revision of it is measured"
    )
    append.add_argument("--software", action="store_true", help="for insecure software evidence")
    append.add_argument("--sgx", metavar="HEX", help="MRENCLAVE of the signed enclave")
    append.add_argument(
        "--tdx", metavar="REGISTER=HEX,…", help=f"all of {', '.join(REGISTERS['tdx'])}"
    )
    add_format(append)

    cosign = actions.add_parser("cosign", help="as a witness, sign what continues what you saw")
    cosign.set_defaults(run=run_cosign)
    cosign.add_argument("--key", required=True, type=Path, metavar="FILE", help="the witness's")
    add_reading(cosign)

    add = actions.add_parser("add-cosignature", help="publish a witness's signature")
    add.set_defaults(run=run_add_cosignature)
    add.add_argument("--witness", required=True, metavar="KEY", help="the witness's public key")
    add.add_argument("--line", required=True, metavar="TEXT", help="what `cosign` printed")
    for action in (create, append, add):
        action.add_argument(
            "--log", required=True, type=Path, metavar="DIR", help="the folder that is served"
        )
        action.add_argument(
            "--key", required=True, type=Path, metavar="FILE", help="the log's private key"
        )


def run_key(options: argparse.Namespace) -> int:
    kind = COSIGNATURE if options.witness else LOG_SIGNATURE
    try:
        key = SignerKey(options.name, secrets.token_bytes(32), kind)
    except LogError as error:
        raise OperatorError(str(error), hint="use a name like example.org/tsa-log") from error
    if options.output.exists():
        hint = "a log whose key is gone cannot go on: choose another name with --output"
        raise OperatorError(f"{options.output} is there, and a key is never replaced", hint=hint)
    with writing(options.output):
        handle = os.open(options.output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(f"{key.reveal()}\n")
        public = options.output.with_name(f"{options.output.name}.pub")
        public.write_text(f"{key.verifier}\n")
    print_data(str(key.verifier))
    note(f"the private key is in {options.output}: keep it out of the folder that is served")
    return 0


def run_create(options: argparse.Namespace) -> int:
    key = private_key(options.key)
    with writing(options.log), refusals():
        LogFolder(options.log).create(key)
    print_data(str(key.verifier))
    return 0


def run_append(options: argparse.Namespace) -> int:
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
    with refusals(), writing(options.log):
        checkpoint = folder_of(options.log).append([record.encode()], key)
    if options.format == "json":
        index = checkpoint.size - 1
        print_json({"index": index, "artifact": artifact, "root": checkpoint.root.hex()})
    else:
        print_data(f"record {checkpoint.size - 1}: {artifact}")
    if options.source is None:
        note(
            f"this installation was measured: revision {options.revision} is only a claim."
            " With --source CLONE that revision is measured"
        )
    return 0


def run_cosign(options: argparse.Namespace) -> int:
    if options.remember is None:
        hint = "papaya log cosign --remember FILE …"
        raise OperatorError("a witness must remember what it signed", hint=hint)
    key = private_key(options.key)
    if key.kind != COSIGNATURE:
        raise OperatorError(
            f"{options.key} is not a witness's key", hint="papaya log key --witness"
        )
    reader = reader_of(options, policy_of(options))
    with refusals(), keeping():
        checkpoint = reader.refresh(now())  # kept before the signature leaves: never two histories
    print_data(key.signature_line(checkpoint.text, int(now())).rstrip("\n"))
    return 0


def run_add_cosignature(options: argparse.Namespace) -> int:
    witness = public_key(options.witness)
    with refusals(), writing(options.log):
        folder = folder_of(options.log)
        folder.add_cosignature(f"{options.line}\n", witness, private_key(options.key))
    note(f"the checkpoint now carries the signature of {witness.name}")
    return 0


def _measurements(options: argparse.Namespace, artifact: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    if options.software:
        found["software"] = {"mrenclave": artifact}
    if options.sgx:
        found["sgx"] = {"mrenclave": options.sgx}
    if options.tdx:
        pairs = [part.partition("=") for part in options.tdx.split(",")]
        found["tdx"] = {name.strip(): value.strip() for name, _, value in pairs}
    return found
