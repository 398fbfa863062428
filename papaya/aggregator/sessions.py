"""Virtual sessions of one task (paper, "Client Independence", "Enforcing Max Concurrency").

    "the system enforces an upper bound of concurrently participating clients (C) for every task
    [...] The client may have completed execution, or it may be considered dead due to missed
    heartbeats or execution error. Finally, clients may also be aborted by the server if staleness
    [...] is higher than a configurable value."

A session is active from join (or adoption) to completion, abort, failure or expiry. Its final
answer is kept until no ticket of the session is valid, and given to every later request of the
client.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace

from papaya.aggregator.upload import Claim, Upload
from papaya.config import ServerConfig, TaskConfig
from papaya.errors import InvariantError
from papaya.machine import Effects, Handle, Reply
from papaya.messages.base import SessionId
from papaya.messages.participation import (
    MAX_EXTRA_S,
    Aborted,
    Completed,
    Retry,
    SecureOffer,
)
from papaya.messages.storage import Member, TaskRow
from papaya.messages.tickets import SessionTicket, UploadTicket

_MAX_WAITING = 4
_NEVER = float("inf")


def session_life_s(config: TaskConfig, server: ServerConfig) -> float:
    """How long a session ticket is valid: the training timeout plus a heartbeat for the report."""
    return config.training_timeout_s + server.heartbeat_s


def ticket_life_s(config: TaskConfig, server: ServerConfig) -> float:
    """How long tickets of a session may be valid, by the clock of any server."""
    return session_life_s(config, server) + config.upload_timeout_s + server.heartbeat_s


def longest_ticket_life_s(row: TaskRow, server: ServerConfig) -> float:
    """The same for any ticket of the task, also those of clients that joined before a revision."""
    configs = (row.config, *(earlier.config for earlier in row.earlier))
    return max(ticket_life_s(config, server) for config in configs)


def pinned_until(evaluation: TaskConfig, now: float, server: ServerConfig) -> float:
    """How long an evaluation that starts now needs the version that it evaluates.

    After its time is over, the last client to join may still have a valid ticket.
    """
    assert evaluation.stop.hours is not None
    over = now + 3600 * evaluation.stop.hours
    return over + ticket_life_s(evaluation, server) + server.dead_after_s


def keep_until(expires: float, config: TaskConfig, server: ServerConfig) -> float:
    """When the last ticket of a session has expired, by the clock of any server."""
    joined_at = expires - session_life_s(config, server)
    return joined_at + ticket_life_s(config, server)


class Session:
    """One active client."""

    __slots__ = (
        "answer_to",
        "claim",
        "id",
        "kept_until",
        "offer",
        "sealed",
        "sealed_seed",
        "seed_group",
        "seen_at",
        "ticket",
        "upload",
        "upload_sealed",
        "upload_ticket",
    )

    def __init__(self, ticket: SessionTicket | UploadTicket, sealed: bytes, now: float) -> None:
        self.id = ticket.session
        # The ticket from the join, and its sealed bytes; empty if only an upload ticket was shown.
        self.ticket = ticket
        self.sealed = sealed
        # The time of the last request, or since when requests are read again.
        self.seen_at = now
        # The ticket from the report, and its sealed bytes.
        self.upload_ticket: UploadTicket | None = None
        self.upload_sealed = b""
        # Chunks received so far, and the claim on memory for them.
        self.upload: Upload | None = None
        self.claim: Claim | None = None
        # Secure aggregation: the offer given with the report, the sealed seed of the mask, and the
        # version whose group has the seed if an earlier holder put it there.
        self.offer: SecureOffer | None = None
        self.sealed_seed = b""
        self.seed_group: int | None = None
        # Until then the session continues past its deadline, because it had to wait for the TSA.
        self.kept_until = ticket.kept_until
        # Requests that wait for the outcome of the update.
        self.answer_to: list[Handle] = []

    @property
    def version(self) -> int:
        return self.ticket.version

    @property
    def pseudonym(self) -> bytes:
        return self.ticket.pseudonym

    @property
    def manifest(self) -> bytes:
        """The digest of the signed manifest under which the client trains."""
        return self.ticket.manifest

    @property
    def is_training(self) -> bool:
        return self.upload_ticket is None

    @property
    def is_complete(self) -> bool:
        """The whole update is here and is being folded, or waits for a buffer."""
        return self.upload is not None and self.upload.is_folding

    def as_member(self, keep_until: float) -> Member:
        assert self.upload_ticket is not None
        ticket = self.upload_ticket
        return Member(
            self.id,
            self.version,
            ticket.staleness,
            ticket.examples,
            keep_until,
            ticket.offer,
            self.pseudonym,
        )

    def as_session_ticket(self) -> SessionTicket:
        """The ticket from the join, for a client that has lost it."""
        return SessionTicket(*self._fields, pseudonym=self.pseudonym, manifest=self.manifest)

    def as_upload_ticket(
        self, *, staleness: int, examples: int, upload_by: float, offer: int
    ) -> UploadTicket:
        """The ticket for the client's report."""
        return UploadTicket(
            *self._fields,
            staleness=staleness,
            examples=examples,
            upload_by=upload_by,
            offer=offer,
            pseudonym=self.pseudonym,
            manifest=self.manifest,
        )

    @property
    def _fields(self) -> tuple[str, str, int, int, str, float]:
        """What every ticket of the session says."""
        own = self.ticket
        return own.task, own.session, own.seq, own.version, own.parameters, own.expires

    def await_answer(self, reply_to: Handle) -> Effects:
        """Answer after the commit. Only the last few requests of a client are kept."""
        self.answer_to.append(reply_to)
        if len(self.answer_to) <= _MAX_WAITING:
            return []
        return [Reply(self.answer_to.pop(0), Retry("a newer request replaced this one", 0.0))]

    def deadline(self, dead_after_s: float) -> float:
        """When the session expires. A complete update does not: it only awaits its commit."""
        if self.is_complete:
            return _NEVER
        ends, silent = self._ends, self.seen_at + dead_after_s
        if self.kept_until > ends:
            ends = self.kept_until
        return silent if silent < ends else ends

    @property
    def _ends(self) -> float:
        """The deadline that the client knows from its ticket."""
        return self.ticket.expires if self.upload_ticket is None else self.upload_ticket.upload_by

    def keep(self, now: float, keep_s: float) -> float:
        """Continue for so long, if the limit permits it. Returns how long."""
        self.kept_until = min(now + keep_s, self._ends + MAX_EXTRA_S)
        return max(0.0, self.kept_until - now)


