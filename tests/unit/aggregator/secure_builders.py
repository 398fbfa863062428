"""A world in memory whose task is aggregated securely: a TSA, and phones that mask.

The TSA is the simulator's twin, so it may crash. Phones seal as a device does, keep what
they sealed, and send those bytes; a test that wants a liar changes them before they are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np

from papaya.aggregator import work
from papaya.aggregator.shards import Shards
from papaya.client.work import Seal, Sealed
from papaya.config import AsyncFL, SecureAggregation, ServerConfig, TaskConfig
from papaya.learning.parameters import FLOAT32
from papaya.machine import Effect
from papaya.messages.base import Message, SessionId, TaskId
from papaya.messages.participation import Complete, Joined, UploadGranted
from papaya.messages.storage import ConsumedRow, Member, RecordRow
from papaya.sim.tsa_twin import TsaTwin, sealed
from tests.unit.aggregator.builders import (
    MODEL_LENGTH,
    SERVER,
    TASK,
    Node,
    Phone,
    World,
    a_task,
)

CLIP = 64.0
MAX_EXAMPLES = 100
STEP = CLIP / (2**31 // 8)
"""More than one step of the fixed point for every goal that is used here."""


def a_secure_task(goal: int = 2, threshold: int | None = None, **changes: Any) -> TaskConfig:
    settings: dict[str, Any] = {"clip": CLIP, "max_examples": MAX_EXAMPLES}
    settings["secure_aggregation"] = SecureAggregation(threshold)
    settings["regime"] = AsyncFL(goal, changes.pop("max_staleness", None))
    return a_task(**(settings | changes))


class SecureWorld(World):
    """One secure task, one TSA that all nodes share."""

    def __init__(self, config: TaskConfig | None = None, server: ServerConfig = SERVER) -> None:
        self.config = config or a_secure_task()
        super().__init__(self.config, server=server)
        self.tsa = TsaTwin(self, Random(1))
        self.rng = Random(2)

    def start(self, name: str = "agg-1") -> SecureNode:
        node = SecureNode(self, name)
        self.nodes.append(node)
        return node

    def phone(
        self, node: Node, session: SessionId | None = None, task: TaskId = TASK
    ) -> SecurePhone:
        self._sessions += 1
        return SecurePhone(self, node, session or f"s{self._sessions}", task)

    def secure_phones(self, node: Node, count: int) -> list[SecurePhone]:
        phones = [self.phone(node) for _ in range(count)]
        for phone in phones:
            assert isinstance(phone.join(), Joined)
        return phones

    def members(self) -> list[Member]:
        """Of buffers to come."""
        return [member for row in self.store.all(RecordRow) for member in row.members]

    def consumed_members(self) -> list[Member]:
        return [member for row in self.store.all(ConsumedRow) for member in row.members]


class SecureNode(Node):
    """Its shards know the TSA."""

    def __init__(self, world: SecureWorld, name: str) -> None:
        super().__init__(world, name)
        self.shards = Shards(tsa=world.tsa.adapter)

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, work.GetOffers):
            self.receive(self.shards.get_offers(effect))
        elif isinstance(effect, work.Forget):
            self.shards.forget(effect)
        else:
            super()._carry_out(effect)

    def dropped(self) -> dict[str, int]:
        """Buffers that were of no use, by reason."""
        prefix = "buffers_dropped_"
        counters = self.held().counters
        return {
            name.removeprefix(prefix): n for name, n in counters.items() if name.startswith(prefix)
        }


class SecurePhone(Phone):
    """Masks with the offer that its report was answered with, once."""

    def __init__(self, world: SecureWorld, node: Node, session: SessionId, task: TaskId) -> None:
        super().__init__(world, node, session, task)
        self._rng = world.rng
        self._task = task
        self.sealed: Sealed

    def seal(self, *values: float, examples: int = MAX_EXAMPLES) -> Sealed:
        assert self.granted is not None
        assert self.granted.secure is not None
        vector = np.zeros(MODEL_LENGTH, FLOAT32)
        vector[: len(values)] = values
        asked = Seal(
            self._task,
            self.granted.secure,
            vector.tobytes(),
            examples,
            self.version,
            self.granted.version,
        )
        self.sealed = sealed(asked, self.world.now, self._rng, self.manifest.hex())
        return self.sealed

    def send_masked(self, upload: str = "u1") -> list[Message | None]:
        size, data = self.world.server.chunk_bytes, self.sealed.update
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        return [self.chunk(index, piece, upload) for index, piece in enumerate(pieces)]

    def complete(self, upload: str = "u1") -> int:
        return self.world.ask(self.node, Complete(self.ticket, upload, self.sealed.sealed))

    def granted_and_sealed(self, *values: float, examples: int = MAX_EXAMPLES) -> Sealed:
        granted = self.report()
        assert isinstance(granted, UploadGranted), granted
        return self.seal(*values, examples=examples)

    def upload(self, *values: float, examples: int = MAX_EXAMPLES) -> int:
        """Report, seal, send and complete; the handle of the last answer comes back."""
        self.granted_and_sealed(*values, examples=examples)
        self.send_masked()
        return self.complete()

    def upload_for_good(self, *values: float, examples: int = MAX_EXAMPLES) -> Message | None:
        return super().upload_for_good(*values, examples=examples)

    def send_for_good(self) -> Message | None:
        """What was sealed before, to whichever node it now talks to."""
        self.send_masked()
        handle = self.complete()
        self.world.pass_s(1.0)
        return self.world.answers.get(handle)

    def ask_again(self, node: Node) -> Message | None:
        """The completing message once more, at another node."""
        self.node = node
        handle = self.complete()
        self.world.pass_s(1.0)
        return self.world.answers.get(handle)


def a_secure_world(
    config: TaskConfig | None = None, server: ServerConfig = SERVER
) -> tuple[SecureWorld, SecureNode]:
    """One secure task at one aggregator, past its adoption window, with offers in stock."""
    world = SecureWorld(config, server)
    node = world.start()
    world.place(node)
    world.pass_s(server.heartbeat_s)
    return world, node


def make_secure_version(world: SecureWorld, node: Node, *values: float) -> list[SecurePhone]:
    """New clients that join, upload and are counted, until there is a new version."""
    phones = world.secure_phones(node, world.config.aggregation_goal)
    for phone in phones:
        phone.upload_for_good(*(values or (1.0,)))
    return phones


def successor(world: SecureWorld, node: SecureNode) -> SecureNode:
    """The holder dies; another one takes the task, past its adoption window."""
    world.crash(node)
    heir = world.start("agg-2")
    world.place(heir)
    return heir


def mean_of(updates: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    """What an exact server would step by."""
    table = np.array(updates, float) * np.array(weights)[:, None]
    found: list[float] = (table.sum(axis=0) / sum(weights)).tolist()
    return found
