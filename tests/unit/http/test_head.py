"""The parser of heads: a struct or an HttpError, and never anything else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.http.errors import HttpError
from papaya.http.head import RequestHead, ResponseHead, parse_request, parse_response
from papaya.http.limits import MAX_HEADERS

REQUEST = (
    b"PUT /v1/uploads/u1/chunks/7?a=b HTTP/1.1\r\nHost: papaya.example:8750\r\n"
    b"Authorization: Bearer secret\r\nContent-Length: 12\r\nX-Thing:  two  words\t\r\n"
)
RESPONSE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\nRetry-After: 5\r\n"


def test_a_request() -> None:
    assert parse_request(REQUEST) == RequestHead(
        method="PUT",
        path="/v1/uploads/u1/chunks/7",
        query="a=b",
        headers={
            "host": "papaya.example:8750",
            "authorization": "Bearer secret",
            "content-length": "12",
            "x-thing": "two  words",
        },
        length=12,
        closes=False,
        expects_continue=False,
    )


def test_what_headers_say_about_the_exchange() -> None:
    line = b"POST / HTTP/1.1\r\nhost: h\r\n"
    assert parse_request(line).length == 0
    assert parse_request(line + b"connection: Keep-Alive, Close\r\n").closes
    assert parse_request(line + b"Expect: 100-Continue\r\n").expects_continue
    assert parse_request(line + b"via: a\r\nVia: b\r\n").headers["via"] == "a, b"
    assert parse_request(line + b"empty:\r\n").headers["empty"] == ""


def test_a_response() -> None:
    headers = {"content-length": "2", "retry-after": "5"}
    assert parse_response(RESPONSE) == ResponseHead(503, headers, 2, closes=False)
    assert parse_response(b"HTTP/1.1 100 Continue\r\n").length is None


def with_headers(*lines: bytes) -> bytes:
    return b"".join(line + b"\r\n" for line in (b"POST /x HTTP/1.1", b"Host: h", *lines))


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"", 400),
        (b"\r\n", 400),
        (b"GET / HTTP/1.1", 400),
        (b"GET / HTTP/1.1\nHost: h\n", 400),
        (b"get / HTTP/1.1\r\nHost: h\r\n", 400),
        (b"GET  / HTTP/1.1\r\nHost: h\r\n", 400),
        (b" GET / HTTP/1.1\r\nHost: h\r\n", 400),
        (b"GET / HTTP/1.1 \r\nHost: h\r\n", 400),
        (b"GET http://h/ HTTP/1.1\r\nHost: h\r\n", 400),
        (b"OPTIONS * HTTP/1.1\r\nHost: h\r\n", 400),
        (b"GET /a b HTTP/1.1\r\nHost: h\r\n", 400),
        (b"GET /\xc3\xa4 HTTP/1.1\r\nHost: h\r\n", 400),
        (b"GET /a#b HTTP/1.1\r\nHost: h\r\n", 400),
        (b"GET /a/../b HTTP/1.1\r\nHost: h\r\n", 400),
        (b"GET /a/.. HTTP/1.1\r\nHost: h\r\n", 400),
        (b"GET /./a HTTP/1.1\r\nHost: h\r\n", 400),
        (b"GET //a HTTP/1.1\r\nHost: h\r\n", 400),
        (b"GET / HTTP/1.1\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nHost: h\r\n", 400),
        (b"GET / HTTP/1.0\r\nHost: h\r\n", 505),
        (b"GET / HTTP/2.0\r\nHost: h\r\n", 505),
        (b"GET /" + 1024 * b"a" + b" HTTP/1.1\r\nHost: h\r\n", 414),
        (b"GET /?" + 1025 * b"a" + b" HTTP/1.1\r\nHost: h\r\n", 414),
        (with_headers(b"Content-Length: 1", b"Content-Length: 1"), 400),
        (with_headers(b"Content-Length: 1, 1"), 400),
        (with_headers(b"Content-Length: +1"), 400),
        (with_headers(b"Content-Length: -1"), 400),
        (with_headers(b"Content-Length: 01"), 400),
        (with_headers(b"Content-Length: 0x1"), 400),
        (with_headers(b"Content-Length: 1_0"), 400),
        (with_headers(b"Content-Length: \xb2"), 400),
        (with_headers(b"Content-Length:"), 400),
        (with_headers(b"Content-Length: 9999999999999999"), 400),
        (with_headers(b"Content-Length : 1"), 400),
        (with_headers(b"Transfer-Encoding: chunked"), 411),
        (with_headers(b"Transfer-Encoding: xchunked", b"Content-Length: 1"), 501),
        (with_headers(b"Transfer-Encoding:", b"Content-Length: 1"), 501),
        (with_headers(b"Expect: a-miracle"), 417),
        (with_headers(b"a: b", b" folded"), 400),
        (with_headers(b"a: b", b"\tfolded"), 400),
        (with_headers(b"no colon"), 400),
        (with_headers(b": no name"), 400),
        (with_headers(b"na me: x"), 400),
        (with_headers(b"n\xe4me: x"), 400),
        (with_headers(b"a: b\0c"), 400),
        (with_headers(b"a: b\rc"), 400),
        (with_headers(b"a: b\nc: d"), 400),
        (with_headers(b"a: b\x7f"), 400),
        (with_headers(b"a: b", b"", b"c: d"), 400),
        (with_headers(*[b"a: b"] * MAX_HEADERS), 431),
    ],
)
def test_a_request_that_is_refused(head: bytes, status: int) -> None:
    with pytest.raises(HttpError) as refused:
        parse_request(head)
    assert refused.value.status == status


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n",
        b"HTTP/1.1 600 What\r\nContent-Length: 0\r\n",
        b"HTTP/1.1 20 What\r\nContent-Length: 0\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nContent-Length: 0\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 0\n",
    ],
)
def test_a_response_that_is_refused(head: bytes) -> None:
    with pytest.raises(HttpError):
        parse_response(head)


def test_a_refusal_does_not_tell_the_token() -> None:
    for bad in (b"Authorization : Bearer secret", b"Authorization: Bearer secret\0"):
        with pytest.raises(HttpError) as refused:
            parse_request(with_headers(bad))
        assert "secret" not in str(refused.value)


Parse = Callable[[bytes], RequestHead | ResponseHead]
CASES = [(parse_request, REQUEST), (parse_response, RESPONSE)]


@given(data=st.binary(max_size=300), case=st.sampled_from(CASES))
def test_random_bytes_are_refused(data: bytes, case: tuple[Parse, bytes]) -> None:
    with pytest.raises(HttpError):
        case[0](data)


@given(case=st.sampled_from(CASES), data=st.data())
def test_a_mutated_head_is_a_head_or_refused(
    case: tuple[Parse, bytes], data: st.DataObject
) -> None:
    parse, head = case
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(head)))
        until = data.draw(st.integers(at, min(len(head), at + 20)))
        junk = st.binary(max_size=5) | st.sampled_from([b"\r\n", b"\n", b"\r", b": ", b" ", b"\0"])
        head = head[:at] + data.draw(junk) + head[until:]
    try:
        parsed = parse(head)
    except HttpError:
        return
    # Whatever is accepted has clean names and values, and its lines are the lines of the input.
    assert len(parsed.headers) <= head.count(b"\r\n") - 1
    for name, value in parsed.headers.items():
        assert name == name.lower()
        assert not set(value) & set("\r\n\0")
        assert value == value.strip(" \t")
