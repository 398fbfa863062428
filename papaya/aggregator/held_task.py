"""One task at the aggregator that holds it: requests of clients in, new versions out.

Paper, "Aggregator": it "aggregates client model updates to produce new versions of the server
model [...] drives participating clients to run the client execution protocol [...] tracks whether
or not a task needs more clients".

    requests ─▶ sessions ─▶ queue ─▶ Fold ─▶ pipeline ─▶ acknowledged sessions, new versions

This file loads, halts and stops the task, handles the results of storage, keeps the deadlines and
reports to the Coordinator. Each of its parts uses only those above it:

    sessions.py, slots.py   active clients; free slots and those that are kept
    pipeline.py             buffers, records and versions
    revisions.py            under which signed manifests clients may take part
    endings.py              how sessions end
    update_queue.py         complete updates until they are in a sum
    participants.py         from a ticket to a session: joins and adoptions
    requests.py             the answers to requests

If the fence row no longer names this holder, the task stops. If the outcome of a write is unknown,
it reads the rows again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import Enum

from papaya.aggregator import regime
from papaya.aggregator.endings import Endings
from papaya.aggregator.ledger import Ledger
from papaya.aggregator.offers import Stocks
from papaya.aggregator.participants import Participants
from papaya.aggregator.pipeline import Pipeline
from papaya.aggregator.requests import MOVED, Draining, Requests
from papaya.aggregator.revisions import Revisions
from papaya.aggregator.sessions import Sessions, ticket_life_s
from papaya.aggregator.slots import Slots
from papaya.aggregator.task_events import TaskEvents
from papaya.aggregator.update_queue import UpdateQueue
from papaya.aggregator.upload import UploadMemory, why_not_served
from papaya.aggregator.work import (
    UNREACHABLE,
    DeleteBlobs,
    Drop,
    Lost,
    Offered,
    Snapshotted,
    StepFailed,
    Stepped,
)
from papaya.config import ServerConfig, TaskConfig
from papaya.errors import ConfigError
from papaya.learning.methods import require_methods
from papaya.machine import Effects, Read
from papaya.messages.base import SessionId, TaskId
from papaya.messages.control import TaskReport
from papaya.messages.events import ServerEvent
from papaya.messages.reasons import is_reported
from papaya.messages.storage import FenceRow, Rows, Transacted, holder_prefixes
from papaya.messages.tickets import Keyring

_NEVER = float("inf")
_FAILING = (
    "the TSA fails with an internal error when it releases a sum; it is asked again. To give up "
    "the open buffers, restart the TSA"
)


class TaskPhase(Enum):
    """What the aggregator is doing with a task it holds."""

    LOADING = "the task is loading"
    SERVING = "serving clients"
    HALTED = "the task is halted until its owner or an operator acts"
    STOPPED = "the task is held by another aggregator"


SERVING = TaskPhase.SERVING  # Python 3.11 takes longer to look it up in the class


class HeldTask:
    """Invariant: versions only grow."""

    def __init__(
        self,
        task: TaskId,
        fence: FenceRow,
        epoch: int,
        leases: Sequence[SessionId],
        predecessors_active: int | None,
        server: ServerConfig,
        keyring: Keyring,
        memory: UploadMemory,
        tokens: Iterator[int],
        events: list[ServerEvent],
        upload_url: str = "",
    ) -> None:
        """`events`: where to add events for the log; the aggregator empties it.

        `upload_url`: where devices can upload without a selector in between.
        """
        self.task = task
        # The row that makes this aggregator the holder. Every write requires it.
        self.fence = fence
        self.phase = TaskPhase.LOADING
        # Why the task is halted, for the owner; empty while it is not. A report also calls a task
        # halted while its blobs, its threads or its TSA have a problem, but then its phase stays.
        self.halted_because = ""
        # Why its work is delayed for now, by cause; an empty reason means that it is over.
        self.delays: dict[str, str] = {}

        # Active clients, and how ended sessions ended.
        self.sessions = Sessions(server.dead_after_s)
        # Counts of events, for metrics and simulation results.
        self.counters: Counter[str] = Counter()
        # The demand for clients, and for whom slots are kept.
        self.slots = Slots(fence.seq, epoch, leases, predecessors_active, self.sessions)
        # How sessions end.
        self.endings = Endings(self.sessions, self.slots, memory, server, self.counters)
        # Complete updates that are not in a sum yet.
        self.queue = UpdateQueue(self.sessions, self.slots, self.endings, memory, keyring, server)
        # Who may take part, and the answers to requests.
        self.participants = Participants(
            self.sessions, self.slots, self.endings, self.queue, keyring, server, self.counters
        )
        self.requests = Requests(
            self.participants,
            self.sessions,
            self.endings,
            self.queue,
            memory,
            keyring,
            server,
            self.counters,
            upload_url,
        )
        # Buffers, records and versions. Set by the first load; nothing is served before.
        self.pipeline: Pipeline
        # Under which manifests clients may take part. Set by each load.
        self.revisions: Revisions
        # Offers of the TSA; None unless the task is secure.
        self.offers: Stocks | None = None

        self._events = TaskEvents(task, fence.seq, events)
        self._server = server
        # Memory for uploads, and tokens for storage requests: shared by all tasks held here.
        self._memory = memory
        self._tokens = tokens
        # The token of the read that loads the task.
        self._read_token = 0
        # Deadlines are swept at most once per interval.
        self._swept_at = 0.0
        self._sweep_s = server.heartbeat_s / 20
        # The version at which a blob was last found missing.
        self._lost_at: int | None = None

    @property
    def ledger(self) -> Ledger:
        return self.pipeline.ledger

    @property
    def config(self) -> TaskConfig:
        return self.pipeline.config

    # -- loading and stopping ---------------------------------------------------------------

    def load(self) -> Effects:
        """Read everything durable about the task, in one snapshot."""
        self.phase = TaskPhase.LOADING
        self._read_token = next(self._tokens)
        return [Read(self._read_token, holder_prefixes(self.task))]

    def awaits(self, token: int) -> bool:
        if self.phase is TaskPhase.LOADING:
            return token == self._read_token
        return self.phase is SERVING and token == self.pipeline.token

    def on_rows(self, rows: Rows) -> Effects:
        if self.phase is SERVING:
            return self.pipeline.on_rows(dict(rows.rows)) or self.load()
        ledger = Ledger.read(self.task, self.fence, dict(rows.rows))
        if ledger is None:
            return self.stop()
        # Updates of a candidate have the same size. Those of an earlier revision that do not fit
        # into the memory wait until their session times out.
        problem = why_not_served(ledger.config, self._server.chunk_bytes, self._memory.total_bytes)
        if problem := problem or _missing_methods(ledger):
            return self._halt(problem)
        garbage = self.ledger.replaced_by(ledger) if self.has_served else ()
        self.pipeline = Pipeline(ledger, self._tokens)
        self._events.versions(ledger, has_served=self.has_served)
        if ledger.config.secure_aggregation is not None:
            self.offers = self.offers or Stocks(ledger.config, self.fence.seq)
            self.offers.on_loaded(self.pipeline)
        self.revisions = Revisions(self.pipeline, self._server)
        self.slots.load(self.pipeline)
        self.endings.load(self.pipeline, self.revisions)
        self.queue.load(self.pipeline, self.revisions, self.offers)
        self.participants.load(self.pipeline, self.revisions)
        self.requests.load(self.pipeline, self.revisions, self.offers)
        effects = [*self.endings.settle(), *self.participants.end_revoked()]
        self.queue.keep_places()
        deleted: Effects = [DeleteBlobs(garbage)] if garbage else []
        return [*effects, *deleted, self.pipeline.restore()]

    def on_restored(self, now: float) -> Effects:
        self.phase = SERVING
        if not self.has_served:
            self._events.taken(self.ledger)
        if self.halted_because:
            self._events.resumed(self.ledger)
            self.halted_because = ""
        self.slots.may_want_more = True
        for session in self.sessions.active.values():
            session.seen_at = now  # while the rows were read, no request could be answered
            self.sessions.refile(session)
        if not self.has_served:
            self.slots.open(now, self._server.dead_after_s)
        return [
            *self.endings.abort_outdated(),
            *self.participants.end_revoked(),  # it may have arrived while the sums were restored
            *self.queue.refill_offers(now),
            *self.pipeline.restored(now),
        ]

    def stop(self) -> Effects:
        """Another aggregator holds the task now; clients reach it through any selector."""
        self.phase = TaskPhase.STOPPED
        if self.has_served:
            self._events.left(self.ledger)
        effects: Effects = [Drop(self.task, self.fence.seq)]
        for session in self.sessions.active.values():
            effects += self.endings.answer(session, MOVED)
            self._memory.release(session.claim)
        return effects

    def drain(self, *, drops_uploads: bool) -> Effects:
        """Begin nothing new. Uploads that have begun may finish, until they are dropped."""
        if drops_uploads:
            self.requests.draining = Draining.DROPS_UPLOADS
        elif self.requests.draining is None:
            self.requests.draining = Draining.FINISHES_UPLOADS
        if not drops_uploads or self.phase is not SERVING:
            return []
        return self.queue.drop_unfinished()

    def record_now(self, now: float) -> Effects:
        """Commit what is folded without waiting for more of it."""
        return self.pipeline.flush(now) if self.phase is SERVING else []

    @property
    def is_drained(self) -> bool:
        """Every update that was folded is in a record, and no other will be folded here.

        A successor does not know the places that are kept, so their clients have as much time as
        uploads have.
        """
        draining = self.requests.draining
        if draining is None or self.phase is TaskPhase.LOADING:
            return False
        if self.phase is not SERVING:
            return True
        may_finish = draining is Draining.FINISHES_UPLOADS
        waits = may_finish and bool(self.pipeline.kept_places)
        return not self.sessions.uploads and not waits and self.pipeline.is_settled

    def _halt(self, reason: str) -> Effects:
        """Stop serving until the rows change. Sessions continue; uploads are dropped."""
        self.phase = TaskPhase.HALTED
        if reason != self.halted_because:  # the rows are read again every heartbeat
            self._events.halted(reason)
        self.halted_because = reason
        return self.endings.request_all_again()

    # -- revoked devices --------------------------------------------------------------------

    def revoke(self, devices: tuple[str, ...]) -> Effects:
        """These devices, and no others, may not take part."""
        self.participants.revoked_devices = devices
        if self.phase is not SERVING:
            return []
        return [*self.participants.end_revoked(), *self.queue.place_waiting()]

    # -- demand -----------------------------------------------------------------------------

    @property
    def has_served(self) -> bool:
        """From then on every report must name the task.

        A report that leaves it out would be acknowledged without its confirmations.
        """
        return self.slots.adopts_until != _NEVER

    def demand(self, now: float) -> int:
        """The demand to report: without the room that is kept for clients of earlier holders, and
        zero while those that are here wait for the TSA, or would when they report.
        """
        if self.phase is not SERVING or self.requests.draining is not None:
            return 0
        if self.offers is not None and (
            self.queue.waits_for_tsa
            or self.offers.current.are_refused
            or not self.slots.admits_joins
        ):
            return 0
        return self.slots.wanted(now)

    def report(self, now: float, number: int) -> TaskReport:
        """The part of report `number` about this task (paper, "High Client Utilization")."""
        slots = self.slots
        is_adopting = now < slots.adopts_until
        if not is_adopting:
            slots.promises.forget_inherited()
        demand = self.demand(now)
        slots.promise(demand)
        return TaskReport(
            task=self.task,
            seq=self.fence.seq,
            active=len(self.sessions.active),
            demand=demand,
            halted=self.problem,
            ended=self.sessions.ended_count,
            joined=slots.confirmations.name_in(number),
            version=self.ledger.version if self.has_served else 0,
            drained=self.is_drained,
            awaited=slots.awaited if is_adopting else 0,
            endings=tuple((name, n) for name, n in self.counters.items() if is_reported(name)),
        )

    @property
    def delayed_because(self) -> str:
        """Why blobs cannot be read or written, or no thread can start, for now; may be empty."""
        return next(filter(None, self.delays.values()), "")

    @property
    def problem(self) -> str:
        """Why the task makes no versions for now, for the owner; empty if there is no reason."""
        return self.halted_because or self.delayed_because or self.tsa_problem

    # -- the TSA ----------------------------------------------------------------------------

    @property
    def tsa_problem(self) -> str:
        """For the owner; empty if there is none."""
        if self.offers is None:
            return ""
        return _FAILING if self.pipeline.is_failing else self.offers.current.problem

    def on_offered(self, now: float, message: Offered) -> Effects:
        if self.offers is None:
            return []
        self.slots.may_want_more |= self.offers.current.is_away or self.offers.current.are_refused
        self.offers.on_offered(now, message, self.pipeline)
        if self.phase is not SERVING:
            return []
        return [*self.pipeline.pump(now), *self.queue.refill_offers(now)]

    # -- storage ----------------------------------------------------------------------------

    def on_snapshotted(self, message: Snapshotted) -> Effects:
        """A snapshot may hold updates whose `Folded` message has not arrived here yet."""
        effects = self.pipeline.on_snapshotted(message)
        sums = () if self.pipeline.keeps_members else message.sums
        active = self.sessions.active
        for session_id in (session for found in sums for session in found.sessions):
            if session_id in active:
                self._memory.release(active[session_id].claim)
        if self.pipeline.current.is_full and regime.ends_round_when_full(self.config):
            effects += self.endings.end_round()
        return effects

    def on_stepped(self, now: float, message: Stepped) -> Effects:
        life_s = max(ticket_life_s(config, self._server) for config in self.ledger.terms.values())
        oldest_kept = self.sessions.oldest_kept(now)
        effects = self.pipeline.on_stepped(now, message, life_s, oldest_kept)
        self._events.dropping(message.version, message.dropped if effects else "")
        if message.dropped:
            what = f"buffers_dropped_{message.dropped}" if effects else "steps_postponed"
            self.counters[what] += 1
        if message.dropped == UNREACHABLE and self.offers is not None:
            self.offers.current.on_unanswered()
            effects = self.queue.refill_offers(now)
        return effects

    def on_step_failed(self, message: StepFailed) -> Effects:
        """Publish nothing. A record stays until the task's owner acts; members that are in none are
        asked for their updates again.
        """
        self.counters["steps_failed"] += 1
        return self._halt(message.reason)

    def on_lost(self, message: Lost) -> Effects:
        """A blob is missing. Read the rows: a successor may hold the task and have deleted it.

        If the rows are fresh and still name the blob, it is lost, and the task halts.
        """
        head = None if self.phase is TaskPhase.LOADING else self.ledger.version
        if head is None or head == self._lost_at:
            return self._halt(message.reason)
        self._lost_at = head
        return self.load()

    def on_transacted(self, now: float, message: Transacted) -> Effects:
        if message.outcome == "refused":
            return self.pipeline.on_refused() or self.load()
        if message.outcome != "committed":
            return self.load()
        durable, has_advanced, effects = self.pipeline.on_committed(now)
        for session_id in durable:
            session = self.sessions.active.get(session_id)
            if session is not None:
                effects += self.endings.acknowledge(session)
        if has_advanced:
            self.counters["versions"] += 1
            self._events.versions(self.ledger, has_served=True)
            self.slots.may_want_more = True
            effects += [*self.endings.abort_outdated(), *self.queue.end_revised(now)]
            effects += [*self.revisions.forget(now), *self.queue.place_waiting()]
        return effects + self.pipeline.pump(now)

    # -- time -------------------------------------------------------------------------------

    def must_wake(self, now: float) -> bool:
        """Is a deadline due, so that `wake` comes before the next request? If all deadlines have
        moved and `wake` would do nothing else, it counts as done.
        """
        if self.sessions.next_deadline() > now:
            return False
        if self.offers is not None or self.pipeline.is_bound or self.queue.waiting:
            return True
        if self.pipeline.next_wake() <= now or self.sessions.has_expired(now):
            return True
        self._swept_at = now
        return False

    def wake(self, now: float) -> Effects:
        self._swept_at = now
        return [
            *self.endings.abort_expired(now),
            *self.queue.end_revised(now),
            *self.queue.place_waiting(),
            *self.queue.refill_offers(now),
            *self.pipeline.pump(now),
        ]

    def next_wake(self) -> float:
        if self.phase is not SERVING:
            return _NEVER
        # Sweep deadlines together: most have moved or no longer matter when they are due.
        sweep = self._swept_at + self._sweep_s
        if (deadline := self.sessions.next_deadline()) > sweep:
            sweep = deadline
        commit = self.pipeline.next_wake()
        due = commit if commit < sweep else sweep
        if self.offers is None:
            return due
        if self.revisions.served:
            due = min(due, self._swept_at + self._sweep_s)
        return due if self.pipeline.is_over else min(due, self.offers.next_wake())

    def check(self) -> None:
        if self.phase is SERVING:
            self.sessions.check(self.config.concurrency)
            self.pipeline.check()
            self.participants.check()


def _missing_methods(ledger: Ledger) -> str:
    """What the task needs and this aggregator does not have; empty if it has all."""
    try:
        for config in ledger.terms.values():
            require_methods(config)
    except ConfigError as error:
        return f"{error}; {error.hint}"
    return ""
