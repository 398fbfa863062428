"""What the connections of a listener share."""

from __future__ import annotations

import asyncio
import socket
from typing import cast

import pytest

from papaya.http.server_connection import ServerConnection
from tests.unit.http.loopback import IMPATIENT, LOOPS, a_server, a_service, run


def test_a_connection_that_cannot_be_swept_leaves_the_others_their_sweep(
    caplog: pytest.LogCaptureFixture,
) -> None:
    swept = asyncio.Event()

    class Swept:
        def __init__(self, fails: bool) -> None:
            self.fails = fails
            self.times = 0

        def check_timeouts(self, now: float) -> None:
            self.times += 1
            if self.fails:
                raise ZeroDivisionError
            if self.times == 3:
                swept.set()

        def close_if_idle(self) -> None: ...

        def abort(self) -> None: ...

    async def main() -> None:
        async with a_service([], IMPATIENT) as service:
            connections = [Swept(True), Swept(False), Swept(True)]
            service.connections.update(cast(list[ServerConnection], connections))
            await swept.wait()
            service.connections.clear()

    run(main())
    assert "cannot check the timeouts" in caplog.text


@pytest.mark.parametrize("loop", LOOPS)
def test_a_connection_that_was_just_accepted_is_closed_with_the_listener(loop: str) -> None:
    """Its task is cancelled before it has begun."""

    async def main() -> None:
        async with a_server([]) as listening:
            with socket.create_connection(("127.0.0.1", listening.port), timeout=60) as client:
                acceptor = listening._acceptor
                acceptor._accept(acceptor._sockets[0])
                assert listening.connections == 1
                listening.close()
                assert await asyncio.to_thread(client.recv, 1) == b""
                assert listening.connections == 0

    run(main(), loop)
