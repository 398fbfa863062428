"""The Selector (paper, "System Components"): the only server that devices talk to.

    "it advertises available tasks to clients, and summarizes current client availability for the
    Coordinator [...]. For client participation, the Selector routes client requests to the
    corresponding Aggregator".

It holds a check-in while a task that fits the device needs clients, rejects the others at once, and
forwards every later request by its ticket. It has no durable state: after a crash, devices retry at
another selector.

A device whose token identifies it holds one check-in at a time, and at most
`MAX_OPEN_ASSIGNMENTS` that it has not joined: nobody can take all slots by never joining. A join
counts once it gets an answer other than Retry; until then the slot stays reserved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from msgspec.structs import replace

from papaya.config import Requirements, ServerConfig
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
from papaya.messages.control import Advertised, Assignment, Drain, SelectorOrders, SelectorReport
from papaya.messages.participation import Aborted, Refused, Retry, Ticketed
from papaya.messages.selection import (
    MAX_LACKS,
    Accepted,
    CheckIn,
    DeviceClass,
    Gone,
    IdentifiedCheckIn,
    JoinDecided,
    Lack,
    Rejected,
)
from papaya.messages.storage import Revoked
from papaya.messages.tickets import AssignmentTicket, Keyring, claim_of, pseudonym_of
from papaya.selector.assignment_map import AssignmentMap
from papaya.selector.device_classes import Distinctions, lacks_for
from papaya.selector.held_check_ins import HeldCheckIn, HeldCheckIns
from papaya.selector.pacing import Pacing

MAX_OPEN_ASSIGNMENTS = 2

_REVOKED = Refused("this device was revoked", "ask the operator of the servers")
_STOPPING_RETRY_S = 1.0


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
        if session not in self._given:
            return  # given by another selector, or ended
        device, _ = self._given.pop(session)
        self._counts[device] -= 1
        if not self._counts[device]:
            del self._counts[device]

    def expire(self, now: float) -> None:
        for session in [s for s, (_, confirm_by) in self._given.items() if confirm_by < now]:
            self.end(session)

    def __bool__(self) -> bool:
        return bool(self._given)


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

        # Check-ins that wait for an assignment.
        self.held = HeldCheckIns()
        # Devices with an identity: open assignments, and who is revoked.
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
            case JoinDecided():
                return self._on_join_decided(message)
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
        if sweep >= due or not self.held.in_order:
            return due
        return min(due, max(self.held.next_deadline(), sweep))

    @property
    def check_ins_per_s(self) -> float:
        """In the last heartbeat."""
        return self._pacing.measured_per_s

    def check(self) -> None:
        self.held.check()
        if len(self.held) > self._config.max_held:
            raise InvariantError(
                f"{self.node}: {len(self.held)} held check-ins, max_held is {self._config.max_held}"
            )

    # -- selection --------------------------------------------------------------------------

    def _on_identified(self, now: float, message: IdentifiedCheckIn, reply_to: Handle) -> Effects:
        """A check-in ends an earlier one of the same device."""
        device = message.device
        earlier = self.held.of_device(device)
        if earlier is not None and earlier.handle == reply_to:
            return []  # a duplicate of a request that is already held
        effects: Effects = []
        if earlier is not None:
            self.held.let_go(earlier)
            replaced = Retry("replaced by a newer check-in of this device", 0.0)
            effects.append(Reply(earlier.handle, replaced))
        if device in self._revoked:
            return [*effects, Reply(reply_to, _REVOKED)]
        if self._open.count(device) >= MAX_OPEN_ASSIGNMENTS:
            self._pacing.arrived()
            reason = "this device has assignments that it has not joined"
            return [*effects, self._reject(now, reply_to, reason)]
        return effects + self._on_check_in(now, message.check_in, reply_to, device)

    def _on_join_decided(self, message: JoinDecided) -> Effects:
        """End the open assignment, unless the ticket is forged: then the slot stays reserved."""
        if self._open:
            with suppress(TicketError):
                self._open.end(self._keyring.open(message.ticket, AssignmentTicket).session)
        return []

    def _on_revoked(self, now: float, message: Revoked) -> Effects:
        self._revoked = frozenset(message.devices)
        effects: Effects = []
        for device in message.devices:
            waiting = self.held.of_device(device)
            if waiting is not None:
                self.held.let_go(waiting)
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
        if reply_to in self.held.in_order:
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
        if len(self.held) >= self._config.max_held:
            return [self._reject(now, reply_to, "too many devices are waiting")]
        waiting = HeldCheckIn(now + self._config.hold_s, device_class, reply_to, device)
        is_first = self.held.add(waiting)
        config = self._config
        self._report_within(
            now, config.min_report_interval_s if is_first else config.held_report_interval_s
        )
        return self._report_if_due(now)

    def _on_gone(self, now: float, handle: Handle) -> Effects:
        waiting = self.held.in_order.get(handle)
        if waiting is not None:
            self.held.let_go(waiting)
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
        pinned = check_in.capabilities.owners
        if owners and not any(o is None or o in pinned for o in owners):
            if not pinned:
                return "all tasks that need clients are signed; this device has pinned no owners"
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
        for waiting in list(self.held.in_order.values()):
            self.held.let_go(waiting)
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
        for waiting in self.held.expired(now):
            effects.append(self._reject(now, waiting.handle, "no task needed this device in time"))
            self._report_within(now, self._config.held_report_interval_s)
        return effects

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
            waiting = self.held.oldest_of(assignment.device_class)
            if waiting is None or self._map.is_over(assignment.task):
                self._unfilled[session] = (self._number + 1, assignment.confirm_by)
                self._report_within(now, self._config.min_report_interval_s)
                continue
            self.held.let_go(waiting)
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
        if self.held.has_unreported:
            self._report_within(now, self._config.held_report_interval_s)
        orders = self._orders
        report = SelectorReport(
            node=self.node,
            boot=self.boot,
            number=self._number,
            epoch=0 if orders is None else orders.epoch,
            acked=0 if orders is None else orders.number,
            held=self.held.summary(),
            unfilled=tuple(self._unfilled),
            at=now,
            catalogue=0 if orders is None else orders.catalogue,
            check_ins_per_s=self.check_ins_per_s,
        )
        return [Send(coordinator, report) for coordinator in self._coordinators]

    # -- participation ----------------------------------------------------------------------

    def route(self, request: Ticketed) -> NodeId | None:
        """Where a request goes, if nothing else is to be done here; None: it needs `receive`."""
        try:
            return self._map.route(claim_of(request.ticket))
        except TicketError:
            return None

    def _on_request(self, request: Ticketed, reply_to: Handle) -> Effects:
        try:
            ticket = claim_of(request.ticket)
        except TicketError as error:
            return [Reply(reply_to, Refused(str(error), error.hint))]
        aggregator = self._map.route(ticket)
        if aggregator is not None:
            return [Forward(reply_to, aggregator, request)]
        if self._map.is_over(ticket.task):
            return [Reply(reply_to, Aborted("task_over"))]
        after_s = self._config.heartbeat_s / 2
        return [Reply(reply_to, Retry("no aggregator is known for the task", after_s))]
