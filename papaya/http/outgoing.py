"""What goes back to the peer: heads, bodies, and files piece by piece as fast as they are taken."""

from __future__ import annotations

import asyncio
import os

from papaya.http.exchange import log

_FILE_PIECE_BYTES = 256 << 10
_JOINED_BYTES = 64 << 10  # a body up to this is copied behind its head, for one write


class Outgoing:
    """The writing half of a connection. It holds at most what one answer or one piece needs."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.is_full = False  # the transport takes no more for now
        self.written = 0
        self._file: int | None = None
        self._file_left = 0

    @property
    def unsent(self) -> int:
        return self._transport.get_write_buffer_size()

    @property
    def has_file(self) -> bool:
        return self._file is not None

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self._transport.write(data)

    def answer(self, head: str, body: bytes) -> None:
        data = head.encode("latin-1")
        if len(body) <= _JOINED_BYTES:
            self.write(data + body)
        else:
            self.write(data)
            self.write(body)

    def take_file(self, file: int, size: int) -> None:
        """Owns the open file from now on, and sends it with `send_piece`."""
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
        self._file, self._file_left = file, size

    def send_piece(self) -> bool:
        """Sends one piece if there is room; False when there is none, or nothing is left."""
        if self._file is None or self.is_full:
            return False
        piece = b""
        if self._file_left:
            try:
                piece = os.read(self._file, min(_FILE_PIECE_BYTES, self._file_left))
            except OSError as error:
                log.error("a file could not be read while it was sent: %s", error)
            if not piece:
                # Its head promised more than there is. Only a cut tells the peer.
                self.drop_file()
                self._transport.abort()
                return False
            self.write(piece)
            self._file_left -= len(piece)
        if not self._file_left:
            self.drop_file()
        return self._file is not None

    def drop_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def address_of_peer(transport: asyncio.Transport) -> str:
    name = transport.get_extra_info("peername")
    if not name:
        return "unknown"
    return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"
