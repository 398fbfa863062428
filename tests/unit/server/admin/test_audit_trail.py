"""The audit trail: one row per change or refused attempt, in the transaction of the change."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from papaya.errors import OperatorError
from papaya.messages.audit_trail import (
    AUDIT_HEAD_KEY,
    AUDIT_START_KEY,
    FIRST_DIGEST,
    Attempt,
    AuditError,
    AuditHeadRow,
    AuditRow,
    AuditStartRow,
    audit_key,
    recorded,
    verify,
)
from papaya.messages.storage import Transaction, task_key
from papaya.server.admin.audit_trail import MAX_REFUSED_PER_HOUR
from papaya.server.admin.problems import Conflict, Forbidden, NotFound, Uncertain
from papaya.server.admin.views import PruneTrail, RollBack
from tests.unit.server.admin.builders import BY, System, a_system, because

PAUSE = Attempt("alice", "pause", "next-word", why="too hot")


def run(folder: Path, test: Callable[[System], Awaitable[None]]) -> None:
    async def inside() -> None:
        async with a_system(folder) as system:
            await test(system)

    asyncio.run(inside())


async def rows(system: System) -> tuple[AuditRow, ...]:
    page = await system.service.trail.page(0)
    assert verify(page.rows, page.start.number, page.start.digest) == (
        page.head.number,
        page.head.digest,
    )
    return page.rows


def test_a_change_and_its_row_are_one_transaction(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        await system.submit()
        before = await rows(system)
        system.state.outcome = "unknown"
        with pytest.raises(Uncertain):
            await system.service.set_state("next-word", "paused", PAUSE)
        system.state.outcome = None
        assert await rows(system) == before
        await system.service.set_state("next-word", "paused", PAUSE)
        [*_, row] = await rows(system)
        assert (row.attempt, row.result, row.at) == (PAUSE, "done", system.time)
        assert row.previous == before[-1].digest

    run(tmp_path, test)


def test_a_change_whose_rows_were_changed_is_refused_without_a_row(tmp_path: Path) -> None:
    """Only the head of the trail is read again, never the rows that the change was made from."""

    async def test(system: System) -> None:
        await system.submit()
        before = await rows(system)
        late = Transaction(require=((task_key("next-word"), None),), put=())
        assert await system.service.trail.transact(PAUSE, late) == "refused"
        assert await rows(system) == before

    run(tmp_path, test)


def test_two_processes_write_one_chain(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        await system.submit()

        async def change(trail: object, number: int) -> None:
            attempt = Attempt(f"person-{number}", "mark")
            assert await trail.transact(attempt, Transaction()) == "committed"  # type: ignore[attr-defined]

        other = type(system.service.trail)(system.state, system.now)
        trails = [system.service.trail, other]
        await asyncio.gather(*(change(trails[n % 2], n) for n in range(20)))
        found = [row.attempt.actor for row in await rows(system)]
        assert sorted(found[1:]) == sorted(f"person-{n}" for n in range(20))

    run(tmp_path, test)


def test_a_racing_head_repeats_only_the_row(tmp_path: Path) -> None:
    """The head changes between its read and the transaction: the change is made all the same."""

    async def test(system: System) -> None:
        await system.submit()
        transact = system.state.transact
        raced: list[bool] = []

        async def race(transaction: Transaction) -> object:
            if not raced:
                raced.append(True)
                head = system.store.read((AUDIT_HEAD_KEY,))[AUDIT_HEAD_KEY]
                assert isinstance(head, AuditHeadRow)
                other = recorded(Transaction(), head, BY, 5.0, "done")
                assert system.store.transact(other) == "committed"
            return await transact(transaction)

        system.state.transact = race  # type: ignore[method-assign, assignment]
        assert (await system.service.set_state("next-word", "paused", PAUSE)).state == "paused"
        assert [row.attempt for row in await rows(system)][-2:] == [BY, PAUSE]

    run(tmp_path, test)


def test_a_refused_attempt_has_a_row_of_its_own(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        await system.submit()
        for error in (Conflict("it is\nover\x1b[2J"), ValueError("a secret")):
            await system.service.trail.refuse(PAUSE, error)
        await system.service.trail.refuse(PAUSE, Uncertain("who knows"))
        results = [row.result for row in await rows(system)]
        assert results[1:] == ["refused: it is over [2J", "refused: internal server error"]

    run(tmp_path, test)


def test_a_change_whose_answer_failed_is_not_recorded_as_refused(tmp_path: Path) -> None:
    """For example if another operator deletes the task before it is read again."""

    async def test(system: System) -> None:
        await system.submit()
        pause = structs.replace(PAUSE)
        await system.service.set_state("next-word", "paused", pause)
        await system.service.trail.refuse(pause, NotFound("there is no task"))
        assert [row.result for row in await rows(system)] == ["done", "done"]
        await system.service.trail.refuse(structs.replace(PAUSE), Conflict("already paused"))
        assert [row.result for row in await rows(system)][2:] == ["refused: already paused"]

    run(tmp_path, test)


def test_a_trail_is_pruned_only_by_whoever_has_exported_it(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        await system.submit()
        for number in range(1500):
            await system.service.trail.transact(because(str(number)), Transaction())
        page = await system.service.trail.page(1198)
        row = page.rows[0]
        assert (row.number, len(page.rows)) == (1199, 303)
        with pytest.raises(OperatorError, match="differs from the exported one"):
            await system.service.trail.prune(PruneTrail(1199, bytes(32)), BY)
        with pytest.raises(Conflict, match="no row 9000"):
            await system.service.trail.prune(PruneTrail(9000, bytes(32)), BY)
        left = await system.service.trail.prune(PruneTrail(1199, row.digest), BY)
        assert (left.start.number, left.start.digest) == (1199, row.digest)
        assert len(await rows(system)) == 1501 - 1199 + 2  # with the rows of the pruning itself
        assert audit_key(1199) not in system.store.read(("audit/",))

    run(tmp_path, test)


@pytest.mark.parametrize("field", AuditRow.__struct_fields__)
def test_every_edit_of_a_row_is_found(field: str) -> None:
    chain: list[AuditRow] = []
    head: AuditHeadRow | None = None
    for number in range(3):
        change = recorded(Transaction(), head, because(f"reason {number}"), 7.0 + number, "done")
        (_, row), (_, new_head) = change.put
        assert isinstance(row, AuditRow)
        assert isinstance(new_head, AuditHeadRow)
        chain.append(row)
        head = new_head
    assert head is not None
    assert verify(chain, 0, FIRST_DIGEST) == (3, head.digest)
    values = {"number": 7, "at": 8.5, "attempt": PAUSE, "result": "refused", "previous": bytes(32)}
    chain[1] = structs.replace(chain[1], **{field: values[field]})
    with pytest.raises(AuditError, match=r"missing|changed"):
        verify(chain, 0, FIRST_DIGEST)
    del chain[1]
    with pytest.raises(AuditError, match="row 2 of the audit trail is missing"):
        verify(chain, 0, FIRST_DIGEST)
    assert verify([], 0, FIRST_DIGEST) != (3, head.digest)  # removed from the end


def test_the_digest_of_a_row_is_fixed() -> None:
    """Exports and anchors of earlier versions must still match."""
    attempt = Attempt("alice", "rollback", "next-word", '{"version":3}', "it diverged")
    row = AuditRow(1, 1700000000.5, attempt, "done", FIRST_DIGEST)
    digest = "e2be7572ec089ded6085ac1e2a5fa337bbe03b38fc5a05edb4fb33049d565063"
    assert row.digest.hex() == digest
    assert msgspec.json.decode(msgspec.json.encode(row), type=AuditRow).digest == row.digest


def test_two_operators_prune_at_once(tmp_path: Path) -> None:
    """The one who is late must not move the beginning of the trail back to rows that are gone."""

    async def test(system: System) -> None:
        trail, other = system.service.trail, type(system.service.trail)(system.state, system.now)
        for number in range(1200):
            await trail.transact(because(str(number)), Transaction())
        digests = {row.number: row.digest for row in (await trail.page(1000)).rows}
        page, asked = trail.page, []

        async def race(after: int) -> object:
            found = await page(after)
            asked.append(after)
            if len(asked) == 2:  # the first page is known, and not deleted yet
                await other.prune(PruneTrail(1100, digests[1100]), BY)
            return found

        trail.page = race  # type: ignore[method-assign, assignment]
        with pytest.raises(Conflict, match="the audit trail changed"):
            await trail.prune(PruneTrail(1050, digests[1050]), BY)
        start = system.store.read((AUDIT_START_KEY,))[AUDIT_START_KEY]
        assert start == AuditStartRow(1100, digests[1100])
        await rows(system)

    run(tmp_path, test)


def test_roll_back_writes_one_row_whatever_the_number_of_its_retries(tmp_path: Path) -> None:
    async def test(system: System) -> None:
        await system.submit()
        transact = system.state.transact
        refusals: list[bool] = []

        async def busy(transaction: Transaction) -> object:
            if len(refusals) < 2:
                refusals.append(True)
                return "refused"
            return await transact(transaction)

        system.state.transact = busy  # type: ignore[method-assign, assignment]
        await system.service.roll_back("next-word", RollBack(0), PAUSE)
        assert len(await rows(system)) == 2

    run(tmp_path, test)


def test_refused_attempts_of_one_actor_are_bounded_and_summed_up(tmp_path: Path) -> None:
    """Somebody with a viewer's token could fill the state store."""

    async def test(system: System) -> None:
        trail, problem = system.service.trail, Forbidden("a viewer may not do it", hint="")
        viewer, other = Attempt("eve", "pause", "next-word"), Attempt("bob", "pause", "next-word")
        for _ in range(3 * MAX_REFUSED_PER_HOUR):
            await trail.refuse(viewer, problem)
        await trail.refuse(other, problem)
        found = [row.attempt.actor for row in await rows(system)]
        assert (found.count("eve"), found.count("bob")) == (MAX_REFUSED_PER_HOUR, 1)
        system.time += 3601
        await trail.refuse(viewer, problem)
        told = (await rows(system))[-1].result
        assert told.endswith(
            f"; {2 * MAX_REFUSED_PER_HOUR} more refused attempts before it have no row"
        )
        await trail.refuse(viewer, problem)
        assert (await rows(system))[-1].result == "refused: a viewer may not do it"

    run(tmp_path, test)
