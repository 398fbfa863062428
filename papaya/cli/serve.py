"""`papaya serve`: all roles in one process, or one role alone.

    papaya serve                                everything, on this machine, without a file
    papaya serve --config papaya.toml           with addresses, TLS, tokens and limits of your own
    papaya serve aggregator --config ...        one role; the others run elsewhere

Addresses go to stdout, everything else to stderr. SIGTERM or SIGINT stops the server cleanly,
within `drain_s`; an aggregator that waits for others to take its tasks needs up to three heartbeats
more. Killing it loses nothing that was acknowledged. If a part of the server fails, it stops with
exit code 70, so that a supervisor can restart it.

`papaya serve tsa` runs the TSA of secure aggregation in its own process. It prints its address and
nothing else. On the platform `software` its evidence proves nothing, and it says so. It listens on
this machine only: `papaya serve tsa-gate` passes connections of aggregators on other machines on to
it, with mutual TLS.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from papaya.attestation.software import SoftwarePlatform
from papaya.cli.deployment import DeploymentOptions, add_deployment
from papaya.cli.output import (
    Commands,
    add_format,
    bind,
    note,
    plural,
    positive,
    print_data,
    print_json,
)
from papaya.config import Deployment
from papaya.config.deployment import ROLES, Role
from papaya.errors import InvariantError, OperatorError
from papaya.messages.events import Level, ServerStopping
from papaya.server.logs import LogFormat, log, start_logging
from papaya.server.open_files import raise_limit
from papaya.server.server import Server
from papaya.server.tsa_gate import TsaGate
from papaya.tsa.evidence import REPORT_DATA_BYTES, EvidenceError, Gramine, Platform, Tdx
from papaya.tsa.measurement import measure
from papaya.tsa.process import serve_until_signal

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_TSA = "unix:papaya-tsa.sock"
_GATE = "tls:127.0.0.1:8760"


@dataclass(frozen=True, kw_only=True)
class ServeOptions(DeploymentOptions):
    role: Role | Literal["tsa", "tsa-gate"] | None = None
    heartbeat: float | None = None
    listen: str | None = None
    tsa: str = _TSA
    platform: Literal["software", "sgx", "tdx"] = "software"
    log_format: LogFormat | None = None
    log_level: Level | None = None


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "serve",
        description="Run the servers. Without arguments: coordinator, selector and aggregator in "
        "one process, with their data in ./papaya-data. Options override the configuration file.",
    )
    parser.add_argument(
        "role",
        nargs="?",
        choices=(*ROLES, "tsa", "tsa-gate"),
        help="role to run (default: coordinator, selector and aggregator together)",
    )
    defaults, servers = Deployment(), parser.add_argument_group("servers")
    add_deployment(servers)
    servers.add_argument(
        "--heartbeat",
        type=positive,
        metavar="S",
        help=f"heartbeat interval, in seconds (default: {defaults.server.heartbeat_s:g})",
    )
    tsa = parser.add_argument_group("papaya serve tsa, papaya serve tsa-gate")
    tsa.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="address to listen on; with tsa: unix:/path/to/socket or tcp:127.0.0.1:PORT "
        f"(default: {_TSA}); with tsa-gate: tls:HOST:PORT (default: {_GATE})",
    )
    tsa.add_argument(
        "--tsa",
        metavar="ADDRESS",
        help=f"with tsa-gate: address of the TSA behind it (default: {_TSA})",
    )
    tsa.add_argument(
        "--platform",
        choices=("software", "sgx", "tdx"),
        help="platform that attests the TSA; software proves nothing and is for tests only",
    )
    parser.add_argument(
        "--log-format",
        choices=get_args(LogFormat),
        help=f"format of the log on stderr (default: {defaults.log_format})",
    )
    parser.add_argument(
        "--log-level",
        choices=get_args(Level),
        help=f"log events from this level on (default: {defaults.log_level})",
    )
    add_format(parser)
    bind(parser, ServeOptions, run)


def run(options: ServeOptions) -> int:
    if options.role == "tsa":
        start_logging(options.log_level or "info", options.log_format or "text")
        return run_tsa(options)
    deployment = _deployment(options)
    start_logging(deployment.log_level, deployment.log_format)
    if options.role == "tsa-gate":
        gate = _serve_gate(TsaGate(deployment, options.listen or _GATE, options.tsa))
        _run(gate)
        return 0
    roles: tuple[Role, ...] = ROLES if options.role is None else (options.role,)
    _run(_serve(deployment, roles, options.is_json))
    return 0


def _run(work: Coroutine[Any, Any, None]) -> None:
    runner = asyncio.Runner(loop_factory=_loop_factory())
    try:
        runner.run(work)
    finally:
        with suppress(RuntimeError):  # it starts a thread, which fails at a limit on threads
            runner.close()


def _deployment(options: ServeOptions) -> Deployment:
    found = options.deployment()
    changes = {
        "log_format": options.log_format or found.log_format,
        "log_level": options.log_level or found.log_level,
    }
    server = found.server
    if options.heartbeat is not None:
        server = msgspec.structs.replace(server, heartbeat_s=options.heartbeat)
    return msgspec.structs.replace(found, server=server, **changes)


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        note("uvloop is not installed, so the server is slower: pip install 'papaya-fl[serve]'")
        return None
    loop: type[asyncio.AbstractEventLoop] = uvloop.Loop
    return loop


async def _serve(deployment: Deployment, roles: tuple[Role, ...], is_json: bool) -> None:
    server = Server(deployment, roles, open_files=raise_limit())
    await server.start()
    stopping = _stopping()
    try:
        _say_where(server, is_json)
        await _first(stopping, server.failed)
        why = str(server.failure or "a part of it failed") if server.failed.is_set() else "a signal"
        log(ServerStopping(why))
        waits = f": waiting for {plural(server.uploads, 'upload')} in progress"
        note(f"stopping{waits if server.uploads else ''}")
    finally:
        await server.stop()
    note("stopped")
    if server.failed.is_set():
        raise server.failure or InvariantError(
            "a part of the server failed, so the server stopped",
            hint="restart it (nothing acknowledged is lost) and report the log above",
        )


def _stopping() -> asyncio.Event:
    """Set by SIGTERM or SIGINT."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, stopping.set)
    return stopping


