"""Several TSAs: which of them serves a task is a row, so every aggregator asks the same one.

A task without a row goes to the TSA with the fewest tasks that answers. The row keeps the address
for as long as the task runs: seeds in open groups are at that TSA alone, and one that does not
answer may still have them. Another identity at the address is a restart. Then the seeds are lost,
and the row gets the new identity.

Calls block, so make them on threads.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from threading import Lock
from typing import Any, TypeVar

from papaya.aggregator.masked_sum import LOST, TsaError
from papaya.aggregator.tsa import TsaAdapter
from papaya.aggregator.work import UNREACHABLE, StockedOffer
from papaya.messages.participation import SecureOffer
from papaya.messages.storage import TSAS, Outcome, Row, Transaction, TsaRow, tsa_key
from papaya.secagg.parameters import PublicParameters
from papaya.secagg.unmask import TakeBlock
from papaya.server.state_thread import AsyncState
from papaya.server.tsa import TsaConnection
from papaya.tsa.errors import Unavailable

CHILD = ""  # in place of an address: the child process of the aggregator

_STATE_S = 10.0
_ATTEMPTS = 5
_ROW_LIFE_S = 1.0  # a task that was away cannot have changed its TSA and come back earlier
T = TypeVar("T")


class TsaFleet:
    """Implements `Tsa` over the TSAs at `addresses`. Create it on the loop of `state`."""

    def __init__(
        self,
        addresses: Sequence[str],
        connect: Callable[[str], TsaConnection],
        state: AsyncState,
        now: Callable[[], float],
    ) -> None:
        self._addresses = tuple(addresses) or (CHILD,)
        self._connect = connect
        self._state = state
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._guard = Lock()  # of what follows
        self._links: dict[str, TsaConnection] = {}  # by address
        self._rows: dict[bytes, tuple[TsaRow, float]] = {}  # by parameters; when it was read
        self._choosing = Lock()  # guards `_chosen`
        self._chosen: dict[str, str] = {}  # addresses of tasks without a row yet, by key
        for address in self._addresses:
            self._link(address)

    @property
    def links(self) -> tuple[TsaConnection, ...]:
        with self._guard:
            return tuple(self._links.values())

    def stop(self) -> None:
        """Start no TSA any more, and do not wait for one that starts. Does not block."""
        for link in self.links:
            link.stop()

    def close(self) -> None:
        for link in self.links:
            link.close()

    # -- the interface `Tsa` --------------------------------------------------------------------

    def offers(
        self, parameters: PublicParameters, count: int
    ) -> tuple[tuple[StockedOffer, ...], SecureOffer]:
        return self._serving(parameters, begins=True).offers(parameters, count)

    def accept(self, parameters: PublicParameters, index: int, group: int, sealed: bytes) -> None:
        self._serving(parameters).accept(parameters, index, group, sealed)

    def reach(self, parameters: PublicParameters) -> None:
        self._serving(parameters)

    def release(
        self, parameters: PublicParameters, group: int, members: Sequence[int], take: TakeBlock
    ) -> None:
        self._serving(parameters).release(parameters, group, members, take)

    def forget(self, parameters: PublicParameters) -> None:
        digest = parameters.digest()
        row = self._known(digest)
        if row is None:
            return
        self._link(row.address).adapter.forget(parameters)
        with self._guard:
            self._rows.pop(digest, None)
        key = tsa_key(digest)
        self._transact(Transaction(require=((key, row),), delete=(key,)))

    # -- which TSA ------------------------------------------------------------------------------

    def _serving(self, parameters: PublicParameters, *, begins: bool = False) -> TsaAdapter:
        """The TSA of this task. Raises TsaError if it is away, or if it has lost what it held.

        `begins`: the call is about nothing that the TSA should hold already.
        """
        digest = parameters.digest()
        for _ in range(_ATTEMPTS):
            row = self._known(digest)
            if row is None:
                self._assign(digest)
                continue
            link = self._link(row.address)
            identity = _identity(link)
            if identity == row.identity:
                return link.adapter
            if self._put(digest, row, TsaRow(row.address, identity)) and not begins:
                raise TsaError(LOST, f"the TSA at {row.address or 'this server'} was restarted")
        raise TsaError(UNREACHABLE, "the state store does not say which TSA serves this task")

    def _assign(self, digest: bytes) -> None:
        """Choose a TSA that answers. Another aggregator may be faster: its choice counts."""
        key, away = tsa_key(digest), dict[str, TsaError]()
        try:
            while (address := self._choose(key, away)) is not None:
                try:
                    identity = _identity(self._link(address))
                except TsaError as error:
                    away[address] = error
                else:
                    self._put(digest, None, TsaRow(address, identity))
                    return
        finally:
            with self._choosing:
                self._chosen.pop(key, None)
        raise away.popitem()[1]

    def _choose(self, key: str, away: Collection[str]) -> str | None:
        """The address with the fewest tasks, except those in `away`. Tasks that other threads are
        assigning count as soon as an address is chosen, because a TSA may take long to answer.
        """
        with self._choosing:
            rows = self._ask(self._read(TSAS))
            addresses = {k: row.address for k, row in rows.items() if isinstance(row, TsaRow)}
            tasks = Counter((self._chosen | addresses).values())
            left = [address for address in self._addresses if address not in away]
            if not left:
                return None
            self._chosen[key] = min(left, key=lambda address: tasks[address])
            return self._chosen[key]

    def _known(self, digest: bytes) -> TsaRow | None:
        with self._guard:
            row, read_at = self._rows.get(digest, (None, 0.0))
        if row is not None and 0 <= self._now() - read_at < _ROW_LIFE_S:
            return row
        read_at = self._now()
        found = self._ask(self._read(tsa_key(digest))).get(tsa_key(digest))
        if not isinstance(found, TsaRow):
            return None
        with self._guard:
            self._rows[digest] = (found, read_at)
        return found

    def _put(self, digest: bytes, before: TsaRow | None, after: TsaRow) -> bool:
        """True if the row has changed. Otherwise, read it again."""
        with self._guard:
            self._rows.pop(digest, None)
        key = tsa_key(digest)
        put = Transaction(require=((key, before),), put=((key, after),))
        return self._transact(put) == "committed"

    def _link(self, address: str) -> TsaConnection:
        with self._guard:
            if address not in self._links:
                self._links[address] = self._connect(address)
            return self._links[address]

    # -- the state store, from a thread ---------------------------------------------------------

    async def _read(self, prefix: str) -> dict[str, Row]:
        return await self._state.read((prefix,))

    def _transact(self, transaction: Transaction) -> Outcome:
        async def transact() -> Outcome:
            return await self._state.transact(transaction)

        return self._ask(transact())

    def _ask(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result(_STATE_S)
        except TimeoutError:
            raise TsaError(UNREACHABLE, "the state store does not answer") from None


def _identity(link: TsaConnection) -> bytes:
    try:
        return link.identity_public_key
    except Unavailable as error:
        raise TsaError(UNREACHABLE, str(error)) from error
