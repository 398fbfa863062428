"""A server process with one role or all of them: start and stop.

    devices   ──▶ selector       check-in, participation, chunks, parameters; passes TLS connections
                                 for hosts in `upload_routes` through to aggregators
              ──▶ aggregator     chunks and Complete, if it has an `upload_url`
    servers   ──▶ all roles      messages among servers, requests that selectors pass on; only if
                                 the roles run in several processes
    admin     ──▶ coordinator    the admin API; status, /metrics and /health for every role

A restart is a recovery. All decisions are in the state store, so a server that was killed starts
at the last committed version, with optimizer state and open buffer, and adopts the clients that are
still training. `stop` lets running uploads finish and hands the tasks to other aggregators first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import structs

from papaya import __version__
from papaya.aggregator.aggregator import Aggregator
from papaya.aggregator.masked_sum import Tsa
from papaya.clock import Clock
from papaya.config import Deployment
from papaya.config.deployment import ROLES, Role, address
from papaya.config.oidc import OidcConfig
from papaya.config.upload_routes import UploadRoutes
from papaya.coordinator.coordinator import Coordinator
from papaya.credentials.tls import UNNAMED_HINT, unnamed_host
from papaya.credentials.token_files import read
from papaya.errors import LostHistory, OperatorError, PapayaError
from papaya.http.errors import ListenError
from papaya.http.limits import ListenerLimits
from papaya.http.listener import Listener, serve
from papaya.http.lookups import start_lookup_threads
from papaya.http.passthrough import Passthrough
from papaya.http.routes import HttpRoute
from papaya.learning import entry_points
from papaya.messages.base import Message, NodeId
from papaya.messages.control import Drain
from papaya.messages.events import NodeStarted, ServerStarted
from papaya.messages.participation import Complete
from papaya.messages.storage import (
    AdminAddressRow,
    Changed,
    Transaction,
    admin_address_key,
)
from papaya.selector.selector import Selector
from papaya.server import public_log
from papaya.server.admin import rollouts
from papaya.server.admin.accounts import Identities, Provider
from papaya.server.admin.blobs import ThreadedBlobs
from papaya.server.admin.history import TaskHistory
from papaya.server.admin.live import CoordinatorLive, Live, RoleLive
from papaya.server.admin.routes import AdminRoutes
from papaya.server.admin.service import AdminService
from papaya.server.admin.supervisor import Supervisor
from papaya.server.admin.views import EvidenceView
from papaya.server.auth import guarded, verifier_for
from papaya.server.boots import Boots
from papaya.server.buffers import BufferPool
from papaya.server.certificates import Certificates
from papaya.server.cores import usable_cores
from papaya.server.crew import NoThread, on_thread
from papaya.server.dashboard import dashboard_routes
from papaya.server.device_api import Door, participation_routes
from papaya.server.event_rows import EventRows
from papaya.server.formats import Formats
from papaya.server.health import Health
from papaya.server.host import AggregatorHost, Host
from papaya.server.logs import keep_telling, listeners, log
from papaya.server.metrics import (
    CertificateCollector,
    DriverMetrics,
    EvaluationCollector,
    PassthroughCollector,
    TsaCollector,
    watch_process,
)
from papaya.server.node_names import NodeNames
from papaya.server.open_files import (
    connections_of_one_address,
    connections_within,
    listeners_of,
    shares_of,
)
from papaya.server.peers import message_route
from papaya.server.replies import STARTING, WaitingDevice, blame_peer, problem, retry_after_s
from papaya.server.resources import Resources
from papaya.server.tsa import TsaConnection
from papaya.server.tsa_fleet import TsaFleet
from papaya.server.upkeep import Upkeep
from papaya.server.uploads import Uploads
from papaya.server.webhooks import Webhook
from papaya.server.workers import Workers, threaded_shards

logger = logging.getLogger("papaya.server")

# Slow chunks and the idle connections of selectors must leave places for orders of the coordinator.
_SPARE_PART = 16  # of the places of the listener for servers
_CUT_OFF_S = 2.0
_QUIET_POLL_S = 0.05
_TELLS_PER_HEARTBEAT = 4


class Server:
    """One process. `start` returns when every listener answers."""

    def __init__(
        self,
        deployment: Deployment,
        roles: tuple[Role, ...] = ROLES,
        open_files: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`open_files`: the limit on open files; None does not check it.

        `clock`: None means the clock of the machine.
        """
        self.deployment = deployment
        self.roles = roles
        self.addresses: dict[str, str] = {}
        self.failed = asyncio.Event()  # set if the process should be restarted
        self.failure: PapayaError | None = None  # why, if it is not a bug
        self._clock = Clock() if clock is None else clock
        self._names = NodeNames(deployment, roles, self.addresses)
        most = deployment.max_connections
        if open_files is not None:
            most = connections_within(open_files, most, shares_of(roles, deployment))
        retry_s = retry_after_s(deployment.server.heartbeat_s)
        # One address may use all of them: a selector may need a connection for each of its devices.
        self._limits = ListenerLimits(
            max_connections=most, max_connections_per_address=most, retry_soon_s=retry_s
        )
        if (each := deployment.max_connections_per_address) is None:
            each = connections_of_one_address(most)
        self._device_limits = structs.replace(self._limits, max_connections_per_address=each)
        self._listeners: list[Listener] = []
        self._hooks: list[Webhook] = []
        self._background: list[asyncio.Task[None]] = []
        self._hosts: dict[Role, Host] = {}
        self._operations: Health
        self._door: Door | None = None
        self._upkeep: Upkeep
        self._events = EventRows(self._names.process)
        self._tsas: TsaFleet | None = None

    # -- start and stop -----------------------------------------------------------------------

    async def start(self) -> None:
        try:
            await start_lookup_threads()
        except RuntimeError as error:
            raise OperatorError(
                f"this process cannot start enough threads: {error}",
                hint="raise the limit of its user (ulimit -u) or of its container",
            ) from error
        started = ServerStarted(__version__, self.roles, self._settings())
        log(started)
        entry_points.load(entry_points.parsed(self.deployment.extensions))
        host = None if self._names.is_alone else await self._names.called_host()
        certificates = Certificates(self.deployment, self.roles, host)
        if why := unnamed_host(self.deployment, host):
            logger.warning("%s: their calls fail (hint: %s)", why, UNNAMED_HINT)
        metrics = DriverMetrics()
        self._resources = await Resources.open(
            self.deployment,
            certificates,
            self._names.process,
            self._clock,
            metrics.observe_commit,
            max_relays=self._device_limits.max_connections,
        )
        self._upkeep = Upkeep(self.deployment, self._names, self._resources, self._hosts)
        try:
            self._events.open(self._resources.state)
            self._events.offer(started, "")
            listeners.append(self._events.offer)
            self._operations = Health(metrics, self._resources.clock.now, self._resources.state)
            if not self._names.is_alone:
                limits = structs.replace(
                    self._limits, spare=self._limits.max_connections // _SPARE_PART
                )
                await self._listen(
                    "servers", self.deployment.servers, self._servers_routes(), limits
                )
            formats = Formats()
            formats.check(await self._resources.state.read(Formats.prefixes))
            boots = Boots(self._resources.state)
            for role in self.roles:
                boot = await boots.take(self._names.node(role))
                self._hosts[role] = self._make_host(role, boot)
                log(NodeStarted(boot), self._names.node(role))
            for running in self._hosts.values():
                self._resources.peers.hosts[running.machine.node] = running
                running.start()
            self._operations.watch(self._hosts.values())
            self._operations.watch_peers(self._resources.peers)
            metrics.registry.register(CertificateCollector(certificates))
            watch_process(metrics.registry)
            await self._upkeep.tell_revoked()
            await self._open_doors()
            self._look_after(self._upkeep.refresh())
            self._look_after(self._watch_cluster(boots, formats))
            if (bucket := self._resources.bucket) is not None:
                self._look_after(self._upkeep.remove_deleted(bucket))
                self._look_after(self._upkeep.publish_log(bucket, self._log))
            self._look_after(self._upkeep.watch_certificates())
            self._look_after(keep_telling())
            self._look_after(self._events.run(prunes="coordinator" in self.roles))
            self._start_webhooks()
            self._tell_if_capped()
            self._tell_of_upload_url()
        except BaseException:
            await self.stop()
            raise

    @property
    def uploads(self) -> int:
        """The number of uploads in progress, which `stop` waits for."""
        return sum(host.machine.uploads for host in self._aggregators().values())

    async def stop(self) -> None:
        """Take no new devices, hand the tasks over, answer everybody, then close everything."""
        if self._tsas is not None:
            self._tsas.stop()
        await self._drain()
        for hook in self._hooks:
            listeners.remove(hook.offer)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._resources.peers.finish(_CUT_OFF_S)
        await asyncio.gather(*(listener.drain(_CUT_OFF_S) for listener in self._listeners))
        for host in self._hosts.values():
            host.stop()
            if isinstance(host, AggregatorHost):
                await host.workers.close()
        if self._tsas is not None:
            await self._close_tsas(self._tsas)
        listeners.remove(self._events.offer)
        await self._events.write_last(_CUT_OFF_S)
        await self._resources.close()

    async def _close_tsas(self, tsas: TsaFleet) -> None:
        try:
            await on_thread(tsas.close)
        except NoThread:
            tsas.close()

    def _tell_if_capped(self) -> None:
        asked, given = self.deployment.max_connections, self._limits.max_connections
        if given < asked:
            logger.warning(
                "max_connections = %d is above the limit on open files: each listener takes %d "
                "(hint: raise the limit with ulimit -n or LimitNOFILE)",
                asked,
                given,
            )

    def _tell_of_upload_url(self) -> None:
        url = self.deployment.upload_url
        if not url:
            return
        if "aggregator" not in self.roles:
            logger.warning(
                "upload_url = %s has no effect: this process is not an aggregator "
                "(hint: set it in the configuration of each aggregator)",
                url,
            )
            return
        parts, listens_on = urlsplit(url), self.addresses["devices"]
        port = parts.port or (443 if parts.scheme == "https" else 80)
        if not self.deployment.proxies and not listens_on.endswith(f":{port}"):
            logger.warning(
                "devices upload to %s, but this aggregator listens for them on %s (hint: set "
                "devices to port %d; if a load balancer forwards that port, add its address to "
                "proxies if it sends the PROXY protocol, and ignore this if it does not)",
                url,
                listens_on,
                port,
            )

    async def _drain(self) -> None:
        """Uploads may finish within `drain_s`; handing the tasks over takes at most 3 heartbeats
        more. A process that is alone has nobody to hand them to.
        """
        hosts, drain = self._hosts, Drain(is_alone=self._names.is_alone)
        if "selector" in hosts:
            hosts["selector"].deliver(drain)
        aggregator = hosts.get("aggregator")
        if isinstance(aggregator, AggregatorHost):
            aggregator.deliver(drain)
            await self._until_may_stop(aggregator.machine, self.deployment.drain_s)
            if not self._names.is_alone:
                aggregator.deliver(Drain(drops_uploads=True))
                await self._until_may_stop(aggregator.machine, self.deployment.server.dead_after_s)
        if "coordinator" in hosts:
            hosts["coordinator"].deliver(drain)

    async def _until_may_stop(self, aggregator: Aggregator, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + timeout_s
        while not aggregator.may_stop and loop.time() < ends_at:
            await asyncio.sleep(_QUIET_POLL_S)

    def _start_webhooks(self) -> None:
        if self.deployment.webhook_key is None:
            return
        key = read(Path(self.deployment.webhook_key))
        for url in self.deployment.webhooks:
            hook = Webhook(url, key)
            listeners.append(hook.offer)
            self._hooks.append(hook)
            self._look_after(hook.run())

    def _settings(self) -> str:
        """What differs from the defaults. Secrets are in files; a user name may be in `state`."""
        given, usual = structs.asdict(self.deployment), structs.asdict(Deployment())
        found = {name: value for name, value in given.items() if value != usual[name]}
        if self.deployment.state is not None:
            where = urlsplit(self.deployment.state)
            found["state"] = f"{where.scheme}://{where.hostname}{where.path}"
        if self.deployment.webhooks:
            found["webhooks"] = [urlsplit(url).hostname for url in self.deployment.webhooks]
        return msgspec.json.encode(found).decode()

    def _look_after(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._on_background_end)
        self._background.append(task)

    def _on_background_end(self, task: asyncio.Task[None]) -> None:
        """Background work should never end: without it the server would only look alive."""
        if task.cancelled():
            return
        if isinstance(error := task.exception(), LostHistory):
            self.failure = error
        if self.failure is None:
            logger.critical("background work of the server has failed", exc_info=task.exception())
        self.failed.set()

    async def _watch_cluster(self, boots: Boots, formats: Formats) -> None:
        try:
            await self._upkeep.watch_cluster(boots, formats)
        except OperatorError as error:
            self.failure = error

    # -- roles --------------------------------------------------------------------------------

    @property
    def _passes_tls_through(self) -> bool:
        return "selector" in self.roles and bool(self.deployment.upload_routes)

    def _make_host(self, role: Role, boot: int) -> Host:
        shared, server = self._resources, self.deployment.server
        start = (self._names.node(role), boot, shared.clock.now(), server)
        keyring = shared.keys.keyring
        around = (shared.clock, shared.state, shared.peers)
        match role:
            case "coordinator":
                return Host(Coordinator(*start, SystemRandom()), *around)
            case "selector":
                return Host(Selector(*start, keyring, self._names.coordinators()), *around)
            case "aggregator":
                pool = self._upload_pool()
                among = (
                    keyring,
                    self._names.coordinators(),
                    pool.total_bytes,
                    self.deployment.upload_url,
                )
                return self._make_aggregator_host(Aggregator(*start, *among), pool)

    def _upload_pool(self) -> BufferPool:
        chunk_bytes = self.deployment.server.chunk_bytes
        return BufferPool((self.deployment.upload_memory_mb << 20) // chunk_bytes or 1, chunk_bytes)

    def _make_aggregator_host(self, machine: Aggregator, pool: BufferPool) -> AggregatorHost:
        shared, deployment = self._resources, self.deployment
        threads = deployment.fold_threads or usable_cores()
        workers = Workers(
            threaded_shards(threads, pool, self._tsa()),
            shared.blobs,
            self._on_work_done,
            threads,
            observe=self._operations.driver.observe_work,
        )
        around = (shared.clock, shared.state, shared.peers)
        tell_s = deployment.server.heartbeat_s / _TELLS_PER_HEARTBEAT
        return AggregatorHost(machine, *around, workers, pool, tell_s)

    def _tsa(self) -> Tsa:
        shared, now = self._resources, self._resources.clock.now

        def connect(where: str) -> TsaConnection:
            dial = shared.certificates.dial_tsa
            return TsaConnection(self.deployment, where, now, shared.cluster_key, dial=dial)

        self._tsas = TsaFleet(self.deployment.tsa_addresses, connect, shared.state, now)
        self._operations.driver.registry.register(TsaCollector(self._tsas))
        return self._tsas

    def _on_work_done(self, result: Message) -> None:
        self._hosts["aggregator"].deliver(result)

    # -- listeners ----------------------------------------------------------------------------

    async def _listen(
        self,
        name: str,
        where: str,
        routes: list[HttpRoute],
        limits: ListenerLimits | None = None,
        proxies: tuple[str, ...] = (),
        passthrough: Passthrough | None = None,
    ) -> None:
        host, port = address(name, where)
        certificates = self._resources.certificates
        retry_s = retry_after_s(self.deployment.server.heartbeat_s)
        try:
            listening = await serve(
                routes,
                host,
                port,
                limits=limits or self._limits,
                problem=partial(problem, retry_s=retry_s),
                observe=partial(self._operations.driver.observe_request, name),
                blame=blame_peer,
                tls=certificates.servers if name == "servers" else certificates.doors,
                proxies=proxies,
                passthrough=passthrough,
            )
        except ListenError as error:
            raise _cannot_listen(name, where, error) from error
        self._listeners.append(listening)
        self._operations.watch_listener(name, listening)
        shown = f"[{host}]" if ":" in host else host
        self.addresses[name] = f"{shown}:{listening.port}"

    async def _open_doors(self) -> None:
        if "devices" in listeners_of(self.roles, self.deployment):
            is_selector = "selector" in self.roles
            routes = self._devices_routes() if is_selector else self._direct_upload_routes()
            where, proxies = self.deployment.devices, self.deployment.proxies
            limits, passthrough = self._device_limits, self._passthrough()
            await self._listen("devices", where, routes, limits, proxies, passthrough)
        await self._listen("admin", self.deployment.admin, self._admin_routes())
        await self._tell_address()

    async def _tell_address(self) -> None:
        """Store the address of this coordinator's admin API, for `papaya status` elsewhere."""
        if (coordinator := self._hosts.get("coordinator")) is not None:
            scheme = "http" if self.deployment.tls_certificate is None else "https"
            host, _, port = self.addresses["admin"].rpartition(":")
            if host in ("0.0.0.0", "[::]") and "servers" in self.addresses:
                host = self.addresses["servers"].rpartition(":")[0]
            key = admin_address_key(coordinator.machine.node)
            address = AdminAddressRow(f"{scheme}://{host}:{port}")
            await self._resources.state.transact(Transaction(put=((key, address),)))

    def _devices_routes(self) -> list[HttpRoute]:
        shared, selector = self._resources, self._hosts["selector"]
        assert isinstance(selector.machine, Selector)
        auth = verifier_for(self.deployment, shared.data)
        driver = self._operations.driver
        door = self._door = Door(selector, auth, shared.blobs, driver, shared.locator())
        uploads = Uploads(shared.clock, shared.peers, selector.machine, self._aggregators, driver)
        return [*door.routes(), uploads.route(), public_log.route(self._log)]

    def _direct_upload_routes(self) -> list[HttpRoute]:
        """What devices may send to an aggregator without a selector in between."""
        complete = participation_routes(self._to_aggregator, kinds=(Complete,))
        return [*complete, self._own_uploads().route()]

    def _passthrough(self) -> Passthrough | None:
        if not self._passes_tls_through:
            return None
        passthrough = Passthrough(UploadRoutes(self.deployment.upload_routes).find)
        self._operations.driver.registry.register(PassthroughCollector(passthrough))
        return passthrough

    def _own_uploads(self, limits: ListenerLimits | None = None) -> Uploads:
        """Chunks for the aggregator of this process."""
        shared, driver = self._resources, self._operations.driver
        return Uploads(shared.clock, shared.peers, None, self._aggregators, driver, limits)

    @property
    def _log(self) -> Path:
        return Path(self.deployment.log or self._resources.data / "log")

    def _to_aggregator(self, message: Message, waiting: WaitingDevice) -> None:
        host = self._hosts.get("aggregator")
        if host is None:
            waiting.answer(STARTING)
        else:
            host.deliver(message, waiting)

    def _aggregators(self) -> dict[NodeId, AggregatorHost]:
        return {
            host.machine.node: host
            for host in self._hosts.values()
            if isinstance(host, AggregatorHost)
        }

    def _admin_routes(self) -> list[HttpRoute]:
        open_routes = self._operations.routes()
        if "coordinator" in self.roles:
            open_routes += dashboard_routes()
        return open_routes + self._administration()

    def _administration(self) -> list[HttpRoute]:
        """The admin API, with the supervisor beside it; without a coordinator only its status."""
        shared, server = self._resources, self.deployment.server
        state, blobs, now = shared.state, ThreadedBlobs(shared.blobs), shared.clock.now
        history = TaskHistory(state)
        coordinator = self._hosts.get("coordinator")

        def changed() -> None:
            if coordinator is not None:
                coordinator.deliver(Changed())

        live = self._live()
        service = AdminService(
            state,
            blobs,
            history,
            live,
            now,
            changed,
            server,
            identifies_devices=self.deployment.device_tokens not in ("shared", "none"),
            signs_device_tokens=self.deployment.device_tokens == "signed",
            has_seen=self._has_seen,
            evidence=self._evidence,
            coordinators=self._names.coordinators(),
        )
        identities = Identities(state, shared.admin_token, now, _provider(self.deployment.oidc))
        routes = AdminRoutes(service, identities)
        if not isinstance(live, CoordinatorLive):
            return routes.routes_of_every_role()
        supervisor = Supervisor(
            state,
            blobs,
            history,
            server,
            now,
            changed,
            endings=live.endings,
            judge_rollout=partial(rollouts.judge, service),
        )
        self._look_after(supervisor.run())
        self._operations.driver.registry.register(EvaluationCollector(history))
        return routes.routes()

    def _has_seen(self, device: str) -> bool | None:
        return None if self._door is None else self._door.has_seen(device)

    def _evidence(self) -> EvidenceView | None:
        deployment = self.deployment
        if not deployment.tsa_addresses and "aggregator" not in self.roles:
            return None
        found = public_log.newest_checkpoint(self._log)
        known = () if found is None else (found.origin, found.size, found.root.hex())
        return EvidenceView(deployment.tsa_platform, *known)

    def _live(self) -> Live:
        now, server = self._resources.clock.now, self.deployment.server
        machines = {role: host.machine for role, host in self._hosts.items()}
        coordinator = machines.get("coordinator")
        if isinstance(coordinator, Coordinator):
            live = CoordinatorLive(coordinator, now, self.roles, server.dead_after_s)
            self._look_after(self._upkeep.watch_clocks(live))
            return live
        [machine] = machines.values()
        assert isinstance(machine, Selector | Aggregator)
        return RoleLive(machine, now, self.roles, server)

    def _servers_routes(self) -> list[HttpRoute]:
        shared = self._resources
        checks_roles = self.deployment.has_mutual_tls
        secret = shared.server_token
        refusal = problem(401, "the servers' token is missing or wrong (server.token)")
        own = [message_route(shared.peers, checks_roles=checks_roles)]
        routes = guarded(own, secret, refusal)
        if "aggregator" in self.roles:
            chunks = self._own_uploads(self._limits).route()
            passed_on = [*participation_routes(self._to_aggregator), chunks]
            role = "selector" if checks_roles else ""
            routes += guarded(passed_on, secret, refusal, role)
        return routes


def _provider(config: OidcConfig | None) -> Provider | None:
    if config is None:
        return None
    try:
        from papaya.server.oidc import OidcProvider  # only if it is used: it needs PyJWT
    except ImportError as error:
        raise OperatorError(
            "the table [oidc] needs PyJWT, which is not installed",
            hint="pip install 'papaya-fl[oidc]'",
        ) from error
    return OidcProvider(config)


def _cannot_listen(name: str, where: str, error: ListenError) -> OperatorError:
    if error.is_in_use:
        host, _, port = where.rpartition(":")
        return OperatorError(
            f"{where} is in use by another program",
            hint=f"choose another port: --{name} {host}:PORT; or stop that program, which "
            f"`ss -ltnp 'sport = :{port}'` shows",
        )
    return OperatorError(str(error), hint="give an address of this machine and a port above 1023")
