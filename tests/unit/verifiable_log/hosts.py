"""Whoever serves a log: an honest web server, and one that drips."""

from __future__ import annotations

import functools
import http.server
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_DRIP_S = 0.01
_DRIPS = 6000  # a minute, so that a reader without a limit of its own fails, and does not hang


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(folder: Path, tls: ssl.SSLContext | None = None, port: int = 0) -> Iterator[str]:
    """Its address; the folder may change meanwhile."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class Dripping:
    """Sends what it is given, then a byte now and then; `asked` counts requests."""

    def __init__(self, first: bytes, port: int = 0) -> None:
        self._first = first
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", port), backlog=64)
        self._threads = [threading.Thread(target=self._accept)]
        self.asked = threading.Semaphore(0)
        self.port = self._listener.getsockname()[1]

    def __enter__(self) -> Dripping:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                thread = threading.Thread(target=self._drip, args=(connection,))
                self._threads.append(thread)
                thread.start()

    def _drip(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(1 << 16)
            self.asked.release()
            connection.sendall(self._first)
            for _ in range(_DRIPS):
                if self._over.wait(_DRIP_S):
                    break
                connection.sendall(b"x")
