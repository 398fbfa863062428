"""Where the TSA listens: `unix:/path/to/socket` or `tcp:127.0.0.1:8760`.

Only this machine can connect: a file that its owner alone may open, or a loopback address (which
is what an enclave runtime can offer). Refused: any other address.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from typing import Final

BUFFER_BYTES: Final = 4 << 20  # an unmask is large: fewer, longer calls
_BACKLOG: Final = 128  # while a sum is computed, nobody is admitted
_PROBE_S: Final = 1.0


def listen(address: str) -> socket.socket:
    """A listening socket; ValueError for an address that is none. Binds before others may open."""
    family, where = _parsed(address)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_UNIX:
            _bind_file(listener, str(where))
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(address: str, timeout_s: float) -> socket.socket:
    """A connected socket, blocking with this timeout."""
    family, where = _parsed(address)
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(where)
        tune(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def tune(connection: socket.socket) -> None:
    """Large buffers, and no waiting for more to send."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def address_of(listener: socket.socket) -> str:
    """The address to give to a client; tells the port that the system chose for port 0."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    return f"tcp:[{name[0]}]:{name[1]}" if ":" in name[0] else f"tcp:{name[0]}:{name[1]}"


def _parsed(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest:
        return socket.AF_UNIX, rest
    host, _, port = rest.rpartition(":")
    try:
        found = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        number = int(port)
    except ValueError:
        raise ValueError(f"{address!r} is neither unix:/path nor tcp:address:port") from None
    if kind != "tcp" or not 0 <= number < 1 << 16:
        raise ValueError(f"{address!r} is neither unix:/path nor tcp:address:port")
    if not found.is_loopback:
        raise ValueError(f"{address!r}: the TSA listens on this machine only")
    family = socket.AF_INET if found.version == 4 else socket.AF_INET6
    return family, (str(found), number)


def _bind_file(listener: socket.socket, path: str) -> None:
    remove_left_over(path)
    before = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(before)


def remove_left_over(path: str) -> None:
    """Removes the socket of a process that is gone; leaves one that answers, and other files.

    A stopped process accepts nobody: once its backlog is full, a connect without a timeout blocks.
    """
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_S)
            probe.connect(path)
    except (FileNotFoundError, TimeoutError, BlockingIOError):  # the last one: its backlog is full
        return
    except ConnectionRefusedError:
        os.unlink(path)
