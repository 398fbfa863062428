"""Claim: devices that upload slowly take at most a fifth of the throughput of the others.

Eight devices deliver updates of 1 MiB as fast as they can, while 0, 32 and 200 further devices of
the same task send two chunks each: 16 KiB at once, so that a selector relays them, then 1 KB/s.
They send heartbeats, and connect again when they are cut off. The value is the rate of counted
updates with slow devices ÷ that without, in the same run, against the same servers. A fifth is left
for what 400 connections and their bytes cost the server. Cases: one process; a selector and an
aggregator apart. Every counted update is answered `Completed`. Run as
`python bench/slow_uploads.py`; prints one JSON line per case.
"""

from __future__ import annotations

import socket
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import count

import numpy as np
from _devices import Device, Encoded
from _servers import Servers, report, require, running

from papaya.aggregator.upload import ARRIVING, STARTER_BYTES
from papaya.config import AsyncFL, ServerConfig, TaskConfig
from papaya.messages.base import Message
from papaya.messages.participation import (
    Alive,
    Complete,
    Completed,
    Heartbeat,
    Incomplete,
    Join,
    Joined,
    Report,
    UploadGranted,
)

MODEL_LENGTH = 1 << 18
HONEST, SLOW = 8, (32, 200)
SLOW_BYTES, PERIOD_S = 512, 0.5
SETTLE_S, MEASURE_S = 20.0, 10.0  # longer than servers keep a silent device
SHARE = 0.8
SERVER = ServerConfig(heartbeat_s=2.0, chunk_bytes=1 << 18)
TASK = TaskConfig(
    task="bench",
    concurrency=max(SLOW) + 2 * HONEST,
    model_length=MODEL_LENGTH,
    regime=AsyncFL(HONEST),
    upload_timeout_s=600.0,  # the slow devices stay for the whole run
    participation_gap_s=0.0,
)
IDS = count()


def main() -> None:
    update = Encoded.of(np.ones(MODEL_LENGTH, np.float32).tobytes(), SERVER.chunk_bytes)
    for case, apart in (("one process", False), ("selector and aggregator", True)):
        with running(SERVER, apart=apart) as servers:
            servers.submit(TASK, np.zeros(MODEL_LENGTH, np.float32))
            rate(servers, update)  # warm up
            for number in SLOW:
                alone = rate(servers, update)
                require(alone > 0, "no update was counted without slow devices")
                with slow_devices(servers, number):
                    time.sleep(SETTLE_S)
                    found = rate(servers, update)
                rates = {"per_s": round(found, 1), "alone_per_s": round(alone, 1)}
                say = f"honest updates/s with {number} slow devices ÷ without, {case}"
                share = found / alone
                report("slow_uploads", say, share, SHARE, share >= SHARE, **rates)


def rate(servers: Servers, update: Encoded) -> float:
    """Counted updates per second of all honest devices together."""
    ends_at = time.monotonic() + MEASURE_S
    with ThreadPoolExecutor(HONEST) as threads:
        counted = threads.map(lambda _: deliver(servers, update, ends_at), range(HONEST))
        return sum(counted) / MEASURE_S


def deliver(servers: Servers, update: Encoded, ends_at: float) -> int:
    """How many updates one device delivers until then."""
    counted = 0
    granted: UploadGranted | None = None
    while time.monotonic() < ends_at:
        try:
            with closing(Device(servers.devices, servers.token())) as device:
                while time.monotonic() < ends_at:
                    granted = granted or begun(device)
                    finish(device, granted, update)
                    granted, counted = None, counted + 1
        except (OSError, SystemExit):
            continue  # refused in the middle of a chunk: the server closes, and the device goes on
    return counted


def begun(device: Device, excluded: tuple[str, ...] = ()) -> UploadGranted:
    joined = device.ask(Join(device.check_in(excluded).ticket))
    assert isinstance(joined, Joined), joined
    granted = device.ask(Report(joined.ticket, examples=1))
    assert isinstance(granted, UploadGranted), granted
    return granted


def finish(device: Device, granted: UploadGranted, update: Encoded) -> None:
    name = f"u{next(IDS)}"
    completed: Message = Incomplete(tuple(range(len(update.chunks))))
    while isinstance(completed, Incomplete):
        device.upload(granted, update, name, completed.missing)
        completed = device.ask(Complete(granted.ticket, name))
    require(completed == Completed(None), f"an update was answered {completed}")


class SlowDevice:
    """Sends chunks a few bytes at a time, and begins again when it is cut off."""

    def __init__(self, servers: Servers) -> None:
        self._device = Device(servers.devices, servers.token())
        ticket = begun(self._device).ticket
        self._heartbeat = Heartbeat(ticket)
        self._chunks = [SlowChunk(servers.devices, ticket, index) for index in range(ARRIVING)]

    def send(self) -> None:
        for chunk in self._chunks:
            chunk.send()

    def stay(self) -> None:
        """Send a heartbeat; without it the server would end the session and its chunks."""
        answer = self._device.ask(self._heartbeat)
        require(answer == Alive(), f"a slow device's heartbeat was answered {answer}")

    def close(self) -> None:
        self._device.close()
        for chunk in self._chunks:
            chunk.close()


class SlowChunk:
    """One chunk of a slow device, on its own connection."""

    def __init__(self, address: tuple[str, int], ticket: bytes, index: int) -> None:
        self._address = address
        self._head = (
            f"PUT /v1/uploads/slow/chunks/{index} HTTP/1.1\r\nHost: x\r\n"
            f"Papaya-Ticket: {b64encode(ticket).decode()}\r\n"
            f"Content-Length: {SERVER.chunk_bytes}\r\nPapaya-Crc32: 00000000\r\n\r\n"
        ).encode()
        self._line: socket.socket | None = None

    def send(self) -> None:
        with suppress(OSError):
            if self._line is None or self._is_cut_off(self._line):
                self.close()
                self._line = socket.create_connection(self._address, timeout=10.0)
                self._line.sendall(self._head + bytes(STARTER_BYTES))
                self._line.setblocking(False)
            self._line.send(bytes(SLOW_BYTES))

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    @staticmethod
    def _is_cut_off(line: socket.socket) -> bool:
        try:
            line.recv(4096)
        except BlockingIOError:
            return False
        return True


@contextmanager
def slow_devices(servers: Servers, number: int) -> Iterator[None]:
    stop = threading.Event()
    devices = [SlowDevice(servers) for _ in range(number)]

    def trickle() -> None:
        while not stop.wait(PERIOD_S):
            for device in devices:
                device.send()

    def stay() -> None:
        while not stop.wait(SERVER.heartbeat_s):
            for device in devices:
                device.stay()

    with ThreadPoolExecutor(2) as threads:
        loops = [threads.submit(trickle), threads.submit(stay)]
        try:
            yield
        finally:
            stop.set()
            for loop in loops:
                loop.result()
            for device in devices:
                device.close()


if __name__ == "__main__":
    main()
