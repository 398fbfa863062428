"""The Selector (paper, "System Components"): the only server that devices talk to.

    "it advertises available tasks to clients, and summarizes current client availability for the
    Coordinator [...]. For client participation, the Selector routes client requests to the
    corresponding Aggregator".

It holds a check-in while a task that fits the device needs clients, rejects the others at once, and
forwards every later request by its ticket. It has no durable state: after a crash, devices retry at
another selector.

A device whose token identifies it holds one check-in at a time, and at most
`MAX_OPEN_ASSIGNMENTS` that it has not joined: nobody can take all slots by never joining.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Sequence
from heapq import nlargest
from typing import TypeAlias

from msgspec.structs import replace

from papaya.config import Requirements, ServerConfig
from papaya.config.versions import is_at_least, version_number
from papaya.errors import InvariantError, ProtocolError, TicketError
from papaya.machine import Effects, Forward, Handle, Reply, Send
from papaya.messages.base import (
    OLDEST_PROTOCOL,
    PROTOCOL_VERSION,
    SIGNED_TASKS_SINCE,
    Message,
    NodeId,
    SessionId,
    TaskId,
)
from papaya.messages.control import (
    Advertised,
    Assignment,
    Drain,
    Held,
    Route,
    SelectorOrders,
    SelectorReport,
)
from papaya.messages.participation import Aborted, Join, Refused, Retry, Ticketed
from papaya.messages.selection import (
    MAX_LACKS,
    Accepted,
    Capabilities,
    CheckIn,
    DeviceClass,
    Gone,
    IdentifiedCheckIn,
    Lack,
    Rejected,
    refused,
)
from papaya.messages.storage import Revoked
from papaya.messages.tickets import AnyTicket, AssignmentTicket, Keyring, claim_of, pseudonym_of

MAX_OPEN_ASSIGNMENTS = 2

_REVOKED = Refused("this device was revoked", "ask the operator of the servers")
_UNSIGNED = ("trust_policy", "frozen", "engine_version", "upload_bits")
_MAX_REPORTED_CLASSES = 256
_MAX_CACHED_CLASSES = 64
# A selector never paces check-ins below this rate: it costs nothing, and keeps a small fleet close
# by for the next task.
_MIN_PACE_PER_S = 1.0
_STOPPING_RETRY_S = 1.0


class Distinctions:
    """Sorts devices into classes (paper: "summarizes current client availability").

    Only properties that some advertised task requires are kept. So the number of classes, and with
    it the length of reports, depends on the tasks and not on what devices say about themselves.
    """

    def __init__(self, advertised: tuple[Advertised, ...] = ()) -> None:
        wanted = [offer.requirements for offer in advertised]
        self._tasks = frozenset(offer.task for offer in advertised)
        self._engines = frozenset(need.engine for need in wanted)
        versions = {need.engine_version for need in wanted if need.engine_version}
        self._engine_versions = sorted(versions, key=version_number)
        self._modules = frozenset(need.module for need in wanted)
        self._owners = frozenset(need.owner for need in wanted)
        candidates = [(o.task, o.candidate.requirements) for o in advertised if o.candidate]
        self._bundles = frozenset(
            refused(task, needs.bundle)
            for task, needs in [*((o.task, o.requirements) for o in advertised), *candidates]
            if needs.bundle
        )
        self._labels = frozenset(label for need in wanted for label in need.labels)
        self._has_secure = any(offer.is_secure for offer in advertised)
        self._has_few_bits = any(need.upload_bits < 32 for need in wanted)
        self._memory_mb = sorted({0} | {need.min_memory_mb for need in wanted})
        self._cache: dict[tuple[Capabilities, tuple[str, ...]], DeviceClass] = {}

    def class_of(self, check_in: CheckIn) -> DeviceClass:
        """Equal for devices that no advertised task distinguishes."""
        description = (check_in.capabilities, check_in.excluded)
        found = self._cache.get(description)
        if found is None:
            if len(self._cache) >= _MAX_CACHED_CLASSES:
                self._cache.clear()
            found = self._cache[description] = self._classify(check_in)
        return found

    def _classify(self, check_in: CheckIn) -> DeviceClass:
        device = check_in.capabilities
        enough = bisect_right(self._memory_mb, device.memory_mb) - 1
        reached = [v for v in self._engine_versions if is_at_least(device.engine_version, v)]
        capabilities = Capabilities(
            engine=device.engine if device.engine in self._engines else "",
            modules=tuple(sorted(m for m in device.modules if m in self._modules)),
            memory_mb=self._memory_mb[enough],
            labels=tuple(sorted(label for label in device.labels if label in self._labels)),
            owners=tuple(sorted(owner for owner in device.owners if owner in self._owners)),
            trust_policy=device.trust_policy or not self._has_secure,
            engine_version=reached[-1] if reached else "",
            upload_bits=next(b for b in (8, 16, 32) if device.upload_bits <= b)
            if self._has_few_bits
            else 32,
        )
        known = self._tasks | self._bundles
        excluded = tuple(sorted(task for task in check_in.excluded if task in known))
        return DeviceClass(capabilities, excluded)


def lacks_for(offer: Advertised, device: DeviceClass, *, is_wanting: bool) -> list[Lack]:
    """What keeps a device out of this task, if it has pinned the owner. Without an owner: the one
    thing that a device with the task's file lacks. Leaves out what the device excludes.
    """
    needs, declared = offer.requirements, device.capabilities
    if offer.task in device.excluded or (
        needs.bundle and refused(offer.task, needs.bundle) in device.excluded
    ):
        return []
    if needs.owner is None:
        file = (needs.module or "").partition(".")[0]
        has_file = not file or any(module.partition(".")[0] == file for module in declared.modules)
        may_know = is_wanting and has_file
    else:
        may_know = needs.owner in declared.owners
    if not may_know:
        return []
    found: list[tuple[str, str]] = []
    if needs.engine not in (None, declared.engine):
        found.append(("engine", needs.engine or ""))
    elif not is_at_least(declared.engine_version, needs.engine_version):
        found.append(("engine_version", f"{needs.engine} ≥ {needs.engine_version}"))
    if needs.min_memory_mb > declared.memory_mb:
        found.append(("memory", str(needs.min_memory_mb)))
    if needs.upload_bits < declared.upload_bits:
        found.append(("upload_bits", str(needs.upload_bits)))
    found += [("label", label) for label in needs.labels if label not in declared.labels]
    if offer.is_secure and not declared.trust_policy:
        found.append(("trust_policy", ""))
    if needs.owner is None and needs.module is not None and needs.module not in declared.modules:
        found.append(("frozen", ""))
    if needs.owner is None and (len(found) != 1 or found[0][0] not in _UNSIGNED):
        return []
    if not found and not is_wanting:
        found.append(("no_demand", ""))
    return [Lack(offer.task, code, need) for code, need in found]


class Pacing:
    """Pace steering: chooses when a rejected device should check in again.

    The selector only sees arrivals. By Little's law, the number of devices that it steers is about
    arrivals per second x the window that it gives them. So the window that brings the wanted rate
    is the current window x measured rate ÷ wanted rate. It changes by at most a factor of two per
    heartbeat, because devices follow a new window only when the old one is over.
    """

    def __init__(self, now: float, config: ServerConfig) -> None:
        self._config = config
        self._since = now
        self._arrivals = 0
        # Check-ins per second in the last heartbeat.
        self.measured_per_s = 0.0
        self.mean_s = config.min_retry_s

    def arrived(self) -> None:
        self._arrivals += 1

    def adjust(self, now: float, wanted_per_s: float) -> None:
        """Call it once per heartbeat."""
        if now <= self._since:
            return
        self.measured_per_s = self._arrivals / (now - self._since)
        self._since, self._arrivals = now, 0
        ratio = self.measured_per_s / max(wanted_per_s, _MIN_PACE_PER_S)
        mean_s = self.mean_s * min(2.0, max(0.5, ratio))
        self.mean_s = min(self._config.max_retry_s, max(self._config.min_retry_s, mean_s))

    def window(self) -> tuple[float, float]:
        """A range of seconds, so that devices rejected together do not return together."""
        return 0.5 * self.mean_s, 1.5 * self.mean_s


class AssignmentMap:
    """Which aggregator holds which task (paper, appendix "Failure Recovery").

    "Client requests are routed by selectors using assignment maps (model training task to
    corresponding aggregator identity) refreshed from coordinator on every report. Upon [...]
    selector having stale assignment map clients retry through a different selector."

    The map may be stale or incomplete. It only routes: tickets and fence rows decide.
    """

    def __init__(self) -> None:
        self._routes: dict[TaskId, Route] = {}
        self._over: frozenset[TaskId] = frozenset()

    def replace(self, routes: tuple[Route, ...], over: tuple[TaskId, ...]) -> None:
        self._routes = {route.task: route for route in routes}
        self._over = frozenset(over)

    def is_over(self, task: TaskId) -> bool:
        """The task has ended, so its clients should stop asking for its holder."""
        return task in self._over

    def route(self, ticket: AnyTicket) -> NodeId | None:
        """Where a request goes; None if the task is over, if no holder is known, or if the ticket
        is newer than the map.
        """
        route = self._routes.get(ticket.task)
        if route is None or ticket.seq > route.seq or ticket.task in self._over:
            return None
        return route.aggregator


class OpenAssignments:
    """Assignments of identified devices that were given here and are not known to be joined.

    A join through another selector is not seen here; then the assignment ends with its lease.
    """

    def __init__(self) -> None:
        self._given: dict[SessionId, tuple[str, float]] = {}
        self._counts: Counter[str] = Counter()

    def count(self, device: str) -> int:
        return self._counts[device]

    def add(self, session: SessionId, device: str, confirm_by: float) -> None:
        self._given[session] = (device, confirm_by)
        self._counts[device] += 1

    def end(self, session: SessionId) -> None:
        device, _ = self._given.pop(session)
        self._counts[device] -= 1
        if not self._counts[device]:
            del self._counts[device]

    def expire(self, now: float) -> None:
        for session in [s for s, (_, confirm_by) in self._given.items() if confirm_by < now]:
            self.end(session)

    def __contains__(self, session: SessionId) -> bool:
        return session in self._given


class HeldCheckIn:
    """A device that waits for an assignment. `device` is empty without an identity."""

    __slots__ = ("deadline", "device", "device_class", "handle")

    def __init__(
        self, deadline: float, device_class: DeviceClass, handle: Handle, device: str
    ) -> None:
        self.deadline = deadline
        self.device_class = device_class
        self.handle = handle
        self.device = device


# Held check-ins by their handle, oldest first. Not a dict: finding the first entry of a dict takes
# time in proportion to the entries that were removed before it.
Queue: TypeAlias = OrderedDict[Handle, HeldCheckIn]


class Selector:
    """Invariants: held <= max_held, and one per identity; a held device is answered once, within
    about hold_s.
    """

    def __init__(
        self,
        node: NodeId,
        boot: int,
        now: float,
        config: ServerConfig,
        keyring: Keyring,
        coordinators: Sequence[NodeId],
    ) -> None:
        self.node = node
        self.boot = boot
        self._started_at = now
        self._config = config
        self._keyring = keyring
        self._coordinators = tuple(coordinators)

        # Held check-ins: all of them, by device class, and their number.
        self._in_order: Queue = OrderedDict()
        self._held: dict[DeviceClass, Queue] = {}
        self.held_count = 0
        # Devices with an identity: the held check-in, open assignments, and who is revoked.
        self._held_by_device: dict[str, HeldCheckIn] = {}
        self._open = OpenAssignments()
        self._revoked: frozenset[str] = frozenset()

        # Why the process is about to stop; None while it is not.
        self._draining: Drain | None = None
        # By its newest orders, the leader assigns no client before this time.
        self._assigns_at = now

        # The newest orders, and when each order of this epoch arrived, by number.
        self._orders: SelectorOrders | None = None
        # When the last orders arrived; the start of the process before that.
        self.led_at = now
        self._seen: dict[int, float] = {}
        # What follows from the newest orders: routes, device classes, tasks on offer, and a
        # cache of which classes fit a task that needs clients.
        self._map = AssignmentMap()
        self._distinctions = Distinctions()
        self._offers: dict[TaskId, Advertised] = {}
        self._welcome: dict[DeviceClass, bool] = {}
        self._pacing = Pacing(now, config)
        # Assigned sessions for which no client was held: the report that names each of them first,
        # and its confirm-by time.
        self._unfilled: dict[SessionId, tuple[int, float]] = {}

        # The number and the time of the last report, and when the next one is due.
        self._number = 0
        self._reported_at = -float("inf")
        self._report_due = now
        # The last sweep for expired check-ins, and the next heartbeat.
        self._expired_at = now
        self._next_beat = now + config.heartbeat_s

    # -- the machine contract ---------------------------------------------------------------

    def receive(self, now: float, message: Message, reply_to: Handle = None) -> Effects:
        if isinstance(message, Ticketed):
            return self._on_request(message, reply_to)
        match message:
            case CheckIn():
                return self._on_check_in(now, message, reply_to)
            case IdentifiedCheckIn():
                return self._on_identified(now, message, reply_to)
            case Revoked():
                return self._on_revoked(now, message)
            case SelectorOrders():
                return self._on_orders(now, message)
            case Gone():
                return self._on_gone(now, reply_to)
            case Drain():
                return self._on_drain(now, message)
        raise ProtocolError(f"a selector does not accept {type(message).__name__}")

    def wake(self, now: float) -> Effects:
        self._expired_at = now
        effects = self._expire(now)
        if now >= self._next_beat:
            self._next_beat = now + self._config.heartbeat_s
            if self._orders is not None:
                self._pacing.adjust(now, self._orders.check_ins_per_s)
            self._forget_orders(now)
            self._open.expire(now)
            self._report_due = now
        return effects + self._report_if_due(now)

    def next_wake(self) -> float:
        # Without calls of `min`: the driver asks after every event.
        due = self._next_beat if self._next_beat < self._report_due else self._report_due
        sweep = self._expired_at + self._config.held_report_interval_s
        if sweep >= due or not self._in_order:
            return due
        deadline = self._oldest(self._in_order).deadline
        return min(due, max(deadline, sweep))

    @property
    def check_ins_per_s(self) -> float:
        """In the last heartbeat."""
        return self._pacing.measured_per_s

    def check(self) -> None:
        waiting = len(self._in_order)
        by_class = sum(len(queue) for queue in self._held.values())
        if not waiting == by_class == self.held_count or waiting > self._config.max_held:
            raise InvariantError(
                f"{self.node}: {waiting} held check-ins, {by_class} by class, held_count is "
                f"{self.held_count}, max_held is {self._config.max_held}"
            )
        for device, waiting_check_in in self._held_by_device.items():
            if waiting_check_in.handle not in self._in_order:
                raise InvariantError(f"{self.node}: {device} is held and not in order")

    # -- selection --------------------------------------------------------------------------

    def _on_identified(self, now: float, message: IdentifiedCheckIn, reply_to: Handle) -> Effects:
        """A check-in ends an earlier one of the same device."""
        device = message.device
        earlier = self._held_by_device.get(device)
        if earlier is not None and earlier.handle == reply_to:
            return []  # a duplicate of a request that is already held
        effects: Effects = []
        if earlier is not None:
            self._let_go(earlier)
            replaced = Retry("replaced by a newer check-in of this device", 0.0)
            effects.append(Reply(earlier.handle, replaced))
        if device in self._revoked:
            return [*effects, Reply(reply_to, _REVOKED)]
        if self._open.count(device) >= MAX_OPEN_ASSIGNMENTS:
            self._pacing.arrived()
            reason = "this device has assignments that it has not joined"
            return [*effects, self._reject(now, reply_to, reason)]
        return effects + self._on_check_in(now, message.check_in, reply_to, device)

    def _on_revoked(self, now: float, message: Revoked) -> Effects:
        self._revoked = frozenset(message.devices)
        effects: Effects = []
        for device in message.devices:
            waiting = self._held_by_device.get(device)
            if waiting is not None:
                self._let_go(waiting)
                effects.append(Reply(waiting.handle, _REVOKED))
                self._report_within(now, self._config.held_report_interval_s)
        return effects

    def _on_check_in(
        self, now: float, check_in: CheckIn, reply_to: Handle, device: str = ""
    ) -> Effects:
        if not OLDEST_PROTOCOL <= check_in.protocol <= PROTOCOL_VERSION:
            supported = f"only {OLDEST_PROTOCOL} to {PROTOCOL_VERSION}"
            reason = f"protocol {check_in.protocol} is not supported, {supported}"
            return [Reply(reply_to, Refused(reason, "update the client"))]
        if check_in.protocol < SIGNED_TASKS_SINCE:
            check_in = replace(check_in, capabilities=replace(check_in.capabilities, owners=()))
        if reply_to in self._in_order:
            return []  # a duplicate of a request that is already held
        self._pacing.arrived()
        if self._draining is not None:
            return [self._send_away(self._draining, reply_to)]
        if self._orders is None and now < self._started_at + self._config.heartbeat_s:
            after_s = self._config.heartbeat_s / 4
            return [Reply(reply_to, Retry("this selector has just started", after_s))]
        device_class = self._distinctions.class_of(check_in)
        if not self._is_welcome(device_class):
            reason = self._why_unwelcome(check_in)
            return [self._reject(now, reply_to, reason, self._lacks(check_in))]
        if self.held_count >= self._config.max_held:
            return [self._reject(now, reply_to, "too many devices are waiting")]
        waiting = HeldCheckIn(now + self._config.hold_s, device_class, reply_to, device)
        self._in_order[reply_to] = waiting
        if device:
            self._held_by_device[device] = waiting
        self.held_count += 1
        queue = self._held.get(device_class)
        if queue is None:
            self._held[device_class] = OrderedDict(((reply_to, waiting),))
            self._report_within(now, self._config.min_report_interval_s)
        else:
            queue[reply_to] = waiting
            self._report_within(now, self._config.held_report_interval_s)
        return self._report_if_due(now)

    def _on_gone(self, now: float, handle: Handle) -> Effects:
        waiting = self._in_order.get(handle)
        if waiting is not None:
            self._let_go(waiting)
            self._report_within(now, self._config.held_report_interval_s)
        return []

    def _is_welcome(self, device_class: DeviceClass) -> bool:
        """Is the class compatible with an advertised task that has demand?"""
        welcome = self._welcome.get(device_class)
        if welcome is None:
            orders = self._orders
            welcome = orders is not None and any(
                offer.task in orders.wanting and offer.fits(device_class)
                for offer in orders.advertised
            )
            if len(self._welcome) >= self._config.max_held:
                self._welcome.clear()  # keep the cache bounded
            self._welcome[device_class] = welcome
        return welcome

    def _why_unwelcome(self, check_in: CheckIn) -> str:
        """Names no task: the device may not know it."""
        wanting = () if self._orders is None else self._orders.wanting
        owners = [o.requirements.owner for t in wanting if (o := self._offers.get(t)) is not None]
        if owners and not any(o is None or o in check_in.capabilities.owners for o in owners):
            return "no task that needs clients is signed by an owner that this device has pinned"
        return "no compatible task needs clients now"

    def _lacks(self, check_in: CheckIn) -> tuple[Lack, ...]:
        """What keeps a device out of the tasks that it may know of."""
        orders = self._orders
        if orders is None:
            return ()
        device = DeviceClass(check_in.capabilities, check_in.excluded)
        lacks = [
            lack
            for offer in orders.advertised
            for lack in lacks_for(offer, device, is_wanting=offer.task in orders.wanting)
        ]
        return tuple(lacks[:MAX_LACKS])

    def _reject(
        self, now: float, handle: Handle, reason: str, lacks: tuple[Lack, ...] = ()
    ) -> Reply:
        # Without orders nobody leads yet, and a new leader recovers before it assigns clients.
        wait_s = self._config.recovery_s if self._orders is None else self._assigns_at - now
        return Reply(handle, Rejected(reason, *self._window(max(0.0, wait_s)), lacks))

    def _window(self, wait_s: float) -> tuple[float, float]:
        """When to come back if no client is assigned for `wait_s`: after that, and over as long a
        time again, because everybody who came meanwhile is told the same.
        """
        earliest, latest = self._pacing.window()
        return wait_s + earliest, 2 * wait_s + latest

    def _on_drain(self, now: float, drain: Drain) -> Effects:
        """Answer every held check-in, and tell the leader that none is held."""
        self._draining = drain
        effects: Effects = []
        for waiting in list(self._in_order.values()):
            self._let_go(waiting)
            effects.append(self._send_away(drain, waiting.handle))
        self._report_due = now
        return effects + self._report_if_due(now)

    def _send_away(self, drain: Drain, handle: Handle) -> Reply:
        """To another selector, or to the time when this process has restarted and recovered."""
        if drain.is_alone:
            window = self._window(self._config.recovery_s)
            return Reply(handle, Rejected("the server restarts", *window))
        return Reply(handle, Retry("this selector is stopping", _STOPPING_RETRY_S))

    def _expire(self, now: float) -> Effects:
        effects: Effects = []
        while self._in_order and (waiting := self._oldest(self._in_order)).deadline <= now:
            self._let_go(waiting)
            effects.append(self._reject(now, waiting.handle, "no task needed this device in time"))
            self._report_within(now, self._config.held_report_interval_s)
        return effects

    def _let_go(self, waiting: HeldCheckIn) -> None:
        """Stop holding a check-in that is being answered, or whose device has hung up."""
        del self._in_order[waiting.handle]
        queue = self._held[waiting.device_class]
        del queue[waiting.handle]
        if not queue:
            del self._held[waiting.device_class]
        if waiting.device:
            del self._held_by_device[waiting.device]
        self.held_count -= 1

    @staticmethod
    def _oldest(queue: Queue) -> HeldCheckIn:
        return next(iter(queue.values()))

    # -- orders and reports -----------------------------------------------------------------

    def _on_orders(self, now: float, orders: SelectorOrders) -> Effects:
        last = self._orders
        epoch = 0 if last is None else last.epoch
        if orders.boot != self.boot or orders.epoch < epoch:
            return []
        if orders.epoch > epoch:
            self._seen.clear()
            self._report_due = now  # a new leader waits for it
        if orders.number in self._seen:
            return []  # a duplicate
        self._seen[orders.number] = now
        self.led_at = now
        if last is None or orders.epoch > epoch or orders.number > last.number:
            self._take_map(last, orders)
            self._assigns_at = now + orders.assigns_in_s
        effects: Effects = []
        for assignment in orders.assignments:
            effects += self._forward_clients(now, assignment, orders.epoch)
        return effects + self._report_if_due(now)

    def _forget_orders(self, now: float) -> None:
        """Forget orders and sessions whose assignments can no longer be confirmed."""
        limit = now - self._config.confirm_by_s
        self._seen = {number: at for number, at in self._seen.items() if at > limit}
        self._unfilled = {
            session: entry for session, entry in self._unfilled.items() if entry[1] > now
        }

    def _take_map(self, last: SelectorOrders | None, orders: SelectorOrders) -> None:
        if orders.is_short:
            if last is None or (last.epoch, last.catalogue) != (orders.epoch, orders.catalogue):
                return  # the next report says which catalogue this selector has
            orders = replace(
                orders,
                advertised=last.advertised,
                routes=last.routes,
                over=last.over,
            )
        self._orders = orders
        if last is None or last.routes != orders.routes or last.over != orders.over:
            self._map.replace(orders.routes, orders.over)
        if self._unfilled:
            self._unfilled = {s: e for s, e in self._unfilled.items() if e[0] > orders.acked}
        if last is None or last.wanting != orders.wanting or last.advertised != orders.advertised:
            self._welcome.clear()
            self._distinctions = Distinctions(orders.advertised)
            self._offers = {offer.task: offer for offer in orders.advertised}

    def _forward_clients(self, now: float, assignment: Assignment, epoch: int) -> Effects:
        effects: Effects = []
        if now > assignment.confirm_by:
            return effects  # too late: no client could confirm it in time
        offer = self._offers.get(assignment.task, Advertised(assignment.task, Requirements()))
        for session in assignment.sessions:
            queue = self._held.get(assignment.device_class)
            if not queue or self._map.is_over(assignment.task):
                self._unfilled[session] = (self._number + 1, assignment.confirm_by)
                self._report_within(now, self._config.min_report_interval_s)
                continue
            waiting = self._oldest(queue)
            self._let_go(waiting)
            if waiting.device:
                self._open.add(session, waiting.device, assignment.confirm_by)
            needs = offer.needs_of(waiting.device, assignment.device_class)
            ticket = AssignmentTicket(
                assignment.task,
                session,
                assignment.seq,
                assignment.confirm_by,
                assignment.version,
                pseudonym=pseudonym_of(waiting.device, assignment.pseudonym_key),
                epoch=epoch,
                manifest=bytes.fromhex(needs.manifest or ""),
            )
            sealed = self._keyring.seal(ticket)
            accepted = Accepted(sealed, assignment.task, session, needs.bundle or "")
            effects.append(Reply(waiting.handle, accepted))
        return effects

    def _report_within(self, now: float, interval_s: float) -> None:
        """Send a report at most `interval_s` after the last one, or now if that has passed."""
        due = max(now, self._reported_at + interval_s)
        if due < self._report_due:
            self._report_due = due

    def _report_if_due(self, now: float) -> Effects:
        if now < self._report_due:
            return []
        self._number += 1
        self._reported_at = now
        self._report_due = float("inf")
        orders = self._orders
        report = SelectorReport(
            node=self.node,
            boot=self.boot,
            number=self._number,
            epoch=0 if orders is None else orders.epoch,
            acked=0 if orders is None else orders.number,
            held=self._summary(),
            unfilled=tuple(self._unfilled),
            at=now,
            catalogue=0 if orders is None else orders.catalogue,
            check_ins_per_s=self.check_ins_per_s,
        )
        return [Send(coordinator, report) for coordinator in self._coordinators]

    def _summary(self) -> tuple[Held, ...]:
        """Held check-ins by class; only the largest classes if there are too many to report."""
        held = [Held(kind, len(queue)) for kind, queue in self._held.items()]
        if len(held) > _MAX_REPORTED_CLASSES:
            held = nlargest(_MAX_REPORTED_CLASSES, held, key=lambda entry: entry.count)
        return tuple(held)

    # -- participation ----------------------------------------------------------------------

    def route(self, request: Ticketed) -> NodeId | None:
        """Where a request goes, if nothing else is to be done here; None: it needs `receive`."""
        if type(request) is Join:
            return None
        try:
            return self._map.route(claim_of(request.ticket))
        except TicketError:
            return None

    def _on_request(self, request: Ticketed, reply_to: Handle) -> Effects:
        try:
            ticket = claim_of(request.ticket)
        except TicketError as error:
            return [Reply(reply_to, Refused(str(error), error.hint))]
        if type(request) is Join and ticket.session in self._open:
            self._end_open(request)
        aggregator = self._map.route(ticket)
        if aggregator is not None:
            return [Forward(reply_to, aggregator, request)]
        if self._map.is_over(ticket.task):
            return [Reply(reply_to, Aborted("task_over"))]
        after_s = self._config.heartbeat_s / 2
        return [Reply(reply_to, Retry("no aggregator is known for the task", after_s))]

    def _end_open(self, request: Join) -> None:
        """The device joins. Not if the ticket is forged: its lease would stay."""
        try:
            self._open.end(self._keyring.open(request.ticket, AssignmentTicket).session)
        except TicketError:
            return  # the aggregator refuses it
