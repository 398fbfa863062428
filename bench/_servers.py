"""Real server processes for benchmarks: started by `papaya serve`, measured from /proc, stopped.

CPU time is what the kernel charges the processes, user and system, threads included. On a machine
that others use too it says more than wall time does.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
import numpy as np
from msgspec import NODEFAULT, Struct, structs

from papaya.config import Deployment, ServerConfig, TaskConfig
from papaya.learning import parameters
from papaya.learning.parameters import Vector

PAPAYA = str(Path(sys.executable).with_name("papaya"))
ANY_PORT = "127.0.0.1:0"
_BALANCER = Path(__file__).parents[1] / "deploy" / "haproxy" / "haproxy.cfg"
# These need root, or more open files than a benchmark may have.
_FOR_SERVICES = "  user haproxy\n  group haproxy\n  chroot /var/lib/haproxy\n  maxconn 20000\n"
Uploads = Literal["", "direct", "haproxy", "selector"]
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PATIENCE_S = 60.0
_POLL_S = 0.05


class Servers:
    """Processes by what they run: `server`, or the roles. The second of a role is `ROLE 2`."""

    def __init__(self, data: Path, program: tuple[str, ...]) -> None:
        self.data = data
        self.program = program  # how `papaya` is started
        self.pids: dict[str, int] = {}
        self.addresses: dict[str, dict[str, str]] = {}
        self.context: ssl.SSLContext | None = None  # of whoever calls them; None without TLS

    @property
    def devices(self) -> tuple[str, int]:
        return _host_and_port(self._of("selector")["devices"])

    def doors(self) -> list[tuple[str, int]]:
        """Where devices may connect: the address of each selector."""
        found = (where for name, where in self.addresses.items() if name.startswith("selector"))
        return [_host_and_port(where["devices"]) for where in found]

    def token(self, name: str = "device.token") -> str:
        return (self.data / name).read_text(encoding="ascii").strip()

    def cpu_s(self) -> dict[str, float]:
        """Used so far, by each process."""
        return {name: cpu_s(pid) for name, pid in self.pids.items()}

    def written_bytes(self) -> int:
        """What all of them have sent to storage so far."""
        return sum(_written_bytes(pid) for pid in self.pids.values())

    def metric(self, name: str, process: str = "aggregator") -> float:
        """Of an aggregator; 0 while it does not have it."""
        text = self._answer(self._of(process)["admin"], "GET", "/metrics").decode()
        lines = (line.rpartition(" ") for line in text.splitlines() if line.startswith(name))
        return sum(float(value) for series, _, value in lines if series.split("{")[0] == name)

    def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The admin API."""
        token = self.token("admin.token")
        return self._answer(self._of("coordinator")["admin"], method, path, body, token)

    def submit(self, config: TaskConfig, vector: Vector) -> None:
        """And wait until an aggregator serves it."""
        self.add_task(config, vector)
        wait_until(lambda: self.metric("papaya_task_serving") == 1, "the task is served")

    def add_task(self, config: TaskConfig, vector: Vector) -> None:
        data = parameters.encode(vector, {"task": config.task, "version": "0"})
        path = f"/admin/tasks/{config.task}/parameters?model_length={config.model_length}"
        stored = json.loads(self.ask("PUT", path, data))
        settings = _without_defaults(config)
        task = {"config": settings, "parameters": stored["parameters"], "manifest": []}
        self.ask("POST", "/admin/tasks", msgspec.json.encode(task))

    def newest(self, task: str, length: int) -> tuple[int, Vector]:
        """The newest version and its parameters."""
        found = json.loads(self.ask("GET", f"/admin/tasks/{task}/versions"))
        version = max(row["version"] for row in found)
        path = f"/admin/tasks/{task}/versions/{version}/parameters"
        return version, np.array(parameters.decode(self.ask("GET", path), length))

    def _of(self, role: str) -> dict[str, str]:
        return self.addresses.get("server") or self.addresses[role]

    def _answer(
        self, address: str, method: str, path: str, body: bytes = b"", token: str = ""
    ) -> bytes:
        host, port = _host_and_port(address)
        connection = (
            http.client.HTTPConnection(host, port, timeout=_PATIENCE_S)
            if self.context is None
            else http.client.HTTPSConnection(host, port, timeout=_PATIENCE_S, context=self.context)
        )
        try:
            connection.request(method, path, body, {"Authorization": f"Bearer {token}"})
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        require(response.status < 300, f"{method} {path}: {response.status} {answer[:200]!r}")
        return answer


