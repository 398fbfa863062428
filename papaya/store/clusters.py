"""Opens the state store of a cluster, and refuses that of another one.

The state store makes the cluster's id and keeps it. The file `cluster.id` of a data folder says
which cluster the folder belongs to: a process whose folder names another cluster than its database
is refused, so that two clusters do not mix their tasks.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from papaya.errors import OperatorError
from papaya.store.folders import sync_folder, unusable
from papaya.store.state import SqliteState

if TYPE_CHECKING:
    from papaya.store.postgresql import PostgresState

_NAME = "cluster.id"


def state_file(data: Path) -> Path:
    return data / "state.db"


def open_state(url: str | None, data: Path, name: str) -> SqliteState | PostgresState:
    """The state at this URL of PostgreSQL, or in the data folder. `name`: of this process."""
    if url is None:
        store: SqliteState | PostgresState = open_sqlite(data)
    else:
        if state_file(data).exists():  # also if it was copied: a backup would copy the old state
            raise OperatorError(
                f"{state_file(data)} exists, but state names a database",
                hint=f"copy it with papaya store migrate {data} URL, unless that has been done; "
                "then move it away",
            )
        store = open_postgresql(url, name, cluster=read_cluster(data))
    try:
        remember_cluster(data, store.cluster)
    except BaseException:
        store.close()
        raise
    return store


def open_sqlite(data: Path, cluster: str | None = None) -> SqliteState:
    """`cluster`: the id that a new file gets."""
    return SqliteState(state_file(data), cluster=cluster)


def open_postgresql(
    url: str, name: str, *, cluster: str | None = None, may_create: bool | None = None
) -> PostgresState:
    """`cluster` and `may_create` as in PostgresState."""
    try:
        from papaya.store.postgresql import PostgresState
    except ImportError as error:
        raise OperatorError(
            "state on PostgreSQL needs psycopg", hint="pip install 'papaya-fl[postgresql]'"
        ) from error
    return PostgresState(url, name, cluster=cluster, may_create=may_create)


def read_cluster(folder: Path) -> str | None:
    """None if the folder is new."""
    try:
        return (folder / _NAME).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(
            f"cannot read {folder / _NAME}: {error}",
            hint="restore it from a backup, or delete it if the folder was never used",
        ) from error


def remember_cluster(folder: Path, cluster: str) -> None:
    """Write the file durably. Raises OperatorError if the folder belongs to another cluster."""
    known = read_cluster(folder)
    if known is None:
        try:
            _write(folder / _NAME, cluster)
        except OSError as error:
            raise unusable(folder, error) from error
    elif known != cluster:
        raise OperatorError(
            f"the folder {folder} belongs to the cluster {known}, its state to {cluster}",
            hint="use a data folder of its own for each cluster",
        )


def _write(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)
