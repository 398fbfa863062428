"""Which TSA serves a task: the row decides, for every aggregator and over restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from threading import Event

import pytest
from msgspec import structs

from papaya.aggregator.masked_sum import LOST, TsaError
from papaya.aggregator.tsa import TsaAdapter, TsaEvidence
from papaya.aggregator.work import UNREACHABLE, Fold, Folded, GetOffers, Offered
from papaya.config import Deployment
from papaya.messages.storage import TSAS, Row, Transaction, TsaRow, tsa_key
from papaya.secagg.channel import SEALED_BYTES
from papaya.secagg.parameters import PublicParameters
from papaya.server import tsa_fleet
from papaya.server.state_thread import StateThread
from papaya.server.tsa import TsaConnection
from papaya.server.tsa_fleet import TsaFleet
from papaya.store.state import SqliteState
from papaya.tsa.tsa import TSA
from tests.unit.secagg.builders import a_task, entropy
from tests.unit.server.worker_builders import SECURE, Driver, MemoryBlobs
from tests.unit.tsa.running import CLUSTER, PATIENCE_S, running

TASKS = tuple(a_task(task=f"task-{i}") for i in range(4))
SEALED = bytes(SEALED_BYTES)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tsa_fleet, "_STATE_S", PATIENCE_S)


class Clock:
    now = 100.0


class World:
    """A state store, and aggregators that share it."""

    def __init__(self, folder: Path, state: StateThread) -> None:
        self.state = state
        self.clock = Clock()
        self._deployment = Deployment(data=str(folder))
        self._fleets: list[TsaFleet] = []

    def aggregator(self, *addresses: str) -> TsaFleet:
        def connect(address: str) -> TsaConnection:
            now = lambda: self.clock.now  # noqa: E731
            link = TsaConnection(self._deployment, address, now, CLUSTER, PATIENCE_S, PATIENCE_S)
            link.adapter = TsaAdapter(link, lambda digest: TsaEvidence("software", b"", b"", 0))
            return link

        fleet = TsaFleet(addresses, connect, self.state, lambda: self.clock.now)
        self._fleets.append(fleet)
        return fleet

    async def rows(self) -> dict[str, Row]:
        return await self.state.read((TSAS,))

    async def addresses(self, tasks: Sequence[PublicParameters]) -> list[str]:
        rows = await self.rows()
        found = [rows[tsa_key(task.digest())] for task in tasks]
        return [row.address for row in found if isinstance(row, TsaRow)]

    def close(self) -> None:
        for fleet in self._fleets:
            fleet.close()


def in_a_world(folder: Path, main: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        state = StateThread(SqliteState(folder / "state.db"))
        world = World(folder, state)
        try:
            await main(world)
        finally:
            world.close()
            await state.close()

    asyncio.run(run())


async def offers(fleet: TsaFleet, task: PublicParameters) -> bytes:
    """The identity of the TSA that gave one."""
    given, terms = await asyncio.to_thread(fleet.offers, task, 1)
    assert len(given) == 1
    return terms.identity


async def refused(fleet: TsaFleet, task: PublicParameters) -> str:
    with pytest.raises(TsaError) as caught:
        await asyncio.to_thread(fleet.accept, task, 0, 1, SEALED)
    return caught.value.reason


def test_tasks_are_spread_and_every_aggregator_asks_the_same_tsa(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        with running(tsa=TSA(entropy("one"))) as one, running(tsa=TSA(entropy("two"))) as two:
            first, second = world.aggregator(one, two), world.aggregator(two, one)
            given = [await offers(first, task) for task in TASKS]
            assert sorted(await world.addresses(TASKS)) == sorted([one, one, two, two])
            assert [await offers(second, task) for task in TASKS] == given
            world.close()

    in_a_world(tmp_path, main)


def test_new_tasks_go_to_a_tsa_that_answers(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        gone = f"unix:{tmp_path / 'nobody'}"
        with running() as alive:
            fleet = world.aggregator(gone, alive)
            for task in TASKS:
                await offers(fleet, task)
            assert await world.addresses(TASKS) == [alive] * len(TASKS)
            world.close()

    in_a_world(tmp_path, main)


def test_a_task_waits_for_its_own_tsa(tmp_path: Path) -> None:
    """Its seeds may be there, so it does not move to one that answers."""
    where, [task, *_] = f"unix:{tmp_path / 'tsa'}", TASKS

    async def main(world: World) -> None:
        with running() as other:
            with running(where, tsa=TSA(entropy("first"))):
                fleet = world.aggregator(where)
                await offers(fleet, task)
                world.close()
            fleet = world.aggregator(other, where)
            with pytest.raises(TsaError) as caught:
                await asyncio.to_thread(fleet.offers, task, 1)
            assert caught.value.reason == UNREACHABLE
            assert await refused(fleet, task) == UNREACHABLE
            assert await world.addresses([task]) == [where]
            world.close()

    in_a_world(tmp_path, main)


def test_a_tsa_that_left_the_list_still_serves_its_tasks(tmp_path: Path) -> None:
    [task, *_] = TASKS

    async def main(world: World) -> None:
        with running(tsa=TSA(entropy("one"))) as one, running(tsa=TSA(entropy("two"))) as two:
            identity = await offers(world.aggregator(one), task)
            assert await offers(world.aggregator(two), task) == identity
            world.close()

    in_a_world(tmp_path, main)


def test_another_identity_is_a_restart_for_an_aggregator_that_never_saw_the_first(
    tmp_path: Path,
) -> None:
    """A successor: without the row it could not know."""
    where, [task, *_] = f"unix:{tmp_path / 'tsa'}", TASKS

    async def main(world: World) -> None:
        with running(where, tsa=TSA(entropy("first"))):
            await offers(world.aggregator(where), task)
            world.close()
        with running(where, tsa=TSA(entropy("second"))):
            successor, third = world.aggregator(where), world.aggregator(where)
            # The new TSA has given out the same index by now, so it would not look unknown.
            await offers(world.aggregator(where), TASKS[1])
            assert await refused(successor, task) == LOST
            identity = await offers(successor, task)
            assert identity == await offers(third, task)
            world.close()

    in_a_world(tmp_path, main)


def test_after_a_restart_offers_come_from_the_new_tsa_at_once(tmp_path: Path) -> None:
    """Nothing that begins can be lost."""
    where, [task, *_] = f"unix:{tmp_path / 'tsa'}", TASKS

    async def main(world: World) -> None:
        with running(where, tsa=TSA(entropy("first"))):
            fleet = world.aggregator(where)
            await offers(fleet, task)
            world.close()
        with running(where, tsa=TSA(entropy("second"))):
            first = await offers(fleet, task)
            world.clock.now += 5.0
            assert await offers(world.aggregator(where), task) == first
            world.close()

    in_a_world(tmp_path, main)


def test_a_task_that_is_over_leaves_no_row(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        with running() as where:
            fleet = world.aggregator(where)
            for task in TASKS:
                await offers(fleet, task)
            await asyncio.to_thread(fleet.forget, TASKS[0])
            assert len(await world.rows()) == len(TASKS) - 1
            await asyncio.to_thread(fleet.forget, TASKS[0])  # no-op
            # Another aggregator, which has no connection yet.
            await asyncio.to_thread(world.aggregator(where).forget, TASKS[1])
            assert len(await world.rows()) == len(TASKS) - 2
            world.close()

    in_a_world(tmp_path, main)


def test_the_child_has_a_row_without_a_path(tmp_path: Path) -> None:
    """The data folder may be moved."""

    async def main(world: World) -> None:
        await world.state.transact(
            Transaction(put=((tsa_key(TASKS[0].digest()), TsaRow("", b"gone")),))
        )
        with running(f"unix:{tmp_path / 'tsa.sock'}"):
            fleet = world.aggregator()
            assert await refused(fleet, TASKS[0]) == LOST
            await offers(fleet, TASKS[0])
            assert await world.addresses([TASKS[0]]) == [""]
            world.close()

    in_a_world(tmp_path, main)


def test_aggregators_that_choose_at_once_agree(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        with running(tsa=TSA(entropy("one"))) as one, running(tsa=TSA(entropy("two"))) as two:
            fleets = [world.aggregator(one, two), world.aggregator(two, one)] * 2
            for task in TASKS:
                given = await asyncio.gather(*(offers(fleet, task) for fleet in fleets))
                assert len(set(given)) == 1
            world.close()

    in_a_world(tmp_path, main)


def test_tasks_that_begin_at_once_are_spread(tmp_path: Path) -> None:
    """Each gets its first offers on a thread of its own."""
    configs = [structs.replace(SECURE, task=f"task-{i}") for i in range(8)]

    async def main(world: World) -> None:
        with running(tsa=TSA(entropy("one"))) as one, running(tsa=TSA(entropy("two"))) as two:
            driver = Driver(MemoryBlobs(), threads=1, tsa=world.aggregator(one, two))
            try:
                for config in configs:
                    driver.workers.perform(GetOffers(config, 1, 1))
                await driver.until(Offered, len(configs))
                tasks = [task for config in configs if (task := config.public_parameters)]
                addresses = await world.addresses(tasks)
                assert sorted(addresses) == sorted([one] * 4 + [two] * 4)
            finally:
                await driver.workers.close()
            world.close()

    in_a_world(tmp_path, main)


class Freezing:
    """Entropy of a TSA, which has one thread: while it waits here, it answers nobody."""

    def __init__(self) -> None:
        self.is_frozen, self.may_go_on = Event(), Event()
        self.may_go_on.set()
        self._source = entropy("freezing")

    def __call__(self, count: int) -> bytes:
        if not self.may_go_on.is_set():
            self.is_frozen.set()
            assert self.may_go_on.wait(PATIENCE_S)
        return self._source(count)


def test_a_frozen_tsa_holds_up_no_task_of_another_tsa(tmp_path: Path) -> None:
    freezing, other = Freezing(), structs.replace(SECURE, task="elsewhere")

    async def main(world: World) -> None:
        with running(tsa=TSA(freezing)) as frozen, running(tsa=TSA(entropy("two"))) as two:
            driver = Driver(MemoryBlobs(), threads=1, tsa=world.aggregator(frozen, two))
            perform = driver.workers.perform
            try:
                for number, config in enumerate((SECURE, other), 1):
                    perform(GetOffers(config, 1, 1))
                    await driver.until(Offered, number)
                assert [offered.problem for offered in driver.of(Offered)] == ["", ""]
                freezing.may_go_on.clear()
                perform(GetOffers(SECURE, 1, 1))
                assert await asyncio.to_thread(freezing.is_frozen.wait, PATIENCE_S)
                for config in (SECURE, other):
                    driver.upload(config.task, "a", [0.0] * (config.update_bytes // 4))
                    perform(Fold(config, 1, 1, "a", 1, 0, 0, SEALED))
                perform(GetOffers(other, 1, 1))
                await driver.until(Folded)
                await driver.until(Offered, 3)
                assert [folded.task for folded in driver.of(Folded)] == ["elsewhere"]
                assert driver.of(Offered)[-1].task == "elsewhere"
            finally:
                freezing.may_go_on.set()
                await driver.workers.close()
            assert len(driver.of(Folded)) == 2
            world.close()

    in_a_world(tmp_path, main)
