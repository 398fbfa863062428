"""Storage: the rows of the state store and the one kind of transaction on them.

    machine ── Transaction ──▶ STATE     if all of `require` hold: all of `put` and `delete`
            ◀── Outcome ──────           committed | refused | unknown (read back before going on)

A store only compares rows; the rules are in the machines. A fence is a transaction that requires
the fence row, and a lease is a compare-and-set. So every back end (SQLite, PostgreSQL, or the
simulator's) needs this one primitive, atomic and durable. A blob is written before the row that
names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from papaya.config import TaskConfig
from papaya.messages.base import BlobKey, Boot, Message, NodeId, SessionId, TaskId

# Formats of rows, tickets and messages between servers. A change that a process of the previous
# version would misread or lose gets the next number, and is written only once `FormatRow` has it.
# Format 2: tasks may have `privacy`. A process of format 1 would ignore it and add no noise.
FIRST_FORMAT = 1
PRIVATE_FORMAT = 2
FORMAT = 2


class Row(Struct, frozen=True, gc=False, tag=True):
    """A value in the state store."""


class LeaderRow(Row, frozen=True):
    """Who leads. Every renewal changes the row, which shows that the leader is alive."""

    holder: NodeId
    boot: Boot
    epoch: int
    renewal: int


class BootRow(Row, frozen=True):
    """How often a node has started. Each start takes the next number, by compare-and-set.

    `format`: the newest format that its process can read and write. `papaya`: its version.
    """

    number: int
    format: int = FIRST_FORMAT
    papaya: str = ""


class FormatRow(Row, frozen=True):
    """The format that all processes may write: every one of them can read it (docs/adr/0051)."""

    format: int = FIRST_FORMAT


class EpochRow(Row, frozen=True):
    """The leader's epoch. A renewal does not change it, so that a placement can require it."""

    epoch: int


class EarlierRevision(Struct, frozen=True, gc=False):
    """Settings that a revision has replaced, and when. Clients may still train under them."""

    config: TaskConfig
    replaced: float


class Candidate(Struct, frozen=True, gc=False):
    """Settings of the next revision, which a share of the devices gets beside the current ones."""

    config: TaskConfig
    share: float


TaskState = Literal["running", "paused", "completed", "cancelled"]


class TaskRow(Row, frozen=True):
    """`why` and `ended` are set when the task is completed or cancelled.

    `name`: that of the task, if its id is that of one run of an owner's task; else empty.
    `pseudonym_key` makes the pseudonyms of devices in this task's tickets and rows. It is secret,
    and deleted when the task ends: after that nobody can link them to devices.
    `run`, `revision`, `lease_until`: what the owner has signed last; 0 without an owner.
    `earlier`: the settings that the last few revisions replaced, the newest first.
    `evaluations`: how many evaluations of it have started.
    `account`: who submitted it; the task counts towards that account's quota. Empty: an operator.
    `candidate`: of a rollout that has not reached all devices (docs/adr/0064). An evaluation has
    that of its task when it was started.
    `signed`: the highest revision that the owner has signed, if it is above `revision`.
    """

    config: TaskConfig
    state: TaskState = "running"
    submitted: float = 0.0
    why: str = ""
    ended: float = 0.0
    name: str = ""
    pseudonym_key: bytes = b""
    run: int = 0
    revision: int = 0
    lease_until: float = 0.0
    earlier: tuple[EarlierRevision, ...] = ()
    evaluations: int = 0
    account: str = ""
    candidate: Candidate | None = None
    signed: int = 0

    @property
    def is_over(self) -> bool:
        return self.state in ("completed", "cancelled")


class FenceRow(Row, frozen=True):
    """Which boot of which aggregator holds the task. All of its writes require this row."""

    seq: int
    aggregator: NodeId
    boot: Boot


class Member(Struct, frozen=True, gc=False, array_like=True):
    """One counted update. `version` is what it was trained from.

    `keep_until`: when the last ticket of the session expires, by the holder's clock. It decides
    nothing; simulations check that while clocks are right, rows are not deleted before it.
    `offer`: under secure aggregation, the index of its seed at the TSA.
    `pseudonym`: of its device, empty if unknown. No two members of a buffer have the same one.
    """

    session: SessionId
    version: int
    staleness: int
    examples: int
    keep_until: float
    offer: int = -1
    pseudonym: bytes = b""


class RecordRow(Row, frozen=True):
    """The durable part of the buffer that will become version `target`.

    `manifest`: of a secure task, the digest of what all members have agreed to; else empty.
    `updates`: if the rule of the task needs single updates, the blob of each member, in their
    order; `sum` is empty then. Unset otherwise, so that rows of an earlier Papaya keep their bytes.
    """

    target: int
    sum: BlobKey
    members: tuple[Member, ...]
    weight: float
    manifest: bytes = b""
    updates: tuple[BlobKey, ...] | UnsetType = UNSET


