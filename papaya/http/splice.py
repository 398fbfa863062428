"""Bytes that go from one socket to the next inside the kernel, without a copy (Linux, no TLS).

Through a pipe, which is empty again before anything else happens, so one is enough for a process.
Where there is no splice(2), `open_pipe` says so and bodies are passed on by hand.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
from contextlib import suppress

_PIPE_BYTES = 1 << 20  # what Linux gives anyone
MAX_AHEAD_BYTES = 32 << 10  # half of what a pipe holds before it is enlarged


class TargetBroken(OSError):
    """Bytes were on their way to a socket that takes no more.

    `came` of them are gone from their source all the same, and whoever counts what is left of a
    body has to count them.
    """

    def __init__(self, came: int) -> None:
        super().__init__(f"the target broke after {came} bytes were taken for it")
        self.came = came


class Puller:
    """A receiver that can take its body out of the socket by itself.

    No Protocol: a connection asks each receiver whether it is one.
    """

    def pull(self, file: int, remaining: int) -> int:
        """Takes up to `remaining` bytes that are there; how many. The others are to be received.

        It is called while the transport asks for a buffer, and must not pause or close it: uvloop
        would end the process.
        """
        raise NotImplementedError


class Pipe:
    """Empty after each call: bytes of one body must not come out before those of another."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with suppress(OSError):  # this user has large pipes enough: a small one does it too
            fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self.size: int = fcntl.fcntl(self._in, fcntl.F_GETPIPE_SZ)

    def move(self, source: int, target: int, count: int, ahead: bytes = b"") -> tuple[int, bytes]:
        """From socket to socket: how much came, and the end of it that `target` had no room for.

        `ahead` goes before it, in one piece with it, and is no longer than `MAX_AHEAD_BYTES`.
        Raises TargetBroken, which says how much came: that is lost, as it is in a socket.
        """
        if ahead:
            os.write(self._in, ahead)
        try:
            came = os.splice(source, self._in, count, flags=os.SPLICE_F_NONBLOCK)
        except OSError:
            came = 0  # nothing is there, or whoever reads next is told what is wrong
        left = len(ahead) + came
        try:
            while left:
                left -= os.splice(self._out, target, left)
        except (BlockingIOError, InterruptedError):
            return came, os.read(self._out, left)
        except OSError as error:
            os.read(self._out, left)
            raise TargetBroken(came) from error
        return came, b""

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)


def open_pipe() -> Pipe | None:
    """None where there is no splice(2), or where this user has used up what pipes may hold."""
    pipe = Pipe() if sys.platform == "linux" else None
    if pipe is not None and pipe.size < 2 * MAX_AHEAD_BYTES:
        pipe.close()
        return None
    return pipe


def plain_socket(transport: asyncio.BaseTransport) -> int:
    """The socket under a transport; -1 where its bytes are not those of the protocol."""
    found = transport.get_extra_info("socket")
    if found is None or transport.get_extra_info("sslcontext") is not None:
        return -1
    return int(found.fileno())
