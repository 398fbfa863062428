"""`papaya token`: make a token for one device, or list the secrets of a data folder.

`make` writes the token to stdout and nowhere else. `show` prints tokens only with --reveal, and
never prints the key that signs tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from papaya.cli.output import (
    Commands,
    FormatOptions,
    add_format,
    bind,
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
    "server.token": "authenticates servers to each other",
    "device.token": 'authenticates devices, if device_tokens = "shared"',
    "device.key": 'signs device tokens, if device_tokens = "signed"',
}
_NEVER_SHOWN: tuple[SecretName, ...] = ("device.key",)


@dataclass(frozen=True, kw_only=True)
class TokenMakeOptions(FormatOptions):
    device: str
    days: float = 365.0
    data: Path = _DEFAULT_DATA


@dataclass(frozen=True, kw_only=True)
class TokenShowOptions(FormatOptions):
    reveal: bool = False
    data: Path = _DEFAULT_DATA


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "token",
        description="Create a token for a device, or list the token files in a data folder.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    make = actions.add_parser(
        "make",
        help="create a token for one device",
        description="Create a token for one device and print it. Servers accept it if their "
        'configuration has device_tokens = "signed".',
    )
    make.add_argument(
        "--device", required=True, metavar="ID", help="name of the device: letters, digits, _ and -"
    )
    make.add_argument("--days", type=positive, metavar="N", help="days until the token expires")
    show = actions.add_parser(
        "show",
        help="list the token files",
        description="List the token files in a data folder and show which of them exist.",
    )
    show.add_argument("--reveal", action="store_true", help="also print the tokens")
    for action in (make, show):
        action.add_argument("--data", type=Path, metavar="DIR", help="data folder of the server")
        add_format(action)
    bind(make, TokenMakeOptions, run_make)
    bind(show, TokenShowOptions, run_show)


def run_make(options: TokenMakeOptions) -> int:
    folder = _folder(options.data)
    token = SignedTokens(read_or_make(folder, "device.key")).make(options.device, options.days)
    if options.is_json:
        print_json({"device": options.device, "days": options.days, "token": token.reveal()})
    else:
        print_data(token.reveal())
    note('servers accept this token if their configuration has device_tokens = "signed"')
    return 0


def run_show(options: TokenShowOptions) -> int:
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
    if options.is_json:
        print_json(found)
    else:
        print_data(_listed(found))
    return 0


def _listed(found: list[dict[str, str | bool]]) -> str:
    rows = []
    for entry in found:
        state = entry.get("token", "exists" if entry["exists"] else "not created yet")
        rows.append((str(entry["file"]), str(entry["purpose"]), str(state)))
    return table(("file", "what it does", ""), rows)


def _folder(data: Path) -> Path:
    """Refuse a folder that does not exist: no server would accept a token signed with a new key."""
    if not data.is_dir():
        raise OperatorError(
            f"there is no data folder {data}",
            hint="start `papaya serve` first, or pass its data folder with --data DIR",
        )
    return data
