"""The state store in PostgreSQL: races, lost connections, what is replicated. The contract has the
rest; tests/unit/store/test_postgresql_refusals.py has bad input.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from random import Random
from threading import Barrier

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papaya.errors import LostHistory, OperatorError, StateUnreachable
from papaya.messages.storage import EpochRow, Outcome, Transaction
from papaya.sim.engine import Engine
from papaya.sim.storage import StateTwin, StorageConfig
from papaya.store import postgresql, postgresql_session
from papaya.store.postgresql import PostgresState
from papaya.store.postgresql_session import DatabaseSession
from papaya.store.rows import RawRows
from tests.postgresql import SETTINGS_OF_USERS, postgres, running

Changed = dict[bytes, bytes | None]
_LIMIT_S = 300.0
_NOBODY = "a_standby_that_does_not_exist"


@pytest.fixture
def url() -> Iterator[str]:
    with postgres().schema() as made:
        yield made


@pytest.fixture
def store(url: str) -> Iterator[PostgresState]:
    with closing(PostgresState(url, "node")) as made:
        yield made


def put(key: str, value: int) -> Transaction:
    return Transaction(put=((key, EpochRow(value)),))


def claim(key: str, value: int) -> Transaction:
    """Only if nobody has it."""
    return Transaction(require=((key, None),), put=((key, EpochRow(value)),))


def backend(store: PostgresState) -> int:
    assert store._session is not None
    return store._session.backend_pid


def terminate(store: PostgresState) -> None:
    """Returns when the backend has ended."""
    pid = backend(store)
    postgres().execute(f"SELECT pg_terminate_backend({pid}, 30000)")


def waiting_for_a_lock() -> int:
    [[count]] = postgres().execute(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'advisory'"
    )
    assert isinstance(count, int)
    return count


# -- races ----------------------------------------------------------------------------------------


class SkipsTheLock(PostgresState):
    def _lock_and_find(
        self, session: DatabaseSession, locks: list[int], required: list[bytes], everything: bool
    ) -> RawRows:
        return super()._lock_and_find(session, [], required, everything)


class LocksAndComparesInOneStatement(PostgresState):
    def _lock_and_find(
        self, session: DatabaseSession, locks: list[int], required: list[bytes], everything: bool
    ) -> RawRows:
        session.connection.execute("BEGIN")
        both = """
        WITH locked AS MATERIALIZED (SELECT count(pg_advisory_xact_lock(hash)) AS locks
        FROM unnest(%b::bigint[]) AS hash)
        SELECT key, row FROM papaya_rows, locked WHERE locks > 0 AND key = ANY (%b)
        """
        return dict(session.connection.execute(both, (locks, required), binary=True).fetchall())


def outcomes_of_two_claims(
    url: str, kind: type[PostgresState], monkeypatch: pytest.MonkeyPatch
) -> list[Outcome]:
    """Both require that there is no row. The first to have compared goes on when the other waits
    for a lock, or has compared too.
    """
    compared: list[str] = []
    write = kind._write

    def pause(self: PostgresState, session: DatabaseSession, changed: Changed) -> None:
        if b"a" in changed:
            compared.append(session.name)
            if len(compared) == 1:
                _until(lambda: len(compared) == 2 or waiting_for_a_lock() > 0)
        write(self, session, changed)

    monkeypatch.setattr(kind, "_write", pause)
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        stores = [stack.enter_context(closing(kind(url, name))) for name in ("one", "two")]
        changes = [claim("a", 1), claim("a", 2)]
        return list(threads.map(kind.transact, stores, changes))


def _until(holds: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + _LIMIT_S
    while not holds():
        assert time.monotonic() < ends_at, "nothing happened"
        time.sleep(0.01)


def test_of_two_that_require_absence_one_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = outcomes_of_two_claims(url, PostgresState, monkeypatch)
    assert sorted(outcomes) == ["committed", "refused"]


@pytest.mark.parametrize("bug", [SkipsTheLock, LocksAndComparesInOneStatement])
def test_the_race_finds_a_store_without_a_lock_before_its_snapshot(
    url: str, bug: type[PostgresState], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert outcomes_of_two_claims(url, bug, monkeypatch) == ["committed", "committed"]


@pytest.mark.parametrize("most_locks", [postgresql.MOST_LOCKS, 2])
def test_writers_that_race_lose_no_increment_and_share_no_absence(
    url: str, most_locks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `most_locks` = 2, groups that lock some keys race with groups that lock everything."""
    monkeypatch.setattr(postgresql, "MOST_LOCKS", most_locks)
    writers, rounds = 6, 12
    start = Barrier(writers)

    def race(number: int) -> tuple[int, list[str]]:
        added, claimed = 0, []
        rng = Random(number)
        with closing(PostgresState(url, f"writer-{number}")) as store:
            start.wait()
            for turn in range(rounds):
                before = store.read(("count",)).get("count")
                after = EpochRow(before.epoch + 1 if isinstance(before, EpochRow) else 1)
                change = Transaction(require=(("count", before),), put=(("count", after),))
                claims = [claim(f"claim/{turn}", number), claim(f"claim/{turn + 1}", number)]
                group = rng.sample([change, *claims], 3)
                outcomes = store.transact_all(group)
                assert "unknown" not in outcomes
                for each, outcome in zip(group, outcomes, strict=True):
                    if outcome == "committed":
                        added += each is change
                        claimed += [key for key, _ in each.put if key != "count"]
        return added, claimed

    with ThreadPoolExecutor(writers) as threads:
        results = list(threads.map(race, range(writers)))
    with closing(PostgresState(url, "reader")) as store:
        rows = store.read(("",))
    assert rows["count"] == EpochRow(sum(added for added, _ in results))
    claims = [key for _, claimed in results for key in claimed]
    assert sorted(claims) == sorted(key for key in rows if key.startswith("claim/"))
    assert len(set(claims)) == len(claims) == rounds + 1


