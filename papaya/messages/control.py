"""Control (paper, "High Client Utilization", "Failure Recovery"): servers among themselves.

    AGGREGATOR ── AggregatorReport ──▶ COORDINATOR     demand, active, joined; also the heartbeat
               ◀── AggregatorOrders ──                 the tasks this aggregator holds, by row
    SELECTOR   ── SelectorReport ────▶                 held check-ins by device class
               ◀── SelectorOrders ────                 assignments, task list, assignment map

One-way messages: each may be lost, doubled or late. Reports are numbered within a boot of their
sender; orders carry the leader's epoch and a lower one is ignored.
"""

from __future__ import annotations

from msgspec import Struct

from papaya.config import Requirements
from papaya.messages.base import Message, NodeId, SessionId, TaskId
from papaya.messages.selection import DeviceClass


class TaskReport(Struct, frozen=True, gc=False):
    """`joined`: sessions that joined since the last acknowledged report; they confirm leases.

    `ended` counts sessions that ended at this holder; its growth paces the check-ins.
    """

    task: TaskId
    seq: int
    active: int
    demand: int
    ended: int
    joined: tuple[SessionId, ...] = ()
    halted: str = ""


class AggregatorReport(Message, frozen=True):
    """`at` is the sender's clock: joins whose confirm-by lies before it are all in this report.

    `load` is work waiting ÷ work that the aggregator can hold; above 1 it is overloaded.
    """

    node: NodeId
    boot: float
    number: int
    at: float
    epoch: int
    load: float
    heartbeat: bool
    tasks: tuple[TaskReport, ...]


class Placement(Struct, frozen=True, gc=False):
    """`leases` tells a successor which clients are on their way to it already."""

    task: TaskId
    seq: int
    leases: tuple[SessionId, ...] = ()


class AggregatorOrders(Message, frozen=True):
    """Every task that the rows give to this boot; what is not listed must stop."""

    epoch: int
    leader: NodeId
    boot: float
    number: int
    acked: int
    tasks: tuple[Placement, ...]


class Held(Struct, frozen=True, gc=False):
    device_class: DeviceClass
    count: int


class SelectorReport(Message, frozen=True):
    """`unfilled` are sessions that found no held client: their leases end at once."""

    node: NodeId
    boot: float
    number: int
    epoch: int
    acked: int
    held: tuple[Held, ...]
    unfilled: tuple[SessionId, ...] = ()


class Advertised(Struct, frozen=True, gc=False):
    task: TaskId
    requirements: Requirements


class Route(Struct, frozen=True, gc=False):
    """One entry of the assignment map."""

    task: TaskId
    aggregator: NodeId
    seq: int


class Assignment(Struct, frozen=True, gc=False):
    """Forward this many held clients of the class: one for each session."""

    task: TaskId
    seq: int
    device_class: DeviceClass
    sessions: tuple[SessionId, ...]
    confirm_by: float


class SelectorOrders(Message, frozen=True):
    """`wanting`: tasks with demand; `over`: tasks that ended while tickets of theirs may be about;
    `check_ins_per_s`: this selector's share of the pace.
    """

    epoch: int
    leader: NodeId
    boot: float
    number: int
    acked: int
    advertised: tuple[Advertised, ...]
    wanting: tuple[TaskId, ...]
    routes: tuple[Route, ...]
    check_ins_per_s: float
    over: tuple[TaskId, ...] = ()
    assignments: tuple[Assignment, ...] = ()


Control = AggregatorReport | AggregatorOrders | SelectorReport | SelectorOrders
