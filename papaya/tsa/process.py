"""The TSA as its own process: one thread, many connections, one request at a time each.

The loop behind `papaya serve tsa`. When nobody has asked anything for a moment it sums waiting
seeds, so that a release finds its sum ready. A connection is not read while its answer is being
sent, so a peer that does not read costs one answer of memory, which is a view of the sum. Nor is it
read while requests of it wait: each connection gets a few answers per turn of the loop. A
connection that announces too long a request is closed; one too many closes the connection that was
silent longest or, if too many have not authenticated, the first of these. No peer can end the
process, nor can a lack of memory: only the `stop` socket can. It logs nothing and writes nothing.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from typing import Final

from papaya.tsa import endpoint, wire
from papaya.tsa.service import MakeEvidence, ReplyParts, TsaService, TsaSession
from papaya.tsa.tsa import TSA, TsaLimits

MAX_CONNECTIONS: Final = 64
MAX_STRANGERS: Final = 16  # of them; connections that have not proved a key
REQUESTS_PER_TURN: Final = 4  # of one connection, before the others are served
ADMISSIONS_PER_TURN: Final = 4  # few: each may close a stranger that is about to authenticate
_READ_BYTES: Final = 1 << 16
_QUIET_S: Final = 0.005  # seeds that come close together are summed together
_LONGEST_WAIT_S: Final = 0.05  # when it is never quiet


def wall_clock(read: Callable[[], float] = time.time) -> Callable[[], float]:
    """Unix seconds that never fall while the process lives.

    A monotonic clock stands still while the machine sleeps, and does not hear when the wall clock
    is set right: offers would be over before any device could use them.
    """
    latest = read()

    def now() -> float:
        nonlocal latest
        latest = max(latest, read())
        return latest

    return now


def platform_limits() -> TsaLimits:
    """Sums may take half of the memory that the machine, the guest or the enclave has."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return TsaLimits(memory_bytes=memory_bytes // 2)


class _Connection:
    """Its session, bytes that arrived, and the parts of the answer that is being sent."""

    def __init__(self, stream: socket.socket, session: TsaSession) -> None:
        self.stream = stream
        self.session = session
        self.is_behind = False  # it had its answers of this turn, and there may be more requests
        self._received = bytearray()
        self._sending: list[memoryview] = []

    @property
    def events(self) -> int:
        """Whoever is behind has its next turn as soon as an answer can be sent."""
        waits = self._sending or self.is_behind
        return selectors.EVENT_WRITE if waits else selectors.EVENT_READ

    def receive(self) -> None:
        """Raises OSError when the peer is gone or announces too much."""
        data = self.stream.recv(_READ_BYTES)
        if not data:
            raise ConnectionResetError("closed by the peer")
        self._received += data

    def next_request(self) -> bytes | None:
        """The next whole request, if it is here and the last answer is out."""
        if self._sending or len(self._received) < wire.LENGTH.size:
            return None
        (size,) = wire.LENGTH.unpack_from(self._received)
        if not 1 <= size <= wire.MAX_REQUEST_BYTES:
            raise ConnectionAbortedError(f"a request of {size} bytes")
        end = wire.LENGTH.size + size
        if len(self._received) < end:
            return None
        request = bytes(self._received[wire.LENGTH.size : end])
        del self._received[:end]
        return request

    def send(self, answer: ReplyParts) -> None:
        self._sending = [memoryview(part) for part in answer if len(part)]
        self.flush()

    def flush(self) -> None:
        while self._sending:
            try:
                sent = self.stream.send(self._sending[0])
            except BlockingIOError:
                return
            rest = self._sending[0][sent:]
            self._sending[:1] = [rest] if len(rest) else []


