"""Faults that are drawn from a seed and applied to a cluster, and hostile devices.

Processes crash, freeze and come back; clocks jump and stand still; links break and recover;
messages are lost, duplicated and late; the store does not answer; the power fails. Hostile devices
replay accepted uploads, forge tickets, and use assignments as late as they can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from zlib import crc32

from msgspec.structs import replace

from papaya.aggregator.aggregator import Aggregator
from papaya.coordinator.coordinator import Coordinator
from papaya.machine import Reply
from papaya.messages.base import PROTOCOL_VERSION, Message, NodeId
from papaya.messages.control import Drain
from papaya.messages.participation import Chunk, Complete, Heartbeat, Join, Report
from papaya.messages.selection import Accepted, CheckIn
from papaya.messages.storage import FenceRow, Revoked, Row, Transaction
from papaya.messages.tickets import Keyring, SessionTicket, UploadTicket
from papaya.sim.cluster import Cluster
from papaya.sim.devices import NOBODY, Path, SimulatedDevice
from papaya.sim.hosts import SimulatedAggregatorHost, SimulatedHost
from papaya.sim.network import NetworkConfig
from papaya.sim.observer import Observer
from papaya.sim.protocol_updates import protocol_update
from papaya.sim.storage import StorageConfig, Writer

_RECORDED_MESSAGES = 64
_REPLAYS_PER_MOVE = 8
# Longer than any ticket of a swarm's tasks is valid.
_HOUR_S = 3600.0
_POLL_S = 0.05


def when_drained(
    cluster: Cluster, node: NodeId, limit_s: float, end: Callable[[NodeId], None]
) -> None:
    """Wait until a process that was told to drain has handed its tasks over, as `Server` does.

    Calls `end` then, or when the time is over; never if the process dies before.
    """
    host, until = cluster.hosts[node], cluster.engine.now + limit_s
    boot = host.boots

    def poll() -> None:
        if not host.is_alive or host.boots != boot:
            return
        machine = host.machine
        is_over = not isinstance(machine, Aggregator) or machine.may_stop
        if is_over or cluster.engine.now >= until:
            end(node)
        else:
            cluster.engine.after(_POLL_S, poll)

    cluster.engine.after(_POLL_S, poll)


class Faults:
    """Plays faults until `until`; then everything is healed and stays so."""

    def __init__(self, cluster: Cluster, rng: Random, until: float, mean_gap_s: float) -> None:
        self._cluster = cluster
        self._rng = rng
        self._until = until
        self._mean_gap_s = mean_gap_s
        self._heartbeat_s = cluster.config.server.heartbeat_s
        self.played: dict[str, int] = {}
        # Processes that were told to drain, by the boot that was told.
        self._stopping: dict[NodeId, int] = {}
        kinds: list[Callable[[], None]] = [
            self._crash,
            self._crash,
            self._crash_soon_after,
            self._restart_leader,
            self._restart_leader,
            self._stop,
            self._stop,
            self._pause,
            self._freeze_holder,
            self._freeze_holder,
            self._partition,
            self._partition,
            self._bad_network,
            self._bad_storage,
            self._power_loss,
            self._wrong_clock,
            self._all_clocks_wrong,
            self._jumping_clock,
            self._jumping_clock,
            self._standing_clock,
        ]
        if any(task.secure_aggregation is not None for task in cluster.config.tasks):
            kinds += [self._crash_tsa, self._crash_tsa, self._cut_off_tsa]
            kinds += [self._freeze_tsa, self._fail_tsa]
        if cluster.config.is_identified:
            kinds += [self._revoke]
        # Swarm testing: each seed leaves some kinds out, so that rare combinations get their turn.
        self._kinds = [kind for kind in kinds if rng.random() < 0.7] or kinds
        cluster.engine.after(0.0, self._next)
        cluster.engine.at(until, self._heal)

    def _next(self) -> None:
        delay_s = self._rng.expovariate(1 / self._mean_gap_s)
        if self._cluster.engine.now + delay_s < self._until:
            self._cluster.engine.after(delay_s, self._play)

    def _play(self) -> None:
        if self._cluster.engine.now < self._until:
            kind = self._rng.choice(self._kinds)
            self.played[kind.__name__] = self.played.get(kind.__name__, 0) + 1
            kind()
            self._next()

    def _a_while(self) -> float:
        """From a blink to well past every timeout."""
        return self._heartbeat_s * self._rng.choice((0.2, 1.0, 2.5, 4.0, 8.0))

    def _node(self) -> NodeId:
        return self._rng.choice(list(self._cluster.hosts))

    def _aggregator(self) -> NodeId:
        return self._rng.choice([n for n in self._cluster.hosts if n.startswith("aggregator")])

    def _crash(self) -> None:
        self._crash_node(self._node())

    def _crash_node(self, node: NodeId) -> None:
        host = self._cluster.hosts[node]
        host.crash()
        self._cluster.engine.after(self._a_while(), self._restart, node)

    def _restart(self, node: NodeId) -> None:
        host = self._cluster.hosts[node]
        if not host.is_alive:
            host.start()

    def _crash_soon_after(self) -> None:
        """A crash within milliseconds of something: between a write and the news of it."""
        delay_s = self._rng.random() * 0.1
        self._cluster.engine.after(delay_s, self._crash_node, self._aggregator())

    def _restart_leader(self) -> None:
        """It leads again at once, while some clients that it has assigned have not joined yet."""
        for host in self._cluster.hosts.values():
            if (
                host.is_alive
                and isinstance(host.machine, Coordinator)
                and host.machine.leadership.leads(host.now)
            ):
                host.crash()
                host.start()

    def _stop(self) -> None:
        node = self._node()
        host = self._cluster.hosts[node]
        if host.is_alive:
            host.deliver(Drain())
            self._stopping[node] = host.boots
            drain_s = self._heartbeat_s * self._rng.choice((0.2, 3.0))
            when_drained(self._cluster, node, drain_s, self._drop_uploads)

    def _drop_uploads(self, node: NodeId) -> None:
        self._cluster.hosts[node].deliver(Drain(drops_uploads=True))
        limit_s = self._heartbeat_s * self._rng.choice((0.2, 3.0))
        when_drained(self._cluster, node, limit_s, self._end_stop)

    def _end_stop(self, node: NodeId) -> None:
        self._stopping.pop(node, None)
        self._crash_node(node)

    def _revoke(self) -> None:
        """Exclude some of the devices that are here for a while. A server that restarts meanwhile
        does not know of it.
        """
        here = [self._cluster.identity_of(device) for device in self._cluster.devices]
        self._tell_revoked(tuple(self._rng.sample(here, min(len(here), self._rng.randint(1, 8)))))
        self._cluster.engine.after(self._a_while(), self._tell_revoked, ())

    def _tell_revoked(self, devices: tuple[str, ...]) -> None:
        for node, host in self._cluster.hosts.items():
            if not node.startswith("coordinator"):
                host.deliver(Revoked(devices))

    def _pause(self) -> None:
        host = self._cluster.hosts[self._node()]
        host.pause()
        self._cluster.engine.after(self._a_while(), host.resume)

    def _freeze_holder(self) -> None:
        """In the middle of a commit, for long enough to be given up: a zombie when it wakes."""
        host = self._cluster.hosts[self._aggregator()]
        assert isinstance(host, SimulatedAggregatorHost)
        host.freezes_at_work_s = self._heartbeat_s * self._rng.choice((4.0, 5.0, 8.0))

    def _partition(self) -> None:
        nodes = list(self._cluster.hosts)
        self._rng.shuffle(nodes)
        cut = self._rng.randrange(1, len(nodes))
        self._cluster.network.partition(frozenset(nodes[:cut]), frozenset(nodes[cut:]))
        self._cluster.engine.after(self._a_while(), self._cluster.network.heal)

    def _bad_network(self) -> None:
        bad = NetworkConfig(
            delay_s=self._cluster.config.network.delay_s * self._rng.choice((1, 5, 20)),
            jitter=0.9,
            loss=self._rng.choice((0.02, 0.1, 0.3)),
            duplication=self._rng.choice((0.0, 0.1, 0.5)),
        )
        self._cluster.network.use(bad)
        restore = self._cluster.config.network
        self._cluster.engine.after(self._a_while(), self._cluster.network.use, restore)

    def _bad_storage(self) -> None:
        calm = self._cluster.config.storage
        bad = replace(
            calm,
            transaction_s=calm.transaction_s * self._rng.choice((1, 10, 100)),
            unknown=self._rng.choice((0.1, 0.5)),
            late_s=self._a_while(),
        )
        self._use_storage(bad)
        self._cluster.engine.after(self._a_while(), self._use_storage, calm)

    def _use_storage(self, config: StorageConfig) -> None:
        self._cluster.state.config = config

    def _power_loss(self) -> None:
        for host in self._cluster.hosts.values():
            host.crash()
        self._cluster.tsa.crash(self._a_while())
        self._cluster.blobs.lose_power()
        for node in self._cluster.hosts:
            self._cluster.engine.after(self._a_while(), self._restart, node)

    def _clock_ahead_s(self) -> float:
        """Within what servers accept of each other, or far beyond it."""
        return self._rng.choice(
            (-_HOUR_S, -2.0 * self._heartbeat_s, 2.0 * self._heartbeat_s, _HOUR_S)
        )

    def _wrong_clock(self) -> None:
        """A process starts with a wrong clock, and starts again when the clock was corrected."""
        self._start_with_clock(self._node(), self._clock_ahead_s())

    def _start_with_clock(self, node: NodeId, ahead_s: float) -> None:
        host = self._cluster.hosts[node]
        host.crash()
        host.start(ahead_s)
        wrong_for_s = self._heartbeat_s * self._rng.choice((4.0, 8.0, 12.0))
        self._cluster.engine.after(wrong_for_s, self._correct_clock, host)

    def _correct_clock(self, host: SimulatedHost) -> None:
        if host.is_alive and host.clock_ahead_s:
            host.crash()
            host.start()

    def _all_clocks_wrong(self) -> None:
        """All processes of one machine: they agree, and are wrong."""
        ahead_s = self._clock_ahead_s()
        for node in self._cluster.hosts:
            self._start_with_clock(node, ahead_s)

    def _jumping_clock(self) -> None:
        host = self._cluster.hosts[self._aggregator()]
        host.jump_ahead(self._rng.choice((2.0 * self._heartbeat_s, _HOUR_S)))
        self._cluster.engine.after(self._a_while(), self._correct_clock, host)

    def _standing_clock(self) -> None:
        host = self._cluster.hosts[self._node()]
        slept_s = self._a_while()
        host.suspend(slept_s)
        self._cluster.engine.after(slept_s + self._a_while(), self._correct_clock, host)

    def _crash_tsa(self) -> None:
        """Seeds, groups and offers are lost; it is back at once, or after a while."""
        self._cluster.tsa.crash(self._rng.choice((0.0, self._a_while())))

    def _cut_off_tsa(self) -> None:
        """Nothing is lost, so nothing may be given up."""
        self._cluster.tsa.cut_off(self._a_while())

    def _freeze_tsa(self) -> None:
        """Seeds reach it, but its answers do not come: it takes them when it goes on."""
        self._cluster.tsa.freeze(self._a_while())

    def _fail_tsa(self) -> None:
        """It answers, and cannot do what it should: nothing may be given up for that either."""
        self._cluster.tsa.fail(self._rng.randint(1, 4))

    def _heal(self) -> None:
        self._cluster.tsa.come_back()
        self._tell_revoked(())
        self._cluster.network.heal()
        self._cluster.network.use(self._cluster.config.network)
        self._use_storage(self._cluster.config.storage)
        for node, host in self._cluster.hosts.items():
            if isinstance(host, SimulatedAggregatorHost):
                host.freezes_at_work_s = 0.0
            host.resume()
            self._correct_clock(host)
            if self._stopping.get(node) == host.boots:
                host.crash()  # it has to end before it can serve again
            self._restart(node)


class Hostile(Observer):
    """Devices that replay intercepted uploads, forge tickets, and join late.

    Their requests go through the selectors, as those of all devices do.
    """

    def __init__(self) -> None:
        self._recorded: list[Message] = []

    def start(self, rng: Random, until: float) -> None:
        """Attack until this virtual time."""
        self._rng = rng
        self._until = until
        self._forger = Keyring({1: rng.randbytes(32)})
        self.cluster.engine.after(0.0, self._next)

    def on_request(self, device: SimulatedDevice, message: Message) -> None:
        """Overhear every message of one upload in four, to play it again later."""
        if isinstance(message, Chunk | Complete) and message.upload[0] in "0123":
            self._recorded.append(message)
            if len(self._recorded) > _RECORDED_MESSAGES:
                del self._recorded[0]

    def on_reply(self, host: SimulatedHost, reply: Reply) -> None:
        """A device that was accepted joins at any time while its assignment is valid, or after."""
        if isinstance(reply.message, Accepted) and reply.to.device_name == NOBODY:
            late_s = 1.2 * self.cluster.config.server.confirm_by_s * self._rng.random()
            self.cluster.engine.after(late_s, self._ask, [Join(reply.message.ticket)])

    def on_transaction(self, writer: Writer, change: Transaction, before: dict[str, Row]) -> None:
        """A new holder adopts the clients that come first: be among them."""
        if any(isinstance(row, FenceRow) for _, row in change.put):
            for _ in range(_REPLAYS_PER_MOVE if self._recorded else 0):
                delay_s = self.cluster.config.server.heartbeat_s * self._rng.random()
                self.cluster.engine.after(delay_s, self._replay)

    def _next(self) -> None:
        if self.cluster.engine.now < self._until:
            self.cluster.engine.after(self._rng.expovariate(2.0), self._attack)

    def _attack(self) -> None:
        attack = self._rng.random()
        if attack < 0.2:
            self._ask([CheckIn(PROTOCOL_VERSION, self.cluster.config.kinds[0].capabilities)])
        elif self._recorded and attack < 0.8:
            self._replay()
        else:
            self._forge()
        self._next()

    def _replay(self) -> None:
        """The whole upload again: its chunks, then its completion."""
        chosen = self._rng.choice(self._recorded)
        assert isinstance(chosen, Chunk | Complete)
        of_it = [m for m in self._recorded if getattr(m, "ticket", None) == chosen.ticket]
        chunks = [message for message in of_it if isinstance(message, Chunk)]
        seals = [message.sealed for message in of_it if isinstance(message, Complete)]
        sealed = seals[0] if seals else self._rng.randbytes(64)
        self._ask([*chunks, Complete(chosen.ticket, chosen.upload, sealed)])

    def _forge(self) -> None:
        task = self._rng.choice(self.cluster.config.tasks)
        now = self.cluster.engine.now
        session = f"{self._rng.getrandbits(96):024x}"
        common = (task.task, session, self._rng.randrange(3), 0, "forged", now + 60.0)
        sealed = self._forger.seal(SessionTicket(*common))
        upload_sealed = self._forger.seal(UploadTicket(*common, 0, 1, now + 60.0))
        data = protocol_update(session, task.model_length)
        piece = self.cluster.config.server.chunk_bytes
        parts = [data[start : start + piece] for start in range(0, len(data), piece)]
        chunks = [
            Chunk(upload_sealed, "forged", index, crc32(part), part)
            for index, part in enumerate(parts)
        ]
        self._ask(
            [Heartbeat(sealed), Report(sealed, 1), *chunks, Complete(upload_sealed, "forged")]
        )

    def _ask(self, messages: Sequence[Message]) -> None:
        """One after the other, far enough apart to arrive in order."""
        selector = self.cluster.hosts[self._rng.choice(self.cluster.selectors)]
        for index, message in enumerate(messages):
            path = Path(None, 0, selector, selector.boots, message)
            self.cluster.engine.after(0.3 * index, selector.deliver, message, path)
