"""The Coordinator (paper, "System Components"): one leader among candidates.

    "First, it assigns FL tasks to Aggregators [...]. Second, the Coordinator assigns clients to FL
    tasks [...]. Finally, it provides centralized coordination and ensures that tasks progress in
    the face of Aggregator failures."

Rows decide who leads and who holds a task. Reports tell which servers are alive and what demand
there is. Orders are sent only after the rows behind them are committed. The Coordinator never talks
to a device and never sees an update. It assigns clients to a task only after the task's holder has
reported under its epoch: from then on, assignments of earlier leaders have no claim to a slot.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from msgspec.structs import replace

from papaya.config import ServerConfig
from papaya.coordinator.assignment import Leases, assign
from papaya.coordinator.demand import ClientDemand
from papaya.coordinator.fleet import AggregatorView, Fleet
from papaya.coordinator.known_rows import Catalogue, KnownRows
from papaya.coordinator.leader_events import LeaderEvents
from papaya.coordinator.placement import (
    early_choices,
    is_orphan,
    least_loaded,
    relieve,
    workloads,
)
from papaya.coordinator.recovery import Leadership
from papaya.errors import InvariantError, ProtocolError
from papaya.machine import Effects, Handle, Log, Read, Send, Transact, stopped_s
from papaya.messages.base import Message, NodeId, TaskId
from papaya.messages.control import (
    AggregatorOrders,
    AggregatorReport,
    Assignment,
    Drain,
    Placement,
    SelectorOrders,
    SelectorReport,
)
from papaya.messages.selection import DeviceClass
from papaya.messages.storage import (
    EPOCH_KEY,
    FENCES,
    LEADER_KEY,
    MAINTENANCE_KEY,
    SHARES,
    TASKS,
    Changed,
    EpochRow,
    FenceRow,
    LeaderRow,
    Rows,
    Transacted,
    Transaction,
    fence_key,
)

# A report that confirms this many joins is acknowledged at once, to keep the next one short.
_ACKNOWLEDGE_AFTER_JOINS = 16
# An aggregator that reports overload for this many heartbeats gives a task away.
_OVERLOADED_BEATS = 3
_NEVER = float("inf")


class Coordinator:
    """A candidate for leader. Invariant, per task: reported active + leases <= C."""

    def __init__(
        self, node: NodeId, boot: int, now: float, config: ServerConfig, rng: Random
    ) -> None:
        self.node = node
        self.boot = boot
        self._config = config
        self._rng = rng

        # The leader lease: whether this candidate leads, its epoch, its recovery period.
        self.leadership = Leadership(node, boot, config)
        # The rows as last read, and whether that was since this candidate became leader.
        self.rows = KnownRows()
        self._is_loaded = False
        # Events of the current call.
        self._events = LeaderEvents()
        # Check-ins per second that were wanted before maintenance began.
        self._usual_pace = 0.0
        # When all selectors were last told which tasks want clients.
        self._announced_at = -_NEVER
        # What reports say: `fleet`, `leases`, `demand`, and what follows from them.
        self._reset_view()

        # The time of the last event, and the next heartbeat.
        self._now = now
        self._next_beat = now
        # The last token of a storage request, and the last number of orders.
        self._token = 0
        self._order = 0
        # Transactions on their way by token: a task with its new fence, or None for the lease.
        self._pending: dict[int, tuple[TaskId, FenceRow] | None] = {}
        # A read of the rows is on its way.
        self._reading = False
        # The process is about to stop.
        self._is_draining = False
        # Tasks were placed since all selectors were told.
        self._has_placed = False
        # The last report of each server that came while this candidate did not lead, and when.
        # Those of servers that count as dead by now are dropped.
        self.unanswered: dict[NodeId, tuple[float, AggregatorReport | SelectorReport]] = {}

    # -- the machine contract ---------------------------------------------------------------

    def receive(self, now: float, message: Message, reply_to: Handle = None) -> Effects:
        return self._with_events(now, self._receive(now, message))

    def wake(self, now: float) -> Effects:
        return self._with_events(now, self._wake(now))

    def _receive(self, now: float, message: Message) -> Effects:
        self._listen(now)
        match message:
            case AggregatorReport():
                return self._on_aggregator_report(now, message)
            case SelectorReport():
                return self._on_selector_report(now, message)
            case Transacted():
                return self._on_transacted(now, message)
            case Rows():
                return self._on_rows(now, message)
            case Changed():
                return self._read()
            case Drain():
                return self._on_drain(now)
        raise ProtocolError(f"a coordinator does not accept {type(message).__name__}")

    def _wake(self, now: float) -> Effects:
        self._listen(now)
        effects: Effects = []
        if self.demand.has_new_wish and now >= self._announce_due:
            effects = self._announce(now, []) if self.acts(now) else []
            self.demand.has_new_wish = False
        if now < self._next_beat:
            return effects
        is_leader = self.leadership.epoch > 0
        self._next_beat = now + (
            self._config.heartbeat_s if is_leader else self._config.leader_read_s
        )
        self._tell_silent(now)
        self.fleet.forget_silent(now)
        self._drop_old_reports(now)
        effects += self._read()
        if self.acts(now):
            effects += self._place(now) + self._assign(now)
        return effects

    def next_wake(self) -> float:
        if self.demand.has_new_wish:
            return min(self._next_beat, self._announce_due)
        return self._next_beat

    def check(self) -> None:
        if not self.acts(self._now):
            return
        for task, row in self.rows.tasks.items():
            if self.demand.positive.get(task, 0) != max(0, self.demand.of(task)):
                raise InvariantError(f"{self.node}: the demand of {task} is out of date")
            report = self.demand.report_of(task)
            active = 0 if report is None else report.active
            # If a revision lowered the concurrency, the holder refuses earlier leases above it. A
            # leader may make them until it has read of the revision. When it was replaced says
            # nothing here: that is a time of another machine's clock.
            most = max((row.config.concurrency, *(e.config.concurrency for e in row.earlier)))
            if active + self.leases.count(task) > most:
                raise InvariantError(
                    f"{self.node}: task {task} has {active} active and {self.leases.count(task)} "
                    f"leased clients, above its concurrency of {most}"
                )

    def _with_events(self, now: float, effects: Effects) -> Effects:
        self._events.leadership(now, self.leadership)
        events = self._events.take()
        return [*(Log(event) for event in events), *effects] if events else effects

    def _tell_silent(self, now: float) -> None:
        if self.acts(now):
            self._events.silent(now, self.fleet, self._config.dead_after_s)

    # -- leadership -------------------------------------------------------------------------

    def acts(self, now: float) -> bool:
        """It leads, and knows the rows."""
        return self._is_loaded and self.leadership.leads(now)

    def _listen(self, now: float) -> None:
        """Remember since when reports are processed: only while this candidate leads, and not while
        its process is stopped.
        """
        stop_s = stopped_s(self._now, now, self._config.heartbeat_s)
        if stop_s > 0 or not self.acts(self._now) or not self.acts(now):
            self.fleet.listens_since = now
        if self.leadership.recovers(self._now):
            self.leadership.recovers_until += stop_s
        self._now = now

    def _read(self) -> Effects:
        """Finds new tasks and settles unknown outcomes. A candidate only watches the leader."""
        if self._reading or None in self._pending.values():
            return []  # a read must not overtake the lease transaction that it would settle
        self._reading = True
        rows: tuple[str, ...] = (LEADER_KEY,)
        if self.leadership.epoch > 0:
            rows = (LEADER_KEY, TASKS, FENCES, SHARES, MAINTENANCE_KEY)
        return [Read(self._new_token(), rows)]

    def _on_rows(self, now: float, rows: Rows) -> Effects:
        self._reading = False
        found = dict(rows.rows)
        leader = found.get(LEADER_KEY)
        assert leader is None or isinstance(leader, LeaderRow)
        epoch_before = self.leadership.epoch
        self.leadership.observe(now, leader)
        if self.leadership.epoch != epoch_before:
            self._is_loaded = False
            self._reset_view()
            return self._read()  # a candidate did not read the tasks
        effects: Effects = []
        attempt = self.leadership.next_attempt(now)
        if attempt is not None:
            effects.append(self._transact(attempt, None))
        if self.leadership.epoch > 0:
            is_new = not self._is_loaded
            self.rows.load(now, found)
            self._on_loaded()
            if is_new:
                # Every aggregator will have reported then.
                self._next_beat = now + self._config.heartbeat_s
                effects += self._tell_who_leads(now)
            effects += self._place(now)
        return effects

    def _tell_who_leads(self, now: float) -> Effects:
        """Orders to the holders and to all servers that have reported; they report at once."""
        self._drop_old_reports(now)
        reports = [report for _, report in self.unanswered.values()]
        self.unanswered = {}
        fences = [fence for task, fence in self.rows.fences.items() if task in self.rows.tasks]
        aggregators = dict.fromkeys((f.aggregator, f.boot) for f in fences if f.aggregator)
        aggregators |= dict.fromkeys(
            (report.node, report.boot) for report in reports if isinstance(report, AggregatorReport)
        )
        effects: Effects = [
            self._orders_for_aggregator(node, AggregatorView(boot)) for node, boot in aggregators
        ]
        for report in reports:
            if isinstance(report, SelectorReport):
                effects += self._on_selector_report(now, report)
        return effects

    def _drop_old_reports(self, now: float) -> None:
        """An old report would look like a wrong clock."""
        limit = now - self._config.dead_after_s
        self.unanswered = {n: entry for n, entry in self.unanswered.items() if entry[0] > limit}

    def _on_loaded(self) -> None:
        self._is_loaded = True
        for task in [task for task in self._active if task not in self.rows.tasks]:
            del self._active[task]
        for task in self.rows.tasks:
            if task in self.rows.fences:
                self._events.fence(task, self.rows.run_of(task), self.rows.fences[task])
        self.demand.refresh_all()

    def _on_transacted(self, now: float, done: Transacted) -> Effects:
        placed = self._pending.pop(done.token, None)
        if done.outcome != "committed":
            # Refused or unknown: the rows decide.
            return self._read() + self._tell_of_placements(now)
        if placed is not None:
            return self._on_placed(now, *placed)
        if self.leadership.confirm(now):
            self._is_loaded = False
            self._reset_view()
            return self._read()
        return []

    def _reset_view(self) -> None:
        """Forget everything that came from reports. A new leader only knows the rows."""
        config = self._config
        self.fleet = Fleet(config.dead_after_s, config.max_clock_difference_s)
        self.leases = Leases()
        # Active and awaited clients of each task by the last report of any of its holders, with the
        # holder's sequence number: a successor keeps room for them.
        self._active: dict[TaskId, tuple[int, int]] = {}
        self.demand = ClientDemand(config, self.leadership, self.rows, self.fleet, self.leases)
        self._announced_at = -_NEVER
        self._events.begin_epoch()

    # -- reports ----------------------------------------------------------------------------

    def _on_aggregator_report(self, now: float, report: AggregatorReport) -> Effects:
        if not self.acts(now):
            self.unanswered[report.node] = (now, report)
            return []
        before = self.fleet.aggregators.get(report.node)
        changed = dict.fromkeys(() if before is None else before.tasks)
        if not self.fleet.heard_aggregator(now, report):
            return []
        self._events.seen(report)
        joined = 0
        for task in report.tasks:
            joined += len(task.joined)
            for session in task.joined:
                changed[self.leases.end(session) or task.task] = None
            if self.demand.report_of(task.task) is task:
                self.leases.expire(task.task, report.at)
                self._active[task.task] = (task.seq, task.active + task.awaited)
            changed[task.task] = None
        for each in changed:
            self.demand.refresh(each)
        effects: Effects = []
        is_new = before is None or before.boot < report.boot
        is_urgent = report.heartbeat or report.draining or is_new
        if is_urgent:
            effects += self._place(now)
        knows_leader = report.epoch == self.leadership.epoch
        if is_urgent or not knows_leader or joined >= _ACKNOWLEDGE_AFTER_JOINS:
            effects.append(self._orders_for_aggregator(report.node))
        return effects + self._assign(now)

    def _on_selector_report(self, now: float, report: SelectorReport) -> Effects:
        if not self.acts(now):
            self.unanswered[report.node] = (now, report)
            return []
        if report.epoch != self.leadership.epoch:
            # It acknowledges orders of another leader, and has its catalogue.
            report = replace(report, acked=0, catalogue=0)
        if not self.fleet.heard_selector(now, report):
            return []
        self._events.seen(report)
        for session in report.unfilled:
            if (task := self.leases.end(session)) is not None:
                self.demand.refresh(task)
        effects = self._assign(now)
        if not any(isinstance(effect, Send) and effect.to == report.node for effect in effects):
            effects.append(self._orders_for_selector(report.node, ()))
        return effects

    def recovers(self, now: float) -> bool:
        """Is this a new leader that still waits for the holder of some task to report?"""
        return self.leadership.recovers(now) and None in map(self.demand.report_of, self.rows.tasks)

    def _on_drain(self, now: float) -> Effects:
        """Aggregators that stop at the same time need not wait for this leader."""
        self._is_draining = True
        if not self.acts(now):
            return []
        return [self._orders_for_aggregator(node) for node in self.fleet.live_aggregators(now)]

    # -- clients to tasks -------------------------------------------------------------------

    def _assign(self, now: float) -> Effects:
        effects = self._assign_held(now, dict(self.demand.positive)) if self.demand.positive else []
        return effects + self._announce(now, effects)

    def _announce(self, now: float, effects: Effects) -> Effects:
        """If a task begins to want clients, tell selectors soon: until then they reject devices."""
        if not self.demand.has_new_wish or now < self._announce_due:
            return []
        self.demand.has_new_wish, self._announced_at = False, now
        told = [effect.to for effect in effects if isinstance(effect, Send)]
        return [self._orders_for_selector(n, ()) for n in self.fleet.selectors if n not in told]

    @property
    def _announce_due(self) -> float:
        return self._announced_at + self._config.min_report_interval_s

    def _assign_held(self, now: float, wanted: dict[TaskId, int]) -> Effects:
        held = self.fleet.held(self._rng)
        chosen = assign(held, wanted, self.rows.compatible_tasks, self._rng, self.rows.shares)
        by_selector: dict[NodeId, list[Assignment]] = {}
        for (selector, device_class, task), count in chosen.items():
            assignment = self._lease(now, device_class, task, count)
            by_selector.setdefault(selector, []).append(assignment)
        return [
            self._orders_for_selector(selector, tuple(assignments))
            for selector, assignments in by_selector.items()
        ]

    def _lease(self, now: float, device_class: DeviceClass, task: TaskId, count: int) -> Assignment:
        confirm_by = now + self._config.confirm_by_s
        sessions = tuple(f"{self._rng.getrandbits(96):024x}" for _ in range(count))
        for session in sessions:
            self.leases.grant(session, task, confirm_by)
        self.demand.refresh(task)
        report = self.demand.report_of(task)
        assert report is not None, "without a report there is no demand"
        return Assignment(
            task,
            report.seq,
            device_class,
            sessions,
            confirm_by,
            report.version,
            self.rows.tasks[task].pseudonym_key,
        )

    # -- tasks to aggregators ---------------------------------------------------------------

    def _place(self, now: float) -> Effects:
        if not self.acts(now):
            return []
        self._tell_silent(now)
        if self.rows.maintenance is not None and self.rows.maintenance.is_stopped:
            return []
        effects: Effects = []
        live = self.fleet.open_aggregators(now)
        has_listened = self._has_listened(now)
        may_report = self.leadership.recovers(now) or not has_listened
        placing = [pending[0] for pending in self._pending.values() if pending is not None]
        work: dict[NodeId, float] | None = None
        for task, why in self._tasks_to_move(now, may_report):
            if task not in placing:
                work = self._workloads(live) if work is None else work
                old = self.rows.fences[task].aggregator
                to = least_loaded(work if has_listened else early_choices(work, old))
                if to is not None:
                    amount = self.rows.tasks[task].config.workload
                    work[to] += amount
                    if old in work:
                        work[old] -= amount
                    effects.append(self._move(task, to, why))
        if not effects and not placing and not may_report:
            effects += self._relieve(live)
        return effects

    def _tasks_to_move(self, now: float, may_report: bool) -> list[tuple[TaskId, str]]:
        """The tasks whose holders are gone, or about to stop and done with them, and why."""
        found: list[tuple[TaskId, str]] = []
        for (node, boot), tasks in self.rows.by_holder().items():
            live_boot = self.fleet.boot_of(now, node)
            if is_orphan(self.rows.fences[tasks[0]], live_boot, may_report):
                was_restarted = live_boot is not None and live_boot > boot
                why = "its holder was restarted" if was_restarted else "its holder is silent"
                found += [(task, why) for task in tasks]
            elif live_boot == boot and self.fleet.is_draining(node):
                found += [
                    (task, "its holder stops")
                    for task in tasks
                    if self.fleet.may_leave(node, task, self.rows.fences[task].seq)
                ]
        return found

    def _relieve(self, live: dict[NodeId, AggregatorView]) -> Effects:
        overloaded = [n for n, view in live.items() if view.overloaded_beats >= _OVERLOADED_BEATS]
        work = self._workloads(live) if overloaded else {}
        for node in overloaded:
            own = {
                task: row.config.workload
                for task, row in self.rows.tasks.items()
                if self.rows.fences[task].aggregator == node
            }
            move = relieve(node, own, work)
            if move is not None:
                live[node].overloaded_beats = 0
                return [self._move(*move, "its holder is overloaded")]
        return []

    def _workloads(self, live: Iterable[NodeId]) -> dict[NodeId, float]:
        """Estimated work per live aggregator, as if pending moves were done."""
        holders = {task: fence.aggregator for task, fence in self.rows.fences.items()}
        for pending in self._pending.values():
            if pending is not None:
                holders[pending[0]] = pending[1].aggregator
        work = {task: row.config.workload for task, row in self.rows.tasks.items()}
        return workloads(live, holders, work)

    def _move(self, task: TaskId, to: NodeId, why: str) -> Transact:
        """Write the new fence row. Orders follow when it is committed."""
        old = self.rows.fences[task]
        self._events.decided(task, old.seq + 1, why)
        new = FenceRow(old.seq + 1, to, self.fleet.aggregators[to].boot)
        transaction = Transaction(
            require=(
                (EPOCH_KEY, EpochRow(self.leadership.epoch)),
                (fence_key(task), old),
                # A stop that this leader has not read yet: it released only the tasks of its time.
                (MAINTENANCE_KEY, self.rows.maintenance),
            ),
            put=((fence_key(task), new),),
        )
        return self._transact(transaction, (task, new))

    def _on_placed(self, now: float, task: TaskId, fence: FenceRow) -> Effects:
        old = self.rows.fences.get(task)
        self.rows.place(task, fence)
        self._events.placed(task, self.rows.run_of(task), old, fence)
        self._has_placed = True
        self.demand.refresh(task)
        if not self.acts(now):
            return []
        told = [fence.aggregator]
        if old is not None and old.aggregator not in ("", fence.aggregator):
            told.append(old.aggregator)
        effects: Effects = [
            self._orders_for_aggregator(node) for node in told if node in self.fleet.aggregators
        ]
        return effects + self._tell_of_placements(now)

    def _tell_of_placements(self, now: float) -> Effects:
        """Tell all selectors when the last of several placements is done."""
        is_placing = any(pending is not None for pending in self._pending.values())
        if not self._has_placed or is_placing or not self.acts(now):
            return []
        self._has_placed = False
        return [self._orders_for_selector(node, ()) for node in self.fleet.selectors]

    # -- orders -----------------------------------------------------------------------------

    def _orders_for_aggregator(self, node: NodeId, view: AggregatorView | None = None) -> Send:
        view = view or self.fleet.aggregators[node]
        self._order += 1
        orders = AggregatorOrders(
            epoch=self.leadership.epoch,
            leader=self.node,
            boot=view.boot,
            number=self._order,
            acked=view.number,
            tasks=self._placements(node, view),
            is_last=self._is_last(node),
        )
        return Send(node, orders)

    def _is_last(self, node: NodeId) -> bool:
        """Nobody can take the tasks of this one. Unknown before everybody had time to report."""
        if self._is_draining:
            return True
        has_others = self.fleet.has_other_than(self._now, node)
        return not has_others and self._has_listened(self._now)

    def _has_listened(self, now: float) -> bool:
        """Every aggregator reports within a heartbeat: has it had time to?"""
        return now >= self.fleet.listens_since + self._config.heartbeat_s

    def _placements(self, node: NodeId, view: AggregatorView) -> tuple[Placement, ...]:
        """All tasks that the rows give to this boot of an aggregator.

        Leases are listed until the aggregator reports on the task: from then on it knows them.
        """
        given = []
        for task in self.rows.by_holder().get((node, view.boot), ()):
            fence, report = self.rows.fences[task], view.tasks.get(task)
            is_known = report is not None and report.seq == fence.seq
            expected = () if is_known else self.leases.sessions(task)
            given.append(Placement(task, fence.seq, expected, self._active_before(task, fence)))
        return tuple(given)

    def _active_before(self, task: TaskId, fence: FenceRow) -> int | None:
        """Active clients of earlier holders, by the last report of one of them."""
        seq, active = self._active.get(task, (fence.seq, 0))
        return active if seq < fence.seq else None

    def _orders_for_selector(self, node: NodeId, assignments: tuple[Assignment, ...]) -> Send:
        view = self.fleet.selectors[node]
        self._order += 1
        for assignment in assignments:
            view.forward(self._order, assignment.device_class, len(assignment.sessions))
        catalogue = self.rows.catalogue()
        is_short = view.catalogue == catalogue.number
        told = Catalogue(catalogue.number) if is_short else catalogue
        orders = SelectorOrders(
            epoch=self.leadership.epoch,
            leader=self.node,
            boot=view.boot,
            number=self._order,
            acked=view.number,
            advertised=told.advertised,
            wanting=self.demand.wanting(),
            routes=told.routes,
            check_ins_per_s=self._pace() / len(self.fleet.selectors),
            over=told.over,
            assignments=assignments,
            assigns_in_s=self._assigns_in_s(),
            catalogue=catalogue.number,
            is_short=is_short,
        )
        return Send(node, orders)

    def _assigns_in_s(self) -> float:
        """How long a new leader may have to wait for the first report of a holder; in maintenance,
        until its announced end.
        """
        if self.rows.maintenance is not None:
            return max(0.0, self.rows.maintenance.until - self._now)
        wait_s = self.leadership.recovers_until - self._now
        if wait_s <= 0 or any(self.demand.report_of(task) is not None for task in self.rows.tasks):
            return 0.0
        return wait_s

    def _pace(self) -> float:
        """Check-ins per second that would meet the demand, with a margin. In maintenance the last
        ones: devices must not be sent away for longer and longer.
        """
        if self.rows.maintenance is None:
            self._usual_pace = self._config.pace * self.demand.clients_per_s
        return self._usual_pace

    def _transact(
        self, transaction: Transaction, placed: tuple[TaskId, FenceRow] | None
    ) -> Transact:
        token = self._new_token()
        self._pending[token] = placed
        return Transact(token, transaction)

    def _new_token(self) -> int:
        self._token += 1
        return self._token
