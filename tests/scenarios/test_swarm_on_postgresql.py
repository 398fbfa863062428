"""The swarm with its rows in a real PostgreSQL: the same machines, faults and checkers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from msgspec.structs import replace

from papaya.messages.storage import Outcome, Row, Transaction
from papaya.sim import cluster
from papaya.sim.storage import StateTwin, Writer
from papaya.sim.swarm import run_seed
from papaya.store.postgresql import PostgresState
from tests.postgresql import postgres


class OnPostgresql(StateTwin):
    """What machines read comes from the database. The checkers look at the twin's rows, and both
    must agree on every outcome and every read.
    """

    store: PostgresState

    def apply(self, writer: Writer, transaction: Transaction) -> Outcome:
        outcome = self.store.transact(transaction)
        assert outcome == super().apply(writer, transaction)
        return outcome

    def snapshot(self, prefixes: tuple[str, ...]) -> dict[str, Row]:
        rows = self.store.read(prefixes)
        assert rows == super().snapshot(prefixes)
        return rows


class RepeatsWhatIsUnknown(OnPostgresql):
    """A sender repeats a transaction whose outcome it does not know. It compares nothing, because
    what the transaction required is gone if it was applied.
    """

    def _lose(
        self, writer: Writer, transaction: Transaction, done: Callable[[Outcome], None]
    ) -> None:
        def repeat(outcome: Outcome) -> None:
            done(self.apply(writer, replace(transaction, require=())))

        super()._lose(writer, transaction, repeat)


class AcknowledgesBeforeCommit(OnPostgresql):
    def transact(
        self, writer: Writer, transaction: Transaction, done: Callable[[Outcome], None]
    ) -> None:
        super().transact(writer, transaction, lambda outcome: None)
        self._engine.after(0.0, lambda: done("committed"))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[PostgresState]:
    with postgres().schema() as url, closing(PostgresState(url, "swarm")) as made:
        monkeypatch.setattr(OnPostgresql, "store", made, raising=False)
        monkeypatch.setattr(cluster, "StateTwin", OnPostgresql)
        yield made


_SKIPS_THE_FENCE = 3  # a seed that finds the bug


def check(seed: int, store: PostgresState) -> None:
    result = run_seed(seed)
    assert result.failure is None, result.failure
    assert result.versions > 0
    assert len(store.read(("version/",))) > 1, "the database was not used"


@pytest.mark.parametrize("seed", [0, 3])
def test_a_random_cluster_on_postgresql_keeps_every_promise(
    seed: int, store: PostgresState
) -> None:
    check(seed, store)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4, 60))
def test_many_random_clusters_on_postgresql_keep_every_promise(
    seed: int, store: PostgresState
) -> None:
    check(seed, store)


def test_the_swarm_on_postgresql_finds_an_aggregator_that_skips_the_fence(
    store: PostgresState,
) -> None:
    failure = run_seed(_SKIPS_THE_FENCE, plant="fence-skipped").failure
    assert failure is not None
    assert "InvariantError" in failure


@pytest.mark.parametrize(
    ("broken", "seed"), [(RepeatsWhatIsUnknown, 3), (AcknowledgesBeforeCommit, 0)]
)
def test_the_swarm_on_postgresql_finds_a_broken_store(
    broken: type[OnPostgresql], seed: int, store: PostgresState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "StateTwin", broken)
    failure = run_seed(seed).failure
    assert failure is not None
    assert "InvariantError" in failure
