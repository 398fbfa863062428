"""Ends connections of TLS whose peers send many records in a row that carry no data.

OpenSSL handles such records itself, for example key updates of TLS 1.3. One call of SSL_read goes
on as long as the peer sends these, 12 µs each, and nobody else is served. It has no limit on them,
and Python offers no way to make SSL_read return. So a callback that OpenSSL calls for each record,
of whatever type, counts them, and aborts the TCP connection under it.
"""

from __future__ import annotations

import ctypes
import socket
from contextlib import suppress
from ssl import SSLContext, SSLSocket
from typing import Any

# In a handshake, or in one turn of reading beside those with data. A good peer sends a few.
RECORDS_WITHOUT_DATA = 64

_HEADER = 256  # SSL3_RT_HEADER: the callback is called with the head of a record
_libc = ctypes.CDLL(None)


class CountedSocket(SSLSocket):
    """A connection whose records are counted."""

    # Records that it may still receive; set it before each turn of reading.
    records_left = RECORDS_WITHOUT_DATA

    @property
    def is_cut(self) -> bool:
        return self.records_left < 0

    def cut(self) -> None:
        """Abort the TCP connection. The descriptor stays open, and what waits there is dropped."""
        # Connecting to AF_UNSPEC disconnects. Python's `connect` takes no such address.
        if _libc.connect(self.fileno(), bytes(16), 16):
            with suppress(OSError):  # not TCP, or not Linux
                socket.socket.shutdown(self, socket.SHUT_RDWR)


def count_records(context: SSLContext) -> None:
    """Count the records of all connections that are made with the context from now on."""
    if context.sslsocket_class is not CountedSocket:
        context.sslsocket_class = CountedSocket
        # Without the wrapper of `ssl`, which makes three enums of each call.
        callback: Any = getattr(SSLContext.__base__, "_msg_callback", None)
        if callback is not None:
            callback.__set__(context, _on_message)


def _on_message(
    connection: object, direction: str, version: int, kind: int, message: int, data: bytes
) -> None:
    if kind == _HEADER and direction == "read" and type(connection) is CountedSocket:
        connection.records_left -= 1
        if connection.records_left < 0:
            connection.cut()
