"""Accounts of the admin API: named tokens with a role, and quotas of their tasks.

An account is a row with the hash of its token. The row is read at each request, so a revocation
holds at once, in every process. A token names its account, so one read is enough. The token in
`admin.token` is the operator `admin`, which has no row and no quota.

A submission requires the rows of its account and its quota as they were read together with all
tasks, and changes the quota's row. So neither two submissions at the same time, nor one during a
revocation, can exceed what the operator has allowed.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from typing import Final, Protocol

from msgspec import structs

from papaya.config import TaskConfig
from papaya.credentials.token_files import Secret
from papaya.errors import OperatorError
from papaya.messages.audit_trail import Attempt
from papaya.messages.base import TaskId
from papaya.messages.storage import (
    ACCOUNTS,
    QUOTAS,
    TASKS,
    AccountRow,
    Outcome,
    QuotaRow,
    Row,
    TaskRow,
    Transaction,
    account_key,
    quota_key,
)
from papaya.server.admin.access import Caller
from papaya.server.admin.problems import Conflict, Forbidden, NotFound
from papaya.server.admin.service import AdminService
from papaya.server.admin.views import (
    AccountView,
    AddedAccount,
    NewAccount,
    QuotaLimits,
    RevokeAccount,
    SetQuota,
)
from papaya.server.auth import bearer
from papaya.server.state_thread import AsyncState

ADMIN: Final = Caller("admin", "operator")
PROVIDED: Final = "oidc:"  # begins the names of accounts of an identity provider
_DAY_S = 86_400.0
_TOKEN = re.compile(r"papaya-account\.([a-z0-9][a-z0-9_-]{0,31})\.[A-Za-z0-9_-]{43}")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_PROVIDED_NAME = re.compile(r"oidc:[\x21-\x7e]{1,128}")
_ATTEMPTS = 20


class Provider(Protocol):
    """Verifies tokens that somebody else has made."""

    async def verify(self, authorization: str | None) -> Caller | None: ...


class Identities:
    """Whose token it is. Nothing is remembered between requests."""

    def __init__(
        self,
        state: AsyncState,
        admin: Secret,
        now: Callable[[], float],
        provider: Provider | None = None,
    ) -> None:
        self._state = state
        self._admin = admin
        self._now = now
        self._provider = provider

    def at_once(self, authorization: str | None) -> Caller | None:
        token = bearer(authorization)
        return ADMIN if token is not None and self._admin.matches(token) else None

    async def identify(self, authorization: str | None) -> Caller | None:
        if (caller := self.at_once(authorization)) is not None:
            return caller
        token = bearer(authorization)
        if token is not None and (found := _TOKEN.fullmatch(token)) is not None:
            return await self._of_account(found[1], token)
        if self._provider is None:
            return None
        caller = await self._provider.verify(authorization)
        if caller is None or await self._row(caller.name) is not None:
            return None  # its row says that it was revoked
        return caller

    async def _of_account(self, name: str, token: str) -> Caller | None:
        row = await self._row(name)
        if row is None or not hmac.compare_digest(row.digest, _digest(token)):
            return None
        if row.revoked or (row.expires and self._now() >= row.expires):
            return None
        return Caller(name, row.role, row.prefixes)

    async def _row(self, name: str) -> AccountRow | None:
        row = (await self._state.read((account_key(name),))).get(account_key(name))
        return row if isinstance(row, AccountRow) else None


def _digest(token: str) -> bytes:
    """A plain hash is enough: the token has 256 random bits."""
    return sha256(token.encode()).digest()


# -- what an operator does with accounts ----------------------------------------------------------


async def add(service: AdminService, new: NewAccount, attempt: Attempt) -> AddedAccount:
    """Create an account. A name is used once: the tasks of a revoked account keep it."""
    for what, given in [("name of an account", new.name), *(("prefix", p) for p in new.prefixes)]:
        if _NAME.fullmatch(given) is None:
            raise OperatorError(
                f"invalid {what}: {given[:40]!r}",
                hint="use 1 to 32 characters of a-z, 0-9, _ and -, starting with a letter or digit",
            )
    if new.name == ADMIN.name:
        raise Conflict(f"{new.name} is the name of the token in admin.token", hint="use another")
    if new.role == "owner" and not new.prefixes:
        raise OperatorError(
            "an owner needs at least one prefix of the names of its tasks",
            hint="add one, for example --prefix vision-",
        )
    if new.role != "owner" and new.prefixes:
        raise OperatorError(
            f"role {new.role} cannot have prefixes: {', '.join(new.prefixes)}",
            hint="leave --prefix out, or use --role owner",
        )
    token = f"papaya-account.{new.name}.{secrets.token_urlsafe(32)}"
    now, key = service.now(), account_key(new.name)
    expires = 0.0 if new.days is None else now + new.days * _DAY_S
    row = AccountRow(new.role, _digest(token), now, new.prefixes, expires)
    quota = QuotaRow(new.quota.tasks, new.quota.concurrency, new.quota.model_length)
    rows: tuple[tuple[str, Row], ...] = ((key, row),)
    if quota != QuotaRow():
        rows = (*rows, (quota_key(new.name), quota))
    if key in await service.state.read((key,)):
        raise Conflict(
            f"there is or was an account {new.name}",
            hint="choose another name; to replace a lost token, revoke it and add a new account",
        )
    await service.write(Transaction(require=((key, None),), put=rows), attempt)
    return AddedAccount(_view(new.name, row, quota, ()), token)


async def listed(service: AdminService) -> tuple[AccountView, ...]:
    """All accounts, also revoked ones, and those of a provider that have a quota."""
    rows = await service.state.read((ACCOUNTS, QUOTAS, TASKS))
    names = {key.partition("/")[2] for key in rows if key.startswith((ACCOUNTS, QUOTAS))}
    found = []
    for name in sorted(names):
        row = rows.get(account_key(name))
        account = row if isinstance(row, AccountRow) else AccountRow("owner", b"", 0.0)
        found.append(_view(name, account, _quota(rows, name), _tasks_of(rows, name)))
    return tuple(found)


async def revoke(
    service: AdminService, name: str, asked: RevokeAccount, attempt: Attempt
) -> tuple[AccountView, ...]:
    """Refuse every further request of an account. Its tasks stay. Repeating it changes nothing."""
    key = account_key(name)
    row = (await service.state.read((key,))).get(key)
    if _PROVIDED_NAME.fullmatch(name) is not None:
        revoked = AccountRow("viewer", b"", service.now(), revoked=service.now())
        if asked.revoked and row is None:
            await service.write(Transaction(require=((key, None),), put=((key, revoked),)), attempt)
        elif row is not None and not asked.revoked:
            await service.write(Transaction(require=((key, row),), delete=(key,)), attempt)
        return await listed(service)
    if not isinstance(row, AccountRow):
        raise NotFound(f"there is no account {name[:64]!r}", hint="papaya account list")
    if not asked.revoked:
        raise Conflict(
            f"a revoked token stays revoked: {name}", hint="add a new account: papaya account add"
        )
    if not row.revoked:
        changed = structs.replace(row, revoked=service.now())
        await service.write(Transaction(require=((key, row),), put=((key, changed),)), attempt)
    return await listed(service)


async def set_quota(
    service: AdminService, name: str, limits: SetQuota, attempt: Attempt
) -> tuple[AccountView, ...]:
    """Replace the quota of an account. Tasks that exceed the new one go on."""
    rows = await service.state.read((account_key(name), quota_key(name)))
    account = rows.get(account_key(name))
    if account is None and _PROVIDED_NAME.fullmatch(name) is None:
        raise NotFound(f"there is no account {name[:64]!r}", hint="papaya account list")
    before = rows.get(quota_key(name))
    submissions = before.submissions if isinstance(before, QuotaRow) else 0
    quota = QuotaRow(limits.tasks, limits.concurrency, limits.model_length, submissions + 1)
    change = Transaction(require=((quota_key(name), before),), put=((quota_key(name), quota),))
    await service.write(change, attempt)
    return await listed(service)


async def whoami(state: AsyncState, caller: Caller) -> AccountView:
    name = caller.name
    rows = await state.read((account_key(name), quota_key(name), TASKS))
    row = rows.get(account_key(name))
    known = row if isinstance(row, AccountRow) else AccountRow(caller.role, b"", 0.0)
    account = structs.replace(known, role=caller.role, prefixes=caller.prefixes)
    return _view(name, account, _quota(rows, name), _tasks_of(rows, name))


def _view(
    name: str, row: AccountRow, quota: QuotaRow | None, tasks: Iterable[TaskRow]
) -> AccountView:
    found = list(tasks)
    limits = quota or QuotaRow()
    return AccountView(
        name=name,
        role=row.role,
        prefixes=row.prefixes,
        created=row.created,
        expires=row.expires,
        revoked=row.revoked,
        quota=QuotaLimits(limits.tasks, limits.concurrency, limits.model_length),
        tasks=_count(found),
        concurrency=sum(task.config.concurrency for task in found),
    )


# -- quotas ---------------------------------------------------------------------------------------


def _quota(rows: Mapping[str, Row], name: str) -> QuotaRow | None:
    row = rows.get(quota_key(name))
    return row if isinstance(row, QuotaRow) else None


def _tasks_of(rows: Mapping[str, Row], name: str) -> list[TaskRow]:
    """The tasks of an account that are not over, and evaluations of its tasks."""
    found = [row for row in rows.values() if isinstance(row, TaskRow)]
    own = {row.config.task for row in found if row.account == name}
    return [row for row in found if not row.is_over and _trained(row.config) in own]


def _trained(config: TaskConfig) -> TaskId:
    """The task itself, or the task that it evaluates."""
    return config.task if config.evaluates is None else config.evaluates.task


async def write_within_quota(
    service: AdminService,
    caller: Caller,
    config: TaskConfig,
    change: Transaction,
    attempt: Attempt,
    replaces: tuple[TaskId, ...] = (),
) -> None:
    """Commit the change that gives a task this configuration, or raise what it would exceed.

    `replaces`: tasks that the change ends or gives a new configuration.
    """
    outcome = await transact_within_quota(service, caller, config, change, attempt, replaces)
    service.settle(outcome)


async def transact_within_quota(
    service: AdminService,
    caller: Caller,
    config: TaskConfig,
    change: Transaction,
    attempt: Attempt,
    replaces: tuple[TaskId, ...] = (),
) -> Outcome:
    if caller.role == "operator":
        return await service.trail.transact(attempt, change)
    keys = (account_key(caller.name), quota_key(caller.name))
    before = None
    for _ in range(_ATTEMPTS):
        rows = await service.state.read((*keys, TASKS))
        guard = {key: rows.get(key) for key in keys}
        if guard == before:
            break  # somebody else has changed the task: repeating it is no use
        before = guard
        charge = charged(rows, caller, config, change, replaces)
        outcome = await service.trail.transact(attempt, charge)
        if outcome != "refused":
            return outcome
    return "refused"


def charged(
    rows: Mapping[str, Row],
    caller: Caller,
    config: TaskConfig,
    change: Transaction,
    replaces: tuple[TaskId, ...] = (),
) -> Transaction:
    """The change, if these rows allow it, on the condition that nobody else uses them up first."""
    name = caller.name
    account, quota = rows.get(account_key(name)), _quota(rows, name)
    if isinstance(account, AccountRow) and account.revoked:
        raise Forbidden(f"account {name} was revoked", hint="ask an operator for another one")
    if quota is not None:
        others = [row for row in _tasks_of(rows, name) if _trained(row.config) not in replaces]
        _check(name, quota, others, config)
    require = (*change.require, (account_key(name), account), (quota_key(name), quota))
    put = change.put
    if quota is not None:
        counted = structs.replace(quota, submissions=quota.submissions + 1)
        put = (*put, (quota_key(name), counted))
    return Transaction(require, put, change.delete)


def _count(rows: list[TaskRow]) -> int:
    """Tasks, without their evaluations."""
    return sum(row.config.evaluates is None for row in rows)


def _check(name: str, quota: QuotaRow, others: list[TaskRow], config: TaskConfig) -> None:
    concurrency = config.concurrency + sum(row.config.concurrency for row in others)
    hint = "lower the concurrency of your tasks, or wait for evaluations to end"
    limits = [("concurrency", concurrency, quota.concurrency, hint)]
    if config.evaluates is None:
        tasks = _count(others) + 1
        limits += [
            ("tasks", tasks, quota.tasks, "cancel one first: papaya task list"),
            ("model_length", config.model_length, quota.model_length, "train a smaller model"),
        ]
    for what, asked, limit, hint in limits:
        if limit is not None and asked > limit:
            raise Conflict(
                f"{what} = {asked:,} would exceed the quota of {name}, {limit:,}",
                hint=f"{hint}; or ask an operator: papaya account quota {name} --help",
            )
