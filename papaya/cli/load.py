"""`papaya load`: load-test an installation with hundreds of devices that do not train.

It creates its own task, uploads updates of the given size to it, and cancels and deletes it at the
end. With --task it uses tasks that exist, and leaves them as they are. The devices have no task
file, so they are never given a task that was submitted from one. The task that it creates requires
a label that only its own devices declare, so no other device is given this task.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import msgspec

from papaya.cli.admin_client import (
    AdminClient,
    ConnectionOptions,
    add_connection,
    client_for,
    task_path,
)
from papaya.cli.client.client import SERVER, require_aiohttp, rerouted_uploads
from papaya.cli.output import (
    Commands,
    Progress,
    bind,
    note,
    plural,
    positive,
    print_data,
    print_json,
    table,
    whole,
    writing,
)
from papaya.config import (
    AsyncFL,
    DeviceConfig,
    OptimizerConfig,
    Requirements,
    SecureAggregation,
    StopRule,
    TaskConfig,
)
from papaya.credentials.token_files import read as read_token
from papaya.device.allowed_hosts import AllowedHosts
from papaya.errors import OperatorError, PapayaError
from papaya.server.admin.views import ChangeReason, Deletion, NewTask, Stored, TaskDetail, TaskView

if TYPE_CHECKING:
    from papaya.device.load import LoadLog, LoadOutcome, LoadPlan, LoadProcess, UpdateKind
    from papaya.device.trust import Trust

_DEVICE_TOKEN = Path("papaya-data/device.token")
_MOST_DEVICES = 20_000
_OTHER_FILES = 100
_CLIP = 64.0
_GOAL_SHARE = 10  # the paper advises an aggregation goal of 10 to 30 % of the concurrency
_ORPHAN_HOURS = 1.0  # for a load that is killed before it can cancel its task


@dataclass(frozen=True, kw_only=True)
class LoadOptions(ConnectionOptions):
    server: str = SERVER  # addresses of selectors, separated by commas
    device_token_file: Path = _DEVICE_TOKEN
    devices: int = 100
    rate: float | None = None
    training: float = 1.0
    seconds: float = 60.0
    updates: int | None = None
    drain: float = 30.0
    # The task
    task: Sequence[str] = ()
    update_bytes: int = 1 << 20
    update: UpdateKind = "zeros"
    concurrency: int | None = None
    goal: int | None = None
    secure: bool = False
    trust: Path | None = None
    # Details
    outcomes: Path | None = None
    request_timeout: float = 10.0
    give_up: float = 60.0
    upload_host: Sequence[str] = ()
    seed: int = 0


class LoadReport(msgspec.Struct, frozen=True):
    """What `--format json` prints."""

    tasks: tuple[str, ...]
    devices: int
    seconds: float
    visits: int
    counted: int
    counted_per_s: float
    unanswered: int
    """Requests without an answer; devices send them again."""
    outcomes: dict[str, dict[str, int]]
    """Visits by ending and reason."""
    times: dict[str, dict[str, float]]
    """By kind of request; a check-in includes the time for which it was held."""
    direct: int
    """Updates that were uploaded to aggregators and not through selectors."""
    rerouted: dict[str, int]
    """Direct uploads that went on through selectors, by the reason."""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "load",
        description="Load-test running servers with devices that follow the protocol but do not "
        "train. All devices run in this process. Creates its own task and deletes it at the end, "
        "unless --task names existing ones.",
    )
    parser.add_argument(
        "--server", metavar="URL[,URL...]", help="addresses of the selectors, separated by commas"
    )
    parser.add_argument(
        "--device-token-file", type=Path, metavar="FILE", help="file with the device token"
    )
    parser.add_argument(
        "--devices", type=whole(1), metavar="N", help="number of devices in this process"
    )
    parser.add_argument(
        "--rate",
        type=positive,
        metavar="R",
        help="visits per second, of all devices together (default: as many as the servers allow)",
    )
    parser.add_argument(
        "--training",
        type=positive,
        metavar="S",
        help="mean seconds per training job, exponentially distributed",
    )
    parser.add_argument("--seconds", type=positive, metavar="S", help="end after this time")
    parser.add_argument(
        "--updates", type=whole(1), metavar="N", help="end when N updates have been counted"
    )
    parser.add_argument(
        "--drain", type=positive, metavar="S", help="seconds to wait at the end for open visits"
    )
    _add_task_options(parser.add_argument_group("task"))
    details = parser.add_argument_group("details")
    details.add_argument(
        "--outcomes",
        type=Path,
        metavar="FILE",
        help="write how each participation ended, as JSON, one per line",
    )
    details.add_argument(
        "--request-timeout", type=positive, metavar="S", help="seconds to wait for an answer"
    )
    details.add_argument(
        "--give-up",
        type=positive,
        metavar="S",
        help="seconds that a device tries to check in, and then to join, before it ends its visit",
    )
    details.add_argument(
        "--upload-host",
        action="append",
        metavar="HOST",
        help="host of aggregators to upload to without a selector in between: HOST or "
        "*.example.org at the port of https (443; http: 80), HOST:8750 at this port, HOST:* at "
        "any; may be repeated (default: none)",
    )
    details.add_argument("--seed", type=whole(0), metavar="S", help="seed of the devices' choices")
    add_connection(parser)
    bind(parser, LoadOptions, run)


def _add_task_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--task",
        action="append",
        metavar="TASK",
        help="take part in this existing task; may be repeated",
    )
    group.add_argument("--update-bytes", type=whole(4), metavar="N", help="size of an update")
    group.add_argument(
        "--update",
        choices=("zeros", "digit"),
        help="what to upload: zeros, or 1 in a coordinate that no other participation uses, so "
        "that the model shows which updates were counted",
    )
    group.add_argument(
        "--concurrency",
        type=whole(1),
        metavar="C",
        help="clients at a time (default: three quarters of the devices)",
    )
    group.add_argument(
        "--goal",
        type=whole(1),
        metavar="K",
        help="updates per version (default: a tenth of the concurrency)",
    )
    group.add_argument("--secure", action="store_true", help="use secure aggregation")
    group.add_argument(
        "--trust",
        type=Path,
        metavar="FILE",
        help="TOML file that says which TSAs to trust; required for secure tasks",
    )


def run(options: LoadOptions) -> int:
    require_aiohttp()
    _check(options)
    token = read_token(options.device_token_file).reveal()
    client = client_for(options)
    made = nullcontext(_existing(client, options.task)) if options.task else _own(client, options)
    with made as configs, _outcomes(options.outcomes) as note_outcome:
        report = asyncio.run(_run(options, token, configs, note_outcome))
    if options.is_json:
        print_json(report)
    else:
        print_data(_in_words(report))
    if not report.counted:
        raise PapayaError(
            "no update was counted",
            hint="check the servers with papaya status, and the outcomes above",
        )
    return 0


def _check(options: LoadOptions) -> None:
    """Before a task is made."""
    AllowedHosts(options.upload_host)
    if options.devices > _MOST_DEVICES:
        raise OperatorError(
            f"{options.devices:,} devices are too many for one process",
            hint=f"use at most {_MOST_DEVICES:,}, and run several processes",
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * options.devices + _OTHER_FILES  # a heartbeat may run beside a request
    if soft < wanted <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    elif hard < wanted:
        raise OperatorError(
            f"{options.devices:,} devices need {wanted:,} open files, the limit is {hard:,}",
            hint=f"use fewer devices, or raise the limit: ulimit -n {wanted}",
        )
    if options.secure and options.trust is None:
        raise OperatorError("--secure needs --trust FILE", hint="see docs/run-a-device.md")


# -- the tasks ------------------------------------------------------------------------------------


def _existing(client: AdminClient, tasks: Sequence[str]) -> list[TaskConfig]:
    return [client.get(task_path(task), TaskDetail).config for task in tasks]


@contextmanager
def _own(client: AdminClient, options: LoadOptions) -> Iterator[list[TaskConfig]]:
    """A task that exists while the load runs."""
    import numpy as np

    from papaya.learning import parameters

    config = _config(options, f"load-{time.time_ns() // 1_000_000}")
    vector = np.zeros(config.model_length, parameters.FLOAT32)
    data = parameters.encode(vector, {"task": config.task, "version": "0"})
    place = task_path(config.task, f"parameters?model_length={config.model_length}")
    stored = client.put(place, data, Stored)
    client.post("/admin/tasks", NewTask(config, stored.parameters), TaskView)
    note(f"created the task {config.task}")
    try:
        yield [config]
    finally:
        why = ChangeReason("the load is over")
        client.post(task_path(config.task, "cancel"), why, TaskView)
        client.post(task_path(config.task, "delete"), why, Deletion)


def _config(options: LoadOptions, task: str) -> TaskConfig:
    concurrency = options.concurrency or max(1, options.devices * 3 // 4)
    goal = options.goal or max(1, concurrency // _GOAL_SHARE)
    return TaskConfig(
        task=task,
        concurrency=concurrency,
        model_length=options.update_bytes // 4,
        regime=AsyncFL(aggregation_goal=goal),
        optimizer=OptimizerConfig(kind="fedavg", rate=1.0),
        requirements=Requirements(labels=(task,)),
        secure_aggregation=SecureAggregation() if options.secure else None,
        clip=_CLIP if options.secure else None,
        max_examples=1,
        participation_gap_s=0.0,
        keep_versions=2,
        stop=StopRule(hours=(options.seconds + options.drain) / 3600 + _ORPHAN_HOURS),
    )


# -- the run --------------------------------------------------------------------------------------


@contextmanager
def _outcomes(path: Path | None) -> Iterator[Callable[[LoadOutcome], None]]:
    if path is None:
        yield lambda participation: None
        return
    with writing(path), path.open("wb") as file:
        encode = msgspec.json.encode

        def write(participation: LoadOutcome) -> None:
            file.write(encode(participation) + b"\n")
            file.flush()  # so that a reader finds whole lines while the load runs

        yield write


async def _run(
    options: LoadOptions,
    token: str,
    configs: Sequence[TaskConfig],
    note_outcome: Callable[[LoadOutcome], None],
) -> LoadReport:
    from papaya.device.load import Digits, LoadLog, LoadProcess, LoadTrainer, run_load, zeros
    from papaya.learning.definition import TaskTerms

    rng, digits = Random(options.seed), Digits()
    log = LoadLog(digits, note_outcome)
    trainer = LoadTrainer(
        digits if options.update == "digit" else zeros,
        lambda: rng.expovariate(1 / options.training),
        {config.task: TaskTerms.of(config) for config in configs},
    )
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    ca = None if options.ca is None else Path(options.ca)
    with Progress() as progress, _trust(options, ca) as trust:

        def tell(done: float) -> None:
            progress.update("load", done, _progress(log))

        plan = _plan(options, token, configs)
        process = LoadProcess(log, ca, trust, upload_hosts=options.upload_host)
        took_s = await run_load(plan, process, trainer, log, stopping, tell)
    return _report(options, configs, log, took_s, process)


def _plan(options: LoadOptions, token: str, configs: Sequence[TaskConfig]) -> LoadPlan:
    from papaya.device.load import LoadPlan

    return LoadPlan(
        selectors=[word.strip() for word in options.server.split(",") if word.strip()],
        token=token,
        devices=options.devices,
        rate=options.rate,
        seconds=options.seconds,
        updates=options.updates,
        drain_s=options.drain,
        config=DeviceConfig(
            request_timeout_s=options.request_timeout,
            check_in_timeout_s=max(30.0, options.request_timeout),
            give_up_s=options.give_up,
            participation_floor_s=0.0,
        ),
        seed=options.seed,
        labels=tuple(sorted({label for c in configs for label in c.requirements.labels})),
    )


def _report(
    options: LoadOptions,
    configs: Sequence[TaskConfig],
    log: LoadLog,
    took_s: float,
    process: LoadProcess,
) -> LoadReport:
    return LoadReport(
        tasks=tuple(config.task for config in configs),
        devices=options.devices,
        seconds=round(took_s, 3),
        visits=log.visits,
        counted=log.counted,
        counted_per_s=round(log.counted / took_s, 3),
        unanswered=log.unanswered,
        outcomes={ending: dict(reasons) for ending, reasons in log.outcomes.items()},
        times={
            name: msgspec.structs.asdict(times.percentiles()) for name, times in log.times.items()
        },
        direct=process.direct,
        rerouted=dict(process.rerouted),
    )


@contextmanager
def _trust(options: LoadOptions, ca: Path | None) -> Iterator[Trust | None]:
    """The policy about TSAs. What it remembers of the log is forgotten at the end."""
    if options.trust is None:
        yield None
        return
    from papaya.device.trust import Trust, read_policy

    policy = read_policy(options.trust)
    with tempfile.TemporaryDirectory(prefix="papaya-load-") as folder:
        yield Trust(policy, Path(folder) / "log-checkpoint", time.time, certificates=ca)


def _progress(log: LoadLog) -> str:
    rejected = sum(log.outcomes.get("rejected", {}).values())
    return f"{log.counted:,} counted, {plural(log.visits, 'visit')}, {rejected:,} rejected"


def _in_words(report: LoadReport) -> str:
    outcomes = [
        (ending, f"{count:,}", reason or "-")
        for ending, reasons in sorted(report.outcomes.items())
        for reason, count in sorted(reasons.items(), key=lambda item: -item[1])
    ]
    times = [
        (
            name,
            f"{times['count']:,}",
            *(f"{1000 * times[at]:,.0f}" for at in ("p50_s", "p90_s", "p99_s", "max_s")),
        )
        for name, times in report.times.items()
    ]
    summary = (
        f"{report.counted:,} updates counted in {report.seconds:.1f} s, "
        f"{report.counted_per_s:,.1f} per second; {report.unanswered:,} requests unanswered"
    )
    if report.direct:
        summary += f"; {report.direct:,} updates were uploaded to aggregators directly"
    if report.rerouted:
        summary += f"; {rerouted_uploads(report.rerouted)}"
    header = ("request", "count", "p50 ms", "p90 ms", "p99 ms", "max ms")
    tables = (table(("ending", "visits", "reason"), outcomes), table(header, times))
    return "\n\n".join((summary, *tables))
