"""`papaya client`: one or many devices in this process, training for a server.

A device takes part while this machine is idle, charging and on an unmetered network; --assume skips
these checks. It runs only the task files that are named here, on the examples that the policies of
their owner allow, and obeys its own participation history. The end of each visit goes to stdout,
notes go to stderr. On SIGTERM and Ctrl-C, devices leave their sessions before the process ends.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

from msgspec import structs

from papaya.cli.client import budget
from papaya.cli.output import (
    Commands,
    FormatOptions,
    add_format,
    bind,
    note,
    plural,
    positive,
    print_data,
    print_json,
    printable,
    whole,
)
from papaya.clock import Clock
from papaya.device.eligibility import CONDITIONS
from papaya.device.events import (
    Event,
    NotEligible,
    SelectorReachable,
    SelectorUnreachable,
    StepsTrained,
    Troubled,
    UploadRerouted,
    VisitEnded,
)
from papaya.device.executor import EngineName
from papaya.errors import OperatorError
from papaya.messages.reasons import in_words

SERVER = "http://127.0.0.1:8750"
_REFUSED_HINT = (
    "hint: if the token is refused, pass the server's DATA/device.token, or a token that "
    "`papaya token` made, with --token-file; otherwise update this client"
)
_REVOKED = "this device was revoked"  # papaya/selector/selector.py
_REVOKED_HINT = "hint: ask the operator of the servers"
_NO_SUCH_PATH = "no such path"  # papaya/http/routes.py
_OTHER_LISTENER_HINT = (
    "hint: the address may be that of another listener of the server, such as its admin API: "
    "devices use port 8750 by default; otherwise update this client"
)
_HINTS = {_REVOKED: _REVOKED_HINT, _NO_SUCH_PATH: _OTHER_LISTENER_HINT}
_NOT_ELIGIBLE_HINT = (
    "hint: the device tries again; to take part anyway, name the conditions to skip: "
    f"--assume {','.join(CONDITIONS)}"
)


@dataclass(frozen=True, kw_only=True)
class ClientOptions(FormatOptions):
    server: str = SERVER  # addresses of selectors, separated by commas
    task: Sequence[Path] = ()
    engine: EngineName = "torch"
    alias: Sequence[tuple[str, str]] = ()  # (name of a submitted task, name in the file)
    visits: int | None = None  # per device; None: until it is stopped
    explain: bool = False
    # Devices
    devices: int = 1
    assume: str = ""
    labels: str = ""
    participation_floor: float = 3600.0
    pause: float = 60.0
    max_parallel: int | None = None
    memory: int = 1024
    max_training: float = 600.0
    trust: Path | None = None
    owners: Path | None = None
    bundles: Path = Path("bundles")
    protocol_only: float | None = None  # mean seconds of a training that does nothing
    # Data
    store: Path = Path("device.db")
    policies: Path | None = None
    imports: Sequence[tuple[str, Path]] = ()
    # Network
    ca: Path | None = None
    proxy: str | None = None
    blobs_url: str | None = None
    blobs_host: list[str] | None = None
    upload_host: list[str] | None = None
    token_file: Sequence[Path] = ()


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "client",
        description="Run one or more devices in this process. They train with task files that are "
        "already on this machine, and tasks that owners named in --owners have signed.",
    )
    parser.add_argument(
        "--server",
        metavar="URL[,URL...]",
        help="addresses of the selectors, separated by commas",
    )
    parser.add_argument(
        "--task",
        type=Path,
        action="append",
        metavar="FILE",
        help="task file to train with, or program for --engine executorch; may be repeated",
    )
    parser.add_argument(
        "--engine",
        choices=get_args(EngineName),
        help="train with Python task files (torch), or with programs of `papaya task compile`, "
        "without torch (executorch)",
    )
    parser.add_argument(
        "--alias",
        type=_pair,
        action="append",
        metavar="NEW=NAME",
        help="train a task that was submitted under another name: the submitted name, "
        "then the name in the task file, as in opened-2=opened; may be repeated",
    )
    parser.add_argument(
        "--visits",
        type=whole(1),
        metavar="N",
        help="stop after this many visits per device, successful or not (default: "
        "run until interrupted)",
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="print the full text of failures, such as the traceback of the task's code. It may "
        "quote examples. With or without this option, servers learn only a reason code",
    )
    _add_device_options(parser.add_argument_group("devices"))
    _add_data_options(parser.add_argument_group("data"))
    _add_network_options(parser.add_argument_group("network"))
    add_format(parser)
    bind(parser, ClientOptions, run)
    budget.add_to(parser.add_subparsers(title="actions", metavar="ACTION"))


def _pair(text: str) -> tuple[str, str]:
    left, is_pair, right = text.partition("=")
    if not (left and is_pair and right):
        raise argparse.ArgumentTypeError(f"{text!r} does not have the form LEFT=RIGHT")
    return left, right


def _import(text: str) -> tuple[str, Path]:
    collection, path = _pair(text)
    return collection, Path(path)


def _add_device_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--devices", type=whole(1), metavar="N", help="number of devices in this process"
    )
    group.add_argument(
        "--assume",
        metavar="LIST",
        help="conditions to assume instead of checking, separated by commas: "
        f"{', '.join(CONDITIONS)}",
    )
    group.add_argument(
        "--labels",
        metavar="LIST",
        help="labels to declare to the server, separated by commas",
    )
    group.add_argument(
        "--participation-floor",
        type=float,
        metavar="S",
        help="minimum seconds between two participations in the same task; use 0 only "
        "for demonstrations",
    )
    group.add_argument(
        "--pause", type=float, metavar="S", help="seconds to wait after a participation"
    )
    group.add_argument(
        "--max-parallel",
        type=whole(1),
        metavar="N",
        help="maximum number of training jobs at the same time (default: one per core)",
    )
    group.add_argument(
        "--memory", type=whole(1), metavar="MB", help="memory limit per training job, in MB"
    )
    group.add_argument(
        "--max-training", type=positive, metavar="S", help="time limit per training job, in seconds"
    )
    group.add_argument(
        "--trust",
        type=Path,
        metavar="FILE",
        help="TOML file that says which TSAs to trust; required for tasks with secure aggregation",
    )
    group.add_argument(
        "--owners",
        type=Path,
        metavar="FILE",
        help="TOML file with the owners whose signed tasks these devices train, and with the "
        "limits of each owner",
    )
    group.add_argument(
        "--bundles", type=Path, metavar="DIR", help="folder for the programs of signed tasks"
    )
    group.add_argument(
        "--protocol-only",
        type=positive,
        metavar="S",
        help="do not train; wait this many seconds on average, then upload numbers that identify "
        "the session. For hundreds of devices use papaya load",
    )


def _add_data_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--store",
        type=Path,
        metavar="PATH",
        help="file for examples and history; for several devices, a folder with one file each",
    )
    group.add_argument(
        "--policies",
        type=Path,
        metavar="FILE",
        help="TOML file with the policy of each collection: which tasks may use its "
        "examples and how long examples are kept; the policies are saved in the "
        "store",
    )
    group.add_argument(
        "--import",
        dest="imports",
        type=_import,
        action="append",
        metavar="COLLECTION=PATH",
        help="import examples from a file, or from a folder whose files are distributed "
        "among the devices; may be repeated",
    )


def _add_network_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ca",
        type=Path,
        metavar="FILE",
        help="PEM file of the certificate authority to trust for https "
        "(default: the system's authorities)",
    )
    group.add_argument("--proxy", metavar="URL", help="HTTP proxy to use")
    group.add_argument(
        "--blobs-url",
        metavar="URL",
        help="address of a CDN to download parameters from (default: the selectors)",
    )
    group.add_argument(
        "--blobs-host",
        action="append",
        metavar="HOST",
        help="name of a host that the selectors may send this device to for downloads, such as "
        "that of a bucket, or *.example.org; may be repeated (default: none)",
    )
    group.add_argument(
        "--upload-host",
        action="append",
        metavar="HOST",
        help="host that the servers may send this device to for its uploads: HOST or *.example.org "
        "at the port of https (443; http: 80), HOST:8750 at this port, HOST:* at any; may be "
        "repeated (default: none, uploads go through the selectors)",
    )
    group.add_argument(
        "--token-file",
        type=Path,
        action="append",
        metavar="FILE",
        help="file with the device token; give it once for all devices, or once per device",
    )


def run(options: ClientOptions) -> int:
    require_aiohttp()  # before any file is opened
    printer = Printer(options.format, explains=options.explain)
    try:
        asyncio.run(_run(options, printer))
    except KeyboardInterrupt:  # during start and end, when devices do not handle signals
        printer.summarize()
        raise
    printer.summarize()
    return 0


def require_aiohttp() -> None:
    if find_spec("aiohttp") is None:
        raise OperatorError(
            "devices need aiohttp, which is not installed", hint="pip install 'papaya-fl[device]'"
        )


async def _run(options: ClientOptions, printer: Printer) -> None:
    from papaya.cli.client.setup import (
        DeviceFiles,
        bundles_in,
        device_process,
        import_examples,
        opened_devices,
        trainer_for,
    )
    from papaya.device.device import DeviceRuntime

    clock = Clock()
    files = DeviceFiles.of(options)
    shared = device_process(options, clock, printer.on_event)
    async with shared as process, trainer_for(options, clock) as (trainer, tasks):
        with ExitStack() as opened:
            bundles = bundles_in(options.owners, options.bundles)
            if bundles is not None:
                opened.callback(bundles.close)
            devices = [
                opened.enter_context(device)
                for device in opened_devices(
                    options, files, process, trainer, bundles, printer.on_event
                )
            ]
            allowed = tasks if bundles is None else ["*"]  # owners have their own list
            await import_examples(
                options.imports, devices, options.task, trainer, allowed, bundles, clock.now()
            )
            wanted = list(tasks)
            if bundles is not None:
                wanted.append(f"signed tasks of {plural(len(bundles.owners), 'owner')}")
            note(f"{plural(len(devices), 'device')} for {', '.join(wanted) or 'any task'}")
            if trainer.secure_modules and shared.trust is None:
                note("warning: without --trust FILE these devices take part in no secure task")
            runtime = DeviceRuntime(process, devices)
            with runtime.stopped_by_signals():
                await runtime.run(options.visits)


class Printer:
    """Prints the end of each visit on stdout, and notes, each of them once, on stderr."""

    def __init__(self, format_: str, *, explains: bool = False) -> None:
        self._is_json = format_ == "json"
        self._explains = explains
        self._endings: Counter[str] = Counter()
        self._noted: set[str] = set()
        self._rerouted: Counter[str] = Counter()

    def on_event(self, event: Event) -> None:
        if isinstance(event, VisitEnded) and not self._explains:
            event = structs.replace(event, explanation="")  # it may quote examples
        if self._is_json:
            print_json(event)
        match event:
            case VisitEnded():
                self._endings[_shown_ending(event)] += 1
                if not self._is_json:
                    print_data(printable(_line(event)))
                    if event.explanation:
                        print_data(event.explanation)
                if event.ending == "refused":
                    self._note_once(_HINTS.get(event.reason, _REFUSED_HINT))
            case StepsTrained():
                note(f"{event.device}: {event.task}: {event.done:,} of {event.steps:,} steps")
            case NotEligible():
                self._note_once(f"not eligible: {'; '.join(event.reasons)}")
                self._note_once(_NOT_ELIGIBLE_HINT)
            case Troubled():
                self._note_once(f"{event.device}: {event.problem}")
            case SelectorUnreachable():
                problem = printable(event.problem)
                note(f"{event.server} does not answer: {problem}; trying again")
                hint = "check that it runs: `papaya serve` starts a server on this machine"
                self._note_once(f"hint: {event.hint or hint}")
            case SelectorReachable():
                note(f"{event.server} answers again")
            case UploadRerouted():
                self._on_rerouted(event)

    def summarize(self) -> None:
        visits = plural(sum(self._endings.values()), "visit")
        endings = ", ".join(f"{count:,} {ending}" for ending, count in self._endings.most_common())
        note(f"{visits}: {endings}" if endings else visits)
        if self._rerouted:
            note(rerouted_uploads(self._rerouted))

    def _on_rerouted(self, event: UploadRerouted) -> None:
        """Each reason once: servers choose the address."""
        self._rerouted[event.reason] += 1
        if self._rerouted[event.reason] > 1:
            return
        where = printable(event.server)
        note(f"no direct upload to {where}: {printable(event.problem)}; using the selectors")
        if event.hint:
            self._note_once(f"hint: {event.hint}")

    def _note_once(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            note(text)


def rerouted_uploads(by_reason: Mapping[str, int]) -> str:
    """How many direct uploads failed and why, the most frequent reason first."""
    counts = Counter(by_reason)
    reasons = ", ".join(f"{n:,} {why.replace('_', ' ')}" for why, n in counts.most_common())
    return f"{plural(counts.total(), 'direct upload')} went on through a selector: {reasons}"


def _shown_ending(ended: VisitEnded) -> str:
    """`aborted` would look like a failure when enough other devices took part."""
    is_over = ended.ending == "aborted" and ended.reason in ("task_over", "round_over")
    return "not_needed" if is_over else ended.ending


def _line(ended: VisitEnded) -> str:
    match ended.ending:
        case "failed" | "gave_up":
            reason = in_words(f"left_{ended.reason}")
        case "aborted" | "discarded":
            reason = in_words(f"{ended.ending}_{ended.reason}")
        case "stopped" | "unprepared":  # a bundle was fetched, or the detail says why not
            reason = ""
        case _:
            reason = ended.reason
    why = "; ".join(filter(None, (reason, ended.detail)))
    words = [ended.device, _shown_ending(ended), ended.task or "", f"({why})" if why else ""]
    return " ".join(filter(None, words))
