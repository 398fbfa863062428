"""Pooled buffers are handed out once at a time, and never more of them than there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.errors import InvariantError
from papaya.server.buffers import BufferPool


@given(st.integers(0, 5), st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=60))
def test_no_two_views_share_memory(count: int, steps: list[tuple[bool, int]]) -> None:
    pool = BufferPool(count, 16)
    out: list[memoryview] = []
    for number, (is_take, which) in enumerate(steps):
        if is_take:
            view = pool.take(16)
            assert (view is None) == (len(out) == count)
            if view is not None:
                assert len(view) == 16
                view[:] = bytes([number]) * 16
                assert all(bytes(other) != bytes(view) for other in out)
                out.append(view)
        elif out:
            pool.give_back(out.pop(which % len(out))[:3])
        assert pool.free == count - len(out)


def test_a_buffer_is_used_again() -> None:
    pool = BufferPool(1, 4)
    first = pool.take(4)
    assert first is not None
    assert pool.take(4) is None
    pool.give_back(first)
    again = pool.take(4)
    assert again is not None
    assert again.obj is first.obj


def test_giving_back_twice_or_to_another_pool_is_a_bug() -> None:
    pool, other = BufferPool(1, 4), BufferPool(1, 4)
    view, foreign = pool.take(4), other.take(4)
    assert view is not None
    assert foreign is not None
    with pytest.raises(InvariantError):
        pool.give_back(foreign)
    pool.give_back(view)
    with pytest.raises(InvariantError):
        pool.give_back(view[1:])
    assert (pool.free, other.free) == (1, 0)


def test_short_buffers_count_by_their_length_and_free_ones_make_way() -> None:
    pool = BufferPool(2, 8)
    whole = [pool.take(8), pool.take(8)]
    assert pool.take(1) is None
    for view in whole:
        assert view is not None
        pool.give_back(view)
    short = [pool.take(5), pool.take(5), pool.take(6)]
    assert [len(view) for view in short if view is not None] == [5, 5, 6]
    assert pool.take(1) is None
    assert pool.free == 0


def test_bytes_of_nobody_are_let_go() -> None:
    pool = BufferPool(1, 4)
    pool.give_back(b"1234")
    assert pool.free == 1
