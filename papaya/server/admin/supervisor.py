"""Supervises tasks: writes their history, starts planned evaluations, applies stop rules, judges
rollouts, removes deleted tasks.

One runs beside every coordinator, about once a second, and works on rows only. Every write is a
compare-and-set, and a refused write is tried again in the next turn, so several supervisors give
the same result as one. (Two that see different newest versions in the same second may start two
evaluations of a task, which costs a few clients.) `changed` tells the coordinator to read the rows
now.

An evaluation with invalid sums is cancelled with the reason. Rows under a fence are not changed,
except to remove old evaluations and deleted tasks. A deletion continues after a crash: its
row is marked as done only when nothing is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias, TypeGuard

from msgspec import structs

from papaya.aggregator.sessions import longest_ticket_life_s
from papaya.config import ServerConfig
from papaya.errors import MissingBlob, OperatorError, PapayaError, ProtocolError
from papaya.learning.evaluation import verdict
from papaya.messages import owner
from papaya.messages.base import TaskId
from papaya.messages.events import EvaluationStarted, ServerEvent, TaskDataRemoved, TaskEnded
from papaya.messages.rollout import enough_at
from papaya.messages.storage import (
    DELETED,
    ROLLOUTS,
    TASKS,
    DeletedRow,
    EndingsRow,
    RolloutRow,
    Row,
    TaskRow,
    TaskState,
    Transaction,
    VersionRow,
    deleted_key,
    endings_key,
    rollout_key,
    task_key,
    task_prefixes,
    version_key,
)
from papaya.server.admin import evaluations
from papaya.server.admin.blobs import AdminBlobs
from papaya.server.admin.history import TaskHistory
from papaya.server.logs import log
from papaya.server.state_thread import AsyncState

logger = logging.getLogger("papaya.admin")

TURN_S = 1.0
# For as long as the coordinator tells selectors that a task is over.
REMEMBER_S = 3600.0
_ALL_SEQS = 2**62
_DELETED_AT_ONCE = 1000

ReportedEndings: TypeAlias = Mapping[TaskId, tuple[int, Mapping[str, int]]]
"""By task: the sequence number of its holder, and its number of sessions by ending."""

Versions = dict[int, VersionRow]


class Supervisor:
    """Has no state of its own; `history` is a cache of the points."""

    def __init__(
        self,
        state: AsyncState,
        blobs: AdminBlobs,
        history: TaskHistory,
        server: ServerConfig,
        now: Callable[[], float],
        changed: Callable[[], None],
        *,
        endings: Callable[[], ReportedEndings] = dict,
        judge_rollout: Callable[[TaskRow, RolloutRow], Awaitable[None]] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._state = state
        self._blobs = blobs
        self._server = server
        self._now = now
        self._changed = changed
        self._endings = endings
        self._judge_rollout = judge_rollout
        self._sleep = sleep
        self._history = history

    async def run(self) -> None:
        """Run until cancelled. An error skips one turn, of one task if possible."""
        while True:
            with _one_error_at_a_time("this turn"):
                await self.turn()
            await self._sleep(TURN_S)

    async def turn(self) -> None:
        found = await self._state.read((TASKS, DELETED, ROLLOUTS))
        rows = {r.config.task: r for r in found.values() if isinstance(r, TaskRow)}
        deleted = {
            key.removeprefix(DELETED): row
            for key, row in found.items()
            if isinstance(row, DeletedRow) and not row.is_done
        }
        self._history.forget_all_but(rows)
        for row in rows.values():
            with _one_error_at_a_time(f"task {row.config.task}"):
                if row.config.task not in deleted:
                    rollout = found.get(rollout_key(row.config.task))
                    running = rollout if _is_running(rollout) else None
                    await self._look_after_any(row, rows, running)
                    if running is not None and self._judge_rollout is not None:
                        await self._judge_rollout(row, running)
        for task, tombstone in deleted.items():
            with _one_error_at_a_time(f"deleted task {task}"):
                await self._delete(task, tombstone, rows)
        with _one_error_at_a_time("the numbers of endings"):
            await self._count_endings({t: row for t, row in rows.items() if t not in deleted})

    async def _look_after_any(
        self, row: TaskRow, rows: dict[TaskId, TaskRow], rollout: RolloutRow | None
    ) -> None:
        if row.config.evaluates is not None:
            await self._look_after_evaluation(row, rows.get(row.config.evaluates.task))
        elif not row.is_over or self._now() < row.ended + REMEMBER_S:
            own = evaluations.of(row.config.task, rows.values())
            await self._look_after(row, own, rollout)

    async def _look_after(
        self, row: TaskRow, own: list[TaskRow], rollout: RolloutRow | None
    ) -> None:
        task = row.config.task
        found = await self._state.read((f"version/{task}/",))
        versions = {r.version: r for r in found.values() if isinstance(r, VersionRow)}
        await self._history.record(row, versions)
        points = await self._history.points(task)
        if any(e.state == "completed" and not evaluations.has_result(e, points) for e in own):
            self._history.forget(task)  # another supervisor wrote it
        if row.state in ("running", "completed"):
            await self._evaluate_if_due(row, own, versions, rollout)
        if not row.is_over:
            await self._complete_if_done(row, versions)

    # -- evaluations ------------------------------------------------------------------------

    async def _evaluate_if_due(
        self, row: TaskRow, own: list[TaskRow], versions: Versions, rollout: RolloutRow | None
    ) -> None:
        plan = row.config.evaluation
        if plan is None or not versions or any(not e.is_over for e in own):
            return
        points = await self._history.points(row.config.task)
        tried = [p.version for p in points.values() if p.evaluated]
        tried += [
            pinned.version
            for evaluation in own
            if (pinned := evaluation.config.evaluates) is not None and not pinned.norms
        ]
        # Versions are read after `own`, so they show what another supervisor started since.
        tried += [version for version, found in versions.items() if found.evaluations]
        due = evaluations.due_version(plan, versions, tried, is_last=row.is_over)
        if rollout is not None and (newest := max(versions)) > enough_at(rollout):
            # It waits for evaluations of new versions, and the plan may be far behind.
            due = None if newest in tried else newest
        if due is not None:
            config, outcome = await evaluations.start(
                self._state.transact,
                self._blobs,
                row,
                versions[due],
                plan,
                self._now(),
                self._server,
            )
            if outcome == "committed":
                log(EvaluationStarted(config.task, due))
                self._changed()

    async def _look_after_evaluation(self, row: TaskRow, of: TaskRow | None) -> None:
        tickets_expire = row.ended + longest_ticket_life_s(row, self._server)
        if not row.is_over:
            await self._settle(row, of)
        elif self._now() >= max(tickets_expire, row.ended + REMEMBER_S) and await self._forget(row):
            await self._blobs.sweep(row.config.task, _ALL_SEQS, frozenset())

    async def _settle(self, row: TaskRow, of: TaskRow | None) -> None:
        """End an evaluation that is done, and write its result to the task's history."""
        made = await self._version(row.config.task, 1)
        if made is not None and of is not None:
            await self._take_result(row, made, of)
        else:
            wanted = row.config.aggregation_goal
            await self._end_if_over(row, of, row.submitted, f"it did not get {wanted} clients")

    async def _take_result(self, row: TaskRow, made: VersionRow, of: TaskRow) -> None:
        pinned = row.config.evaluates
        assert pinned is not None
        old = (await self._history.points(pinned.task)).get(pinned.version)
        if old is None:
            return  # its point is written in the next turn
        try:
            new, why = await evaluations.with_result(old, self._blobs, row, made, of.config)
        except (ProtocolError, MissingBlob) as error:
            await self._end(row, str(error))
            return
        except OperatorError as error:
            # Try again in the next turn, for as long as its clients were given to take part.
            if not await self._end_if_over(row, of, made.created, str(error)):
                raise
            return
        change = owner.end_evaluation(row, "completed", self._now(), why, (old, new))
        self._history.forget(pinned.task)
        await self._write(change, _ended(row, "completed", why))

    async def _end_if_over(
        self, row: TaskRow, of: TaskRow | None, since: float, problem: str
    ) -> bool:
        """Is its task cancelled, or its time over since then? Then end it without a result."""
        now = self._now()
        if of is None or of.state == "cancelled":
            await self._end(row, "its task was cancelled")
        elif verdict(row.config.stop, since, now, ()) is not None:
            await self._end(row, f"gave up after {now - since:.0f} s: {problem}")
        else:
            return False
        return True

    async def _end(self, row: TaskRow, why: str) -> None:
        change = owner.end_evaluation(row, "cancelled", self._now(), why)
        await self._write(change, _ended(row, "cancelled", why))

    async def _forget(self, row: TaskRow) -> bool:
        """Delete the rows; blobs are deleted after them. Many points need several transactions."""
        task: TaskId = row.config.task
        points = list(await self._state.read((f"point/{task}/",)))
        for start in range(0, len(points), _DELETED_AT_ONCE):
            batch = tuple(points[start : start + _DELETED_AT_ONCE])
            change = Transaction(require=((task_key(task), row),), delete=batch)
            if await self._state.transact(change) != "committed":
                return False
        rows = await self._state.read(task_prefixes(task))
        return await self._state.transact(owner.forget(row, rows)) == "committed"

    async def _delete(
        self, task: TaskId, tombstone: DeletedRow, rows: dict[TaskId, TaskRow]
    ) -> None:
        """Continue the deletion of a task, also if another process began it and crashed.

        Waits while a client may have a valid ticket, or an evaluation may write into its history.
        """
        row = rows.get(task)
        if row is not None:
            tickets_expire = row.ended + longest_ticket_life_s(row, self._server)
            is_evaluated = any(not e.is_over for e in evaluations.of(task, rows.values()))
            if is_evaluated or self._now() < tickets_expire or not await self._forget(row):
                return
        await self._blobs.sweep(task, _ALL_SEQS, frozenset())
        done = structs.replace(tombstone, is_done=True)
        key = deleted_key(task)
        change = Transaction(require=((key, tombstone),), put=((key, done),))
        await self._write(change, TaskDataRemoved(task))

    # -- endings ----------------------------------------------------------------------------

    async def _count_endings(self, tasks: dict[TaskId, TaskRow]) -> None:
        """Write what holders have reported, so that a failover loses at most a heartbeat of it."""
        reported = {task: e for task, e in self._endings().items() if task in tasks}
        if not reported:
            return
        # The rows of tasks may have changed since the pass began: an evaluation was started.
        keys = (*map(endings_key, reported), *map(task_key, reported))
        found = await self._state.read(keys)
        change = Transaction()
        for task, (seq, endings) in reported.items():
            key, row = endings_key(task), found.get(task_key(task))
            old = found.get(key)
            new = (old if isinstance(old, EndingsRow) else EndingsRow()).heard(seq, endings)
            if row is not None and new != old and new.total:
                required = ((task_key(task), row), (key, old))
                change = Transaction((*change.require, *required), (*change.put, (key, new)))
        if change.put:
            await self._state.transact(change)

    async def _version(self, task: TaskId, version: int) -> VersionRow | None:
        key = version_key(task, version)
        found = (await self._state.read((key,))).get(key)
        return found if isinstance(found, VersionRow) else None

    # -- the end of a task ------------------------------------------------------------------

    async def _complete_if_done(self, row: TaskRow, versions: Versions) -> None:
        rule, newest = row.config.stop, max(versions, default=0)
        restarted = max((v for v, r in versions.items() if r.restarts), default=0)
        points = await self._history.points(row.config.task)
        evaluated = [p for v, p in sorted(points.items()) if v >= restarted and p.loss is not None]
        losses = [p.loss for p in evaluated if p.loss is not None]
        metrics = evaluations.metrics_of(evaluated[-1]) if evaluated else {}
        # The row of a version is deleted after a while; its point stays.
        first = next((p.created for v, p in sorted(points.items()) if v > 0), None)
        why = verdict(rule, row.submitted, self._now(), losses, metrics, first)
        if rule.versions is not None and newest >= rule.versions:
            why = f"version {rule.versions} is reached"
        if why is not None:
            change = owner.change_state(row, "completed", self._now(), why)
            await self._write(change, _ended(row, "completed", why))

    async def _write(self, change: Transaction, event: ServerEvent) -> None:
        if await self._state.transact(change) == "committed":
            log(event)
            self._changed()


def _is_running(rollout: Row | None) -> TypeGuard[RolloutRow]:
    return isinstance(rollout, RolloutRow) and rollout.state == "running"


def _ended(row: TaskRow, state: TaskState, why: str) -> TaskEnded:
    return TaskEnded(row.config.task, row.run, state, why)


@contextmanager
def _one_error_at_a_time(what: str) -> Iterator[None]:
    """Log an error and go on with the next task."""
    try:
        yield
    except PapayaError as error:
        logger.error("%s; hint: %s", error, error.hint)
    except Exception:
        logger.exception("the supervisor failed in %s", what)
