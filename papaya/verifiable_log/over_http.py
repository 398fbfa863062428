"""Reads a log's files over HTTP, with the standard library only, and always within a deadline.

A hostile host may send one byte before each timeout of a socket, in the handshake, the headers or
the body; a name server may not answer; a name may have many addresses that all time out. So each
request runs on a daemon thread, and the caller waits until the deadline of the file and of the
whole reading. Then the connection is shut down, which ends the thread.

Redirects are not followed, and no other URL scheme is supported: the host could otherwise make a
device send requests to other hosts.
"""

from __future__ import annotations

import http.client
import math
import socket
import ssl
import time
import urllib.error
import urllib.request
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any

from papaya.verifiable_log.errors import LogError, LogSourceUnreachable, MissingFile
from papaya.verifiable_log.tiles import MAX_FILE_BYTES, Fetch

_NOT_THERE = (404, 410)


def over_http(
    url: str,
    *,
    file_s: float = 30.0,
    all_s: float = math.inf,
    tls: ssl.SSLContext | None = None,
) -> Fetch:
    """Fetch files under a URL: each within `file_s`, and all within `all_s` from now on.

    `tls` replaces the system's certificate authorities.
    """
    if not url.startswith(("https://", "http://")):
        raise LogError(f"invalid HTTP address: {url!r}")
    ends_at = time.monotonic() + all_s

    def fetch(path: str) -> bytes:
        address = f"{url.rstrip('/')}/{path}"
        allowed_s = min(file_s, ends_at - time.monotonic())
        if allowed_s <= 0:
            raise LogSourceUnreachable(
                f"{address} was not read: the deadline of {all_s:g} s for the whole log has passed"
            )
        body = _read_within(address, allowed_s, tls)
        if len(body) > MAX_FILE_BYTES:
            raise LogError(f"{address} is longer than {MAX_FILE_BYTES} bytes")
        return body

    return fetch


def _read_within(address: str, allowed_s: float, tls: ssl.SSLContext | None) -> bytes:
    watch = _Watch()
    found: SimpleQueue[bytes | LogError] = SimpleQueue()

    def read() -> None:
        try:
            found.put(_read(address, allowed_s, watch, tls))
        except LogError as error:
            found.put(error)

    Thread(target=read, name="papaya-log", daemon=True).start()
    try:
        result = found.get(timeout=allowed_s)
    except Empty:
        result = _too_late(address, allowed_s)
    finally:
        watch.end()
    if isinstance(result, LogError):
        raise result
    return result


def _read(address: str, allowed_s: float, watch: _Watch, tls: ssl.SSLContext | None) -> bytes:
    try:
        with _opener(watch, tls).open(address, timeout=allowed_s) as answer:
            body: bytes = answer.read(MAX_FILE_BYTES + 1)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in _NOT_THERE:
            raise MissingFile(f"{address} does not exist") from error
        raise LogSourceUnreachable(f"{address} returned HTTP {error.code}") from error
    except Exception as error:
        # The socket's own timeout: OpenerDirector wraps errors of connecting in a URLError.
        if isinstance(getattr(error, "reason", error), TimeoutError):
            raise _too_late(address, allowed_s) from error
        raise LogSourceUnreachable(f"cannot read {address}: {error}") from error
    finally:
        watch.close()
    return body


def _too_late(address: str, allowed_s: float) -> LogSourceUnreachable:
    return LogSourceUnreachable(
        f"{address} cannot be read: no complete response within {allowed_s:.3g} s"
    )


class _Watch:
    """The connections of one request; `end` shuts them down while another thread reads."""

    def __init__(self) -> None:
        self._is_over = False
        self._lock = Lock()
        self._connections: list[socket.socket] = []

    def add(self, connection: socket.socket) -> None:
        with self._lock:
            if self._is_over:
                raise TimeoutError("the deadline has passed")
            # A duplicate, because TLS detaches the original.
            self._connections.append(connection.dup())

    def end(self) -> None:
        with self._lock:
            self._is_over = True
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
    """With this order of base classes the connection is watched before the handshake."""


def _opener(watch: _Watch, tls: ssl.SSLContext | None) -> urllib.request.OpenerDirector:
    def watched(kind: type[_Watched], host: str, **options: Any) -> _Watched:
        connection = kind(host, **options)
        connection.watch = watch
        return connection

    class Plain(urllib.request.HTTPHandler):
        def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(partial(watched, _Watched), req)

    class Tls(urllib.request.HTTPSHandler):
        def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(partial(watched, _WatchedTls, context=tls), req)

    # Not `build_opener`, which adds handlers of redirects, ftp:, file: and data:.
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        Plain(),
        Tls(),
    ):
        opener.add_handler(handler)
    return opener
