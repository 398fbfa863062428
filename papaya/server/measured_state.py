"""The state store as machines use it, with every transaction timed and counted."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from papaya.messages.storage import Outcome, Row, Transaction
from papaya.server.collectors import DriverMetrics
from papaya.server.state_thread import StateThread


class MeasuredState:
    def __init__(self, thread: StateThread, metrics: DriverMetrics) -> None:
        self._thread = thread
        self._metrics = metrics

    def transact(self, transaction: Transaction, done: Callable[[Outcome], None]) -> None:
        began_at = perf_counter()

        def measured(outcome: Outcome) -> None:
            self._metrics.commits.add(1, outcome)
            self._metrics.commit_seconds.observe(perf_counter() - began_at)
            done(outcome)

        self._thread.transact(transaction, measured)

    def read(self, prefixes: tuple[str, ...], done: Callable[[dict[str, Row]], None]) -> None:
        self._thread.read(prefixes, done)
