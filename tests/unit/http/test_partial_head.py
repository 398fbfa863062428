"""The beginning of a head that can only become a malformed one is refused at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from papaya.http.errors import HttpError
from papaya.http.head import check_partial

CONTROLS = {*range(0x20), 0x7F} - {0x09, 0x0A, 0x0D}
pieces = st.sampled_from([b"\r\n", b"\r", b"\n", b"\t", b"\0", b"\x7f", b"\xff", b"Host: a", b" "])
heads = st.lists(pieces, max_size=8).map(b"".join)


def is_malformed(data: bytes) -> bool:
    """One byte after the other; a CR at the very end may still get its LF."""
    for at, byte in enumerate(data):
        is_last = at == len(data) - 1
        if byte in CONTROLS:
            return True
        if byte == 0x0A and data[at - 1 : at] != b"\r":
            return True
        if byte == 0x0D and not is_last and data[at + 1] != 0x0A:
            return True
    return False


def is_refused(data: bytes, start: int) -> bool:
    try:
        check_partial(data, start)
    except HttpError:
        return True
    return False


@given(heads)
def test_a_head_is_refused_exactly_when_it_cannot_become_a_good_one(data: bytes) -> None:
    assert is_refused(data, 0) == is_malformed(data)


@given(heads, heads)
def test_what_was_checked_before_need_not_be_checked_again(begin: bytes, rest: bytes) -> None:
    if not is_refused(begin, 0):
        assert is_refused(begin + rest, len(begin)) == is_malformed(begin + rest)
