"""`papaya tsa`: build the TSA binary, or say what hash it has.

Both follow from the sources and the lock alone, so anyone can repeat them and compare with the log.
`measure` needs no network; `build` fetches the dependencies, unless it is given a folder with them.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

from papaya.cli.output import Commands, add_format, note, print_data, print_json, writing
from papaya.cli.tsa.artifact import artifact_hash, build, from_folder, from_revision
from papaya.tsa.measurement import ReadSource, installed

_DEFAULT_OUTPUT = Path("papaya-tsa.zip")


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "tsa",
        description="The TSA of secure aggregation, as anyone can build it.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    building = actions.add_parser(
        "build",
        help="make the artifact",
        description="Make the artifact that an enclave runs, with its dependencies, byte for byte.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    building.set_defaults(run=run_build)
    building.add_argument(
        "--output", type=Path, default=_DEFAULT_OUTPUT, metavar="FILE", help="the zip file to write"
    )
    building.add_argument(
        "--wheels", type=Path, metavar="DIR", help="take the dependencies from here, not from pip"
    )
    measuring = actions.add_parser(
        "measure",
        help="print the artifact's hash",
        description="Print the hash that the artifact has: what `software` evidence reports.",
    )
    measuring.set_defaults(run=run_measure)
    for action in (building, measuring):
        action.add_argument(
            "--source", type=Path, metavar="DIR", help="sources: this installation's by default"
        )
        action.add_argument(
            "--revision", metavar="REV", help="a git revision of the sources, which must be a clone"
        )
        add_format(action)


def run_build(options: argparse.Namespace) -> int:
    read = reading(options.source, options.revision)
    data = build(read, options.wheels)
    with writing(options.output):
        options.output.write_bytes(data)
    found = {
        "artifact": artifact_hash(read),
        "file": str(options.output),
        "file_sha256": hashlib.sha256(data).hexdigest(),
        "bytes": len(data),
    }
    if options.format == "json":
        print_json(found)
    else:
        print_data(str(found["artifact"]))
        note(f"{options.output}: {len(data):,} bytes, file SHA-256 {found['file_sha256']}")
    return 0


def run_measure(options: argparse.Namespace) -> int:
    found = artifact_hash(reading(options.source, options.revision))
    if options.format == "json":
        print_json({"artifact": found})
    else:
        print_data(found)
    return 0


def reading(source: Path | None, revision: str | None) -> ReadSource:
    if revision is not None:
        return from_revision(source or Path(), revision)
    return installed if source is None else from_folder(source)
