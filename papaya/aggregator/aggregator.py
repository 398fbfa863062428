"""The Aggregator (paper, "Aggregator" and "Persistent Aggregator"): persistent, many tasks each.

It takes a task when orders name it and the fence row agrees, passes requests to the held task
(`held_task.py`), and reports demand and health to the Coordinator. Every write requires the fence
row; if that row names another holder, the aggregator stops serving the task. Requests of devices
come through selectors. If it has an `upload_url`, chunks and Complete may also come directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from papaya.aggregator.held_task import SERVING, HeldTask, TaskPhase
from papaya.aggregator.upload import UploadMemory
from papaya.aggregator.work import (
    Arriving,
    Delayed,
    Folded,
    Forget,
    Growing,
    Lost,
    Offered,
    Restored,
    Snapshotted,
    StepFailed,
    Stepped,
)
from papaya.config import ServerConfig, TaskConfig
from papaya.errors import ProtocolError, TicketError
from papaya.machine import Effects, Handle, Log, Read, Reply, Send, stopped_s
from papaya.messages.base import Message, NodeId, SessionId, TaskId
from papaya.messages.control import AggregatorOrders, AggregatorReport, Drain, Placement
from papaya.messages.events import ServerEvent
from papaya.messages.participation import Alive, Heartbeat, Refused, Retry, Ticketed
from papaya.messages.storage import FenceRow, Revoked, Rows, TaskRow, Transacted, task_key
from papaya.messages.tickets import Keyring, claim_of


class Aggregator:
    """All tasks that one aggregator holds.

    Invariant: at most one HeldTask per task, with the highest sequence number it was given.
    """

    def __init__(
        self,
        node: NodeId,
        boot: int,
        now: float,
        config: ServerConfig,
        keyring: Keyring,
        coordinators: Sequence[NodeId],
        upload_bytes: float = float("inf"),
        upload_url: str = "",
    ) -> None:
        """`upload_bytes`: how much memory the driver has for uploads.

        `upload_url`: where devices can upload to this aggregator without a selector in between;
        empty if they cannot.
        """
        self.node = node
        # The number of this start of the node. A restarted aggregator holds nothing.
        self.boot = boot
        self.tasks: dict[TaskId, HeldTask] = {}
        # The process is about to stop, and whether no other aggregator could take its tasks: it
        # has no peers, or the leader says so.
        self._is_draining = False
        self._is_alone = False
        self._is_last = False
        # The tasks whose last record was reported.
        self._drained: tuple[TaskId, ...] = ()
        # The highest epoch of a leader that sent orders, and the number of its newest orders.
        self.epoch = 0
        self._orders = 0
        # When the last orders arrived; the start of the process before that.
        self.led_at = now

        self._config = config
        self._keyring = keyring
        self._coordinators = tuple(coordinators)
        self._upload_url = upload_url
        # Shared by all tasks.
        self._memory = UploadMemory(upload_bytes, config.heartbeat_s)
        # Tokens of storage requests.
        self._tokens = count(1)
        # Events of the current call, of all tasks.
        self._events: list[ServerEvent] = []
        # Devices that may not take part.
        self._revoked: tuple[str, ...] = ()
        # Secure tasks that were taken away, by the token of the read that tells whether they ended.
        self._left: dict[int, tuple[TaskConfig, ...]] = {}

        # The number and the time of the last report, and when the next one is due.
        self._number = 0
        self._reported_at = -float("inf")
        self._report_due = now
        # The next heartbeat, the last call of `wake`, and the last call of any kind.
        self._next_beat = now
        self._woken_at = now
        self._now = now

    # -- the machine contract ---------------------------------------------------------------

    def receive(self, now: float, message: Message, reply_to: Handle = None) -> Effects:
        if type(message) is Heartbeat and self.touch(now, message):
            return [Reply(reply_to, Alive())]
        self._listen(now)
        if isinstance(message, Ticketed):
            return self._finish(now, self._on_request(now, message, reply_to))
        match message:
            case (
                Folded()
                | Snapshotted()
                | Stepped()
                | StepFailed()
                | Restored()
                | Lost()
                | Delayed()
                | Offered()
            ):
                effects = self._on_work(now, message)
            case Arriving():
                effects = self._on_arriving(now, message)
            case Growing():
                effects = self._on_growing(now, message)
            case Transacted() | Rows():
                effects = self._on_stored(now, message)
            case AggregatorOrders():
                effects = self._on_orders(now, message)
            case Revoked():
                effects = self._on_revoked(message)
            case Drain():
                effects = self._on_drain(now, message)
            case _:
                raise ProtocolError(f"an aggregator does not accept {type(message).__name__}")
        return self._finish(now, effects)

    def wake(self, now: float) -> Effects:
        self._listen(now)
        self._woken_at = now
        effects: Effects = []
        for held in self.tasks.values():
            if held.phase is SERVING and held.next_wake() <= now:
                effects += held.wake(now)
        if now >= self._next_beat:
            effects += self._beat(now)
        return self._finish(now, effects)

    def next_wake(self) -> float:
        # Without calls of `min`: the driver asks after every event.
        due = self._next_beat if self._next_beat < self._report_due else self._report_due
        for held in self.tasks.values():
            if (wake := held.next_wake()) < due:
                due = wake
            if self._woken_at < held.slots.adopts_until < due:
                due = held.slots.adopts_until
        return due

    def check(self) -> None:
        self._memory.check()
        for held in self.tasks.values():
            held.check()

    @property
    def may_stop(self) -> bool:
        """Draining is over: other aggregators hold the tasks, or all is recorded and none can."""
        return not self.tasks or (
            (self._is_alone or self._is_last)
            and all(held.is_drained for held in self.tasks.values())
        )

    @property
    def uploads(self) -> int:
        """The number of uploads in progress, of all tasks."""
        return sum(held.sessions.uploads for held in self.tasks.values())

    def _listen(self, now: float) -> None:
        """After a stop of the process, requests of clients wait to be read."""
        stop_s = stopped_s(self._now, now, self._config.heartbeat_s)
        self._now = now
        if stop_s > 0:
            self._memory.extend(stop_s)
            for held in self.tasks.values():
                held.sessions.listen_again(now)
                held.slots.adopts_until += stop_s

    # -- clients and work -------------------------------------------------------------------

    def touch(self, now: float, heartbeat: Heartbeat) -> bool:
        """Note that a known client is alive, if `Alive` is all that its heartbeat leads to.

        Half of all requests are such heartbeats. After the last event nothing was left to do, so
        they need no `_finish`. False: nothing was done.
        """
        self._listen(now)
        if now >= self._report_due or self._is_draining:
            return False
        for each in self.tasks.values():
            if each.slots.may_want_more:
                return False
        try:
            claim = claim_of(heartbeat.ticket)
        except TicketError:
            return False
        held = self.tasks.get(claim.task)
        if held is None or held.phase is not SERVING or held.must_wake(now):
            return False
        return held.participants.touch(now, heartbeat.ticket, claim)

    def _on_request(self, now: float, request: Ticketed, reply_to: Handle) -> Effects:
        try:
            claim = claim_of(request.ticket)
        except TicketError as error:
            return [Reply(reply_to, Refused(str(error), error.hint))]
        held = self.tasks.get(claim.task)
        if held is None or held.phase is not SERVING:
            after_s = min(1.0, self._config.heartbeat_s / 4)  # a successor may hold it already
            reason = "this aggregator does not hold the task" if held is None else held.phase.value
            return [Reply(reply_to, Retry(reason, after_s, elsewhere=True))]
        if held.must_wake(now):
            return held.wake(now) + held.requests.answer(now, request, claim, reply_to)
        return held.requests.answer(now, request, claim, reply_to)

    def _on_work(
        self,
        now: float,
        message: (
            Folded | Snapshotted | Stepped | StepFailed | Restored | Lost | Delayed | Offered
        ),
    ) -> Effects:
        held = self.tasks.get(message.task)
        if held is None or held.fence.seq != message.seq:
            return []
        if isinstance(message, Snapshotted | Stepped | StepFailed | Restored | Lost):
            held.delays["blobs"] = ""  # storage has answered
        match message:
            case Folded():
                return held.queue.on_folded(now, message)
            case Snapshotted():
                return held.on_snapshotted(message)
            case Stepped():
                return held.on_stepped(now, message)
            case StepFailed():
                return held.on_step_failed(message)
            case Lost():
                return held.on_lost(message)
            case Delayed():
                held.delays[message.cause] = message.reason
                return []
            case Restored():
                return held.on_restored(now)
            case Offered():
                return held.on_offered(now, message)

    def _on_arriving(self, now: float, message: Arriving) -> Effects:
        """Part of a chunk has arrived: the client is slow, not silent."""
        held = self.tasks.get(message.task)
        session = held.sessions.active.get(message.session) if held is not None else None
        if session is not None:
            session.seen_at = now
            if session.claim is not None:
                self._memory.arrived(now, session.claim, message.count)
        return []

    def _on_growing(self, now: float, message: Growing) -> Effects:
        held = self.tasks.get(message.task)
        session = held.sessions.active.get(message.session) if held is not None else None
        if held is None or session is None or session.claim is None or session.is_complete:
            return []  # a late copy of a chunk: the update may be in the sum already
        return (
            [] if self._memory.may_grow(now, session.claim) else held.endings.drop_upload(session)
        )

    def has_grown(self, task: TaskId, session: SessionId) -> bool:
        """May the next chunk be received into a whole buffer? See `Growing`."""
        held = self.tasks.get(task)
        found = held.sessions.active.get(session) if held is not None else None
        return found is not None and found.claim is not None and found.claim.has_grown

    def _on_stored(self, now: float, message: Transacted | Rows) -> Effects:
        for held in self.tasks.values():
            if held.awaits(message.token):
                if isinstance(message, Transacted):
                    return held.on_transacted(now, message)
                effects = held.on_rows(message)
                if held.phase is TaskPhase.STOPPED:
                    del self.tasks[held.task]
                    if held.offers is not None:
                        effects += self._on_left(tuple(held.ledger.terms.values()), message)
                return effects
        if isinstance(message, Rows) and message.token in self._left:
            return self._on_left(self._left.pop(message.token), message)
        return []

    def _on_revoked(self, message: Revoked) -> Effects:
        self._revoked = message.devices
        return [effect for held in self.tasks.values() for effect in held.revoke(self._revoked)]

    def _leave(self, held: HeldTask) -> Effects:
        """The task moved, was revised, or is over. The rows tell which."""
        effects = held.stop()
        if held.offers is None:
            return effects
        token = next(self._tokens)
        self._left[token] = tuple(held.ledger.terms.values())
        return [*effects, Read(token, (task_key(held.task),))]

    def _on_left(self, terms: tuple[TaskConfig, ...], rows: Rows) -> Effects:
        """Tell the TSA which public parameters no holder needs any more.

        `terms`: the settings of the task, including those that its last revisions replaced.
        """
        task = terms[0].task
        row = dict(rows.rows).get(task_key(task))
        if isinstance(row, TaskRow) and not row.is_over:
            # The next holder does not know the settings that are no longer stored.
            stored = [row.config.manifest, *(e.config.manifest for e in row.earlier)]
            return [Forget(config) for config in terms if config.manifest not in stored]
        return [] if task in self.tasks else [Forget(config) for config in terms]

    # -- orders and reports -----------------------------------------------------------------

    def _on_orders(self, now: float, orders: AggregatorOrders) -> Effects:
        if orders.boot != self.boot or (orders.epoch, orders.number) <= (self.epoch, self._orders):
            return []
        if orders.epoch > self.epoch:
            for held in self.tasks.values():
                held.slots.promises.begin_epoch(orders.epoch)
            self._report_due = now  # until then the new leader assigns no clients here
        self.epoch, self._orders = orders.epoch, orders.number
        self._is_last = orders.is_last
        self.led_at = now
        for held in self.tasks.values():
            held.slots.confirmations.acknowledge(orders.acked)
        given = {placement.task: placement for placement in orders.tasks}
        effects: Effects = []
        for task in [task for task in self.tasks if task not in given]:
            effects += self._leave(self.tasks.pop(task))
        for placement in given.values():
            effects += self._take(placement)
        return effects

    def _take(self, placement: Placement) -> Effects:
        held = self.tasks.get(placement.task)
        effects: Effects = []
        if held is not None:
            if held.fence.seq >= placement.seq:
                return []
            effects += self._leave(self.tasks.pop(placement.task))
        if self._is_draining:
            return effects  # it has to move anyway
        fence = FenceRow(placement.seq, self.node, self.boot)
        held = HeldTask(
            placement.task,
            fence,
            self.epoch,
            placement.leases,
            placement.active,
            self._config,
            self._keyring,
            self._memory,
            self._tokens,
            self._events,
            self._upload_url,
        )
        self.tasks[placement.task] = held
        return [*effects, *held.revoke(self._revoked), *held.load()]

    def _on_drain(self, now: float, drain: Drain) -> Effects:
        """The process is about to stop: make the last records, so that the tasks can move."""
        self._is_draining = True
        self._is_alone |= drain.is_alone
        self._report_due = now
        effects: Effects = []
        for held in self.tasks.values():
            effects += held.drain(drops_uploads=drain.drops_uploads)
        return effects

    def _go_on_draining(self, now: float) -> Effects:
        effects: Effects = []
        for held in self.tasks.values():
            effects += held.record_now(now)
        drained = tuple(task for task, held in self.tasks.items() if held.is_drained)
        if drained != self._drained:
            self._drained = drained
            self._report_due = now
        return effects

    def _beat(self, now: float) -> Effects:
        self._next_beat = now + self._config.heartbeat_s
        effects: Effects = []
        for held in self.tasks.values():
            held.sessions.forget(now)
            if held.phase is SERVING:
                effects += held.queue.free_waiting(now)
            elif held.phase is TaskPhase.HALTED:
                effects += held.load()  # the owner may have changed the rows
        return effects + self._report(now, heartbeat=True)

    def _report(self, now: float, *, heartbeat: bool) -> Effects:
        self._number += 1
        self._reported_at = now
        self._report_due = float("inf")
        reports = tuple(
            held.report(now, self._number)
            for held in self.tasks.values()
            if held.has_served
            or held.halted_because
            or (held.delayed_because and not self._is_draining)  # or it would move
        )
        report = AggregatorReport(
            node=self.node,
            boot=self.boot,
            number=self._number,
            at=now,
            epoch=self.epoch,
            load=self._load(now) if heartbeat else 0.0,
            heartbeat=heartbeat,
            tasks=reports,
            draining=self._is_draining,
        )
        return [Send(coordinator, report) for coordinator in self._coordinators]

    def _load(self, now: float) -> float:
        """Share of the memory in use, plus what was turned away since the last heartbeat."""
        turned_away = sum(held.requests.turned_away_bytes for held in self.tasks.values())
        for held in self.tasks.values():
            held.requests.turned_away_bytes = 0
        return self._memory.used(now) + turned_away / self._memory.total_bytes

    def _finish(self, now: float, effects: Effects) -> Effects:
        """After every event: drop what lost its memory, and report a rise in demand and its end,
        limited to the minimum report interval.
        """
        if self._memory.taken_back:
            effects += self._drop_taken_back()
        if self._is_draining:
            effects += self._go_on_draining(now)
        for held in self.tasks.values():
            slots = held.slots
            is_news = slots.reported_demand > 0 and held.pipeline.has_all_updates
            if slots.may_want_more:
                slots.may_want_more = now < slots.adopts_until
                is_news |= held.demand(now) > slots.promises.count
            if is_news:
                due = max(now, self._reported_at + self._config.min_report_interval_s)
                self._report_due = min(self._report_due, due)
        if now >= self._report_due:
            effects += self._report(now, heartbeat=False)
        if self._events:
            effects = [*(Log(event) for event in self._events), *effects]
            self._events.clear()
        return effects

    def _drop_taken_back(self) -> Effects:
        """Their clients send the chunks again."""
        claims, self._memory.taken_back = self._memory.taken_back, []
        effects: Effects = []
        for task, session_id in (claim.owner for claim in claims):
            held = self.tasks.get(task)
            session = held.sessions.active.get(session_id) if held is not None else None
            if held is not None and session is not None:
                held.counters["uploads_taken_back"] += 1
                effects += held.endings.drop_upload(session)
        return effects
