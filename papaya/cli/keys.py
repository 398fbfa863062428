"""`papaya keys rotate`: replace a key after a leak, without a restart.

    tickets   all keys of tickets, at a running server; the change is in the audit trail
    admin     the operator's token, in the data folder of the servers
    servers   the token that servers use among themselves, in the data folder of the servers

Servers read their token files again within ten seconds and refuse the old token from then on. Other
keys are replaced in other ways: docs/operations.md lists them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from papaya.cli.admin_client import ConnectionOptions, add_connection, add_reason, client_for
from papaya.cli.output import Commands, bind, note, print_data, print_json
from papaya.credentials.token_files import SecretName, replace
from papaya.server.admin.views import RotateTicketKeys, SystemStatus

_FILES: Final[dict[str, SecretName]] = {"admin": "admin.token", "servers": "server.token"}
_DATA = Path("papaya-data")


@dataclass(frozen=True, kw_only=True)
class KeysRotateOptions(ConnectionOptions):
    key: Literal["tickets", "admin", "servers"]
    data: Path = _DATA
    why: str = ""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "keys", description="Replace a key after a leak, without a restart."
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    rotate = actions.add_parser(
        "rotate",
        help="replace a key now",
        description="Replace a key now. `tickets`: all tickets under the old keys are refused "
        "within a heartbeat; clients that have joined may finish at the aggregator that knows "
        "them. `admin`, `servers`: a new token in the data folder, which the servers of this "
        "folder use within ten seconds; copy the file to the folders of other machines.",
    )
    rotate.add_argument("key", choices=("tickets", *_FILES), help="key to replace")
    rotate.add_argument(
        "--data", type=Path, metavar="DIR", help="with admin and servers: data folder of the server"
    )
    add_reason(rotate)
    add_connection(rotate)
    bind(rotate, KeysRotateOptions, run_rotate)


def run_rotate(options: KeysRotateOptions) -> int:
    if options.key == "tickets":
        request = RotateTicketKeys(options.why)
        client_for(options).post("/admin/keys/rotate", request, SystemStatus)
        told = "all ticket keys are replaced; servers refuse the old ones within a heartbeat"
    else:
        path = replace(options.data, _FILES[options.key])
        told = f"{path} has a new token; servers of this folder use it within ten seconds"
        note("copy the file to the data folders of other machines")
    if options.is_json:
        print_json({"key": options.key})
    else:
        print_data(told)
    return 0
