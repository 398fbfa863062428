"""The admin API without HTTP: plain coroutines from typed requests to typed answers.

    submit    parameters first, as a blob; then the task that names them
    look      tasks, one task, points, versions, parameters, status
    change    pause, resume, cancel, delete, roll back, mark, evaluate: each a compare-and-set
    revoke    devices that may not take part, although their tokens are valid

Every change takes the `Attempt` that it is made for and writes it to the audit trail in the same
transaction.

The caller's role has been checked. Refused: a missing task or version (404), a row
that has changed or a change that the current state does not allow (409), an invalid request (400).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from secrets import token_bytes

import msgspec

from papaya.aggregator.sessions import longest_ticket_life_s
from papaya.aggregator.shards import blob_key
from papaya.config import EvaluationPlan, ServerConfig, TaskConfig
from papaya.errors import OperatorError
from papaya.learning.server_optimizer import server_optimizer
from papaya.messages import owner
from papaya.messages.audit_trail import Attempt
from papaya.messages.base import BlobKey, NodeId, TaskId
from papaya.messages.events import (
    CertificatesRefused,
    StorageFailed,
    TsaBack,
    TsaUnreachable,
)
from papaya.messages.owner import TaskRows
from papaya.messages.reasons import CANDIDATE_ENDINGS
from papaya.messages.rollout import counts_of, enough_at, since, values_of
from papaya.messages.storage import (
    DELETED,
    EVENTS,
    LEADER_KEY,
    MAINTENANCE_KEY,
    REVOKED,
    SHARES,
    TASKS,
    TICKET_KEYS,
    AdminAddressRow,
    ArmCounts,
    BootRow,
    EndingsRow,
    EventRow,
    LeaderRow,
    MaintenanceRow,
    ManifestRow,
    OptimizerRow,
    Outcome,
    PointRow,
    RevokedRow,
    RolloutRow,
    Row,
    ShareRow,
    TaskRow,
    TaskState,
    TicketKeyRow,
    Transaction,
    VersionRow,
    admin_address_key,
    boot_key,
    deleted_key,
    endings_key,
    manifest_key,
    optimizer_key,
    revoked_key,
    rollout_key,
    share_key,
    task_key,
    ticket_key_key,
)
from papaya.server.admin import evaluations
from papaya.server.admin.audit_trail import AuditTrail
from papaya.server.admin.blobs import AdminBlobs
from papaya.server.admin.history import TaskHistory
from papaya.server.admin.live import Live
from papaya.server.admin.problems import Conflict, NotFound, Uncertain
from papaya.server.admin.views import (
    Deletion,
    Evaluate,
    EventView,
    EvidenceView,
    Mark,
    Revocation,
    Revoke,
    RollBack,
    RolloutView,
    SetShare,
    Started,
    SystemStatus,
    TaskDetail,
    TaskView,
    VersionView,
)
from papaya.server.auth import check_device_id
from papaya.server.state_thread import AsyncState
from papaya.server.ticket_keys import KEY_BYTES as TICKET_KEY_BYTES

OPTIMIZERS = "optimizer/"
NEWEST = "newest"
# Fields of events with paths and addresses of servers.
_FOR_OPERATORS = {
    CertificatesRefused.name(): ("why",),
    StorageFailed.name(): ("why",),
    TsaBack.name(): ("peer",),
    TsaUnreachable.name(): ("peer", "why"),
}
_RECENT_POINTS = 64
_MAX_POINTS = 10_000
_ROLL_BACK_ATTEMPTS = 10


class AdminService:
    """All requests of owners and operators."""

    def __init__(
        self,
        state: AsyncState,
        blobs: AdminBlobs,
        history: TaskHistory,
        live: Live,
        now: Callable[[], float],
        changed: Callable[[], None],
        server: ServerConfig,
        *,
        identifies_devices: bool = True,
        signs_device_tokens: bool = False,
        has_seen: Callable[[str], bool | None] = lambda device: None,
        evidence: Callable[[], EvidenceView | None] = lambda: None,
        coordinators: tuple[NodeId, ...] = (),
    ) -> None:
        """`signs_device_tokens`: whether device tokens are those of `papaya token make`.
        `has_seen`: whether a device has checked in here; None if this process cannot know.
        `evidence`: what vouches for the TSA. `coordinators`: all that are configured.
        """
        self.state = state
        self.blobs = blobs
        self.live = live
        self.now = now
        self.trail = AuditTrail(state, now)
        self._history = history
        self._changed = changed
        self._server = server
        self.max_members_mb = server.max_members_mb
        self._started = now()
        self.identifies_devices = identifies_devices
        self.signs_device_tokens = signs_device_tokens
        self._has_seen = has_seen
        self._evidence = evidence
        self.coordinators = coordinators

    # -- look -------------------------------------------------------------------------------

    async def tasks(self) -> tuple[TaskView, ...]:
        tasks = await self._task_rows()
        heads = await self.state.read((OPTIMIZERS, SHARES)) if tasks else {}
        return tuple([await self._view(row, heads) for row in tasks])

    async def task(self, task: TaskId) -> TaskDetail:
        found, others = await self._snapshot(task, _shown_keys)
        task = found.task
        points = await self.all_points(task)
        manifest, endings = others.get(manifest_key(task)), others.get(endings_key(task))
        total = endings.total if isinstance(endings, EndingsRow) else {}
        rollout = others.get(rollout_key(task))
        recent = points[-_RECENT_POINTS:]
        return TaskDetail(
            task=self._line(found.row, found.optimizer.version, points, others),
            config=found.row.config,
            manifest=manifest.tensors if isinstance(manifest, ManifestRow) else (),
            points=recent,
            versions_per_minute=versions_per_minute(recent, found.row, self.now()),
            warnings=tuple(found.row.config.warnings()),
            endings={name: n for name, n in total.items() if name not in CANDIDATE_ENDINGS},
            open_updates=sum(len(record.members) for record in found.records.values()),
            rollout=_rollout_view(rollout, points, total),
        )

    async def events(self, *, for_operator: bool) -> tuple[EventView, ...]:
        """The last events of all servers, the oldest first."""
        rows = await self.state.read((EVENTS,))
        found = (row for row in rows.values() if isinstance(row, EventRow))
        return tuple(_event_view(row, for_operator=for_operator) for row in found)

    async def points(self, task: TaskId, after: int = -1) -> tuple[PointRow, ...]:
        """The points as the supervisor of this process knows them: at most one turn old."""
        found = await self.rows(task)
        return tuple(p for p in await self.all_points(found.task) if p.version > after)[
            :_MAX_POINTS
        ]

    async def versions(self, task: TaskId) -> tuple[VersionView, ...]:
        found = await self.rows(task)
        return tuple(_version_view(row) for _, row in sorted(found.versions.items()))

    async def parameters(self, task: TaskId, version: str) -> tuple[VersionRow, Path]:
        """The version's row, and the file of its parameters, which may be deleted soon."""
        found = await self.rows(task)
        if version != NEWEST and not (version.isascii() and version.isdecimal()):
            raise OperatorError(
                f"invalid version: {version[:20]!r}", hint="use a number or `newest`"
            )
        row = found.newest if version == NEWEST else _version(found, int(version[:18]))
        return row, await self.blobs.path(row.parameters)

    async def status(self) -> SystemStatus:
        found = await self.state.read((LEADER_KEY, MAINTENANCE_KEY))
        leader, under = found.get(LEADER_KEY), found.get(MAINTENANCE_KEY)
        known = leader if isinstance(leader, LeaderRow) else LeaderRow("", 0.0, 0, 0)
        key = admin_address_key(known.holder)
        address = (await self.state.read((key,))).get(key)
        return SystemStatus(
            roles=self.live.roles,
            leads=self.live.leads(),
            is_led=self.live.is_led(),
            recovers=self.live.recovers(),
            just_started=self.now() < self._started + 2 * self._server.heartbeat_s,
            leader=known.holder,
            epoch=known.epoch,
            aggregators=self.live.aggregators(),
            selectors=self.live.selectors(),
            tasks=await self.tasks(),
            clocks=self.live.clocks(),
            leader_admin=address.url if isinstance(address, AdminAddressRow) else "",
            identifies_devices=self.identifies_devices,
            signs_device_tokens=self.signs_device_tokens,
            maintenance=under if isinstance(under, MaintenanceRow) else None,
            versions=await self.versions_of_servers((known.holder,) if known.holder else ()),
            evidence=self._evidence(),
        )

    async def versions_of_servers(self, coordinators: Iterable[NodeId]) -> dict[NodeId, str]:
        """The version of Papaya that these and each other live server run; empty for 0.4.0."""
        nodes = [*coordinators]
        nodes += [server.node for server in self.live.aggregators()]
        nodes += [server.node for server in self.live.selectors()]
        found = await self.state.read(tuple(map(boot_key, nodes))) if nodes else {}
        rows = {node: found.get(boot_key(node)) for node in nodes}
        return {node: row.papaya for node, row in rows.items() if isinstance(row, BootRow)}

    # -- change -----------------------------------------------------------------------------

    async def set_state(self, task: TaskId, state: TaskState, attempt: Attempt) -> TaskView:
        found = await self.rows(task)
        try:
            change = owner.change_state(found.row, state, self.now(), attempt.why)
        except OperatorError as error:
            raise Conflict(str(error), hint=error.hint) from error
        await self.write(change, attempt)
        return (await self.task(task)).task

    async def delete(self, task: TaskId, attempt: Attempt) -> Deletion:
        """Delete a task that is over, with its evaluations. The supervisor removes what is left."""
        found = await self.rows(task)
        row = found.row
        own = evaluations.of(found.task, await self._task_rows())
        if any(not each.is_over for each in own):
            raise Conflict(
                f"an evaluation of task {found.task} is running",
                hint="wait until it ends: papaya task list --evaluations",
            )
        try:
            changes = [owner.delete(each, self.now()) for each in (row, *own)]
        except OperatorError as error:
            raise Conflict(str(error), hint=error.hint) from error
        await self.write(
            Transaction(
                require=tuple(required for change in changes for required in change.require),
                put=tuple(put for change in changes for put in change.put),
            ),
            attempt,
        )
        return Deletion(found.task, row.name, row.ended + longest_ticket_life_s(row, self._server))

    async def roll_back(self, task: TaskId, request: RollBack, attempt: Attempt) -> VersionView:
        """Roll back, and retry on a newer head: a busy task commits many times a second, and the
        owner does not care which head is replaced.
        """
        outcome, head = "refused", 0
        for _ in range(_ROLL_BACK_ATTEMPTS):
            head, change = await self._prepare_roll_back(task, request.version)
            outcome = await self.trail.transact(attempt, change)
            if outcome != "refused":
                break
        self.settle(outcome)
        return _version_view(_version(await self.rows(task), head))

    async def _prepare_roll_back(self, task: TaskId, version: int) -> tuple[int, Transaction]:
        """Write the blob of the new head; return the head and its transaction."""
        found = await self.rows(task)
        _version(found, version)
        key = await self.fresh_optimizer(found, found.row.config)
        try:
            change = owner.rollback(found, version, key, self.now())
        except OperatorError as error:
            raise Conflict(str(error), hint=error.hint) from error
        return found.newest.version + 1, change

    async def fresh_optimizer(self, found: TaskRows, config: TaskConfig) -> BlobKey:
        """Store the optimizer state of a new head that begins anew."""
        head = found.newest.version + 1
        # Under the current fence: its holder does not sweep it, and the change requires this fence.
        key, fresh = await asyncio.to_thread(fresh_state, config, found.task, found.fence.seq, head)
        await self.blobs.put(key, fresh)
        return key

    async def mark(self, task: TaskId, request: Mark, attempt: Attempt) -> VersionView:
        found = await self.rows(task)
        row = _version(found, request.version)
        try:
            change = owner.mark(found.task, row, request.marked)
        except OperatorError as error:
            raise Conflict(str(error), hint=error.hint) from error
        await self.write(change, attempt)
        return _version_view(_version(await self.rows(task), request.version))

    async def set_share(self, task: TaskId, request: SetShare, attempt: Attempt) -> TaskView:
        """Change the weight or the priority of a task that is not over."""
        found = await self.rows(task)
        if found.row.is_over:
            raise Conflict(f"task {task} is {found.row.state}", hint="papaya task list")
        if (pinned := found.row.config.evaluates) is not None:
            raise OperatorError(
                f"{found.task} is an evaluation: it has the share of the task that it evaluates",
                hint=f"change that one instead: papaya task share {pinned.task}",
            )
        key = share_key(found.task)
        before = (await self.state.read((key,))).get(key)
        share = before if isinstance(before, ShareRow) else ShareRow()
        share = ShareRow(
            share.weight if request.weight is None else request.weight,
            share.priority if request.priority is None else request.priority,
        )
        require = ((key, before), (task_key(found.task), found.row))
        await self.write(Transaction(require=require, put=((key, share),)), attempt)
        return (await self.task(found.task)).task

    async def evaluate(
        self,
        task: TaskId,
        request: Evaluate,
        attempt: Attempt,
        transact: Callable[[Transaction], Awaitable[Outcome]] | None = None,
    ) -> Started:
        """`transact`: writes the change and the attempt, if there are more conditions."""
        found = await self.rows(task)
        row = found.newest if request.version is None else _version(found, request.version)
        config = found.row.config
        if config.evaluates is not None:
            raise OperatorError(
                f"{found.task} is itself an evaluation", hint="evaluate the original task instead"
            )
        signed = config.evaluation_clients
        plan = config.evaluation or EvaluationPlan(clients=signed or EvaluationPlan().clients)
        is_signed = config.requirements.bundle is not None
        if is_signed and (signed == 0 or (request.clients or signed) < signed):
            raise Conflict(
                f"devices refuse this evaluation: the owner of {task} has signed "
                + (f"evaluations of at least {signed} clients" if signed else "no evaluations"),
                hint=f"change it first: papaya task update {task} --set evaluation.clients=N",
            )
        plan = EvaluationPlan(
            clients=request.clients or plan.clients,
            timeout_s=request.timeout_s or plan.timeout_s,
        )
        if earlier := await evaluations.running(self.state, found.task, row):
            raise Conflict(
                f"version {row.version} of {task} is being evaluated already",
                hint=f"papaya task show {earlier}",
            )
        evaluation, outcome = await evaluations.start(
            transact or partial(self.trail.transact, attempt),
            self.blobs,
            found.row,
            row,
            plan,
            self.now(),
            self._server,
            norms=request.norms,
        )
        self.settle(outcome)
        return Started(evaluation.task, row.version)

    async def revocations(self) -> tuple[Revocation, ...]:
        """All revoked devices, in the order of their ids."""
        rows = await self.state.read((REVOKED,))
        return tuple(
            Revocation(device, row.at, self._has_seen(device))
            for device, row in ((key.removeprefix(REVOKED), row) for key, row in rows.items())
            if isinstance(row, RevokedRow)
        )

    def check_revocation(self, request: Revoke) -> None:
        """Call it before anything of the request is recorded: the id may be a secret token. Undoing
        is not checked, because earlier versions revoked such ids.
        """
        if request.revoked:
            signs = self.signs_device_tokens
            check_device_id(request.device, "papaya token revoke", is_signed=signs)

    async def revoke(self, request: Revoke, attempt: Attempt) -> tuple[Revocation, ...]:
        """Repeating it changes nothing. Every server reads the rows once per heartbeat."""
        key = revoked_key(request.device)
        is_revoked = key in await self.state.read((key,))
        if request.revoked and not is_revoked:
            await self.write(Transaction(put=((key, RevokedRow(self.now())),)), attempt)
        if is_revoked and not request.revoked:
            await self.write(Transaction(delete=(key,)), attempt)
        return await self.revocations()

    async def rotate_ticket_keys(self, attempt: Attempt) -> None:
        """Replace all ticket keys by a new one. Every server reads it within a heartbeat, and from
        then on refuses tickets under the others.
        """
        found = await self.state.read((TICKET_KEYS,))
        newest = max((int(key.removeprefix(TICKET_KEYS)) for key in found), default=0)
        row = TicketKeyRow(token_bytes(TICKET_KEY_BYTES), self.now())
        change = Transaction(
            require=tuple(found.items()),
            put=((ticket_key_key(newest + 1), row),),
            delete=tuple(found),
        )
        await self.write(change, attempt)

    async def write(self, change: Transaction, attempt: Attempt) -> None:
        """Commit with a row in the audit trail, or raise the reason."""
        self.settle(await self.trail.transact(attempt, change))

    def settle(self, outcome: str) -> None:
        """Raise the reason if a change was not committed."""
        if outcome == "refused":
            raise Conflict(
                "the task changed while this command ran",
                hint="check the task, then run the command again",
            )
        if outcome == "unknown":
            raise Uncertain(
                "the outcome is unknown: the state store did not answer",
                hint="check the task before you run the command again; see the server's log",
            )
        self._changed()

    # -- rows -------------------------------------------------------------------------------

    async def rows(self, task: TaskId) -> TaskRows:
        """The rows of a task, by its id, or of the newest run of a task with this name."""
        found, _ = await self._snapshot(task)
        return found

    async def _snapshot(
        self, task: TaskId, others: Callable[[TaskId], tuple[str, ...]] = lambda _: ()
    ) -> tuple[TaskRows, Mapping[str, Row]]:
        """Also every row of the same moment, with `others`: keys for the id of the run."""
        keys = (*owner.owner_prefixes(task), *others(task), deleted_key(task))
        rows = await self.state.read(keys)
        if isinstance(rows.get(task_key(task)), TaskRow) and deleted_key(task) not in rows:
            return TaskRows(task, rows), rows
        newest = await self.newest_run(task)
        if newest is None:
            raise await self._no_task(task)
        run = newest.config.task
        rows = await self.state.read((*owner.owner_prefixes(run), *others(run)))
        return TaskRows(run, rows), rows

    async def _no_task(self, task: TaskId) -> NotFound:
        """The error for an unknown name, with a similar name that exists."""
        names = {row.name or row.config.task for row in await self._task_rows()}
        close = get_close_matches(task, sorted(names), n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        return NotFound(f"there is no task {task[:64]!r}", hint=f"{hint}papaya task list")

    async def _task_rows(self) -> list[TaskRow]:
        """All tasks that were not deleted."""
        rows = await self.state.read((TASKS, DELETED))
        return [
            row
            for row in rows.values()
            if isinstance(row, TaskRow) and deleted_key(row.config.task) not in rows
        ]

    async def newest_run(self, name: str, owner_id: str | None = None) -> TaskRow | None:
        runs = [row for row in await self._task_rows() if name and row.name == name]
        if owner_id is not None:
            runs = [row for row in runs if row.config.requirements.owner == owner_id]
        owners = sorted({row.config.requirements.owner or "" for row in runs})
        if len(owners) > 1:
            raise Conflict(
                f"{len(owners)} owners have a task {name}",
                hint="use the id of a run instead of the name: papaya task list",
            )
        return max(runs, key=lambda row: row.submitted, default=None)

    async def _view(self, row: TaskRow, heads: Mapping[str, Row]) -> TaskView:
        """A task in one line. The optimizer row has the newest version."""
        optimizer = heads.get(optimizer_key(row.config.task))
        head = optimizer.version if isinstance(optimizer, OptimizerRow) else 0
        pinned = row.config.evaluates
        if pinned is None:
            return self._line(row, head, await self.all_points(row.config.task), heads)
        # The result of an evaluation is in the history of the task that it evaluates.
        found = (await self._history.points(pinned.task)).get(pinned.version)
        is_done = row.state == "completed" and found is not None
        return self._line(row, head, (found,) if is_done and found is not None else (), heads)

    async def all_points(self, task: TaskId) -> tuple[PointRow, ...]:
        """In order of version."""
        found = await self._history.points(task)
        return tuple(found[version] for version in sorted(found))

    def _line(
        self, row: TaskRow, head: int, points: tuple[PointRow, ...], others: Mapping[str, Row]
    ) -> TaskView:
        """`others` has the share of the task, if it has one."""
        share = others.get(share_key(row.config.task))
        share = share if isinstance(share, ShareRow) else ShareRow()
        config, live = row.config, None if row.is_over else self.live.task(row)
        last = next((p for p in reversed(points) if p.loss is not None), None)
        pinned = config.evaluates
        return TaskView(
            task=config.task,
            name=row.name,
            owner=config.requirements.owner or "",
            account=row.account,
            weight=share.weight,
            priority=share.priority,
            run=row.run,
            revision=row.revision,
            signed=row.signed,
            lease_until=row.lease_until,
            state=row.state,
            why=row.why,
            regime=type(config.regime).__name__,
            concurrency=config.concurrency,
            aggregation_goal=config.aggregation_goal,
            version=head,
            submitted=row.submitted,
            ended=row.ended,
            evaluates="" if pinned is None else f"{pinned.task}@{pinned.version}",
            holder="" if live is None else live.holder,
            halted="" if live is None else live.halted,
            active=None if live is None else live.active,
            demand=None if live is None else live.demand,
            utilization=None if live is None else live.active / config.concurrency,
            held=None if live is None else live.held,
            silent_s=0.0 if live is None else live.silent_s,
            evaluated=None if last is None else last.version,
            loss=None if last is None else last.loss,
            perplexity=None if last is None else last.perplexity,
            metrics={} if last is None else last.metrics,
            deviations={} if last is None else last.deviations,
        )


def versions_per_minute(points: tuple[PointRow, ...], row: TaskRow, now: float) -> float:
    """Over the points given, up to now or to the end of the task."""
    until = row.ended if row.is_over else now
    if len(points) < 2 or until <= points[0].created:
        return 0.0
    return 60 * (points[-1].version - points[0].version) / (until - points[0].created)


def _shown_keys(task: TaskId) -> tuple[str, ...]:
    """What a view of a task shows, beside the rows that its owner changes."""
    return manifest_key(task), endings_key(task), share_key(task), rollout_key(task)


def _rollout_view(
    rollout: Row | None, points: tuple[PointRow, ...], endings: Mapping[str, int]
) -> RolloutView | None:
    if not isinstance(rollout, RolloutRow):
        return None
    is_running = rollout.state == "running"
    values = values_of(rollout, {point.version: point for point in points}) if is_running else []
    return RolloutView(
        revision=rollout.revision,
        state=rollout.state,
        share=rollout.share,
        plan=rollout.plan,
        step=rollout.step,
        since=rollout.since,
        ended=rollout.ended,
        why=rollout.why,
        baseline=rollout.baseline,
        baseline_version=rollout.baseline_version,
        values=tuple(values),
        good=sum(version > enough_at(rollout) for version, _ in values),
        counts=since(rollout, counts_of(endings)) if is_running else ArmCounts(),
    )


def _version(found: TaskRows, version: int) -> VersionRow:
    try:
        return found.version(version)
    except OperatorError as error:
        raise NotFound(str(error), hint=error.hint) from error


def _event_view(row: EventRow, *, for_operator: bool) -> EventView:
    fields = msgspec.json.decode(row.fields)
    if not for_operator:
        for name in _FOR_OPERATORS.get(row.event, ()):
            fields.pop(name, None)
    return EventView(row.at, row.node, row.event, row.level, fields)


def _version_view(row: VersionRow) -> VersionView:
    return VersionView(row.version, row.created, row.marked, row.restarts, row.parameters)


def fresh_state(config: TaskConfig, task: TaskId, seq: int, head: int) -> tuple[BlobKey, bytes]:
    """The optimizer state of a version that begins anew. Takes seconds for a large model."""
    optimizer = server_optimizer(config.optimizer)
    state = optimizer.encode_state(optimizer.initial_state(config.model_length))
    return blob_key(task, seq, f"optimizer-{head}", state), state