class VersionRow(Row, frozen=True):
    """One server model. `seq` is the fence under which it was committed.

    A version is kept while it is among the last `keep_versions`, a ticket may name it, the owner
    has marked it, or an evaluation pins it (`kept_until`).
    `restarts`: at this version the owner rolled the task back to an earlier model. Updates trained
    from the versions in between are not used any more.
    `evaluations`, `histograms`: how many evaluations and histograms of norms were started.
    """

    version: int
    parameters: BlobKey
    seq: int
    created: float
    marked: bool = False
    restarts: bool = False
    kept_until: float = 0.0
    evaluations: int = 0
    histograms: int = 0

    @property
    def measured(self) -> int:
        """Makes the names of evaluations and histograms unique."""
        return self.evaluations + self.histograms


class OptimizerRow(Row, frozen=True, omit_defaults=True):
    """The server optimizer's state at the newest version.

    `settled`: the consumed rows up to this version are deleted, so tickets of versions below it are
    refused, whatever the time (docs/adr/0034). Left out while it is 0, so that a row of an earlier
    Papaya is equal to the bytes it was read from.
    """

    version: int
    state: BlobKey
    settled: int = 0


class ConsumedRow(Row, frozen=True):
    """The members of one version, kept until `settled` reaches it."""

    version: int
    members: tuple[Member, ...]


class ManifestRow(Row, frozen=True):
    """Names and shapes of a task's tensors, used to export a version."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]


class TicketKeyRow(Row, frozen=True):
    """A key for tickets. The newest key that all servers know seals; older keys still open."""

    key: bytes
    created: float


class ClusterKeyRow(Row, frozen=True):
    """The private Ed25519 key with which this cluster proves to a TSA that tasks are its own."""

    key: bytes


class TsaRow(Row, frozen=True):
    """Which TSA serves the task with these public parameters; the key has their hash.

    `address` stays as long as the row. Another `identity` there means that the TSA was restarted,
    and that what it held is lost. Empty: the child process of the aggregator.
    """

    address: str
    identity: bytes


class RevokedRow(Row, frozen=True):
    """A device that may not take part, although its token is valid. The key has its identity."""

    at: float


class RunRow(Row, frozen=True):
    """The newest run of an owner's task. A submission replaces the row that it has read, so two at
    the same time cannot both start a run.
    """

    task: TaskId


class PointRow(Row, frozen=True):
    """One version in the history of a task. It stays when the version itself is deleted."""

    version: int
    created: float
    members: int
    examples: int
    staleness: float
    loss: float | None = None
    perplexity: float | None = None
    evaluated: str = ""
    """The complete result of the evaluation, as JSON."""
    metrics: dict[str, float] = {}
    """The means of the task's own metrics over all clients, by name."""
    deviations: dict[str, float] = {}
    """The standard deviations of the noise in the loss and in the metrics, if there is any."""
    norms: tuple[float, ...] = ()
    """A histogram of the norms of updates, with noise (papaya/learning/private_evaluation.py)."""
    norms_deviation: float = 0.0
    """The standard deviation of the noise in each bin of `norms`."""


class RevisionRow(Row, frozen=True):
    """One revision of a run: its settings, and the signed manifest as JSON. Kept with the run."""

    revision: int
    created: float
    config: TaskConfig
    manifest: bytes


RolloutState = Literal["running", "finished", "rolled_back", "ended"]


class RolloutPlan(Struct, frozen=True):
    """How a rollout goes on, and what ends it.

    `shares`: of the devices, step by step; the last is 1. `metric` is judged in evaluations: worse
    than before the rollout by more than `tolerance` rolls it back. A step ends well after `updates`
    counted updates of the candidate, and `evaluations` evaluations of versions after that. The
    rollout is rolled back if the share of the candidate's participations that fail is above that of
    the other revision (in the last step: before the rollout) by more than `failures`, or if a step
    takes longer than `hours`.
    """

    shares: tuple[float, ...]
    tolerance: float
    metric: str = "loss"
    higher_is_better: bool = False
    evaluations: int = 2
    updates: int = 20
    failures: float = 0.1
    hours: float = 24.0


class ArmCounts(Struct, frozen=True, gc=False):
    """Counted and failed participations: of the candidate, and of other revisions."""

    counted: int = 0
    failed: int = 0
    others_counted: int = 0
    others_failed: int = 0


