"""`papaya task update` and `papaya task renew`: sign the next revision of a run, or a new lease.

Both start from the newest revision at the server and refuse one that this owner has not signed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from papaya.bundle.head import BundleHead
from papaya.bundle.manifest import LEASE_S, TaskManifest
from papaya.cli.admin_client import (
    AdminClient,
    OneTaskOptions,
    add_connection,
    add_reason,
    client_for,
    task_path,
)
from papaya.cli.output import Commands, bind, note, print_data, print_json
from papaya.cli.task.privacy import earlier_terms, privacy_in_words
from papaya.cli.task.signing import add_owner_key, default_key, next_manifest, own_manifest, signer
from papaya.config import TaskConfig
from papaya.errors import OperatorError
from papaya.learning.settings import GivenSettings, changed, changed_client
from papaya.server.admin.views import Revision, SignedBundle, TaskDetail, TaskView


@dataclass(frozen=True, kw_only=True)
class TaskRenewOptions(OneTaskOptions):
    owner: Path | None = None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class TaskUpdateOptions(TaskRenewOptions):
    set: Sequence[str] = ()


def add_to(actions: Commands) -> None:
    update = actions.add_parser(
        "update",
        help="change the settings of a running task",
        description="Sign and publish the next revision of a running task. Devices follow it "
        "without any action on them.",
    )
    renew = actions.add_parser(
        "renew",
        help="let devices train a task for another 30 days",
        description="Sign a new lease: devices may start to train the task for another 30 days.",
    )
    for parser in (update, renew):
        parser.add_argument("task", metavar="TASK", help="name of the task")
        add_owner_key(parser)
    update.add_argument(
        "--set",
        action="append",
        metavar="FIELD=VALUE",
        help="change one setting, such as client.rate=0.05, regime=sync or concurrency=50; may be "
        "repeated",
    )
    for parser in (update, renew):
        add_reason(parser)
        add_connection(parser)
    bind(update, TaskUpdateOptions, run_update)
    bind(renew, TaskRenewOptions, run_renew)


def run_update(options: TaskUpdateOptions) -> int:
    if not options.set:
        raise OperatorError("nothing to change", hint="--set client.rate=0.05")
    found, client = signer(options.owner or default_key()), client_for(options)
    head, detail = newest_of(client, options.task)
    config, following = next_revision(own_manifest(found, head), detail, options.set)
    note_consequences(client, found.owner, config, detail)
    bundle = found.head(following, head.program, head.frozen_file)
    revision = Revision(config, bundle, options.why)
    view = client.post(task_path(detail.task.task, "revise"), revision, TaskView)
    _print(options, view, following)
    return 0


def run_renew(options: TaskRenewOptions) -> int:
    found, client = signer(options.owner or default_key()), client_for(options)
    head, detail = newest_of(client, options.task)
    manifest = own_manifest(found, head)
    bundle = found.head(manifest, head.program, head.frozen_file)
    revision = Revision(detail.config, bundle, options.why)
    view = client.post(task_path(detail.task.task, "revise"), revision, TaskView)
    note(f"devices may start to train it for {LEASE_S / 86400:.0f} days from now")
    _print(options, view, manifest)
    return 0


def note_consequences(
    client: AdminClient, owner: str, config: TaskConfig, detail: TaskDetail
) -> None:
    """What the owner should know before a revision with these settings."""
    known = detail.config.warnings()
    for warning in config.warnings():
        if warning not in known:
            note(f"warning: {warning}")
    if config.privacy is not None:
        for line in privacy_in_words(config, earlier_terms(client, detail.task.name, owner)):
            note(line)
    if config.is_bound and detail.open_updates:
        note(
            f"warning: up to {detail.open_updates} acknowledged updates may be lost: a secure "
            "buffer is given up if too few clients of the previous revision are left to fill it"
        )


def next_revision(
    manifest: TaskManifest, detail: TaskDetail, settings: Sequence[str]
) -> tuple[TaskConfig, TaskManifest]:
    """The settings and the manifest of the next revision, with these fields changed."""
    given = GivenSettings.of(settings)
    config = changed(detail.config, None, given.task)
    training = changed_client(manifest.client, given.client)
    if training.max_examples != manifest.client.max_examples:
        config = structs.replace(config, max_examples=training.max_examples)
    # A number that was signed is not used again, also if its revision was never needed.
    last = max(manifest.revision, detail.task.signed)
    return config, next_manifest(manifest, config, training, last + 1)


def newest_of(client: AdminClient, task: str) -> tuple[BundleHead, TaskDetail]:
    detail = client.get(task_path(task), TaskDetail)
    signed = client.get(task_path(detail.task.task, "bundle"), SignedBundle)
    if not signed.bundle:
        raise OperatorError(
            f"task {task} is not signed, so it cannot be changed",
            hint="create a key (papaya owner key), then submit the task again",
        )
    return BundleHead.decode(signed.bundle), detail


def _print(options: OneTaskOptions, view: TaskView, manifest: TaskManifest) -> None:
    if options.is_json:
        print_json(view)
    else:
        print_data(f"{view.name} is {view.state}: revision {manifest.revision}")
