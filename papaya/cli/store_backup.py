"""`papaya store backup` and `papaya store restore`: tokens, rows and their blobs.

With `--config`, rows may be on PostgreSQL and blobs in a bucket.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

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
from papaya.config import Deployment
from papaya.errors import OperatorError
from papaya.store import backup
from papaya.store.clusters import open_postgresql, read_cluster
from papaya.store.folders import unusable

if TYPE_CHECKING:
    from papaya.store.postgresql import PostgresState
    from papaya.store.s3_blobs import S3Blobs

_NAME = "papaya store"
_CACHE = "store"
_DATA = Path(Deployment().data)
_KEY_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class BackupOptions(FormatOptions):
    folder: Path
    data: Path = _DATA
    config: Path | None = None

    @property
    def deployment(self) -> Deployment:
        if self.config is None:
            return Deployment(data=str(self.data))
        from papaya.server.deployment_file import read_deployment

        return read_deployment(self.config)


@dataclass(frozen=True, kw_only=True)
class RestoreOptions(BackupOptions):
    yes: bool = False


class Elsewhere(TypedDict):
    """What is not in the data folder."""

    database: PostgresState | None
    bucket: S3Blobs | None


def _open(
    stack: ExitStack, deployment: Deployment, *, may_create: bool, cluster: str | None = None
) -> Elsewhere:
    """`may_create`: in an empty database, for the cluster with this id."""
    from papaya.server.resources import open_bucket  # only if it is used: it needs obstore

    found = Elsewhere(database=None, bucket=None)
    if deployment.state is not None:
        database = open_postgresql(deployment.state, _NAME, cluster=cluster, may_create=may_create)
        found["database"] = stack.enter_context(closing(database))
    if deployment.blobs:
        stack.enter_context(_alone(Path(deployment.data)))
        found["bucket"] = open_bucket(deployment, _CACHE)
        copies = Path(deployment.data) / f"{_CACHE}.cache"
        stack.callback(shutil.rmtree, copies, ignore_errors=True)
    return found


@contextmanager
def _alone(data: Path) -> Iterator[None]:
    """Only one such command at a time: a second one would delete the copies that the first makes of
    blobs, and the blobs would look as if they were missing. The lock ends with the process.
    """
    if not data.is_dir():  # before a restoration
        yield
        return
    folder = os.open(data, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(folder, data)
        yield
    finally:
        os.close(folder)


def _lock(folder: int, data: Path) -> None:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OperatorError(
            f"another `papaya store` runs on {data}", hint="run this command when it has ended"
        ) from error
    except OSError as error:  # some network file systems lock no folders
        raise unusable(data, error) from error


def add_to(actions: Commands) -> None:
    made = actions.add_parser(
        "backup",
        help="copy the data of a cluster, also while its servers run",
        description="Copy rows, blobs, tokens and keys of a cluster into a new folder. The servers "
        "may run. The copy contains secrets.",
    )
    made.add_argument("folder", type=Path, metavar="FOLDER", help="new folder for the backup")
    restored = actions.add_parser(
        "restore",
        help="replace the data of a cluster with a backup",
        description="Show what restoring a backup would do; with --yes, do it. Before you use "
        "--yes, stop all servers. What happened after the backup is lost. If the state is on "
        "PostgreSQL or the blobs are in a bucket, name an empty database or an empty prefix in the "
        "configuration.",
    )
    restored.add_argument("folder", type=Path, metavar="FOLDER", help="folder of the backup")
    restored.add_argument("--yes", action="store_true", help="restore, instead of showing the plan")
    for action in (made, restored):
        place = action.add_mutually_exclusive_group()
        place.add_argument("--data", type=Path, metavar="DIR", help="data folder of the servers")
        place.add_argument(
            "--config",
            type=Path,
            metavar="FILE",
            help="configuration of a server, which names its data folder, state and blobs",
        )
        add_format(action)
    bind(made, BackupOptions, run_backup)
    bind(restored, RestoreOptions, run_restore)


def run_backup(options: BackupOptions) -> int:
    deployment = options.deployment
    with ExitStack() as stack:
        elsewhere = _open(stack, deployment, may_create=False)
        done = backup.back_up(Path(deployment.data), options.folder, **elsewhere)
    if options.format == "json":
        print_json(done._asdict())
    else:
        tasks, evaluations = plural(done.tasks, "task"), plural(done.evaluations, "evaluation")
        print_data(f"{options.folder}: {tasks}, {evaluations} and {plural(done.blobs, 'blob')}")
    for key in done.missing:
        note(f"missing, and missing before the backup: {key}")
    return 0


def run_restore(options: RestoreOptions) -> int:
    now, deployment = time.time(), options.deployment
    data = Path(deployment.data)
    key, preview = os.urandom(_KEY_BYTES), not options.yes
    plan = backup.plan_restore(options.folder, data, now, key, preview=preview)
    if options.format == "json":
        fields = ("continued", "cancelled", "missing", "signed")
        print_json({field: getattr(plan, field) for field in fields} | {"restored": options.yes})
    else:
        print_data("\n".join(_lines(plan)))
    if not options.yes:
        note("nothing was changed; to restore, run the command again with --yes")
        return 0
    with ExitStack() as stack:
        cluster = read_cluster(options.folder)
        elsewhere = _open(stack, deployment, may_create=True, cluster=cluster)
        before = backup.restore(plan, now, **elsewhere)
    if before is not None:
        note(f"the data that were replaced are in {before}; delete them when everything works")
    return 0


def _lines(plan: backup.RestorePlan) -> list[str]:
    lines = [
        f"{task}: continues from version {old} of the backup as version {new}; updates in open "
        "buffers are given up"
        for task, old, new in plan.continued
    ]
    lines += [f"{task}: is cancelled ({why})" for task, why in plan.cancelled]
    lines += [f"missing blob: {key}" for key in plan.missing]
    lines += [
        f"{task}: signed, revision {revision} of {name}. If its owner signed later revisions, "
        f"devices refuse this one: papaya task update {name}"
        for name, revision, task in plan.signed
    ]
    return lines or ["the backup has no tasks that run"]
