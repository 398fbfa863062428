"""Control (paper, "High Client Utilization", "Failure Recovery"): messages between servers.

    AGGREGATOR ── AggregatorReport ──▶ COORDINATOR     demand, active, joined; also the heartbeat
               ◀── AggregatorOrders ──                 the tasks this aggregator holds, by row
    SELECTOR   ── SelectorReport ────▶                 held check-ins by device class
               ◀── SelectorOrders ────                 assignments, task list, assignment map

These are one-way messages that may be lost, duplicated or late. Reports are numbered within a boot
of their sender. Orders carry the leader's epoch; orders of an earlier epoch are ignored, and the
first orders of a new one are answered with a report at once.
"""

from __future__ import annotations

from hashlib import sha256

from msgspec import Struct

from papaya.config import Requirements
from papaya.messages.base import Boot, Message, NodeId, SessionId, TaskId
from papaya.messages.selection import DeviceClass, refused


class TaskReport(Struct, frozen=True, gc=False):
    """`joined`: sessions that joined since the last acknowledged report; they confirm leases.

    `ended` counts the sessions that ended at this holder; its growth sets the pace of check-ins.
    `halted`: why the holder makes no versions for now; also set while its blobs cannot be
    read or written, no thread can start for it, or its TSA has a problem. Viewers can read it.
    `version` is the newest committed version.
    `drained`: every update that was folded is in a record, and no other will be folded here.
    `awaited`: clients of earlier holders that have not come yet, for which room is kept.
    `endings`: how often sessions ended at this holder, by ending (`papaya/messages/reasons.py`).
    """

    task: TaskId
    seq: int
    active: int
    demand: int
    ended: int
    joined: tuple[SessionId, ...] = ()
    halted: str = ""
    version: int = 0
    drained: bool = False
    awaited: int = 0
    endings: tuple[tuple[str, int], ...] = ()


class AggregatorReport(Message, frozen=True):
    """`at` is the sender's time: all joins with an earlier confirm-by are in this report.

    `load` is waiting work ÷ work that the aggregator can hold; above 1 it is overloaded.
    `draining`: its process is about to stop, so its tasks have to move.
    """

    node: NodeId
    boot: Boot
    number: int
    at: float
    epoch: int
    load: float
    heartbeat: bool
    tasks: tuple[TaskReport, ...]
    draining: bool = False


class Placement(Struct, frozen=True, gc=False):
    """`leases` are the clients that may already be on their way to a new holder.

    `active`: the active and awaited clients that the last report of an earlier holder named, which
    may come to the new one. None: the leader has seen no such report.
    """

    task: TaskId
    seq: int
    leases: tuple[SessionId, ...] = ()
    active: int | None = None


class AggregatorOrders(Message, frozen=True):
    """All tasks that the rows give to this boot. It must stop any task that is not listed.

    `is_last`: nobody can take these tasks: no other aggregator is there, or the leader stops too.
    """

    epoch: int
    leader: NodeId
    boot: Boot
    number: int
    acked: int
    tasks: tuple[Placement, ...]
    is_last: bool = False


class Drain(Message, frozen=True):
    """Sent by the driver: the process is about to stop.

    `is_alone`: no other process serves this system, so devices have to wait for the restart.
    `drops_uploads`: the time for uploads is over; those that are not being folded are dropped.
    """

    is_alone: bool = False
    drops_uploads: bool = False


class Held(Struct, frozen=True, gc=False):
    device_class: DeviceClass
    count: int


class SelectorReport(Message, frozen=True):
    """`unfilled` are assigned sessions for which no client was held; their leases end.

    `at` is the sender's time. `catalogue`: the number of the catalogue that it has.
    `check_ins_per_s`: in its last heartbeat, for operators.
    """

    node: NodeId
    boot: Boot
    number: int
    epoch: int
    acked: int
    held: tuple[Held, ...]
    unfilled: tuple[SessionId, ...] = ()
    at: float = 0.0
    catalogue: int = 0
    check_ins_per_s: float = 0.0


class CandidateOffer(Struct, frozen=True, gc=False):
    """The revision that a share of the devices gets during a rollout.

    Which devices these are follows from their identities and the digest of the revision. So a
    device keeps it in every check-in and at every selector: it would refuse an earlier revision.
    """

    requirements: Requirements
    share: float

    def takes(self, device: str) -> bool:
        """Is this device in the share? Never without an identity."""
        if not device:
            return False
        drawn = sha256(f"{self.requirements.manifest}/{device}".encode()).digest()[:8]
        return int.from_bytes(drawn) < self.share * 2**64


class Advertised(Struct, frozen=True, gc=False):
    """A task that devices may be offered. `candidate`: during a rollout."""

    task: TaskId
    requirements: Requirements
    is_secure: bool = False
    candidate: CandidateOffer | None = None

    def fits(self, device_class: DeviceClass) -> bool:
        """Is one of its revisions compatible with these devices?"""
        if device_class.fits(self.task, self.requirements, self.is_secure):
            return True
        candidate = self.candidate
        return candidate is not None and device_class.fits(
            self.task, candidate.requirements, self.is_secure
        )

    def needs_of(self, device: str, device_class: DeviceClass) -> Requirements:
        """The revision for this device: the candidate for a share of the devices, unless they have
        refused it, and for those that refuse the other one because they once had the candidate.
        """
        candidate, excluded = self.candidate, device_class.excluded
        if candidate is None:
            return self.requirements
        has_refused = refused(self.task, candidate.requirements.bundle or "") in excluded
        cannot_go_back = refused(self.task, self.requirements.bundle or "") in excluded
        if not has_refused and (cannot_go_back or candidate.takes(device)):
            return candidate.requirements
        return self.requirements


class Route(Struct, frozen=True, gc=False):
    """One entry of the assignment map."""

    task: TaskId
    aggregator: NodeId
    seq: int


class Assignment(Struct, frozen=True, gc=False):
    """Accept one held client of the class for each session.

    `version` is the newest one that the holder with this `seq` had reported.
    `pseudonym_key`: of the task, for the pseudonyms in the tickets.
    """

    task: TaskId
    seq: int
    device_class: DeviceClass
    sessions: tuple[SessionId, ...]
    confirm_by: float
    version: int = 0
    pseudonym_key: bytes = b""


class SelectorOrders(Message, frozen=True):
    """`wanting`: tasks with demand. `over`: tasks that ended but whose clients may still ask.
    `check_ins_per_s`: this selector's share of the pace. `assigns_in_s`: how long a new leader may
    assign no client, because no holder has reported to it yet.

    The catalogue is `advertised`, `routes` and `over`: they are long and change rarely. `catalogue`
    is its number under this leader. `is_short`: the selector has reported that it has this
    catalogue, so the three are left out.
    """

    epoch: int
    leader: NodeId
    boot: Boot
    number: int
    acked: int
    advertised: tuple[Advertised, ...]
    wanting: tuple[TaskId, ...]
    routes: tuple[Route, ...]
    check_ins_per_s: float
    over: tuple[TaskId, ...] = ()
    assignments: tuple[Assignment, ...] = ()
    assigns_in_s: float = 0.0
    catalogue: int = 0
    is_short: bool = False


Control = AggregatorReport | AggregatorOrders | SelectorReport | SelectorOrders
