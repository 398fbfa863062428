"""Ticket keys in the state store, shared by all servers: published first, used to seal later.

    rotate      write a new row; each server reads it at its next heartbeat
    publish_s   after this time every server has read it and starts to seal with it
    retire      delete an older key when no ticket that it sealed can still be valid

Every server must be able to open a ticket that another one sealed, also if it read the rows a
heartbeat ago. So a server seals with a key only if the key's row is `publish_s` old and the server
has known the key for `publish_s` (or since its start). The second rule is needed because a write
with an unknown outcome may appear late, and its row then looks older than it is. `publish_s` covers
a heartbeat between reads, a heartbeat of clock difference, and a heartbeat for the commit.

Each refresh decides which key seals. Keys are written to the state store and nowhere else.
"""

from __future__ import annotations

from itertools import pairwise

from papaya.errors import OperatorError
from papaya.messages.storage import TICKET_KEYS, TicketKeyRow, Transaction, ticket_key_key
from papaya.messages.tickets import Keyring
from papaya.secagg.words import Entropy
from papaya.server.state_thread import AsyncState

KEY_BYTES = 32
_ATTEMPTS = 5
_FIRST = 1


class TicketKeys:
    """One server's view of the keys. `keyring` stays the same object; `refresh` changes it."""

    def __init__(
        self, state: AsyncState, rows: dict[int, TicketKeyRow], now: float, publish_s: float
    ) -> None:
        self._state = state
        self._publish_s = publish_s
        self._rows = rows
        self._seen_at = dict.fromkeys(rows, float("-inf"))
        self.keyring = Keyring({key_id: row.key for key_id, row in rows.items()})
        self._use(now)

    def sealing_key(self, now: float) -> int:
        """The newest key that all servers know; the oldest key if there is no such key."""
        known = [key_id for key_id in self._rows if self._is_known_everywhere(now, key_id)]
        return max(known, default=min(self._rows))

    def newest_age_s(self, now: float) -> float:
        return now - self._rows[max(self._rows)].created

    async def refresh(self, now: float) -> None:
        """Call it every heartbeat. If the store raises, the keys stay as they are."""
        rows = await _read(self._state)
        if rows:  # no server deletes the newest key: without rows, the store was replaced
            self._rows = rows
            self._seen_at = {key_id: self._seen_at.get(key_id, now) for key_id in rows}
        self._use(now)

    async def rotate(self, now: float, entropy: Entropy, ticket_life_s: float) -> bool:
        """Publish a new key and retire old ones. False while the last one is not in use yet.

        `ticket_life_s` is the longest validity of a ticket, over all tasks. If two servers rotate
        at the same time, one succeeds, and both know the new key afterwards.
        """
        await self.refresh(now)
        newest = max(self._rows)
        if not self._is_known_everywhere(now, newest):
            return False
        key, row = ticket_key_key(newest + 1), TicketKeyRow(entropy(KEY_BYTES), now)
        transaction = Transaction(
            require=((ticket_key_key(newest), self._rows[newest]), (key, None)),
            put=((key, row),),
            delete=tuple(map(ticket_key_key, self._retired(now, ticket_life_s))),
        )
        await self._state.transact(transaction)
        await self.refresh(now)  # the rows show whether it was committed
        return max(self._rows) > newest

    def _retired(self, now: float, ticket_life_s: float) -> list[int]:
        """Keys whose successor has sealed at every server for longer than a ticket is valid."""
        # Commit, read, wait for publish_s, next refresh, clock difference: the slowest server may
        # seal with the old key for two publish_s. The third is a safety margin.
        since_s = ticket_life_s + 3 * self._publish_s
        ids = sorted(self._rows)
        return [
            old
            for old, successor in pairwise(ids)
            if now - self._rows[successor].created >= since_s
        ]

    def _is_known_everywhere(self, now: float, key_id: int) -> bool:
        since = max(self._rows[key_id].created, self._seen_at[key_id])
        return now - since >= self._publish_s

    def _use(self, now: float) -> None:
        keys = {key_id: row.key for key_id, row in self._rows.items()}
        self.keyring.replace(keys, self.sealing_key(now))


async def load_or_create(
    state: AsyncState, now: float, entropy: Entropy, publish_s: float
) -> TicketKeys:
    """The keys in the store; creates the first key if there is none."""
    for _ in range(_ATTEMPTS):
        rows = await _read(state)
        if rows:
            return TicketKeys(state, rows, now, publish_s)
        first = ticket_key_key(_FIRST)
        row = TicketKeyRow(entropy(KEY_BYTES), now)
        # Always read it back: only a key that is in the store may seal.
        await state.transact(Transaction(require=((first, None),), put=((first, row),)))
    raise OperatorError(
        "cannot store the first ticket key",
        hint="the log says why the state store failed; check for a full disk",
    )


async def _read(state: AsyncState) -> dict[int, TicketKeyRow]:
    rows = await state.read((TICKET_KEYS,))
    return {
        int(key.removeprefix(TICKET_KEYS)): row
        for key, row in rows.items()
        if isinstance(row, TicketKeyRow)
    }
