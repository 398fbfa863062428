"""Ticket keys: one first key, and rotation that no ticket notices."""

from __future__ import annotations

import asyncio
import heapq
from itertools import count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papaya.errors import OperatorError, TicketError
from papaya.messages.storage import Outcome, Row, TicketKeyRow, Transaction, ticket_key_key
from papaya.messages.tickets import AssignmentTicket
from papaya.server.ticket_keys import KEY_BYTES, TicketKeys, load_or_create

HEARTBEAT_S = 10.0
PUBLISH_S = 3 * HEARTBEAT_S
LIFE_S = 100.0
TICKET = AssignmentTicket("task", "session", 1, confirm_by=1.0)


class FakeState:
    """Rows in memory; `outcomes` are what the next transactions report, after they were applied
    ("unknown, applied") or instead of it ("unknown").
    """

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.outcomes: list[str] = []

    async def read(self, prefixes: tuple[str, ...]) -> dict[str, Row]:
        await asyncio.sleep(0)
        return {k: v for k, v in sorted(self.rows.items()) if k.startswith(prefixes)}

    async def transact(self, transaction: Transaction) -> Outcome:
        await asyncio.sleep(0)
        planned = self.outcomes.pop(0) if self.outcomes else ""
        if planned == "unknown":
            return "unknown"
        if any(self.rows.get(key) != row for key, row in transaction.require):
            return "refused"
        for key in transaction.delete:
            del self.rows[key]
        self.rows.update(transaction.put)
        return "unknown" if planned else "committed"


def load(state: FakeState, now: float = 0.0, seed: int = 1) -> TicketKeys:
    return asyncio.run(load_or_create(state, now, Random(seed).randbytes, PUBLISH_S))


def rotate(keys: TicketKeys, now: float, seed: int = 2) -> bool:
    return asyncio.run(keys.rotate(now, Random(seed).randbytes, LIFE_S))


def refresh(keys: TicketKeys, now: float) -> None:
    asyncio.run(keys.refresh(now))


def ids(state: FakeState) -> list[int]:
    return [int(key.rpartition("/")[2]) for key in sorted(state.rows)]


def opens(sealer: TicketKeys, opener: TicketKeys) -> bool:
    try:
        return opener.keyring.open(sealer.keyring.seal(TICKET), AssignmentTicket) == TICKET
    except TicketError:
        return False


# -- the first key --------------------------------------------------------------------------


def test_the_first_key_is_made_stored_and_seals_at_once() -> None:
    state = FakeState()
    keys = load(state, now=7.0)
    assert ids(state) == [1]
    row = state.rows[ticket_key_key(1)]
    assert isinstance(row, TicketKeyRow)
    assert (len(row.key), row.created) == (KEY_BYTES, 7.0)
    assert opens(keys, load(state, seed=9))


@pytest.mark.parametrize("outcomes", [[], ["unknown"], ["unknown, applied"], ["unknown"] * 4])
def test_processes_that_start_at_once_agree(outcomes: list[str]) -> None:
    state = FakeState()
    state.outcomes = outcomes

    async def race() -> list[TicketKeys]:
        starts = [load_or_create(state, 0.0, Random(n).randbytes, PUBLISH_S) for n in range(3)]
        return await asyncio.gather(*starts)

    servers = asyncio.run(race())
    assert ids(state) == [1]
    assert all(opens(a, b) for a in servers for b in servers)


def test_a_store_that_does_not_commit_is_the_operators_to_mend() -> None:
    state = FakeState()
    state.outcomes = ["unknown"] * 100
    with pytest.raises(OperatorError, match="cannot store") as failed:
        load(state)
    assert "disk" in failed.value.hint
    assert state.rows == {}


# -- rotation -------------------------------------------------------------------------------


def test_a_new_key_is_published_first_and_seals_later() -> None:
    state = FakeState()
    one, other = load(state), load(state)
    assert rotate(one, 1000.0)
    assert ids(state) == [1, 2]
    assert one.sealing_key(1000.0) == 1
    assert opens(one, other), "the other has not read the new key yet"
    refresh(other, 1000.0 + HEARTBEAT_S)
    refresh(one, 1000.0 + PUBLISH_S)
    assert one.sealing_key(1000.0 + PUBLISH_S) == 2
    assert opens(one, other)
    assert opens(other, one), "the other still seals with the old key"


def test_a_server_that_starts_later_seals_with_the_key_of_the_others() -> None:
    state = FakeState()
    one = load(state)
    rotate(one, 1000.0)
    assert load(state, now=1001.0).sealing_key(1001.0) == 1
    assert load(state, now=1000.0 + PUBLISH_S).sealing_key(1000.0 + PUBLISH_S) == 2


def test_a_key_that_appears_late_seals_later_still() -> None:
    """A commit of unknown outcome may be applied long after: its row then looks old at once."""
    state = FakeState()
    one, other = load(state), load(state)
    state.rows[ticket_key_key(2)] = TicketKeyRow(b"2" * 32, created=0.0)
    refresh(one, 500.0)
    assert one.sealing_key(500.0) == 1
    assert opens(one, other)
    assert one.sealing_key(500.0 + PUBLISH_S) == 2


