"""Storage: the rows of the state store and the one kind of transaction on them.

    machine ── Transaction ──▶ STATE     if all of `require` hold: all of `put` and `delete`
            ◀── Outcome ──────           committed | refused | unknown (read back before going on)

The rules live in the machines: a store only compares rows. So a fence is `require fence row ==
mine`, a lease is compare-and-set, and every back end (SQLite, PostgreSQL, the simulator's twin)
needs this one primitive, atomic and durable. Blobs go first, rows name them after.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from papaya.config import TaskConfig
from papaya.messages.base import BlobKey, Message, NodeId, SessionId, TaskId


class Row(Struct, frozen=True, gc=False, tag=True):
    """A value in the state store."""


class LeaderRow(Row, frozen=True):
    """Who leads. Every renewal changes it: who sees it change sees a live leader."""

    holder: NodeId
    boot: float
    epoch: int
    renewal: int


class EpochRow(Row, frozen=True):
    """Changes only when the leader does, so that a placement can require it between renewals."""

    epoch: int


TaskState = Literal["running", "paused", "completed", "cancelled"]


class TaskRow(Row, frozen=True):
    """`why` and `ended` tell of a task that is completed or cancelled, and is over."""

    config: TaskConfig
    state: TaskState = "running"
    submitted: float = 0.0
    why: str = ""
    ended: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.state in ("completed", "cancelled")


class FenceRow(Row, frozen=True):
    """Who holds the task. Every write of an aggregator requires the fence that it was given."""

    seq: int
    aggregator: NodeId
    boot: float


class Member(Struct, frozen=True, gc=False, array_like=True):
    """One counted update. `keep_until`: no ticket of the session is valid after it.

    `offer`: under secure aggregation, the index by which the TSA knows its seed.
    """

    session: SessionId
    version: int
    staleness: int
    examples: int
    keep_until: float
    offer: int = -1


class RecordRow(Row, frozen=True):
    """The durable part of the buffer that will become version `target`."""

    target: int
    sum: BlobKey
    members: tuple[Member, ...]
    weight: float


class VersionRow(Row, frozen=True):
    """One server model. `seq` is the fence under which it was committed.

    Kept for as long as it is among the last, a ticket may name it, its owner marked it, or an
    evaluation pins it (`kept_until`).
    `restarts`: the owner rolled the task back to an earlier model here; updates that were trained
    from versions between belong to a branch that was given up.
    `evaluations`: how many were started, so that no two of them ever have the same name.
    """

    version: int
    parameters: BlobKey
    seq: int
    created: float
    marked: bool = False
    restarts: bool = False
    kept_until: float = 0.0
    evaluations: int = 0


class OptimizerRow(Row, frozen=True):
    """Server optimizer state that goes with the newest version."""

    version: int
    state: BlobKey


class ConsumedRow(Row, frozen=True):
    """The members of one version, kept until their tickets expire whatever becomes of it."""

    version: int
    members: tuple[Member, ...]


class ManifestRow(Row, frozen=True):
    """Names and shapes of a task's tensors, for whoever exports a version."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]


class TicketKeyRow(Row, frozen=True):
    """A key that seals tickets. The newest that every server knows seals; older ones still open."""

    key: bytes
    created: float


class PointRow(Row, frozen=True):
    """One version in the history of a task: what stays when the version itself is deleted."""

    version: int
    created: float
    members: int
    examples: int
    staleness: float
    loss: float | None = None
    perplexity: float | None = None
    evaluated: str = ""
    """The evaluation's whole result, as JSON."""


class Transaction(Struct, frozen=True, gc=False):
    require: tuple[tuple[str, Row | None], ...] = ()
    put: tuple[tuple[str, Row], ...] = ()
    delete: tuple[str, ...] = ()


Outcome = Literal["committed", "refused", "unknown"]


class Transacted(Message, frozen=True):
    token: int
    outcome: Outcome


class Rows(Message, frozen=True):
    """The answer to a read: one consistent snapshot, ordered by key."""

    token: int
    rows: tuple[tuple[str, Row], ...]


class Changed(Message, frozen=True):
    """From the driver: somebody else changed rows; look at them now rather than later."""


LEADER_KEY = "leader"
EPOCH_KEY = "epoch"
TASKS = "task/"
FENCES = "fence/"
TICKET_KEYS = "ticket-key/"


def task_key(task: TaskId) -> str:
    return f"task/{task}"


def fence_key(task: TaskId) -> str:
    return f"fence/{task}"


def optimizer_key(task: TaskId) -> str:
    return f"optimizer/{task}"


def record_key(task: TaskId, target: int) -> str:
    return f"record/{task}/{target:012d}"


def version_key(task: TaskId, version: int) -> str:
    return f"version/{task}/{version:012d}"


def consumed_key(task: TaskId, version: int) -> str:
    return f"consumed/{task}/{version:012d}"


def manifest_key(task: TaskId) -> str:
    return f"manifest/{task}"


def point_key(task: TaskId, version: int) -> str:
    return f"point/{task}/{version:012d}"


def ticket_key_key(key_id: int) -> str:
    return f"{TICKET_KEYS}{key_id:012d}"


def holder_prefixes(task: TaskId) -> tuple[str, ...]:
    """All that a successor reads, in one snapshot, once the fence names it."""
    return (
        fence_key(task),
        task_key(task),
        optimizer_key(task),
        f"record/{task}/",
        f"version/{task}/",
        f"consumed/{task}/",
    )


def submission(
    config: TaskConfig, parameters: BlobKey, optimizer: BlobKey, now: float
) -> Transaction:
    """A new task at version 0, held by nobody yet. Refused when the task exists."""
    # As it will be read back: 1 in a field of floats is written as 1 and comes back as 1.0.
    config = msgspec.convert(msgspec.to_builtins(config), TaskConfig)
    task = config.task
    return Transaction(
        require=((task_key(task), None),),
        put=(
            (task_key(task), TaskRow(config, submitted=now)),
            (fence_key(task), FenceRow(seq=0, aggregator="", boot=0.0)),
            (version_key(task, 0), VersionRow(0, parameters, seq=0, created=now)),
            (optimizer_key(task), OptimizerRow(0, optimizer)),
        ),
    )
