"""Requests and answers of the admin API, as typed JSON, for `papaya task` and `papaya status`.

Readers ignore unknown fields, so that an older command understands a newer server. No field
contains a secret.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from papaya.config import TaskConfig
from papaya.messages.audit_trail import AuditHeadRow, AuditRow, AuditStartRow
from papaya.messages.base import BlobKey, NodeId, TaskId
from papaya.messages.storage import (
    AccountRole,
    ArmCounts,
    MaintenanceRow,
    PointRow,
    RolloutPlan,
    RolloutState,
    TaskState,
)

Why = Annotated[str, Meta(max_length=500)]
Version = Annotated[int, Meta(ge=0, le=2**53)]
Tensors = tuple[tuple[str, tuple[int, ...]], ...]


class ProblemBody(Struct, frozen=True):
    """The body of every error."""

    error: str
    hint: str = ""


class Stored(Struct, frozen=True):
    """The key under which parameters were stored; a submission names it."""

    parameters: BlobKey


class NewTask(Struct, frozen=True):
    """A submission. `manifest`: the model's tensors in the order of the vector.

    `bundle`: what the owner has signed; its program was stored before. `replace`: cancel the run
    of the same name that is not over.
    """

    config: TaskConfig
    parameters: BlobKey
    manifest: Tensors = ()
    bundle: bytes = b""
    replace: bool = False
    why: Why = ""


class Revision(Struct, frozen=True):
    """New settings of a running task, and what the owner has signed about them."""

    config: TaskConfig
    bundle: bytes
    why: Why = ""


class SignedBundle(Struct, frozen=True):
    """The newest bundle of a task; empty if it has none."""

    bundle: bytes


class RevisionView(Struct, frozen=True):
    """One revision of a run. `manifest` is the owner's signed statement, as JSON."""

    revision: int
    created: float
    config: TaskConfig
    manifest: bytes


class Deletion(Struct, frozen=True):
    """A task that was deleted. Its rows and blobs are removed after `gone_after`: until then its
    last clients may have valid tickets.
    """

    task: TaskId
    name: str
    gone_after: float


class ChangeReason(Struct, frozen=True):
    """A change without settings. Every change has a `why`, for the audit trail."""

    why: Why = ""


class RollBack(Struct, frozen=True):
    version: Version
    why: Why = ""


class Mark(Struct, frozen=True):
    version: Version
    marked: bool = True
    why: Why = ""


class Evaluate(Struct, frozen=True):
    """None means the newest version, and the plan's number of clients. `norms`: make a histogram of
    the norms of updates instead.
    """

    version: Version | None = None
    clients: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    why: Why = ""
    norms: bool = False


class Revoke(Struct, frozen=True):
    """`device` is the identity that its token shows. `revoked` = false undoes a revocation."""

    device: Annotated[str, Meta(min_length=1, max_length=256)]
    revoked: bool = True
    why: Why = ""


class Revocation(Struct, frozen=True):
    """`is_seen`: whether the device has checked in here since this process started; None if this
    process cannot know, because it has no selector.
    """

    device: str
    at: float
    is_seen: bool | None = None


class AuditPage(Struct, frozen=True):
    """Part of the audit trail: rows after one number, in order, at most a page of them.

    `start`, `head`: number and digest of the last row that was deleted, and of the newest row.
    """

    start: AuditStartRow
    head: AuditHeadRow
    rows: tuple[AuditRow, ...]


class PruneTrail(Struct, frozen=True):
    """Delete the rows up to this number. `digest`: of that row, as the caller has exported it."""

    number: Annotated[int, Meta(ge=1, le=2**53)]
    digest: bytes
    why: Why = ""


AccountName = Annotated[str, Meta(max_length=128)]
Limit = Annotated[int, Meta(ge=0, le=2**53)] | None


class QuotaLimits(Struct, frozen=True):
    """What the tasks of an account may use; None means no limit."""

    tasks: Limit = None
    concurrency: Limit = None
    model_length: Limit = None


