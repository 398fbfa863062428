"""Hosts: processes that run a machine, carry out its effects, crash, pause and come back.

A crash loses the machine and everything in memory; the stores keep what was committed. A paused
process does nothing, and handles everything that arrived when it resumes. Each process has a clock
of its own, which never goes back while it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from papaya.aggregator.aggregator import Aggregator
from papaya.aggregator.shards import NewBlobs, Shards
from papaya.aggregator.work import (
    DeleteBlobs,
    Drop,
    Fold,
    Forget,
    GetOffers,
    Keep,
    Lost,
    Restore,
    Restored,
    Snapshot,
    Step,
)
from papaya.errors import InvariantError, MissingBlob, ProtocolError
from papaya.machine import Effects, Forward, Handle, Log, Machine, Read, Reply, Send, Transact
from papaya.messages.base import Message, NodeId
from papaya.messages.participation import Heartbeat, Ticketed
from papaya.messages.storage import Outcome, Row, Rows, Transacted
from papaya.selector.selector import Selector

if TYPE_CHECKING:
    from papaya.sim.cluster import Cluster
    from papaya.sim.devices import Path

# The arguments are the number of the boot and the time.
MakeMachine = Callable[[int, float], Machine]

# A timer of a wrong clock fires this late, so that rounding cannot make it early.
_ROUNDING_S = 1e-9


class SimulatedHost:
    """One server process. Every start has the next boot number."""

    def __init__(self, cluster: Cluster, node: NodeId, make: MakeMachine) -> None:
        self.cluster = cluster
        self.node = node
        self.is_alive = False
        self.boots = 0
        # How far this process's clock is ahead of the right time.
        self.clock_ahead_s = 0.0
        # The clock of this boot was ahead at some time.
        self.was_ahead = False
        self._suspended_at: float | None = None
        self.machine: Machine
        self._make = make
        self._engine = cluster.engine
        self.carry = cluster.network.carry
        self._after_event = cluster.hooks.after_event
        self._armed_for = float("inf")
        self._paused: list[tuple[Callable[..., None], tuple[Any, ...]]] | None = None
        self._carry_out: dict[type, Callable[[Any], None]] = {
            Send: self._send,
            Reply: self._reply,
            Forward: self._forward,
            Transact: self._transact,
            Read: self._read,
            Log: self._log,
        }

    # -- life -------------------------------------------------------------------------------

    def start(self, clock_ahead_s: float = 0.0) -> None:
        self.boots += 1
        self.is_alive = True
        self._paused = self._suspended_at = None
        self._armed_for = float("inf")
        self.was_ahead = False
        self._set_clock(clock_ahead_s)
        self.machine = self._make(self.boots, self.now)
        self._arm()

    @property
    def now(self) -> float:
        return self._engine.now + self.clock_ahead_s

    def jump_ahead(self, seconds: float) -> None:
        """The clock of this process jumps."""
        if self.is_alive and self._paused is None:
            self._set_clock(self.clock_ahead_s + seconds)
            self._armed_for = float("inf")
            self._arm()

    def suspend(self, seconds: float) -> None:
        """Pause with a clock that stands still meanwhile."""
        if self.is_alive and self._paused is None:
            self.pause()
            self._suspended_at = self._engine.now
            self._engine.after(seconds, self.resume)

    def _set_clock(self, ahead_s: float) -> None:
        self.clock_ahead_s = ahead_s
        self.was_ahead |= ahead_s > 0
        self.cluster.clocks_were_right &= ahead_s == 0.0

    def crash(self) -> None:
        self.is_alive = False
        self._paused = None

    def pause(self) -> None:
        if self.is_alive and self._paused is None:
            self._paused = []

    def resume(self) -> None:
        if self._paused is not None:
            if self._suspended_at is not None:
                slept_s = self._engine.now - self._suspended_at
                self._set_clock(self.clock_ahead_s - slept_s)
                self._suspended_at = None
            waiting, self._paused = self._paused, None
            for handler, arguments in waiting:
                handler(*arguments)
            self._armed_for = float("inf")
            self._arm()

    # -- running the machine ----------------------------------------------------------------

    def deliver(self, message: Message, reply_to: Handle = None) -> None:
        if not self.is_alive:
            return
        if self._paused is not None:
            self._paused.append((self.deliver, (message, reply_to)))
            return
        try:
            now = self._engine.now + self.clock_ahead_s
            effects = self.machine.receive(now, message, reply_to)
        except ProtocolError:
            return
        self.perform(effects)

    def take(self, request: Message, path: Path) -> None:
        """A request of a device arrives."""
        self.deliver(request, path)

    @property
    def _may_shorten(self) -> bool:
        """Whether messages that change nothing may be left out: it runs, and no observer looks."""
        return self.cluster.may_shorten and self.is_alive and self._paused is None

    def perform(self, effects: Effects) -> None:
        carry_out = self._carry_out
        for effect in effects:
            carry_out[type(effect)](effect)
        for observe in self._after_event:
            observe(self)
        self._arm()

    def _arm(self) -> None:
        """One timer is enough: an early one re-arms itself when it fires."""
        due = self.machine.next_wake()
        if due < self._armed_for:
            self._armed_for = due
            at = due - self.clock_ahead_s + _ROUNDING_S if self.clock_ahead_s else due
            self._engine.at(max(at, self._engine.now), self._on_timer, self.boots, due)

    def _on_timer(self, boot: int, due: float) -> None:
        if boot != self.boots or not self.is_alive or due != self._armed_for:
            return
        if self._paused is not None:
            return
        self._armed_for = float("inf")
        now = self.now
        if self.machine.next_wake() <= now:
            self.perform(self.machine.wake(now))
            if self.machine.next_wake() <= now:
                raise InvariantError(f"{self.node} woke at {now} and wants to wake again at once")
        else:
            self._arm()

    def local(self, delay_s: float, handler: Callable[..., None], *arguments: Any) -> None:
        """Something of this process: it is lost when the process dies first."""
        self._engine.after(delay_s, self._run_local, self.boots, handler, arguments)

    def _run_local(
        self, boot: int, handler: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        if boot == self.boots and self.is_alive:
            if self._paused is not None:
                self._paused.append((handler, arguments))
            else:
                handler(*arguments)

    # -- effects ----------------------------------------------------------------------------

    def _log(self, effect: Log) -> None:
        for observe in self.cluster.hooks.logged:
            observe(self, effect.event)

    def _send(self, effect: Send) -> None:
        cluster, message = self.cluster, effect.message
        if not cluster.may_shorten:
            message = cluster.wire(self.node, effect.to, message)
        self.carry(self.node, effect.to, 1, cluster.hosts[effect.to].deliver, message)

    def _reply(self, effect: Reply) -> None:
        if (path := effect.to) is None:
            return
        cluster, message = self.cluster, effect.message
        if not cluster.may_shorten:
            for observe in cluster.hooks.reply:
                observe(self, effect)
            message = cluster.wire(self.node, path.device_name, message)
        path.answer(self, message)

    def _forward(self, effect: Forward) -> None:
        target = effect.to
        deliver = self.cluster.hosts[target].deliver
        self.carry(self.node, target, 1, deliver, effect.message, effect.request)

    def _transact(self, effect: Transact) -> None:
        done = partial(self._transacted, self.boots, effect.token)
        writer = (self.node, self.machine.boot)
        self.cluster.state.transact(writer, effect.transaction, done)

    def _transacted(self, boot: int, token: int, outcome: Outcome) -> None:
        self._run_local(boot, self.deliver, (Transacted(token, outcome),))

    def _read(self, effect: Read) -> None:
        self.cluster.state.read(effect.prefixes, partial(self._rows, self.boots, effect.token))

    def _rows(self, boot: int, token: int, rows: dict[str, Row]) -> None:
        self._run_local(boot, self.deliver, (Rows(token, tuple(rows.items())),))


class SimulatedSelectorHost(SimulatedHost):
    """Takes a shortcut for requests that are only passed on."""

    machine: Selector

    def take(self, request: Message, path: Path) -> None:
        if isinstance(request, Ticketed) and self._may_shorten:
            target = self.machine.route(request)
            if target is not None:
                receive = self.cluster.hosts[target].take
                self.carry(self.node, target, 1, receive, request, path)
                return
        self.deliver(request, path)


class SimulatedAggregatorHost(SimulatedHost):
    """Adds heavy work: done at once by the shared arithmetic, finished after virtual time."""

    machine: Aggregator

    def __init__(self, cluster: Cluster, node: NodeId, make: MakeMachine) -> None:
        super().__init__(cluster, node, make)
        self.freezes_at_work_s = 0.0
        self._noise = Random(f"{cluster.seed}/noise/{node}")
        self._fold_times = Random(f"{cluster.seed}/folds/{node}")
        self._shards = self._new_shards()
        self._carry_out |= {
            GetOffers: self._get_offers,
            Forget: self._forget,
            Keep: self._keep,
            Fold: self._fold,
            Snapshot: self._snapshot,
            Restore: self._restore,
            Step: self._step,
            Drop: self._drop,
            DeleteBlobs: self._delete_blobs,
        }

    def start(self, clock_ahead_s: float = 0.0) -> None:
        self._shards = self._new_shards()
        super().start(clock_ahead_s)

    def _new_shards(self) -> Shards:
        return self.cluster.behaviour.shards(self.cluster.tsa.adapter, self._noise.randbytes)

    def take(self, request: Message, path: Path) -> None:
        """Takes a shortcut for heartbeats: a client does nothing when it gets `Alive`."""
        if type(request) is Heartbeat and self._may_shorten:
            network = self.cluster.network
            if network.is_clear and self.machine.touch(self.now, request):
                network.skip()
                return
        self.deliver(request, path)

    def write_blobs(self, blobs: NewBlobs) -> None:
        """Write and sync, before any row may name them."""
        for key, data in blobs:
            self.cluster.blobs.put(key, data)

    def _get_offers(self, work: GetOffers) -> None:
        self._finish([], self._shards.get_offers(work))

    def _forget(self, work: Forget) -> None:
        self._shards.forget(work)

    def _keep(self, work: Keep) -> None:
        self._shards.keep(work)

    def _drop(self, work: Drop) -> None:
        self._shards.drop(work)

    def _fold(self, work: Fold) -> None:
        """The sum has it at once; the machine hears of it when the thread has told."""
        folded = self._shards.fold(work)
        storage = self.cluster.config.storage
        if storage.fold_s > 0:
            takes = self._fold_times.uniform(0.0, 2.0) if storage.folds_overtake else 1.0
            self.local(takes * storage.fold_s, self.deliver, folded)
        else:
            self.perform(self.machine.receive(self.now, folded))

    def _snapshot(self, work: Snapshot) -> None:
        snapshotted, blobs = self._shards.snapshot(work)
        self._finish(blobs, snapshotted)

    def _step(self, work: Step) -> None:
        try:
            stepped, blobs = self._shards.step(
                work, self.cluster.blobs.get, self.cluster.blobs.get_part
            )
        except MissingBlob as error:
            self._finish([], Lost(work.config.task, work.seq, str(error)))
        else:
            self._finish(blobs, stepped)

    def _restore(self, work: Restore) -> None:
        keep = frozenset(work.garbage_except)
        self.cluster.blobs.sweep(work.config.task, work.seq, keep)
        try:
            self._shards.restore(work, self.cluster.blobs.get)
        except MissingBlob as error:
            self._finish([], Lost(work.config.task, work.seq, str(error)))
        else:
            self._finish([], Restored(work.config.task, work.seq))

    def _finish(self, blobs: NewBlobs, result: Message) -> None:
        """The process may die, or freeze, between any two of: write, sync, tell."""
        self.local(self.cluster.config.storage.blob_s, self._written, blobs, result)
        if self.freezes_at_work_s > 0:
            self.pause()
            self._engine.after(self.freezes_at_work_s, self.resume)
            self.freezes_at_work_s = 0.0

    def _written(self, blobs: NewBlobs, result: Message) -> None:
        self.write_blobs(blobs)
        self.deliver(result)

    def _delete_blobs(self, work: DeleteBlobs) -> None:
        for key in work.blobs:
            self.cluster.blobs.delete(key)