class Sessions:
    """All sessions of a task.

    Invariant: active <= concurrency, and one per pseudonym; none is both active and ended.
    """

    def __init__(self, dead_after_s: float) -> None:
        self.active: dict[SessionId, Session] = {}
        self._by_pseudonym: dict[bytes, Session] = {}
        self.ended: dict[SessionId, tuple[Completed | Aborted, float]] = {}
        self.ended_count = 0
        self._dead_after_s = dead_after_s
        self._deadlines: list[tuple[float, SessionId]] = []
        self._keep_until: list[tuple[float, SessionId]] = []  # of ended sessions
        self._training: dict[int, dict[SessionId, Session]] = {}

    def of_device(self, pseudonym: bytes) -> Session | None:
        """The active session of a device; None without a pseudonym."""
        return self._by_pseudonym.get(pseudonym)

    @property
    def uploads(self) -> int:
        """The number of uploads in progress."""
        return sum(session.upload is not None for session in self.active.values())

    def admit(self, session: Session) -> None:
        self.active[session.id] = session
        if session.pseudonym:
            self._by_pseudonym[session.pseudonym] = session
        if session.is_training:
            self._training.setdefault(session.version, {})[session.id] = session
        heappush(self._deadlines, (session.deadline(self._dead_after_s), session.id))

    def reported(self, session: Session, ticket: UploadTicket, sealed: bytes) -> None:
        """Training is over: staleness is final and no longer a reason to abort."""
        self._forget_training(session)
        session.upload_ticket, session.upload_sealed = ticket, sealed
        heappush(self._deadlines, (session.deadline(self._dead_after_s), session.id))

    def rebase(self, session: Session, ticket: SessionTicket | UploadTicket, sealed: bytes) -> None:
        """Use the ticket that the client shows: it names the version that the client trains from.

        A duplicate of the join may have reached this holder and started a newer version.
        """
        self._forget_training(session)
        session.ticket, session.sealed = ticket, sealed
        session.kept_until = max(session.kept_until, ticket.kept_until)
        self._training.setdefault(session.version, {})[session.id] = session
        self.refile(session)

    def refile(self, session: Session) -> None:
        """The deadline has changed and may be earlier than the one on file."""
        heappush(self._deadlines, (session.deadline(self._dead_after_s), session.id))

    def listen_again(self, now: float) -> None:
        """Requests could not be read until now: the silence of every client begins again."""
        for session in self.active.values():
            session.seen_at = now

    def end(self, session: Session, answer: Completed | Aborted, keep_until: float) -> None:
        """Free the slot, and keep the answer for the client's next request."""
        del self.active[session.id]
        self._by_pseudonym.pop(session.pseudonym, None)
        self._forget_training(session)
        self.remember(session.id, answer, keep_until)
        self.ended_count += 1

    def remember(self, session: SessionId, answer: Completed | Aborted, keep_until: float) -> None:
        """Keep the answer of a session that ended here or at an earlier holder."""
        self.ended[session] = (answer, keep_until)
        heappush(self._keep_until, (keep_until, session))

    def training_from(self, versions: range) -> Iterator[Session]:
        """Sessions that are still training from one of these versions."""
        for version in [found for found in self._training if found in versions]:
            yield from list(self._training[version].values())

    def oldest_kept(self, now: float) -> float:
        """The oldest version of a client that waits for the TSA; infinite if none does."""
        kept = (s.version for s in self.active.values() if s.kept_until > now)
        return min(kept, default=float("inf"))

    def has_expired(self, now: float) -> bool:
        """Has the deadline of a session passed? If a deadline has moved, file the new one."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            session_id = deadlines[0][1]
            session = self.active.get(session_id)
            deadline = _NEVER if session is None else session.deadline(self._dead_after_s)
            if deadline <= now:
                return True
            if deadline < _NEVER:
                heapreplace(deadlines, (deadline, session_id))
            else:
                heappop(deadlines)
        return False

    def expired(self, now: float) -> list[Session]:
        """Sessions whose deadline has passed."""
        found: dict[SessionId, Session] = {}
        while self.has_expired(now):
            _, session_id = heappop(self._deadlines)
            found[session_id] = self.active[session_id]
        return list(found.values())

    def next_deadline(self) -> float:
        return self._deadlines[0][0] if self._deadlines else _NEVER

    def forget(self, now: float) -> None:
        """Drop the answers of sessions whose tickets have all expired."""
        while self._keep_until and self._keep_until[0][0] <= now:
            _, session = heappop(self._keep_until)
            if session in self.ended and self.ended[session][1] <= now:
                del self.ended[session]

    def check(self, concurrency: int) -> None:
        if len(self.active) > concurrency:
            raise InvariantError(
                f"{len(self.active)} clients are active, above concurrency {concurrency}"
            )
        for session_id, session in self.active.items():
            if session_id in self.ended:
                raise InvariantError(f"session {session_id} is both active and ended")
            if session.pseudonym and self.of_device(session.pseudonym) is not session:
                raise InvariantError(f"session {session.id} is not the only one of its device")

    def _forget_training(self, session: Session) -> None:
        bucket = self._training.get(session.version)
        if bucket is not None and bucket.pop(session.id, None) is not None and not bucket:
            del self._training[session.version]