class SetQuota(QuotaLimits, frozen=True):
    why: Why = ""


class NewAccount(Struct, frozen=True):
    """`prefixes`: for an owner, those of the names of its tasks. `days`: None means forever."""

    name: AccountName
    role: AccountRole
    prefixes: Annotated[tuple[AccountName, ...], Meta(max_length=32)] = ()
    days: Annotated[float, Meta(gt=0, le=36_500)] | None = None
    quota: QuotaLimits = QuotaLimits()
    why: Why = ""


class RevokeAccount(Struct, frozen=True):
    """`revoked` = false undoes it, for accounts of an identity provider only."""

    revoked: bool = True
    why: Why = ""


class AccountView(Struct, frozen=True, kw_only=True):
    """An account, what it may use and what it uses. `expires`: 0 means never."""

    name: str
    role: AccountRole
    prefixes: tuple[str, ...] = ()
    created: float = 0.0
    expires: float = 0.0
    revoked: float = 0.0
    quota: QuotaLimits = QuotaLimits()
    tasks: int = 0
    """Tasks that are not over."""
    concurrency: int = 0
    """The sum over these tasks."""


class AddedAccount(Struct, frozen=True):
    """The only message that has the token: the server keeps its hash."""

    account: AccountView
    token: str


class SetShare(Struct, frozen=True):
    """A task's part in scarce devices. What is None stays as it is."""

    weight: Annotated[float, Meta(gt=0, le=1_000_000)] | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    why: Why = ""


class RotateTicketKeys(Struct, frozen=True):
    """Replace all keys of tickets now."""

    why: Why = ""


class BeginMaintenance(Struct, frozen=True):
    """`is_stopped`: also take all tasks from their aggregators now. `for_s`: when devices are told
    to come back; None if that is unknown.
    """

    is_stopped: bool = False
    for_s: Annotated[float, Meta(gt=0, le=30 * 86400)] | None = None
    why: Why = ""


class BeginRollout(Struct, frozen=True):
    """The next revision, and the one after it with the settings of now, to roll back to."""

    config: TaskConfig
    bundle: bytes
    fallback: bytes
    plan: RolloutPlan
    why: Why = ""


class EndRollout(Struct, frozen=True):
    """Give the revision to all devices at once, or take it back."""

    action: Literal["finish", "roll_back"]
    why: Why = ""


class RolloutView(Struct, frozen=True, kw_only=True):
    """The last rollout of a task. The counts and values are those of its step."""

    revision: int
    state: RolloutState
    share: float
    plan: RolloutPlan
    step: int
    since: float
    ended: float
    why: str
    baseline: float
    baseline_version: int
    values: tuple[tuple[int, float], ...] = ()
    """Evaluated versions and the metric there."""
    good: int = 0
    """Evaluations after the step had its updates."""
    counts: ArmCounts = ArmCounts()


class TaskView(Struct, frozen=True, kw_only=True):
    """A task in one line. Fields that only the leading coordinator knows are else None."""

    task: TaskId
    name: str = ""
    """The owner's name for it, if `task` is the id of one run; else empty."""
    owner: str = ""
    account: str = ""
    """Who submitted it; empty if an operator did."""
    weight: float = 1.0
    priority: int = 0
    run: int = 0
    revision: int = 0
    signed: int = 0
    """The highest revision that the owner has signed, if it is above `revision`."""
    lease_until: float = 0.0
    """Devices may start to train the task until then; 0 without an owner."""
    state: TaskState
    why: str
    regime: str
    concurrency: int
    aggregation_goal: int
    version: int
    submitted: float
    ended: float
    evaluates: str = ""
    holder: NodeId = ""
    halted: str = ""
    active: int | None = None
    demand: int | None = None
    utilization: float | None = None
    held: int | None = None
    """Held check-ins of eligible devices."""
    silent_s: float = 0.0
    """Seconds since the last report of the holder if the next one is missing, else 0. `active`,
    `demand` and `utilization` are from that report."""
    evaluated: int | None = None
    """The newest evaluated version, to which `loss`, `perplexity` and `metrics` belong."""
    loss: float | None = None
    perplexity: float | None = None
    metrics: dict[str, float] = {}
    deviations: dict[str, float] = {}
    """The standard deviations of the noise in them, by name, if there is any."""


