"""The network between processes: delay, loss, duplication, reordering, partitions.

Delays are drawn for each message, so messages overtake each other. A partition cuts both directions
between two groups of servers until it is healed. Nothing is corrupted: checksums and seals turn
that into loss.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from msgspec import Struct

from papaya.messages.base import NodeId
from papaya.sim.engine import Engine


class NetworkConfig(Struct, frozen=True, kw_only=True):
    delay_s: float = 0.02
    jitter: float = 0.5
    loss: float = 0.0
    duplication: float = 0.0


class Network:
    """Carries closures: what arrives is `handler(*arguments)` at the receiver."""

    def __init__(self, engine: Engine, rng: Random, config: NetworkConfig) -> None:
        self._engine = engine
        self._random = rng.random
        self.config = config
        self._cut: list[tuple[frozenset[NodeId], frozenset[NodeId]]] = []
        self.use(config)

    def use(self, config: NetworkConfig) -> None:
        self.config = config
        self._is_clean = config.loss == 0 and config.duplication == 0
        self._least_s = config.delay_s * (1 - config.jitter)
        self._spread_s = 2 * config.delay_s * config.jitter

    def partition(self, one: frozenset[NodeId], other: frozenset[NodeId]) -> None:
        self._cut.append((one, other))

    def heal(self) -> None:
        self._cut.clear()

    def reaches(self, source: NodeId, target: NodeId) -> bool:
        return not any(
            (source in one and target in other) or (source in other and target in one)
            for one, other in self._cut
        )

    @property
    def is_clear(self) -> bool:
        """Every message arrives once."""
        return self._is_clean and not self._cut

    def skip(self) -> None:
        """In a clear network, instead of carrying a message whose arrival changes nothing: later
        messages take as long as if it had been carried.
        """
        self._random()
        self._engine.skip()

    def carry(
        self,
        source: NodeId,
        target: NodeId,
        hops: int,
        handler: Callable[..., None],
        *arguments: Any,
    ) -> None:
        engine = self._engine
        delay_s = hops * (self._least_s + self._spread_s * self._random())
        if self._is_clean and not self._cut:
            engine.call_at(engine.now + delay_s, handler, arguments)
            return
        if not self.reaches(source, target) or self._random() < hops * self.config.loss:
            return
        engine.call_at(engine.now + delay_s, handler, arguments)
        if self._random() < self.config.duplication:
            late_s = delay_s + self._random() * 10 * self.config.delay_s
            engine.call_at(engine.now + late_s, handler, arguments)
