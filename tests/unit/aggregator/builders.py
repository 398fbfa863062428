"""A world in memory for the tests of an aggregator: a store, blobs, nodes and phones.

Everything happens at once, in the order given, unless a node is told to hold a kind of effect back:
then the test decides when, and with which outcome, it is carried out. After every event the
machine's own `check()` runs, and no request may be answered twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Literal, TypeVar
from zlib import crc32

import numpy as np

from papaya.aggregator import work
from papaya.aggregator.aggregator import Aggregator
from papaya.aggregator.held_task import HeldTask
from papaya.aggregator.shards import NewBlobs, Shards, TakeShard, initial_blobs
from papaya.config import AsyncFL, OptimizerConfig, ServerConfig, SyncFL, TaskConfig
from papaya.errors import MissingBlob
from papaya.learning import parameters
from papaya.learning.parameters import FLOAT32
from papaya.machine import Effect, Effects, Log, Read, Reply, Send, Transact
from papaya.messages.base import BlobKey, Message, SessionId, TaskId
from papaya.messages.control import AggregatorOrders, AggregatorReport, Placement, TaskReport
from papaya.messages.events import ServerEvent
from papaya.messages.participation import (
    Chunk,
    Complete,
    Heartbeat,
    Join,
    Joined,
    Leave,
    Report,
    UploadGranted,
)
from papaya.messages.storage import (
    ConsumedRow,
    FenceRow,
    Outcome,
    RecordRow,
    Rows,
    Transacted,
    Transaction,
    VersionRow,
    fence_key,
    submission,
)
from papaya.messages.tickets import AssignmentTicket, Keyring
from tests.unit.aggregator.store import Store

TASK = "words"
KEYRING = Keyring({1: b"k" * 32})
# Two chunks for a model of four parameters.
SERVER = ServerConfig(heartbeat_s=10.0, chunk_bytes=8)
MODEL_LENGTH = 4
# The memory that one upload of it may need: its chunks, and two of them in transit.
ONE_UPLOAD = 32

E = TypeVar("E", bound=Effect)


def a_task(**changes: Any) -> TaskConfig:
    settings: dict[str, Any] = {
        "task": TASK,
        "concurrency": 4,
        "model_length": MODEL_LENGTH,
        "regime": AsyncFL(aggregation_goal=2),
        "optimizer": OptimizerConfig(kind="fedavg"),
    }
    return TaskConfig(**{**settings, **changes})


def an_async_task(goal: int, concurrency: int = 4, **changes: Any) -> TaskConfig:
    limit = changes.pop("max_staleness", None)
    return a_task(concurrency=concurrency, regime=AsyncFL(goal, limit), **changes)


def a_sync_task(concurrency: int, over_selection: float, **changes: Any) -> TaskConfig:
    return a_task(concurrency=concurrency, regime=SyncFL(over_selection), **changes)


class World:
    """Time, one store, its blobs, and the aggregators that share them."""

    def __init__(
        self,
        *tasks: TaskConfig,
        server: ServerConfig = SERVER,
        upload_bytes: int = 1 << 20,
    ) -> None:
        self.upload_bytes = upload_bytes
        self.now = 0.0
        self.server = server
        self.store = Store()
        self.blobs: dict[BlobKey, bytes] = {}
        self.nodes: list[Node] = []
        self.boots = 0
        self.answers: dict[int, Message] = {}
        self._handles = 0
        self._sessions = 0
        for config in tasks:
            self.submit(config)

    def submit(self, config: TaskConfig) -> None:
        blobs = initial_blobs(config, np.zeros(config.model_length, FLOAT32))
        self.blobs.update(blobs)
        self.store.apply(submission(config, blobs[0][0], blobs[1][0], self.now))

    def start(self, name: str = "agg-1") -> Node:
        node = Node(self, name)
        self.nodes.append(node)
        return node

    def crash(self, node: Node) -> None:
        self.nodes.remove(node)

    def place(
        self,
        node: Node,
        task: TaskId = TASK,
        leases: tuple[SessionId, ...] = (),
        active: int | None = None,
    ) -> HeldTask:
        """What a Coordinator does: the fence row first, then orders to the new holder."""
        self.fence(node, task, leases, active)
        return node.machine.tasks[task]

    def fence(
        self,
        node: Node,
        task: TaskId = TASK,
        leases: tuple[SessionId, ...] = (),
        active: int | None = None,
    ) -> None:
        """The same, for a node that may refuse the task."""
        key = fence_key(task)
        old = self.store.rows[key]
        assert isinstance(old, FenceRow)
        self.store.rows[key] = FenceRow(old.seq + 1, node.name, node.machine.boot)
        placements = [
            Placement(held.task, held.fence.seq)
            for held in node.machine.tasks.values()
            if held.task != task
        ]
        node.order([*placements, Placement(task, old.seq + 1, leases, active)])

    def pass_s(self, seconds: float) -> None:
        """Let time pass: every node wakes when it asked to, in order."""
        until = self.now + seconds
        while True:
            due = min([node.machine.next_wake() for node in self.nodes], default=until)
            if due > until:
                break
            node = min(self.nodes, key=lambda node: node.machine.next_wake())
            self.now = max(self.now, due)
            node.wake()
            assert node.machine.next_wake() > self.now, "the machine asks to be woken for ever"
        self.now = until

    def ask(self, node: Node, request: Message) -> int:
        """Send a device's request; the handle of its answer comes back."""
        self._handles += 1
        node.receive(request, self._handles)
        return self._handles

    def phone(self, node: Node, session: SessionId | None = None, task: TaskId = TASK) -> Phone:
        """A phone that a Selector has accepted for the task."""
        self._sessions += 1
        return Phone(self, node, session or f"s{self._sessions}", task)

    def joined(self, node: Node, count: int, task: TaskId = TASK) -> list[Phone]:
        phones = [self.phone(node, task=task) for _ in range(count)]
        for phone in phones:
            assert isinstance(phone.join(), Joined)
        return phones

    def read_blob(self, key: BlobKey) -> bytes:
        if key not in self.blobs:
            raise MissingBlob(key)
        return self.blobs[key]

    # -- what is durable --------------------------------------------------------------------

    @property
    def version(self) -> int:
        return max(row.version for row in self.store.all(VersionRow))

    def parameters(self, version: int) -> list[float]:
        [row] = [row for row in self.store.all(VersionRow) if row.version == version]
        decoded: list[float] = parameters.decode(self.blobs[row.parameters], MODEL_LENGTH).tolist()
        return decoded

    def recorded(self) -> list[SessionId]:
        """Members of buffers to come."""
        return [m.session for row in self.store.all(RecordRow) for m in row.members]

    def consumed(self) -> list[SessionId]:
        """Members of versions that were made."""
        return [m.session for row in self.store.all(ConsumedRow) for m in row.members]


