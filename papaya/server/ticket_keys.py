"""Ticket keys in the state store, shared by all servers: published first, used to seal later.

    rotate      a new row: from here on servers find it, each at its next heartbeat
    publish_s   later every server has read it, and each begins to seal with it
    retire      an older key goes once nothing that it sealed can still be valid

A ticket sealed by one server must open at every other, also at one that read the rows a heartbeat
ago. So a server seals with a key only when the key is `publish_s` old by its row and, unless it was
there when the server started, was seen here for `publish_s`: a write whose outcome was unknown may
appear late, and then its row looks older than it is. `publish_s` covers a heartbeat between reads,
a heartbeat by which clocks disagree, and a heartbeat that a commit may take.

Which key seals is decided at each refresh. A key leaves this process for the state store only.
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
        """The newest that everybody knows; the oldest when that can be said of none."""
        known = [key_id for key_id in self._rows if self._is_known_everywhere(now, key_id)]
        return max(known, default=min(self._rows))

    def newest_age_s(self, now: float) -> float:
        return now - self._rows[max(self._rows)].created

    async def refresh(self, now: float) -> None:
        """To be called every heartbeat. Raises what the store raises; the keys then stay."""
        rows = await _read(self._state)
        if rows:  # nobody deletes the newest: rows that are gone are a store that was replaced
            self._rows = rows
            self._seen_at = {key_id: self._seen_at.get(key_id, now) for key_id in rows}
        self._use(now)

    async def rotate(self, now: float, entropy: Entropy, ticket_life_s: float) -> bool:
        """Publish a new key and retire old ones. False while the last one is not in use yet.

        `ticket_life_s` is the longest that any ticket is valid, over all tasks. Of two servers that
        rotate at once one succeeds, and both know the key afterwards.
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
        await self.refresh(now)  # whatever the outcome was, the rows tell
        return max(self._rows) > newest

    def _retired(self, now: float, ticket_life_s: float) -> list[int]:
        """Keys whose successor has been sealing at every server for longer than a ticket lives."""
        # Committed, read, seen for publish_s, used at the refresh after that, clocks that disagree:
        # the slowest server may seal with the old key for two publish_s, and a third is for safety.
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
    """The keys in the store; the first one is made by whoever comes first."""
    for _ in range(_ATTEMPTS):
        rows = await _read(state)
        if rows:
            return TicketKeys(state, rows, now, publish_s)
        first = ticket_key_key(_FIRST)
        row = TicketKeyRow(entropy(KEY_BYTES), now)
        # Read back, always: only a key that is in the store may seal anything.
        await state.transact(Transaction(require=((first, None),), put=((first, row),)))
    raise OperatorError(
        "the first ticket key could not be stored",
        hint="the log says why the state store does not commit: is its disk full?",
    )


async def _read(state: AsyncState) -> dict[int, TicketKeyRow]:
    rows = await state.read((TICKET_KEYS,))
    return {
        int(key.removeprefix(TICKET_KEYS)): row
        for key, row in rows.items()
        if isinstance(row, TicketKeyRow)
    }
