"""`papaya client`: one or many devices in this process, training for a server.

A device takes part when this machine is idle, charging and on an unmetered network, or when its
owner says so with --assume. It runs the task files that are named here and nothing else, on the
examples that their owner's policies allow, and keeps to its own participation history. Events on
stdout, remarks on stderr. SIGTERM and Ctrl-C end it cleanly: sessions are left, not dropped.
"""

from __future__ import annotations

import argparse
import asyncio
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from papaya.cli.output import Commands, add_format, note, plural, positive, whole
from papaya.clock import device_clock
from papaya.config import DeviceConfig
from papaya.device.eligibility import CONDITIONS
from papaya.errors import OperatorError

if TYPE_CHECKING:
    from papaya.cli.client.output import Printer

SERVER = "http://127.0.0.1:8750"
_NO_FLOOR = "0 lets one device take part at once again, as a demonstration does"


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "client",
        description="Run one or many devices in this process. They train by task files that are "
        "here already; nothing that a server sends is ever run.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--server", default=SERVER, metavar="URL[,URL...]", help="selectors")
    parser.add_argument(
        "--task",
        type=Path,
        action="append",
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="a task file to train by; may be repeated",
    )
    parser.add_argument(
        "--alias",
        type=_pair,
        action="append",
        default=[],
        metavar="NEW=NAME",
        help="a task that was submitted as NEW is that of the file whose task is NAME",
    )
    _add_device_options(parser.add_argument_group("the devices"))
    _add_data_options(parser.add_argument_group("their data"))
    _add_network_options(parser.add_argument_group("the network"))
    parser.add_argument(
        "--visits",
        type=whole(1),
        default=argparse.SUPPRESS,
        metavar="N",
        help="end when each device has completed so many (default: go on for ever)",
    )
    add_format(parser)


def _pair(text: str) -> tuple[str, str]:
    left, is_pair, right = text.partition("=")
    if not (left and is_pair and right):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form LEFT=RIGHT")
    return left, right


def _import(text: str) -> tuple[str, Path]:
    collection, path = _pair(text)
    return collection, Path(path)


def _add_device_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--devices", type=whole(1), default=1, metavar="N", help="in this process")
    group.add_argument(
        "--assume",
        default="",
        metavar="LIST",
        help=f"conditions that you answer for, of {','.join(CONDITIONS)}",
    )
    group.add_argument("--labels", default="", metavar="LIST", help="to declare to the server")
    group.add_argument(
        "--participation-floor",
        type=float,
        default=3600.0,
        metavar="S",
        help=f"least seconds between two participations in a task; {_NO_FLOOR}",
    )
    group.add_argument(
        "--pause", type=float, default=60.0, metavar="S", help="seconds after a participation"
    )
    group.add_argument(
        "--max-parallel",
        type=whole(1),
        default=argparse.SUPPRESS,
        metavar="N",
        help="trainings at a time (default: one per core)",
    )
    group.add_argument(
        "--memory", type=whole(1), default=1024, metavar="MB", help="that one training may take"
    )
    group.add_argument(
        "--max-training", type=positive, default=600.0, metavar="S", help="that one may last"
    )
    group.add_argument(
        "--trust",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="your policy on TSAs, for tasks with secure aggregation",
    )
    group.add_argument(
        "--protocol-only",
        type=positive,
        default=argparse.SUPPRESS,
        metavar="S",
        help="train nothing: wait S seconds on average, upload numbers that name the session "
        "(for load tests)",
    )


def _add_data_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--store",
        type=Path,
        default=Path("device.db"),
        metavar="PATH",
        help="examples and history: a file, or a folder with one file for each device",
    )
    group.add_argument(
        "--policies",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="collections with their use and retention, as TOML; kept in the store",
    )
    group.add_argument(
        "--import",
        dest="imports",
        type=_import,
        action="append",
        default=[],
        metavar="COLLECTION=PATH",
        help="add the examples of a file, or of a folder: then file i goes to device i",
    )


def _add_network_options(group: argparse._ArgumentGroup) -> None:
    for option, metavar, words in (
        ("--ca", "FILE", "certificates of the authority to trust (default: the system's)"),
        ("--proxy", "URL", "HTTP proxy to go through"),
        ("--blobs-url", "URL", "CDN to download parameters from (default: the selectors)"),
    ):
        kind = Path if metavar == "FILE" else str
        group.add_argument(
            option, type=kind, default=argparse.SUPPRESS, metavar=metavar, help=words
        )
    group.add_argument(
        "--token-file",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="the token to show; once for all devices, or once for each",
    )


def run(options: argparse.Namespace) -> int:
    try:
        import aiohttp  # noqa: F401 - before anything is opened
    except ImportError as error:
        raise OperatorError(
            "devices need aiohttp, which is not installed", hint="pip install 'papaya-fl[device]'"
        ) from error
    from papaya.cli.client.output import Printer

    printer = Printer(options.format)
    try:
        asyncio.run(_run(options, printer))
    except KeyboardInterrupt:  # while it starts or ends: then nobody handles signals
        printer.summarize()
        raise
    printer.summarize()
    return 0


async def _run(options: argparse.Namespace, printer: Printer) -> None:
    from papaya.cli.client.setup import (
        device_stores,
        device_tokens,
        import_examples,
        listed,
        policies_in,
        trainer_for,
        trust_in,
    )
    from papaya.device.device import Device
    from papaya.device.limits import CheckInPacing, DeviceLimits
    from papaya.device.memory import memory_mb
    from papaya.device.process import DeviceProcess
    from papaya.device.runtime import DeviceRuntime

    clock = device_clock()
    is_waiting = hasattr(options, "protocol_only")  # which takes no core
    stores = device_stores(options.store, options.devices)
    tokens = device_tokens(options.token_file, options.devices)
    policies = policies_in(getattr(options, "policies", None))
    shared = DeviceProcess(
        now=clock.now,
        limits=DeviceLimits(max_training_s=options.max_training),
        pacing=CheckInPacing(pause_s=options.pause),
        assume=listed(options.assume),
        max_parallel=options.devices if is_waiting else getattr(options, "max_parallel", None),
        blobs_url=getattr(options, "blobs_url", None),
        certificates=getattr(options, "ca", None),
        proxy=getattr(options, "proxy", None),
        trust=trust_in(
            getattr(options, "trust", None), options.store, clock.now, getattr(options, "ca", None)
        ),
        notify=printer.on_event,
    )
    async with shared as process, trainer_for(options, clock) as (trainer, tasks):
        with ExitStack() as opened:
            make = partial(
                Device,
                process,
                selectors=listed(options.server),
                trainer=trainer,
                policies=policies,
                memory_mb=memory_mb(),
                labels=listed(options.labels),
                config=DeviceConfig(participation_floor_s=options.participation_floor),
                notify=printer.on_event,
            )
            devices = [
                opened.enter_context(make(store=store, token=token, name=f"device-{number}"))
                for number, (store, token) in enumerate(zip(stores, tokens, strict=True), 1)
            ]
            files = getattr(options, "task", [])
            await import_examples(options.imports, devices, files, trainer, tasks, clock.now())
            note(f"{plural(len(devices), 'device')} for {', '.join(tasks) or 'any task'}")
            runtime = DeviceRuntime(process, devices)
            with runtime.stopped_by_signals():
                await runtime.run(getattr(options, "visits", None))
