"""A transport for TLS in which OpenSSL reads from and writes to the socket itself.

The transports of asyncio and uvloop pass every byte through two memory buffers that OpenSSL clears
and copies, and keep up to half a megabyte per connection for it. Here a record is decrypted into
the buffer of the protocol and encrypted for the kernel, so an idle connection has no buffers at all
(`python bench/tls.py`).

    loop ── readable ──▶ SSL_read into `get_buffer`, record after record ──▶ `buffer_updated`
    `write` ──▶ SSL_write to the socket; what it does not take is copied and sent later

OpenSSL may have decrypted more than the protocol had room for. The kernel does not report such
bytes, so reading is scheduled again whenever it ended for another reason than an empty socket.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from ssl import SSLContext, SSLEOFError, SSLSocket, SSLWantReadError, SSLWantWriteError
from typing import Any

from papaya.http.proxy_protocol import refuse_header
from papaya.http.sockets import until_readable, until_writable
from papaya.http.tls_records import RECORDS_WITHOUT_DATA, CountedSocket, count_records

_BYTES_PER_TURN = 1 << 20  # read from one connection before the loop serves the others
RECORDS_PER_TURN = 256  # likewise, however short they are: each one costs a call of OpenSSL
_LEAST_BYTES = _BYTES_PER_TURN // RECORDS_PER_TURN  # what a record counts at least
_HIGH_BYTES, _LOW_BYTES = 64 << 10, 16 << 10
_RECORD_BYTES = 16 << 10  # what OpenSSL encrypts at a time
_CAN_CORK = hasattr(socket, "TCP_CORK")  # Linux joins what is written meanwhile to full packets


class TlsTransport(asyncio.Transport):
    """A connection whose handshake is over. `connection_made` has been called."""

    __slots__ = (
        "_counted",
        "_file",
        "_has_reader",
        "_has_writer",
        "_high",
        "_is_closed",
        "_is_closing",
        "_is_full",
        "_is_paused",
        "_loop",
        "_low",
        "_protocol",
        "_tls",
        "_unsent",
        "_will_read",
        "_write_error",
    )

    def __init__(self, tls: SSLSocket, protocol: asyncio.BufferedProtocol) -> None:
        super().__init__()
        self._tls = tls
        self._counted = tls if isinstance(tls, CountedSocket) else None
        self._file = tls.fileno()
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._unsent = bytearray()  # written by the protocol, not yet taken by the socket
        self._high, self._low = _HIGH_BYTES, _LOW_BYTES  # of `_unsent`
        self._is_full = False  # the protocol was told to stop writing
        self._is_paused = False  # the protocol wants no bytes
        self._has_reader = False  # the loop watches for bytes
        self._has_writer = False  # the loop watches for room
        self._will_read = False  # the loop will call `_read_again`
        self._write_error: Exception | None = None  # why nothing more can be sent
        self._is_closing = False
        self._is_closed = False
        protocol.connection_made(self)
        if not self._is_closing:
            self._watch_reads()
            self._read_soon()  # bytes may have come with the end of the handshake

    @property
    def _engine(self) -> Any:
        """Reads and writes records: the object behind the socket, or the socket if there is none.

        The socket's own methods pass the call on, with two frames of Python per record; `read` also
        hides SSLEOFError. A closed socket has no such object, and its methods raise ValueError.
        """
        return getattr(self._tls, "_sslobj", None) or self._tls

    # --- Reading --------------------------------------------------------------------------------

    def is_reading(self) -> bool:
        return not (self._is_paused or self._is_closing)

    def pause_reading(self) -> None:
        self._is_paused = True  # the loop stops watching only if bytes arrive in the meantime

    def resume_reading(self) -> None:
        self._is_paused = False
        if not self._is_closing:
            self._watch_reads()
            self._read_soon()

    def _watch_reads(self) -> None:
        if not self._has_reader:
            self._has_reader = True
            self._loop.add_reader(self._file, self._readable)

    def _read_soon(self) -> None:
        if not self._will_read:
            self._will_read = True
            self._loop.call_soon(self._read_again)

    def _read_again(self) -> None:
        self._will_read = False
        if not self._is_paused:
            self._readable()

    def _readable(self) -> None:
        if self._is_paused:
            self._has_reader = False
            self._loop.remove_reader(self._file)
            return
        if self._unsent:
            self._flush()  # a renegotiation may have kept it waiting for bytes
        if self._counted is not None:
            self._counted.records_left = RECORDS_PER_TURN + RECORDS_WITHOUT_DATA
        left = _BYTES_PER_TURN
        while left > 0 and self.is_reading():
            try:
                taken, spent, is_empty, error = self._read(left)
            except Exception as mistake:  # of the protocol, which will not take these bytes later
                self._end(mistake)
                raise
            left -= spent
            if is_empty:
                if self._write_error is not None:
                    self._end(self._write_error)
                return
            if error is not None or not taken:
                self._ended(error)
                return
        if self.is_reading():
            self._read_soon()

    def _read(self, most: int) -> tuple[int, int, bool, Exception | None]:
        """Bytes that the protocol got, what they count, whether the socket is empty, and an error.

        Neither bytes nor an error: the peer has closed.
        """
        room = memoryview(self._protocol.get_buffer(-1))[:most]  # there may be room for a model
        taken, spent, size, is_empty = 0, 0, len(room), False
        read = self._engine.read
        error: Exception | None = None
        try:
            # With a buffer, `read` returns how many bytes it wrote there.
            while taken < size and spent < most and (count := read(size - taken, room[taken:])):
                taken += count
                spent += count if count > _LEAST_BYTES else _LEAST_BYTES
        except SSLWantReadError:
            is_empty = True
        except SSLWantWriteError:
            is_empty = True
            self._watch_writes()
        except SSLEOFError:
            pass  # the peer has closed without close_notify
        except (OSError, ValueError) as problem:
            error = problem.with_traceback(None)  # its frames hold the error and the buffer
        if self._counted is not None and self._counted.is_cut:
            is_empty, error = False, ConnectionAbortedError("too many TLS records without data")
        if taken:
            self._protocol.buffer_updated(taken)
        return taken, spent, is_empty, error

    def _ended(self, error: Exception | None) -> None:
        if error is not None:
            self._end(error)
        elif not self._is_closing and not self._protocol.eof_received():
            self.close()

    # --- Writing --------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """`data` may be changed when this returns."""
        if not data or not self._can_send:
            return
        sent = 0 if self._unsent else self._send(memoryview(data))
        if sent < len(data) and self._can_send:
            self._unsent += memoryview(data)[sent:]
            self._watch_writes()
            if len(self._unsent) > self._high and not self._is_full:
                self._is_full = True
                self._protocol.pause_writing()

    @property
    def _can_send(self) -> bool:
        return not self._is_closing and self._write_error is None

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = _HIGH_BYTES if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def can_write_eof(self) -> bool:
        return False  # before TLS 1.3, closing one direction closes both

    def _watch_writes(self) -> None:
        if not self._has_writer:
            self._has_writer = True
            self._loop.add_writer(self._file, self._writable)

    def _writable(self) -> None:
        if not self._unsent:
            self._has_writer = False
            self._loop.remove_writer(self._file)
            self._read_soon()  # it waited for room
            return
        self._flush()

    def _flush(self) -> None:
        with memoryview(self._unsent) as unsent:
            sent = self._send(unsent)
        del self._unsent[:sent]
        if self._is_full and len(self._unsent) <= self._low:
            self._is_full = False
            self._protocol.resume_writing()
        if not self._unsent and self._is_closing:
            self._end(None)

    def _send(self, data: memoryview) -> int:
        """How much OpenSSL took. It makes one system call per record.

        It gets one record at a time: if the socket is full after some of several records, OpenSSL
        does not report these, and wants all of the bytes again.
        """
        sent = 0
        size, write = len(data), self._engine.write
        problem: Exception | None = None
        is_corked = _CAN_CORK and size > _RECORD_BYTES and self._tls.family != socket.AF_UNIX
        if is_corked:
            self._tls.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
        try:
            while sent < size:
                sent += write(data[sent : sent + _RECORD_BYTES])
        except (SSLWantReadError, SSLWantWriteError):
            pass
        except (OSError, ValueError) as error:
            problem = error.with_traceback(None)
        finally:
            if is_corked:
                self._tls.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)
        if problem is not None:
            self._stop_sending(problem)
        return sent

    def _stop_sending(self, error: Exception) -> None:
        """The peer may have answered before it closed, so read until there is nothing more."""
        if self._is_closing or self._is_paused:
            self._end(error)
        elif self._write_error is None:
            self._write_error = error
            self._unsent = bytearray()
            self._read_soon()

    # --- Closing --------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        """After what was written is sent."""
        if not self._is_closing:
            self._is_closing = True
            if not self._unsent:
                self._end(None)
            elif self._has_reader:  # nobody takes what still arrives
                self._has_reader = False
                self._loop.remove_reader(self._file)

    def abort(self) -> None:
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._is_closed:
            return
        self._is_closing = self._is_closed = True
        if self._has_reader:
            self._loop.remove_reader(self._file)
        if self._has_writer:
            self._loop.remove_writer(self._file)
        with suppress(OSError, ValueError):
            if error is None and not self._unsent:
                self._tls.unwrap()  # tells the peer; does not wait for it
        self._unsent = bytearray()
        self._tls.close()
        self._loop.call_soon(self._protocol.connection_lost, error)

    # --- What the protocol may ask --------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "peercert":
            return self._tls.getpeercert()
        return self._tls if name == "socket" else default


async def start_tls(
    connection: socket.socket,
    context: SSLContext,
    make: Callable[[], asyncio.BufferedProtocol],
    *,
    server_hostname: str | None = None,
    timeout_s: float | None = None,
) -> asyncio.BufferedProtocol:
    """Does the handshake on a connected socket, as a server unless there is a `server_hostname`.

    Raises OSError (also every error of TLS) or TimeoutError, and then the socket is closed.
    """
    connection.setblocking(False)
    if server_hostname is None:
        count_records(context)
    try:
        # `wrap_socket` of CPython 3.11 does not close a socket that the peer has reset. A reset
        # between this line and the next one is found when the socket is freed.
        connection.getpeername()
        tls = context.wrap_socket(
            connection,
            server_side=server_hostname is None,
            server_hostname=server_hostname,
            do_handshake_on_connect=False,
        )
    except BaseException:
        connection.close()
        raise
    try:
        async with asyncio.timeout(timeout_s):
            await _handshake(tls)
    except BaseException:
        tls.close()
        raise
    protocol = make()
    TlsTransport(tls, protocol)
    return protocol


async def _handshake(tls: SSLSocket) -> None:
    while True:
        if tls.server_side:
            refuse_header(tls)
        try:
            tls.do_handshake()
        except SSLWantReadError:
            await until_readable(tls)
        except SSLWantWriteError:
            await until_writable(tls)
        else:
            return
