"""SIGTERM: uploads that are on their way get their answer; a restart goes on where it stopped."""

from __future__ import annotations

import asyncio
from pathlib import Path

from papaya.config import OptimizerConfig, SyncFL, TaskConfig
from papaya.device.training import TrainingRequest
from papaya.messages.base import SessionId
from tests.system.admin import Admin
from tests.system.fleet import Book, Fleet, Work, fleet
from tests.system.oracle import Books
from tests.system.processes import Installation, ServerProcess, Toml

_STEP_S = 240.0
_GOAL = 8
# SyncFL sums integers exactly, so that a run can be replayed to the last bit.
CONFIG = TaskConfig(
    task="adam",
    concurrency=_GOAL,
    model_length=64,
    regime=SyncFL(over_selection=0.0),
    optimizer=OptimizerConfig(kind="fedadam", rate=0.1),
    participation_gap_s=0.0,
    commit_interval_s=0.02,
    keep_versions=1000,
)


def test_a_clean_stop_answers_uploads_and_a_restart_goes_on_exactly_there(tmp_path: Path) -> None:
    with Installation(tmp_path, compiled=True) as installation:
        # An upload that waits half-way for the other one keeps its slot for three heartbeats.
        calm: dict[str, Toml] = {"heartbeat_s": 10.0}
        server = installation.add(deployment={"drain_s": _STEP_S}, server=calm).start()
        Admin(server.addresses["admin"], installation.secret("admin.token")).submit(CONFIG)
        asyncio.run(_stop_and_go_on(installation, server))


async def _stop_and_go_on(installation: Installation, server: ServerProcess) -> None:
    url, token = f"http://{server.addresses['devices']}", installation.secret("device.token")
    folder = installation.folder / "devices"
    async with fleet(folder, [url], token, 12, Turns().work) as flying:
        book = flying.book
        await _stop_in_mid_upload(book, server)
        before = Books(installation.data, CONFIG.task)
        before.check(book.acknowledged)
        before.check_replayed()
        assert before.newest == 2
        assert len(before.in_open_buffers) == 5

        book.next_era()
        await asyncio.to_thread(server.start)
        await _two_rounds(flying)
        assert server.stop() == 0
        after = Books(installation.data, CONFIG.task)
        after.check(book.acknowledged)
        after.check_replayed()
        assert after.newest >= 4
        assert {v: after.versions[v] for v in range(3)} == before.versions
        # The open buffer has gone on, with those who were training when the server stopped.
        third = {member.session for member in after.consumed[3].members}
        assert before.in_open_buffers < third
        assert third & set(book.across_failures)


async def _stop_in_mid_upload(book: Book, server: ServerProcess) -> None:
    """With two versions made, a third begun, two uploads half-way, and others still training."""

    def is_time() -> bool:
        at_work = sum(session not in book.ended for session in book.joined)
        begun = len(book.acknowledged) >= 2 * _GOAL + 3
        return begun and len(book.in_mid_upload) == 2 and at_work > 3

    await book.until(is_time, _STEP_S, "two rounds, a part of the third, two uploads half-way")
    half_way = list(book.in_mid_upload)
    stopping = asyncio.create_task(asyncio.to_thread(server.stop))
    book.let_go()
    assert await stopping == 0
    told = {session: book.ended.get(session) for session in half_way}
    assert all(how == "counted" for how in told.values()), f"what uploads were told: {told}"


async def _two_rounds(flying: Fleet) -> None:
    book = flying.book
    wanted = len(book.acknowledged) + 2 * _GOAL
    await book.until(lambda: len(book.acknowledged) >= wanted, _STEP_S, "two further rounds")
    await flying.go_home(_STEP_S)


class Turns:
    """So many trainings are brief, two more wait for those, all others for the restart."""

    def __init__(self) -> None:
        self._granted: set[SessionId] = set()

    def work(self, book: Book, index: int) -> Work:
        async def work(assignment: TrainingRequest) -> None:
            await book.until(
                lambda: self._is_granted(book, assignment.session), 4 * _STEP_S, "the restart"
            )

        return work

    def _is_granted(self, book: Book, session: SessionId) -> bool:
        # Whoever was aborted on a busy machine gives his turn back.
        used = sum(book.ended.get(granted, "counted") == "counted" for granted in self._granted)
        early = 2 * _GOAL + 3
        limit = early if len(book.acknowledged) < early else early + 2
        if book.is_over or book.era > 0 or used < limit:
            self._granted.add(session)
            if used >= early and book.era == 0:
                book.held_half_way.add(session)
        return session in self._granted
