"""`papaya task …`: what a model's owner does with a running system.

    submit FILE          start a task            pause, resume, cancel NAME
    list, show, watch    look at it              rollback NAME VERSION, mark NAME VERSION
    evaluate NAME        on devices' held-out data
    export, metrics      the model, its history

Data goes to stdout, everything else to stderr; --format json everywhere. Every change is
compare-and-set on the server: one that comes too late is refused and says so.
"""

from __future__ import annotations

import argparse
import re
from datetime import UTC, datetime

import msgspec

from papaya.cli.admin_client import AdminClient, add_connection, client_for, task_path
from papaya.cli.output import (
    Commands,
    add_format,
    note,
    plural,
    positive,
    print_data,
    print_json,
    table,
    whole,
)
from papaya.cli.task import export, submit, watch
from papaya.config import EvaluationPlan, StopRule, TaskConfig
from papaya.errors import OperatorError
from papaya.server.admin.views import (
    ChangeReason,
    Evaluate,
    Mark,
    RollBack,
    Started,
    TaskDetail,
    TaskView,
    VersionView,
)

_HEADER = (
    *("task", "state", "version", "evaluated", "loss", "perplexity"),
    *("active", "of", "utilization"),
)


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "task",
        description="Submit, watch and steer the tasks of a running server.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    submit.add_to(actions)
    _add(actions, "list", "all tasks", run_list, has_task=False).add_argument(
        "--evaluations", action="store_true", help="show evaluations too"
    )
    _add(actions, "show", "one task: settings, versions, history", run_show)
    watch.add_to(actions)
    for action, help_text in (
        ("pause", "no new clients; those who train may finish"),
        ("resume", "go on after a pause"),
        ("cancel", "end it; its versions stay"),
    ):
        added = _add(actions, action, help_text, run_change)
        added.add_argument("--why", default="", metavar="TEXT", help="shown to others")
        added.set_defaults(action=action)
    _add_versioned(actions)
    export.add_to(actions)


def _add(
    actions: Commands,
    name: str,
    help_text: str,
    run: object,
    *,
    has_task: bool = True,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=help_text)
    parser.set_defaults(run=run)
    if has_task:
        parser.add_argument("task")
    add_connection(parser)
    add_format(parser)
    return parser


def _add_versioned(actions: Commands) -> None:
    parser = _add(actions, "rollback", "go on from an earlier version", run_rollback)
    parser.add_argument("version", type=whole(0))
    parser = _add(actions, "mark", "keep a version, whatever its age", run_mark)
    parser.add_argument("version", type=whole(0))
    parser.add_argument("--remove", action="store_true", help="take the mark away")
    parser = _add(actions, "evaluate", "on devices' held-out data", run_evaluate)
    parser.add_argument("--version", type=whole(0), metavar="V", help="default: the newest")
    parser.add_argument("--clients", type=whole(1), metavar="N", help="default: as planned, or 20")
    parser.add_argument("--timeout", type=positive, metavar="S", help="give up after so long")


# -- look ---------------------------------------------------------------------------------------


def run_list(options: argparse.Namespace) -> int:
    tasks = client_for(options).get("/admin/tasks", tuple[TaskView, ...])
    shown = [view for view in tasks if options.evaluations or not view.evaluates]
    if options.format == "json":
        print_json(shown)
    elif shown:
        print_data(table(_HEADER, [task_line(view) for view in shown]))
    else:
        note("no tasks; start one: papaya task submit my_task.py")
    return 0


def task_line(view: TaskView) -> tuple[str, ...]:
    return (
        view.task,
        view.state + (" HALTED" if view.halted else ""),
        "-" if view.evaluates else f"{view.version:,}",
        _or_dash(view.evaluated, ","),
        _or_dash(view.loss, ".4g"),
        _or_dash(view.perplexity, ".4g"),
        _or_dash(view.active, ","),
        f"{view.concurrency:,}",
        "-" if view.utilization is None else f"{100 * view.utilization:.0f} %",
    )


def run_show(options: argparse.Namespace) -> int:
    client = client_for(options)
    detail = client.get(task_path(options.task), TaskDetail)
    versions = client.get(task_path(options.task, "versions"), tuple[VersionView, ...])
    reasons = without_update(client, options.task)
    if options.format == "json":
        print_json({"detail": detail, "versions": versions, "without_update": reasons})
        return 0
    history = [] if detail.task.evaluates else ["", _versions_table(detail, versions)]
    print_data("\n".join([*_facts(detail, reasons), *history]))
    if next(iter(reasons), "") == "left":
        note(HINT)
    for warning in detail.warnings:
        note(f"warning: {warning}")
    return 0


def _facts(detail: TaskDetail, reasons: dict[str, int]) -> list[str]:
    task, config = detail.task, detail.config
    facts = {
        "task": task.task,
        "state": task.state + (f": {task.why}" if task.why else ""),
        "halted": task.halted,
        "evaluates": task.evaluates,
        **(_of_an_evaluation(task) if task.evaluates else _of_a_model(detail)),
        "server sees": _sees(config),
        "no update": in_words(reasons),
        "submitted": _date(task.submitted),
        "ended": _date(task.ended) if task.ended else "",
        "held by": task.holder,
    }
    return [f"{name:<12} {value}" for name, value in facts.items() if value]


