"""`papaya serve`: all roles in one process, or one role alone.

    papaya serve                                everything, on this machine, without a file
    papaya serve --config papaya.toml           with addresses, TLS, tokens and limits of your own
    papaya serve aggregator --config ...        one role; the others run elsewhere

It says where it listens on stdout and everything else on stderr. SIGTERM or SIGINT stops it
cleanly, within `drain_s`. Killing it loses nothing that was acknowledged. A server of which a part
has failed stops with exit code 70, for whoever supervises it to start it again.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

import msgspec

from papaya.attestation.software import SoftwarePlatform
from papaya.cli.output import Commands, add_format, note, positive, print_data, print_json
from papaya.config import Deployment
from papaya.config.deployment import ROLES, Role
from papaya.errors import InvariantError, OperatorError
from papaya.server.deployment_file import read_deployment
from papaya.server.open_files import raise_limit
from papaya.server.server import Server
from papaya.tsa.evidence import REPORT_DATA_BYTES, EvidenceError, Gramine, Platform, Tdx
from papaya.tsa.measurement import measure
from papaya.tsa.process import serve_until_signal

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "serve",
        description="Run Papaya's servers. Without arguments: coordinator, selector and "
        "aggregator in one process, with their data in ./papaya-data.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("role", nargs="?", choices=(*ROLES, "tsa"), help="run this role alone")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file of settings")
    parser.add_argument("--data", metavar="DIR", help="the folder of state, blobs and tokens")
    parser.add_argument("--devices", metavar="ADDRESS", help="host:port for devices")
    parser.add_argument("--admin", metavar="ADDRESS", help="host:port of the admin API")
    parser.add_argument("--servers", metavar="ADDRESS", help="host:port for other servers")
    parser.add_argument(
        "--heartbeat", type=positive, metavar="S", help="the one heartbeat, in seconds"
    )
    parser.add_argument(
        "--listen",
        default="unix:papaya-tsa.sock",
        metavar="ADDRESS",
        help="of the TSA (tsa): unix:/path or tcp:127.0.0.1:port",
    )
    parser.add_argument(
        "--platform",
        choices=("software", "sgx", "tdx"),
        default="software",
        help="what vouches for the TSA (tsa)",
    )
    parser.add_argument("--verbose", action="store_true", help="log more")
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    logging.basicConfig(
        level=logging.INFO if options.verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    if options.role == "tsa":
        return run_tsa(options)
    deployment = _deployment(options)
    roles: tuple[Role, ...] = ROLES if options.role is None else (options.role,)
    serve = _serve(deployment, roles, options.format == "json")
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(serve)
    return 0


def _deployment(options: argparse.Namespace) -> Deployment:
    found = Deployment() if options.config is None else read_deployment(options.config)
    given = {
        field: value
        for field in ("data", "devices", "admin", "servers")
        if (value := getattr(options, field)) is not None
    }
    if options.heartbeat is not None:
        given["server"] = msgspec.structs.replace(found.server, heartbeat_s=options.heartbeat)
    return msgspec.structs.replace(found, **given)


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        note("uvloop is not installed: the server will be slower; pip install 'papaya-fl[serve]'")
        return None
    loop: type[asyncio.AbstractEventLoop] = uvloop.Loop
    return loop


async def _serve(deployment: Deployment, roles: tuple[Role, ...], is_json: bool) -> None:
    server = Server(deployment, roles, open_files=raise_limit())
    await server.start()
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, stopping.set)
    try:
        _say_where(server, is_json)
        await _first(stopping, server.failed)
        note("stopping: uploads that are on their way may finish")
    finally:
        await server.stop()
    if server.failed.is_set():
        raise InvariantError(
            "a part of the server has failed, so the server has stopped",
            hint="nothing acknowledged is lost: start it again, and report the log above",
        )


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


def run_tsa(options: argparse.Namespace) -> int:
    platform = _platform(options.platform)
    if platform.name == "software":
        note("INSECURE: software evidence proves nothing; use it to try things out")
    else:
        _prove_once(platform)
    try:
        serve_until_signal(options.listen, print_data, platform.quote)
    except (OSError, ValueError) as error:
        raise OperatorError(
            f"the TSA cannot listen on {options.listen}: {error}",
            hint="use unix:/path/to/socket or tcp:127.0.0.1:PORT",
        ) from error
    return 0


def _prove_once(platform: Platform) -> None:
    """Devices would refuse what cannot be proven: better to hear of it now."""
    try:
        platform.quote(bytes(REPORT_DATA_BYTES))
    except EvidenceError as error:
        raise OperatorError(
            f"no {platform.name} evidence here: {error}",
            hint="see docs/deploy-tsa.md; to try things out: --platform software",
        ) from error


def _platform(name: str) -> Platform:
    match name:
        case "sgx":
            return Gramine()
        case "tdx":
            return Tdx()
    return SoftwarePlatform(measure())
