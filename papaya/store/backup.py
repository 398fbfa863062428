"""Backups of a cluster while its servers run, and their restoration as a new generation.

    back_up        one snapshot of all rows, then every blob that they name. A running server may
                   delete a blob in the meantime: then the next snapshot is taken.
    plan_restore   what a restoration would do; it changes nothing
    restore        the data folder of the plan replaces the present one, which is renamed

A backup is a folder with a SQLite file and files of blobs, wherever the cluster keeps them. State
on PostgreSQL is restored into an empty database, and blobs in a bucket under an empty prefix: what
was deleted in a bucket cannot be written there again.

What servers did after the backup is lost, but devices, caches and old processes remember it. So a
restored cluster is a new generation: its ticket keys are new, and epochs, boots, fences and version
numbers are above any that were used. Each running task continues with a new version that has the
parameters of its newest one. Its open buffers are given up, because their clients cannot be told
apart from those that came later. Running evaluations are cancelled.

The cluster keeps its id, so the folders of its processes still belong to it. Refused: a folder that
a server uses, a database or prefix that is not empty, a backup that is not complete.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from msgspec import structs

from papaya.config import TaskConfig
from papaya.errors import MissingBlob, OperatorError
from papaya.messages import owner, wire
from papaya.messages.base import BlobKey, TaskId
from papaya.messages.storage import (
    BootRow,
    ConsumedRow,
    EpochRow,
    FenceRow,
    LeaderRow,
    OptimizerRow,
    RecordRow,
    RolloutRow,
    Row,
    TaskRow,
    TicketKeyRow,
    VersionRow,
    blobs_of,
    fence_key,
    optimizer_key,
    rollout_key,
    task_key,
    ticket_key_key,
    version_key,
)
from papaya.store.blobs import FolderBlobs
from papaya.store.clusters import read_cluster
from papaya.store.folders import make_folder, sync_folder, unusable
from papaya.store.rows import AFTER_UTF8, decode_rows
from papaya.store.state import SqliteState

if TYPE_CHECKING:
    from papaya.store.postgresql import PostgresState
    from papaya.store.s3_blobs import S3Blobs

JUMP = 1_000_000
"""More than a cluster uses of any number between a backup and its restoration."""

_STATE, _BLOBS, _LOG, _COMPLETE = "state.db", "blobs", "log", "complete"
_OF_PROCESSES = (".lock", ".pid", ".sock")  # they mean nothing after a restoration
_SNAPSHOTS = 50
_RESTORED = "restored from a backup"

RowTable: TypeAlias = dict[str, Row]


class BackedUp(NamedTuple):
    tasks: int
    evaluations: int
    blobs: int
    missing: tuple[BlobKey, ...]  # named by a row, but lost before the backup


class RestorePlan(NamedTuple):
    backup: Path
    data: Path
    rows: RowTable
    blobs: tuple[BlobKey, ...]
    missing: tuple[BlobKey, ...]
    continued: tuple[tuple[TaskId, int, int], ...]  # task, its version in the backup, the new one
    cancelled: tuple[tuple[TaskId, str], ...]  # task and reason
    signed: tuple[tuple[str, str, TaskId], ...]  # name, revision and id of runs that continue


# -- backup ---------------------------------------------------------------------------------------


def back_up(
    data: Path,
    target: Path,
    *,
    database: PostgresState | None = None,
    bucket: S3Blobs | None = None,
) -> BackedUp:
    """Copy the data of a running or stopped cluster into a new folder.

    `database`, `bucket`: where the rows and the blobs are, if not in the data folder.
    """
    if database is None and not (data / _STATE).is_file():
        raise OperatorError(
            f"{data} has no {_STATE}",
            hint="give the data folder of a server: --data DIR, or its configuration: --config "
            "FILE, if its state is on PostgreSQL",
        )
    if database is not None and (known := read_cluster(data)) != database.cluster:
        raise OperatorError(
            f"the folder {data} belongs to {known or 'no cluster'}, the database to "
            f"{database.cluster}",
            hint="give the configuration of a server, on its machine: the tokens and keys are in "
            "its data folder",
        )
    with _new_folder(target):
        return _copy(data, target, database, bucket)


def _copy(
    data: Path, target: Path, database: PostgresState | None, bucket: S3Blobs | None
) -> BackedUp:
    source = FolderBlobs(data / _BLOBS) if bucket is None else bucket
    copies = FolderBlobs(target / _BLOBS)
    missing: frozenset[BlobKey] = frozenset()
    for _ in range(_SNAPSHOTS):
        if database is None:
            _copy_state(data / _STATE, target / _STATE)
        else:
            _copy_database(database, target / _STATE)
        rows = read_rows(target / _STATE)
        named = {key for row in rows.values() for key in blobs_of(row)}
        before, missing = missing, frozenset(_copy_all(source, copies, named))
        if missing <= before:
            break  # nothing is missing, or the same as in the snapshot before: it was lost earlier
    else:
        raise OperatorError(
            f"blobs are deleted faster than they can be copied: {len(missing)} are missing",
            hint="write the backup to a faster disk, or pause the tasks meanwhile",
        )
    if named and missing == named:
        raise OperatorError(
            f"none of the {len(named)} blobs was found",
            hint="if the blobs are in a bucket, give the configuration of a server: --config FILE",
        )
    _copy_files(data, target)
    (target / _COMPLETE).touch()
    sync_folder(target)
    evaluates = [row.config.evaluates is not None for row in _tasks(rows)]
    return BackedUp(
        tasks=evaluates.count(False),
        evaluations=evaluates.count(True),
        blobs=len(named) - len(missing),
        missing=tuple(sorted(missing)),
    )


def _tasks(rows: RowTable) -> list[TaskRow]:
    return [row for row in rows.values() if isinstance(row, TaskRow)]


@contextmanager
def _new_folder(target: Path) -> Iterator[None]:
    """Make a folder; if the block fails, remove it, so that the same command can be repeated."""
    make_folder(target.parent)
    try:
        target.mkdir(mode=0o700)  # of two backups at the same time, one makes it
    except FileExistsError:
        is_backup = (target / _COMPLETE).exists()
        raise OperatorError(
            f"{target} exists already{'' if is_backup else ', and is not a complete backup'}",
            hint="choose a new folder for each backup",
        ) from None
    except OSError as error:
        raise unusable(target, error) from error
    sync_folder(target.parent)
    try:
        yield
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def read_rows(path: Path, *, live: bool = False) -> RowTable:
    """All rows of a database, without changing it. `live`: servers use it, or did so until now."""
    mode = "mode=ro" if live else "mode=ro&immutable=1"  # immutable: SQLite ignores a WAL
    try:
        with closing(sqlite3.connect(f"file:{path}?{mode}", uri=True)) as database:
            found = database.execute(
                "SELECT key, row FROM rows WHERE key < ?", (AFTER_UTF8,)
            ).fetchall()
    except sqlite3.Error as error:
        raise OperatorError(
            f"cannot read {path}: {error}", hint="give a folder that papaya store backup has made"
        ) from error
    return decode_rows(dict(found), path)


def _copy_state(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    target.touch(mode=0o600)
    try:
        with (
            closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True)) as live,
            closing(sqlite3.connect(target)) as copy,
        ):
            live.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")  # one file, without a WAL beside it
    except sqlite3.Error as error:
        raise OperatorError(
            f"cannot copy {source}: {error}", hint="check the disks of both folders"
        ) from error


def _copy_database(source: PostgresState, target: Path) -> None:
    target.unlink(missing_ok=True)
    with closing(SqliteState(target, cluster=source.cluster)) as copy:
        copy.fill(source.raw_rows())


def _copy_all(
    source: FolderBlobs | S3Blobs, copies: FolderBlobs, keys: set[BlobKey]
) -> Iterator[BlobKey]:
    """Copy blobs that are not copied yet. Yields those that are missing."""
    for key in sorted(keys):
        with suppress(MissingBlob):
            copies.size(key)
            continue
        try:
            _copy_blob(source, copies, key)
        except (MissingBlob, FileNotFoundError):
            yield key


def _copy_blob(source: FolderBlobs | S3Blobs, copies: FolderBlobs | S3Blobs, key: BlobKey) -> None:
    """Through the page cache, so that a large blob needs no memory of its own."""
    with source.path(key).open("rb") as file:
        if not file.seek(0, 2):
            copies.put(key, b"")
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if not key.endswith(sha256(content).hexdigest()[:32]):
                raise OperatorError(
                    f"blob {key} is damaged: its content has another hash",
                    hint="check the disk; papaya task rollback uses an earlier version",
                )
            with memoryview(content) as view:
                copies.put(key, view)


def _copy_files(source: Path, target: Path) -> None:
    """Tokens, keys and the log of TSA binaries, durably."""
    try:
        for file in source.iterdir():
            is_own = file.name.startswith(_STATE) or file.suffix in _OF_PROCESSES
            if file.is_file() and not is_own and file.name != _COMPLETE:
                _copy_file(file, target / file.name)
        if (source / _LOG).is_dir():
            shutil.copytree(source / _LOG, target / _LOG, copy_function=_copy_file)
            for folder, _, _ in os.walk(target / _LOG):
                sync_folder(Path(folder))
        sync_folder(target)
    except OSError as error:
        raise unusable(target, error) from error


def _copy_file(source: Path | str, target: Path | str) -> None:
    shutil.copy2(source, target)
    with open(target, "rb") as file:
        os.fsync(file.fileno())


# -- restore --------------------------------------------------------------------------------------


def plan_restore(
    backup: Path, data: Path, now: float, ticket_key: bytes, *, preview: bool = False
) -> RestorePlan:
    """`ticket_key` is 32 random bytes. The new numbers are above those of the present data too.

    `preview`: the plan is only shown, so servers of the data folder may run.
    """
    if not (backup / _COMPLETE).exists():
        raise OperatorError(
            f"{backup} is not a complete backup",
            hint="give a folder that papaya store backup has made",
        )
    rows, copies = read_rows(backup / _STATE), FolderBlobs(backup / _BLOBS)
    named = {key for row in rows.values() for key in blobs_of(row)}
    missing = frozenset(key for key in named if not _is_in(copies, key))
    with nullcontext() if preview else _unused(data):
        present = _numbers(_present_rows(data))
    plan = _NewGeneration(rows, missing, present, now, ticket_key)
    kept = {key for row in plan.rows.values() for key in blobs_of(row)}
    return RestorePlan(
        backup,
        data,
        plan.rows,
        tuple(sorted(kept - missing)),
        tuple(sorted(missing)),
        tuple(plan.continued),
        tuple(plan.cancelled),
        tuple(plan.signed),
    )


def restore(
    plan: RestorePlan,
    now: float,
    *,
    database: PostgresState | None = None,
    bucket: S3Blobs | None = None,
) -> Path | None:
    """Carry the plan out. Returns where the data folder that it replaces is now.

    `database`, `bucket`: where the rows and the blobs go, if not into the data folder. Both must be
    empty.
    """
    data, cluster = plan.data, read_cluster(plan.backup)
    _require_empty(database, bucket)
    with _unused(data):  # before anything is written: neither place could be used a second time
        new = data.with_name(f"{data.name}.restoring")
        shutil.rmtree(new, ignore_errors=True)
        make_folder(new)
        copies = FolderBlobs(plan.backup / _BLOBS)
        if bucket is not None and cluster is not None:
            bucket.claim(cluster)
        restored = FolderBlobs(new / _BLOBS) if bucket is None else bucket
        for key in plan.blobs:
            _copy_blob(copies, restored, key)
        rows = {key.encode(): wire.encode_row(row) for key, row in plan.rows.items()}
        if database is not None:
            database.fill(rows)
        else:
            with closing(SqliteState(new / _STATE, cluster=cluster)) as state:
                state.fill(rows)
        _copy_files(plan.backup, new)
        before = None
        if data.exists():
            before = data.with_name(f"{data.name}.before-{now:.0f}")
            data.rename(before)
        new.rename(data)
        sync_folder(data.parent.resolve())
    return before


def _require_empty(database: PostgresState | None, bucket: S3Blobs | None) -> None:
    """To refuse before blobs are copied. `fill` checks the database once more."""
    if database is not None:
        database.require_empty()
    if bucket is not None and bucket.has_blobs():
        raise OperatorError(
            f"{bucket.where} already holds blobs",
            hint="name another prefix in blobs, in the configuration of all servers",
        )


class _NewGeneration:
    """The rows of a backup, changed so that nothing of the lost time fits them."""

    def __init__(
        self,
        rows: RowTable,
        missing: frozenset[BlobKey],
        present: Mapping[str, int],
        now: float,
        ticket_key: bytes,
    ) -> None:
        self.rows: RowTable = {}
        self.continued: list[tuple[TaskId, int, int]] = []
        self.cancelled: list[tuple[TaskId, str]] = []
        self.signed: list[tuple[str, str, TaskId]] = []
        self._missing = missing
        self._now = now
        newest = {**_numbers(rows)}
        for key, number in present.items():
            newest[key] = max(number, newest.get(key, 0))
        self._next = {key: number + JUMP for key, number in newest.items()}
        for key, row in rows.items():
            self._take(key, row)
        new_key = ticket_key_key(self._next.get("ticket-key", JUMP))
        self.rows[new_key] = TicketKeyRow(ticket_key, now)
        for row in _tasks(rows):
            self._take_task(row, rows)

    def _take(self, key: str, row: Row) -> None:
        match row:
            case LeaderRow():
                self.rows[key] = structs.replace(row, epoch=self._next["epoch"])
            case EpochRow():
                self.rows[key] = EpochRow(self._next["epoch"])
            case BootRow():
                self.rows[key] = BootRow(self._next[key])
            case FenceRow():
                self.rows[key] = FenceRow(self._next[key], "", 0.0)
            case RecordRow() | ConsumedRow() | TicketKeyRow():
                pass  # no ticket of the lost time can be opened any more
            case VersionRow() if row.parameters in self._missing:
                pass
            case _:
                self.rows[key] = row

    def _take_task(self, row: TaskRow, rows: RowTable) -> None:
        task = row.config.task
        if row.is_over:
            return
        optimizer = rows[optimizer_key(task)]
        assert isinstance(optimizer, OptimizerRow)
        newest = rows[version_key(task, optimizer.version)]
        needed = [key for found in (row, optimizer, newest) for key in blobs_of(found)]
        if row.config.evaluates is not None:
            self._cancel(row, f"{_RESTORED}: start the evaluation again")
        elif lost := [key for key in needed if key in self._missing]:
            self._cancel(row, f"{_RESTORED} without {lost[0]}")
        else:
            assert isinstance(newest, VersionRow)
            self._continue(row, newest, optimizer)

    def _cancel(self, row: TaskRow, why: str) -> None:
        self.cancelled.append((row.config.task, why))
        self.rows |= dict(owner.change_state(row, "cancelled", self._now, why).put)

    def _continue(self, row: TaskRow, newest: VersionRow, optimizer: OptimizerRow) -> None:
        config, task = row.config, row.config.task
        head = self._next[f"version/{task}"]
        later, candidate = head - newest.version, row.candidate
        if candidate is not None:
            candidate = structs.replace(candidate, config=_stops_later(candidate.config, later))
        config = _stops_later(config, later)
        self.rows[task_key(task)] = structs.replace(row, config=config, candidate=candidate)
        rollout = self.rows.get(rollout_key(task))
        if isinstance(rollout, RolloutRow):
            # One of these replaces the settings of the task when the rollout ends.
            self.rows[rollout_key(task)] = structs.replace(
                rollout,
                candidate=_stops_later(rollout.candidate, later),
                fallback_config=_stops_later(rollout.fallback_config, later),
            )
        seq = self._next[fence_key(task)]
        self.rows[version_key(task, head)] = VersionRow(
            head, newest.parameters, seq, self._now, marked=True, restarts=True
        )
        self.rows[optimizer_key(task)] = OptimizerRow(head, optimizer.state, settled=head)
        self.continued.append((task, newest.version, head))
        if row.name and (bundle := row.config.requirements.bundle):
            self.signed.append((row.name, bundle.rsplit("/", 1)[1].split("-")[1], task))


def _stops_later(config: TaskConfig, versions: int) -> TaskConfig:
    """The settings with a last version that is so much higher, if they have one."""
    last = config.stop.versions
    if last is None:
        return config
    return structs.replace(config, stop=structs.replace(config.stop, versions=last + versions))


def _numbers(rows: RowTable) -> dict[str, int]:
    """The highest number of each kind that these rows have used."""
    found: dict[str, int] = {}

    def use(name: str, number: int) -> None:
        found[name] = max(number, found.get(name, 0))

    for key, row in rows.items():
        match row:
            case LeaderRow() | EpochRow():
                use("epoch", row.epoch)
            case BootRow():
                use(key, row.number)
            case FenceRow():
                use(key, row.seq)
            case VersionRow():
                use(key.rpartition("/")[0], row.version)
            case TicketKeyRow():
                use("ticket-key", int(key.rpartition("/")[2]))
    return found


def _present_rows(data: Path) -> RowTable:
    """The rows that a restoration would replace; none if they cannot be read."""
    if not (data / _STATE).is_file():
        return {}
    try:
        return read_rows(data / _STATE, live=True)
    except OperatorError:
        return {}  # damaged: this may be why it is restored


def _is_in(blobs: FolderBlobs, key: BlobKey) -> bool:
    with suppress(MissingBlob):
        return blobs.size(key) >= 0
    return False


@contextmanager
def _unused(data: Path) -> Iterator[None]:
    """Keep servers from starting on the folder. Refused while one runs."""
    with ExitStack() as locks:
        for path in sorted(data.glob("*.lock")):
            file = locks.enter_context(path.open("ab"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise OperatorError(
                    f"a server runs on {data}", hint="stop all servers of the folder first"
                ) from error
        yield