class TaskDetail(Struct, frozen=True, kw_only=True):
    task: TaskView
    config: TaskConfig
    manifest: Tensors
    points: tuple[PointRow, ...]
    """The newest points, in order of version."""
    versions_per_minute: float
    warnings: tuple[str, ...]
    endings: dict[str, int] = {}
    """Number of participations by ending (`papaya/messages/reasons.py`)."""
    open_updates: int = 0
    """Acknowledged updates that are not in a version yet."""
    rollout: RolloutView | None = None


class EventView(Struct, frozen=True):
    """An event in the log of a server, such as a task that moved (docs/logs.md)."""

    at: float
    node: str
    event: str
    level: str
    fields: dict[str, object]


class VersionView(Struct, frozen=True):
    version: int
    created: float
    marked: bool
    restarts: bool
    parameters: BlobKey


class Started(Struct, frozen=True):
    """An evaluation that was started."""

    task: TaskId
    version: int


class AggregatorStatus(Struct, frozen=True):
    node: NodeId
    heard_s_ago: float
    tasks: int
    is_overloaded: bool


class SelectorStatus(Struct, frozen=True):
    """`check_ins_per_s`: in its last heartbeat."""

    node: NodeId
    heard_s_ago: float
    held: int
    check_ins_per_s: float = 0.0


class EvidenceView(Struct, frozen=True):
    """What vouches for the TSA, as this server is configured: the platform of its evidence, and the
    newest checkpoint of the public log here; `origin` is empty if there is none.
    """

    platform: str
    origin: str = ""
    size: int = 0
    root: str = ""


class ClockStatus(Struct, frozen=True):
    """A server whose clock differs from the leader's by a heartbeat or more."""

    node: NodeId
    ahead_s: float
    is_refused: bool

    def __str__(self) -> str:
        ahead = "ahead of" if self.ahead_s > 0 else "behind"
        verdict = "refused" if self.is_refused else "still accepted"
        return (
            f"the clock of {self.node} is {abs(self.ahead_s):.0f} s {ahead} the leader's: its "
            f"reports are {verdict}; correct the wrong clock, then restart that server"
        )


class SystemStatus(Struct, frozen=True, kw_only=True):
    """`leads`: whether the coordinator of this process is the leader. If not, ask `leader`.

    `is_led`: whether any coordinator renewed its lease in time, as seen from this process.
    `just_started`: some servers may not have reported yet.
    `leader_admin`: the address of the leader's admin API, as configured there; empty if unknown.
    `identifies_devices`: whether tokens identify devices; without that, none can be revoked.
    `signs_device_tokens`: whether device tokens are those of `papaya token make`.
    """

    roles: tuple[str, ...]
    leads: bool
    is_led: bool = True  # absent in answers of older servers
    recovers: bool
    just_started: bool
    leader: NodeId
    epoch: int
    aggregators: tuple[AggregatorStatus, ...]
    selectors: tuple[SelectorStatus, ...]
    tasks: tuple[TaskView, ...]
    clocks: tuple[ClockStatus, ...] = ()
    leader_admin: str = ""
    identifies_devices: bool = True
    signs_device_tokens: bool = False
    maintenance: MaintenanceRow | None = None
    """Training is stopped in the whole cluster."""
    evidence: EvidenceView | None = None
    """None if this server has no TSA in its configuration."""
    versions: dict[NodeId, str] = {}
    """The version of Papaya that the leader and each server that reports to it run; empty if a
    server does not tell."""
