"""What an operator looks at: /health and /metrics on the admin listener of every role.

Both need no token: they tell counts and names of tasks, nothing that a device sent. /health is 503
while the state store fails: such a server answers everyone and gets nothing done.
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
from papaya.server.collectors import (
    DriverMetrics,
    Now,
    aggregator_collector,
    coordinator_collector,
    selector_collector,
    workers_collector,
)
from papaya.server.host import AggregatorHost, Host
from papaya.server.metrics import CONTENT_TYPE
from papaya.server.peers import Peers
from papaya.server.state_thread import StateThread


class Health:
    """The metrics of one process."""

    def __init__(self, driver: DriverMetrics, now: Now, state: StateThread) -> None:
        self._state = state
        self.driver = driver
        self.registry = driver.registry
        self._now = now
        self._hosts: list[Host] = []
        self._listeners: dict[str, Listener] = {}
        self._peers: Peers | None = None

    def watch(self, hosts: Iterable[Host]) -> None:
        for host in hosts:
            self._hosts.append(host)
            match host.machine:
                case Coordinator() as coordinator:
                    self.registry.collect(coordinator_collector(coordinator, self._now))
                case Selector() as selector:
                    self.registry.collect(selector_collector(selector))
                case Aggregator() as aggregator:
                    self.registry.collect(aggregator_collector(aggregator, self._now))
            if isinstance(host, AggregatorHost):
                self.registry.collect(workers_collector(host.workers))

    def watch_peers(self, peers: Peers) -> None:
        self._peers = peers

    def watch_listener(self, name: str, listening: Listener) -> None:
        self._listeners[name] = listening

    def observe(self, listener: str, route: str, status: int, seconds: float) -> None:
        self.driver.requests.add(1, listener, route, str(status))
        self.driver.request_seconds.observe(seconds, listener, route)

    def routes(self) -> list[HttpRoute]:
        return [
            Buffered("GET", "/health", self._on_health),
            Buffered("GET", "/metrics", self._on_metrics),
        ]

    def _on_health(self, exchange: Exchange, body: bytes) -> None:
        nodes = [host.machine.node for host in self._hosts]
        health = {"papaya": __version__, "nodes": nodes, "problem": self._state.problem}
        exchange.answer(503 if self._state.problem else 200, msgspec.json.encode(health))

    def _on_metrics(self, exchange: Exchange, body: bytes) -> None:
        for host in self._hosts:
            if isinstance(host, AggregatorHost):
                self.driver.queue.set(host.workers.queue_length)
                self.driver.free_buffers.set(host.pool.free)
        if self._peers is not None:
            self.driver.lost_messages.set(self._peers.lost)
        for name, listening in self._listeners.items():
            self.driver.connections.set(listening.connections, name)
        text = self.registry.text()
        exchange.answer(200, text.encode(), content_type=CONTENT_TYPE)
