"""Both ends of a connection for tests: real sockets on loopback, and a transport made of lists."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from ssl import PROTOCOL_TLS_SERVER, SSLContext, create_default_context
from typing import Any, NamedTuple, TypeVar

import uvloop
from msgspec import structs

from papaya.http.client_connection import Response as PeerResponse
from papaya.http.errors import HttpError
from papaya.http.exchange import Exchange, Headers
from papaya.http.limits import ListenerLimits, PeerLimits
from papaya.http.listener import Listener, ListenerState, plain_problem, serve
from papaya.http.pool import ConnectionPool
from papaya.http.routes import Buffered, HttpRoute, Streamed
from papaya.http.server_connection import ServerConnection
from papaya.http.tls import Tls

T = TypeVar("T")

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
# For attacks that must be noticed soon.
IMPATIENT = ListenerLimits(
    head_timeout_s=0.1,
    idle_timeout_s=0.1,
    body_timeout_s=0.1,
    write_timeout_s=0.1,
    answer_pause_s=0.1,
    linger_s=0.1,
    sweep_s=0.02,
)
PATIENCE_S = 180.0
# For everything else: a busy machine is slower than the limits for real peers.
PATIENT = ListenerLimits(
    head_timeout_s=PATIENCE_S,
    idle_timeout_s=PATIENCE_S,
    body_timeout_s=PATIENCE_S,
    write_timeout_s=PATIENCE_S,
    answer_pause_s=PATIENCE_S,
)


def run(main: Coroutine[Any, Any, T], loop: str = "uvloop") -> T:
    async def in_time() -> T:
        return await asyncio.wait_for(main, PATIENCE_S)

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        return runner.run(in_time())


class PatientPool(ConnectionPool):
    """Waits for connections and answers for as long as `run` lets a test take."""

    def __init__(self, *, limits: PeerLimits | None = None, tls: Tls | None = None) -> None:
        times = {"connect_timeout_s": PATIENCE_S, "idle_s": PATIENCE_S}
        super().__init__(limits=structs.replace(limits or PeerLimits(), **times), tls=tls)

    async def request(
        self,
        address: str,
        method: str,
        path: str,
        headers: Headers = (),
        body: bytes = b"",
        timeout_s: float = PATIENCE_S,
    ) -> PeerResponse:
        return await super().request(address, method, path, headers, body, timeout_s)


class Response(NamedTuple):
    """An answer as a raw client reads it."""

    status: int
    headers: dict[str, str]
    body: bytes


def a_request(
    method: str, path: str, body: bytes = b"", headers: Sequence[tuple[str, str]] = ()
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: test", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def responses_of(data: bytes, heads_only: bool = False) -> list[Response]:
    """Every answer in what a server sent, "100 Continue" too."""
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        length = 0 if heads_only else int(headers.get("content-length", "0"))
        assert len(data) >= length, "the answer is shorter than its Content-Length"
        found.append(Response(int(first.split()[1]), headers, data[:length]))
        data = data[length:]
    return found


class Client:
    """A raw client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def response(self, heads_only: bool = False) -> Response:
        head = await self.reader.readuntil(b"\r\n\r\n")
        (response,) = responses_of(head, heads_only=True)
        length = 0 if heads_only else int(response.headers.get("content-length", "0"))
        return response._replace(body=await self.reader.readexactly(length))

    async def ask(self, method: str, path: str, body: bytes = b"") -> Response:
        self.send(a_request(method, path, body))
        return await self.response()

    async def rest(self) -> bytes:
        """Everything until the server closes, or cuts us off."""
        data = b""
        with suppress(ConnectionResetError):
            while piece := await self.reader.read(1 << 16):
                data += piece
        return data

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


class PeerMistake(Exception):
    """What a route raises when its peer is at fault."""


def blame(error: Exception) -> HttpError | None:
    return HttpError(400, str(error)) if isinstance(error, PeerMistake) else None


