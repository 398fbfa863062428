"""/live, /health and /metrics, on the admin listener of every role.

None needs a token: they show counts and names of tasks, nothing that a device sent. /health answers
503 while the state store fails, because the server then makes no progress. A restart would not
help, so /live answers 200 whenever the process can answer at all. If only the blobs of a task held
here cannot be read or written, or no thread can start for it, /health answers 200 and names one
such task: other tasks go on, and operators must still be able to reach the server. It does not give
the error, because errors of disks and buckets contain paths and addresses; the log has it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from papaya import __version__
from papaya.aggregator.aggregator import Aggregator
from papaya.coordinator.coordinator import Coordinator
from papaya.http.exchange import Exchange
from papaya.http.listener import Listener
from papaya.http.routes import Buffered, HttpRoute
from papaya.selector.selector import Selector
from papaya.server.host import AggregatorHost, Host
from papaya.server.metrics import (
    CONTENT_TYPE,
    AggregatorCollector,
    CoordinatorCollector,
    DriverMetrics,
    Now,
    SelectorCollector,
    WorkersCollector,
)
from papaya.server.peers import Peers
from papaya.server.state_thread import StateThread


class Health:
    """Answers /health and /metrics of one process."""

    def __init__(self, driver: DriverMetrics, now: Now, state: StateThread) -> None:
        self._state = state
        self.driver = driver
        self._now = now
        self._hosts: list[Host] = []
        self._listeners: dict[str, Listener] = {}
        self._peers: Peers | None = None

    def watch(self, hosts: Iterable[Host]) -> None:
        register = self.driver.registry.register
        for host in hosts:
            self._hosts.append(host)
            match host.machine:
                case Coordinator() as coordinator:
                    register(CoordinatorCollector(coordinator, self._now))
                case Selector() as selector:
                    register(SelectorCollector(selector))
                case Aggregator() as aggregator:
                    register(AggregatorCollector(aggregator, self._now))
            if isinstance(host, AggregatorHost):
                register(WorkersCollector(host.workers))

    def watch_peers(self, peers: Peers) -> None:
        self._peers = peers

    def watch_listener(self, name: str, listening: Listener) -> None:
        self._listeners[name] = listening

    def routes(self) -> list[HttpRoute]:
        return [
            Buffered("GET", "/live", self._on_live),
            Buffered("GET", "/health", self._on_health),
            Buffered("GET", "/metrics", self._on_metrics),
        ]

    def _on_live(self, exchange: Exchange, body: bytes) -> None:
        exchange.answer(200, msgspec.json.encode({"papaya": __version__}))

    def _on_health(self, exchange: Exchange, body: bytes) -> None:
        nodes = [host.machine.node for host in self._hosts]
        health = {"papaya": __version__, "nodes": nodes, "problem": self._problem}
        exchange.answer(503 if self._state.problem else 200, msgspec.json.encode(health))

    @property
    def _problem(self) -> str:
        hosts = (host for host in self._hosts if isinstance(host, AggregatorHost))
        problems = (self._state.problem, *(host.workers.problem for host in hosts))
        return next((problem for problem in problems if problem), "")

    def _on_metrics(self, exchange: Exchange, body: bytes) -> None:
        for host in self._hosts:
            if isinstance(host, AggregatorHost):
                self.driver.queue.set(host.workers.queue_length)
                self.driver.free_buffers.set(host.pool.free)
        if self._peers is not None:
            self.driver.lost_messages.set(self._peers.lost)
        for name, listening in self._listeners.items():
            self.driver.connections.labels(name).set(listening.connections)
        exchange.answer(200, self.driver.text(), content_type=CONTENT_TYPE)
