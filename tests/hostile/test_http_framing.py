"""Mutated requests: whatever we accept, another parser (h11) frames in the same way.

If two parsers disagree about where a request ends, a proxy and a server can be made to see
different requests (request smuggling). We may refuse what h11 accepts, but then the connection
ends.
"""

from __future__ import annotations

import asyncio
import re
from typing import NamedTuple

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papaya.http.exchange import Exchange
from papaya.http.routes import Buffered, HttpRoute, Routes
from tests.unit.http.loopback import ListTransport, Response, a_service, responses_of, run

LONGEST_BODY = 1 << 60


class Framed(NamedTuple):
    """A request with its whole body."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes


class Everywhere(Routes):
    """One route for all methods and paths."""

    def __init__(self, route: HttpRoute) -> None:
        super().__init__([route])
        self._route = route

    def find(self, method: str, path: str) -> tuple[HttpRoute, dict[str, str]]:
        return self._route, {}


def framed_by_us(pieces: list[bytes]) -> tuple[list[Framed], list[Response]]:
    """The requests that are accepted on one connection, and all answers."""
    seen: list[Framed] = []

    def accept(exchange: Exchange, body: bytes) -> None:
        head = exchange.head
        seen.append(Framed(head.method, head.path, head.query, head.headers, body))
        exchange.answer(204)

    async def main() -> bytes:
        async with a_service([]) as service:
            service.routes = Everywhere(Buffered("GET", "/", accept, LONGEST_BODY))
            transport = ListTransport(service)
            for piece in pieces:
                transport.feed(piece)
                for _ in range(2 + piece.count(b"\r\n\r\n")):
                    await asyncio.sleep(0)  # a turn serves only some of what is pipelined
            return transport.sent

    return seen, responses_of(run(main(), "asyncio"))


def framed_by_h11(data: bytes) -> list[Framed]:
    """The whole requests up to the first one that h11 refuses, or that ends the connection."""
    found = []
    while data:
        connection = h11.Connection(h11.SERVER)
        connection.receive_data(data)
        body = b""
        try:
            request = connection.next_event()
            while isinstance(event := connection.next_event(), h11.Data):
                body += event.data
        except h11.RemoteProtocolError:
            break
        if not isinstance(request, h11.Request) or not isinstance(event, h11.EndOfMessage):
            break  # it waits for more bytes
        path, _, query = request.target.decode().partition("?")
        headers: dict[str, str] = {}
        for name, value in ((n.decode(), v.decode("latin-1")) for n, v in request.headers):
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        found.append(Framed(request.method.decode(), path, query, headers, body))
        if connection.their_state is h11.MUST_CLOSE:
            break
        data, _ = connection.trailing_data
    return found


# Each is whole and valid for h11.
STRICTER = {
    b"GET / HTTP/1.0\r\nHost: h\r\n\r\n": 505,
    b"GET / HTTP/1.1\nHost: h\n\n": 400,
    b"get / HTTP/1.1\r\nHost: h\r\n\r\n": 400,
    b"OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n": 400,
    b"GET http://h/ HTTP/1.1\r\nHost: h\r\n\r\n": 400,
    b"GET /a/../b HTTP/1.1\r\nHost: h\r\n\r\n": 400,
    b"GET /#a HTTP/1.1\r\nHost: h\r\n\r\n": 400,
    b"GET /" + 2000 * b"a" + b" HTTP/1.1\r\nHost: h\r\n\r\n": 414,
    b"GET / HTTP/1.1\r\nHost: h\r\n folded\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nHost: h\r\nX: \x01\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nHost: h\r\n" + 70 * b"X: y\r\n" + b"\r\n": 431,
    b"GET / HTTP/1.1\r\nHost: h\r\nExpect: a-miracle\r\n\r\n": 417,
    b"GET / HTTP/1.1\r\nHost: h\r\nExpect: x\r\nExpect: y\r\n\r\n": 400,
    b"PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 01\r\n\r\nx": 400,
    b"PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 1, 1\r\n\r\nx": 400,
    b"PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx": 400,
    b"PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n": 411,
}
REFUSALS = {*STRICTER.values(), 501}
VALID = (
    b"GET /v1/openapi.json?a=b HTTP/1.1\r\nHost: h\r\nAccept: a\r\nAccept: b\r\n\r\n",
    b"POST /v1/join HTTP/1.1\r\nHost: h:1\r\nContent-Length: 5\r\nX:  two  words\t\r\n\r\nhello",
    b"PUT /a HTTP/1.1\r\nContent-Length: 28\r\nHost: h\r\n\r\nGET /b HTTP/1.1\r\nHost: i\r\n\r\n",
    b"PUT /c HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\nabc",
    b"DELETE /d HTTP/1.1\r\nHost: h\r\nConnection: keep-alive, close\r\n\r\n",
)
REQUESTS = (*8 * VALID, *STRICTER)  # what follows a refused one is not read
LINES = (b"Content-Length: 5", b"Transfer-Encoding: chunked", b"Upgrade: x", b"Connection: close")
WORDS = [*(line + b"\r\n" for line in LINES), b"\r\n\r\n", b"\r\n", b"\n ", b"0\r\n\r\n"]
INSERTED = st.sampled_from([*WORDS, *(bytes([n]) for n in b"\0\t\n\r !,/05:?CGHTa\x7f\x85\xff")])


@st.composite
def mutated(draw: st.DrawFn) -> list[bytes]:
    """Pipelined requests with a few mistakes, in the pieces in which they arrive."""
    data = b"".join(draw(st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=4)))
    for _ in range(draw(st.integers(0, 3))):
        places = [match.start() for match in re.finditer(rb"\b|[\r\n]", data)]
        at, removed = draw(st.sampled_from(places or [0])), draw(st.sampled_from((0, 0, 1, 2, 9)))
        data = data[:at] + draw(st.just(b"") | INSERTED) + data[at + removed :]
    cut = draw(st.integers(0, len(data)))
    return [data[:cut], data[cut:]]


@settings(max_examples=1500)
@given(pieces=mutated())
def test_mutated_requests_end_where_another_parser_ends_them(pieces: list[bytes]) -> None:
    ours, answers = framed_by_us(pieces)
    theirs = framed_by_h11(b"".join(pieces))
    assert ours == theirs[: len(ours)]
    final = [answer for answer in answers if answer.status != 100]
    assert [answer.status for answer in final[: len(ours)]] == [204] * len(ours)
    refused = final[len(ours) :]
    assert [answer.status in REFUSALS for answer in refused] == [True] * len(refused)
    is_closed = bool(final) and final[-1].headers.get("connection") == "close"
    assert is_closed or not refused
    # Unless we have closed, we wait for the rest of the request that h11 waits for too.
    assert is_closed or ours == theirs


@pytest.mark.parametrize(("data", "status"), STRICTER.items(), ids=lambda v: str(v)[:40])
def test_what_only_we_refuse_ends_the_connection(data: bytes, status: int) -> None:
    assert len(framed_by_h11(data)) == 1
    ours, [answer] = framed_by_us([data + VALID[0]])
    assert (ours, answer.status, answer.headers["connection"]) == ([], status, "close")
