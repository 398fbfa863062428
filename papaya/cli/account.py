"""`papaya account`: accounts of the admin API, with roles and quotas; for operators."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import get_args
from urllib.parse import quote

from papaya.cli.admin_client import ConnectionOptions, add_connection, add_reason, client_for
from papaya.cli.output import (
    Commands,
    bind,
    note,
    positive,
    print_data,
    print_json,
    table,
    whole,
)
from papaya.errors import OperatorError
from papaya.messages.storage import AccountRole
from papaya.server.admin.views import (
    AccountView,
    AddedAccount,
    NewAccount,
    QuotaLimits,
    RevokeAccount,
    SetQuota,
)

_ACCOUNTS = "/admin/accounts"


@dataclass(frozen=True, kw_only=True)
class QuotaOptions(ConnectionOptions):
    name: str
    tasks: int | None = None
    concurrency: int | None = None
    model_length: int | None = None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class AccountAddOptions(QuotaOptions):
    role: AccountRole
    prefix: tuple[str, ...] = ()
    days: float | None = None


@dataclass(frozen=True, kw_only=True)
class AccountRevokeOptions(ConnectionOptions):
    name: str
    undo: bool = False
    why: str = ""


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "account",
        description="Create accounts of the admin API, with roles and quotas, and revoke them. "
        "Only operators may do this; whoever has the token in admin.token is one.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    _add_add(actions)
    listed = actions.add_parser(
        "list",
        help="list all accounts with their quotas",
        description="List all accounts, with what their tasks use and may use.",
    )
    add_connection(listed)
    bind(listed, ConnectionOptions, run_list)
    quota = actions.add_parser(
        "quota",
        help="replace the quota of an account",
        description="Replace the quota of an account. A limit that is not given is removed. Tasks "
        "that exceed the new quota keep running.",
    )
    quota.add_argument("name", metavar="NAME", help="name of the account")
    _add_limits(quota)
    add_reason(quota)
    add_connection(quota)
    bind(quota, QuotaOptions, run_quota)
    revoke = actions.add_parser(
        "revoke",
        help="refuse the token of an account from now on",
        description="Refuse the token of an account from now on, at every server. Its tasks stay.",
    )
    revoke.add_argument("name", metavar="NAME", help="name of the account")
    revoke.add_argument(
        "--undo",
        action="store_true",
        help="accept it again; only for accounts of an identity provider (oidc:…)",
    )
    add_reason(revoke)
    add_connection(revoke)
    bind(revoke, AccountRevokeOptions, run_revoke)


def _add_add(actions: Commands) -> None:
    add = actions.add_parser(
        "add",
        help="create an account and print its token",
        description="Create an account and print its token, once: the server keeps only its hash.",
    )
    add.add_argument("name", metavar="NAME", help="name of the account: a-z, 0-9, - and _")
    add.add_argument(
        "--role",
        required=True,
        choices=get_args(AccountRole),
        help="viewer: read; owner: also submit and change tasks under its prefixes; operator: "
        "everything",
    )
    add.add_argument(
        "--prefix",
        action="append",
        metavar="TEXT",
        help="beginning of the names of an owner's tasks, for example vision-; may be repeated",
    )
    add.add_argument("--days", type=positive, metavar="N", help="days until the token expires")
    _add_limits(add)
    add_reason(add)
    add_connection(add)
    bind(add, AccountAddOptions, run_add)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tasks", type=whole(0), metavar="N", help="maximum number of tasks at the same time"
    )
    parser.add_argument(
        "--concurrency",
        type=whole(0),
        metavar="N",
        help="maximum total concurrency of its tasks",
    )
    parser.add_argument(
        "--model-length",
        type=whole(0),
        metavar="N",
        help="maximum number of parameters of each model",
    )


def run_add(options: AccountAddOptions) -> int:
    for prefix in options.prefix:
        if "/" in prefix:
            raise OperatorError(
                f"prefix {prefix!r}: task names cannot contain /",
                hint=f"use {prefix.rstrip('/').replace('/', '-')}-",
            )
    limits = QuotaLimits(options.tasks, options.concurrency, options.model_length)
    new = NewAccount(
        options.name, options.role, tuple(options.prefix), options.days, limits, options.why
    )
    client = client_for(options)
    added = client.post(_ACCOUNTS, new, AddedAccount)
    if options.is_json:
        print_json(added)
    else:
        print_data(added.token)
    note(f"give this token to {options.name}, who uses it with: papaya login {client.url}")
    return 0


def run_list(options: ConnectionOptions) -> int:
    _print_accounts(options, client_for(options).get(_ACCOUNTS, tuple[AccountView, ...]))
    return 0


def run_quota(options: QuotaOptions) -> int:
    change = SetQuota(options.tasks, options.concurrency, options.model_length, options.why)
    path = f"{_ACCOUNTS}/{quote(options.name, safe='')}/quota"
    found = client_for(options).post(path, change, tuple[AccountView, ...])
    _print_accounts(options, found)
    return 0


def run_revoke(options: AccountRevokeOptions) -> int:
    change = RevokeAccount(not options.undo, options.why)
    path = f"{_ACCOUNTS}/{quote(options.name, safe='')}/revoke"
    found = client_for(options).post(path, change, tuple[AccountView, ...])
    _print_accounts(options, found)
    note(f"{options.name} is {'accepted again' if options.undo else 'refused from now on'}")
    return 0


def _print_accounts(options: ConnectionOptions, found: tuple[AccountView, ...]) -> None:
    if options.is_json:
        print_json(found)
        return
    header = ("account", "role", "prefixes", "tasks", "concurrency", "parameters", "state")
    print_data(table(header, [_line(account) for account in found]))


def _line(account: AccountView) -> tuple[str, ...]:
    quota = account.quota
    state = "valid"
    if account.expires:
        state = f"until {datetime.fromtimestamp(account.expires, UTC):%F}"
    if account.revoked:
        state = f"revoked {datetime.fromtimestamp(account.revoked, UTC):%F}"
    return (
        account.name,
        account.role,
        " ".join(account.prefixes) or "-",
        _used(account.tasks, quota.tasks),
        _used(account.concurrency, quota.concurrency),
        "-" if quota.model_length is None else f"{quota.model_length:,}",
        state,
    )


def _used(count: int, limit: int | None) -> str:
    return f"{count:,}" if limit is None else f"{count:,} of {limit:,}"