@contextmanager
def running(
    server: ServerConfig,
    *,
    apart: bool,
    program: tuple[str, ...] = (PAPAYA,),
    selectors: int = 1,
    aggregators: int = 1,
    uploads: Uploads = "",
    **settings: object,
) -> Iterator[Servers]:
    """All roles in one process, or each in its own, with nothing on disk before or after.

    `uploads`: "direct": devices upload to the aggregators themselves. "haproxy" or "selector": it
    finds the only aggregator by its name and passes TLS through. "": selectors relay uploads.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="papaya-bench-")))
        servers = Servers(folder / "data", program)
        if "tls_authority" in settings:
            servers.context = ssl.create_default_context(cafile=str(settings["tls_authority"]))
        common = {"data": "data", "devices": ANY_PORT, "admin": ANY_PORT, "servers": ANY_PORT}
        deployment = Deployment(server=server, **common | settings)  # type: ignore[arg-type]
        if not apart:
            _start(stack, servers, folder, deployment, "server")
        else:
            _start(stack, servers, folder, deployment, "coordinator")
            where = servers.addresses["coordinator"]["servers"]
            deployment = msgspec.structs.replace(deployment, coordinators=(where,))
            front, aggregator = deployment, deployment
            if uploads in ("haproxy", "selector"):
                aggregator = _under_a_name(deployment)
            if uploads == "selector":
                front = _in_front_of(aggregator, deployment)
            for role, count in (("selector", selectors), ("aggregator", aggregators)):
                for number in range(count):
                    name = role if number == 0 else f"{role} {number + 1}"
                    own = front if role == "selector" else aggregator
                    if uploads == "direct" and role == "aggregator":
                        own = _with_upload_url(deployment)
                    _start(stack, servers, folder, own, name)
            if uploads == "haproxy":
                _start_balancer(stack, servers, folder, aggregator)
        yield servers


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def _under_a_name(deployment: Deployment) -> Deployment:
    """Settings of the only aggregator, which devices reach under the name `localhost`."""
    return msgspec.structs.replace(
        deployment,
        devices=f"127.0.0.1:{_free_port()}",
        upload_url=f"https://localhost:{_free_port()}",
        proxies=("127.0.0.1",),
    )


def _in_front_of(aggregator: Deployment, deployment: Deployment) -> Deployment:
    """Settings of a selector that passes TLS through to the aggregator."""
    where = f"127.0.0.1:{urlsplit(aggregator.upload_url).port}"
    routes = {"localhost": aggregator.devices}
    return msgspec.structs.replace(deployment, devices=where, upload_routes=routes)


def _start_balancer(
    stack: ExitStack, servers: Servers, folder: Path, aggregator: Deployment
) -> None:
    """haproxy, with the configuration that we ship."""
    program = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
    require(program is not None, "haproxy is not installed (hint: apt-get install haproxy)")
    port = urlsplit(aggregator.upload_url).port
    text = _BALANCER.read_text(encoding="ascii")
    for shipped, own in (
        ("  bind :443", f"  bind 127.0.0.1:{port}"),
        ("aggregator-1.uploads.example", "localhost"),
        ("aggregator-1.internal:8750", aggregator.devices),
        (_FOR_SERVICES, ""),
    ):
        require(shipped in text, f"{_BALANCER} has no {shipped}")
        text = text.replace(shipped, own)
    # Nothing listens at port 1: the other servers do not run here.
    text = re.sub(r"(?:selector|aggregator)-\d\.internal:8750", "127.0.0.1:1", text)
    file = folder / "haproxy.cfg"
    file.write_text(text, encoding="ascii")
    process = subprocess.Popen([str(program), "-q", "-db", "-f", str(file)])
    stack.callback(_stop, process)
    servers.pids["haproxy"] = process.pid

    def passes_on() -> bool:
        assert servers.context is not None
        try:
            with socket.create_connection(("127.0.0.1", port), _PATIENCE_S) as plain:
                servers.context.wrap_socket(plain, server_hostname="localhost").close()
        except OSError:
            return False
        return True

    wait_until(passes_on, "haproxy passes connections on")


def _with_upload_url(deployment: Deployment) -> Deployment:
    where = f"127.0.0.1:{_free_port()}"
    scheme = "http" if deployment.tls_certificate is None else "https"
    url = f"{scheme}://{where}"
    return msgspec.structs.replace(deployment, devices=where, upload_url=url)


def make_certificate(folder: Path) -> dict[str, Any]:
    """The settings of servers on this machine with TLS: one certificate, its own authority."""
    certificate, key = str(folder / "certificate.pem"), str(folder / "key.pem")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    names = ["-subj", "/CN=bench", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run(
        [*command.split(), *names, "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    return {"tls_certificate": certificate, "tls_key": key, "tls_authority": certificate}


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Polls: these are other processes."""
    ends_at = time.monotonic() + _PATIENCE_S
    while not condition():
        require(time.monotonic() < ends_at, f"not after {_PATIENCE_S:g} s: {what}")
        time.sleep(_POLL_S)


