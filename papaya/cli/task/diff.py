"""`papaya task diff`: what would change, or what a revision has changed.

    diff TASK --set client.rate=0.05    by `papaya task update` with the same settings
    diff FILE                           by `papaya task submit FILE`, against the newest run
    diff TASK --from 1 --to 3           between two revisions of the newest run

It signs nothing and sends nothing. Both the signed manifest, which
decides what devices compute, and the settings are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec

from papaya.bundle.manifest import TaskManifest
from papaya.bundle.owner import SignedStatement
from papaya.cli.admin_client import (
    AdminClient,
    OneTaskOptions,
    add_connection,
    client_for,
    task_path,
)
from papaya.cli.output import Commands, bind, note, print_data, print_json, whole
from papaya.cli.task.signing import first_manifest
from papaya.cli.task.submit import (
    bundle_blobs,
    compiled_program,
    config_in,
    loaded_from,
)
from papaya.cli.task.update import newest_of, next_revision
from papaya.config import TaskConfig
from papaya.device.executor import EngineName
from papaya.errors import OperatorError
from papaya.learning.settings import GivenSettings, changed, with_client
from papaya.server.admin.views import RevisionView, SignedBundle, TaskDetail

# Left out: fields that always differ, or that are in the manifest too.
_LEFT_OUT = ("task", "requirements")
_SIGNED = (
    *(
        "engine",
        "engine_version",
        "program",
        "frozen",
        "frozen_file",
        "layout",
        "client",
        "examples",
    ),
    *("upload_bits", "weighting", "weight_cap", "evaluation_clients", "privacy"),
)

Side = tuple[TaskConfig, TaskManifest | None]


@dataclass(frozen=True, kw_only=True)
class TaskDiffOptions(OneTaskOptions):
    set: Sequence[str] = ()
    engine: EngineName | None = None  # None: that of the newest run
    since: int | None = None
    to: int | None = None


def add_to(actions: Commands) -> None:
    parser = actions.add_parser(
        "diff",
        help="show what an update or the next submit would change",
        description="Show what `papaya task update` or `papaya task submit` would change about the "
        "newest run of a task, or what changed between two of its revisions.",
    )
    parser.add_argument(
        "task",
        metavar="TASK|FILE",
        help="name of the task, or the file or folder to submit next",
    )
    parser.add_argument(
        "--set",
        action="append",
        metavar="FIELD=VALUE",
        help="a setting, as for `update` and `submit`; may be repeated",
    )
    parser.add_argument(
        "--engine",
        choices=get_args(EngineName),
        help="what devices train the file with, as for `submit` (default: as in the newest run)",
    )
    parser.add_argument(
        "--from", dest="since", type=whole(1), metavar="N", help="compare this revision"
    )
    parser.add_argument(
        "--to", type=whole(1), metavar="N", help="with this one (default: the newest)"
    )
    add_connection(parser)
    bind(parser, TaskDiffOptions, run)


def run(options: TaskDiffOptions) -> int:
    client, path = client_for(options), Path(options.task)
    if options.since is not None or options.to is not None:
        before, after = _revisions(client, options)
    elif path.exists():
        before, after = _next_run(client, path, options)
    else:
        before, after = _next_revision(client, options)
    found = differences(before, after)
    if options.is_json:
        print_json([{"field": f, "before": b, "after": a} for f, (b, a) in found.items()])
    elif found:
        print_data("\n".join(f"{f}: {_shown(b)} → {_shown(a)}" for f, (b, a) in found.items()))
    else:
        note("no changes")
    return 0


def _next_revision(client: AdminClient, options: TaskDiffOptions) -> tuple[Side, Side]:
    if not options.set:
        raise OperatorError(
            "nothing to compare with",
            hint=f"papaya task diff {options.task} --set client.rate=0.05, or --from 1 --to 2",
        )
    head, detail = newest_of(client, options.task)
    manifest = TaskManifest.verify(head.manifest)
    config, following = next_revision(manifest, detail, options.set)
    return (detail.config, manifest), (config, following)


def _next_run(client: AdminClient, path: Path, options: TaskDiffOptions) -> tuple[Side, Side]:
    given = GivenSettings.of(options.set)
    written = loaded_from(path)
    loaded = with_client(written, given.client)
    detail = client.get(task_path(loaded.task.name), TaskDetail)
    engine = options.engine or detail.config.requirements.engine
    compiled = None
    if engine == "executorch":
        compiled = compiled_program(path, written, loaded.task.client.batch_size)
    config = changed(config_in(loaded, compiled), None, given.task)
    signed = client.get(task_path(detail.task.task, "bundle"), SignedBundle)
    if not signed.bundle:
        return (detail.config, None), (config, None)
    head, _ = newest_of(client, config.task)
    manifest = TaskManifest.verify(head.manifest)
    blobs = bundle_blobs(path, loaded, compiled)
    return (detail.config, manifest), (
        config,
        first_manifest(manifest.owner, loaded, config, blobs),
    )


def _revisions(client: AdminClient, options: TaskDiffOptions) -> tuple[Side, Side]:
    path = task_path(options.task, "revisions")
    known = {view.revision: view for view in client.get(path, tuple[RevisionView, ...])}
    newest = max(known, default=0)

    def side(number: int) -> Side:
        if number not in known:
            listed = ", ".join(map(str, known)) or "none"
            raise OperatorError(
                f"the newest run of {options.task} has no revision {number}",
                hint=f"its revisions are: {listed}",
            )
        signed = msgspec.json.decode(known[number].manifest, type=SignedStatement)
        return known[number].config, TaskManifest.verify(signed)

    last = options.to or newest
    return side(options.since or max(1, last - 1)), side(last)


def differences(before: Side, after: Side) -> dict[str, tuple[object, object]]:
    """The fields that differ, in order, with both values. None: the field is absent."""
    first, second = _flat(_document(before)), _flat(_document(after))
    fields = dict.fromkeys((*first, *second))
    return {
        field: (first.get(field), second.get(field))
        for field in fields
        if first.get(field) != second.get(field)
    }


def _document(side: Side) -> dict[str, Any]:
    config, manifest = side
    settings: dict[str, Any] = msgspec.to_builtins(config)
    document = {name: value for name, value in settings.items() if name not in _LEFT_OUT}
    if manifest is not None:
        signed: dict[str, Any] = msgspec.to_builtins(manifest)
        document |= {name: signed[name] for name in _SIGNED if name in signed}
    return document


def _flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in document.items():
        found |= (
            _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
        )
    return found


def _shown(value: object) -> str:
    return "nothing" if value is None else msgspec.json.encode(value).decode()
