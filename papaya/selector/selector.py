"""The Selector (paper, "System Components"): the only door for devices.

    "it advertises available tasks to clients, and summarizes current client availability for the
    Coordinator [...]. For client participation, the Selector routes client requests to the
    corresponding Aggregator".

It holds devices that fit a task that wants clients, answers the others at once, and forwards every
later request by its ticket. It keeps nothing that a crash could lose: devices retry elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from heapq import nlargest
from typing import TypeAlias

from papaya.config import ServerConfig
from papaya.errors import InvariantError, ProtocolError, TicketError
from papaya.machine import Effects, Forward, Handle, Reply, Send
from papaya.messages.base import PROTOCOL_VERSION, Message, NodeId, SessionId
from papaya.messages.control import Assignment, Held, SelectorOrders, SelectorReport
from papaya.messages.participation import Aborted, Refused, Retry, Ticketed
from papaya.messages.selection import Accepted, CheckIn, DeviceClass, Gone, Rejected
from papaya.messages.tickets import AssignmentTicket, Keyring, claim_of
from papaya.selector.classes import Distinctions
from papaya.selector.pacing import Pacing
from papaya.selector.routing import AssignmentMap

_MAX_REPORTED_CLASSES = 256


class HeldCheckIn:
    """A held check-in."""

    __slots__ = ("deadline", "device_class", "handle")

    def __init__(self, deadline: float, device_class: DeviceClass, handle: Handle) -> None:
        self.deadline = deadline
        self.device_class = device_class
        self.handle = handle


# Oldest first, by the handle, of which each stands for one request. Not a dict: to find the first
# that is left, a dict passes over all that were taken out before it.
Queue: TypeAlias = OrderedDict[Handle, HeldCheckIn]


class Selector:
    """Invariants: held <= max_held; a held device is answered once, soon after hold_s at most."""

    def __init__(
        self,
        node: NodeId,
        boot: float,
        config: ServerConfig,
        keyring: Keyring,
        coordinators: Sequence[NodeId],
    ) -> None:
        self.node = node
        self.boot = boot
        self.held_count = 0
        self._config = config
        self._keyring = keyring
        self._coordinators = tuple(coordinators)
        self._orders: SelectorOrders | None = None
        self._seen: dict[int, float] = {}
        self._map = AssignmentMap()
        self._pacing = Pacing(boot, config)
        self._held: dict[DeviceClass, Queue] = {}
        self._in_order: Queue = OrderedDict()
        self._welcome: dict[DeviceClass, bool] = {}
        self._distinctions = Distinctions()
        self._unfilled: dict[SessionId, tuple[int, float]] = {}
        self._number = 0
        self._reported_at = -float("inf")
        self._report_due = boot
        self._expired_at = boot
        self._next_beat = boot + config.heartbeat_s

    # -- the machine contract ---------------------------------------------------------------

    def receive(self, now: float, message: Message, reply_to: Handle = None) -> Effects:
        if isinstance(message, Ticketed):
            return self._on_request(message, reply_to)
        match message:
            case CheckIn():
                return self._on_check_in(now, message, reply_to)
            case SelectorOrders():
                return self._on_orders(now, message)
            case Gone():
                return self._on_gone(now, reply_to)
        raise ProtocolError(f"a selector does not take {type(message).__name__}")

    def wake(self, now: float) -> Effects:
        self._expired_at = now
        effects = self._expire(now)
        if now >= self._next_beat:
            self._next_beat = now + self._config.heartbeat_s
            if self._orders is not None:
                self._pacing.adjust(now, self._orders.check_ins_per_s)
            self._forget_orders(now)
            self._report_due = now
        return effects + self._report_if_due(now)

    def next_wake(self) -> float:
        due = min(self._next_beat, self._report_due)
        if not self._in_order:
            return due
        sweep = self._expired_at + self._config.held_report_interval_s
        return min(due, max(self._oldest(self._in_order).deadline, sweep))

    def check(self) -> None:
        waiting = len(self._in_order)
        by_class = sum(len(queue) for queue in self._held.values())
        if not waiting == by_class == self.held_count or waiting > self._config.max_held:
            raise InvariantError(
                f"{self.node}: holds {waiting} check-ins, {by_class} by class, counts "
                f"{self.held_count}, may hold {self._config.max_held}"
            )

    # -- selection --------------------------------------------------------------------------

    def _on_check_in(self, now: float, check_in: CheckIn, reply_to: Handle) -> Effects:
        if check_in.protocol != PROTOCOL_VERSION:
            reason = f"protocol {check_in.protocol} is not spoken here, {PROTOCOL_VERSION} is"
            return [Reply(reply_to, Refused(reason, "update the client"))]
        if reply_to in self._in_order:
            return []  # a network that doubles a request: it is held once and answered once
        self._pacing.arrived()
        device_class = self._distinctions.class_of(check_in)
        if not self._is_welcome(device_class):
            return [self._reject(reply_to, "no task that fits wants clients now")]
        if self.held_count >= self._config.max_held:
            return [self._reject(reply_to, "too many devices are waiting")]
        waiting = HeldCheckIn(now + self._config.hold_s, device_class, reply_to)
        self._in_order[reply_to] = waiting
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
        """Does any advertised task with demand fit?"""
        welcome = self._welcome.get(device_class)
        if welcome is None:
            orders = self._orders
            welcome = orders is not None and any(
                offer.task in orders.wanting and device_class.fits(offer.task, offer.requirements)
                for offer in orders.advertised
            )
            if len(self._welcome) >= self._config.max_held:
                self._welcome.clear()  # a cache, not a record of everyone who knocked
            self._welcome[device_class] = welcome
        return welcome

    def _reject(self, handle: Handle, reason: str) -> Reply:
        return Reply(handle, Rejected(reason, *self._pacing.window()))

    def _expire(self, now: float) -> Effects:
        effects: Effects = []
        while self._in_order and (waiting := self._oldest(self._in_order)).deadline <= now:
            self._let_go(waiting)
            effects.append(self._reject(waiting.handle, "nothing came up while you waited"))
            self._report_within(now, self._config.held_report_interval_s)
        return effects

    def _let_go(self, waiting: HeldCheckIn) -> None:
        """It is answered, or gone: either way it is held no longer."""
        del self._in_order[waiting.handle]
        queue = self._held[waiting.device_class]
        del queue[waiting.handle]
        if not queue:
            del self._held[waiting.device_class]
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
        if orders.number in self._seen:
            return []  # the network doubled it
        self._seen[orders.number] = now
        if last is None or orders.epoch > epoch or orders.number > last.number:
            self._take_map(last, orders)
        effects: Effects = []
        for assignment in orders.assignments:
            effects += self._forward_clients(now, assignment)
        return effects + self._report_if_due(now)

    def _forget_orders(self, now: float) -> None:
        """What can no longer be confirmed need not be remembered."""
        limit = now - self._config.confirm_by_s
        self._seen = {number: at for number, at in self._seen.items() if at > limit}
        self._unfilled = {
            session: entry for session, entry in self._unfilled.items() if entry[1] > now
        }

    def _take_map(self, last: SelectorOrders | None, orders: SelectorOrders) -> None:
        self._orders = orders
        if last is None or last.routes != orders.routes or last.over != orders.over:
            self._map.replace(orders.routes, orders.over)
        if self._unfilled:
            self._unfilled = {s: e for s, e in self._unfilled.items() if e[0] > orders.acked}
        if last is None or last.wanting != orders.wanting or last.advertised != orders.advertised:
            self._welcome.clear()
            self._distinctions = Distinctions(orders.advertised)

    def _forward_clients(self, now: float, assignment: Assignment) -> Effects:
        effects: Effects = []
        if now > assignment.confirm_by:
            return effects  # nobody could confirm it any more
        for session in assignment.sessions:
            queue = self._held.get(assignment.device_class)
            if not queue:
                self._unfilled[session] = (self._number + 1, assignment.confirm_by)
                self._report_within(now, self._config.min_report_interval_s)
                continue
            ticket = AssignmentTicket(
                assignment.task, session, assignment.seq, assignment.confirm_by
            )
            accepted = Accepted(self._keyring.seal(ticket), assignment.task, session)
            waiting = self._oldest(queue)
            self._let_go(waiting)
            effects.append(Reply(waiting.handle, accepted))
        return effects

    def _report_within(self, now: float, interval_s: float) -> None:
        """What the Coordinator may wait for goes at once, a change of counts a little later."""
        self._report_due = min(self._report_due, max(now, self._reported_at + interval_s))

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
        )
        return [Send(coordinator, report) for coordinator in self._coordinators]

    def _summary(self) -> tuple[Held, ...]:
        """Held check-ins by class; the most common classes when there are too many to report."""
        held = [Held(kind, len(queue)) for kind, queue in self._held.items()]
        if len(held) > _MAX_REPORTED_CLASSES:
            held = nlargest(_MAX_REPORTED_CLASSES, held, key=lambda entry: entry.count)
        return tuple(held)

    # -- participation ----------------------------------------------------------------------

    def _on_request(self, request: Ticketed, reply_to: Handle) -> Effects:
        try:
            ticket = claim_of(request.ticket)
        except TicketError as error:
            return [Reply(reply_to, Refused(str(error), error.hint))]
        if self._map.is_over(ticket.task):
            return [Reply(reply_to, Aborted("task_over"))]
        aggregator = self._map.route(ticket)
        if aggregator is None:
            after_s = self._config.heartbeat_s / 2
            return [Reply(reply_to, Retry("this selector knows no holder of the task", after_s))]
        return [Forward(reply_to, aggregator, request)]
