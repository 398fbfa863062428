"""Claim: an open TLS connection costs at most 16 KB, and connections that come and go cost nothing.

The one-process server with TLS. Devices connect, send one request and stay: memory is the growth of
the server's resident set per connection. Then connections come and go, each with one request, and
the resident set after the last 15,000 of 20,000 is compared with the one before them. Devices use
full handshakes, the most expensive ones for a server. Run as `python bench/tls_connections.py`;
prints one JSON line per case.
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from _devices import Device
from _servers import Servers, make_certificate, report, require, running

from papaya.config import ServerConfig
from papaya.messages.participation import Heartbeat, Refused

HELD, SETTLED, PASSING, THREADS = 2_000, 5_000, 20_000, 8
HELD_KB, GROWTH = 16.0, 0.1


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="papaya-bench-tls-") as folder:
        settings = make_certificate(Path(folder))
        limits: dict[str, Any] = {
            "max_connections": 3 * HELD,
            "max_connections_per_address": 3 * HELD,
        }
        with running(ServerConfig(), apart=False, **settings, **limits) as servers:
            visit(servers, THREADS)  # what the first requests allocate is not per connection
            before_kb = resident_kb(servers)
            with ExitStack() as stack:
                for _ in range(HELD):
                    stack.enter_context(closing(ask(servers)))
                each_kb = (resident_kb(servers) - before_kb) / HELD
            report("tls_connections", "KB per connection", each_kb, HELD_KB, each_kb <= HELD_KB)
            visit(servers, SETTLED)
            before_kb = resident_kb(servers)
            visit(servers, PASSING - SETTLED)
            after_kb = resident_kb(servers)
        growth = after_kb / before_kb - 1
        more = {"before_mb": round(before_kb / 1e3, 1), "after_mb": round(after_kb / 1e3, 1)}
        case = f"growth of memory over {PASSING - SETTLED} connections"
        report("tls_connections", case, growth, GROWTH, growth <= GROWTH, **more)


def ask(servers: Servers) -> Device:
    """A connection after one request."""
    device = Device(servers.devices, servers.token(), servers.context)
    device.send(Heartbeat(b"no ticket"))
    require(isinstance(device.answer(), Refused), "a heartbeat without a ticket was accepted")
    return device


def visit(servers: Servers, times: int) -> None:
    """Connections that close after one request, a few at a time."""

    def some(count: int) -> None:
        for _ in range(count):
            ask(servers).close()

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(some, [times // THREADS] * THREADS))


def resident_kb(servers: Servers) -> float:
    lines = Path(f"/proc/{servers.pids['server']}/status").read_text(encoding="ascii").splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("VmRSS"))


if __name__ == "__main__":
    main()
