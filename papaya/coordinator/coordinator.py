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

from collections.abc import Iterable, Mapping
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from papaya.config import Requirements, ServerConfig, TaskConfig
from papaya.coordinator.assignment import Leases, assign
from papaya.coordinator.fleet import AggregatorView, Fleet
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
from papaya.messages.base import Boot, Message, NodeId, TaskId
from papaya.messages.control import (
    Advertised,
    AggregatorOrders,
    AggregatorReport,
    Assignment,
    CandidateOffer,
    Drain,
    Placement,
    Route,
    SelectorOrders,
    SelectorReport,
    TaskReport,
)
from papaya.messages.events import (
    LeadershipGained,
    LeadershipLost,
    ServerEvent,
    ServerSeen,
    ServerSilent,
    TaskFound,
    TaskMoved,
    TaskPlaced,
    TaskReleased,
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
    MaintenanceRow,
    Row,
    Rows,
    ShareRow,
    TaskRow,
    Transacted,
    Transaction,
    fence_key,
    share_key,
)

# A report that confirms this many joins is acknowledged at once, to keep the next one short.
_ACKNOWLEDGE_AFTER_JOINS = 16
# An aggregator that reports overload for this many heartbeats gives a task away.
_OVERLOADED_BEATS = 3
# How long selectors are told that a task has ended: longer than its clients keep asking.
_OVER_IS_TOLD_S = 3600.0
_MAX_OVER = 256
_NEVER = float("inf")


