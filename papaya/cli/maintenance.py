"""`papaya maintenance`: stop all training of a cluster, and resume it.

    begin   assign no more clients; those that train may finish
    stop    stop all training now: also take every task from its aggregator
    end     resume training

`papaya status` says that training is stopped, since when and why.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial

from papaya.cli.admin_client import ConnectionOptions, add_connection, add_reason, client_for
from papaya.cli.output import Commands, bind, positive, print_data, print_json
from papaya.cli.status import about_maintenance
from papaya.server.admin.views import BeginMaintenance, ChangeReason, SystemStatus

_PATH = "/admin/maintenance"


@dataclass(frozen=True, kw_only=True)
class MaintenanceOptions(ConnectionOptions):
    minutes: float | None = None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class MaintenanceEndOptions(ConnectionOptions):
    why: str = ""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "maintenance",
        description="Stop all training of a running system, and resume it. No acknowledged update "
        "is lost.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, words, is_stopped in (
        ("begin", "assign no more clients, and let those that train finish", False),
        (
            "stop",
            "stop all training now; updates that are under way can be counted only after `end`",
            True,
        ),
    ):
        action = _add(actions, name, words)
        action.add_argument(
            "--minutes",
            type=positive,
            metavar="M",
            help="expected duration: devices are told to come back after it (default: unknown)",
        )
        _add_rest(action)
        bind(action, MaintenanceOptions, partial(run_begin, is_stopped))
    end = _add(actions, "end", "resume training")
    _add_rest(end)
    bind(end, MaintenanceEndOptions, run_end)


def _add(actions: Commands, name: str, words: str) -> argparse.ArgumentParser:
    description = f"{words[0].upper()}{words[1:]}."
    parser: argparse.ArgumentParser = actions.add_parser(name, help=words, description=description)
    return parser


def _add_rest(parser: argparse.ArgumentParser) -> None:
    add_reason(parser)
    add_connection(parser)


def run_begin(is_stopped: bool, options: MaintenanceOptions) -> int:
    for_s = None if options.minutes is None else 60 * options.minutes
    request = BeginMaintenance(is_stopped, for_s, options.why)
    return _tell(options, client_for(options).post(_PATH, request, SystemStatus))


def run_end(options: MaintenanceEndOptions) -> int:
    path = f"{_PATH}/end"
    return _tell(options, client_for(options).post(path, ChangeReason(options.why), SystemStatus))


def _tell(options: ConnectionOptions, status: SystemStatus) -> int:
    if options.is_json:
        print_json(status.maintenance)
    else:
        print_data(about_maintenance(status) or "training resumes")
    return 0
