"""Runs a machine under asyncio: delivers messages and timers, carries out effects.

`papaya/sim/hosts.py` does the same under virtual time. Everything runs on one event loop, except
blocking work (the state store, heavy work), which runs on threads and whose results are messages.
If a machine raises, its state is unchanged; the peer gets an answer and the server goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from papaya.aggregator.aggregator import Aggregator
from papaya.aggregator.upload import Owner
from papaya.aggregator.work import (
    DeleteBlobs,
    Drop,
    Fold,
    Forget,
    GetOffers,
    Keep,
    Restore,
    Snapshot,
    Step,
)
from papaya.clock import Clock
from papaya.errors import ProtocolError
from papaya.machine import (
    Effect,
    Effects,
    Forward,
    Handle,
    Log,
    Machine,
    Read,
    Reply,
    Send,
    Transact,
)
from papaya.messages.base import Message, NodeId
from papaya.messages.participation import Chunk, ChunkOffer, Refused, Retry
from papaya.messages.storage import Outcome, Row, Rows, Transacted
from papaya.server.buffers import ArrivingBodies, BufferPool
from papaya.server.logs import log
from papaya.server.state_thread import AsyncState
from papaya.server.workers import Workers

logger = logging.getLogger("papaya.server")

# Back off before retrying a failed store.
_UNKNOWN_DELAY_S = 1.0


class Messenger(Protocol):
    """Carries messages between servers; `papaya/server/peers.py`."""

    def send(self, to: NodeId, message: Message) -> None: ...

    def forward(self, request: Handle, to: NodeId, message: Message) -> None: ...


class Host:
    """One machine of this process. All calls are on the loop."""

    def __init__(
        self, machine: Machine, clock: Clock, state: AsyncState, messenger: Messenger
    ) -> None:
        self.machine = machine
        self._clock = clock
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for = float("inf")
        self._is_running = True
        self._carry_out: dict[type, Callable[[Any], None]] = {
            Send: lambda effect: messenger.send(effect.to, effect.message),
            Reply: self._reply,
            Forward: lambda effect: messenger.forward(effect.request, effect.to, effect.message),
            Transact: self._transact,
            Read: self._read,
            Log: lambda effect: log(effect.event, machine.node),
        }

    def start(self) -> None:
        self._arm()

    def stop(self) -> None:
        """Deliver nothing more to the machine, as if the process had died."""
        self._is_running = False
        if self._timer is not None:
            self._timer.cancel()

    def deliver(self, message: Message, reply_to: Handle = None) -> None:
        if not self._is_running:
            return
        try:
            effects = self.machine.receive(self._clock.now(), message, reply_to)
        except ProtocolError as error:
            self._answer(reply_to, Refused(str(error)[:128], error.hint[:128]))
        except Exception:
            logger.exception("%s failed on %s", self.machine.node, type(message).__name__)
            self._answer(reply_to, Retry("internal server error", 1.0))
        else:
            self.perform(effects)

    def perform(self, effects: Effects) -> None:
        """Carry out each effect, also if an earlier one fails."""
        try:
            for effect in effects:
                try:
                    self._carry_out[type(effect)](effect)
                except Exception:
                    kind = type(effect).__name__
                    logger.exception("%s: effect %s failed", self.machine.node, kind)
        finally:
            self._arm()

    # -- timers -----------------------------------------------------------------------------

    def _arm(self) -> None:
        """Set the timer, unless it fires earlier anyway; it sets itself again then."""
        due = self.machine.next_wake()
        if due < self._armed_for and self._is_running:
            if self._timer is not None:
                self._timer.cancel()
            self._armed_for = due
            wait_s = max(0.0, due - self._clock.now())
            self._timer = self._loop.call_later(wait_s, self._on_timer)

    def _on_timer(self) -> None:
        self._armed_for, self._timer = float("inf"), None
        now = self._clock.now()
        effects: Effects = []
        if self.machine.next_wake() <= now:
            try:
                effects = self.machine.wake(now)
            except Exception:
                logger.exception("%s failed in wake()", self.machine.node)
                self._timer = self._loop.call_later(_UNKNOWN_DELAY_S, self._on_timer)
                return
        self.perform(effects)

    # -- effects ----------------------------------------------------------------------------

    def _reply(self, effect: Reply) -> None:
        self._answer(effect.to, effect.message)

    def _answer(self, to: Handle, message: Message) -> None:
        if to is not None:
            to.answer(message)

    def _transact(self, effect: Transact) -> None:
        done = asyncio.ensure_future(self._state.transact(effect.transaction))
        done.add_done_callback(partial(self._on_transacted, effect.token))

    def _on_transacted(self, token: int, done: asyncio.Future[Outcome]) -> None:
        deliver = partial(self.deliver, Transacted(token, done.result()))
        if done.result() == "unknown":
            self._loop.call_later(_UNKNOWN_DELAY_S, deliver)
        else:
            deliver()

    def _read(self, effect: Read) -> None:
        done = asyncio.ensure_future(self._state.read(effect.prefixes))
        done.add_done_callback(partial(self._on_read, effect.token))

    def _on_read(self, token: int, done: asyncio.Future[dict[str, Row]]) -> None:
        if done.exception() is not None:
            return  # LostHistory: the process is about to stop
        self.deliver(Rows(token, tuple(done.result().items())))


class AggregatorHost(Host):
    """A host with heavy work on threads and chunks in pooled buffers."""

    machine: Aggregator

    def __init__(
        self,
        machine: Aggregator,
        clock: Clock,
        state: AsyncState,
        messenger: Messenger,
        workers: Workers,
        pool: BufferPool,
        tell_arriving_s: float,
    ) -> None:
        """`tell_arriving_s`: how often the machine is told that a body is still being received."""
        super().__init__(machine, clock, state, messenger)
        self.tell_arriving_s = tell_arriving_s
        self.pool = pool
        self.arrivals = ArrivingBodies()
        self.workers = workers
        self._kept: object = None
        heavy: tuple[type[Effect], ...] = (
            GetOffers,
            Forget,
            Fold,
            Snapshot,
            Restore,
            Step,
            DeleteBlobs,
        )
        self._carry_out |= dict.fromkeys(heavy, workers.perform)
        self._carry_out[Keep] = self._keep
        self._carry_out[Drop] = self._drop

    def now(self) -> float:
        return self._clock.now()

    def wants(self, offer: ChunkOffer, reply_to: Handle) -> bool:
        """Whether to read the body. If not, the machine has already answered."""
        try:
            effects = self.machine.receive(self._clock.now(), offer, reply_to)
        except ProtocolError as error:
            self._answer(reply_to, Refused(str(error)[:128], error.hint[:128]))
            return False
        self.perform(effects)
        return not any(isinstance(effect, Reply) and effect.to is reply_to for effect in effects)

    def has_grown(self, owner: Owner) -> bool:
        """May the next chunk of the upload be received into a whole buffer?"""
        return self.machine.has_grown(*owner)

    def take(self, chunk: Chunk, buffer: memoryview, reply_to: Handle) -> None:
        """Deliver a complete chunk. Its buffer stays with the upload, or returns to the pool."""
        self._kept = None
        self.deliver(chunk, reply_to)
        if self._kept is not chunk.data:
            self.pool.give_back(buffer)

    def _keep(self, effect: Keep) -> None:
        self._kept = effect.data
        self.workers.perform(effect)

    def _drop(self, effect: Drop) -> None:
        self.workers.perform(effect)
        self.arrivals.break_off(effect.task, effect.session)
