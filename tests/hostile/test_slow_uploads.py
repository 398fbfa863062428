"""Devices that upload as slowly as they may: they cannot keep others from uploading."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from papaya.aggregator.upload import ARRIVING, STARTER_BYTES
from papaya.config import AsyncFL
from tests.hostile.running_server import (
    DEADLINE_S,
    Answer,
    PatientConfig,
    RunningRoles,
    RunningServer,
)
from tests.hostile.test_upload_memory import CHUNK_BYTES, free_buffers, length_of, upload

SLOW = 40
CHUNKS = 4
PERIOD_S = 0.1
FREE_BUFFERS = "papaya_upload_free_buffers"


SERVER = PatientConfig(chunk_bytes=CHUNK_BYTES)


def a_server(folder: Path, **settings: Any) -> RunningServer:
    return RunningServer(folder, server=SERVER, **settings)


def submit(server: RunningServer, name: str, concurrency: int) -> None:
    server.submit(
        name,
        model_length=length_of(CHUNKS),
        concurrency=concurrency,
        regime=AsyncFL(aggregation_goal=1),
    )


class SlowChunk:
    """A chunk that a device sends a few bytes at a time. It begins again when it is cut off."""

    def __init__(self, address: tuple[str, int], ticket: str, index: int, at_once: int) -> None:
        """`at_once`: the number of bytes that are sent without delay."""
        head = (
            f"PUT /v1/uploads/u/chunks/{index} HTTP/1.1\r\nHost: x\r\n"
            f"Content-Length: {CHUNK_BYTES}\r\n"
            f"Papaya-Ticket: {ticket}\r\nPapaya-Crc32: 00000000\r\n\r\n"
        )
        self._head = head.encode() + bytes(at_once)
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
def slow_devices(
    server: RunningServer, count: int, bytes_each: int, *, chunks: int = 1, at_once: int = 0
) -> Iterator[None]:
    """Devices that take part in the only task, and upload slowly until the end.

    Each sends `chunks` chunks at the same time.
    """
    tickets = [server.report()["ticket"] for _ in range(count)]
    stop = threading.Event()
    with ExitStack() as stack:
        slow = [
            SlowChunk(server.address("devices"), ticket, index, at_once)
            for ticket in tickets
            for index in range(chunks)
        ]
        for chunk in slow:
            stack.callback(chunk.close)

        def trickle() -> None:
            while not stop.wait(PERIOD_S):
                for chunk in slow:
                    chunk.send(bytes_each)

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


def test_slow_devices_of_one_task_do_not_delay_another_task_behind_a_selector(
    tmp_path: Path,
) -> None:
    """The selector relays two chunks of each slow device. All of them reach the aggregator, so
    chunks of other devices do not wait behind them in a queue.
    """
    with RunningRoles(tmp_path, server=SERVER) as server:
        submit(server, "words", SLOW)
        unused = server.metric("aggregator", FREE_BUFFERS)
        with slow_devices(server, SLOW, 128, chunks=ARRIVING, at_once=STARTER_BYTES):
            server.until(
                lambda: server.metric("aggregator", FREE_BUFFERS),
                lambda free: free == unused - ARRIVING * SLOW,
            )
            submit(server, "images", 4)
            for _ in range(3):
                assert upload(server, server.report()["ticket"], CHUNKS).kind == "Completed"


def test_slow_chunks_behind_selectors_leave_connections_for_messages(tmp_path: Path) -> None:
    """Without orders, an aggregator that slow devices keep busy would lose its tasks.

    A chunk whose selector closes the connection makes room for another.
    """
    most = 12  # of 16 connections
    with RunningRoles(tmp_path, server=SERVER, max_connections=16) as server:
        submit(server, "words", most // ARRIVING + 1)
        tickets = [server.report()["ticket"] for _ in range(most // ARRIVING + 1)]
        unused = server.metric("aggregator", FREE_BUFFERS)

        def relay(ticket: str) -> Answer:
            return server.relayed_chunk(ticket, bytes(CHUNK_BYTES))

        with ExitStack() as stack:
            slow = [
                stack.enter_context(closing(server.open_relayed_chunk(ticket, CHUNK_BYTES)))
                for ticket in tickets[1:]
                for _ in range(ARRIVING)
            ]
            refused = server.until(lambda: relay(tickets[0]), lambda found: found.kind == "Retry")
            assert refused.message["reason"] == "too many chunks are being received"
            assert 5.0 <= refused.message["after_s"] <= 15.0
            assert 5 <= int(refused.headers["retry-after"]) <= 15
            assert server.heartbeat(tickets[1]) == {"type": "Alive"}
            slow.pop().close()
            server.until(lambda: relay(tickets[0]), lambda found: found.kind == "ChunkReceived")
        server.until(
            lambda: server.metric("aggregator", FREE_BUFFERS), lambda free: free == unused - 1
        )
