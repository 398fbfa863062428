"""A receiver may take its body from the socket itself; the exchange goes on as any other."""

from __future__ import annotations

import os
from contextlib import suppress

import numpy as np
import pytest

from papaya.http.errors import HttpError
from papaya.http.exchange import Exchange
from papaya.http.routes import Puller, Streamed
from tests.unit.http.loopback import LOOPS, a_client, a_request, a_server, run

both_loops = pytest.mark.parametrize("loop", LOOPS)
BODY = np.random.default_rng(3).bytes(300_000)


class Taker(Puller):
    """Takes a little by itself, each time, and the rest as it is given."""

    def __init__(self, exchange: Exchange, piece: int) -> None:
        self.exchange = exchange
        self.piece = piece
        self.room = memoryview(bytearray(10_000))
        self.body = b""
        self.pulled = 0
        self.ends: list[str] = []

    def pull(self, file: int, remaining: int) -> int:
        data = b""
        with suppress(BlockingIOError):
            data = os.read(file, min(self.piece, remaining))
        self.body += data
        self.pulled += len(data)
        return len(data)

    def buffer(self, remaining: int) -> memoryview:
        return self.room

    def received(self, count: int) -> None:
        self.body += self.room[:count]

    def finished(self) -> None:
        self.ends.append("finished")
        self.exchange.answer(200, b"%d" % len(self.body))

    def broken(self) -> None:
        self.ends.append("broken")


@both_loops
@pytest.mark.parametrize("piece", [1, 7_000, 1 << 20])
def test_a_body_is_pulled_and_received_in_turns(loop: str, piece: int) -> None:
    made: list[Taker] = []

    def receive(exchange: Exchange) -> Taker:
        made.append(Taker(exchange, piece))
        return made[-1]

    async def main() -> None:
        async with (
            a_server([Streamed("PUT", "/u", receive, 1 << 20)]) as server,
            a_client(server.port) as client,
        ):
            client.send(a_request("PUT", "/u", BODY) + a_request("PUT", "/u", BODY[::-1]))
            for _ in range(2):
                assert (await client.response()).body == b"%d" % len(BODY)
            await client.close()

    run(main(), loop)
    assert [taker.body for taker in made] == [BODY, BODY[::-1]]
    assert [taker.ends for taker in made] == [["finished"]] * 2
    assert all(taker.pulled > 0 for taker in made)


@both_loops
def test_a_pull_that_fails_is_answered_and_nothing_else_falls(loop: str) -> None:
    class Clumsy(Taker):
        def pull(self, file: int, remaining: int) -> int:
            raise HttpError(507, "no room")

    made: list[Taker] = []

    def receive(exchange: Exchange) -> Taker:
        made.append(Clumsy(exchange, 1))
        return made[-1]

    async def main() -> None:
        async with a_server([Streamed("PUT", "/u", receive, 1 << 20)]) as server:
            for _ in range(2):
                async with a_client(server.port) as client:
                    client.send(a_request("PUT", "/u", BODY))
                    assert (await client.response()).status == 507

    run(main(), loop)
    assert [taker.ends for taker in made] == [["broken"]] * 2


@both_loops
def test_a_peer_that_leaves_in_the_middle_breaks_the_body(loop: str) -> None:
    made: list[Taker] = []

    def receive(exchange: Exchange) -> Taker:
        made.append(Taker(exchange, 100))
        return made[-1]

    async def main() -> None:
        async with (
            a_server([Streamed("PUT", "/u", receive, 1 << 20)]) as server,
            a_client(server.port) as client,
        ):
            client.send(a_request("PUT", "/u", BODY)[:-1])
            client.writer.write_eof()
            assert await client.rest() == b""

    run(main(), loop)
    assert [taker.ends for taker in made] == [["broken"]]
