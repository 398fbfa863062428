"""Ranges of files: one range as RFC 9110 defines it; what a server may ignore gets the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.http.errors import HttpError
from papaya.http.head import RequestHead
from papaya.http.ranges import requested_range
from papaya.http.routes import Buffered
from tests.unit.http.loopback import LOOPS, Response, a_request, answers

CONTENT = bytes(range(256)) * 4000  # several pieces
SIZE = len(CONTENT)
TAG = '"0123"'
both_loops = pytest.mark.parametrize("loop", LOOPS)


def asked(
    folder: Path,
    *headers: tuple[str, str],
    method: str = "GET",
    content: bytes = CONTENT,
    loop: str = "uvloop",
) -> Response:
    """The answer, after which the connection still answers another request correctly."""
    file = folder / "file"
    file.write_bytes(content)
    route = Buffered("GET", "/file", lambda e, _: e.answer_file(file, [("ETag", TAG)]))
    requests = [a_request(method, "/file", headers=headers), a_request("GET", "/file")]
    first, second = answers([route], *requests, loop=loop)
    assert (second.status, second.body) == (200, content)
    return first


@both_loops
@pytest.mark.parametrize(
    ("value", "part", "shown"),
    [
        ("bytes=0-0", CONTENT[:1], f"bytes 0-0/{SIZE}"),
        ("bytes=5-9", CONTENT[5:10], f"bytes 5-9/{SIZE}"),
        ("bytes=300000-", CONTENT[300_000:], f"bytes 300000-{SIZE - 1}/{SIZE}"),
        ("bytes=-7", CONTENT[-7:], f"bytes {SIZE - 7}-{SIZE - 1}/{SIZE}"),
        (f"bytes=-{SIZE * 2}", CONTENT, f"bytes 0-{SIZE - 1}/{SIZE}"),
        (f"bytes={SIZE - 1}-999999999999", CONTENT[-1:], f"bytes {SIZE - 1}-{SIZE - 1}/{SIZE}"),
        ("Bytes=1-2", CONTENT[1:3], f"bytes 1-2/{SIZE}"),
    ],
)
def test_a_range_is_answered_with_these_bytes(
    tmp_path: Path, value: str, part: bytes, shown: str, loop: str
) -> None:
    response = asked(tmp_path, ("Range", value), loop=loop)
    assert (response.status, response.body) == (206, part)
    assert response.headers["content-range"] == shown
    assert response.headers["etag"] == TAG


@pytest.mark.parametrize("value", [f"bytes={SIZE}-", f"bytes={SIZE}-{SIZE + 5}", "bytes=-0"])
def test_a_range_behind_the_end_is_not_satisfiable(tmp_path: Path, value: str) -> None:
    response = asked(tmp_path, ("Range", value))
    assert response.status == 416
    assert response.headers["content-range"] == f"bytes */{SIZE}"


@pytest.mark.parametrize(
    "value",
    [
        "bytes=0-1,5-6",
        "bytes=0-,0-,0-,0-",  # many times the file, if each were sent
        "bytes=5-4",
        "bytes=-",
        "bytes=--1",
        "bytes=+1-2",
        "bytes=1 -2",
        "bytes=a-b",
        "bytes=0x1-0x2",
        "bytes=1-2;",
        "bytes",
        "bytes=",
        "",
        "lines=1-2",
        "bytes=1_0-2_0",
        "bytes=\u00b9-\u00b2",  # digits for Python, not for HTTP
        "bytes=" + "9" * 5000 + "-",  # more digits than Python converts
        "bytes=0-" + "9" * 5000,
    ],
)
def test_whatever_else_it_says_the_whole_file_is_sent(tmp_path: Path, value: str) -> None:
    headers = [("Range", value)] if value.isascii() else []
    response = asked(tmp_path, *headers)
    assert (response.status, response.body) == (200, CONTENT)
    head = RequestHead("GET", "/file", "", {"range": value}, 0, False, False)
    assert requested_range(head, SIZE, TAG) is None


def test_two_range_headers_are_several_ranges(tmp_path: Path) -> None:
    response = asked(tmp_path, ("Range", "bytes=0-1"), ("Range", "bytes=3-4"))
    assert (response.status, response.body) == (200, CONTENT)


@pytest.mark.parametrize(
    ("condition", "status"),
    [
        (TAG, 206),
        ('"other"', 200),
        (f"W/{TAG}", 200),  # only a strong tag says that the bytes are the same
        (TAG.strip('"'), 200),
        ("Tue, 15 Nov 1994 12:45:26 GMT", 200),
    ],
)
def test_if_range_compares_the_tag(tmp_path: Path, condition: str, status: int) -> None:
    response = asked(tmp_path, ("Range", "bytes=5-9"), ("If-Range", condition))
    assert response.status == status
    assert response.body == (CONTENT[5:10] if status == 206 else CONTENT)


def test_a_head_request_tells_the_whole_length(tmp_path: Path) -> None:
    response = asked(tmp_path, ("Range", "bytes=5-9"), method="HEAD")
    assert (response.status, response.headers["content-length"]) == (200, str(SIZE))
    assert response.headers["accept-ranges"] == "bytes"


def test_an_empty_file_has_no_range(tmp_path: Path) -> None:
    assert asked(tmp_path, ("Range", "bytes=0-"), content=b"").status == 416
    assert asked(tmp_path, ("Range", "bytes=-5"), content=b"").status == 200


POSITION = st.integers(0, 30).map(str) | st.just("")


@given(POSITION, POSITION, st.binary(max_size=20))
def test_every_range_agrees_with_slices(first: str, last: str, content: bytes) -> None:
    """A slow reference: the positions that the words of RFC 9110 include."""
    head = RequestHead("GET", "/", "", {"range": f"bytes={first}-{last}"}, 0, False, False)
    places = range(len(content))
    if first:
        wanted = [p for p in places if p >= int(first) and (not last or p <= int(last))]
    else:
        wanted = [p for p in places if last and p >= len(content) - int(last)]
    try:
        found = requested_range(head, len(content), None)
    except HttpError:  # behind the end
        found = None
    assert list(found or ()) == wanted
