"""`papaya token`: make or revoke the token of one device, or list the secrets of a data folder.

`make` writes the token to stdout and nowhere else. `show` prints tokens only with --reveal, and
never prints the key that signs tokens. `revoke` and `revoked` call the admin API of a server.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from papaya.cli.admin_client import (
    AdminClient,
    ConnectionOptions,
    add_connection,
    add_reason,
    client_for,
)
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
    whole,
)
from papaya.credentials.token_files import SecretName, read, read_or_make
from papaya.errors import OperatorError
from papaya.server.admin.views import Revocation, Revoke, SystemStatus
from papaya.server.auth import SignedTokens, check_device_id

_DEFAULT_DATA = Path("papaya-data")
_REVOCATIONS = "/admin/revocations"
_PURPOSES: dict[SecretName, str] = {
    "admin.token": "gives access to the admin API",
    "server.token": "authenticates servers to each other",
    "device.token": 'authenticates devices, if device_tokens = "shared"',
    "device.key": 'signs device tokens, if device_tokens = "signed"',
}
_NEVER_SHOWN: tuple[SecretName, ...] = ("device.key",)


@dataclass(frozen=True, kw_only=True)
class TokenMakeOptions(FormatOptions):
    device: str
    count: int | None = None
    days: float = 365.0
    data: Path = _DEFAULT_DATA


@dataclass(frozen=True, kw_only=True)
class TokenShowOptions(FormatOptions):
    reveal: bool = False
    data: Path = _DEFAULT_DATA


@dataclass(frozen=True, kw_only=True)
class TokenRevokeOptions(ConnectionOptions):
    device: str
    undo: bool = False
    why: str = ""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "token",
        description="Create or revoke the token of a device, or list the token files in a data "
        "folder.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    make = actions.add_parser(
        "make",
        help="create a token for one device or for many",
        description="Create a token for one device and print it. With --count, create tokens for "
        "the devices ID-1, ID-2, ... and print each device with its token, separated by a tab. "
        'Servers accept them if their configuration has device_tokens = "signed" and the device '
        "is not revoked. To replace the token of a revoked device, use a new ID.",
    )
    make.add_argument(
        "--device", required=True, metavar="ID", help="name of the device: letters, digits, _ and -"
    )
    make.add_argument("--count", type=whole(1), metavar="N", help="create tokens for N devices")
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
    _add_revocations(actions)


def _add_revocations(actions: Commands) -> None:
    revoke = actions.add_parser(
        "revoke",
        help="exclude a device before its token expires",
        description="Exclude a device, whatever token it shows. Within a heartbeat the servers "
        "refuse its check-ins and end its session; the device learns of it at its next request. "
        'This needs tokens that identify devices: device_tokens = "signed" or a verifier of your '
        "own.",
    )
    revoke.add_argument("device", metavar="DEVICE", help="name of the device, as in its token")
    revoke.add_argument("--undo", action="store_true", help="let the device take part again")
    add_reason(revoke)
    revoked = actions.add_parser(
        "revoked", help="list the revoked devices", description="List the revoked devices."
    )
    for action in (revoke, revoked):
        add_connection(action)
    bind(revoke, TokenRevokeOptions, run_revoke)
    bind(revoked, ConnectionOptions, run_revoked)


def run_make(options: TokenMakeOptions) -> int:
    signed = SignedTokens(read_or_make(_folder(options.data), "device.key"))
    numbers = [""] if options.count is None else [f"-{n + 1}" for n in range(options.count)]
    made = {
        device: signed.make(device, options.days).reveal()
        for device in (f"{options.device}{number}" for number in numbers)
    }
    entries = [{"device": d, "days": options.days, "token": token} for d, token in made.items()]
    if options.is_json:
        print_json(entries[0] if options.count is None else entries)
    elif options.count is None:
        print_data(made[options.device])
    else:
        print_data("\n".join(f"{device}\t{token}" for device, token in made.items()))
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


def run_revoke(options: TokenRevokeOptions) -> int:
    client = client_for(options)
    status = client.get("/admin/status", SystemStatus)
    if options.undo:
        _require_revoked(client, options.device)
    else:
        signs = status.signs_device_tokens
        check_device_id(options.device, "papaya token revoke", is_signed=signs)
    change = Revoke(options.device, revoked=not options.undo, why=options.why)
    found = client.post(_REVOCATIONS, change, tuple[Revocation, ...])
    _print_revoked(options, found)
    if not status.identifies_devices:
        note(
            "warning: this has no effect: the servers' tokens do not identify devices. Set "
            'device_tokens = "signed" in their configuration, and give each device its own token: '
            "papaya token make --device ID"
        )
        return 0
    now = "may take part again" if options.undo else "is revoked"
    note(f"{options.device} {now}; all servers learn of it within a heartbeat")
    if any(each.device == options.device and each.is_seen is False for each in found):
        note(
            f"warning: no device {options.device!r} has checked in at this server since it "
            "started; check the name: it is the one in the device's token"
        )
    return 0


def _require_revoked(client: AdminClient, device: str) -> None:
    """Any id in the list can be undone: earlier versions accepted tokens and other wrong ids."""
    if any(each.device == device for each in client.get(_REVOCATIONS, tuple[Revocation, ...])):
        return
    check_device_id(device, "papaya token revoke --undo", is_signed=False)
    raise OperatorError(
        f"{device} is not revoked", hint="list the revoked devices: papaya token revoked"
    )


def run_revoked(options: ConnectionOptions) -> int:
    _print_revoked(options, client_for(options).get(_REVOCATIONS, tuple[Revocation, ...]))
    return 0


def _print_revoked(options: ConnectionOptions, found: tuple[Revocation, ...]) -> None:
    if options.is_json:
        print_json(found)
    else:
        rows = [(each.device, f"{datetime.fromtimestamp(each.at, UTC):%F %T}") for each in found]
        print_data(table(("device", "revoked (UTC)"), rows))


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