class RolloutRow(Row, frozen=True):
    """The rollout of a revision; it stays after the end, until the next one (docs/adr/0064).

    `candidate` and `fallback` are revisions that the owner has signed. The fallback has the
    settings from before and a higher number than the candidate, because devices refuse a lower one.
    It is stored as the head of a bundle.
    `step`: of the plan's shares. `since`, `from_version` and `counts`: when the step began.
    `paused_at`: since when the task is paused; 0 if it is not. `paused_s`: for how long it was
    paused in this step before that.
    `updated_at`: the newest version when the step had its updates; None while it has not.
    `baseline`: the metric at `baseline_version`, which a rollback restores. `marks_baseline`: that
    version was marked for the rollout only. `failing`: the share of participations that failed
    before.
    `state` is `ended` if the task was over first.
    """

    plan: RolloutPlan
    candidate: TaskConfig
    revision: int
    lease_until: float
    fallback: bytes
    fallback_config: TaskConfig
    started: float
    since: float
    from_version: int
    counts: ArmCounts
    baseline: float
    baseline_version: int
    failing: float = 0.0
    updated_at: int | None = None
    step: int = 0
    state: RolloutState = "running"
    why: str = ""
    ended: float = 0.0
    paused_at: float = 0.0
    paused_s: float = 0.0
    marks_baseline: bool = False

    @property
    def share(self) -> float:
        return self.plan.shares[self.step]


class EndingsRow(Row, frozen=True):
    """How often participations in a task ended, by ending (`papaya/messages/reasons.py`).

    `current`: at the holder with this `seq`, by its last report. `earlier`: at holders before it.
    """

    seq: int = 0
    current: dict[str, int] = {}
    earlier: dict[str, int] = {}

    @property
    def total(self) -> dict[str, int]:
        return _added(self.earlier, self.current)

    def heard(self, seq: int, endings: Mapping[str, int]) -> EndingsRow:
        """The row with a holder's reported numbers. An old or repeated report changes nothing."""
        if seq < self.seq:
            return self
        if seq > self.seq:
            return EndingsRow(seq, dict(endings), self.total)
        highest = {
            ending: max(self.current.get(ending, 0), endings.get(ending, 0))
            for ending in (*self.current, *(e for e in endings if e not in self.current))
        }
        return EndingsRow(seq, highest, self.earlier)