class Node:
    """The driver of one boot of one aggregator. `hold` keeps effects of a kind until `release`."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        around = (KEYRING, ("coordinator-1",), world.upload_bytes)
        world.boots += 1
        self.machine = Aggregator(name, world.boots, world.now, world.server, *around)
        self.shards = Shards()
        self.log: list[Effect] = []
        self.events: list[ServerEvent] = []
        self.held_back: deque[Effect] = deque()
        self._hold: tuple[type[Effect], ...] = ()
        self._queue: deque[Effect] = deque()
        self._is_running = False
        self._orders = 0

    @property
    def memory_used(self) -> float:
        """The share of the memory for uploads."""
        return self.machine._memory.used(self.world.now)

    # -- running the machine ----------------------------------------------------------------

    def receive(self, message: Message, handle: int | None = None) -> None:
        self._perform(self.machine.receive(self.world.now, message, handle))

    def wake(self) -> None:
        self._perform(self.machine.wake(self.world.now))

    def order(self, placements: Sequence[Placement], epoch: int = 1, acked: int = 0) -> None:
        self._orders += 1
        boot, given = self.machine.boot, tuple(placements)
        orders = AggregatorOrders(epoch, "coordinator-1", boot, self._orders, acked, given)
        self.receive(orders)

    def _perform(self, effects: Effects) -> None:
        self.machine.check()
        self._queue.extend(effects)
        if self._is_running:
            return
        self._is_running = True
        try:
            while self._queue:
                self._take(self._queue.popleft())
        finally:
            self._is_running = False

    def _take(self, effect: Effect) -> None:
        self.log.append(effect)
        if isinstance(effect, Reply):
            assert effect.to not in self.world.answers, "a request was answered twice"
            self.world.answers[effect.to] = effect.message
        elif isinstance(effect, self._hold):
            self.held_back.append(effect)
        else:
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        world, shards = self.world, self.shards
        match effect:
            case Transact(token, transaction):
                self.receive(Transacted(token, world.store.apply(transaction)))
            case Read(token, prefixes):
                self.receive(Rows(token, world.store.snapshot(prefixes)))
            case work.Keep():
                shards.keep(effect)
            case work.Fold():
                self.receive(shards.fold(effect))
            case work.Snapshot():
                self._written(*shards.snapshot(effect))
            case work.Step() | work.Restore():
                self._read_blobs(effect)
            case work.Drop():
                shards.drop(effect)
            case work.DeleteBlobs():
                for blob in effect.blobs:
                    del world.blobs[blob]
            case Log(event):
                self.events.append(event)
            case _:
                assert isinstance(effect, Send)

    def _read_blobs(self, asked: work.Step | work.Restore) -> None:
        try:
            if isinstance(asked, work.Step):
                self._written(*self.shards.step(asked, self.world.read_blob))
            else:
                self.shards.restore(asked, self.world.read_blob)
                self.receive(work.Restored(asked.config.task, asked.seq))
        except MissingBlob as error:
            self.receive(work.Lost(asked.config.task, asked.seq, str(error)))

    def _written(self, result: Message, blobs: NewBlobs) -> None:
        self.world.blobs.update(blobs)
        self.receive(result)

    # -- holding back -----------------------------------------------------------------------

    def hold(self, *kinds: type[Effect]) -> None:
        self._hold = kinds

    def release(self) -> None:
        """Carry out everything held back, and hold nothing any more."""
        self._hold = ()
        while self.held_back:
            self._carry_out(self.held_back.popleft())

    def release_one(self) -> None:
        self._carry_out(self.held_back.popleft())

    def settle(self, fate: Literal["committed", "applied", "lost"]) -> Transaction:
        """Finish the transaction held back: seen, applied unseen, or not applied at all."""
        effect = self.held_back.popleft()
        assert isinstance(effect, Transact)
        transaction = effect.transaction
        outcome: Outcome = "unknown"
        if fate != "lost":
            applied = self.world.store.apply(transaction)
            outcome = applied if fate == "committed" else "unknown"
        self.receive(Transacted(effect.token, outcome))
        return transaction

    # -- what it did ------------------------------------------------------------------------

    def did(self, kind: type[E]) -> list[E]:
        return [effect for effect in self.log if isinstance(effect, kind)]

    @property
    def reports(self) -> list[AggregatorReport]:
        return [e.message for e in self.did(Send) if isinstance(e.message, AggregatorReport)]

    def last_report(self, task: TaskId = TASK) -> TaskReport:
        [report] = [report for report in self.reports[-1].tasks if report.task == task]
        return report

    def held(self, task: TaskId = TASK) -> HeldTask:
        return self.machine.tasks[task]


class Phone:
    """One client of one session. It keeps the newest ticket and can knock at any node."""

    def __init__(self, world: World, node: Node, session: SessionId, task: TaskId) -> None:
        self.world = world
        self.node = node
        self.session = session
        held = node.machine.tasks[task]
        version = held.ledger.version if held.has_served else 0
        self.manifest = held.config.manifest if held.has_served else b""
        confirm_by = world.now + world.server.confirm_by_s
        seq, manifest, epoch = held.fence.seq, self.manifest, node.machine.epoch
        ticket = AssignmentTicket(
            task, session, seq, confirm_by, version, manifest=manifest, epoch=epoch
        )
        self.assignment = KEYRING.seal(ticket)
        self.ticket = b""
        self.version = -1
        self.granted: UploadGranted | None = None

    def ask(self, request: Message) -> Message | None:
        """The answer, or None while it is still to come."""
        return self.world.answers.get(self.world.ask(self.node, request))

    def join(self) -> Message | None:
        answer = self.ask(Join(self.assignment))
        if isinstance(answer, Joined):
            self.ticket, self.version = answer.ticket, answer.version
        return answer

    def heartbeat(self) -> Message | None:
        return self.ask(Heartbeat(self.ticket))

    def leave(self) -> Message | None:
        return self.ask(Leave(self.ticket, "the user came back"))

    def report(self, examples: int = 1) -> Message | None:
        answer = self.ask(Report(self.ticket, examples))
        if isinstance(answer, UploadGranted):
            self.ticket, self.granted = answer.ticket, answer
        return answer

    def chunk(self, index: int, data: bytes, upload: str = "u1", **changes: Any) -> Message | None:
        fields: dict[str, Any] = {"crc32": crc32(data), "data": data, **changes}
        return self.ask(Chunk(self.ticket, upload, index, **fields))

    def send(self, *values: float, upload: str = "u1") -> list[Message | None]:
        """All chunks of an update, in order."""
        pieces = chunks_of(values, self.world.server.chunk_bytes)
        return [self.chunk(index, piece, upload) for index, piece in enumerate(pieces)]

    def complete(self, upload: str = "u1") -> int:
        return self.world.ask(self.node, Complete(self.ticket, upload))

    def upload(self, *values: float, examples: int = 1) -> int:
        """Report, send and complete; the handle of the last answer comes back."""
        granted = self.report(examples)
        assert isinstance(granted, UploadGranted), granted
        self.send(*values)
        return self.complete()

    def upload_for_good(self, *values: float, examples: int = 1) -> Message | None:
        """The same, and wait for the group commit."""
        handle = self.upload(*values, examples=examples)
        self.world.pass_s(1.0)
        return self.world.answers.get(handle)


def chunks_of(values: Sequence[float], chunk_bytes: int) -> list[bytes]:
    """The chunks of an update; shorter ones are filled up with zeros."""
    vector = np.zeros(MODEL_LENGTH, FLOAT32)
    vector[: len(values)] = values
    data = vector.tobytes()
    return [data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes)]


def in_turn(shards: Iterable[int]) -> TakeShard:
    """Takes each of these shards as often as the others. No two threads have the same one."""
    free: SimpleQueue[int] = SimpleQueue()
    for number in shards:
        free.put(number)

    @contextmanager
    def take_shard() -> Iterator[int]:
        number = free.get()
        try:
            yield number
        finally:
            free.put(number)

    return take_shard


def a_world(
    config: TaskConfig | None = None,
    server: ServerConfig = SERVER,
    upload_bytes: int = 1 << 20,
) -> tuple[World, Node]:
    """One task at one aggregator, past its adoption window."""
    world = World(config or a_task(), server=server, upload_bytes=upload_bytes)
    node = world.start()
    world.place(node)
    world.pass_s(server.heartbeat_s)
    return world, node


def make_version(world: World, node: Node, task: TaskId = TASK) -> None:
    """New clients that join, upload at once and are counted, until there is a new version."""
    held = node.held(task)
    for _ in range(held.ledger.config.aggregation_goal):
        phone = world.phone(node, task=task)
        assert isinstance(phone.join(), Joined)
        phone.upload_for_good(1)
