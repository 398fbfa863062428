"""An endpoint whose bodies may pass to another socket without being received (DESIGN: cut-through).

A loop asks a connection for a buffer when there is something to read. If the receiver of the body
is a `Puller` it takes that from the socket itself, and the buffer is for what is left: mostly
nothing, which loops take as a wake-up in vain. Over TLS every body is received.
"""

from __future__ import annotations

import asyncio

from papaya.http.routes import end_receiver
from papaya.http.server_connection import ServerConnection
from papaya.http.splice import Puller, plain_socket


class CutThrough(ServerConnection):
    """One connection."""

    _file: int  # of its socket, or -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._file = plain_socket(transport)
        super().connection_made(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._left and self._file >= 0 and isinstance(self._receiver, Puller):
            self._pull()
        return super().get_buffer(sizehint)

    def _pull(self) -> None:
        receiver = self._receiver
        assert isinstance(receiver, Puller)
        loop = self._service.loop  # nothing may close the transport while it asks for a buffer
        try:
            count = receiver.pull(self._file, self._left)
        except Exception as error:
            self._receiver = None
            loop.call_soon(self._failed, self._exchange, receiver, error)
            return
        self._received += count
        self._left -= count
        if not self._left:
            self._receiver = None
            loop.call_soon(end_receiver, receiver, True)
