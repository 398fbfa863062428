"""`papaya whoami`: the account that a server sees."""

from __future__ import annotations

from papaya.cli.admin_client import ConnectionOptions, add_connection, client_for
from papaya.cli.output import Commands, bind, note, print_data, print_json
from papaya.server.admin.views import AccountView

_MAY = {
    "viewer": "read",
    "owner": "read; submit and change tasks under",
    "operator": "everything",
}


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "whoami", description="Show your account: its role, its tasks and its quota."
    )
    add_connection(parser)
    bind(parser, ConnectionOptions, run)


def run(options: ConnectionOptions) -> int:
    client = client_for(options)
    account = client.get("/admin/whoami", AccountView)
    if options.is_json:
        print_json(account)
    else:
        print_data(described(account))
        note(f"at {client.url}")
    return 0


def described(account: AccountView) -> str:
    prefixes = ", ".join(f"{prefix}…" for prefix in account.prefixes)
    lines = [
        f"account      {account.name}",
        f"role         {account.role}: {_MAY[account.role]} {prefixes}".rstrip(),
    ]
    if account.role == "owner":
        quota = account.quota
        lines += [
            f"tasks        {account.tasks:,}{_of(quota.tasks)}",
            f"concurrency  {account.concurrency:,}{_of(quota.concurrency)}",
        ]
        if quota.model_length is not None:
            lines.append(f"parameters   at most {quota.model_length:,} per model")
    return "\n".join(lines)


def _of(limit: int | None) -> str:
    return "" if limit is None else f" of {limit:,}"
