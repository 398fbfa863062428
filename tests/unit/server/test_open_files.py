"""Connections stay within what the process may open."""

from __future__ import annotations

import resource

import pytest

from papaya.errors import OperatorError
from papaya.http.acceptor import MAX_REFUSED
from papaya.server.open_files import (
    LEAST_EACH,
    RESERVED,
    connections_of_one_address,
    connections_within,
    least_files,
    raise_limit,
)


def test_the_limit_is_raised_as_far_as_it_goes() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] - 1, before[1]))
    try:
        assert raise_limit() == before[1]
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
        assert raise_limit() == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("limit", "listeners"), [(1024, 2), (4096, 3), (20_000, 2)])
def test_all_listeners_together_leave_files_for_everything_else(limit: int, listeners: int) -> None:
    each = connections_within(limit, 20_000, listeners)
    assert each > 0
    assert (each + MAX_REFUSED) * listeners < limit - RESERVED


def test_what_fits_is_given() -> None:
    assert connections_within(1 << 20, 20_000, 3) == 20_000


@pytest.mark.parametrize(
    ("places", "each"),
    [(5000, 1000), (2128, 532), (900, 225), (200, 50), (102, 25), (42, 10), (32, 8), (2, 1)],
)
def test_one_address_takes_at_most_half_of_all_places(places: int, each: int) -> None:
    assert connections_of_one_address(places) == each
    being_refused = (places - each) // 3
    assert each + being_refused <= places / 2


@pytest.mark.parametrize(("shares", "least"), [(1, 512), (2, 512), (3, 576), (4, 672)])
def test_a_process_that_may_open_too_little_is_refused(shares: int, least: int) -> None:
    """It would accept no connections, not even those of its operator."""
    assert least_files(shares) == least
    assert connections_within(least, 20_000, shares) >= LEAST_EACH
    assert connections_within(least, 1, shares) == 1
    with pytest.raises(OperatorError, match=str(least)) as caught:
        connections_within(least - 1, 1, shares)
    assert "ulimit -n" in caught.value.hint