def test_a_rotation_waits_until_the_last_one_is_in_use() -> None:
    state = FakeState()
    keys = load(state)
    assert rotate(keys, 1000.0)
    assert not rotate(keys, 1000.0 + PUBLISH_S - 1)
    assert ids(state) == [1, 2]
    assert rotate(keys, 1000.0 + PUBLISH_S)
    assert ids(state) == [1, 2, 3]


def test_two_servers_that_rotate_at_once_add_one_key() -> None:
    state = FakeState()
    one, other = load(state), load(state)

    async def race() -> list[bool]:
        rotations = [
            keys.rotate(1000.0, Random(seed).randbytes, LIFE_S)
            for seed, keys in enumerate((one, other))
        ]
        return await asyncio.gather(*rotations)

    assert asyncio.run(race()) == [True, True]
    assert ids(state) == [1, 2]
    for server in (one, other):
        refresh(server, 1000.0 + PUBLISH_S)
    assert opens(one, other)
    assert opens(other, one)


@pytest.mark.parametrize(("outcome", "rotated"), [("unknown", False), ("unknown, applied", True)])
def test_a_rotation_of_unknown_outcome_is_what_the_rows_say(outcome: str, rotated: bool) -> None:
    state = FakeState()
    keys = load(state)
    state.outcomes = [outcome]
    assert rotate(keys, 1000.0) is rotated
    assert len(state.rows) == 1 + rotated


def test_a_key_is_retired_once_nothing_that_it_sealed_can_be_valid() -> None:
    state = FakeState()
    keys = load(state)
    rotate(keys, 1000.0)
    since_s = LIFE_S + 3 * PUBLISH_S
    rotate(keys, 1000.0 + since_s - 1)
    assert ids(state) == [1, 2, 3]
    rotate(keys, 1000.0 + since_s + PUBLISH_S)
    assert ids(state) == [2, 3, 4]


def test_a_key_that_sealed_for_a_year_is_not_retired_by_its_age() -> None:
    state = FakeState()
    keys = load(state)
    assert rotate(keys, 365 * 86400.0)
    assert ids(state) == [1, 2]
    assert keys.newest_age_s(365 * 86400.0 + 5) == 5.0


def test_the_keys_stay_when_the_store_is_empty() -> None:
    state = FakeState()
    keys = load(state)
    state.rows.clear()
    refresh(keys, 50.0)
    assert opens(keys, keys)


class Fleet:
    """Servers with clocks that disagree, which read the rows at least once per heartbeat."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.state = FakeState()
        self.skews = [rng.uniform(-HEARTBEAT_S / 2, HEARTBEAT_S / 2) for _ in range(4)]
        self.servers: list[TicketKeys | None] = [None] * len(self.skews)
        self.sealed: list[tuple[float, bytes]] = []
        self._order = count()
        self._due: list[tuple[float, int, str, int]] = []

    def schedule(self, at: float, what: str, server: int) -> None:
        heapq.heappush(self._due, (at, next(self._order), what, server))

    async def run(self, until: float) -> None:
        for server in range(len(self.servers)):
            self.schedule(self.rng.uniform(0, 5 * HEARTBEAT_S), "start", server)
        now = 0.0
        while now < until:
            now, _, what, server = heapq.heappop(self._due)
            await self.happens(now, what, server)
            self.check(now)

    async def happens(self, now: float, what: str, server: int) -> None:
        local = 1e6 + now + self.skews[server]
        keys = self.servers[server]
        if what == "start" or keys is None:
            entropy = self.rng.randbytes
            self.servers[server] = await load_or_create(self.state, local, entropy, PUBLISH_S)
        elif what == "rotate":
            await keys.rotate(local, self.rng.randbytes, LIFE_S)
        else:
            await keys.refresh(local)
        if what in ("start", "refresh"):
            restarts = self.rng.random() < 0.02
            after = self.rng.uniform(HEARTBEAT_S / 2, HEARTBEAT_S)
            self.schedule(now + after, "start" if restarts else "refresh", server)
        if self.rng.random() < 0.05:
            self.schedule(now + self.rng.uniform(0, 5), "rotate", server)

    def check(self, now: float) -> None:
        """Every server seals; every ticket that lives opens at every server."""
        self.sealed = [entry for entry in self.sealed if entry[0] + LIFE_S > now]
        live = [keys for keys in self.servers if keys is not None]
        self.sealed += [(now, keys.keyring.seal(TICKET)) for keys in live]
        for _, ticket in {ticket[32:36]: (0, ticket) for _, ticket in self.sealed}.values():
            for keys in live:
                assert keys.keyring.open(ticket, AssignmentTicket) == TICKET


@settings(max_examples=6)
@given(st.integers(0, 2**32))
def test_whoever_seals_and_whenever_keys_rotate_every_live_ticket_opens_everywhere(
    seed: int,
) -> None:
    fleet = Fleet(Random(seed))
    asyncio.run(fleet.run(until=2000.0))
    assert max(ids(fleet.state)) > 3, "keys were rotated"
    assert min(ids(fleet.state)) > 1, "and retired"