changes = st.builds(
    Transaction,
    require=st.lists(
        st.tuples(st.sampled_from("ab"), st.none() | st.builds(EpochRow, st.integers(0, 1))),
        max_size=1,
    ).map(tuple),
    put=st.lists(
        st.tuples(st.sampled_from("ab"), st.builds(EpochRow, st.integers(0, 1))), max_size=2
    ).map(tuple),
    delete=st.lists(st.sampled_from("ab"), max_size=1).map(tuple),
)


@settings(max_examples=15)
@given(st.lists(changes, max_size=8))
def test_transactions_that_share_a_commit_are_as_one_after_the_other(
    transactions: list[Transaction],
) -> None:
    one_by_one = StateTwin(Engine(), Random(0), StorageConfig())
    outcomes = [one_by_one.apply(("node", 0), change) for change in transactions]
    with postgres().schema() as url, closing(PostgresState(url, "node")) as together:
        assert together.transact_all(transactions) == outcomes
        assert together.read(("",)) == one_by_one.snapshot(("",))


# -- lost connections -----------------------------------------------------------------------------


def lose_once(store: PostgresState, monkeypatch: pytest.MonkeyPatch, *, after: bool) -> None:
    """The connection is lost around the next COMMIT."""
    write = PostgresState._write
    lost: list[DatabaseSession] = []

    def lose(self: PostgresState, session: DatabaseSession, changed: Changed) -> None:
        if self is store and not lost:
            lost.append(session)
            if after:
                write(self, session, changed)
            terminate(store)
            session.connection.execute("SELECT 1")
            raise AssertionError("the connection is still there")
        write(self, session, changed)

    monkeypatch.setattr(PostgresState, "_write", lose)


