"""`papaya demo`: the real system on one machine, for a minute.

It runs the commands that anybody would: `papaya serve`, `papaya task submit` with a copy of
examples/next_word.py that has this run's settings in its last lines, a few `papaya client` with
some devices each, `papaya task export`. Real processes, real sockets, a real model on real texts
(`papaya/cli/demo/texts.py`); every number that is printed was measured.

Secure aggregation is on, unless --clear: the server sees masked updates and sums of at least K. Its
TSA is a child of the server, with INSECURE software evidence, which the devices of the
demonstration are told to believe.

What is not real are the devices' lives: they are assumed to be idle, charging and on an unmetered
network, and take part again at once. Everything but the results is gone at the end: processes,
state, examples. Exit code 1 when the model did not learn.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from random import Random

import papaya
from papaya.cli.admin_client import AdminClient
from papaya.cli.demo.processes import Processes, interrupted_by_signals, wait_s
from papaya.cli.demo.show import (
    SOFTWARE,
    DemoSample,
    Onlooker,
    Recorder,
    Summary,
    draw,
    perplexities,
    summarize,
    telling,
    text_of,
    view_for,
)
from papaya.cli.output import (
    Commands,
    add_format,
    make_folder,
    note,
    positive,
    print_data,
    print_json,
    whole,
    writing,
)
from papaya.cli.task.export import all_points
from papaya.cli.task.watch import follow
from papaya.config import AsyncFL, SyncFL, TaskConfig
from papaya.device.texts import LEAST_BYTES, LIBRARY, library_texts
from papaya.errors import OperatorError, PapayaError
from papaya.server.admin.views import TaskDetail

TASK = "next-word"
TASK_FILE = Path(papaya.__file__).parents[1] / "examples" / "next_word.py"
_MOST_PROCESSES = 3
_DEVICES_IN_A_PROCESS = 16
_LOOK_S = 0.5
_GLANCES = 5  # at the server's disk, between two looks: a sum of few clients is soon one of many
_PATIENCE_S = 180.0  # beyond the time of training: to start, and to evaluate the last version
_EVALUATE_UPDATES = 50
_EXTRAS = {"aiohttp": "device", "torch": "torch", "matplotlib": "sim", "rich": "sim"}
_ASSUMED = "idle,charging,unmetered"
# A heartbeat of a second, and devices that come back at once: a minute is short.
_SERVER = """\
data = "data"
devices = "127.0.0.1:0"
admin = "127.0.0.1:0"

