"""The peer of `data_plane.py`: receives float32 updates from sockets and adds them, no more.

    python bench/_bare_add.py LENGTH CHUNK_BYTES CONNECTIONS

Prints its port, then the CPU seconds that it used and the sum of all that it has added. The least
that plain Python and numpy can do with these bytes: no protocol, no checks, nothing kept. It
answers each chunk with one byte, so that its devices come at the pace of a server's.
"""

from __future__ import annotations

import socket
import sys
import time
from selectors import EVENT_READ, DefaultSelector

import numpy as np


def touched(length: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Zeros whose pages are there: a server has had its buffers before, too."""
    return np.full(length, 0.0, np.float32)


class Sender:
    """One connection, and the memory for the update that is on its way."""

    def __init__(self, connection: socket.socket, length: int, chunk_bytes: int) -> None:
        self.connection = connection
        self.update = touched(length)
        self._room = self.update.view(np.uint8).data
        self._chunk_bytes = chunk_bytes
        self._at = 0

    def receive(self) -> bool | None:
        """Whether an update is whole; None when no more will come."""
        end = min(self._at - self._at % self._chunk_bytes + self._chunk_bytes, len(self._room))
        count = self.connection.recv_into(self._room[self._at : end])
        if not count:
            return None
        self._at += count
        if self._at == end:
            self.connection.send(b"k")
        if self._at == len(self._room):
            self._at = 0
            return True
        return False


def main() -> None:
    length, chunk_bytes, connections = map(int, sys.argv[1:])
    total = touched(length)
    with socket.create_server(("127.0.0.1", 0)) as server, DefaultSelector() as selector:
        print(server.getsockname()[1], flush=True)
        for _ in range(connections):
            sender = Sender(server.accept()[0], length, chunk_bytes)
            selector.register(sender.connection, EVENT_READ, sender)
        began_s = time.process_time()
        while selector.get_map():
            for key, _ in selector.select():
                is_whole = key.data.receive()
                if is_whole:
                    np.add(total, key.data.update, out=total)
                elif is_whole is None:
                    selector.unregister(key.data.connection)
                    key.data.connection.close()
    print(time.process_time() - began_s, total.sum(dtype=np.float64), flush=True)


if __name__ == "__main__":
    main()
