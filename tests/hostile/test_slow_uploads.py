"""Devices that upload as slowly as they may: they cannot keep others from uploading."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from papaya.config import AsyncFL
from tests.hostile.running_server import DEADLINE_S, PatientConfig, RunningServer
from tests.hostile.test_upload_memory import CHUNK_BYTES, free_buffers, length_of, upload

SLOW = 40
CHUNKS = 4
PERIOD_S = 0.1


def a_server(folder: Path, **settings: Any) -> RunningServer:
    return RunningServer(folder, server=PatientConfig(chunk_bytes=CHUNK_BYTES), **settings)


def submit(server: RunningServer, name: str, concurrency: int) -> None:
    server.submit(
        name,
        model_length=length_of(CHUNKS),
        concurrency=concurrency,
        regime=AsyncFL(aggregation_goal=1),
    )


class SlowDevice:
    """Sends a chunk a few bytes at a time, and begins again when it is cut off."""

    def __init__(self, address: tuple[str, int], ticket: str) -> None:
        head = (
            f"PUT /v1/uploads/u/chunks/0 HTTP/1.1\r\nHost: x\r\nContent-Length: {CHUNK_BYTES}\r\n"
            f"Papaya-Ticket: {ticket}\r\nPapaya-Crc32: 00000000\r\n\r\n"
        )
        self._head = head.encode()
        self._address = address
        self.line = self._connect()

    def _connect(self) -> socket.socket:
        line = socket.create_connection(self._address, timeout=DEADLINE_S)
        line.sendall(self._head)
        line.setblocking(False)
        return line

    def send(self, count: int) -> None:
        with suppress(OSError):  # cut off again: the next turn connects anew
            if self._is_cut_off():
                self.line.close()
                self.line = self._connect()
            self.line.send(bytes(count))

    def close(self) -> None:
        self.line.close()

    def _is_cut_off(self) -> bool:
        """An answer, or the end: the server reads no more of this body."""
        try:
            self.line.recv(4096)
        except BlockingIOError:
            return False
        return True


@contextmanager
def slow_devices(server: RunningServer, count: int, bytes_each: int) -> Iterator[None]:
    """They take part in the one task that there is, and trickle until the end."""
    tickets = [server.report()["ticket"] for _ in range(count)]
    stop = threading.Event()
    with ExitStack() as stack:
        devices = [SlowDevice(server.address("devices"), ticket) for ticket in tickets]
        for device in devices:
            stack.callback(device.close)

        def trickle() -> None:
            while not stop.wait(PERIOD_S):
                for device in devices:
                    device.send(bytes_each)

        thread = threading.Thread(target=trickle)
        thread.start()
        stack.callback(thread.join)
        stack.callback(stop.set)
        yield


@pytest.mark.parametrize("bytes_each", [1, 128])
def test_slow_devices_of_one_task_do_not_delay_another_task(
    tmp_path: Path, bytes_each: int
) -> None:
    """At 10 B/s the endpoint cuts them off now and then; at 1.3 KB/s it does not."""
    with a_server(tmp_path) as server:
        submit(server, "words", SLOW)
        with slow_devices(server, SLOW, bytes_each):
            submit(server, "images", 4)
            for _ in range(3):
                assert upload(server, server.report()["ticket"], CHUNKS).kind == "Completed"


def test_slow_devices_do_not_delay_others_of_their_task_where_memory_is_short(
    tmp_path: Path,
) -> None:
    """A megabyte: room for two uploads at a time, so slow ones may not count as whole uploads."""
    with a_server(tmp_path, upload_memory_mb=1) as server:
        submit(server, "words", SLOW + 4)
        with slow_devices(server, SLOW, 128):
            for _ in range(3):
                assert upload(server, server.report()["ticket"], CHUNKS).kind == "Completed"
        server.until(lambda: free_buffers(server), lambda free: free == 16)