[server]
heartbeat_s = 1.0
hold_s = 5.0
held_report_interval_s = 0.1
min_retry_s = 0.5
max_retry_s = 2.0
"""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "demo",
        description="Start a server and a few dozen devices on this machine, train a next-word "
        "model on the texts of Python's own library, and save it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--sync", action="store_true", help="SyncFL instead of AsyncFL")
    parser.add_argument(
        "--clear", action="store_true", help="without secure aggregation: updates in the clear"
    )
    parser.add_argument("--devices", type=whole(2), default=48, metavar="N", help="one text each")
    parser.add_argument(
        "--concurrency", type=whole(1), default=24, metavar="C", help="clients at a time"
    )
    parser.add_argument(
        "--goal",
        type=whole(1),
        default=argparse.SUPPRESS,
        metavar="K",
        help="updates in a version (default: 10; with --sync: 30 %% over-selection)",
    )
    parser.add_argument("--minutes", type=positive, default=0.75, metavar="M", help="of training")
    parser.add_argument(
        "--versions",
        type=whole(1),
        default=argparse.SUPPRESS,
        metavar="V",
        help="end at this version, if it is made in time",
    )
    parser.add_argument("--seed", type=whole(0), default=1, metavar="S", help="chooses the texts")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="go on from the model of an earlier run",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="for the results (default: runs/demo-async, or as the regime is called)",
    )
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    _require_extras()
    regime = _regime(options)
    texts = find_texts(options.devices, options.seed)
    is_new = not hasattr(options, "checkpoint")
    if not is_new and not options.checkpoint.is_file():
        raise OperatorError(f"there is no file {options.checkpoint}", hint="check --checkpoint")
    output = make_folder(output_of(options))
    logs = make_folder(output / "logs")
    note(_introduction(options, regime, texts))
    note("In the clear: the server will see every update.\n" if options.clear else f"{SOFTWARE}\n")
    with (
        interrupted_by_signals(),
        tempfile.TemporaryDirectory(prefix="papaya-demo-", ignore_cleanup_errors=True) as folder,
        Processes(logs) as processes,
    ):
        summary = _train(options, regime, texts, Path(folder), output, processes)
        with telling("devices and server end"):
            processes.stop()
    if options.format == "json":
        print_json(summary)
    else:
        print_data(text_of(summary))
    if is_new and not summary.has_learned:  # what goes on is good already, and noisy
        raise PapayaError(
            "perplexity did not fall", hint=f"papaya demo --minutes {2 * options.minutes:g}"
        )
    return 0


def _introduction(options: argparse.Namespace, regime: AsyncFL | SyncFL, texts: list[Path]) -> str:
    sizes_kb = [round(path.stat().st_size / 1000) for path in texts]
    processes = _processes(len(texts))
    where = "one process" if processes == 1 else f"{processes} processes"
    return (
        f"{type(regime).__name__}: {len(texts)} devices in {where}, {options.concurrency} at a "
        f"time, each with one text of Python's library ({min(sizes_kb)} to {max(sizes_kb)} kB).\n"
        "A DEMONSTRATION: devices count as idle, charging and unmetered, and take part again at "
        "once.\n"
    )


def output_of(options: argparse.Namespace) -> Path:
    """Each kind of run has a folder of its own, so that two can be compared."""
    kind = ("-sync" if options.sync else "-async") + ("-clear" if options.clear else "")
    found: Path = getattr(options, "output", Path("runs") / f"demo{kind}")
    return found


def _require_extras() -> None:
    for package, extra in _EXTRAS.items():
        if find_spec(package) is None:
            raise OperatorError(
                f"the demo needs {package}, which is not installed",
                hint=f"run make demo, or pip install 'papaya-fl[{extra}]'",
            )
    if not TASK_FILE.is_file():
        raise OperatorError(
            f"the demo's task file is not at {TASK_FILE}", hint="run it in a clone of the project"
        )


def _regime(options: argparse.Namespace) -> AsyncFL | SyncFL:
    goal: int | None = getattr(options, "goal", None)
    concurrency = options.concurrency
    if concurrency > options.devices:
        raise OperatorError(
            f"{options.devices} devices are too few for {concurrency} at a time",
            hint=f"--devices {2 * concurrency}",
        )
    if not options.sync:
        return AsyncFL(min(10, concurrency) if goal is None else goal)
    if goal is not None and goal > concurrency:
        raise OperatorError(
            f"a round of {concurrency} clients cannot bring {goal} updates",
            hint=f"--goal {concurrency}, or less",
        )
    return SyncFL() if goal is None else SyncFL(over_selection=concurrency / goal - 1)


def _train(
    options: argparse.Namespace,
    regime: AsyncFL | SyncFL,
    texts: list[Path],
    folder: Path,
    output: Path,
    processes: Processes,
) -> Summary:
    (folder / "papaya.toml").write_text(_SERVER, encoding="utf-8")
    task_file = folder / TASK_FILE.name
    write_task(task_file, TASK_FILE, regime, options.concurrency, is_clear=options.clear)
    with telling("the server starts"):
        addresses = processes.start_server("server", "--config", str(folder / "papaya.toml"))
    admin, token = f"http://{addresses['admin']}", folder / "data" / "admin.token"
    owner = ("--admin", admin, "--token-file", str(token))
    settings = _settings(options, _goal(options, regime))
    trust = None if options.clear else folder / "trust.toml"
    with telling("the task is submitted: its file imports PyTorch, which takes a few seconds"):
        processes.start("submit", "task", "submit", str(task_file), *owner, *settings)
        import_module("matplotlib.figure")  # which takes a second, and there is one now
        processes.finish("submit")
        if trust is not None:
            write_trust(trust, folder / "data", addresses["devices"], _goal(options, regime))
    _start_devices(addresses["devices"], task_file, trust, texts, folder, processes)
    client = AdminClient(admin, token.read_text(encoding="ascii").strip())
    onlooker = Onlooker(folder / "data" / "blobs", TASK)
    with view_for(partial(_done, options)) as view:
        recorder = Recorder(client, view, 60 * options.minutes + _PATIENCE_S)
        detail = follow(
            client, TASK, "evaluated", _LOOK_S, recorder, sleep=partial(_wait, processes, onlooker)
        )
    seen = None if options.clear else onlooker.sample(detail.config.update_bytes // 4)
    with telling("the model and its history are saved"):
        model, table = output / "model.safetensors", output / "metrics.csv"
        processes.run("export", "task", "export", TASK, "--output", str(model), *owner)
        processes.run("metrics", "task", "metrics", TASK, "--output", str(table), *owner)
        files = (model, output / "perplexity.png", table)
        points = all_points(client, TASK)
        summary = summarize(detail, points, recorder.samples, options.devices, files, seen)
        _draw(summary, perplexities(detail.task.submitted, points), recorder.samples)
    return summary


def _draw(
    summary: Summary, curve: list[tuple[float, int, float]], samples: list[DemoSample]
) -> None:
    plot, clients = Path(summary.plot), summary.evaluation_clients
    with writing(plot):
        draw(plot, summary.title, curve, samples, summary.concurrency, summary.utilization, clients)


def _wait(processes: Processes, onlooker: Onlooker, seconds: float) -> None:
    for _ in range(_GLANCES):
        wait_s(processes, seconds / _GLANCES)
        onlooker.look()


def _goal(options: argparse.Namespace, regime: AsyncFL | SyncFL) -> int:
    config = TaskConfig(task=TASK, concurrency=options.concurrency, model_length=1, regime=regime)
    return config.aggregation_goal


def _settings(options: argparse.Namespace, goal: int) -> list[str]:
    """The task's own, for the size and the time of this run."""
    settings = {
        "stop.hours": options.minutes / 60,
        "evaluation.every_versions": max(1, round(_EVALUATE_UPDATES / goal)),
        "evaluation.clients": max(1, options.devices // 3),
    }
    if hasattr(options, "versions"):
        settings["stop.versions"] = options.versions
    words = [word for field, value in settings.items() for word in ("--set", f"{field}={value}")]
    if hasattr(options, "checkpoint"):
        words += ["--checkpoint", str(options.checkpoint)]
    return words


def _start_devices(
    address: str,
    task_file: Path,
    trust: Path | None,
    texts: list[Path],
    folder: Path,
    processes: Processes,
) -> None:
    places = [folder / f"texts-{number + 1}" for number in range(_processes(len(texts)))]
    parallel = max(1, len(os.sched_getaffinity(0)) // len(places))
    for number, devices in enumerate(deal_out(texts, places)):
        options = {
            "--server": f"http://{address}",
            "--task": str(task_file),
            "--token-file": str(folder / "data" / "device.token"),
            "--devices": str(devices),
            "--store": str(folder / f"devices-{number + 1}"),
            "--import": f"text={places[number]}",
            "--assume": _ASSUMED,
            "--participation-floor": "0",
            "--pause": "0",
            "--max-parallel": str(parallel),
        }
        if trust is not None:
            options["--trust"] = str(trust)
        words = [word for option in options.items() for word in option]
        processes.start(f"devices-{number + 1}", "client", *words)


def _processes(devices: int) -> int:
    return min(_MOST_PROCESSES, math.ceil(devices / _DEVICES_IN_A_PROCESS))


def _done(options: argparse.Namespace, detail: TaskDetail) -> float:
    """Which part of the training is over."""
    if detail.task.state != "running":
        return 1.0
    by_time: float = (time.time() - detail.task.submitted) / (60 * options.minutes)
    by_version: float = detail.task.version / getattr(options, "versions", 1 << 40)
    return max(by_time, by_version)


_LOGGED_S = 60.0  # until the server has started its TSA and logged it
_POLL_S = 0.05


def write_task(
    path: Path, original: Path, regime: AsyncFL | SyncFL, concurrency: int, *, is_clear: bool
) -> None:
    """The original, and the settings of this run in its last lines."""
    changes = [f"regime={regime!r}", f"concurrency={concurrency}"]
    if is_clear:
        changes.append("secure_aggregation=None")
    last = [
        "",
        "from msgspec import structs",
        "from papaya.config import AsyncFL, SyncFL",
        "",
        f"task = structs.replace(task, {', '.join(changes)})",
    ]
    text = original.read_text(encoding="utf-8") + "\n".join(last) + "\n"
    path.write_text(text, encoding="utf-8")


def write_trust(path: Path, data: Path, devices: str, goal: int) -> None:
    """Believe this server's own log and software evidence, and sums of K or more clients."""
    policy = {
        "log_key": _log_key(data / "log.key.pub"),
        "log_url": f"http://{devices}/v1/log",
        "platforms": ["software"],
        "allow_insecure_software": True,
        "allow_smt": True,
        "minimum_threshold": goal,
    }
    lines = [f"{field} = {json.dumps(value)}\n" for field, value in policy.items()]
    path.write_text("".join(lines), encoding="utf-8")


def _log_key(path: Path) -> str:
    """It is there when the server has started its TSA: soon after the first task."""
    ends_at = time.monotonic() + _LOGGED_S
    while not path.exists():
        if time.monotonic() > ends_at:
            raise PapayaError(
                f"the server has started no TSA within {_LOGGED_S:g} s",
                hint="look at server.log among the logs, or train with --clear",
            )
        time.sleep(_POLL_S)
    return path.read_text(encoding="ascii").strip()


_DOCUMENTATION = Path("pydoc_data", "topics.py")


def find_texts(count: int, seed: int, library: Path = LIBRARY) -> list[Path]:
    """The documentation, and as many other texts as are wanted, drawn by the seed."""
    found = library_texts(library)
    if len(found) < count:
        raise OperatorError(
            f"{library} has {len(found)} texts of {LEAST_BYTES} bytes or more, not {count}",
            hint=f"--devices {len(found)}" if found else "use a Python that has its library here",
        )
    first = [path for path in found if path == library / _DOCUMENTATION]
    others = [path for path in found if path not in first]
    return first + Random(seed).sample(others, count - len(first))


def deal_out(texts: Sequence[Path], folders: Sequence[Path], library: Path = LIBRARY) -> list[int]:
    """Copy them into one folder for each process; how many each got."""
    dealt = [0] * len(folders)
    for number, text in enumerate(texts):
        at = number % len(folders)
        dealt[at] += 1
        name = f"{dealt[at]:04}-{'.'.join(text.relative_to(library).parts)}"
        with writing(folders[at]):
            folders[at].mkdir(parents=True, exist_ok=True)
            shutil.copyfile(text, folders[at] / name)
    return dealt
