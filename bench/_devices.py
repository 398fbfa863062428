"""The protocol of a device by hand, as cheap as it gets: one blocking socket, no client machine.

A benchmark of servers must not spend the machine on its devices. What a server sees is the real
protocol: check-in, join, report, chunks, complete, each answered before the next is sent.
"""

from __future__ import annotations

import socket
import ssl
import time
from base64 import b64encode
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple
from urllib.parse import urlsplit
from zlib import crc32

from _servers import require
from msgspec import structs

from papaya.messages import wire
from papaya.messages.base import Message
from papaya.messages.participation import (
    ChunkReceived,
    Complete,
    Completed,
    Incomplete,
    Join,
    Joined,
    Report,
    Retry,
    UploadGranted,
)
from papaya.messages.paths import PATHS
from papaya.messages.selection import Accepted, Capabilities, CheckIn, Rejected

CHECK_IN = CheckIn(1, Capabilities())  # the version that all servers support, also earlier ones
_RECEIVED_BYTES = 64 << 10


class Encoded(NamedTuple):
    """An update as its chunks: their bytes and checksums."""

    chunks: list[tuple[memoryview, str]]

    @classmethod
    def of(cls, data: bytes, chunk_bytes: int) -> Encoded:
        view = memoryview(data)
        pieces = [view[at : at + chunk_bytes] for at in range(0, len(data), chunk_bytes)]
        return cls([(piece, f"{crc32(piece):08x}") for piece in pieces])


class Device:
    """One connection, kept alive. Not for two threads at once."""

    def __init__(
        self, address: tuple[str, int], token: str, context: ssl.SSLContext | None = None
    ) -> None:
        """`context`: of TLS; None without."""
        self._token, self._context = token, context
        # A connection to the aggregator itself, by its `upload_url`.
        self._direct: tuple[str, Device] | None = None
        # Seconds that the trips of this device spent in each phase, by its last request.
        self.spent_s = dict.fromkeys(("check_in", "report", "upload", "complete"), 0.0)
        self.chunks = 0  # that were acknowledged
        plain = socket.create_connection(address, timeout=60.0)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = (
            plain if context is None else context.wrap_socket(plain, server_hostname=address[0])
        )
        self._common = f"Host: bench\r\nAuthorization: Bearer {token}\r\n"
        self._received = b""

    def close(self) -> None:
        self._socket.close()
        if self._direct is not None:
            self._direct[1].close()

    def _to_upload(self, url: str) -> Device:
        """Where to upload: over this connection, or directly to the aggregator."""
        if not url:
            return self
        if self._direct is None or self._direct[0] != url:
            parts = urlsplit(url)
            assert parts.hostname is not None
            assert parts.port is not None
            address = (parts.hostname, parts.port)
            self._direct = (url, Device(address, self._token, self._context))
        return self._direct[1]

    def ask(self, message: Message) -> Message:
        """One exchange; Retry is waited out, as devices do."""
        while True:
            self.send(message)
            answer = self.answer()
            if not isinstance(answer, Retry):
                return answer
            time.sleep(answer.after_s)

    def send(self, message: Message) -> None:
        body = wire.encode(message)
        head = f"POST {PATHS[type(message)]} HTTP/1.1\r\n{self._common}"
        self._socket.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def check_in(self, excluded: tuple[str, ...] = ()) -> Accepted:
        """`excluded`: tasks that the device must not be assigned to."""
        check_in = structs.replace(CHECK_IN, excluded=excluded)
        while True:
            answer = self.ask(check_in)
            if isinstance(answer, Accepted):
                return answer
            require(isinstance(answer, Rejected), f"a check-in was answered {answer}")
            time.sleep(0.05)  # a window is for fleets; this one is small and impatient

    def trip(self, update_of: Callable[[int], Encoded], upload: str) -> int:
        """From check-in to the update that counts, with no training; how stale it was.

        What is uploaded may depend on that.
        """
        times = [time.monotonic()]
        accepted = self.check_in()
        times.append(time.monotonic())
        joined = self.ask(Join(accepted.ticket))
        assert isinstance(joined, Joined), joined
        granted = self.ask(Report(joined.ticket, examples=1))
        assert isinstance(granted, UploadGranted), granted
        times.append(time.monotonic())
        staleness = granted.version - joined.version
        update = update_of(staleness)
        there = self._to_upload(granted.upload_url)
        there.upload(granted, update, upload, range(len(update.chunks)))
        times.append(time.monotonic())
        completed = there.ask(Complete(granted.ticket, upload))
        while isinstance(completed, Incomplete):  # on a busy machine a silent upload loses its slot
            there.upload(granted, update, upload, completed.missing)
            completed = there.ask(Complete(granted.ticket, upload))
        require(completed == Completed(None), f"an update was answered {completed}")
        times.append(time.monotonic())
        for phase, (began_at, ended_at) in zip(self.spent_s, pairwise(times), strict=True):
            self.spent_s[phase] += ended_at - began_at
        return staleness

    def upload(
        self, granted: UploadGranted, update: Encoded, upload: str, indices: Iterable[int]
    ) -> None:
        ticket = b64encode(granted.ticket).decode()
        for index in indices:
            piece, checksum = update.chunks[index]
            head = (
                f"PUT /v1/uploads/{upload}/chunks/{index} HTTP/1.1\r\n{self._common}"
                f"Content-Length: {len(piece)}\r\n"
                f"Papaya-Ticket: {ticket}\r\nPapaya-Crc32: {checksum}\r\n\r\n"
            ).encode()
            while True:
                self._socket.sendall(head)
                self._socket.sendall(piece)
                answer = self.answer()
                if answer == ChunkReceived(upload, index):
                    self.chunks += 1
                    break
                assert isinstance(answer, Retry), answer
                time.sleep(answer.after_s)

    def answer(self) -> Message:
        while (end := self._received.find(b"\r\n\r\n")) < 0:
            self._receive()
        head = self._received[:end].lower()
        at = head.index(b"content-length:") + 15
        length = int(head[at:].split(b"\r\n", 1)[0])
        stop = end + 4 + length
        while len(self._received) < stop:
            self._receive()
        body, self._received = self._received[end + 4 : stop], self._received[stop:]
        return wire.to_device.parse(body)

    def _receive(self) -> None:
        data = self._socket.recv(_RECEIVED_BYTES)
        require(bool(data), "the server hung up")
        self._received += data