@pytest.mark.parametrize("after", [True, False])
def test_a_connection_that_is_lost_is_an_unknown_outcome(
    store: PostgresState, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_once(store, monkeypatch, after=after)
    assert store.transact(claim("a", 1)) == "unknown"
    assert store.read(("",)) == ({"a": EpochRow(1)} if after else {})
    assert store.transact(put("b", 1)) == "committed"


def test_the_test_finds_a_store_that_repeats_what_may_have_been_applied(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says `refused` of a transaction that was applied: a submitted task `exists already`."""

    class Repeats(PostgresState):
        def transact(self, transaction: Transaction) -> Outcome:
            outcome = super().transact(transaction)
            return super().transact(transaction) if outcome == "unknown" else outcome

    with closing(Repeats(url, "node")) as store:
        lose_once(store, monkeypatch, after=True)
        assert store.transact(claim("a", 1)) == "refused"
        assert store.read(("",)) == {"a": EpochRow(1)}


def test_a_connection_that_was_lost_while_idle_costs_nothing(store: PostgresState) -> None:
    """It is noticed before anything is sent."""
    terminate(store)
    assert store.transact(claim("a", 1)) == "committed"
    terminate(store)
    assert store.read(("",)) == {"a": EpochRow(1)}


def test_it_says_when_nothing_was_sent(
    store: PostgresState, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminate(store)
    with monkeypatch.context() as patch:
        patch.setattr(store, "_conninfo", "host=/nowhere dbname=postgres")
        with pytest.raises(StateUnreachable, match="No such file"):
            store.transact(claim("a", 1))
        with pytest.raises(StateUnreachable):
            store.read(("",))
    assert store.transact(claim("a", 1)) == "committed"


def test_the_old_backend_has_ended_before_the_new_one_is_used(
    store: PostgresState, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may still have a COMMIT to do. Here it does not end by itself."""
    got, patience_s = DatabaseSession._got, iter([0.2])
    monkeypatch.setattr(
        DatabaseSession, "_got", lambda self, lock, _: got(self, lock, next(patience_s, 60.0))
    )
    old, store._session = store._session, None
    assert old is not None
    assert store.read(("",)) == {}
    with pytest.raises(psycopg.OperationalError):
        old.connection.execute("SELECT 1")
    assert "ending the lost connection of node" in caplog.text
    old.close()


def test_two_processes_of_one_name_are_not_served(
    store: PostgresState, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql_session, "RECONNECT_PATIENCE_S", 0.1)
    monkeypatch.setattr(postgresql_session, "START_PATIENCE_S", 0.1)
    with pytest.raises(OperatorError, match=r"another process is connected .* as node") as caught:
        PostgresState(url, "node")
    assert "stop it" in caught.value.hint
    assert store.transact(put("a", 1)) == "committed"
    with closing(PostgresState(url, "another")) as other:
        assert other.others() == 1


def test_a_deadlock_is_tried_again(store: PostgresState, monkeypatch: pytest.MonkeyPatch) -> None:
    write, failures = PostgresState._write, [psycopg.errors.DeadlockDetected("deadlock")]

    def fail(self: PostgresState, session: DatabaseSession, changed: Changed) -> None:
        if failures:
            raise failures.pop()
        write(self, session, changed)

    monkeypatch.setattr(PostgresState, "_write", fail)
    assert store.transact(claim("a", 1)) == "committed"
    assert not failures


def test_a_lock_that_another_keeps_is_an_unknown_outcome_and_not_a_refusal(
    store: PostgresState, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert store._session is not None
    store._session.connection.execute("SET lock_timeout = '50ms'")
    with psycopg.connect(url) as other:
        other.execute("SELECT pg_advisory_xact_lock(%s)", (postgresql._hash64(b"a"),))
        assert store.transact(put("a", 1)) == "unknown"
        assert store.read(("",)) == {}  # who reads does not wait for who writes
    assert store.transact(put("a", 1)) == "committed"
    assert "lock timeout" in caplog.text


def test_a_store_that_is_closed_answers_with_errors(store: PostgresState) -> None:
    store.close()
    assert store.transact(put("a", 1)) == "unknown"
    with pytest.raises(OperatorError, match="closed"):
        store.read(("a",))


# -- what is replicated ---------------------------------------------------------------------------


def until_it_waits_for_a_standby(store: PostgresState) -> None:
    where = f"pid = {backend(store)} AND wait_event = 'SyncRep'"
    postgres().until(f"SELECT 1 FROM pg_stat_activity WHERE {where}")


def test_a_commit_with_a_warning_is_unknown(
    store: PostgresState, caplog: pytest.LogCaptureFixture
) -> None:
    """The wait for the standby was cancelled: it is visible and not replicated."""
    pid = backend(store)
    with ThreadPoolExecutor() as threads, postgres().setting("synchronous_standby_names", _NOBODY):
        outcome = threads.submit(store.transact, put("a", 1))
        until_it_waits_for_a_standby(store)
        postgres().execute(f"SELECT pg_cancel_backend({pid})")
        assert outcome.result(_LIMIT_S) == "unknown"
    assert "canceling wait for synchronous replication" in caplog.text
    assert store.read(("",)) == {"a": EpochRow(1)}


class ReadsWhatIsVisible(PostgresState):
    def _write(self, session: DatabaseSession, changed: Changed) -> None:
        if changed:
            super()._write(session, changed)
        else:
            session.connection.execute("COMMIT")


def read_all(store: PostgresState) -> object:
    return store.read(("",))


def find_it_claimed(store: PostgresState) -> object:
    return store.transact(claim("a", 2))


@pytest.mark.parametrize("ask", [read_all, find_it_claimed])
@pytest.mark.parametrize("kind", [PostgresState, ReadsWhatIsVisible])
def test_what_is_visible_counts_when_it_is_replicated(
    url: str, kind: type[PostgresState], ask: Callable[[PostgresState], object]
) -> None:
    """Reads and refusals wait for a commit of their own. A store without that is found out."""
    answer = {"a": EpochRow(1)} if ask is read_all else "refused"
    with (
        closing(PostgresState(url, "writer")) as writer,
        closing(kind(url, "reader")) as reader,
        ThreadPoolExecutor() as threads,
        postgres().setting("synchronous_standby_names", _NOBODY),
    ):
        written = threads.submit(writer.transact, claim("a", 1))
        until_it_waits_for_a_standby(writer)
        postgres().execute(f"SELECT pg_cancel_backend({backend(writer)})")
        assert written.result(_LIMIT_S) == "unknown"
        asked = threads.submit(ask, reader)
        if kind is ReadsWhatIsVisible:
            assert asked.result(_LIMIT_S) == answer
            return
        until_it_waits_for_a_standby(reader)
        assert not asked.done()
        postgres().execute("ALTER SYSTEM RESET synchronous_standby_names")
        postgres().execute("SELECT pg_reload_conf()")
        assert asked.result(_LIMIT_S) == answer


def test_history_that_was_lost_stops_every_process(
    store: PostgresState, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As if a replica had been promoted that lacks the last commits."""
    other = PostgresState(url, "other")
    store.transact(put("a", 1))
    key = "'\\xff'::bytea || 'commits/node'"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"UPDATE papaya_rows SET row = '0' WHERE key = {key}")
    terminate(store)
    with pytest.raises(LostHistory, match="history was lost: node had 1 commits"):
        store.transact(put("a", 2))
    terminate(other)
    for _ in range(2):
        with pytest.raises(LostHistory, match="node had 1 commits"):
            other.read(("",))
    with pytest.raises(LostHistory) as caught:
        PostgresState(url, "new")
    assert "docs/" in caught.value.hint
    other.close()


# -- its connection -------------------------------------------------------------------------------


def test_nothing_cancels_a_commit_or_hides_its_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the role says."""
    monkeypatch.setattr(postgresql_session, "_SETTINGS", SETTINGS_OF_USERS)
    server = postgres()
    server.execute("CREATE ROLE hasty LOGIN SUPERUSER")
    hasty = {
        "statement_timeout": "'1s'",
        "client_min_messages": "error",
        "synchronous_commit": "off",
        "idle_session_timeout": "'1s'",
    }
    for setting, value in hasty.items():
        server.execute(f"ALTER ROLE hasty SET {setting} = {value}")
    with (
        server.database() as name,
        closing(PostgresState(server.url(name, "hasty"), "n")) as store,
    ):
        assert store._session is not None
        found = {
            setting: store._session.connection.execute(f"SHOW {setting}").fetchone()
            for setting in (*hasty, "idle_in_transaction_session_timeout")
        }
    server.execute("DROP ROLE hasty")
    assert found == {
        "statement_timeout": ("0",),
        "client_min_messages": ("warning",),
        "synchronous_commit": ("on",),
        "idle_session_timeout": ("0",),
        "idle_in_transaction_session_timeout": ("5s",),
    }


def test_a_read_by_prefix_uses_the_index(store: PostgresState) -> None:
    assert store._session is not None
    with store._session.connection.transaction():
        store._session.connection.execute("SET LOCAL enable_seqscan = off")
        plan = store._session.connection.execute(
            f"EXPLAIN {postgresql._RANGE}",
            (b"a", b"b"),
        ).fetchall()
    assert any("papaya_rows_pkey" in line for (line,) in plan), plan


def test_a_damaged_row_is_named(store: PostgresState, url: str) -> None:
    store.transact(put("a", 1))
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("UPDATE papaya_rows SET row = '{' WHERE key = 'a'")
    with pytest.raises(OperatorError, match=r"the row a of .* is damaged") as caught:
        store.read(("a",))
    assert "backup" in caught.value.hint


def test_a_replica_is_refused_until_it_is_the_primary_and_then_has_every_commit() -> None:
    with running() as primary, running(primary) as replica:
        primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        primary.execute("SELECT pg_reload_conf()")
        primary.until("SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'")
        with pytest.raises(OperatorError, match="read-only") as caught:
            PostgresState(replica.url(), "node")
        assert "connect to the primary" in caught.value.hint
        both = f"{replica.folder},{primary.folder}"
        with closing(PostgresState(primary.url(host=both), "node")) as store:
            for turn in range(10):
                assert store.transact(claim(f"a/{turn}", turn)) == "committed"
            primary.kill()
            assert store._session is not None
            _until(store._session.is_lost)
            with pytest.raises(StateUnreachable):
                store.transact(claim("b", 1))
            replica.execute("SELECT pg_promote()")
            replica.until_ready()
            assert store.transact(claim("b", 1)) == "committed"
            assert len(store.read(("a/",))) == 10
