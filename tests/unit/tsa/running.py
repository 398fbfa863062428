"""A TSA on a thread of this process, behind a real socket."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from papaya.tsa import endpoint
from papaya.tsa.process import Process
from papaya.tsa.service import MakeEvidence, TsaService
from papaya.tsa.tsa import TSA
from tests.unit.secagg.builders import NOW, entropy


@contextmanager
def running(
    address: str | None = None,
    evidence: MakeEvidence | None = None,
    tsa: TSA | None = None,
) -> Iterator[str]:
    """Yields the address; on leaving, the loop must end by itself."""
    service = TsaService(tsa or TSA(entropy("TSA")), evidence)
    stop, wake = socket.socketpair()
    with tempfile.TemporaryDirectory() as folder, stop, wake:
        where = address or f"unix:{Path(folder) / 'tsa'}"
        with endpoint.listen(where) as listener:
            process = Process(service, listener, lambda: NOW)
            thread = threading.Thread(target=process.run, args=(stop,))
            thread.start()
            try:
                yield endpoint.address_of(listener)
            finally:
                wake.send(b"1")
                thread.join(timeout=30)
            assert not thread.is_alive()


def received(connection: socket.socket, size: int) -> bytes:
    """So many bytes, or as many as come before the end."""
    data = b""
    while len(data) < size and (more := connection.recv(size - len(data))):
        data += more
    return data
