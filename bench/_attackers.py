"""The attackers of `attacks.py`, in a process of their own.

    python bench/_attackers.py KIND HOST PORT NUMBER

`pipeline`: NUMBER connections send requests without a token for a path that does not exist, as many
as the server takes. `silent`: NUMBER connections send nothing, and connect again when they are cut
off. Both print "ready" once they have connected, and end when their standard input ends; for each
line that they read, `pipeline` prints how many answers it has got so far. `crowd` and `neighbours`
first open as many connections as the server serves, and keep them open. Then NUMBER further ones
(fewer if this process may not open as many files) connect at once and send a request: those of
`crowd` from an address each, those of `neighbours` all from one. They print how many connections
were told to come back, served, closed without an answer, or still waiting after PATIENCE_S. The
exit code is 0, unless an attack failed or was stopped after MOST_S.
"""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import count

MOST_S, PATIENCE_S = 180.0, 60.0
MOST_HELD = 6_000
REQUEST = b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n"
ONE_ADDRESS = "127.0.0.2"
Address = tuple[str, int]


def pipeline(address: Address, number: int) -> None:
    answers = [0] * number

    def send(line: socket.socket) -> None:
        with suppress(OSError):
            while True:
                line.sendall(500 * REQUEST)

    def read(line: socket.socket, index: int) -> None:
        with suppress(OSError):
            while data := line.recv(1 << 18):
                answers[index] += data.count(b"HTTP/1.1 404")

    for index in range(number):
        line = socket.create_connection(address)
        threading.Thread(target=send, args=(line,), daemon=True).start()
        threading.Thread(target=read, args=(line, index), daemon=True).start()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(sum(answers), flush=True)


def silent(address: Address, number: int) -> None:
    lines: dict[int, socket.socket] = {}
    poller = select.poll()

    def add(line: socket.socket) -> None:
        lines[line.fileno()] = line
        poller.register(line, select.POLLIN)

    def connect_again() -> None:
        """Without waiting: the server may not accept it for a while."""
        line = socket.socket()
        line.setblocking(False)
        line.bind((ONE_ADDRESS, 0))
        line.connect_ex(address)
        add(line)

    for _ in range(number):
        add(socket.create_connection(address, source_address=(ONE_ADDRESS, 0)))
    print("ready", flush=True)
    poller.register(sys.stdin, select.POLLIN)
    while True:
        for descriptor, _ in poller.poll():
            if descriptor not in lines:
                return  # the standard input has ended
            poller.unregister(descriptor)
            lines.pop(descriptor).close()
            connect_again()


def crowd(address: Address, number: int) -> None:
    numbers = count()

    def one_each() -> str:
        index = next(numbers)
        return f"127.1.{index // 250}.{1 + index % 250}"

    burst(address, number, one_each)


def neighbours(address: Address, number: int) -> None:
    burst(address, number, lambda: ONE_ADDRESS)


def burst(address: Address, number: int, source: Callable[[], str]) -> None:
    held = hold(address, source)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = min(number, soft - len(held) - 100)
    began_at = time.monotonic()
    lines: dict[int, socket.socket] = {}
    received: dict[int, bytes] = {}
    outcomes: Counter[str] = Counter()
    poller = select.epoll()
    for _ in range(number):
        line = socket.socket()
        line.setblocking(False)
        line.bind((source(), 0))
        line.connect_ex(address)
        lines[line.fileno()], received[line.fileno()] = line, b""
        poller.register(line, select.EPOLLOUT)
    while lines and time.monotonic() < began_at + PATIENCE_S:
        for descriptor, events in poller.poll(1.0):
            line, is_over = lines[descriptor], False
            try:
                if events & select.EPOLLOUT:
                    line.send(REQUEST)
                    poller.modify(line, select.EPOLLIN)
                else:
                    data = line.recv(1 << 16)
                    received[descriptor] += data
                    is_over = not data or b"\r\n\r\n" in received[descriptor]
            except OSError:
                is_over = True
            if is_over:
                outcomes[outcome_of(received[descriptor])] += 1
                lines.pop(descriptor).close()
    outcomes["waiting"] = len(lines)
    took_s = round(time.monotonic() - began_at, 1)
    print(json.dumps({"number": number, "held": len(held), "took_s": took_s} | outcomes))


def hold(address: Address, source: Callable[[], str]) -> list[socket.socket]:
    """Connections that have been served and stay open. The next one would be refused."""
    held: list[socket.socket] = []
    with suppress(OSError):
        while len(held) < MOST_HELD:
            line = socket.create_connection(address, 10.0, (source(), 0))
            line.sendall(REQUEST)
            if not line.recv(1 << 16).startswith(b"HTTP/1.1 404"):
                break
            held.append(line)
    return held


def outcome_of(answer: bytes) -> str:
    head = answer.lower()
    if head.startswith(b"http/1.1 503 ") and b"\r\nretry-after: " in head:
        return "told"
    return "served" if head.startswith(b"http/1.1 404 ") else "closed"


KINDS = {each.__name__: each for each in (pipeline, silent, crowd, neighbours)}


def main(kind: str, host: str, port: str, number: str) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = threading.Timer(MOST_S, os._exit, (1,))
    limit.daemon = True  # an attack that fails ends this process at once
    limit.start()
    KINDS[kind]((host, int(port)), int(number))
    sys.stdout.flush()
    os._exit(0)  # threads may be waiting for the server


if __name__ == "__main__":
    main(*sys.argv[1:])
