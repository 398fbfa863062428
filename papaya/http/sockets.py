"""Non-blocking sockets: connecting, and waiting until one is ready."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

Address = tuple[str, int]
"""Host and port."""


async def connected_socket(host: str, port: int) -> socket.socket:
    """A connection to the first address of `host` that answers."""
    loop = asyncio.get_running_loop()
    return await connect_to_any(await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))


async def connect_to_any(
    found: Iterable[tuple[Any, ...]], each_s: float | None = None
) -> socket.socket:
    """`found`: at least one entry, as `getaddrinfo` returns them. `each_s`: the time for each."""
    problems: list[OSError] = []
    for family, kind, protocol, _, address in found:
        try:
            plain = socket.socket(family, kind, protocol)
        except OSError as error:  # a kernel without IPv6, for example
            problems.append(error)
            continue
        try:
            plain.setblocking(False)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(each_s):
                await _connect(plain, address)
        except OSError as error:  # also TimeoutError
            plain.close()
            problems.append(error)
        except BaseException:
            plain.close()
            raise
        else:
            return plain
    raise problems[0]


async def _connect(plain: socket.socket, address: Any) -> None:
    """Not `sock_connect`: uvloop looks up IP addresses too, in threads that all lookups share."""
    try:
        plain.connect(address)
    except (BlockingIOError, InterruptedError):
        await until_writable(plain)
        if code := plain.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(code, os.strerror(code)) from None


async def until_readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    await _until_ready(connection.fileno(), loop.add_reader, loop.remove_reader)


async def until_writable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    await _until_ready(connection.fileno(), loop.add_writer, loop.remove_writer)


async def _until_ready(file: int, add: Callable[..., None], remove: Callable[[int], bool]) -> None:
    ready = asyncio.get_running_loop().create_future()
    add(file, partial(_set, ready))
    try:
        await ready
    finally:
        remove(file)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
