"""A log's files over HTTP, by the standard library alone, and never for longer than was said.

Whoever serves a log may drip it: one byte before each timeout of a socket, in the handshake, the
headers or the body. So the time for a file, and for all files of one reading, is counted from the
outside: when it is over, the connection is shut down, and whatever waits for it fails.
"""

from __future__ import annotations

import http.client
import math
import socket
import time
import urllib.error
import urllib.request
from contextlib import suppress
from functools import partial
from threading import Lock, Timer
from typing import Any

from papaya.verifiable_log.errors import LogError, LogSourceUnreachable, MissingFile
from papaya.verifiable_log.tiles import MAX_FILE_BYTES, Fetch

_NOT_THERE = (404, 410)


def over_http(url: str, *, file_s: float = 30.0, all_s: float = math.inf) -> Fetch:
    """Files under a URL: each within `file_s`, and all within `all_s` from now on."""
    if not url.startswith(("https://", "http://")):
        raise LogError(f"not an HTTP address: {url!r}")
    ends_at = time.monotonic() + all_s

    def fetch(path: str) -> bytes:
        address = f"{url.rstrip('/')}/{path}"
        allowed_s = min(file_s, ends_at - time.monotonic())
        if allowed_s <= 0:
            raise LogSourceUnreachable(
                f"{address} was not tried: the log has taken {all_s:g} s already"
            )
        body = _read(address, allowed_s)
        if len(body) > MAX_FILE_BYTES:
            raise LogError(f"{address} is longer than {MAX_FILE_BYTES} bytes")
        return body

    return fetch


def _read(address: str, allowed_s: float) -> bytes:
    watch = _Watch()
    timer = Timer(allowed_s, watch.end)
    timer.daemon = True
    timer.start()
    try:
        with _opener(watch).open(address, timeout=allowed_s) as answer:
            body: bytes = answer.read(MAX_FILE_BYTES + 1)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in _NOT_THERE:
            raise MissingFile(f"{address} is not there") from error
        raise LogSourceUnreachable(f"{address} answers {error.code}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        problem = f"not within {allowed_s:.3g} s" if watch.is_over else str(error)
        raise LogSourceUnreachable(f"{address} cannot be read: {problem}") from error
    finally:
        timer.cancel()
        watch.close()
    if watch.is_over:  # a body without a length ends where it was cut off
        raise LogSourceUnreachable(f"{address} cannot be read: not within {allowed_s:.3g} s")
    return body


class _Watch:
    """The connections of one request: a timer shuts them down, wherever their reader is."""

    def __init__(self) -> None:
        self.is_over = False
        self._lock = Lock()
        self._connections: list[socket.socket] = []

    def add(self, connection: socket.socket) -> None:
        with self._lock:
            if self.is_over:
                raise TimeoutError("its time is over")
            # A second handle: TLS takes the first one away from here.
            self._connections.append(connection.dup())

    def end(self) -> None:
        with self._lock:
            self.is_over = True
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            while self._connections:
                self._connections.pop().close()


class _Watched(http.client.HTTPConnection):
    watch: _Watch

    def connect(self) -> None:
        super().connect()
        self.watch.add(self.sock)


class _WatchedTls(http.client.HTTPSConnection, _Watched):
    """In this order of classes it is watched before the handshake."""


def _opener(watch: _Watch) -> urllib.request.OpenerDirector:
    def watched(kind: type[_Watched], host: str, **options: Any) -> _Watched:
        connection = kind(host, **options)
        connection.watch = watch
        return connection

    class Plain(urllib.request.HTTPHandler):
        def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(partial(watched, _Watched), req)

    class Tls(urllib.request.HTTPSHandler):
        def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(partial(watched, _WatchedTls), req)

    return urllib.request.build_opener(Plain, Tls)
