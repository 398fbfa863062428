"""Runs a machine under asyncio: messages and timers in, effects carried out.

`papaya/sim/hosts.py` is the same under virtual time. Everything happens on one event loop; what
blocks (the state store, heavy work) happens on threads and comes back as messages. A machine that
raises has not changed: its peer is answered and the server lives on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from papaya.aggregator.aggregator import Aggregator
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
from papaya.machine import Effect, Effects, Forward, Handle, Machine, Read, Reply, Send, Transact
from papaya.messages.base import Message, NodeId
from papaya.messages.participation import Chunk, ChunkOffer, Refused, Retry
from papaya.messages.storage import Outcome, Row, Rows, Transacted
from papaya.server.buffers import ArrivingBodies, BufferPool
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
        }

    def start(self) -> None:
        self._arm()

    def stop(self) -> None:
        """From here on the machine hears nothing, as if the process had died."""
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
            logger.exception("%s could not take %s", self.machine.node, type(message).__name__)
            self._answer(reply_to, Retry("the server has a problem", 1.0))
        else:
            self.perform(effects)

    def perform(self, effects: Effects) -> None:
        """Each on its own: one that fails must not take the others with it."""
        try:
            for effect in effects:
                try:
                    self._carry_out[type(effect)](effect)
                except Exception:
                    kind = type(effect).__name__
                    logger.exception("%s: %s could not be carried out", self.machine.node, kind)
        finally:
            self._arm()

    # -- timers -----------------------------------------------------------------------------

    def _arm(self) -> None:
        """One timer is enough: an early one re-arms itself when it fires."""
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
                logger.exception("%s could not wake", self.machine.node)
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
        self.deliver(Rows(token, tuple(done.result().items())))


class AggregatorHost(Host):
    """Adds heavy work on threads, and chunks in pooled buffers."""

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
        """`tell_arriving_s`: how often the machine hears of a body that is still arriving."""
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
        """Should the body be read? If not, the machine has answered."""
        try:
            effects = self.machine.receive(self._clock.now(), offer, reply_to)
        except ProtocolError as error:
            self._answer(reply_to, Refused(str(error)[:128], error.hint[:128]))
            return False
        self.perform(effects)
        return not any(isinstance(effect, Reply) and effect.to is reply_to for effect in effects)

    def take(self, chunk: Chunk, buffer: memoryview, reply_to: Handle) -> None:
        """A chunk is there. Its buffer stays with the upload, or goes back to the pool."""
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
