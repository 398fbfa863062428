"""The peer of `data_plane.py`: receives float32 updates from one socket and adds them, no more.

    python bench/_bare_add.py LENGTH        prints its port, then CPU seconds per update and the sum

The fastest thing that plain Python and numpy do with these bytes: no protocol, no checks.
"""

from __future__ import annotations

import socket
import sys
import time

import numpy as np

_PIECE_BYTES = 1 << 20


def main() -> None:
    length = int(sys.argv[1])
    update, total = np.empty(length, np.float32), np.zeros(length, np.float32)
    room = memoryview(update).cast("B")
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    updates, began_s = 0, time.process_time()
    with connection:
        while receive(connection, room):
            np.add(total, update, out=total)
            updates += 1
            if updates == 1:
                began_s = time.process_time()  # memory is there now
    print((time.process_time() - began_s) / (updates - 1), total.sum(dtype=np.float64), flush=True)


def receive(connection: socket.socket, room: memoryview) -> bool:
    at = 0
    while at < len(room):
        count = connection.recv_into(room[at : at + _PIECE_BYTES])
        if not count:
            return False
        at += count
    return True


if __name__ == "__main__":
    main()
