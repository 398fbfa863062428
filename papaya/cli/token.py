"""`papaya token`: make a token for one device, or see where the secrets of a data folder are.

A token that is made goes to stdout and nowhere else. `show` prints no secret unless it is told to,
and the key that signs tokens never.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from papaya.cli.output import (
    Commands,
    add_format,
    note,
    positive,
    print_data,
    print_json,
    table,
)
from papaya.credentials.token_files import SecretName, read, read_or_make
from papaya.errors import OperatorError
from papaya.server.auth import SignedTokens

_DEFAULT_DATA = Path("papaya-data")
_PURPOSES: dict[SecretName, str] = {
    "admin.token": "opens the admin API",
    "server.token": "servers show it to each other",
    "device.token": 'devices show it, with device_tokens = "shared"',
    "device.key": 'signs tokens of devices, with device_tokens = "signed"',
}
_NEVER_SHOWN: tuple[SecretName, ...] = ("device.key",)


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "token",
        description="Tokens of devices, servers and the admin API.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    make = actions.add_parser(
        "make",
        help="make a token for one device",
        description='Make a token for one device, for a server with device_tokens = "signed".',
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    make.set_defaults(run=run_make)
    make.add_argument("--device", required=True, metavar="ID", help="letters, digits, _ and -")
    make.add_argument("--days", type=positive, default=365.0, metavar="N", help="until it expires")
    show = actions.add_parser(
        "show",
        help="see where tokens are kept",
        description="See where the tokens of a data folder are, and which of them exist.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    show.set_defaults(run=run_show)
    show.add_argument("--reveal", action="store_true", help="print the tokens themselves")
    for action in (make, show):
        action.add_argument(
            "--data", type=Path, default=_DEFAULT_DATA, metavar="DIR", help="the server's folder"
        )
        add_format(action)


def run_make(options: argparse.Namespace) -> int:
    folder = _folder(options.data)
    token = SignedTokens(read_or_make(folder, "device.key")).make(options.device, options.days)
    if options.format == "json":
        print_json({"device": options.device, "days": options.days, "token": token.reveal()})
    else:
        print_data(token.reveal())
    note('the server takes it when its configuration says device_tokens = "signed"')
    return 0


def run_show(options: argparse.Namespace) -> int:
    folder = _folder(options.data)
    found: list[dict[str, str | bool]] = []
    for name, purpose in _PURPOSES.items():
        path = folder / name
        entry: dict[str, str | bool] = {
            "file": str(path),
            "purpose": purpose,
            "exists": path.exists(),
        }
        if options.reveal and entry["exists"] and name not in _NEVER_SHOWN:
            entry["token"] = read(path).reveal()
        found.append(entry)
    if options.format == "json":
        print_json(found)
    else:
        print_data(_listed(found))
    return 0


def _listed(found: list[dict[str, str | bool]]) -> str:
    rows = []
    for entry in found:
        state = entry.get("token", "exists" if entry["exists"] else "not made yet")
        rows.append((str(entry["file"]), str(entry["purpose"]), str(state)))
    return table(("file", "what it does", ""), rows)


def _folder(data: Path) -> Path:
    """A key made in a folder that no server uses would sign tokens that no server takes."""
    if not data.is_dir():
        raise OperatorError(
            f"there is no data folder {data}",
            hint="start `papaya serve` first, or name its folder with --data DIR",
        )
    return data
