"""`papaya demo`: the real system on one machine, for a minute.

It runs the usual commands: `papaya serve`; `papaya task submit` with examples/next_word.py; a few
`papaya client` with some devices each; `papaya task export`. These are real processes and sockets,
and a real model on real texts: the sources and documentation of Python's standard library, one text
per device. Every number that is printed was measured.

The task is compiled and signed, and the devices, which know only the owner's key, fetch its program
and train it without torch. With --engine torch they have a copy of the task file, to which the
settings of this run are appended.

Secure aggregation is on unless --clear is given: the server sees masked updates and sums of at
least K. The TSA is a child of the server with INSECURE software evidence, which the devices of the
demonstration accept.

Unlike real devices, these are assumed to be idle, charging and on an unmetered network, and they
take part again at once. At the end, processes, state and examples are removed; the results stay.
Exits with 1 if the model did not learn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import NamedTuple, get_args

import msgspec

import papaya
from papaya.cli.admin_client import AdminClient, task_path
from papaya.cli.demo.processes import Processes, interrupted_by_signals, wait_s
from papaya.cli.demo.show import (
    SOFTWARE,
    DemoRecorder,
    DemoSample,
    Onlooker,
    Summary,
    after_warm_up,
    draw,
    perplexities,
    summarize,
    telling,
    text_of,
    view_for,
)
from papaya.cli.output import (
    Commands,
    FormatOptions,
    add_format,
    bind,
    make_folder,
    note,
    positive,
    print_data,
    print_json,
    whole,
    writing,
)
from papaya.cli.owner import create_key
from papaya.cli.task.export import all_points
from papaya.cli.task.watch import follow
from papaya.config import AsyncFL, SyncFL, TaskConfig
from papaya.device import confinement
from papaya.device.executor import EngineName
from papaya.device.texts import LEAST_BYTES, LIBRARY, library_texts
from papaya.errors import OperatorError, PapayaError
from papaya.learning.executorch.shim import shim_library
from papaya.server.admin.views import TaskDetail
from papaya.server.public_log import own_key

TASK = "next-word"
TASK_FILE = Path(papaya.__file__).parents[1] / "examples" / "next_word.py"
_MOST_PROCESSES = 3
_DEVICES_IN_A_PROCESS = 16
_LOOK_S = 0.5
_GLANCES = 5  # looks at the server's disk between two polls, to find a sum of few clients
_PATIENCE_S = 180.0  # beyond --minutes: for the first version, and again from there to the end
_DOCUMENTATION = Path("pydoc_data", "topics.py")
_EVALUATE_UPDATES = 50
_EXTRAS = {"aiohttp": "device", "torch": "torch", "matplotlib": "sim", "rich": "sim"}
_EXPORTER = ("flatbuffers", "packaging", "ruamel", "tabulate")  # the extra `executorch`
_ASSUMED = "idle,charging,unmetered"
# Short intervals, because the demo lasts a minute.
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


@dataclass(frozen=True, kw_only=True)
class DemoOptions(FormatOptions):
    engine: EngineName | None = None  # None: executorch, if it works on this machine
    sync: bool = False
    clear: bool = False
    devices: int = 48
    concurrency: int = 24
    goal: int | None = None
    minutes: float = 0.75
    versions: int | None = None
    seed: int = 1
    checkpoint: Path | None = None
    output: Path | None = None


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "demo",
        description="Start a server and a few dozen devices on this machine, train a next-word "
        "model on the source code of Python's standard library, and save it.",
    )
    _add_task(parser)
    _add_run(parser)
    add_format(parser)
    bind(parser, DemoOptions, run)


def _add_task(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        choices=get_args(EngineName),
        help="what devices train with: a compiled program, without PyTorch (executorch, the "
        "default), or the task file (torch)",
    )
    parser.add_argument(
        "--sync", action="store_true", help="train with SyncFL (in rounds) instead of AsyncFL"
    )
    parser.add_argument(
        "--clear",
        action="store_true",
        help="turn secure aggregation off: the server sees every update",
    )
    parser.add_argument(
        "--devices",
        type=whole(2),
        metavar="N",
        help="number of devices; each trains on one source file",
    )
    parser.add_argument(
        "--concurrency",
        type=whole(1),
        metavar="C",
        help="number of clients that train at the same time",
    )
    parser.add_argument(
        "--goal",
        type=whole(1),
        metavar="K",
        help="client updates per version (default: 10; with --sync: concurrency ÷ 1.3)",
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--minutes",
        type=positive,
        metavar="M",
        help="minutes of training, counted from the first version",
    )
    parser.add_argument(
        "--versions",
        type=whole(1),
        metavar="V",
        help="stop at this version, if it is reached before --minutes is over",
    )
    parser.add_argument("--seed", type=whole(0), metavar="S", help="seed that selects the texts")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="safetensors file of an earlier run to continue from (default: a new model)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder for the results (default: runs/demo-async or runs/demo-sync, with "
        "-clear at the end if --clear is given)",
    )


def run(options: DemoOptions) -> int:
    _require_extras()
    regime = _regime(options)
    texts = find_texts(options.devices, options.seed)
    if options.checkpoint is not None and not options.checkpoint.is_file():
        raise OperatorError(
            f"there is no file {options.checkpoint}", hint="check --checkpoint FILE"
        )
    engine = usable_engine(options.engine)
    output = make_folder(output_of(options))
    logs = make_folder(output / "logs")
    note(_introduction(options, engine, regime, texts))
    note("In the clear: the server sees every update.\n" if options.clear else f"{SOFTWARE}\n")
    with (
        interrupted_by_signals(),
        tempfile.TemporaryDirectory(prefix="papaya-demo-", ignore_cleanup_errors=True) as folder,
        Processes(logs) as processes,
    ):
        summary = _train(options, engine, regime, texts, Path(folder), output, processes)
        with telling("stopping the devices and the server"):
            processes.stop()
    if options.is_json:
        print_json(summary)
    else:
        print_data(text_of(summary))
    # A run from a checkpoint starts with a good model: noise may hide what it gained.
    if options.checkpoint is None and not summary.has_learned:
        raise PapayaError(
            "perplexity did not fall", hint=f"papaya demo --minutes {2 * options.minutes:g}"
        )
    return 0


def usable_engine(asked: EngineName | None) -> EngineName:
    """The engine of the devices: executorch, or torch if this machine cannot use executorch."""
    problem = None if asked == "torch" else _why_not_compiled()
    if problem is None:
        return asked or "executorch"
    if asked is not None:
        raise OperatorError(problem, hint="papaya demo --engine torch")
    note(f"{problem}: using --engine torch\n")
    return "torch"


def _why_not_compiled() -> str | None:
    """Why this machine cannot compile the task, or run signed programs; None if it can."""
    if (lacking := confinement.missing()) is not None:
        return lacking
    if missing := [name for name in _EXPORTER if find_spec(name) is None]:
        return f"compiling the task needs {', '.join(missing)}, which are not installed"
    try:
        with telling("preparing the engine of the devices (compiled once)"):
            shim_library()
    except OperatorError as error:
        return str(error)
    return None


def _introduction(
    options: DemoOptions, engine: EngineName, regime: AsyncFL | SyncFL, texts: list[Path]
) -> str:
    trains = "a compiled program, without PyTorch" if engine == "executorch" else "PyTorch"
    sizes_kb = [round(path.stat().st_size / 1000) for path in texts]
    processes = _processes(len(texts))
    where = "one process" if processes == 1 else f"{processes} processes"
    return (
        f"{type(regime).__name__}: {len(texts)} devices in {where}, {options.concurrency} "
        f"at a time, each with one text of Python's library ({min(sizes_kb)} to "
        f"{max(sizes_kb)} kB).\nDevices train with {trains}.\n"
        "A DEMONSTRATION: devices are assumed to be idle, charging and on an unmetered network, "
        "and may take part again immediately.\n"
    )


def output_of(options: DemoOptions) -> Path:
    """Each kind of run has its own folder, so that their results can be compared."""
    kind = ("-sync" if options.sync else "-async") + ("-clear" if options.clear else "")
    return options.output or Path("runs") / f"demo{kind}"


def _require_extras() -> None:
    for package, extra in _EXTRAS.items():
        if find_spec(package) is None:
            raise OperatorError(
                f"the demo needs {package}, which is not installed",
                hint=f"pip install 'papaya-fl[{extra}]' (or run: make demo)",
            )
    if not TASK_FILE.is_file():
        raise OperatorError(
            f"the task file of the demo is missing: {TASK_FILE}",
            hint="run the demo from a clone of the project",
        )


def _regime(options: DemoOptions) -> AsyncFL | SyncFL:
    goal, concurrency = options.goal, options.concurrency
    if concurrency > options.devices:
        raise OperatorError(
            f"--devices {options.devices} is less than --concurrency {concurrency}",
            hint=f"--devices {2 * concurrency}",
        )
    if not options.sync:
        return AsyncFL(min(10, concurrency) if goal is None else goal)
    if goal is not None and goal > concurrency:
        raise OperatorError(
            f"--goal {goal} is more than the {concurrency} clients of a round",
            hint=f"--goal {concurrency}",
        )
    return SyncFL() if goal is None else SyncFL(over_selection=concurrency / goal - 1)


class _Preparation(NamedTuple):
    """How the task reaches the devices: arguments of `task submit`, and options of `client`."""

    submit: list[str]
    client: dict[str, str]


def _prepare(
    options: DemoOptions, engine: EngineName, regime: AsyncFL | SyncFL, folder: Path
) -> _Preparation:
    if engine == "torch":
        task_file = folder / TASK_FILE.name
        write_task(task_file, TASK_FILE, regime, options.concurrency, is_clear=options.clear)
        return _Preparation([str(task_file), "--unsigned"], {"--task": str(task_file)})
    key, owners = folder / "owner.key", folder / "owners.toml"
    public = create_key(key).public_key().public_bytes_raw().hex()
    owners.write_text(f'[owners.demo]\nkey = "{public}"\ncollections = ["text"]\n')
    settings: dict[str, object] = {"regime": regime, "concurrency": options.concurrency}
    if options.clear:
        settings["secure_aggregation"] = None
    words = [str(TASK_FILE), "--engine", engine, "--owner", str(key)]
    for field, value in settings.items():
        words += ["--set", f"{field}={msgspec.json.encode(value).decode()}"]
    return _Preparation(words, {"--engine": engine, "--owners": str(owners)})


async def _write_examples(texts: Sequence[Path]) -> None:
    """Turn texts into examples, one per line: a device without torch has no `load_examples`."""
    from papaya.device.training import sandboxed

    async with sandboxed([TASK_FILE], time.time) as trainer:
        read = [text.read_text(encoding="utf-8", errors="replace") for text in texts]
        found = await trainer.load_examples(TASK_FILE, read)
    for text, examples in zip(texts, found, strict=True):
        with writing(text):
            text.write_bytes(b"".join(example + b"\n" for example in examples))


def _train(
    options: DemoOptions,
    engine: EngineName,
    regime: AsyncFL | SyncFL,
    texts: list[Path],
    folder: Path,
    output: Path,
    processes: Processes,
) -> Summary:
    (folder / "papaya.toml").write_text(_SERVER, encoding="utf-8")
    prepared = _prepare(options, engine, regime, folder)
    places = [folder / f"texts-{number + 1}" for number in range(_processes(len(texts)))]
    devices = deal_out(texts, places)
    with telling("starting the server"):
        addresses = processes.start_server("server", "--config", str(folder / "papaya.toml"))
    admin, token = f"http://{addresses['admin']}", folder / "data" / "admin.token"
    owner = ("--admin", admin, "--token-file", str(token))
    settings = _settings(options, _goal(options, regime))
    if not options.clear:
        prepared.client["--trust"] = str(folder / "trust.toml")
        write_trust(
            folder / "trust.toml", folder / "data", addresses["devices"], _goal(options, regime)
        )
    compiling = "" if engine == "torch" else "; compiling the task takes longer, once"
    with telling(f"submitting the task (importing PyTorch takes a few seconds{compiling})"):
        # Devices start meanwhile, so that the first version is not late.
        processes.start("submit", "task", "submit", *prepared.submit, *owner, *settings)
        import_module("matplotlib.figure")  # takes a second, which would be lost later
        if engine == "executorch":
            asyncio.run(_write_examples([text for place in places for text in place.iterdir()]))
        _start_devices(addresses["devices"], prepared.client, devices, folder, processes)
        processes.finish("submit")
    client = AdminClient(admin, token.read_text(encoding="ascii").strip())
    run_id = client.get(task_path(TASK), TaskDetail).task.task
    onlooker = Onlooker(folder / "data" / "blobs", run_id)
    with view_for(partial(_done, options)) as view:
        recorder = DemoRecorder(client, view, 60 * options.minutes + _PATIENCE_S)
        detail = follow(
            client, TASK, "evaluated", _LOOK_S, recorder, sleep=partial(_wait, processes, onlooker)
        )
    seen = None if options.clear else onlooker.sample(detail.config.update_bytes // 4)
    with telling("saving the model and its history"):
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


def _goal(options: DemoOptions, regime: AsyncFL | SyncFL) -> int:
    config = TaskConfig(task=TASK, concurrency=options.concurrency, model_length=1, regime=regime)
    return config.aggregation_goal


def _settings(options: DemoOptions, goal: int) -> list[str]:
    """Options of `papaya task submit` for the size and the time of this run."""
    settings: dict[str, float] = {
        "stop.training_hours": options.minutes / 60,
        "evaluation.every_versions": max(1, round(_EVALUATE_UPDATES / goal)),
        "evaluation.clients": max(1, options.devices // 3),
    }
    if options.versions is not None:
        settings["stop.versions"] = options.versions
    words = [word for field, value in settings.items() for word in ("--set", f"{field}={value}")]
    if options.checkpoint is not None:
        words += ["--checkpoint", str(options.checkpoint)]
    return words


def _start_devices(
    address: str, shared: dict[str, str], devices: list[int], folder: Path, processes: Processes
) -> None:
    """Start one process per entry, with that many devices and the texts of its folder."""
    parallel = max(1, len(os.sched_getaffinity(0)) // len(devices))
    for number, count in enumerate(devices, 1):
        options = {
            "--server": f"http://{address}",
            "--token-file": str(folder / "data" / "device.token"),
            "--devices": str(count),
            "--store": str(folder / f"devices-{number}"),
            "--bundles": str(folder / f"bundles-{number}"),
            "--import": f"text={folder / f'texts-{number}'}",
            "--assume": _ASSUMED,
            "--participation-floor": "0",
            "--pause": "0",
            "--max-parallel": str(parallel),
            **shared,
        }
        words = [word for option in options.items() for word in option]
        processes.start(f"devices-{number}", "client", *words)


def _processes(devices: int) -> int:
    return min(_MOST_PROCESSES, math.ceil(devices / _DEVICES_IN_A_PROCESS))


def _done(options: DemoOptions, samples: list[DemoSample], detail: TaskDetail) -> float:
    """The share of the training that is done."""
    if detail.task.state != "running":
        return 1.0
    warm = after_warm_up(samples)
    by_time = (warm[-1].seconds - warm[0].seconds) / (60 * options.minutes) if warm else 0.0
    by_version = 0.0 if options.versions is None else detail.task.version / options.versions
    return max(by_time, by_version)


def write_task(
    path: Path, original: Path, regime: AsyncFL | SyncFL, concurrency: int, *, is_clear: bool
) -> None:
    """Copy the task file and append the settings of this run.

    Server and devices get the same file, because a device compares the settings of the server's
    task with those of its own file.
    """
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
    """Write a policy that trusts this server's log and accepts INSECURE software evidence.

    Nobody should use such a policy on a real device.
    """
    policy = {
        "log_key": str(own_key(data).verifier),
        "log_url": f"http://{devices}/v1/log",
        "platforms": ["software"],
        "allow_insecure_software": True,
        "allow_smt": True,
        "minimum_threshold": goal,
    }
    lines = [f"{field} = {json.dumps(value)}\n" for field, value in policy.items()]
    path.write_text("".join(lines), encoding="utf-8")


def find_texts(count: int, seed: int, library: Path = LIBRARY) -> list[Path]:
    """The documentation, and other texts of the standard library, chosen by the seed."""
    found = library_texts(library)
    if len(found) < count:
        raise OperatorError(
            f"{library} has {len(found)} texts of {LEAST_BYTES} bytes or more, {count} are needed",
            hint=f"--devices {len(found)}" if found else "use a Python with its standard library",
        )
    first = [path for path in found if path == library / _DOCUMENTATION]
    others = [path for path in found if path not in first]
    return first + Random(seed).sample(others, count - len(first))


def deal_out(texts: Sequence[Path], folders: Sequence[Path], library: Path = LIBRARY) -> list[int]:
    """Copy the texts into one folder per process; returns how many each got."""
    dealt = [0] * len(folders)
    for number, text in enumerate(texts):
        at = number % len(folders)
        dealt[at] += 1
        name = f"{dealt[at]:04}-{'.'.join(text.relative_to(library).parts)}"
        with writing(folders[at]):
            folders[at].mkdir(parents=True, exist_ok=True)
            shutil.copyfile(text, folders[at] / name)
    return dealt
