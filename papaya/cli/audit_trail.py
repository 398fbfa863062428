"""`papaya audit-trail`: every change that a person made to a system, or tried to make.

    show         print the trail of a running server, after checking its chain of digests
    export FILE  write all rows to a file, as JSON
    check FILE   check exported files, without a server
    prune FILE   delete rows that were exported from the server

A row contains the digest of the row before it. So whoever has noted a digest can detect every
change, removal or insertion up to that row, even if the state store itself was edited.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from papaya.cli.admin_client import (
    AdminClient,
    ConnectionOptions,
    add_connection,
    add_reason,
    client_for,
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
    table,
    whole,
    writing,
)
from papaya.errors import OperatorError
from papaya.messages.audit_trail import AuditError, AuditHeadRow, AuditRow, AuditStartRow, verify
from papaya.server.admin.views import AuditPage, PruneTrail

_PATH = "/admin/audit"


@dataclass(frozen=True, kw_only=True)
class TrailShowOptions(ConnectionOptions):
    after: int = 0


@dataclass(frozen=True, kw_only=True)
class TrailExportOptions(ConnectionOptions):
    file: Path


@dataclass(frozen=True, kw_only=True)
class TrailCheckOptions(FormatOptions):
    files: list[Path]
    head: str = ""


@dataclass(frozen=True, kw_only=True)
class TrailPruneOptions(ConnectionOptions):
    file: Path
    why: str = ""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "audit-trail",
        description="Show, export and check the audit trail: every change that a person made or "
        "tried to make, with who, when, what, why and the result.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = actions.add_parser(
        "show",
        help="check and print the trail of a running server",
        description="Check the whole trail of a running server, and print its rows.",
    )
    show.add_argument(
        "--after", type=whole(0), metavar="N", help="print only the rows after this number"
    )
    add_connection(show)
    bind(show, TrailShowOptions, run_show)
    export = actions.add_parser(
        "export",
        help="write all rows to a file",
        description="Check the trail of a running server, and write all its rows to a file.",
    )
    export.add_argument("file", type=Path, metavar="FILE", help="JSON file to write")
    add_connection(export)
    bind(export, TrailExportOptions, run_export)
    check = actions.add_parser(
        "check",
        help="check exported rows, without a server",
        description="Check exported files, each of which continues the one before it. Row 1 is "
        "the first row of the first file, unless earlier rows were deleted.",
    )
    check.add_argument("files", type=Path, nargs="+", metavar="FILE", help="exported file")
    check.add_argument(
        "--head",
        metavar="NUMBER:DIGEST",
        help="digest that the row with this number must have, for example one that was noted "
        "elsewhere or anchored in a public log",
    )
    add_format(check)
    bind(check, TrailCheckOptions, run_check)
    prune = actions.add_parser(
        "prune",
        help="delete exported rows from the server",
        description="Delete the rows of an exported file from the server. What is left continues "
        "the file: keep it.",
    )
    prune.add_argument("file", type=Path, metavar="FILE", help="exported file")
    add_reason(prune)
    add_connection(prune)
    bind(prune, TrailPruneOptions, run_prune)


def run_show(options: TrailShowOptions) -> int:
    trail = fetch(client_for(options))
    rows = tuple(row for row in trail.rows if row.number > options.after)
    if options.is_json:
        print_json(AuditPage(trail.start, trail.head, rows))
        return 0
    # What was changed can be long: it is the last column, and aligned to the left.
    width = max((len(_what(row)) for row in rows), default=0)
    lines = [
        (str(row.number), _date(row.at), *_words(row), _what(row).ljust(width)) for row in rows
    ]
    header = ("number", "when (UTC)", "who", "result", "why", "what".ljust(width))
    print_data(table(header, lines))
    note(f"the trail is intact; its head is {_named(trail.head.number, trail.head.digest)}")
    return 0


def _words(row: AuditRow) -> tuple[str, ...]:
    return row.attempt.actor, row.result, row.attempt.why or "-"


def _what(row: AuditRow) -> str:
    by = row.attempt
    details = "" if by.details == "{}" else by.details
    return " ".join(filter(None, (by.action, by.target, details)))


def run_export(options: TrailExportOptions) -> int:
    trail = fetch(client_for(options))
    with writing(options.file):
        options.file.write_bytes(msgspec.json.encode(trail) + b"\n")
    _tell(options, trail.head, len(trail.rows))
    return 0


def run_check(options: TrailCheckOptions) -> int:
    ends = {""}
    last: AuditHeadRow | None = None
    count = 0
    for file in options.files:
        trail = read(file)
        start = trail.start
        if last is not None and (last.number, last.digest) != (start.number, start.digest):
            raise AuditError(
                f"{file} does not continue the file before it: it begins after row "
                f"{start.number}, but the file before it ends with row {last.number}",
                hint="give the files in the order of their rows",
            )
        last = trail.head
        count += len(trail.rows)
        ends |= {_named(start.number, start.digest)}
        ends |= {_named(row.number, row.digest) for row in trail.rows}
    if options.head not in ends:
        raise AuditError(
            f"no row of these files is {options.head}",
            hint="the rows were changed after this digest was noted, or are in another file",
        )
    assert last is not None
    _tell(options, last, count)
    return 0


def run_prune(options: TrailPruneOptions) -> int:
    head = read(options.file).head
    request = PruneTrail(head.number, head.digest, options.why)
    left = client_for(options).post(f"{_PATH}/prune", request, AuditPage)
    if options.is_json:
        print_json(left)
    else:
        print_data(f"the trail continues after row {left.start.number}; keep {options.file}")
    return 0


def fetch(client: AdminClient) -> AuditPage:
    """The whole trail of a server, in order."""
    page = client.get(f"{_PATH}?after=0", AuditPage)
    rows = list(page.rows)
    while rows and rows[-1].number < page.head.number:
        following = client.get(f"{_PATH}?after={rows[-1].number}", AuditPage).rows
        if not following:
            break
        rows += [row for row in following if row.number <= page.head.number]
    return _checked(AuditPage(page.start, page.head, tuple(rows)))


def read(file: Path) -> AuditPage:
    """The rows of an exported file, in order."""
    try:
        return _checked(msgspec.json.decode(file.read_bytes(), type=AuditPage))
    except OSError as error:
        raise OperatorError(
            f"cannot read {file}: {error.strerror}", hint="check the path"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AuditError(
            f"{file} is not an exported audit trail: {error}", hint="papaya audit-trail export FILE"
        ) from error


def _checked(trail: AuditPage) -> AuditPage:
    start: AuditStartRow = trail.start
    number, digest = verify(trail.rows, start.number, start.digest)
    if (number, digest) != (trail.head.number, trail.head.digest):
        raise AuditError(
            f"the last row of the audit trail, row {number}, does not match its head, row "
            f"{trail.head.number}: the last rows were changed or removed",
            hint="compare with an earlier export: papaya audit-trail check FILE",
        )
    return trail


def _tell(options: FormatOptions, head: AuditHeadRow, count: int) -> None:
    if options.is_json:
        print_json({"rows": count, "head": head.number, "digest": head.digest.hex()})
    else:
        print_data(f"{plural(count, 'row')}, all intact; head {_named(head.number, head.digest)}")


def _named(number: int, digest: bytes) -> str:
    return f"{number}:{digest.hex()}"


def _date(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%F %T}"