@asynccontextmanager
async def a_client(port: int, **options: Any) -> AsyncIterator[Client]:
    client = Client(*await asyncio.open_connection("127.0.0.1", port, **options))
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def a_server(
    routes: Iterable[HttpRoute], limits: ListenerLimits = PATIENT, ssl: Any = None
) -> AsyncIterator[Listener]:
    listening = await serve(
        routes, "127.0.0.1", 0, limits=limits, blame=blame, tls=None if ssl is None else Tls(ssl)
    )
    try:
        yield listening
    finally:
        await listening.drain(0)


def answers(routes: list[HttpRoute], *requests: bytes, loop: str = "uvloop") -> list[Response]:
    """The answers to requests that are sent one after the other on one connection."""

    async def main() -> list[Response]:
        async with a_server(routes) as server, a_client(server.port) as client:
            found = []
            for request in requests:
                client.send(request)
                found.append(await client.response(request.startswith(b"HEAD")))
            return found

    return run(main(), loop)


class Collector:
    """A receiver that remembers everything, with rooms of a given size."""

    def __init__(self, exchange: Exchange, room_bytes: int = 1000) -> None:
        self.exchange = exchange
        self.room = memoryview(bytearray(room_bytes))
        self.body = b""
        self.ends: list[str] = []

    def buffer(self, remaining: int) -> memoryview:
        return self.room

    def received(self, count: int) -> None:
        assert not self.ends
        self.body += self.room[:count]

    def finished(self) -> None:
        self.ends.append("finished")
        self.exchange.answer(200, self.body)

    def broken(self) -> None:
        self.ends.append("broken")


class Shop:
    """Routes that show what reached them."""

    def __init__(self, room_bytes: int = 1000) -> None:
        self.seen: list[tuple[str, str, bytes]] = []
        self.receivers: list[Collector] = []
        self.held: list[Exchange] = []
        self._room_bytes = room_bytes
        self.routes: list[HttpRoute] = [
            Buffered("POST", "/echo", self.echo, 100_000),
            Buffered("GET", "/echo", self.echo),
            Buffered("POST", "/hold", lambda exchange, _: self.held.append(exchange), 1000),
            Streamed("PUT", "/stream/{name}", self.stream, 32 << 20),
        ]

    def echo(self, exchange: Exchange, body: bytes) -> None:
        self.seen.append((exchange.head.method, exchange.head.path, body))
        exchange.answer(200, body)

    def stream(self, exchange: Exchange) -> Collector:
        receiver = Collector(exchange, self._room_bytes)
        self.receivers.append(receiver)
        return receiver


class ListTransport(asyncio.Transport):
    """A transport that the test feeds by hand, piece by piece."""

    def __init__(self, service: ListenerState) -> None:
        super().__init__({"peername": ("192.0.2.1", 4711)})
        self.sent = b""
        self.is_paused = False
        self.waiting = b""
        self._closing = False
        self._loop = service.loop
        self.endpoint = ServerConnection(service)
        self.endpoint.connection_made(self)

    def feed(self, data: bytes) -> None:
        self.waiting += data
        while self.waiting and not self.is_paused and not self._closing:
            room = self.endpoint.get_buffer(-1)
            count = min(len(room), len(self.waiting))
            room[:count] = self.waiting[:count]
            self.waiting = self.waiting[count:]
            self.endpoint.buffer_updated(count)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self.endpoint.connection_lost, None)

    abort = close

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        assert not self.is_paused
        self.is_paused = True

    def resume_reading(self) -> None:
        assert self.is_paused
        self.is_paused = False
        self._loop.call_soon(self.feed, b"")

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass


@asynccontextmanager
async def a_service(
    routes: Iterable[HttpRoute], limits: ListenerLimits | None = None
) -> AsyncIterator[ListenerState]:
    service = ListenerState(routes, plain_problem, limits or ListenerLimits())
    try:
        yield service
    finally:
        await service.empty(0)


def a_certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *(
                "-nodes",
                "-days",
                "2",
                "-subj",
                "/CN=test",
                "-addext",
                "subjectAltName=IP:127.0.0.1",
            ),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


def tls_contexts(folder: Path) -> tuple[SSLContext, SSLContext]:
    """The server's and the client's."""
    certificate, key = a_certificate(folder)
    server = SSLContext(PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    return server, create_default_context(cafile=certificate)
