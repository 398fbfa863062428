"""The table of states, and when a peer has been slow or silent for too long."""

from __future__ import annotations

import itertools

from papaya.http.connection_state import (
    TRANSITIONS,
    ConnectionState,
    RequestProgress,
    Timeouts,
)
from papaya.http.limits import ListenerLimits

LIMITS = ListenerLimits(
    head_timeout_s=10,
    idle_timeout_s=75,
    body_timeout_s=5,
    min_body_bytes_per_s=100,
    write_timeout_s=20,
    answer_pause_s=60,
    min_answer_bytes_per_s=100,
    linger_s=2,
)


def first_verdict(*moments: tuple[int, RequestProgress]) -> tuple[int, str] | None:
    """Sweeps every second; each moment lasts until the next."""
    patience = Timeouts(LIMITS, 0)
    for (start, seen), (end, _) in itertools.pairwise(moments):
        for now in range(start, end):
            if (words := patience.exceeded(now, seen)) is not None:
                return now, words
    return None


def seen(
    phase: ConnectionState,
    exchanges: int = 1,
    received: int = 0,
    taken: int = 0,
    unsent: int = 0,
) -> RequestProgress:
    return RequestProgress(phase, exchanges, received, taken, unsent)


END = (1000, seen(ConnectionState.ANSWER))


def steady(phase: ConnectionState, rate: int) -> list[tuple[int, RequestProgress]]:
    return [(now, seen(phase, received=now * rate)) for now in range(100)]


def test_how_long_each_phase_may_last() -> None:
    for phase, limit in (
        (ConnectionState.HEAD, 10),
        (ConnectionState.IDLE, 75),
        (ConnectionState.LINGER, 2),
        (ConnectionState.BODY, 5),
    ):
        verdict = first_verdict((0, seen(phase)), END)
        assert verdict is not None
        assert verdict[0] == limit + 1
    assert first_verdict((0, seen(ConnectionState.ANSWER)), END) is None


def test_a_head_that_drips_has_no_more_time_than_one_that_does_not() -> None:
    verdict = first_verdict(*steady(ConnectionState.HEAD, 1))
    assert verdict is not None
    assert verdict[0] == 11


def test_a_body_must_keep_an_average_rate() -> None:
    assert first_verdict(*steady(ConnectionState.BODY, 100)) is None
    assert first_verdict(*steady(ConnectionState.BODY, 90)) == (
        51,
        "the body arrived slower than 100 bytes/s",
    )


def test_time_stands_still_while_we_do_not_read() -> None:
    body, held = seen(ConnectionState.BODY), seen(ConnectionState.HELD)
    verdict = first_verdict((0, body), (3, held), (500, body), END)
    assert verdict is not None
    assert verdict[0] == 503


def test_a_peer_that_does_not_read_its_answer() -> None:
    stuck = seen(ConnectionState.ANSWER, taken=99_999, unsent=5)
    taking = [(now, seen(ConnectionState.ANSWER, taken=1000 * now, unsent=5)) for now in range(100)]
    verdict = first_verdict(*taking, (100, stuck), END)
    assert verdict == (161, "the peer does not read the answer")
    before = seen(ConnectionState.ANSWER, taken=99_999)
    verdict = first_verdict((0, before), (1, stuck), END)
    assert verdict == (22, "the peer reads the answer slower than 100 bytes/s")


def test_every_exchange_starts_anew() -> None:
    heads = [(9 * number, seen(ConnectionState.HEAD, exchanges=number)) for number in range(20)]
    assert first_verdict(*heads) is None


def test_a_loop_that_stood_still_is_not_the_peers_fault() -> None:
    patience = Timeouts(LIMITS, 0)
    assert patience.exceeded(1, seen(ConnectionState.HEAD)) is None
    assert patience.exceeded(500, seen(ConnectionState.HEAD)) is None
    verdicts = [
        patience.exceeded(500 + second, seen(ConnectionState.HEAD)) for second in range(1, 12)
    ]
    assert verdicts.index("the head did not arrive within 10 s") == 8


def test_every_state_is_in_the_table_can_be_reached_and_can_be_closed() -> None:
    assert set(TRANSITIONS) == set(ConnectionState)
    reached = set().union(*TRANSITIONS.values()) | {ConnectionState.HEAD}
    assert reached == set(ConnectionState)
    for state, following in TRANSITIONS.items():
        assert state not in following
        assert (ConnectionState.CLOSED in following) == (state is not ConnectionState.CLOSED)


def test_a_pause_does_not_start_the_time_of_a_body_again() -> None:
    """Else a peer could be slow for ever, if its receiver pauses now and then."""
    moments = [
        (now, seen(ConnectionState.HELD if now % 5 == 4 else ConnectionState.BODY, received=now))
        for now in range(100)
    ]
    verdict = first_verdict(*moments)
    assert verdict is not None
    assert verdict[1] == "the body arrived slower than 100 bytes/s"


def a_reader(rate: int, rests_until: int = 0) -> list[tuple[int, RequestProgress]]:
    """A peer that takes so many bytes of a file per second; none at first."""
    return [
        (now, seen(ConnectionState.FILE, taken=max(0, now - rests_until) * rate, unsent=1000))
        for now in range(200)
    ]


def test_a_peer_that_reads_slower_than_the_least_rate_is_cut_off() -> None:
    """Else a byte now and then keeps a connection, an open file and a piece of it for years."""
    verdict = first_verdict(*a_reader(rate=1))
    assert verdict is not None
    assert verdict == (21, "the peer reads the answer slower than 100 bytes/s")
    assert first_verdict(*a_reader(rate=99)) is None, "the first 20 s are free"
    assert first_verdict(*a_reader(rate=100, rests_until=19)) is None


def test_a_reader_may_take_large_pieces_at_long_intervals() -> None:
    """Linux opens a full window again when 1/16 of the buffer is free: at 10 kB/s after 38 s."""
    moments = [
        (now, seen(ConnectionState.FILE, taken=380_000 * (1 + now // 38), unsent=1000))
        for now in range(400)
    ]
    assert first_verdict(*moments) is None


def test_the_rate_of_a_reader_begins_with_each_answer() -> None:
    waits = [(now, seen(ConnectionState.ANSWER)) for now in range(100)]
    reads = [
        (100 + now, seen(ConnectionState.ANSWER, taken=now * 100, unsent=1000))
        for now in range(100)
    ]
    assert first_verdict(*waits, *reads) is None
