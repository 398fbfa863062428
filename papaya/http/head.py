"""Parses the heads of requests and responses: bytes in, frozen structs out, or HttpError.

Strict, because if two parsers read the same bytes differently, a request can be smuggled past one
of them (RFC 9112, section 11.2). Refused: every version but HTTP/1.1, any Transfer-Encoding, a
second or malformed Content-Length, folded lines, bare CR or LF, control characters, a path with
empty or dotted segments. Nothing is percent-decoded. Error messages never quote a header, which may
hold a token.
"""

from __future__ import annotations

import re

import msgspec

from papaya.http.errors import HttpError
from papaya.http.limits import MAX_HEADERS, MAX_TARGET_CHARS

END_OF_HEAD = b"\r\n\r\n"

_REQUEST_LINE = re.compile(
    r"([A-Z]{1,16}) (/[!\"$->@-~]*)(?:\?([!\"$-~]*))? HTTP/(\d)\.(\d)\r\n", re.ASCII
)
_STATUS_LINE = re.compile(r"HTTP/1\.1 ([1-5]\d\d) [\t\x20-\x7e]*\r\n", re.ASCII)
_HEADER = re.compile(
    r"([!#$%&'*+\-.^_`|~0-9A-Za-z]{1,256}):[ \t]*([\t\x20-\x7e\x80-\xff]*)\r\n", re.ASCII
)
_LENGTH = re.compile(r"0|[1-9][0-9]{0,14}", re.ASCII)
_DOTTED_OR_EMPTY_SEGMENT = re.compile(r"/(?:/|\.\.?(?:/|\Z))")
_ORDINARY = bytes([0x09, *range(0x20, 0x7F), *range(0x80, 0x100)])
_NEVER_IN_A_HEAD = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|(?<!\r)\n|\r(?!\n|\Z)")

# A repeated one of these is an attack or a bug. Other repeated headers are joined by commas
# (RFC 9110, section 5.3).
_SINGLE = ("content-length", "host", "authorization", "expect", "content-type")


class RequestHead(msgspec.Struct, frozen=True):
    """The head of a request. Header names are in lower case."""

    method: str
    path: str
    query: str  # without its "?", not decoded
    headers: dict[str, str]
    length: int  # of the body
    closes: bool  # the peer sent `Connection: close`
    expects_continue: bool  # the peer waits for "100 Continue" before it sends the body


class ResponseHead(msgspec.Struct, frozen=True):
    """The head of a response. `length` is None without a Content-Length."""

    status: int
    headers: dict[str, str]
    length: int | None
    closes: bool


def check_partial(data: bytes, start: int) -> None:
    """Raises if this beginning of a head is malformed, whatever follows.

    Everything before `start` was checked already. A CR at the end may still be followed by its LF.
    """
    start = max(0, start - 1)
    # The fast way, for well-formed heads: all characters that are not ordinary come as CR LF.
    rest = data[start:].translate(None, _ORDINARY)
    if len(rest) == 2 * data.count(b"\r\n", start):
        return
    if _NEVER_IN_A_HEAD.search(data, start):
        raise HttpError(400, "the head contains a control character, or a bare CR or LF")


def parse_request(data: bytes) -> RequestHead:
    """Parses a head without its empty line: `data` ends with the CRLF of the last header."""
    check_partial(data, 0)
    text = data.decode("latin-1")
    line = _REQUEST_LINE.match(text)
    if line is None:
        raise HttpError(400, "malformed request line, expected: METHOD /path HTTP/1.1")
    method, path, query, major, minor = line.groups()
    if major != "1" or minor != "1":
        raise HttpError(505, f"HTTP/{major}.{minor} is not supported, only HTTP/1.1")
    if len(path) > MAX_TARGET_CHARS or (query and len(query) > MAX_TARGET_CHARS):
        raise HttpError(414, f"the path or the query is longer than {MAX_TARGET_CHARS} characters")
    if _DOTTED_OR_EMPTY_SEGMENT.search(path):
        raise HttpError(400, "the path contains an empty, `.` or `..` segment")
    headers = _headers(text, line.end())
    if "host" not in headers:
        raise HttpError(400, "the Host header is missing")
    if (coding := headers.get("transfer-encoding")) is not None:
        status = 411 if coding.lower() == "chunked" else 501
        raise HttpError(status, "Transfer-Encoding is not supported: send a Content-Length")
    return RequestHead(
        method,
        path,
        query or "",
        headers,
        _length(headers) or 0,
        _closes(headers),
        "expect" in headers and _expects_continue(headers["expect"]),
    )


def parse_response(data: bytes) -> ResponseHead:
    """Parses the head of a response from one of our servers, also without its empty line."""
    check_partial(data, 0)
    text = data.decode("latin-1")
    line = _STATUS_LINE.match(text)
    if line is None:
        raise HttpError(502, "malformed status line")
    headers = _headers(text, line.end())
    if "transfer-encoding" in headers:
        raise HttpError(502, "the response has a Transfer-Encoding, which is not supported")
    return ResponseHead(int(line[1]), headers, _length(headers), _closes(headers))


def _headers(text: str, at: int) -> dict[str, str]:
    headers: dict[str, str] = {}
    match = _HEADER.match
    count = 0
    while at < len(text):
        line = match(text, at)
        count += 1
        if line is None:
            raise HttpError(400, f"header {count} is malformed, expected `name: value` on one line")
        if count > MAX_HEADERS:
            raise HttpError(431, f"more than {MAX_HEADERS} headers")
        name = line[1].lower()
        value = line[2].rstrip(" \t")
        if name in headers:
            if name in _SINGLE:
                raise HttpError(400, f"more than one {name} header")
            value = f"{headers[name]}, {value}"
        headers[name] = value
        at = line.end()
    return headers


def _length(headers: dict[str, str]) -> int | None:
    text = headers.get("content-length")
    if text is None:
        return None
    if _LENGTH.fullmatch(text) is None:
        raise HttpError(400, "Content-Length is not a decimal number")
    return int(text)


def _closes(headers: dict[str, str]) -> bool:
    options = headers.get("connection")
    return options is not None and "close" in [o.strip() for o in options.lower().split(",")]


def _expects_continue(text: str) -> bool:
    if text.lower() != "100-continue":
        raise HttpError(417, "the only supported expectation is 100-continue")
    return True
