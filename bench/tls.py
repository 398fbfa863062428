"""Claim: TLS costs the servers little more CPU than the bytes themselves cost OpenSSL.

The same uploads as in `data_plane.py`, over TLS, in six arrangements. The peer is a small program
in C that receives the same bytes over as many TLS connections and drops them (`_bare_tls.c`,
compiled here; it needs gcc and OpenSSL's headers). Server CPU per update of 20 MiB ÷ that of the
peer, in turns within one run:

    one process                                           at most 2.5
    selector and aggregator, uploads to the aggregator    at most 2.5
    selector and aggregator, TLS for devices only         at most 2.5
    selector and aggregator, TLS on both hops             at most 4
    the selector passes TLS through to the aggregator     at most 4
    haproxy passes TLS through to the aggregator          at most 4

In the last two cases both hops are under TLS, but only the aggregator decrypts (`upload_routes`,
`deploy/haproxy/haproxy.cfg`). The CPU of haproxy, selector and coordinator is included.

The servers also check, fold, make durable and count every update; the final model is asserted. Run
as `python bench/tls.py`, or with the names of cases; prints one JSON line per case.
"""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from _devices import Encoded
from _servers import make_certificate, report, require, running
from data_plane import DEVICES, MODEL_LENGTH, SERVER, STRETCH, measure

PLAIN_INSIDE, BOTH_HOPS = 2.5, 4.0
SOURCE = Path(__file__).with_name("_bare_tls.c")


class BareReceiver:
    """The compiled peer."""

    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        self._program = folder / "bare_tls"
        self._settings = settings
        self._context = ssl.create_default_context(cafile=settings["tls_authority"])
        compiler = ["gcc", "-O2", str(SOURCE), "-o", str(self._program), "-lssl", "-lcrypto"]
        done = subprocess.run(compiler, capture_output=True, text=True, check=False)
        require(done.returncode == 0, f"the peer was not compiled: {done.stderr}")

    def cpu_s(self, threads: ThreadPoolExecutor, update: Encoded) -> float:
        """CPU seconds for a stretch of updates."""
        keys = (self._settings["tls_certificate"], self._settings["tls_key"])
        command = [str(self._program), *keys, str(SERVER.chunk_bytes), str(DEVICES)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            address = ("127.0.0.1", int(process.stdout.readline()))

            def send(updates: int) -> None:
                with (
                    socket.create_connection(address) as plain,
                    self._context.wrap_socket(plain, server_hostname=address[0]) as connection,
                ):
                    for piece, _ in update.chunks * updates:
                        connection.sendall(piece)
                        require(connection.recv(1) == b"k", "the bare process hung up")

            list(threads.map(send, [STRETCH // DEVICES] * DEVICES))
            used_s, total = process.stdout.readline().split()
        require(int(total) == STRETCH * MODEL_LENGTH * 4, f"the peer received {total} bytes")
        return float(used_s)


def main(cases: list[str]) -> None:
    pattern = np.arange(MODEL_LENGTH, dtype=np.float32) % 5 + 1
    update = Encoded.of(pattern.tobytes(), SERVER.chunk_bytes)
    with tempfile.TemporaryDirectory(prefix="papaya-bench-tls-") as folder:
        settings = make_certificate(Path(folder))
        bare = BareReceiver(Path(folder), settings)
        for case, arrangement, target in (
            ("one process", {"apart": False}, PLAIN_INSIDE),
            ("direct to the aggregator", {"apart": True, "uploads": "direct"}, PLAIN_INSIDE),
            ("plain between them", {"apart": True, "servers_tls": False}, PLAIN_INSIDE),
            ("TLS on both hops", {"apart": True}, BOTH_HOPS),
            (
                "TLS passed through by the selector",
                {"apart": True, "uploads": "selector"},
                BOTH_HOPS,
            ),
            ("TLS passed through by haproxy", {"apart": True, "uploads": "haproxy"}, BOTH_HOPS),
        ):
            if cases and case not in cases:
                continue
            with running(SERVER, **arrangement, **settings) as servers:
                used_s, wall_s, bare_s = measure(
                    servers, update, pattern, lambda threads: bare.cpu_s(threads, update)
                )
                if "uploads" in arrangement:
                    relayed = servers.metric("papaya_upload_bytes_total", "selector")
                    require(relayed == 0, f"the selector has relayed {relayed:g} bytes")
            each_s = sum(used_s.values())
            shares = {f"{name}_ms": round(s * 1e3, 1) for name, s in used_s.items()}
            shares |= {"per_wall_s": round(1 / wall_s, 1), "bare_ms": round(bare_s * 1e3, 1)}
            ratio = each_s / bare_s
            say = f"CPU ÷ bare receiver in C with TLS, {case}"
            report("tls", say, ratio, target, ratio <= target, **shares)


if __name__ == "__main__":
    main(sys.argv[1:])