class Catalogue(Struct, frozen=True):
    """The part of SelectorOrders that changes rarely."""

    number: int
    advertised: tuple[Advertised, ...] = ()
    routes: tuple[Route, ...] = ()
    over: tuple[TaskId, ...] = ()


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
        # The rows as last read: tasks that are not over, ended tasks that selectors are told of,
        # and who holds each task.
        self.tasks: dict[TaskId, TaskRow] = {}
        self.over: tuple[TaskId, ...] = ()
        # Meanwhile all tasks are paused, and none is placed if training is stopped.
        self.maintenance: MaintenanceRow | None = None
        # Check-ins per second that were wanted before it began.
        self._usual_pace = 0.0
        self.fences: dict[TaskId, FenceRow] = {}
        # Weights and priorities that differ from the defaults.
        self.shares: dict[TaskId, ShareRow] = {}
        # The rows were read since this candidate became leader.
        self._loaded = False

        # Events of the current call; the epoch that the operator was told this candidate leads, 0
        # if it does not, and the last one that it led.
        self._events: list[ServerEvent] = []
        self._told_epoch = 0
        self._last_epoch = 0
        # Why the last move of a task was decided, with its sequence number.
        self._moved_because: dict[TaskId, tuple[int, str]] = {}

        # What selectors are told: of the rows, and which tasks want clients; None if it has to be
        # made again. The number of a catalogue never repeats.
        self._catalogue: Catalogue | None = None
        self._last_catalogue = Catalogue(0)
        self._wanting: tuple[TaskId, ...] | None = None
        # A task has begun to want clients since all selectors were last told, and when that was.
        self._has_new_wish = False
        self._announced_at = -_NEVER
        # What reports say: `fleet`, `leases`, and what follows from them.
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
        if self._has_new_wish and now >= self._announce_due:
            effects = self._announce(now, []) if self.acts(now) else []
            self._has_new_wish = False
        if now < self._next_beat:
            return effects
        is_leader = self.leadership.epoch > 0
        self._next_beat = now + (
            self._config.heartbeat_s if is_leader else self._config.leader_read_s
        )
        self._tell_silent(now)
        self.fleet.drop_silent_selectors(now)
        self._drop_old_reports(now)
        effects += self._read()
        if self.acts(now):
            effects += self._place(now) + self._assign(now)
        return effects

    def next_wake(self) -> float:
        if self._has_new_wish:
            return min(self._next_beat, self._announce_due)
        return self._next_beat

    def check(self) -> None:
        if not self.acts(self._now):
            return
        for task, row in self.tasks.items():
            if self._wanted.get(task, 0) != max(0, self.demand(task)):
                raise InvariantError(f"{self.node}: the demand of {task} is out of date")
            report = self._report_of(task)
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

    # -- events -----------------------------------------------------------------------------

    def _with_events(self, now: float, effects: Effects) -> Effects:
        self._tell_leadership(now)
        events, self._events = self._events, []
        return [*(Log(event) for event in events), *effects] if events else effects

    def _tell_leadership(self, now: float) -> None:
        """One event each time this candidate begins or ceases to lead, before all others."""
        own = self.leadership
        leads, told = own.leads(now), self._told_epoch
        news: list[ServerEvent] = []
        if told and not (leads and own.epoch == told):
            is_late = own.epoch == told
            why = (
                "no renewal of its lease was confirmed in time"
                if is_late
                else f"{own.last_leader or 'nobody'} leads now"
            )
            news.append(LeadershipLost(told, why))
            self._told_epoch = 0
        if leads and not self._told_epoch:
            is_again = own.epoch == self._last_epoch
            why = "its lease was renewed late" if is_again else own.claimed_because
            news.append(LeadershipGained(own.epoch, why))
            self._told_epoch = self._last_epoch = own.epoch
        self._events[:0] = news

    def _tell_fence(self, task: TaskId, fence: FenceRow) -> None:
        """One event for each fence that this leader writes or finds changed."""
        old = self._told_fences.get(task)
        if old is not None and fence.seq <= old.seq:
            return
        self._told_fences[task] = fence
        if old is not None and not old.aggregator and not fence.aggregator:
            return  # nobody held it, and nobody does
        row = self.tasks.get(task)
        run, seq, holder = 0 if row is None else row.run, fence.seq, fence.aggregator
        decided, why = self._moved_because.pop(task, (0, ""))
        if decided != seq:
            why = "an earlier leader decided it"
        if old is None:
            event: ServerEvent = TaskFound(task, run, seq, holder)
        elif not holder:
            event = TaskReleased(task, run, seq, old.aggregator)
        elif not old.aggregator:
            event = TaskPlaced(task, run, seq, holder, "no aggregator held it")
        else:
            event = TaskMoved(task, run, seq, holder, old.aggregator, why)
        self._events.append(event)

    def _tell_seen(self, report: AggregatorReport | SelectorReport) -> None:
        if self._told_servers.get(report.node) != report.boot:
            self._told_servers[report.node] = report.boot
            self._events.append(ServerSeen(report.node, report.boot))

    def _tell_silent(self, now: float) -> None:
        """Servers that were alive and count as dead now."""
        if not self.acts(now):
            return
        for node in list(self._told_servers):
            silent_s = self.fleet.silent_s(now, node)
            if silent_s >= self._config.dead_after_s:
                del self._told_servers[node]
                self._events.append(ServerSilent(node, round(silent_s, 1)))

    # -- leadership -------------------------------------------------------------------------

    def acts(self, now: float) -> bool:
        """It leads, and knows the rows."""
        return self._loaded and self.leadership.leads(now)

    def _listen(self, now: float) -> None:
        """Remember since when reports are processed: only while this candidate leads, and not while
        its process is stopped.
        """
        was_stopped = stopped_s(self._now, now, self._config.heartbeat_s) > 0
        if was_stopped or not self.acts(self._now) or not self.acts(now):
            self.fleet.listens_since = now
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
            self._loaded = False
            self._reset_view()
            return self._read()  # a candidate did not read the tasks
        effects: Effects = []
        attempt = self.leadership.next_attempt(now)
        if attempt is not None:
            effects.append(self._transact(attempt, None))
        if self.leadership.epoch > 0:
            is_new = not self._loaded
            self._load(found)
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
        fences = [fence for task, fence in self.fences.items() if task in self.tasks]
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

    def _load(self, found: Mapping[str, Row]) -> None:
        rows = {r.config.task: r for r in found.values() if isinstance(r, TaskRow)}
        self.over = tuple(
            task
            for task, row in rows.items()
            if row.is_over and self._now < row.ended + _OVER_IS_TOLD_S
        )[-_MAX_OVER:]
        maintenance = found.get(MAINTENANCE_KEY)
        self.maintenance = maintenance if isinstance(maintenance, MaintenanceRow) else None
        self.tasks = {
            task: row if self.maintenance is None else replace(row, state="paused")
            for task, row in rows.items()
            if not row.is_over
        }
        # Drop the fences of tasks whose rows were deleted.
        self.fences = {task: fence for task, fence in self.fences.items() if task in rows}
        for task in [task for task in self._active if task not in self.tasks]:
            del self._active[task]
        for task in self.tasks:
            fence, known = found.get(fence_key(task)), self.fences.get(task)
            # A placement may have been committed after this snapshot: keep the higher fence.
            if isinstance(fence, FenceRow) and (known is None or fence.seq >= known.seq):
                self.fences[task] = fence
        self.shares = {
            task: share
            for task, row in self.tasks.items()
            if isinstance(share := found.get(share_key(_trained(row))), ShareRow)
        }
        self._compatible.clear()
        self._loaded = True
        for task in self.tasks:
            if task in self.fences:
                self._tell_fence(task, self.fences[task])
        self._holders.clear()
        self._catalogue = None
        self._wanting = None
        for task in [task for task in self._wants if task not in self.tasks]:
            del self._wants[task], self._paces[task]
            self._wanted.pop(task, None)
        for task in self.tasks:
            self._refresh(task)

    def _on_transacted(self, now: float, done: Transacted) -> Effects:
        placed = self._pending.pop(done.token, None)
        if done.outcome != "committed":
            # Refused or unknown: the rows decide.
            return self._read() + self._tell_of_placements(now)
        if placed is not None:
            return self._on_placed(now, *placed)
        if self.leadership.confirm(now):
            self._loaded = False
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
        # What the operator was told: the fence of each task, and the boots of live servers.
        self._told_fences: dict[TaskId, FenceRow] = {}
        self._told_servers: dict[NodeId, Boot] = {}
        # What follows from rows, reports and leases, by task: positive demand, whether it wants
        # clients, and its share of the pace. `_refresh` keeps them up to date, because a large
        # fleet sends thousands of reports per second, each about one of a thousand tasks.
        self._wanted: dict[TaskId, int] = {}
        self._wants: dict[TaskId, bool] = {}
        self._paces: dict[TaskId, float] = {}
        self._wanting = None
        self._has_new_wish = False
        self._announced_at = -_NEVER
        # Tasks by holder and its boot; empty if it has to be made again.
        self._holders: dict[tuple[NodeId, Boot], list[TaskId]] = {}
        self._catalogue = None
        # Which tasks fit a device class.
        self._compatible: dict[DeviceClass, dict[TaskId, None]] = {}

    # -- reports ----------------------------------------------------------------------------

    def _on_aggregator_report(self, now: float, report: AggregatorReport) -> Effects:
        if not self.acts(now):
            self.unanswered[report.node] = (now, report)
            return []
        before = self.fleet.aggregators.get(report.node)
        changed = dict.fromkeys(() if before is None else before.tasks)
        if not self.fleet.heard_aggregator(now, report):
            return []
        self._tell_seen(report)
        joined = 0
        for task in report.tasks:
            joined += len(task.joined)
            for session in task.joined:
                changed[self.leases.end(session) or task.task] = None
            if self._report_of(task.task) is task:
                self.leases.expire(task.task, report.at)
                self._active[task.task] = (task.seq, task.active + task.awaited)
            changed[task.task] = None
        for each in changed:
            self._refresh(each)
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
        self._tell_seen(report)
        for session in report.unfilled:
            if (task := self.leases.end(session)) is not None:
                self._refresh(task)
        effects = self._assign(now)
        if not any(isinstance(effect, Send) and effect.to == report.node for effect in effects):
            effects.append(self._orders_for_selector(report.node, ()))
        return effects

    def _report_of(self, task: TaskId) -> TaskReport | None:
        """The last report on a task by the holder that its fence names, or None.

        Also None if that holder does not follow this leader yet: it still keeps slots for clients
        that an earlier leader has assigned.
        """
        fence = self.fences.get(task)
        view = self.fleet.aggregators.get(fence.aggregator) if fence is not None else None
        if fence is None or view is None or view.boot != fence.boot:
            return None
        if view.epoch != self.leadership.epoch:
            return None
        report = view.tasks.get(task)
        return report if report is not None and report.seq == fence.seq else None

    def demand(self, task: TaskId) -> int:
        """Client demand, less the clients assigned but not yet confirmed."""
        report = self._report_of(task)
        if report is None or self.tasks[task].state != "running":
            return 0
        return report.demand - self.leases.count(task)

    def _refresh(self, task: TaskId) -> None:
        """What the rows, reports and leases of a task lead to."""
        if task not in self.tasks:
            return
        demand, ended_per_s = self.demand(task), self._ended_per_s(task)
        if demand > 0:
            self._wanted[task] = demand
        else:
            self._wanted.pop(task, None)
        self._paces[task] = ended_per_s + max(0, demand) / self._config.heartbeat_s
        # Is there demand now, or will there be while a check-in is held? Then a client is already
        # waiting when a slot becomes free.
        is_running = self.tasks[task].state == "running"
        wants = demand > 0 or (ended_per_s * self._config.hold_s >= 1 and is_running)
        if wants is not self._wants.get(task):
            self._wants[task] = wants
            self._wanting = None
            self._has_new_wish |= wants

    def recovers(self, now: float) -> bool:
        """Is this a new leader that still waits for the holder of some task to report?"""
        return self.leadership.recovers(now) and None in map(self._report_of, self.tasks)

    def _on_drain(self, now: float) -> Effects:
        """Aggregators that stop at the same time need not wait for this leader."""
        self._is_draining = True
        if not self.acts(now):
            return []
        return [self._orders_for_aggregator(node) for node in self.fleet.live_aggregators(now)]

    # -- clients to tasks -------------------------------------------------------------------

    def _assign(self, now: float) -> Effects:
        effects = self._assign_held(now, dict(self._wanted)) if self._wanted else []
        return effects + self._announce(now, effects)

    def _announce(self, now: float, effects: Effects) -> Effects:
        """If a task begins to want clients, tell selectors soon: until then they reject devices."""
        if not self._has_new_wish or now < self._announce_due:
            return []
        self._has_new_wish, self._announced_at = False, now
        told = [effect.to for effect in effects if isinstance(effect, Send)]
        return [self._orders_for_selector(n, ()) for n in self.fleet.selectors if n not in told]

    @property
    def _announce_due(self) -> float:
        return self._announced_at + self._config.min_report_interval_s

    def _assign_held(self, now: float, wanted: dict[TaskId, int]) -> Effects:
        held = self.fleet.held(self._rng)
        chosen = assign(held, wanted, self._compatible_tasks, self._rng, self.shares)
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
        self._refresh(task)
        report = self._report_of(task)
        assert report is not None, "without a report there is no demand"
        return Assignment(
            task,
            report.seq,
            device_class,
            sessions,
            confirm_by,
            report.version,
            self.tasks[task].pseudonym_key,
        )

    def _compatible_tasks(self, device_class: DeviceClass) -> dict[TaskId, None]:
        found = self._compatible.get(device_class)
        if found is None:
            found = self._compatible[device_class] = dict.fromkeys(
                task for task, row in self.tasks.items() if self._offer(row).fits(device_class)
            )
        return found

    # -- tasks to aggregators ---------------------------------------------------------------

    def _place(self, now: float) -> Effects:
        if not self.acts(now):
            return []
        self._tell_silent(now)
        if self.maintenance is not None and self.maintenance.is_stopped:
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
                old = self.fences[task].aggregator
                to = least_loaded(work if has_listened else early_choices(work, old))
                if to is not None:
                    amount = self.tasks[task].config.workload
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
        for (node, boot), tasks in self._tasks_by_holder().items():
            live_boot = self.fleet.boot_of(now, node)
            if is_orphan(self.fences[tasks[0]], live_boot, may_report):
                was_restarted = live_boot is not None and live_boot > boot
                why = "its holder was restarted" if was_restarted else "its holder is silent"
                found += [(task, why) for task in tasks]
            elif self.fleet.is_draining(node):
                found += [
                    (task, "its holder stops")
                    for task in tasks
                    if self.fleet.may_leave(node, task, self.fences[task].seq)
                ]
        return found

    def _tasks_by_holder(self) -> dict[tuple[NodeId, Boot], list[TaskId]]:
        if not self._holders:
            for task in self.tasks:
                fence = self.fences[task]
                self._holders.setdefault((fence.aggregator, fence.boot), []).append(task)
        return self._holders

    def _relieve(self, live: dict[NodeId, AggregatorView]) -> Effects:
        overloaded = [n for n, view in live.items() if view.overloaded_beats >= _OVERLOADED_BEATS]
        work = self._workloads(live) if overloaded else {}
        for node in overloaded:
            own = {
                task: row.config.workload
                for task, row in self.tasks.items()
                if self.fences[task].aggregator == node
            }
            move = relieve(node, own, work)
            if move is not None:
                live[node].overloaded_beats = 0
                return [self._move(*move, "its holder is overloaded")]
        return []

    def _workloads(self, live: Iterable[NodeId]) -> dict[NodeId, float]:
        """Estimated work per live aggregator, as if pending moves were done."""
        holders = {task: fence.aggregator for task, fence in self.fences.items()}
        for pending in self._pending.values():
            if pending is not None:
                holders[pending[0]] = pending[1].aggregator
        work = {task: row.config.workload for task, row in self.tasks.items()}
        return workloads(live, holders, work)

    def _move(self, task: TaskId, to: NodeId, why: str) -> Transact:
        """Write the new fence row. Orders follow when it is committed."""
        old = self.fences[task]
        self._moved_because[task] = (old.seq + 1, why)
        new = FenceRow(old.seq + 1, to, self.fleet.aggregators[to].boot)
        transaction = Transaction(
            require=(
                (EPOCH_KEY, EpochRow(self.leadership.epoch)),
                (fence_key(task), old),
                # A stop that this leader has not read yet: it released only the tasks of its time.
                (MAINTENANCE_KEY, self.maintenance),
            ),
            put=((fence_key(task), new),),
        )
        return self._transact(transaction, (task, new))

    def _on_placed(self, now: float, task: TaskId, fence: FenceRow) -> Effects:
        old = self.fences.get(task)
        self.fences[task] = fence
        if old is not None:
            self._told_fences.setdefault(task, old)
        self._tell_fence(task, fence)
        self._holders.clear()
        self._catalogue, self._has_placed = None, True
        self._refresh(task)
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
        for task in self._tasks_by_holder().get((node, view.boot), ()):
            fence, report = self.fences[task], view.tasks.get(task)
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
        catalogue = self._current_catalogue()
        is_short = view.catalogue == catalogue.number
        told = Catalogue(catalogue.number) if is_short else catalogue
        orders = SelectorOrders(
            epoch=self.leadership.epoch,
            leader=self.node,
            boot=view.boot,
            number=self._order,
            acked=view.number,
            advertised=told.advertised,
            wanting=self._current_wanting(),
            routes=told.routes,
            check_ins_per_s=self._pace() / len(self.fleet.selectors),
            over=told.over,
            assignments=assignments,
            assigns_in_s=self._assigns_in_s(),
            catalogue=catalogue.number,
            is_short=is_short,
        )
        return Send(node, orders)

    def _current_wanting(self) -> tuple[TaskId, ...]:
        if self._wanting is None:
            self._wanting = tuple(task for task in self.tasks if self._wants[task])
        return self._wanting

    def _current_catalogue(self) -> Catalogue:
        """Has the next number if anything in it has changed. 0 is that of a selector without one,
        so the first number is 1 although there may be no tasks.
        """
        if self._catalogue is None:
            last = self._last_catalogue
            made = Catalogue(last.number, self._advertised(), self._assignment_map(), self.over)
            if made != last or last.number == 0:
                made = replace(made, number=last.number + 1)
            self._catalogue = self._last_catalogue = made
        return self._catalogue

    def _assigns_in_s(self) -> float:
        """How long a new leader may have to wait for the first report of a holder; in maintenance,
        until its announced end.
        """
        if self.maintenance is not None:
            return max(0.0, self.maintenance.until - self._now)
        wait_s = self.leadership.recovers_until - self._now
        if wait_s <= 0 or any(self._report_of(task) is not None for task in self.tasks):
            return 0.0
        return wait_s

    def _advertised(self) -> tuple[Advertised, ...]:
        """The tasks that selectors may offer to devices."""
        return tuple(self._offer(row) for row in self.tasks.values() if row.state == "running")

    def _offer(self, row: TaskRow) -> Advertised:
        config = row.config
        needs, candidate = self._requirements(config), self._candidate(row)
        return Advertised(config.task, needs, config.is_secure, candidate)

    def _requirements(self, config: TaskConfig) -> Requirements:
        """An evaluation follows the newest bundle of the task that it evaluates."""
        pinned = config.evaluates
        evaluated = None if pinned is None else self.tasks.get(pinned.task)
        return (config if evaluated is None else evaluated.config).requirements

    def _candidate(self, row: TaskRow) -> CandidateOffer | None:
        """Of the rollout of this task, or of the task that it evaluates."""
        trained = self.tasks.get(_trained(row), row)
        if row.candidate is None or trained.candidate is None:
            return None
        return CandidateOffer(trained.candidate.config.requirements, trained.candidate.share)

    def _assignment_map(self) -> tuple[Route, ...]:
        """Paper, appendix "Failure Recovery": "assignment maps (model training task to
        corresponding aggregator identity) refreshed from coordinator on every report".

        A paused task keeps its route: clients that have joined finish.
        """
        return tuple(
            Route(task, fence.aggregator, fence.seq)
            for task, fence in self.fences.items()
            if task in self.tasks and fence.aggregator
        )

    def _ended_per_s(self, task: TaskId) -> float:
        """Clients that end per second, whose slots become free."""
        view = self.fleet.aggregators.get(self.fences[task].aggregator)
        report, last = self._report_of(task), self.tasks[task].config.stop.versions
        if view is None or (report is not None and report.version >= (last or _NEVER)):
            return 0.0  # the last version exists, so no slot is filled again
        return view.ended_per_s.get(task, 0.0)

    def _pace(self) -> float:
        """Check-ins per second that would meet the demand, with a margin. In maintenance the last
        ones: devices must not be sent away for longer and longer.
        """
        if self.maintenance is None:
            self._usual_pace = self._config.pace * sum(self._paces.values())
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


def _trained(row: TaskRow) -> TaskId:
    """The task itself, or the task that it evaluates."""
    pinned = row.config.evaluates
    return row.config.task if pinned is None else pinned.task
