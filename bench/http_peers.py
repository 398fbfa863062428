"""Claim: our HTTP endpoint does 3 x as much per CPU-second as aiohttp on chunks, 2 x on messages.

Both servers run at the same time, each in its own process on uvloop, with the same two routes
(`_http_peer.py`): one receives chunks of 1 MiB, one decodes a small JSON message and answers with
another. The same blocking sockets send to both in turns, because the machine may be shared:
whatever disturbs one disturbs the other. CPU is user and system of the server process. Every answer
is asserted: a sample of the chunk's own bytes, or the message with its number plus one. Run as
`python bench/http_peers.py`; prints one JSON line per case.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import msgspec
import numpy as np
from _http_peer import CHUNK_BYTES, SAMPLED_EVERY, Small
from _servers import cpu_s, report, require

CONNECTIONS, TURNS = 16, 6
RANDOM = np.random.default_rng(1).bytes(2 * CHUNK_BYTES)
TEXT, LABELS = "a device of no particular kind", ("wifi", "charging", "idle")

Made = tuple[bytes, bytes]  # a request and the body of its right answer


def main() -> None:
    with peer("papaya") as papaya, peer("aiohttp") as aiohttp:
        for case, made, rounds, target in (
            ("chunks of 1 MiB", a_chunk, 40, 3.0),
            ("small JSON messages", a_message, 250, 2.0),
        ):
            for server in (papaya, aiohttp):
                server.used_s(made, max(2, rounds // 10))  # warm up
            ours = theirs = 0.0
            for _ in range(TURNS):
                ours += papaya.used_s(made, rounds)
                theirs += aiohttp.used_s(made, rounds)
            count = TURNS * rounds * CONNECTIONS
            rates = {"papaya_per_cpu_s": count / ours, "aiohttp_per_cpu_s": count / theirs}
            ratio = theirs / ours
            shown = {name: round(rate, 1) for name, rate in rates.items()}
            say = f"{case} per CPU-second, ours ÷ aiohttp's"
            report("http_peers", say, ratio, target, ratio >= target, **shown)


class Server:
    def __init__(self, process: subprocess.Popen[str], sockets: list[socket.socket]) -> None:
        self._pid = process.pid
        self._sockets = sockets

    def used_s(self, made: Callable[[int], Made], rounds: int) -> float:
        """CPU seconds for `rounds` requests on each connection."""
        before = cpu_s(self._pid)
        for number in range(rounds):
            # Few at a time, so that a chunk does not fill the socket while nobody reads.
            expected = []
            for place, connection in enumerate(self._sockets):
                request, answer = made(number * CONNECTIONS + place)
                connection.sendall(request)
                expected.append(answer)
            for connection, answer in zip(self._sockets, expected, strict=True):
                require(read_answer(connection) == answer, "a server gave a wrong answer")
        return cpu_s(self._pid) - before


def a_chunk(number: int) -> Made:
    at = number % CHUNK_BYTES
    body = RANDOM[at : at + CHUNK_BYTES]
    return request("PUT", "/chunk", body), body[::SAMPLED_EVERY]


def a_message(number: int) -> Made:
    body = msgspec.json.encode(Small(number, TEXT, LABELS))
    return request("POST", "/small", body), msgspec.json.encode(Small(number + 1, TEXT, LABELS))


def request(method: str, path: str, body: bytes) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def read_answer(connection: socket.socket) -> bytes:
    data = b""
    while (end := data.find(b"\r\n\r\n")) < 0:
        data += received(connection)
    require(data.startswith(b"HTTP/1.1 200 "), f"a server answered {data[:40]!r}")
    head = data[:end].lower()
    length = int(head[head.index(b"content-length:") + 15 :].split(b"\r\n", 1)[0])
    while len(data) < end + 4 + length:
        data += received(connection)
    return data[end + 4 :]


def received(connection: socket.socket) -> bytes:
    data = connection.recv(64 << 10)
    require(bool(data), "a server closed the connection")
    return data


@contextmanager
def peer(name: str) -> Iterator[Server]:
    program = str(Path(__file__).with_name("_http_peer.py"))
    with ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, program, name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        assert process.stdin is not None
        assert process.stdout is not None
        stack.callback(process.stdin.close)
        address = ("127.0.0.1", int(process.stdout.readline()))
        sockets = []
        for _ in range(CONNECTIONS):
            sockets.append(stack.enter_context(closing(socket.create_connection(address, 60.0))))
            sockets[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield Server(process, sockets)


if __name__ == "__main__":
    main()