class Process:
    """Serves one `TsaService` on one listening socket until `stop` becomes readable."""

    def __init__(
        self, service: TsaService, listener: socket.socket, clock: Callable[[], float]
    ) -> None:
        self._service = service
        self._listener = listener
        self._clock = clock
        self._connections: dict[socket.socket, _Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._summed_s = 0.0

    def run(self, stop: socket.socket) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(stop, selectors.EVENT_READ)
        try:
            while self._turn(stop):
                pass
        finally:
            for connection in tuple(self._connections.values()):
                self._close(connection)
            self._selector.close()

    def _turn(self, stop: socket.socket) -> bool:
        ready = self._selector.select(timeout=_QUIET_S)
        if not ready or time.monotonic() - self._summed_s >= _LONGEST_WAIT_S:
            idle = not self._sum_waiting()
            self._summed_s = time.monotonic()
            if idle and not ready:
                ready = self._selector.select()
        for key, events in ready:
            if key.fileobj is stop:
                return False
            if key.fileobj is self._listener:
                self._admit()
            elif key.data.stream in self._connections:  # it may have been closed for another
                self._serve(key.data, events)
        return True

    def _sum_waiting(self) -> bool:
        """False if there was nothing to do, or no memory to do it: then a release has to."""
        try:
            return self._service.tsa.sum_waiting()
        except MemoryError:
            return False

    def _admit(self) -> None:
        for _ in range(ADMISSIONS_PER_TURN):
            try:
                stream = self._listener.accept()[0]
            except OSError:  # no more, it went away again, or no file descriptors are left
                return
            self._make_room()
            self._add(stream)

    def _add(self, stream: socket.socket) -> None:
        try:
            stream.setblocking(False)
            endpoint.tune(stream)
            connection = _Connection(stream, self._service.session())
            self._selector.register(stream, selectors.EVENT_READ, connection)
        except (OSError, MemoryError):
            stream.close()
            return
        self._connections[stream] = connection

    def _make_room(self) -> None:
        """Closes the stranger that came first, if there are too many strangers.

        A stranger has not proved the key of a cluster. Whoever has is closed only for the sake of
        another one: otherwise every local user could cut off the servers. A server proves its key
        soon after it connects; others could talk all the time, so this does not count.
        """
        strangers = [c for c in self._connections.values() if not c.session.is_authenticated]
        if len(strangers) >= MAX_STRANGERS:
            self._close(strangers[0])
        elif len(self._connections) >= MAX_CONNECTIONS:
            self._close(next(iter(self._connections.values())))

    def _serve(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                connection.flush()
            else:
                connection.receive()
            self._answer(connection)
        except BlockingIOError:
            return
        except (OSError, MemoryError):
            self._close(connection)
            return
        if connection.session.is_authenticated:
            # Whoever was heard last goes to the end of the line, and is closed last.
            self._connections[connection.stream] = self._connections.pop(connection.stream)
        self._selector.modify(connection.stream, connection.events, connection)

    def _answer(self, connection: _Connection) -> None:
        for _ in range(REQUESTS_PER_TURN):
            request = connection.next_request()
            connection.is_behind = request is not None
            if request is None:
                return
            connection.send(connection.session.answer(request, self._clock()))

    def _close(self, connection: _Connection) -> None:
        self._selector.unregister(connection.stream)
        del self._connections[connection.stream]
        connection.stream.close()


def serve(
    listener: socket.socket,
    stop: socket.socket,
    evidence: MakeEvidence | None = None,
    limits: TsaLimits | None = None,
) -> None:
    """A new TSA with the system's entropy and clock, until `stop` becomes readable."""
    tsa = TSA(os.urandom, limits or platform_limits())
    Process(TsaService(tsa, evidence), listener, wall_clock()).run(stop)


def serve_until_signal(
    address: str, ready: Callable[[str], None], evidence: MakeEvidence | None = None
) -> None:
    """All of `papaya serve tsa` but its command line: ends by SIGTERM or SIGINT.

    `ready` is told the address as soon as clients can connect to it.
    """
    stop, wake = socket.socketpair()
    with stop, wake, endpoint.listen(address) as listener:
        wake.setblocking(False)
        before = signal.set_wakeup_fd(wake.fileno())
        handlers = {s: signal.signal(s, lambda *_: None) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            ready(endpoint.address_of(listener))
            serve(listener, stop, evidence)
        finally:
            signal.set_wakeup_fd(before)
            for number, handler in handlers.items():
                signal.signal(number, handler)
