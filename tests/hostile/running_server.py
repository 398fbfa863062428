"""A plain HTTP client, and a whole server for it in this process, on a thread of its own."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self
from zlib import crc32

import msgspec
import numpy as np

from papaya.clock import Clock
from papaya.config import AsyncFL, Deployment, ServerConfig, TaskConfig
from papaya.config.deployment import Role
from papaya.credentials.token_files import read_or_make
from papaya.learning import parameters
from papaya.server.auth import SignedTokens
from papaya.server.server import Server

CHUNK_BYTES = 64
MODEL_LENGTH = 40  # three chunks: 64 + 64 + 32 bytes
DEADLINE_S = 120.0


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def message(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found

    @property
    def kind(self) -> str:
        return str(self.message["type"])


class PatientConfig(ServerConfig, frozen=True, kw_only=True):
    """Short heartbeats, so that a server starts soon; but on a loaded machine no client is taken
    for dead between two of its requests. A server that is started again keeps room for the clients
    of its predecessor for as long, so give it a shorter `silent_s`.
    """

    heartbeat_s: float = 0.25
    hold_s: float = 0.5
    chunk_bytes: int = CHUNK_BYTES
    min_retry_s: float = 0.01
    silent_s: float = 120.0

    @property
    def dead_after_s(self) -> float:
        return self.silent_s

    @property
    def confirm_by_s(self) -> float:
        return self.silent_s


class PlainClient:
    """Plain HTTP to a server, whatever runs it, and the steps of a device."""

    data: Path
    device_tokens = "shared"

    def address(self, listener: str) -> tuple[str, int]:
        raise NotImplementedError

    def token(self, name: str) -> str:
        return (self.data / f"{name}.token").read_text().strip()

    # -- requests ---------------------------------------------------------------------------

    def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        listener: str = "devices",
    ) -> Answer:
        connection = http.client.HTTPConnection(*self.address(listener), timeout=DEADLINE_S)
        try:
            connection.request(method, path, body, headers or {})
            return _answer(connection.getresponse())
        finally:
            connection.close()

    def admin(self, method: str, path: str, body: bytes = b"") -> Answer:
        headers = {"Authorization": f"Bearer {self.token('admin')}"}
        return self.ask(method, path, body, headers, "admin")

    def post(self, path: str, message: dict[str, Any]) -> Answer:
        return self.ask("POST", f"/v1/{path}", json.dumps(message).encode())

    def post_until(self, path: str, message: dict[str, Any]) -> dict[str, Any]:
        """As a client does: the answer that is not a Retry."""
        asked = partial(self.post, path, message)
        found: dict[str, Any] = self.until(asked, lambda answer: answer.kind != "Retry").message
        return found

    def device_token(self, device: str) -> str:
        """What `papaya token make` prints, for `device_tokens = "signed"`."""
        return SignedTokens(read_or_make(self.data, "device.key")).make(device, 1.0).reveal()

    def check_in(self, *, device: str = "", **changes: Any) -> Answer:
        message = {"type": "CheckIn", "protocol": 1, "capabilities": {}, **changes}
        headers = {}
        if device:
            headers = {"Authorization": f"Bearer {self.device_token(device)}"}
        elif self.device_tokens == "shared":
            headers = {"Authorization": f"Bearer {self.token('device')}"}
        return self.ask("POST", "/v1/check-in", json.dumps(message).encode(), headers)

    def chunk(
        self,
        ticket: str,
        index: int,
        data: bytes,
        *,
        upload: str = "u1",
        checksum: str | None = None,
    ) -> Answer:
        headers = {
            "Papaya-Ticket": ticket,
            "Papaya-Crc32": f"{crc32(data):08x}" if checksum is None else checksum,
        }
        return self.ask("PUT", f"/v1/uploads/{upload}/chunks/{index}", data, headers)

    # -- the protocol, step by step -----------------------------------------------------------

    def submit(self, name: str = "words", **changes: Any) -> None:
        values: dict[str, Any] = {
            "task": name,
            "concurrency": 8,
            "model_length": MODEL_LENGTH,
            "regime": AsyncFL(changes.pop("aggregation_goal", 2)),
            "participation_gap_s": 0.0,
            "commit_interval_s": 0.01,
        }
        config = TaskConfig(**{**values, **changes})
        zero = np.zeros(config.model_length, np.float32)
        encoded = parameters.encode(zero, {"task": name, "version": "0"})
        path = f"/admin/tasks/{name}/parameters?model_length={config.model_length}"
        stored = self.admin("PUT", path, encoded)
        assert stored.status == 200, stored
        document = {"config": config, "parameters": stored.message["parameters"]}
        answer = self.admin("POST", "/admin/tasks", msgspec.json.encode(document))
        assert answer.status == 200, answer

    def join(self, device: str = "") -> dict[str, Any]:
        """A client that joined; its Joined message."""
        check_in = partial(self.check_in, device=device)
        accepted = self.until(check_in, lambda answer: answer.kind == "Accepted")
        return self.post_until("join", {"type": "Join", "ticket": accepted.message["ticket"]})

    def heartbeat(self, ticket: str) -> dict[str, Any]:
        return self.post("heartbeat", {"type": "Heartbeat", "ticket": ticket}).message

    def report(self, device: str = "") -> dict[str, Any]:
        """A client that reported; its UploadGranted message."""
        ticket = self.join(device)["ticket"]
        return self.post_until("report", {"type": "Report", "ticket": ticket, "examples": 1})

    def send_all(self, ticket: str, update: bytes, upload: str = "u1") -> Answer:
        for index, start in enumerate(range(0, len(update), CHUNK_BYTES)):
            piece = update[start : start + CHUNK_BYTES]
            answer = self.chunk(ticket, index, piece, upload=upload)
            assert answer.kind == "ChunkReceived", answer
        return self.complete(ticket, upload)

    def complete(self, ticket: str, upload: str = "u1") -> Answer:
        return self.post("complete", {"type": "Complete", "ticket": ticket, "upload": upload})

    def version(self, task: str = "words") -> int:
        return int(self.admin("GET", f"/admin/tasks/{task}").message["task"]["version"])

    def until(self, ask: Callable[[], Any], holds: Callable[[Any], bool]) -> Any:
        """Ask again until it holds. The server answers when it can; the deadline is for bugs."""
        ends_at = time.monotonic() + DEADLINE_S
        while not holds(answer := ask()):
            assert time.monotonic() < ends_at, answer
            time.sleep(0.01)
        return answer


class RunningServer(PlainClient):
    """`with RunningServer(folder) as server:`; port 0, so that many run at once."""

    def __init__(self, folder: Path, clock: Clock | None = None, **deployment: Any) -> None:
        self.data = folder / "data"
        self._server = Server(
            Deployment(
                data=str(self.data),
                devices="127.0.0.1:0",
                admin="127.0.0.1:0",
                drain_s=0.5,  # nobody ends the uploads that a test leaves open
                **{"server": PatientConfig(), **deployment},
            ),
            clock=clock,
        )
        self.device_tokens = self._server.deployment.device_tokens
        self._loop = asyncio.new_event_loop()
        # A daemon: a server that hangs fails its test, but does not keep pytest from ending.
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        # Stops what was started, in reverse order, even if one of them fails.
        self._stops = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._thread.start()
            stack.callback(self._stop_loop)
            self._start_all(stack)
            self._stops = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stops.close()

    def _start_all(self, stack: ExitStack) -> None:
        self._start_one(self._server, stack)

    def _start_one(self, server: Server, stack: ExitStack) -> None:
        self._run(server.start())
        stack.callback(lambda: self._run(server.stop()))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_S)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the loop does not stop"
        self._loop.close()

    def cut_off(self, node: str) -> None:
        """From now on, messages and requests for this node are lost; it can still send."""
        self._loop.call_soon_threadsafe(self._server._resources.peers.hosts.pop, node)

    def address(self, listener: str) -> tuple[str, int]:
        host, port = self._server.addresses[listener].rsplit(":", 1)
        return host, int(port)


class RunningRoles(RunningServer):
    """Each role is a server of its own. They share a loop, and talk over HTTP."""

    def __init__(self, folder: Path, **deployment: Any) -> None:
        super().__init__(folder, servers="127.0.0.1:0", **deployment)
        self._roles: dict[Role, Server] = {}

    def _start_all(self, stack: ExitStack) -> None:
        self._start_role("coordinator", self._server.deployment, stack)
        where = (self._roles["coordinator"].addresses["servers"],)
        for role in ("selector", "aggregator"):
            own = msgspec.structs.replace(self._server.deployment, coordinators=where)
            self._start_role(role, own, stack)

    def _start_role(self, role: Role, deployment: Deployment, stack: ExitStack) -> None:
        server = Server(deployment, (role,))
        self._start_one(server, stack)
        self._roles[role] = server

    def address(self, listener: str) -> tuple[str, int]:
        """Devices connect to the selector, operators to the coordinator."""
        role: Role = "selector" if listener == "devices" else "coordinator"
        return self.address_of(role, listener)

    def address_of(self, role: Role, listener: str) -> tuple[str, int]:
        host, port = self._roles[role].addresses[listener].rsplit(":", 1)
        return host, int(port)

    def relayed_chunk(self, ticket: str, data: bytes) -> Answer:
        """The answer of the aggregator to a selector that relays a chunk."""
        where = self.address_of("aggregator", "servers")
        connection = http.client.HTTPConnection(*where, timeout=DEADLINE_S)
        try:
            headers = {
                "Authorization": f"Bearer {self.token('server')}",
                "Papaya-Ticket": ticket,
                "Papaya-Crc32": f"{crc32(data):08x}",
            }
            connection.request("PUT", "/v1/uploads/u1/chunks/0", data, headers)
            return _answer(connection.getresponse())
        finally:
            connection.close()

    def open_relayed_chunk(self, ticket: str, length: int) -> socket.socket:
        """A chunk that a selector has begun to relay. Its device sends nothing more."""
        line = socket.create_connection(self.address_of("aggregator", "servers"), DEADLINE_S)
        head = (
            "PUT /v1/uploads/u1/chunks/0 HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {self.token('server')}\r\nContent-Length: {length}\r\n"
            f"Papaya-Ticket: {ticket}\r\nPapaya-Crc32: 00000000\r\n\r\n"
        )
        line.sendall(head.encode() + b"0")
        return line

    def metric(self, role: Role, line: str) -> float:
        """The value of the metric whose name and labels are `line`."""
        connection = http.client.HTTPConnection(*self.address_of(role, "admin"), timeout=DEADLINE_S)
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        [found] = (value for name, _, value in map(split, text.splitlines()) if name == line)
        return float(found)


def _answer(response: http.client.HTTPResponse) -> Answer:
    headers = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, headers, response.read())


def split(line: str) -> tuple[str, str, str]:
    return line.rpartition(" ")


def sealed(ticket: bytes) -> str:
    return b64encode(ticket).decode()
