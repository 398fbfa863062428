"""`papaya store`: moves, backs up and restores the data of a cluster.

`papaya store migrate` copies the state from SQLite to PostgreSQL, or back. All servers must be
stopped. The copy is one transaction into an empty place, and it is compared with its source, byte
by byte. The source stays as it is.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from papaya.cli import store_backup
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
from papaya.config.deployment import check_state_url
from papaya.errors import InvariantError, OperatorError
from papaya.store.clusters import (
    open_postgresql,
    open_sqlite,
    read_cluster,
    remember_cluster,
    state_file,
)
from papaya.store.folders import make_folder
from papaya.store.rows import RawRows
from papaya.store.state import SqliteState

if TYPE_CHECKING:
    from papaya.store.postgresql import PostgresState

AnyState: TypeAlias = "SqliteState | PostgresState"

_NAME = "papaya store migrate"
_STOP = "stop all servers of the cluster first: what they write now would be missing in the copy"


@dataclass(frozen=True, kw_only=True)
class MigrateOptions(FormatOptions):
    source: str
    target: str


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "store", description="Back up, restore or move the data of a cluster."
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    migrate = actions.add_parser(
        "migrate",
        help="copy the state from SQLite to PostgreSQL, or back",
        description="Copy the state from a data folder to an empty database of PostgreSQL, or "
        "back, and compare the copy with its source. Stop all servers first. Blobs and tokens are "
        "not copied.",
    )
    place = "data folder, or postgresql://user@host/database"
    migrate.add_argument("source", metavar="FROM", help=place)
    migrate.add_argument("target", metavar="TO", help=f"{place}; it must hold no state")
    add_format(migrate)
    bind(migrate, MigrateOptions, run_migrate)
    store_backup.add_to(actions)


def run_migrate(options: MigrateOptions) -> int:
    with ExitStack() as stack:
        source = stack.enter_context(_source(options.source))
        rows = source.raw_rows()
        target = stack.enter_context(_target(options.target, source.cluster))
        target.fill(rows)
        if target.raw_rows() != rows:
            raise InvariantError(
                "the copy differs from its source", hint="delete the copy; the source is unchanged"
            )
    _say(options, source.cluster, rows)
    return 0


def _say(options: MigrateOptions, cluster: str, rows: RawRows) -> None:
    digest = sha256()
    for key in sorted(rows):
        digest.update(b"%d %d\n" % (len(key), len(rows[key])) + key + rows[key])
    if options.is_json:
        print_json({"cluster": cluster, "rows": len(rows), "sha256": digest.hexdigest()})
    else:
        print_data(f"copied and compared {plural(len(rows), 'row')} of cluster {cluster}")
        print_data(f"sha256 {digest.hexdigest()}")
    note("move the old state away, and start all servers with the new one")


@contextmanager
def _source(place: str) -> Iterator[AnyState]:
    if _is_url(place):
        with closing(open_postgresql(place, _NAME, may_create=False)) as database:
            _require_alone(database)
            yield database
        return
    folder = Path(place)
    if not state_file(folder).exists():
        raise OperatorError(
            f"{folder} has no state: there is no file {state_file(folder)}",
            hint="give the data folder of the servers, or a URL of PostgreSQL",
        )
    with _stopped(folder), closing(open_sqlite(folder)) as file:
        remember_cluster(folder, file.cluster)
        yield file


@contextmanager
def _target(place: str, cluster: str) -> Iterator[AnyState]:
    if _is_url(place):
        with closing(open_postgresql(place, _NAME, cluster=cluster, may_create=True)) as database:
            _require_alone(database)
            database.require_empty()
            yield database
        return
    folder = Path(place)
    make_folder(folder)
    if state_file(folder).exists():
        raise OperatorError(
            f"{folder} already holds state",
            hint=f"move {state_file(folder)} away, or give another folder",
        )
    if read_cluster(folder) not in (None, cluster):
        remember_cluster(folder, cluster)  # raises
    with _stopped(folder), closing(open_sqlite(folder, cluster)) as file:
        remember_cluster(folder, cluster)
        yield file


def _is_url(place: str) -> bool:
    if "://" not in place:
        return False
    check_state_url(place)
    return True


def _require_alone(database: PostgresState) -> None:
    if others := database.others():
        raise OperatorError(
            f"{plural(others, 'server')} of the cluster {database.cluster} "
            f"{'is' if others == 1 else 'are'} connected",
            hint=_STOP,
        )


@contextmanager
def _stopped(folder: Path) -> Iterator[None]:
    """No server runs on the folder, and none starts under a name that was used before."""
    with ExitStack() as stack:
        for path in folder.glob("*.lock"):
            file = stack.enter_context(path.open("r", encoding="ascii"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise OperatorError(f"a server runs on {folder}", hint=_STOP) from error
        yield