def _added(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    found = dict(first)
    for ending, times in second.items():
        found[ending] = found.get(ending, 0) + times
    return found


class DeletedRow(Row, frozen=True):
    """The owner has deleted a task. Its id is never used again, so the row stays.

    `is_done`: no row and no blob of the task is left.
    """

    at: float
    is_done: bool = False


class AdminAddressRow(Row, frozen=True):
    """The address of a node's admin API, as its operator has configured it."""

    url: str


AccountRole = Literal["viewer", "owner", "operator"]


class AccountRow(Row, frozen=True):
    """A named token of the admin API. `digest` is the SHA-256 of the token, which is not stored.

    `prefixes`: an owner may change the tasks whose names start with one of these.
    `revoked`: since when it is refused; 0 if it is valid. `expires`: 0 means never.
    An account of an identity provider has a row only if it was revoked; its digest is empty.
    """

    role: AccountRole
    digest: bytes
    created: float
    prefixes: tuple[str, ...] = ()
    expires: float = 0.0
    revoked: float = 0.0


class QuotaRow(Row, frozen=True):
    """What the tasks of one account may use; None means no limit.

    `model_length` limits each task, the others limit the sum over all tasks that are not over.
    `submissions` counts: each submission requires the row and changes it, so that two at the same
    time cannot both be made from the same usage.
    """

    tasks: int | None = None
    concurrency: int | None = None
    model_length: int | None = None
    submissions: int = 0


class ShareRow(Row, frozen=True):
    """A task's part in scarce devices, set by an operator. A task without this row has the
    defaults: with them every eligible task is equally likely.
    """

    weight: float = 1.0
    priority: int = 0


class EventRow(Row, frozen=True):
    """An event of a server, for the timeline (docs/adr/0084).

    `node`: the machine that told it, or the process if none did. `fields`: as JSON.
    """

    at: float
    node: str
    event: str
    level: str
    fields: bytes


class MaintenanceRow(Row, frozen=True):
    """Operators have stopped training in the whole cluster, until the row is deleted.

    `is_stopped`: no aggregator holds a task meanwhile; else clients that train may finish.
    `until`: when devices are told to come back, 0 if that is unknown.
    """

    since: float
    until: float
    is_stopped: bool
    actor: str
    why: str


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
    """Sent by the driver: rows were changed by someone else, so read them now."""


class Revoked(Message, frozen=True):
    """Sent by the driver when it has read the rows: all devices that may not take part."""

    devices: tuple[str, ...]


LEADER_KEY = "leader"
EPOCH_KEY = "epoch"
FORMAT_KEY = "cluster/format"
TASKS = "task/"
FENCES = "fence/"
BOOTS = "boot/"
TICKET_KEYS = "ticket-key/"
CLUSTER_KEY = "cluster-key"
REVOKED = "revoked/"
ENDINGS = "endings/"
DELETED = "deleted/"
TSAS = "tsa/"
MAINTENANCE_KEY = "maintenance"
ACCOUNTS = "account/"
QUOTAS = "quota/"
SHARES = "share/"
ROLLOUTS = "rollout/"
EVENTS = "event/"


def task_key(task: TaskId) -> str:
    return f"task/{task}"


def boot_key(node: NodeId) -> str:
    return f"{BOOTS}{node}"


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


def run_key(owner: str, name: str) -> str:
    return f"run/{owner}/{name}"


def tsa_key(parameters_hash: bytes) -> str:
    return f"{TSAS}{parameters_hash.hex()}"


def revoked_key(device: str) -> str:
    return f"{REVOKED}{device}"


def revision_key(task: TaskId, revision: int) -> str:
    return f"revision/{task}/{revision:012d}"


def endings_key(task: TaskId) -> str:
    return f"{ENDINGS}{task}"


def deleted_key(task: TaskId) -> str:
    return f"{DELETED}{task}"


def rollout_key(task: TaskId) -> str:
    return f"{ROLLOUTS}{task}"


def event_key(at: float, process: str, number: int) -> str:
    """In the order of time. `number`: of the event in its process."""
    return f"{EVENTS}{round(1000 * at):015d}/{process}/{number}"


def admin_address_key(node: NodeId) -> str:
    return f"admin-address/{node}"


def account_key(name: str) -> str:
    return f"{ACCOUNTS}{name}"


def quota_key(name: str) -> str:
    return f"{QUOTAS}{name}"


def share_key(task: TaskId) -> str:
    return f"{SHARES}{task}"


def revoked_devices(rows: Iterable[tuple[str, Row]]) -> tuple[str, ...]:
    """The identities of the revoked devices among these rows."""
    return tuple(key.removeprefix(REVOKED) for key, row in rows if isinstance(row, RevokedRow))


def blobs_of(row: Row) -> tuple[BlobKey, ...]:
    """The blobs that a row names and needs. Those of a bundle belong to the task that an evaluation
    evaluates: after its end, the holder of the task may delete them.
    """
    match row:
        case VersionRow():
            return (row.parameters,)
        case OptimizerRow():
            return (row.state,)
        case RecordRow():
            return row.updates or (row.sum,)
        case TaskRow() if row.config.evaluates is None or not row.is_over:
            # The bundle of an evaluation belongs to the task, which may have a newer one.
            candidate = () if row.candidate is None else row.candidate.config.requirements.blobs
            return (*row.config.requirements.blobs, *candidate)
    return ()


def holder_prefixes(task: TaskId) -> tuple[str, ...]:
    """Everything that a new holder reads, in one snapshot."""
    return (
        fence_key(task),
        task_key(task),
        optimizer_key(task),
        f"record/{task}/",
        f"version/{task}/",
        f"consumed/{task}/",
    )


def task_prefixes(task: TaskId) -> tuple[str, ...]:
    """All rows of a task. A read by prefix also finds tasks whose id starts with this one."""
    others = ("manifest", "endings", "share", "rollout")
    return (
        *holder_prefixes(task),
        *(f"{kind}/{task}" for kind in others),
        f"point/{task}/",
        f"revision/{task}/",
    )


def submission(
    config: TaskConfig,
    parameters: BlobKey,
    optimizer: BlobKey,
    now: float,
    pseudonym_key: bytes = b"",
    candidate: Candidate | None = None,
) -> Transaction:
    """A new task at version 0, not placed yet. Refused if the task exists, or existed.

    `pseudonym_key` is random. Without it, devices of this task are not told apart.
    """
    # Convert it as a read would: an int in a float field comes back from the store as a float.
    config = msgspec.convert(msgspec.to_builtins(config), TaskConfig)
    task = config.task
    row = TaskRow(config, submitted=now, pseudonym_key=pseudonym_key, candidate=candidate)
    return Transaction(
        require=((task_key(task), None), (deleted_key(task), None)),
        put=(
            (task_key(task), row),
            (fence_key(task), FenceRow(seq=0, aggregator="", boot=0)),
            (version_key(task, 0), VersionRow(0, parameters, seq=0, created=now)),
            (optimizer_key(task), OptimizerRow(0, optimizer)),
        ),
    )
