"""`papaya store backup` and `papaya store restore`: a data folder, its rows and their blobs."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

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
from papaya.store import backup

_DATA = Path(Deployment().data)
_KEY_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class BackupOptions(FormatOptions):
    folder: Path
    data: Path = _DATA


@dataclass(frozen=True, kw_only=True)
class RestoreOptions(FormatOptions):
    folder: Path
    data: Path = _DATA
    yes: bool = False


def add_to(actions: Commands) -> None:
    made = actions.add_parser(
        "backup",
        help="copy the data of a cluster, also while its servers run",
        description="Copy rows, blobs, tokens and keys of a data folder into a new folder. The "
        "servers may run. The copy contains secrets. Blobs in a bucket are not copied.",
    )
    made.add_argument("folder", type=Path, metavar="FOLDER", help="new folder for the backup")
    restored = actions.add_parser(
        "restore",
        help="replace the data of a cluster by a backup",
        description="Show what restoring a backup would do; with --yes, do it. All servers must be "
        "stopped. What happened after the backup is lost.",
    )
    restored.add_argument("folder", type=Path, metavar="FOLDER", help="folder of the backup")
    restored.add_argument("--yes", action="store_true", help="restore, and not only show the plan")
    for action in (made, restored):
        action.add_argument("--data", type=Path, metavar="DIR", help="data folder of the servers")
        add_format(action)
    bind(made, BackupOptions, run_backup)
    bind(restored, RestoreOptions, run_restore)


def run_backup(options: BackupOptions) -> int:
    done = backup.back_up(options.data, options.folder)
    if options.format == "json":
        print_json(done._asdict())
    else:
        copied = f"{plural(done.tasks, 'task')} and {plural(done.blobs, 'blob')}"
        print_data(f"{options.folder}: {copied}")
    for key in done.missing:
        note(f"missing, and missing before the backup: {key}")
    return 0


def run_restore(options: RestoreOptions) -> int:
    now = time.time()
    plan = backup.plan_restore(options.folder, options.data, now, os.urandom(_KEY_BYTES))
    if options.format == "json":
        fields = ("continued", "cancelled", "missing", "signed")
        print_json({field: getattr(plan, field) for field in fields} | {"restored": options.yes})
    else:
        print_data("\n".join(_lines(plan)))
    if not options.yes:
        note("nothing was changed; to restore, run the command again with --yes")
        return 0
    before = backup.restore(plan, now)
    if before is not None:
        note(f"the data that were replaced are in {before}; delete them when all is well")
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
        f"{name}: signed, revision {revision}. If its owner signed later revisions, devices refuse "
        f"this one: papaya task update {name}"
        for name, revision in plan.signed
    ]
    return lines or ["the backup has no tasks that run"]
