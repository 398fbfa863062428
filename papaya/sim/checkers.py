"""The auditor: checks after every event what must hold, from outside the machines.

It sees every transaction as the store applies it, every blob that is lost and every answer to a
device, and keeps its own books. Of the code under test it uses only the server optimizer, the
vector of an evaluation and the life of a ticket. It also calls `check()` of the machine that
handled the event.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import numpy as np
from msgspec import structs

from papaya.aggregator.aggregator import Aggregator
from papaya.aggregator.sessions import ticket_life_s
from papaya.client.work import Finish, Seal, Sealed
from papaya.config import SyncFL, TaskConfig
from papaya.errors import InvariantError
from papaya.learning import parameters
from papaya.learning.kernels import NUMPY
from papaya.learning.parameters import Vector
from papaya.learning.server_optimizer import server_optimizer
from papaya.learning.weighting import Contribution, WeightedSum, admit
from papaya.machine import Reply
from papaya.messages import wire
from papaya.messages.base import BlobKey, Message, NodeId, SessionId, TaskId
from papaya.messages.control import AggregatorReport
from papaya.messages.events import ServerEvent
from papaya.messages.participation import (
    Completed,
    Leave,
    Refused,
    Report,
    Retry,
    UploadGranted,
)
from papaya.messages.selection import Accepted, Rejected
from papaya.messages.storage import (
    MAINTENANCE_KEY,
    ConsumedRow,
    FenceRow,
    LeaderRow,
    MaintenanceRow,
    Member,
    OptimizerRow,
    RecordRow,
    Row,
    TaskRow,
    Transaction,
    VersionRow,
    blobs_of,
    consumed_key,
    fence_key,
    optimizer_key,
    record_key,
    task_key,
    version_key,
)
from papaya.messages.tickets import UploadTicket, claim_of
from papaya.sim.cluster import Cluster
from papaya.sim.devices import SimulatedDevice
from papaya.sim.event_checks import EventAuditor
from papaya.sim.expected_sums import combined, counted_examples, damping, is_within_clip, uploaded
from papaya.sim.hosts import SimulatedHost
from papaya.sim.observer import Observer
from papaya.sim.protocol_updates import protocol_vector
from papaya.sim.secure_checks import SecureAuditor, demand
from papaya.sim.slot_checks import SlotAuditor
from papaya.sim.storage import OWNER, Writer


def _task_in(key: str) -> TaskId:
    return key.split("/")[1]


def _without_free_text(message: Message) -> Message:
    """Free text is not part of the protocol: a trace stays the same when it changes."""
    match message:
        case Leave() | Retry() | Rejected():
            return structs.replace(message, reason="")
        case Refused():
            return structs.replace(message, reason="", hint="")
        case AggregatorReport() if any(task.halted for task in message.tasks):
            tasks = tuple(structs.replace(task, halted="") for task in message.tasks)
            return structs.replace(message, tasks=tasks)
    return message


def _row_without_free_text(row: Row) -> Row:
    return structs.replace(row, why="") if isinstance(row, TaskRow) else row


class TaskBooks:
    """What the auditor knows of one task."""

    def __init__(self, config: TaskConfig) -> None:
        # The current settings, and all settings so far by the digest of their manifest.
        self.config = config
        self.terms = {config.manifest: config}
        # The manifest of each session, and the examples that its client has reported.
        self.manifest_of: dict[SessionId, bytes] = {}
        self.reported: dict[SessionId, int] = {}
        self.version = 0
        self.counted: dict[SessionId, int] = {}
        # Every assigned session, and the identity of the device that got it.
        self.assigned: dict[SessionId, str] = {}
        self.trained_from: dict[SessionId, int] = {}
        self.tickets: dict[UploadTicket, None] = {}
        self.granted_at: dict[SessionId, list[int]] = {}
        self.acknowledged: dict[SessionId, None] = {}
        self.dropped = 0

    def terms_of(self, session: SessionId) -> TaskConfig:
        """The settings under which the session's client trains."""
        return self.terms[self.manifest_of[session]]

    def goal_of(self, record: RecordRow) -> int:
        """A secure buffer has the goal that its members have agreed to."""
        config = self.terms[record.manifest] if self.config.is_secure else self.config
        return config.aggregation_goal

    @property
    def steps(self) -> int:
        """Versions that differ from their predecessors."""
        return self.version - self.dropped


