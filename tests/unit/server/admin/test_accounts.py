"""Accounts: tokens, revocation, quotas; and submissions that race for a quota."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from threading import Barrier, Thread

import pytest
from msgspec import structs

from papaya.credentials.token_files import Secret
from papaya.errors import OperatorError
from papaya.messages.owner import end_evaluation
from papaya.messages.storage import (
    AccountRow,
    Outcome,
    QuotaRow,
    TaskRow,
    Transaction,
    account_key,
    quota_key,
)
from papaya.server.admin import accounts
from papaya.server.admin.access import Caller
from papaya.server.admin.accounts import ADMIN, Identities
from papaya.server.admin.problems import Conflict, Forbidden, NotFound
from papaya.server.admin.views import Evaluate, NewAccount, QuotaLimits, RevokeAccount, SetQuota
from tests.unit.server.admin.builders import BY, TASK, System, a_system

VISION = NewAccount("anna", "owner", ("vision-",), quota=QuotaLimits(2, 50, 6))
ANNA = Caller("anna", "owner", ("vision-",))


def run(folder: Path, test: Callable[[System], Awaitable[None]]) -> None:
    async def in_a_system() -> None:
        async with a_system(folder) as system:
            await test(system)

    asyncio.run(in_a_system())


def identities(system: System) -> Identities:
    return Identities(system.state, Secret("0123456789abcdef"), system.now)


def test_a_token_identifies_its_account_until_it_is_revoked(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        added = await accounts.add(system.service, VISION, BY)
        header = f"Bearer {added.token}"
        assert await identities(system).identify(header) == ANNA
        assert await identities(system).identify(header[:-1] + "!") is None
        # Another process on the same store, with nothing in its memory.
        other = identities(system)
        assert await other.identify(header) == ANNA
        await accounts.revoke(system.service, "anna", RevokeAccount(), BY)
        assert await other.identify(header) is None
        with pytest.raises(Conflict, match="stays revoked"):
            await accounts.revoke(system.service, "anna", RevokeAccount(revoked=False), BY)

    run(tmp_path, test)


def test_the_token_is_not_in_the_state_store(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        token = (await accounts.add(system.service, VISION, BY)).token
        row = system.store.read((account_key("anna"),))[account_key("anna")]
        assert isinstance(row, AccountRow)
        assert len(row.digest) == 32
        secret = token.rpartition(".")[2].encode()
        system.store.close()
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert files
        assert not any(secret in path.read_bytes() for path in files)

    run(tmp_path, test)


def test_a_token_expires(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        added = await accounts.add(system.service, NewAccount("bob", "viewer", days=1.0), BY)
        assert await identities(system).identify(f"Bearer {added.token}") is not None
        system.time += 86_401
        assert await identities(system).identify(f"Bearer {added.token}") is None

    run(tmp_path, test)


def test_the_admin_token_is_known_at_once(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        assert identities(system).at_once("Bearer 0123456789abcdef") == ADMIN
        assert identities(system).at_once("Bearer 0123456789abcdeg") is None
        assert identities(system).at_once(None) is None

    run(tmp_path, test)


def test_accounts_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        service = system.service
        with pytest.raises(OperatorError, match="an owner needs at least one prefix"):
            await accounts.add(service, NewAccount("x", "owner"), BY)
        with pytest.raises(OperatorError, match="role viewer cannot have prefixes: vision-"):
            await accounts.add(service, NewAccount("x", "viewer", ("vision-",)), BY)
        with pytest.raises(Conflict, match=r"admin\.token"):
            await accounts.add(service, NewAccount("admin", "operator"), BY)
        await accounts.add(service, VISION, BY)
        with pytest.raises(Conflict, match="there is or was an account anna"):
            await accounts.add(service, VISION, BY)
        with pytest.raises(NotFound):
            await accounts.revoke(service, "nobody", RevokeAccount(), BY)
        with pytest.raises(NotFound):
            await accounts.set_quota(service, "nobody", SetQuota(), BY)

    run(tmp_path, test)


def test_an_owner_submits_under_its_prefix_and_within_its_quota(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        await accounts.add(system.service, VISION, BY)

        def task(name: str, **changes: int) -> Awaitable[object]:
            return system.submit(structs.replace(TASK, task=name, **changes), ANNA)

        with pytest.raises(Forbidden, match="may not change 'speech-1'"):
            await task("speech-1")
        with pytest.raises(Conflict, match="model_length = 7 would exceed"):
            await task("vision-0", model_length=7)
        await task("vision-1")
        with pytest.raises(Conflict, match="concurrency = 60 would exceed the quota of anna, 50"):
            await task("vision-2", concurrency=40)
        await task("vision-2")
        with pytest.raises(Conflict, match="tasks = 3 would exceed"):
            await task("vision-3", concurrency=1)
        await system.service.set_state("vision-1", "cancelled", BY)
        await task("vision-3")
        [view] = await accounts.listed(system.service)
        assert (view.tasks, view.concurrency, view.quota.tasks) == (2, 40, 2)
        await accounts.set_quota(system.service, "anna", SetQuota(), BY)
        await task("vision-4")
        assert (await accounts.whoami(system.state, ANNA)).tasks == 3
        # An operator has no quota, and the task does not count towards anybody's.
        await system.submit(structs.replace(TASK, task="vision-5"))
        assert (await accounts.whoami(system.state, ANNA)).tasks == 3

    run(tmp_path, test)


def test_a_revocation_during_a_submission_wins(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        await accounts.add(system.service, VISION, BY)
        await accounts.revoke(system.service, "anna", RevokeAccount(), BY)
        with pytest.raises(Forbidden, match="anna was revoked"):
            await system.submit(structs.replace(TASK, task="vision-1"), ANNA)

    run(tmp_path, test)


def test_many_writers_cannot_exceed_a_quota(tmp_path: Path) -> None:
    """Eight processes' worth of stores on one file, each submitting tasks at the same time."""
    writers, each, allowed = 8, 3, 5

    async def prepare() -> None:
        async with a_system(tmp_path) as system:
            limits = QuotaLimits(tasks=allowed)
            await accounts.add(
                system.service, NewAccount("anna", "owner", ("v-",), quota=limits), BY
            )

    asyncio.run(prepare())
    barrier, outcomes = Barrier(writers), []
    caller = Caller("anna", "owner", ("v-",))

    async def submit(number: int) -> None:
        async with a_system(tmp_path) as system:
            barrier.wait()
            for index in range(each):
                try:
                    await system.submit(structs.replace(TASK, task=f"v-{number}-{index}"), caller)
                except Conflict as problem:
                    outcomes.append(str(problem))
                else:
                    outcomes.append("submitted")

    threads = [Thread(target=lambda n=n: asyncio.run(submit(n))) for n in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    async def check() -> None:
        async with a_system(tmp_path) as system:
            assert len(await system.service.tasks()) == allowed
            quota = system.store.read((quota_key("anna"),))[quota_key("anna")]
            assert isinstance(quota, QuotaRow)
            assert quota.submissions == allowed

    asyncio.run(check())
    assert outcomes.count("submitted") == allowed
    assert len(outcomes) == writers * each
    assert all("would exceed" in text for text in outcomes if text != "submitted")


def test_an_account_of_a_provider_can_be_revoked_and_restored(tmp_path: Path) -> None:
    class Provider:
        async def verify(self, authorization: str | None) -> Caller | None:
            return Caller("oidc:carol", "owner", ("c-",))

    async def test(system: System) -> None:
        found = Identities(system.state, Secret("0123456789abcdef"), system.now, Provider())
        assert await found.identify("Bearer x.y.z") == Caller("oidc:carol", "owner", ("c-",))
        await accounts.revoke(system.service, "oidc:carol", RevokeAccount(), BY)
        assert await found.identify("Bearer x.y.z") is None
        await accounts.revoke(system.service, "oidc:carol", RevokeAccount(revoked=False), BY)
        assert await found.identify("Bearer x.y.z") is not None
        await accounts.set_quota(system.service, "oidc:carol", SetQuota(tasks=0), BY)
        with pytest.raises(Conflict, match="tasks = 1 would exceed"):
            await system.submit(
                structs.replace(TASK, task="c-1"), Caller("oidc:carol", "owner", ("c-",))
            )

    run(tmp_path, test)


@pytest.mark.parametrize(
    ("name", "prefixes", "problem"),
    [
        ("bad name", (), "invalid name of an account: 'bad name'"),
        ("x" * 33, (), "invalid name of an account"),
        ("anna", ("Vision/",), "invalid prefix: 'Vision/'"),
    ],
)
def test_an_invalid_name_is_refused_in_words(
    tmp_path: Path, name: str, prefixes: tuple[str, ...], problem: str
) -> None:
    async def test(system: System) -> None:
        new = NewAccount(name, "owner" if prefixes else "viewer", prefixes)
        with pytest.raises(OperatorError, match=problem) as refused:
            await accounts.add(system.service, new, BY)
        assert refused.value.hint.startswith("use 1 to 32 characters of a-z")

    run(tmp_path, test)


def test_evaluations_count_towards_the_concurrency_of_a_quota(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        limits = QuotaLimits(tasks=1, concurrency=25)
        await accounts.add(
            system.service, NewAccount("anna", "owner", ("next-",), quota=limits), BY
        )
        owner = Caller("anna", "owner", ("next-",))
        await system.submit(TASK, owner)
        transact = partial(_as_charged, system, owner)
        started = await system.service.evaluate("next-word", Evaluate(clients=3), BY, transact)
        view = await accounts.whoami(system.state, owner)
        assert (view.tasks, view.concurrency) == (1, 20 + 5), f"{started.task} has 1.5 x 3 clients"
        row = system.store.read((f"task/{started.task}",))[f"task/{started.task}"]
        assert isinstance(row, TaskRow)
        system.change(end_evaluation(row, "cancelled", system.time, "over"))
        with pytest.raises(Conflict, match="concurrency = 26 would exceed the quota of anna, 25"):
            await system.service.evaluate("next-word", Evaluate(clients=4), BY, transact)

    run(tmp_path, test)


async def _as_charged(system: System, caller: Caller, change: Transaction) -> Outcome:
    [config] = [
        row.config for _, row in change.put if isinstance(row, TaskRow) and row.config.evaluates
    ]
    return await accounts.transact_within_quota(system.service, caller, config, change, BY)
