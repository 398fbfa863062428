"""A task's owner at the admin API of a running server, with devices in the middle of their work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np

from papaya.config import AsyncFL, OptimizerConfig, StopRule, TaskConfig
from papaya.device.training import TrainingRequest
from papaya.learning.evaluation import evaluation_vector
from papaya.messages.base import SessionId
from tests.chaos.faults import Stalls
from tests.system.admin import Admin
from tests.system.fleet import Book, Fleet, Work, briefly, fleet
from tests.system.oracle import Books
from tests.system.processes import CALM, CALM_HEARTBEAT_S, Installation

_STEP_S = 240.0
_GOAL = 4
_DEVICES = 12
_LOSS, _EXAMPLES = 2.5, 8


def config(task: str, stop: StopRule | None = None) -> TaskConfig:
    return TaskConfig(
        task=task,
        concurrency=8,
        model_length=48,
        regime=AsyncFL(aggregation_goal=_GOAL),
        optimizer=OptimizerConfig(kind="fedavg", rate=1.0),
        participation_gap_s=0.0,
        commit_interval_s=0.02,
        keep_versions=1000,
        stop=stop or StopRule(),
    )


def test_pause_roll_back_and_cancel_while_clients_train(tmp_path: Path) -> None:
    with Installation(tmp_path) as installation:
        server = installation.add(server=CALM).start()
        admin = Admin(server.addresses["admin"], installation.secret("admin.token"))
        admin.submit(config("owned"))
        with Stalls(CALM_HEARTBEAT_S, lambda: [server.process.pid]) as stalls:
            book, head = asyncio.run(_change_its_course(installation, admin))
        assert "silent" not in book.endings() or stalls.is_long
        assert admin.task("owned")["state"] == "cancelled"
        assert server.stop() == 0
        books = Books(installation.data, "owned")
        books.check(book.acknowledged)
        assert [v for v, row in books.versions.items() if row.restarts] == [head]
        assert np.array_equal(books.parameters(head), books.parameters(1))
        assert books.newest > head
        for version in range(head + 1, books.newest + 1):
            bases = [member.version for member in books.consumed[version].members]
            assert min(bases) >= head, "an update of the branch that was given up"


async def _change_its_course(installation: Installation, admin: Admin) -> tuple[Book, int]:
    gate = Gate()
    async with _devices(installation, gate.work) as flying:
        book = flying.book
        await _more(book, 2 * _GOAL)
        await _pause_and_resume(admin, book)
        head = await _roll_back(admin, book, gate)
        await _more(book, 2 * _GOAL)
        await _cancel(admin, book, gate)
        await flying.go_home(_STEP_S)
    return book, head


async def _pause_and_resume(admin: Admin, book: Book) -> None:
    """Clients finish what they began, and no other comes until the task goes on."""
    await asyncio.to_thread(admin.post, "/admin/tasks/owned/pause", {"why": "a look at it"})
    await asyncio.to_thread(
        admin.until_task, "owned", lambda line: line["active"] == line["held"] == 0, _STEP_S
    )
    assert admin.task("owned")["state"] == "paused"
    await _sent_away(book)  # whoever was assigned before the pause may still have joined
    await _everybody_is_told(book)
    joined = len(book.joined)
    await _sent_away(book)
    assert len(book.joined) == joined
    status, answer = await asyncio.to_thread(admin.ask, "POST", "/admin/tasks/owned/pause")
    assert status == 409, answer
    await asyncio.to_thread(admin.post, "/admin/tasks/owned/resume")
    await _more(book, _GOAL)


async def _sent_away(book: Book) -> None:
    enough = book.rejected + 2 * _DEVICES
    await book.until(lambda: book.rejected >= enough, _STEP_S, "devices are sent away")


async def _everybody_is_told(book: Book) -> None:
    what = "everybody who joined is told how it ended"
    await book.until(lambda: set(book.joined) <= set(book.ended), _STEP_S, what)


def _check_told(book: Book, sessions: set[SessionId], reason: str) -> None:
    """All were told this, but for those that were silent for too long on a busy machine."""
    told = {book.ended[session] for session in sessions}
    assert reason in told
    assert told <= {reason, "silent"}


async def _roll_back(admin: Admin, book: Book, gate: Gate) -> int:
    """To version 1, with clients in training: what they train is of a branch that is given up."""
    training = await gate.close(book)
    view = await asyncio.to_thread(admin.post, "/admin/tasks/owned/rollback", {"version": 1})
    assert view["restarts"]
    gate.open()
    await book.until(lambda: training <= set(book.ended), _STEP_S, "all of them are told")
    _check_told(book, training, "stale")
    return int(view["version"])


async def _cancel(admin: Admin, book: Book, gate: Gate) -> None:
    training = await gate.close(book)
    await asyncio.to_thread(admin.post, "/admin/tasks/owned/cancel", {"why": "enough"})
    # They learn it from their heartbeats, in the middle of their training.
    await book.until(lambda: training <= set(book.ended), _STEP_S, "all of them are told")
    _check_told(book, training, "task_over")
    gate.open()
    await _everybody_is_told(book)
    joined = len(book.joined)
    status, answer = await asyncio.to_thread(admin.ask, "POST", "/admin/tasks/owned/resume")
    assert status == 409, answer
    await _sent_away(book)
    assert len(book.joined) == joined


def test_exactly_so_many_versions_and_an_evaluation_of_one(tmp_path: Path) -> None:
    with Installation(tmp_path) as installation:
        server = installation.add(server=CALM).start()
        admin = Admin(server.addresses["admin"], installation.secret("admin.token"))
        admin.submit(config("finite", StopRule(versions=3)))
        with Stalls(CALM_HEARTBEAT_S, lambda: [server.process.pid]) as stalls:
            book = asyncio.run(_run_to_its_end(installation, admin))
        assert "silent" not in book.endings() or stalls.is_long
        # The result is in the history one turn of the supervisor later.
        points = admin.until("/admin/tasks/finite", _is_evaluated, _STEP_S)["points"]
        [evaluated] = [point for point in points if point["evaluated"]]
        assert evaluated["version"] == 2
        assert evaluated["loss"] == _LOSS / _EXAMPLES
        assert server.stop() == 0
        books = Books(installation.data, "finite")
        books.check(book.of("finite"))
        assert books.newest == 3
        assert books.row.state == "completed"
        told = set(book.ended.values()) - {"silent"}  # on a busy machine
        assert told <= {"counted", "task_over"}, f"clients were told {book.endings()}"


def _is_evaluated(found: Any) -> bool:
    return any(point["evaluated"] for point in found["points"])


async def _run_to_its_end(installation: Installation, admin: Admin) -> Book:
    async with _devices(installation, briefly) as flying:
        await asyncio.to_thread(
            admin.until_task, "finite", lambda line: line["state"] == "completed", _STEP_S
        )
        request = {"version": 2, "clients": 3, "timeout_s": 2 * _STEP_S}
        started = await asyncio.to_thread(admin.post, "/admin/tasks/finite/evaluate", request)
        assert started == {"task": "finite-eval-2", "version": 2}
        await asyncio.to_thread(
            admin.until_task, "finite-eval-2", lambda line: line["state"] == "completed", _STEP_S
        )
        await flying.go_home(_STEP_S)
    return flying.book


def _devices(
    installation: Installation, work: Callable[[Book, int], Work]
) -> AbstractAsyncContextManager[Fleet]:
    return fleet(
        installation.folder / "devices",
        [f"http://{installation.servers[0].addresses['devices']}"],
        installation.secret("device.token"),
        _DEVICES,
        work,
        evaluation=lambda _: evaluation_vector(10, _LOSS, _EXAMPLES).tobytes(),
    )


async def _more(book: Book, count: int) -> None:
    wanted = len(book.acknowledged) + count
    await book.until(lambda: len(book.acknowledged) >= wanted, _STEP_S, f"{count} more are counted")


class Gate:
    """While it is closed, whoever trains goes on training."""

    def __init__(self) -> None:
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._training: set[SessionId] = set()

    def work(self, book: Book, index: int) -> Work:
        async def work(assignment: TrainingRequest) -> None:
            self._training.add(assignment.session)
            try:
                await asyncio.sleep(0.01 * (index % 7))
                await self._is_open.wait()  # the last step: behind it nobody counts as training
            finally:
                self._training.discard(assignment.session)

        return work

    async def close(self, book: Book) -> set[SessionId]:
        """Those who are in training, once there are some and nobody does anything else."""
        self._is_open.clear()
        await book.until(
            lambda: (
                len(self._training) >= _GOAL
                and set(book.joined) - set(book.ended) == self._training
            ),
            _STEP_S,
            "some train and nobody uploads",
        )
        return set(self._training)

    def open(self) -> None:
        self._is_open.set()