class Auditor(Observer):
    """Checks every step of a run and hashes its messages and transactions.

    `lies(session)`: whether a device sends a vector that its seed does not unmask.
    """

    def __init__(self, lies: Callable[[SessionId], bool] = lambda session: False) -> None:
        self.books: dict[TaskId, TaskBooks] = {}
        self.endings: dict[str, int] = {}
        self._lies = lies
        self._trace = blake2b(digest_size=16)
        self._named: dict[BlobKey, int] = {}
        self._lost_blobs: set[BlobKey] = set()  # deleted, or lost with a power failure

    def attach(self, cluster: Cluster) -> None:
        super().attach(cluster)
        self.engine, self.state, self.blobs = cluster.engine, cluster.state, cluster.blobs
        self.books = {task.task: TaskBooks(task) for task in cluster.config.tasks}
        self._secure = SecureAuditor(cluster.config.tasks, self.state.rows, cluster.tsa)
        self._slots = SlotAuditor(cluster)
        self._events = EventAuditor()
        for row in self.state.rows.values():
            self._name(row, +1)

    @property
    def evaluations(self) -> int:
        """Evaluations that have a result."""
        all_books = self.books.values()
        return sum(books.steps for books in all_books if books.config.evaluates is not None)

    @property
    def trace_hash(self) -> str:
        return self._trace.hexdigest()

    # -- hooks ------------------------------------------------------------------------------

    def on_sent(self, source: NodeId, target: NodeId, message: Message) -> None:
        self._trace.update(f"{self.engine.now.hex()} {source} {target} ".encode())
        self._trace.update(wire.encode(_without_free_text(message)))
        self._slots.on_sent(message)

    def after_event(self, host: SimulatedHost) -> None:
        host.machine.check()
        self._slots.after_event(host)
        self._events.after_event(host)

    def on_logged(self, host: SimulatedHost, event: ServerEvent) -> None:
        self._events.on_logged(host, event)

    def on_departed(self, device: SimulatedDevice, finish: Finish | None) -> None:
        ending = "dropped" if finish is None else finish.ending
        self.endings[ending] = self.endings.get(ending, 0) + 1

    def on_missing_download(self, device: SimulatedDevice, parameters: BlobKey) -> None:
        """A wrong clock may cost a client its training, but only if its upload is refused too; or
        its evaluation.
        """
        joined = device.machine.joined
        assert joined is not None
        is_void = joined.evaluates or joined.version < self._settled(joined.task)
        demand(
            is_void and not self.cluster.clocks_were_right,
            f"a live ticket names parameters {parameters} that were deleted",
        )

    def on_request(self, device: SimulatedDevice, message: Message) -> None:
        joined = device.machine.joined
        if joined is None:
            return
        if isinstance(message, Report):
            self.books[joined.task].trained_from[joined.session] = joined.version
            self.books[joined.task].reported[joined.session] = message.examples
        if self._secure.audits(joined.task):
            chunk_bytes = self.cluster.config.server.chunk_bytes
            self._secure.on_request(joined.session, message, chunk_bytes)

    def on_sealed(self, device: SimulatedDevice, work: Seal, sealed: Sealed) -> None:
        joined = device.machine.joined
        assert joined is not None
        is_lie = self._lies(joined.session)
        examples, number = device.visit.examples, device.visit.device
        self._secure.on_sealed(joined, examples, work, sealed, is_lie, number)

    def on_reply(self, host: SimulatedHost, reply: Reply) -> None:
        match reply.message:
            case Accepted(task=task, session=session, ticket=sealed):
                self.books[task].assigned[session] = reply.to.identity
                self.books[task].manifest_of[session] = claim_of(sealed).manifest
            case UploadGranted():
                self._on_granted(host, reply.message)
            case Completed(discarded=None):
                self._on_acknowledged(reply)
            case Completed(discarded="trusted_party_lost"):
                ticket = claim_of(reply.to.request.ticket)
                self._secure.check_discarded_as_lost(ticket.session)
            case Completed(discarded="over_norm"):
                ticket = claim_of(reply.to.request.ticket)
                terms = self.books[ticket.task].terms_of(ticket.session)
                is_due = terms.evaluates is not None or not is_within_clip(terms, ticket.session)
                demand(is_due, f"{ticket.session} was discarded, but its manifest allows its norm")

    def on_blob_lost(self, blob: BlobKey) -> None:
        demand(not self._named.get(blob), f"blob {blob} is gone, but a row names it")
        self._lost_blobs.add(blob)
        if self.cluster.clocks_were_right:
            for row in self.state.rows.values():
                if isinstance(row, TaskRow) and not row.is_over:
                    pinned = row.config.evaluates
                    is_pinned = pinned is not None and pinned.parameters == blob
                    demand(not is_pinned, f"blob {blob} is gone while {row.config.task} runs")

    # -- transactions -----------------------------------------------------------------------

    def on_transaction(self, writer: Writer, change: Transaction, before: dict[str, Row]) -> None:
        for key in change.delete:
            self._trace.update(b"-" + key.encode())
            if key in before:
                self._name(before[key], -1)
                self._check_delete(key, before[key], change)
                if isinstance(old := before[key], VersionRow):
                    self._check_pin(writer, key, old)
        for key, row in change.put:
            self._trace.update(b"+" + key.encode() + wire.encode_row(_row_without_free_text(row)))
            if key in before:
                self._name(before[key], -1)
            self._name(row, +1)
            for blob in blobs_of(row):
                demand(blob in self.blobs.blobs, f"row {key} names blob {blob}, which is missing")
                # A store may keep a deleted blob for days and then remove it (docs/adr/0049).
                is_reused = blob in self._lost_blobs
                demand(not is_reused, f"row {key} names blob {blob}, which was deleted before")
            self._check_put(writer, key, row, before)

    def _name(self, row: Row, count: int) -> None:
        for blob in blobs_of(row):
            self._named[blob] = self._named.get(blob, 0) + count

    def _check_put(self, writer: Writer, key: str, row: Row, before: dict[str, Row]) -> None:
        match row:
            case TaskRow() if key not in before:
                demand(row.config.task not in self.books, f"{key} is used a second time")
                self.books[row.config.task] = TaskBooks(row.config)
                self._secure.watch(row.config)
                self._check_candidate(row, None)
            case TaskRow() if row.config != self.books[row.config.task].config:
                self._check_revision(row, before[key])
            case TaskRow():
                self._check_candidate(row, before[key])
            case FenceRow():
                self._check_fence(key, row, before.get(key))
            case LeaderRow():
                old = before.get(key)
                if isinstance(old, LeaderRow):
                    steps = row.epoch - old.epoch
                    demand(steps in (0, 1), f"leader epoch went from {old.epoch} to {row.epoch}")
            case RecordRow():
                self._check_holder(writer, _task_in(key))
                self._check_record(_task_in(key), row, before.get(key))
            case VersionRow() if key in before:
                self._check_pinned(writer, key, row, before[key])
            case VersionRow() if row.version > 0:
                self._check_holder(writer, _task_in(key))
                self._check_version(writer, _task_in(key), row, before)
            case ConsumedRow():
                self._check_consumed(_task_in(key), row, before)
            case OptimizerRow():
                old = before.get(key)
                if isinstance(old, OptimizerRow):
                    demand(row.settled >= old.settled, f"{key}: {old.settled=} {row.settled=}")

    def _check_revision(self, row: TaskRow, old: Row) -> None:
        """The holder must not continue with the previous settings: the fence changes too."""
        assert isinstance(old, TaskRow)
        books, task = self.books[row.config.task], row.config.task
        demand(row.earlier[0].config == old.config, f"{task} forgot the settings of its clients")
        is_candidate = old.candidate is not None and old.candidate.config == row.config
        demand(
            is_candidate or row.config.manifest not in books.terms,
            f"{task} has two revisions of one digest",
        )
        self._check_released(task)
        books.config = books.terms[row.config.manifest] = row.config
        self._secure.watch(row.config)

    def _check_candidate(self, row: TaskRow, old: Row | None) -> None:
        """The holder must learn of a candidate before a client joins under it."""
        if row.candidate is None:
            return
        task, config = row.config.task, row.candidate.config
        demand(not config.is_bound, f"{task} has two revisions and bound buffers")
        books = self.books[task]
        if isinstance(old, TaskRow) and old.candidate is None:
            demand(config.manifest not in books.terms, f"{task} has two revisions of one digest")
            self._check_released(task)
        books.terms[config.manifest] = config

    def _check_released(self, task: TaskId) -> None:
        fence = self.state.rows[fence_key(task)]
        assert isinstance(fence, FenceRow)
        demand(not fence.aggregator, f"{task} was revised, but {fence.aggregator} still holds it")

    def _check_pinned(self, writer: Writer, key: str, row: VersionRow, old: Row) -> None:
        """All that an owner changes about a version is how long it is kept."""
        assert isinstance(old, VersionRow)
        demand(writer == OWNER, f"{writer[0]}@{writer[1]} wrote {key} again")
        pins = {"kept_until": row.kept_until, "evaluations": old.evaluations + 1}
        demand(row == structs.replace(old, **pins), f"{key} went from {old} to {row}")
        demand(row.kept_until >= old.kept_until, f"{key} is kept for a shorter time than before")

    def _check_fence(self, key: str, row: FenceRow, old: Row | None) -> None:
        if isinstance(old, FenceRow):
            demand(row.seq == old.seq + 1, f"{key} went from {old.seq} to {row.seq}")
        under = self.state.rows.get(MAINTENANCE_KEY)
        is_stopped = isinstance(under, MaintenanceRow) and under.is_stopped
        demand(not (is_stopped and row.aggregator), f"{key} was placed while training is stopped")

    def _check_holder(self, writer: Writer, task: TaskId) -> None:
        fence = self.state.rows[fence_key(task)]
        assert isinstance(fence, FenceRow)
        demand(
            writer == (fence.aggregator, fence.boot),
            f"{writer[0]}@{writer[1]} wrote to task {task}, which "
            f"{fence.aggregator}@{fence.boot} holds",
        )

    def _check_record(self, task: TaskId, row: RecordRow, old: Row | None) -> None:
        books = self.books[task]
        demand(row.target > books.version, f"record {row.target} of {task} is of the past")
        last = books.config.stop.versions
        demand(last is None or row.target <= last, f"record {row.target} of {task} after {last=}")
        before = old.members if isinstance(old, RecordRow) else ()
        # Without secure aggregation, a revision may lower the goal below a record's size.
        most = max(books.goal_of(row), len(before))
        demand(len(row.members) <= most, f"record {row.target} of {task} is over its goal")
        sessions = {member.session: None for member in row.members}
        demand(len(sessions) == len(row.members), f"a session is twice in record {row.target}")
        for member in before:
            demand(member.session in sessions, f"{member.session} fell out of its record")
        for key in (record_key(task, t) for t in (row.target - 1, row.target + 1)):
            other = self.state.rows.get(key)
            if isinstance(other, RecordRow):
                for member in other.members:
                    demand(member.session not in sessions, f"{member.session} is in two records")
        for member in row.members:
            self._check_member(task, member, row.target)
        if isinstance(books.config.regime, SyncFL):
            # Members from before a switch to SyncFL stay.
            for member in row.members[len(before) :]:
                is_of_round = member.version == row.target - 1
                demand(is_of_round, f"{member.session} is of another round than {row.target}")
        self._check_devices(task, row)
        if self._secure.audits(task):
            self._secure.check_record(task, row, self.blobs.get(row.sum))
        elif not books.config.aggregation.is_mean:
            self._check_updates(books.config, row)
        elif row.sum:
            self._check_sum(books.config, row)

    def _check_devices(self, task: TaskId, row: RecordRow) -> None:
        """One update per device and buffer, by the device that each session was assigned to.

        An evaluation has one buffer, so it counts each device once.
        """
        assigned = self.books[task].assigned
        known = [device for m in row.members if (device := assigned[m.session])]
        twice = [device for device in dict.fromkeys(known) if known.count(device) > 1]
        demand(not twice, f"{twice[:1]} is twice in record {row.target} of {task}")

    def _check_member(self, task: TaskId, member: Member, target: int) -> None:
        books, session = self.books[task], member.session
        demand(session in books.assigned, f"{session} was never assigned to {task}")
        demand(
            session not in books.counted,
            f"{session} is counted by version {books.counted.get(session)} and again by {target}",
        )
        base = books.trained_from.get(session)
        demand(member.version == base, f"{session} started from {base}, not {member.version}")
        granted_at = books.granted_at.get(session, ())
        demand(
            member.version + member.staleness in granted_at,
            f"{session} has staleness {member.staleness} from {base}, reported at {granted_at}",
        )
        terms = books.terms_of(session)
        # In the clear, the settings at the time of the report apply; a device applies its own.
        limits = [terms] if terms.is_secure else books.terms.values()
        limit = max(config.max_staleness for config in limits)
        demand(
            0 <= member.staleness <= limit,
            f"{session} has staleness {member.staleness}, above {limit}",
        )
        counted = counted_examples(terms, books.reported[session])
        demand(
            member.examples == counted,
            f"{session} weighs {member.examples} examples, by its manifest {counted}",
        )
        demand(
            terms.is_secure or is_within_clip(terms, session),
            f"{session} is counted, above the clip of its manifest",
        )

    def _check_sum(self, config: TaskConfig, row: RecordRow) -> None:
        """Each update is in the sum once: integers that name their session, weighted here again."""
        found = WeightedSum.decode(self.blobs.get(row.sum), config.model_length)
        expected = np.zeros(config.model_length, np.float64)
        weight = 0.0
        is_training = config.evaluates is None
        for member in row.members:
            terms = self.books[config.task].terms_of(member.session)
            vector = uploaded(terms, member.session, config.model_length)
            expected += member.examples * damping(terms, member.staleness) * vector
            weight += member.examples
        same = (
            np.allclose(found.vector, expected, rtol=1e-4, atol=1e-2)
            # Counts are not weighted, so no sum of them is rounded.
            and (is_training or np.array_equal(found.vector, expected))
            and np.allclose(found.mean(), expected / weight, rtol=1e-4, atol=1e-4)
            and found.weight == weight
        )
        demand(same, f"the sum of record {row.target} of {config.task} is not that of its members")

    def _check_updates(self, config: TaskConfig, row: RecordRow) -> None:
        """Each member has its own update in a blob of its own, in the order of the members."""
        keys = row.updates or ()
        what = f"record {row.target} of {config.task}"
        demand(not row.sum, f"{what} has a sum although its rule needs single updates")
        demand(len(keys) == len(row.members), f"{what} has {len(keys)} updates")
        for member, key in zip(row.members, keys, strict=True):
            found = np.frombuffer(self.blobs.get(key), np.float32)
            same = np.allclose(found, self._damped(config, member), rtol=1e-6)
            demand(same, f"{what} names another update for {member.session}")

    def _damped(self, config: TaskConfig, member: Member) -> Vector:
        factor = damping(self.books[config.task].terms_of(member.session), member.staleness)
        vector = np.array(protocol_vector(member.session, config.model_length), np.float32)
        return vector * np.float32(factor)

    def _check_version(
        self, writer: Writer, task: TaskId, row: VersionRow, before: dict[str, Row]
    ) -> None:
        books = self.books[task]
        demand(
            row.version == books.version + 1,
            f"version {row.version} of {task} follows version {books.version}",
        )
        record = self._used_record(task, row.version, before)
        old = self.state.rows[version_key(task, row.version - 1)]
        assert isinstance(old, VersionRow)
        if self._secure.is_dropped(task, row.version):
            books.dropped += 1
            self._secure.check_dropped(task, record, before[optimizer_key(task)])
            self._check_drop_is_counted(writer, task)
        else:
            self._check_step(books.config, row, record, old, before)
        is_dropped = self._secure.is_dropped(task, row.version)
        self._events.on_version(writer, task, row.version, row.seq, is_dropped=is_dropped)
        books.version = row.version

    def _used_record(self, task: TaskId, version: int, before: dict[str, Row]) -> RecordRow:
        """The record that becomes this version. Without secure aggregation a version may have
        members that were in no record; the record that they would have had has no sum.
        """
        key, record = record_key(task, version), before.get(record_key(task, version))
        demand(key not in self.state.rows, f"{key} is still there after its version was made")
        if isinstance(record, RecordRow):
            return record
        demand(not self._secure.audits(task), f"version {version} of {task} had no record")
        consumed = self.state.rows[consumed_key(task, version)]
        assert isinstance(consumed, ConsumedRow)
        weight = float(sum(member.examples for member in consumed.members))
        record = RecordRow(version, "", consumed.members, weight)
        self._check_record(task, record, None)
        return record

    def _check_drop_is_counted(self, writer: Writer, task: TaskId) -> None:
        host = self.cluster.hosts[writer[0]]
        if (
            host.is_alive
            and isinstance(host.machine, Aggregator)
            and host.machine.boot == writer[1]
        ):
            held = host.machine.tasks.get(task)
            # None: the evaluation ended before the transaction was applied.
            counted = held is None or any(n.startswith("buffers_dropped_") for n in held.counters)
            demand(counted, f"{writer[0]} dropped a buffer of {task} without counting it")

    def _check_step(
        self,
        config: TaskConfig,
        row: VersionRow,
        record: RecordRow,
        old: VersionRow,
        before: dict[str, Row],
    ) -> None:
        optimizer = server_optimizer(config.optimizer)
        length = config.model_length
        state = before[optimizer_key(config.task)]
        assert isinstance(state, OptimizerRow)
        if self._secure.audits(config.task):
            mean = self._secure.expected_mean(config.task, record)
        elif not config.aggregation.is_mean:
            demand(bool(record.updates), f"version {row.version} of {config.task} had no record")
            mean = combined(config, record, [self._damped(config, m) for m in record.members])
        else:
            mean = self._sum_of(config, record).mean()
        expected, _ = optimizer.step(
            parameters.decode(self.blobs.get(old.parameters), length),
            mean,
            optimizer.decode_state(self.blobs.get(state.state), length),
        )
        found = parameters.decode(self.blobs.get(row.parameters), length)
        is_exact = config.aggregation.is_mean
        demand(
            bool(np.array_equal(found, expected) if is_exact else np.allclose(found, expected)),
            f"version {row.version} of {config.task} is not one step from its predecessor",
        )

    def _sum_of(self, config: TaskConfig, record: RecordRow) -> WeightedSum:
        """As it was written, or the weighted updates of the members, added in their order."""
        length, books = config.model_length, self.books[config.task]
        if record.sum:
            return WeightedSum.decode(self.blobs.get(record.sum), length)
        total = WeightedSum.zero(length)
        for member in record.members:
            terms = books.terms_of(member.session)
            vector = uploaded(terms, member.session, length)
            update = admit([vector.data], length, terms.clip, terms.over_clip)
            given = Contribution(update, member.examples, member.staleness, terms.staleness)
            total.add_all([given], NUMPY)
        return total

    def _check_consumed(self, task: TaskId, row: ConsumedRow, before: dict[str, Row]) -> None:
        books = self.books[task]
        record = before.get(record_key(task, row.version))
        if isinstance(record, RecordRow):
            demand(row.members == record.members, f"{task}: members of {row.version} changed")
            goal = books.goal_of(record)
        else:
            goal = books.config.aggregation_goal
        is_full = len(row.members) >= goal
        is_whole = is_full or self._secure.is_dropped(task, row.version)
        demand(is_whole, f"version {row.version} has {len(row.members)} members")
        for member in row.members:
            self._check_member(task, member, row.version)
            books.counted[member.session] = row.version

    def _check_delete(self, key: str, row: Row, change: Transaction) -> None:
        if isinstance(row, MaintenanceRow):
            return  # of no task
        task = _task_in(key)
        if task_key(task) in change.delete:
            self._check_forget(task, row)
            return
        match row:
            case RecordRow():
                made = [r.version for _, r in change.put if isinstance(r, VersionRow)]
                demand(made == [row.target], f"{key} was deleted without becoming a version")
            case ConsumedRow():
                settled = self._settled(_task_in(key))
                demand(row.version <= settled, f"{key} was forgotten, but {settled=}")
                still = [m.session for m in row.members if m.keep_until > self.engine.now]
                demand(
                    not still or not self.cluster.clocks_were_right,
                    f"{key} was forgotten while tickets of {still[:1]} are valid",
                )
            case VersionRow():
                settled = self._settled(_task_in(key))
                demand(row.version < settled, f"{key} was deleted, but {settled=}")

    def _check_pin(self, writer: Writer, key: str, row: VersionRow) -> None:
        """Only a holder whose clock is ahead deletes a version that an evaluation pins."""
        host = self.cluster.hosts.get(writer[0])
        may_be_ahead = host is not None and (host.boots != writer[1] or host.was_ahead)
        demand(
            row.kept_until <= self.engine.now or may_be_ahead,
            f"{key} was deleted, but it is pinned until {row.kept_until}",
        )

    def _check_forget(self, task: TaskId, row: Row) -> None:
        """Rows of an evaluation that is over are deleted, and with them an open record."""
        if isinstance(row, TaskRow):
            demand(row.is_over and row.config.evaluates is not None, f"{task} was deleted")
            expired = row.ended + ticket_life_s(row.config, self.cluster.config.server)
            demand(self.engine.now >= expired, f"{task} was deleted before its tickets expired")
        elif isinstance(row, RecordRow):
            for member in row.members:
                self.books[task].counted[member.session] = row.target

    def _settled(self, task: TaskId) -> int:
        row = self.state.rows[optimizer_key(task)]
        assert isinstance(row, OptimizerRow)
        return row.settled

    # -- answers ----------------------------------------------------------------------------

    def _on_granted(self, host: SimulatedHost, granted: UploadGranted) -> None:
        ticket = claim_of(granted.ticket)
        books = self.books[ticket.task]
        assert isinstance(host.machine, Aggregator)
        version = host.machine.tasks[ticket.task].ledger.version
        assert isinstance(ticket, UploadTicket)
        first = structs.replace(ticket, kept_until=0.0)  # a renewed one is not another grant
        if first not in books.tickets:
            books.tickets[first] = None
            books.granted_at.setdefault(ticket.session, []).append(version)
            if self._secure.audits(ticket.task):
                self._secure.on_granted(ticket.session, ticket.offer, version, granted.secure)
                self._secure.check_agreed(ticket, granted.secure)

    def _on_acknowledged(self, reply: Reply) -> None:
        ticket = claim_of(reply.to.request.ticket)
        books = self.books[ticket.task]
        books.acknowledged[ticket.session] = None
        if books.config.durability == "commit":
            self._check_is_counted(ticket.task, ticket.session)

    def _check_is_counted(self, task: TaskId, session: SessionId) -> None:
        books = self.books[task]
        if session in books.counted:
            return
        for target in (books.version + 1, books.version + 2):
            record = self.state.rows.get(record_key(task, target))
            members = record.members if isinstance(record, RecordRow) else ()
            if any(member.session == session for member in members):
                return
        raise InvariantError(f"{session} was acknowledged by {task} but is in no version or record")

    def check_acknowledged(self) -> None:
        """At the end of a run: every acknowledged update is counted."""
        for task, books in self.books.items():
            if books.config.durability == "commit":
                for session in books.acknowledged:
                    self._check_is_counted(task, session)