def require(holds: bool, problem: str) -> None:
    if not holds:
        print(f"wrong result: {problem}", file=sys.stderr)
        sys.exit(1)


def cpu_s(pid: int) -> float:
    """User and system time of a process, threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def report(
    bench: str, case: str, value: float | None, target: float | None, passed: bool, **more: object
) -> None:
    """`value`: None if the run is invalid."""
    shown = None if value is None else round(value, 4)
    line = {"bench": bench, "case": case, "value": shown, "target": target}
    print(json.dumps(line | {"passed": passed} | more, ensure_ascii=False), flush=True)


def _start(
    stack: ExitStack, servers: Servers, folder: Path, deployment: Deployment, name: str
) -> None:
    settings = folder / f"{name}.toml"
    settings.write_text(deployment_toml(deployment), encoding="utf-8")
    role = [] if name == "server" else [name.partition(" ")[0]]
    process = subprocess.Popen(
        [*servers.program, "serve", *role, "--config", str(settings), "--format", "json"],
        stdout=subprocess.PIPE,
        stderr=None if os.environ.get("PAPAYA_BENCH_LOG") else subprocess.DEVNULL,
    )
    stack.callback(_stop, process)
    assert process.stdout is not None
    line = process.stdout.readline()
    require(bool(line), f"{name} did not start")
    servers.pids[name] = process.pid
    servers.addresses[name] = json.loads(line)["addresses"]


def deployment_toml(deployment: Deployment) -> str:
    """Its strings, numbers and lists of them are written in TOML as they are in JSON."""
    found = _without_defaults(deployment)
    server, routes = found.pop("server", {}), found.pop("upload_routes", {})
    lines = [f"{k} = {json.dumps(v)}" for k, v in found.items()]
    if routes:
        lines += ["[upload_routes]", *(f'"{name}" = "{to}"' for name, to in routes.items())]
    return "\n".join([*lines, "[server]", *(f"{k} = {v!r}" for k, v in server.items())])


def _without_defaults(settings: Struct) -> dict[str, Any]:
    """The settings that differ from the defaults of this version: an earlier one does not know all
    of them. It has its own default for each of the others.
    """
    found: dict[str, Any] = msgspec.to_builtins(settings)
    for field in structs.fields(settings):
        value, make = getattr(settings, field.name), field.default_factory
        if value == (field.default if make is NODEFAULT else make()):
            del found[field.name]
        elif isinstance(value, Struct):
            found[field.name] = _without_defaults(value)
    return found


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _written_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