async def _serve_gate(gate: TsaGate) -> None:
    print_data(await gate.bind())
    await gate.run(_stopping())


async def _first(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def _say_where(server: Server, is_json: bool) -> None:
    data = Path(server.deployment.data)
    if is_json:
        where = {"data": str(data), "roles": server.roles, "addresses": server.addresses}
        print_json(where)
        return
    scheme = "http" if server.deployment.tls_certificate is None else "https"
    lines = [f"papaya serves {', '.join(server.roles)}; data in {data}"]
    lines += [f"  {name:8} {scheme}://{where}" for name, where in server.addresses.items()]
    print_data("\n".join(lines))
    if scheme == "http":
        note("INSECURE: no TLS; fine on one machine, otherwise set tls_certificate and tls_key")
    elif not server.deployment.servers_tls:
        note("INSECURE: servers_tls = false; use it only on a network that nobody else can read")
    host = server.addresses.get("servers", "127.0.0.1:0").rpartition(":")[0]
    if not (server.deployment.has_mutual_tls or host.startswith("127.") or host == "[::1]"):
        note(
            "INSECURE: other servers need only a token on a network; set servers_certificate, "
            "servers_key and servers_authority"
        )


def run_tsa(options: ServeOptions) -> int:
    platform = _platform(options.platform)
    if platform.name == "software":
        note("INSECURE: software evidence proves nothing; use it for tests only")
    else:
        _prove_once(platform)
    listen = options.listen or _TSA
    try:
        serve_until_signal(listen, print_data, platform.quote)
    except (OSError, ValueError) as error:
        raise OperatorError(
            f"the TSA cannot listen on {listen}: {error}",
            hint="use unix:/path/to/socket or tcp:127.0.0.1:PORT; for other machines run "
            "papaya serve tsa-gate beside it",
        ) from error
    return 0


def _prove_once(platform: Platform) -> None:
    """Fail at the start if there is no evidence, because devices would refuse this TSA."""
    try:
        platform.quote(bytes(REPORT_DATA_BYTES))
    except EvidenceError as error:
        raise OperatorError(
            f"no {platform.name} evidence here: {error}",
            hint="see docs/deploy-tsa.md; for tests: --platform software",
        ) from error


def _platform(name: str) -> Platform:
    match name:
        case "sgx":
            return Gramine()
        case "tdx":
            return Tdx()
    return SoftwarePlatform(measure())
