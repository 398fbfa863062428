"""`papaya task list` and `papaya task show`: tasks, in words and tables."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from papaya.bundle.head import BundleHead
from papaya.bundle.manifest import TaskManifest
from papaya.cli.admin_client import (
    AdminClient,
    ConnectionOptions,
    OneTaskOptions,
    client_for,
    task_path,
)
from papaya.cli.output import note, plural, print_data, print_json, table
from papaya.cli.task import rollout, watch
from papaya.cli.task.export import metric_names, result_of
from papaya.config import Aggregation, Staleness, StopRule, TaskConfig, Weighting
from papaya.errors import OperatorError, ProtocolError
from papaya.learning.definition import ADAM_DEFAULTS, ClientSGD
from papaya.learning.evaluation import with_deviation
from papaya.messages.reasons import in_words, without_update
from papaya.messages.storage import PointRow
from papaya.server.admin.views import SignedBundle, TaskDetail, TaskView, VersionView

_LEFT_HINT = (
    "hint: these devices left the task; to see the full error on a device, run: "
    "papaya client --explain"
)
_DAY_S = 86400.0
_WARN_BEFORE_S = 7 * _DAY_S
_HEADER = (
    *("task", "owner", "run", "revision", "lease", "state", "version", "evaluated", "loss"),
    *("active", "of", "utilization"),
)


@dataclass(frozen=True, kw_only=True)
class TaskListOptions(ConnectionOptions):
    evaluations: bool = False


@dataclass(frozen=True, kw_only=True)
class TaskShowOptions(OneTaskOptions):
    number: int | None = None  # of the run


def run_list(options: TaskListOptions) -> int:
    tasks = client_for(options).get("/admin/tasks", tuple[TaskView, ...])
    shown = in_order(view for view in tasks if options.evaluations or not view.evaluates)
    if options.is_json:
        print_json(shown)
    elif shown:
        print_data(table(_HEADER, [task_line(view, time.time()) for view in shown]))
    else:
        note(options.repeated("no tasks; start one: papaya task submit my_task.py"))
    for view in shown:
        _warn(options, view)
    return 0


def in_order(views: Iterable[TaskView]) -> list[TaskView]:
    """Evaluations come after their task, in order of version."""

    def place(view: TaskView) -> tuple[str, int, float]:
        task, _, version = view.evaluates.rpartition("@")
        return (task, int(version), view.submitted) if task else (view.task, -1, 0.0)

    return sorted(views, key=place)


def task_line(view: TaskView, now: float) -> tuple[str, ...]:
    return (
        view.task,
        view.owner[:8] or "-",
        str(view.run or "-"),
        str(view.revision or "-"),
        lease(view, now) or "-",
        view.state + (" HALTED" if view.halted else ""),
        "-" if view.evaluates else f"{view.version:,}",
        _or_dash(view.evaluated, ","),
        _or_dash(view.loss, ".4g"),
        _or_dash(view.active, ","),
        f"{view.concurrency:,}",
        "-" if view.utilization is None else f"{100 * view.utilization:.0f} %",
    )


def lease(view: TaskView, now: float) -> str:
    """How long devices may start to train the task; empty if it is unsigned or over."""
    if not view.lease_until or view.state in ("completed", "cancelled"):
        return ""
    left_s = view.lease_until - now
    return f"{left_s / _DAY_S:.1f} days" if left_s > 0 else "ended"


def lease_warning(view: TaskView, now: float) -> str:
    left = lease(view, now)
    if not left or view.lease_until - now > _WARN_BEFORE_S:
        return ""
    when = "has ended: no device starts to train it" if left == "ended" else f"ends in {left}"
    return f"the lease of {view.name} {when}; renew it: papaya task renew {view.name}"


def silence_warning(view: TaskView) -> str:
    """The live numbers are old while a holder that has died is not replaced yet."""
    if not view.silent_s:
        return ""
    return (
        f"{view.holder}, which holds {view.name or view.task}, has not reported for "
        f"{view.silent_s:.0f} s; active and utilization are from its last report"
    )


def _warn(options: ConnectionOptions, view: TaskView) -> None:
    for warning in filter(None, (silence_warning(view), lease_warning(view, time.time()))):
        note(options.repeated(f"warning: {warning}"))


def run_show(options: TaskShowOptions) -> int:
    client = client_for(options)
    task = run_named(client, options.task, options.number)
    detail = client.get(task_path(task), TaskDetail)
    versions = client.get(task_path(task, "versions"), tuple[VersionView, ...])
    training = _client_training(client, detail)
    if options.is_json:
        print_json({"detail": detail, "versions": versions, "client": training})
        return 0
    tables = []
    if not detail.task.evaluates:
        tables = [_versions_table(detail, versions, _points_of(client, detail, versions))]
    tables += filter(None, [_volume_table(detail)])
    print_data("\n\n".join(["\n".join(_facts(detail, training)), *tables]))
    if next(iter(without_update(detail.endings)), "").startswith("left_"):
        note(_LEFT_HINT)
    _warn(options, detail.task)
    return 0


def _client_training(client: AdminClient, detail: TaskDetail) -> ClientSGD | None:
    """How clients train, if the owner has signed it; otherwise only the task file says it."""
    if detail.task.evaluates or detail.config.requirements.bundle is None:
        return None
    try:
        signed = client.get(task_path(detail.task.task, "bundle"), SignedBundle)
        return TaskManifest.verify(BundleHead.decode(signed.bundle).manifest).client
    except (OperatorError, ProtocolError):  # the blob is lost; the rest can still be shown
        return None


def _points_of(
    client: AdminClient, detail: TaskDetail, versions: tuple[VersionView, ...]
) -> dict[int, PointRow]:
    """The history of these versions. The detail has only the newest points."""
    found = {point.version: point for point in detail.points}
    missing = [view.version for view in versions if view.version not in found]
    if missing:
        path = task_path(detail.task.task, f"points?after={min(missing) - 1}")
        older = client.get(path, tuple[PointRow, ...])
        found = {point.version: point for point in older} | found
    return found


def _in_words(training: ClientSGD) -> str:
    names = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}
    words = [f"{names[training.optimizer or 'sgd']}, rate {training.rate:g}"]
    for field, name in (
        ("momentum", "Nesterov momentum" if training.nesterov else "momentum"),
        *((field, field) for field in ADAM_DEFAULTS),
        ("weight_decay", "weight decay"),
        ("proximal", "proximal term"),
        ("max_gradient_norm", "gradient norm at most"),
    ):
        words += [f"{name} {value:g}"] if (value := getattr(training, field)) else []
    words += [f"in {training.precision}"] if training.precision else []
    if training.schedule:
        kind, *settings = msgspec.to_builtins(training.schedule).items()
        inside = ", ".join(f"{name} {value:g}" for name, value in settings)
        words.append(f"{kind[1]} schedule ({inside})")
    words += [plural(training.epochs, "epoch"), f"batches of {training.batch_size}"]
    return ", ".join([*words, f"at most {plural(training.max_examples, 'example')}"])


def run_named(client: AdminClient, task: str, run: int | None) -> str:
    """The id of this run of a task; without a run the task itself, so the server picks one."""
    if run is None:
        return task
    runs = [v for v in client.get("/admin/tasks", tuple[TaskView, ...]) if v.name == task]
    found = [view.task for view in runs if view.run == run]
    if len(found) == 1:
        return found[0]
    known = ", ".join(str(view.run) for view in runs) or "none"
    raise OperatorError(
        f"task {task} has no run {run}", hint=f"its runs: {known}; see papaya task list"
    )


def _facts(detail: TaskDetail, training: ClientSGD | None) -> list[str]:
    task, config = detail.task, detail.config
    facts = {
        "task": task.task,
        "owner": task.owner,
        "run": f"{task.run}, revision {task.revision}" if task.run else "",
        "rollout": "" if detail.rollout is None else rollout.in_words(detail.rollout),
        "lease": _lease_fact(task),
        "state": task.state + (f": {task.why}" if task.why else ""),
        "halted": task.halted,
        "evaluates": task.evaluates,
        **(_of_an_evaluation(task) if task.evaluates else _of_a_model(detail)),
        "client": "" if training is None else _in_words(training),
        "server sees": _sees(config),
        "privacy": _privacy(config),
        "no update": _no_update(detail.endings),
        "submitted": date_of(task.submitted),
        "ended": date_of(task.ended) if task.ended else "",
        "held by": task.holder,
        "share": _share(task),
        "account": task.account,
    }
    return [f"{name:<12} {value}" for name, value in facts.items() if value]


def _share(task: TaskView) -> str:
    if (task.weight, task.priority) == (1.0, 0):
        return ""
    return f"weight {task.weight:g}, priority {task.priority}"


def _lease_fact(task: TaskView) -> str:
    left = lease(task, time.time())
    return f"until {date_of(task.lease_until)} ({left})" if left else ""


def _no_update(endings: dict[str, int]) -> str:
    """Why participations ended without an update, one line per reason."""
    reasons = without_update(endings)
    if not reasons:
        return ""
    ended = plural(sum(endings.values()), "participation")
    lines = [f"{sum(reasons.values()):,} of {ended}"]
    lines += [f"{times:,} × {in_words(ending)}" for ending, times in reasons.items()]
    return f"\n{13 * ' '}".join(lines)


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
        "updates": _combining(config),
        "evaluation": _plan(config),
        "stops": _stops(config.stop),
    }


def _combining(config: TaskConfig) -> str:
    """How updates are uploaded and combined, unless it is the default."""
    words = []
    if config.upload_bits < 32:
        error = config.rounding_error
        full = "" if config.weighting.kind == "equal" else " at full weight"
        rounded = "" if error is None else f" (rounding error at most {error:.2g} × clip{full})"
        words.append(f"uploaded in {config.upload_bits} bits{rounded}")
    if config.aggregation != Aggregation():
        words.append(f"combined by {config.aggregation.kind}")
    if config.weighting != Weighting():
        words.append(f"{config.weighting.kind} weights")
    if config.staleness != Staleness():
        words.append(f"{config.staleness.kind} damping")
    return ", ".join(words)


def _sees(config: TaskConfig) -> str:
    if config.threshold is None:
        noise = "" if config.privacy is None else "; versions have noise"
        return f"every update, in the clear{noise}"
    noise = "" if config.privacy is None else " with noise"
    return f"sums of {config.threshold} or more updates{noise} (secure aggregation)"


def _privacy(config: TaskConfig) -> str:
    if config.privacy is None:
        return ""
    terms = config.privacy.terms
    times = plural(terms.max_participations, "participation")
    noise = f"noise {terms.noise_multiplier:g} × clip {config.privacy.clip:g}"
    if terms.evaluation is not None:
        most = plural(terms.evaluation.max_participations, "evaluation")
        times += f" and {most} (noise {terms.evaluation.noise_multiplier:g} × clip)"
    return f"ε = {terms.epsilon:.3g} at δ = {terms.delta:g} for {times}; {noise}"


def _plan(config: TaskConfig) -> str:
    plan = config.evaluation
    if plan is None:
        return "none"
    every = "every version" if plan.every_versions == 1 else f"every {plan.every_versions} versions"
    names = ", ".join(("loss", *(metric.name for metric in config.metrics)))
    noise = "" if config.privacy is None else ", with noise"
    return f"{every}, on {plural(plan.clients, 'client')}: {names}{noise}"


def _stops(stop: StopRule | None) -> str:
    rules = {} if stop is None else msgspec.structs.asdict(stop)
    target = rules.pop("target_metric", None)
    given = [f"{name} = {value:g}" for name, value in rules.items() if value is not None]
    given += [] if target is None else [f"{target.name} {target}"]
    return " or ".join(given) or "only when it is cancelled"


def _versions_table(
    detail: TaskDetail, versions: tuple[VersionView, ...], points: dict[int, PointRow]
) -> str:
    names = metric_names(detail.config)
    models = {row.version: row.parameters for row in versions}
    rows = []
    for row in versions:
        point = points.get(row.version)
        # A masked buffer that was dropped publishes the previous model again.
        is_same = models.get(row.version - 1) == row.parameters
        flags = (
            ("marked", row.marked),
            ("rollback", row.restarts),
            (f"same model as {row.version - 1:,}", is_same and not row.restarts),
        )
        notes = [word for word, holds in flags if holds]
        numbers = ["-", "-", "-", *("-" for _ in names)]
        if point is not None:
            staleness = f"{point.staleness:.1f}" if point.members else "-"
            found = {"perplexity": point.perplexity} | point.metrics
            values = {"loss": point.loss} | {name: found.get(name) for name in names}
            shown = (
                "-" if value is None else with_deviation(value, point.deviations.get(name))
                for name, value in values.items()
            )
            numbers = [f"{point.members:,}", staleness, *shown]
        rows.append((f"{row.version:,}", date_of(row.created), *numbers, ", ".join(notes) or "-"))
    return table(("version", "created", "updates", "staleness", "loss", *names, "note"), rows)


def _volume_table(detail: TaskDetail) -> str:
    """The newest evaluation by data volume; empty under secure aggregation and with noise, where
    the server does not learn which devices have much data.
    """
    point = next((p for p in reversed(detail.points) if p.evaluated), None)
    result = None if point is None else result_of(point)
    if point is None or result is None or detail.config.is_secure:
        return ""
    if result.p75 is None or result.p99 is None:
        return ""
    names = metric_names(detail.config)
    rows = []
    for words, share in (
        ("all devices", result.all),
        ("75th percentile and above", result.p75),
        ("99th percentile and above", result.p99),
    ):
        found = {"perplexity": share.perplexity} | share.metrics
        values = (f"{share.loss:.4g}", *(_or_dash(found.get(name), ".4g") for name in names))
        rows.append((words, f"{share.clients:,.0f}", f"{share.examples:,.0f}", *values))
    header = (f"version {point.version}, by data volume", "devices", "examples", "loss", *names)
    return table(header, rows)


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def date_of(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
