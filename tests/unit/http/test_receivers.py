"""Streamed routes: a receiver gets exactly its body, exactly one end, and the peer an answer."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papaya.http.exchange import Exchange
from papaya.http.routes import Streamed
from tests.unit.http.loopback import (
    LOOPS,
    Collector,
    ListTransport,
    Shop,
    a_client,
    a_request,
    a_server,
    a_service,
    answers,
    responses_of,
    run,
)

both_loops = pytest.mark.parametrize("loop", LOOPS)
BIG = bytes(range(256)) * 4096


@pytest.mark.parametrize("where", ["receive", "buffer", "received", "finished", "no room"])
def test_a_receiver_that_raises_ends_once_and_the_peer_is_answered(where: str) -> None:
    class Bad(Collector):
        def buffer(self, remaining: int) -> memoryview:
            if where == "no room":
                return self.room[:0]
            self._fail("buffer")
            return self.room

        def received(self, count: int) -> None:
            self._fail("received")

        def finished(self) -> None:
            self.ends.append("finished")
            self._fail("finished")

        def _fail(self, here: str) -> None:
            if here == where:
                raise ValueError("bad")

    made: list[Bad] = []

    def receive(exchange: Exchange) -> Bad:
        if where == "receive":
            raise ValueError("bad")
        made.append(Bad(exchange))
        return made[-1]

    found = answers(
        [Streamed("PUT", "/bad", receive, 10_000), *Shop().routes],
        a_request("PUT", "/bad", 5000 * b"x"),
        a_request("POST", "/echo", b"still here"),
    )
    assert [response.status for response in found] == [500, 200]
    assert [bad.ends for bad in made] == (
        [] if where == "receive" else [["finished" if where == "finished" else "broken"]]
    )


def test_a_streamed_route_may_refuse_before_the_body() -> None:
    def receive(exchange: Exchange) -> None:
        exchange.answer(503, b"full", [("Retry-After", "5")])

    found = answers(
        [Streamed("PUT", "/full", receive, 1 << 20), *Shop().routes],
        a_request("PUT", "/full", 10_000 * b"x"),
        a_request("POST", "/echo", b"same connection"),
    )
    assert [response.status for response in found] == [503, 200]


def test_a_streamed_route_that_does_nothing_is_a_bug_that_is_answered() -> None:
    (response,) = answers([Streamed("PUT", "/x", lambda _: None, 10)], a_request("PUT", "/x", b"y"))
    assert response.status == 500


def test_an_early_answer_breaks_the_receiver_and_reaches_a_peer_that_still_sends() -> None:
    class Early(Collector):
        def received(self, count: int) -> None:
            if self.exchange.is_open:
                self.exchange.answer(409, b"enough")

    made: list[Early] = []

    def receive(exchange: Exchange) -> Early:
        made.append(Early(exchange))
        return made[-1]

    async def main() -> None:
        async with (
            a_server([Streamed("PUT", "/early", receive, 1 << 30)]) as server,
            a_client(server.port) as client,
        ):
            client.send(a_request("PUT", "/early", 4 * BIG))
            response = await client.response()
            assert (response.status, response.body) == (409, b"enough")
            assert response.headers["connection"] == "close"
            await client.writer.drain()
            assert await client.rest() == b""

    run(main())
    assert [early.ends for early in made] == [["broken"]]


@both_loops
def test_a_receiver_can_hold_its_peer_back(loop: str) -> None:
    class Careful(Collector):
        """Takes one piece, then waits to be asked for the next."""

        is_resting = False

        def received(self, count: int) -> None:
            assert not self.is_resting
            super().received(count)
            self.is_resting = True
            self.exchange.pause_reading()
            asyncio.get_running_loop().call_soon(self.go_on)

        def go_on(self) -> None:
            self.is_resting = False
            self.exchange.resume_reading()

    (response,) = answers(
        [Streamed("PUT", "/slow", lambda exchange: Careful(exchange, 700), 1 << 20)],
        a_request("PUT", "/slow", BIG[:100_000]),
        loop=loop,
    )
    assert response.body == BIG[:100_000]


REQUESTS = st.tuples(
    st.sampled_from([("POST", "/echo"), ("PUT", "/stream/a"), ("GET", "/echo"), ("GET", "/no")]),
    st.binary(max_size=60) | st.integers(1000, 3000).map(lambda n: n * b"x"),
)


class Exchanged(NamedTuple):
    """What routes saw and peers got."""

    seen: list[tuple[str, str, bytes]]
    received: list[tuple[bytes, list[str]]]
    answered: list[tuple[int, bytes]]


def exchanged(stream: bytes, cuts: list[int], room: int) -> Exchanged:
    """What the routes saw and what the peer got, when the stream arrives in these pieces."""
    shop = Shop(room)

    async def main() -> bytes:
        async with a_service(shop.routes) as service:
            transport = ListTransport(service)
            for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
                transport.feed(stream[start:end])
                await asyncio.sleep(0)
            while transport.waiting and not transport.is_closing():
                await asyncio.sleep(0)
            return transport.sent

    sent = run(main(), "asyncio")
    received = [(receiver.body, receiver.ends) for receiver in shop.receivers]
    answered = [(response.status, response.body) for response in responses_of(sent)]
    return Exchanged(shop.seen, received, answered)


@settings(max_examples=60)
@given(
    requests=st.lists(REQUESTS, max_size=5),
    tail=st.sampled_from([b"", b"", b"GET /echo HT", b"GET / HTTP/1.1\n\n", b"\0", b"\r\n\r\n"]),
    data=st.data(),
)
def test_where_the_stream_is_cut_makes_no_difference(
    requests: list[tuple[tuple[str, str], bytes]], tail: bytes, data: st.DataObject
) -> None:
    parts = [a_request(*line, body if line[0] != "GET" else b"") for line, body in requests]
    stream = b"".join(parts) + tail
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    whole = exchanged(stream, [], 1 << 20)
    assert exchanged(stream, cuts, data.draw(st.integers(1, 500))) == whole
    streamed = [body for (method, _), body in requests if method == "PUT"]
    assert whole.received == [(body, ["finished"]) for body in streamed]


def test_every_single_cut_of_a_short_stream() -> None:
    stream = a_request("PUT", "/stream/a", b"GET /echo HTTP/1.1") + a_request("POST", "/echo", b"x")
    whole = exchanged(stream, [], 100)
    assert whole.answered == [(200, b"GET /echo HTTP/1.1"), (200, b"x")]
    for cut in range(len(stream)):
        assert exchanged(stream, [cut], 100) == whole
    assert exchanged(stream, list(range(len(stream))), 1) == whole


def test_a_peer_that_dies_in_its_body_breaks_the_receiver() -> None:
    shop = Shop()

    async def main() -> None:
        async with a_server(shop.routes) as server:
            async with a_client(server.port) as client:
                client.send(a_request("PUT", "/stream/a", b"whole"))
                await client.response()
                client.send(a_request("PUT", "/stream/b", b"not whole")[:-1])
                while len(shop.receivers) < 2:  # until the server has it
                    await asyncio.sleep(0)
            while not shop.receivers[1].ends:
                await asyncio.sleep(0)
            assert not shop.receivers[1].exchange.is_open

    run(main())
    assert [receiver.ends for receiver in shop.receivers] == [["finished"], ["broken"]]
