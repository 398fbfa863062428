"""`papaya task …`: what the owner of a model does with a running system.

    compile FILE         a program for devices without torch
    submit FILE          start a task            pause, resume, cancel, delete TASK
    update, renew TASK   sign a revision, a lease
    rollout TASK         give a revision to a share of the devices first
    diff TASK            what an update would change
    list, show, watch    look at it              rollback TASK VERSION, mark TASK VERSION
    evaluate TASK        on devices' held-out data
    export, metrics      the model, its history

Data goes to stdout, everything else to stderr; every action has --format json. The server refuses
a change if the task was changed in the meantime.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from functools import partial
from typing import Literal

from papaya.cli.admin_client import (
    AdminClient,
    ConnectionOptions,
    OneTaskOptions,
    add_connection,
    add_reason,
    client_for,
    task_path,
)
from papaya.cli.output import (
    Commands,
    bind,
    positive,
    print_data,
    print_json,
    whole,
)
from papaya.cli.task import compile as compiling
from papaya.cli.task import diff, export, norms, rollout, submit, update, watch
from papaya.cli.task.show import (
    TaskListOptions,
    TaskShowOptions,
    date_of,
    run_list,
    run_named,
    run_show,
)
from papaya.errors import OperatorError
from papaya.server.admin.views import (
    ChangeReason,
    Deletion,
    Evaluate,
    Mark,
    RollBack,
    SetShare,
    Started,
    TaskView,
    VersionView,
)

Change = Literal["pause", "resume", "cancel"]


@dataclass(frozen=True, kw_only=True)
class TaskDeleteOptions(TaskShowOptions):
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class TaskChangeOptions(OneTaskOptions):
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class TaskRollbackOptions(OneTaskOptions):
    version: int
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class TaskShareOptions(OneTaskOptions):
    weight: float | None = None
    priority: int | None = None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class TaskMarkOptions(OneTaskOptions):
    version: int
    remove: bool = False
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class TaskEvaluateOptions(OneTaskOptions):
    version: int | None = None
    clients: int | None = None
    timeout: float | None = None
    why: str = ""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "task",
        description="Submit, watch and control the tasks of a running server.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    compiling.add_to(actions)
    submit.add_to(actions)
    update.add_to(actions)
    rollout.add_to(actions)
    diff.add_to(actions)
    listing = _add(actions, "list", "list all tasks", has_task=False)
    listing.add_argument("--evaluations", action="store_true", help="also list evaluations")
    bind(listing, TaskListOptions, run_list)
    showing = _add(actions, "show", "show the settings, versions and history of a task")
    showing.add_argument(
        "--run", dest="number", type=whole(1), metavar="N", help="run to show (default: the newest)"
    )
    bind(showing, TaskShowOptions, run_show)
    watch.add_to(actions)
    _add_change(
        actions, "pause", "pause a task: assign no new clients, but let running clients finish"
    )
    _add_change(actions, "resume", "continue a paused task")
    _add_change(actions, "cancel", "end a task and keep its versions")
    _add_share(actions)
    delete = _add(actions, "delete", "delete a run that is over: its versions and its history")
    delete.add_argument(
        "--run",
        dest="number",
        type=whole(1),
        metavar="N",
        help="run to delete; needed if the task has several runs",
    )
    add_reason(delete)
    bind(delete, TaskDeleteOptions, run_delete)
    _add_versioned(actions)
    norms.add_to(actions)
    export.add_to(actions)


def _add(
    actions: Commands, name: str, words: str, *, has_task: bool = True
) -> argparse.ArgumentParser:
    description = f"{words[0].upper()}{words[1:]}."
    parser: argparse.ArgumentParser = actions.add_parser(name, help=words, description=description)
    if has_task:
        parser.add_argument("task", metavar="TASK", help="name of the task")
    add_connection(parser)
    return parser


def _add_change(actions: Commands, action: Change, words: str) -> None:
    parser = _add(actions, action, words)
    add_reason(parser)
    bind(parser, TaskChangeOptions, partial(run_change, action))


def _add_share(actions: Commands) -> None:
    share = _add(actions, "share", "set the share of a task when devices are scarce; for operators")
    share.add_argument(
        "--weight",
        type=positive,
        metavar="N",
        help="how often a device goes to this task, relative to other tasks (1 in a new task; "
        "default: unchanged)",
    )
    share.add_argument(
        "--priority",
        type=int,
        metavar="N",
        help="tasks with a higher priority get devices first (0 in a new task; default: unchanged)",
    )
    add_reason(share)
    bind(share, TaskShareOptions, run_share)


def _add_versioned(actions: Commands) -> None:
    rollback = _add(actions, "rollback", "continue a task from an earlier version")
    rollback.add_argument(
        "version", type=whole(0), metavar="VERSION", help="version to continue from"
    )
    add_reason(rollback)
    bind(rollback, TaskRollbackOptions, run_rollback)
    mark = _add(actions, "mark", "protect a version from automatic deletion")
    mark.add_argument("version", type=whole(0), metavar="VERSION", help="version to protect")
    mark.add_argument("--remove", action="store_true", help="remove the protection")
    add_reason(mark)
    bind(mark, TaskMarkOptions, run_mark)
    evaluate = _add(actions, "evaluate", "evaluate a version on devices' held-out data")
    evaluate.add_argument(
        "--version", type=whole(0), metavar="V", help="version to evaluate (default: the newest)"
    )
    evaluate.add_argument(
        "--clients",
        type=whole(1),
        metavar="N",
        help="number of clients (default: from the task's evaluation plan, or 20)",
    )
    evaluate.add_argument(
        "--timeout",
        type=positive,
        metavar="S",
        help="give up after this many seconds (default: from the task's evaluation plan)",
    )
    add_reason(evaluate)
    bind(evaluate, TaskEvaluateOptions, run_evaluate)


def run_change(action: Change, options: TaskChangeOptions) -> int:
    path = task_path(options.task, action)
    view = client_for(options).post(path, ChangeReason(options.why), TaskView)
    return _tell(options, view, f"{view.task} is {view.state}")


def run_delete(options: TaskDeleteOptions) -> int:
    client = client_for(options)
    if options.number is None:
        _require_one_run(client, options.task)
    task = run_named(client, options.task, options.number)
    deleted = client.post(task_path(task, "delete"), ChangeReason(options.why), Deletion)
    wait_s = deleted.gone_after - time.time()
    when = (
        f"at {date_of(deleted.gone_after)}, when its last tickets expire" if wait_s > 0 else "now"
    )
    return _tell(options, deleted, f"{deleted.task} is deleted; its data are removed {when}")


def _require_one_run(client: AdminClient, task: str) -> None:
    """A deletion cannot be undone: do not guess which run is meant."""
    views = client.get("/admin/tasks", tuple[TaskView, ...])
    runs = [view for view in views if view.name == task and not view.evaluates]
    if len(runs) > 1:
        known = ", ".join(f"{view.run} ({view.state})" for view in runs)
        raise OperatorError(
            f"task {task} has {len(runs)} runs: {known}",
            hint=f"papaya task delete {task} --run {runs[0].run}",
        )


def run_share(options: TaskShareOptions) -> int:
    if options.weight is None and options.priority is None:
        raise OperatorError(
            "nothing to change", hint=f"papaya task share {options.task} --weight 2 --priority 1"
        )
    change = SetShare(options.weight, options.priority, options.why)
    view = client_for(options).post(task_path(options.task, "share"), change, TaskView)
    if options.is_json:
        print_json(view)
    else:
        print_data(f"{view.task}: weight {view.weight:g}, priority {view.priority}")
    return 0


def run_rollback(options: TaskRollbackOptions) -> int:
    path = task_path(options.task, "rollback")
    view = client_for(options).post(path, RollBack(options.version, options.why), VersionView)
    text = f"{options.task} continues at version {view.version}, from version {options.version}"
    return _tell(options, view, text)


def run_mark(options: TaskMarkOptions) -> int:
    path = task_path(options.task, "mark")
    request = Mark(options.version, not options.remove, options.why)
    view = client_for(options).post(path, request, VersionView)
    change = "is no longer" if options.remove else "is now"
    text = f"version {view.version} of {options.task} {change} protected from automatic deletion"
    return _tell(options, view, text)


def run_evaluate(options: TaskEvaluateOptions) -> int:
    request = Evaluate(options.version, options.clients, options.timeout, options.why)
    path = task_path(options.task, "evaluate")
    started = client_for(options).post(path, request, Started)
    return _tell(options, started, f"{started.task} evaluates version {started.version}")


def _tell(options: ConnectionOptions, answer: object, text: str) -> int:
    if options.is_json:
        print_json(answer)
    else:
        print_data(text)
    return 0