def _of_an_evaluation(task: TaskView) -> dict[str, str]:
    clients = f"{plural(task.concurrency, 'client')} at a time"
    return {"clients": f"{clients}, until {task.aggregation_goal:,} have reported"}


def _of_a_model(detail: TaskDetail) -> dict[str, str]:
    task, config = detail.task, detail.config
    clients = f"{plural(task.concurrency, 'client')} at a time"
    updates = f"{plural(task.aggregation_goal, 'update')} in a version"
    return {
        "progress": ", ".join([f"version {task.version:,}", *watch.numbers(detail)]),
        "regime": f"{task.regime}, {clients}, {updates}",
        "model": f"{plural(config.model_length, 'parameter')}, {config.optimizer.kind}",
        "evaluation": _plan(config.evaluation),
        "stops": _stops(config.stop),
    }


def _sees(config: TaskConfig) -> str:
    if config.threshold is None:
        return "every update, in the clear"
    return f"sums of {config.threshold} or more updates (secure aggregation)"


def _plan(plan: EvaluationPlan | None) -> str:
    if plan is None:
        return "none"
    every = "every version" if plan.every_versions == 1 else f"every {plan.every_versions} versions"
    return f"{every}, on {plural(plan.clients, 'client')}"


def _stops(stop: StopRule | None) -> str:
    rules = {} if stop is None else msgspec.structs.asdict(stop)
    given = [f"{name} = {value:g}" for name, value in rules.items() if value is not None]
    return " or ".join(given) or "when it is cancelled"


def _versions_table(detail: TaskDetail, versions: tuple[VersionView, ...]) -> str:
    points = {point.version: point for point in detail.points}
    rows = []
    for row in versions:
        point = points.get(row.version)
        flags = (("marked", row.marked), ("rollback", row.restarts))
        notes = [word for word, holds in flags if holds]
        numbers = ["-", "-", "-"]
        if point is not None:
            staleness = f"{point.staleness:.1f}" if point.members else "-"
            numbers = [f"{point.members:,}", staleness, _or_dash(point.loss, ".4g")]
        rows.append((f"{row.version:,}", _date(row.created), *numbers, " ".join(notes) or "-"))
    return table(("version", "created", "updates", "staleness", "loss", "note"), rows)


# -- change -------------------------------------------------------------------------------------


def run_change(options: argparse.Namespace) -> int:
    path = task_path(options.task, options.action)
    view = client_for(options).post(path, ChangeReason(options.why), TaskView)
    return _tell(options, view, f"{view.task} is {view.state}")


def run_rollback(options: argparse.Namespace) -> int:
    path = task_path(options.task, "rollback")
    view = client_for(options).post(path, RollBack(options.version), VersionView)
    text = f"{options.task} goes on at version {view.version}, from version {options.version}"
    return _tell(options, view, text)


def run_mark(options: argparse.Namespace) -> int:
    path = task_path(options.task, "mark")
    view = client_for(options).post(path, Mark(options.version, not options.remove), VersionView)
    is_kept = "is kept" if not options.remove else "is kept no longer than others"
    return _tell(options, view, f"version {view.version} of {options.task} {is_kept}")


def run_evaluate(options: argparse.Namespace) -> int:
    request = Evaluate(options.version, options.clients, options.timeout)
    path = task_path(options.task, "evaluate")
    started = client_for(options).post(path, request, Started)
    return _tell(options, started, f"{started.task} evaluates version {started.version}")


def _tell(options: argparse.Namespace, answer: object, text: str) -> int:
    if options.format == "json":
        print_json(answer)
    else:
        print_data(text)
    return 0


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


HINT = (
    "hint: these devices left by themselves; each line `failed` of theirs says why. Do they have "
    "the very file that was submitted?"
)
_METRICS_BYTES = 16 << 20
_COUNTER = r"papaya_task_(?:sessions_aborted|updates_discarded)_total"


def without_update(client: AdminClient, task: str) -> dict[str, int]:
    """How many by reason, the most frequent first; empty when the server does not count them."""
    try:
        text = client.download("/metrics", _METRICS_BYTES)[0].decode(errors="replace")
    except OperatorError:
        return {}
    return counted(text, task)


def counted(metrics: str, task: str) -> dict[str, int]:
    series = rf'^{_COUNTER}\{{task="{re.escape(task)}",reason="(\w+)"\}} (\d+)$'
    found: dict[str, int] = {}
    for reason, times in re.findall(series, metrics, re.MULTILINE):
        found[reason] = found.get(reason, 0) + int(times)
    return {r: found[r] for r in sorted(found, key=lambda r: (-found[r], r)) if found[r]}


def in_words(reasons: dict[str, int]) -> str:
    if not reasons:
        return ""
    listed = ", ".join(f"{times:,} {reason}" for reason, times in reasons.items())
    return f"{plural(sum(reasons.values()), 'session')} so far: {listed}"
