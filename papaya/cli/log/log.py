"""`papaya log`: write a verifiable log of TSA binaries, show it, and check it.

`append` measures the sources itself, so a record cannot name an artifact that they do not give. The
private key stays in a file of its own, never in the folder that is served. `verify` and `show`
believe a log only as far as its signatures, proofs and records go.
"""

from __future__ import annotations

import argparse

from papaya.cli.log import write as log_write
from papaya.cli.log.source import add_reading, keeping, now, policy_of, reader_of, refusals
from papaya.cli.output import Commands, add_format, note, plural, print_data, print_json
from papaya.verifiable_log.errors import LogError
from papaya.verifiable_log.reader import LogReader
from papaya.verifiable_log.record import Record


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "log",
        description="Write, show and check the log that devices and auditors read.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    log_write.add_to(actions)
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
