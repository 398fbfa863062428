"""A whole system under virtual time: servers, stores, network, and a fleet that comes and goes.

The fleet is a superposition of devices that check in at random: with N devices that each return
after m seconds on average, arrivals are Poisson at rate N ÷ m, thinned by eligibility. Rejections
change m as they would in a real fleet, one device at a time. Memory grows with the devices that are
here, never with N. A run is a function of (configuration, seed).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from math import log
from random import Random

import numpy as np
from msgspec import Struct

from papaya.aggregator.aggregator import Aggregator
from papaya.aggregator.shards import initial_blobs
from papaya.client.client import Client
from papaya.client.history import History
from papaya.client.work import Finish, Seal, Sealed
from papaya.config import DeviceConfig, ServerConfig, TaskConfig
from papaya.config.checks import require
from papaya.coordinator.coordinator import Coordinator
from papaya.messages.base import Message, NodeId
from papaya.messages.selection import Capabilities
from papaya.messages.storage import submission
from papaya.messages.tickets import PSEUDONYM_KEY_BYTES, Keyring
from papaya.selector.selector import Selector
from papaya.sim.behaviour import Behaviour
from papaya.sim.devices import SimulatedBundles, SimulatedDevice
from papaya.sim.engine import Engine, TimerWheel
from papaya.sim.hosts import SimulatedAggregatorHost, SimulatedHost, SimulatedSelectorHost
from papaya.sim.network import Network, NetworkConfig
from papaya.sim.observer import Hooks, Observer
from papaya.sim.population import DEFAULT, Arrivals, Population, PopulationConfig, Visit
from papaya.sim.storage import OWNER, BlobTwin, StateTwin, StorageConfig
from papaya.sim.tsa_twin import TsaTwin

# When nearly the whole fleet is present, an arrival may find no absent device.
_MAX_DRAWS = 64
_MAX_SERVERS = 1000
_MAX_SUPPLY = 1000.0


class DeviceKind(Struct, frozen=True):
    """A share of the fleet and what it declares."""

    share: float
    capabilities: Capabilities


class ClusterConfig(Struct, frozen=True, kw_only=True):
    """`supply`: check-ins per expected completion when the run starts, as if pace steering had
    settled before. `upload_bytes`: memory for uploads of each aggregator.

    `is_identified`: the token of a device identifies it. `clones`: if not 0, every device whose
    number is a multiple of it has a copy of the same token. `direct_uploads`: devices upload to
    aggregators without a selector in between, until this fails.
    """

    tasks: tuple[TaskConfig, ...]
    server: ServerConfig = ServerConfig()
    device: DeviceConfig = DeviceConfig(participation_floor_s=0.0)
    population: PopulationConfig = DEFAULT
    kinds: tuple[DeviceKind, ...] = (DeviceKind(1.0, Capabilities()),)
    supply: float = 1.5
    coordinators: int = 1
    selectors: int = 1
    aggregators: int = 1
    upload_bytes: int = 1 << 30
    network: NetworkConfig = NetworkConfig()
    storage: StorageConfig = StorageConfig()
    is_identified: bool = False
    clones: int = 0
    direct_uploads: bool = False

    def __post_init__(self) -> None:
        self._check_tasks()
        self._check_fleet()
        for role in ("coordinators", "selectors", "aggregators"):
            count = getattr(self, role)
            problem = f"must be at least 1 and at most {_MAX_SERVERS}"
            require(1 <= count <= _MAX_SERVERS, role, count, problem, f"set {role} to 1")

    def _check_tasks(self) -> None:
        problem, remedy = "must be a tuple of at least one task", "write tasks=(task,)"
        require(
            type(self.tasks) is tuple and bool(self.tasks), "tasks", self.tasks, problem, remedy
        )
        names = [task.task for task in self.tasks]
        problem, remedy = "two tasks have the same name", "give every task a name of its own"
        require(len(set(names)) == len(names), "tasks", names, problem, remedy)

    def _check_fleet(self) -> None:
        problem = f"must be above 0 and at most {_MAX_SUPPLY:g}"
        remedy = "use a number like 1.5"
        require(0 < self.supply <= _MAX_SUPPLY, "supply", self.supply, problem, remedy)
        size = self.population.size
        for task in self.tasks:
            problem, remedy = f"is more than {size:,}, the whole fleet", "lower it"
            require(task.concurrency <= size, "concurrency", task.concurrency, problem, remedy)
        shares = [kind.share for kind in self.kinds]
        is_whole = all(share >= 0 for share in shares) and math.isclose(
            sum(shares), 1, abs_tol=1e-6
        )
        remedy = "one DeviceKind per kind, with shares like 0.7 and 0.3"
        require(is_whole, "kinds", shares, "the shares must add up to 1", remedy)


class Cluster:
    """Builds everything from one seed.

    `observers` see the run and do not change it; `behaviour` says what devices upload.
    """

    def __init__(
        self,
        config: ClusterConfig,
        seed: int,
        *,
        observers: Sequence[Observer] = (),
        behaviour: Behaviour | None = None,
    ) -> None:
        self.config = config
        self.seed = seed
        self.observers = tuple(observers)
        self.hooks = Hooks(self.observers)
        self.behaviour = Behaviour() if behaviour is None else behaviour
        # Nobody looks at messages between devices and servers, or at servers after each event.
        carries_objects = type(self.behaviour).carry is Behaviour.carry
        self.may_shorten = carries_objects and not self.hooks.sees_messages
        self.engine = Engine()
        self.wheel = TimerWheel(self.engine, config.server.heartbeat_s / 20)
        self.network = Network(self.engine, self._rng("network"), config.network)
        self.state = StateTwin(self.engine, self._rng("state"), config.storage)
        self.blobs = BlobTwin(self._rng("blobs"))
        self.tsa = TsaTwin(self.engine, self._rng("trusted"))
        self.hosts: dict[NodeId, SimulatedHost] = {}
        # No server has ever had a wrong clock.
        self.clocks_were_right = True
        self.devices: dict[int, SimulatedDevice] = {}
        self.keyring = Keyring({1: self._rng("keys").randbytes(32)})
        self._histories: dict[int, History] = {}
        self._keeps_history = any(
            task.participation_gap_s > 0 or task.max_participations is not None
            for task in config.tasks
        )
        self.population = Population(config.population, seed)
        self._arrivals = Arrivals(self.population)
        self._fleet_rng = self._rng("fleet")
        self._device_rng = self._rng("devices")
        self._sealing_rng = self._rng("seals")
        self._mean_return_s = self._paced_return_s()
        # A trace says when there are few: then whoever comes by and is not available is no arrival.
        is_traced = config.population.availability_trace is not None
        self._draws = 1 if is_traced else _MAX_DRAWS
        share = 1.0 if is_traced else config.population.availability
        self._eligible = config.population.size * share
        self._all_are_eligible = not is_traced and config.population.availability >= 1
        for task in config.tasks:
            self._submit(task)
        self._build_servers()
        self._schedule_arrival()
        self.state.observers += self.hooks.transaction
        self.blobs.observers += self.hooks.blob_lost
        for observer in self.observers:
            observer.attach(self)

    def run(self, until: float, stop: Callable[[], bool] | None = None) -> None:
        """Run until this virtual time, or until `stop` says so after an event."""
        while (due := self._next_sample_s()) <= until:
            self.engine.run(due, stop)
            if self.engine.now < due:
                return  # stopped
            for observer in self.observers:
                if observer.next_sample_s() <= due:
                    observer.sample(due)
        self.engine.run(until, stop)

    def _next_sample_s(self) -> float:
        return min((each.next_sample_s() for each in self.observers), default=math.inf)

    def _submit(self, task: TaskConfig) -> None:
        blobs = initial_blobs(task, self.behaviour.initial(task, self.seed))
        for key, data in blobs:
            self.blobs.put(key, data)
        pseudonym_key = self._rng(f"pseudonyms/{task.task}").randbytes(PSEUDONYM_KEY_BYTES)
        self.put_bundle(task)
        transaction = submission(task, blobs[0][0], blobs[1][0], self.engine.now, pseudonym_key)
        self.state.apply(OWNER, transaction)

    def put_bundle(self, config: TaskConfig) -> None:
        """Store the bundle that these settings name, if an owner has signed them."""
        needs = config.requirements
        if needs.bundle is not None and needs.manifest is not None:
            self.blobs.put(needs.bundle, needs.manifest.encode())

    # -- servers ----------------------------------------------------------------------------

    def _rng(self, purpose: str) -> Random:
        return Random(f"{self.seed}/{purpose}")

    def _build_servers(self) -> None:
        config, server = self.config, self.config.server
        coordinators = [f"coordinator-{i}" for i in range(config.coordinators)]
        self.selectors = [f"selector-{i}" for i in range(config.selectors)]

        def coordinator(node: NodeId, boot: int, now: float) -> Coordinator:
            return Coordinator(node, boot, now, server, self._rng(f"{node}@{boot}"))

        def selector(node: NodeId, boot: int, now: float) -> Selector:
            return Selector(node, boot, now, server, self.keyring, coordinators)

        def aggregator(node: NodeId, boot: int, now: float) -> Aggregator:
            own = (self.keyring, coordinators, config.upload_bytes)
            upload_url = node if config.direct_uploads else ""
            return Aggregator(node, boot, now, server, *own, upload_url)

        self.hosts = {
            node: SimulatedHost(self, node, partial(coordinator, node)) for node in coordinators
        }
        self.hosts |= {
            node: SimulatedSelectorHost(self, node, partial(selector, node))
            for node in self.selectors
        }
        for node in (f"aggregator-{i}" for i in range(config.aggregators)):
            self.hosts[node] = SimulatedAggregatorHost(self, node, partial(aggregator, node))
        for host in self.hosts.values():
            host.start()

    # -- the fleet --------------------------------------------------------------------------

    def _paced_return_s(self) -> float:
        population, sample = self.config.population, self.population.visitors(np.arange(4096))
        per_task = [task.training_timeout_s for task in self.config.tasks]
        busy_s = np.minimum(sample.latency_s + sample.execution_s, max(per_task)).mean()
        needed = sum(task.concurrency for task in self.config.tasks) / float(busy_s)
        return population.size * population.availability / (self.config.supply * needed)

    def _schedule_arrival(self) -> None:
        rate = self._eligible / self._mean_return_s
        self.engine.after(-log(1.0 - self._fleet_rng.random()) / rate, self._arrive)

    def _arrive(self) -> None:
        """One eligible device, uniformly among those that are not here."""
        self._schedule_arrival()
        for visit in islice(self._arrivals, self._draws):
            device = visit.device
            if device not in self.devices and (
                self._all_are_eligible or self._arrivals.is_available(visit, self.engine.now)
            ):
                self.admit(visit)
                return

    def admit(self, visit: Visit) -> None:
        bundles = SimulatedBundles()
        machine = Client(
            self.selectors,
            self._kind_of(visit.device),
            self._history_of(visit.device),
            self.config.device,
            self._device_rng,
            bundles,
        )
        device = self.devices[visit.device] = SimulatedDevice(self, visit, machine, bundles)
        device.start()

    def _kind_of(self, device: int) -> Capabilities:
        kinds = self.config.kinds
        if len(kinds) == 1:
            return kinds[0].capabilities
        point = (device * 0.6180339887498949) % 1.0
        for kind in kinds:
            point -= kind.share
            if point < 0:
                break
        return kind.capabilities

    def _history_of(self, device: int) -> History:
        found = self._histories.get(device)
        return History(self.config.device.participation_floor_s) if found is None else found

    def keep_history(self, device: int, history: History) -> None:
        """Only of devices that took part, and only when a task asks for it."""
        if self._keeps_history:
            self._histories[device] = history

    def departed(self, device: SimulatedDevice, finish: Finish | None) -> None:
        """The device is gone; `finish` is None when it dropped out without telling anyone."""
        del self.devices[device.visit.device]
        if finish is not None and finish.ending == "rejected":
            told_s = (finish.retry_from_s + finish.retry_until_s) / 2
            self._mean_return_s += (told_s - self._mean_return_s) / self.config.population.size
        for observe in self.hooks.departed:
            observe(device, finish)

    # -- for hosts and devices --------------------------------------------------------------

    def identity_of(self, device: int) -> str:
        """What the token of a device says of it; empty if all devices share one token."""
        if not self.config.is_identified:
            return ""
        clones = self.config.clones
        return "clone" if clones and device % clones == 0 else f"device-{device}"

    def seal(self, device: SimulatedDevice, work: Seal) -> Sealed:
        """What a device makes of its update for an offer."""
        done = self.behaviour.seal(device, work, self._sealing_rng)
        for observe in self.hooks.sealed:
            observe(device, work, done)
        return done

    def wire(self, source: NodeId, target: NodeId, message: Message) -> Message:
        """What the receiver gets of a message."""
        for observe in self.hooks.sent:
            observe(source, target, message)
        return self.behaviour.carry(message)
