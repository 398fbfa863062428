"""The real service on a real store in a folder, with a coordinator's view that tests make up."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np

from papaya.config import AsyncFL, ServerConfig, TaskConfig
from papaya.learning import parameters
from papaya.learning.parameters import FLOAT32
from papaya.messages.audit_trail import Attempt
from papaya.messages.base import TaskId
from papaya.messages.storage import Outcome, Row, TaskRow, Transaction
from papaya.server.admin import rollouts, submissions
from papaya.server.admin.access import Caller
from papaya.server.admin.accounts import ADMIN
from papaya.server.admin.blobs import ThreadedBlobs
from papaya.server.admin.history import TaskHistory
from papaya.server.admin.live import LiveTask
from papaya.server.admin.service import AdminService
from papaya.server.admin.supervisor import Supervisor
from papaya.server.admin.views import (
    AggregatorStatus,
    ClockStatus,
    NewTask,
    SelectorStatus,
    TaskView,
)
from papaya.store.blobs import FolderBlobs
from papaya.store.state import SqliteState

MANIFEST = (("embed.weight", (2, 2)), ("out.bias", (2,)))
TASK = TaskConfig(
    task="next-word",
    concurrency=20,
    model_length=6,
    regime=AsyncFL(aggregation_goal=4),
    keep_versions=2,
)


BY = Attempt("tester", "change")


def because(why: str) -> Attempt:
    return Attempt("tester", "change", why=why)


class FakeLive:
    """What a leading coordinator would say."""

    def __init__(self) -> None:
        self.roles: tuple[str, ...] = ("coordinator", "selector", "aggregator")
        self.is_leader = True
        self.has_leader = True
        self.found: dict[TaskId, LiveTask] = {}
        self.wrong_clocks: tuple[ClockStatus, ...] = ()
        self.no_aggregators = False  # none has reported
        self.no_selectors = False

    def leads(self) -> bool:
        return self.is_leader

    def is_led(self) -> bool:
        return self.has_leader

    def recovers(self) -> bool:
        return False

    def task(self, row: TaskRow) -> LiveTask | None:
        return self.found.get(row.config.task)

    def aggregators(self) -> tuple[AggregatorStatus, ...]:
        found = AggregatorStatus("aggregator", 0.4, len(self.found), False)
        return () if self.no_aggregators else (found,)

    def clocks(self) -> tuple[ClockStatus, ...]:
        return self.wrong_clocks

    def selectors(self) -> tuple[SelectorStatus, ...]:
        return () if self.no_selectors else (SelectorStatus("selector", 0.2, 7),)


class StoredState:
    """SQLite, awaited. `outcome`: what to answer instead of asking it."""

    def __init__(self, store: SqliteState) -> None:
        self.store = store
        self.outcome: Outcome | None = None

    async def read(self, prefixes: tuple[str, ...]) -> dict[str, Row]:
        return self.store.read(prefixes)

    async def transact(self, transaction: Transaction) -> Outcome:
        return self.outcome or self.store.transact(transaction)


class System:
    """The admin service and the supervisor on real stores."""

    def __init__(self, folder: Path) -> None:
        self.store = SqliteState(folder / "state.db", busy_timeout_s=300.0)
        self.state = StoredState(self.store)
        self.blobs = FolderBlobs(folder / "blobs")
        self.live = FakeLive()
        self.time = 1000.0
        self.changes = 0
        self.history = TaskHistory(self.state)
        stores = (self.state, ThreadedBlobs(self.blobs), self.history)
        server = ServerConfig()
        self.service = AdminService(*stores, self.live, self.now, self._changed, server)
        self.endings: dict[TaskId, tuple[int, dict[str, int]]] = {}
        self.supervisor = Supervisor(
            *stores,
            server,
            self.now,
            self._changed,
            endings=lambda: self.endings,
            judge_rollout=partial(rollouts.judge, self.service),
        )

    def now(self) -> float:
        return self.time

    def _changed(self) -> None:
        self.changes += 1

    def change(self, transaction: Transaction) -> None:
        """Something that others write; what is copied here is read again."""
        assert self.store.transact(transaction) == "committed"
        self.history.forget_all_but({})

    async def turn(self) -> None:
        await self.supervisor.turn()

    async def submit(self, config: TaskConfig = TASK, caller: Caller = ADMIN) -> TaskView:
        data = encoded(config)
        stored = await submissions.store_parameters(
            self.service, config.task, config.model_length, data
        )
        manifest = MANIFEST if config.model_length == 6 else ()
        new = NewTask(config, stored.parameters, manifest)
        return await submissions.submit(self.service, caller, new, BY)


def encoded(config: TaskConfig = TASK) -> bytes:
    vector = np.arange(config.model_length, dtype=FLOAT32)
    return parameters.encode(vector, {"task": config.task, "version": "0"})


@asynccontextmanager
async def a_system(folder: Path) -> AsyncIterator[System]:
    system = System(folder)
    try:
        yield system
    finally:
        system.store.close()
