"""When a peer has been slow or silent for too long, in made-up time."""

from __future__ import annotations

import itertools

from papaya.http.limits import ListenerLimits
from papaya.http.timeouts import ConnectionPhase, Seen, Timeouts

LIMITS = ListenerLimits(
    head_timeout_s=10,
    idle_timeout_s=75,
    body_timeout_s=5,
    min_body_bytes_per_s=100,
    write_timeout_s=20,
    linger_s=2,
)


def first_verdict(*moments: tuple[int, Seen]) -> tuple[int, str] | None:
    """Sweeps every second; each moment lasts until the next."""
    patience = Timeouts(LIMITS, 0)
    for (start, seen), (end, _) in itertools.pairwise(moments):
        for now in range(start, end):
            if (words := patience.exceeded(now, seen)) is not None:
                return now, words
    return None


def seen(
    phase: ConnectionPhase,
    exchanges: int = 1,
    received: int = 0,
    held: bool = False,
    flushed: int = 0,
    unsent: int = 0,
) -> Seen:
    return Seen(phase, exchanges, received, held, flushed, unsent)


END = (1000, seen(ConnectionPhase.ANSWER))


def steady(phase: ConnectionPhase, rate: int) -> list[tuple[int, Seen]]:
    return [(now, seen(phase, received=now * rate)) for now in range(100)]


def test_how_long_each_phase_may_last() -> None:
    for phase, limit in (
        (ConnectionPhase.HEAD, 10),
        (ConnectionPhase.IDLE, 75),
        (ConnectionPhase.LINGER, 2),
        (ConnectionPhase.BODY, 5),
    ):
        verdict = first_verdict((0, seen(phase)), END)
        assert verdict is not None
        assert verdict[0] == limit + 1
    assert first_verdict((0, seen(ConnectionPhase.ANSWER)), END) is None


def test_a_head_that_drips_has_no_more_time_than_one_that_does_not() -> None:
    verdict = first_verdict(*steady(ConnectionPhase.HEAD, 1))
    assert verdict is not None
    assert verdict[0] == 11


def test_a_body_must_keep_an_average_rate() -> None:
    assert first_verdict(*steady(ConnectionPhase.BODY, 100)) is None
    assert first_verdict(*steady(ConnectionPhase.BODY, 90)) == (
        51,
        "the body came slower than 100 bytes/s",
    )


def test_time_stands_still_while_we_do_not_read() -> None:
    body, held = seen(ConnectionPhase.BODY), seen(ConnectionPhase.BODY, held=True)
    verdict = first_verdict((0, body), (3, held), (500, body), END)
    assert verdict is not None
    assert verdict[0] == 503


def test_a_peer_that_does_not_read_its_answer() -> None:
    stuck = seen(ConnectionPhase.ANSWER, flushed=10, unsent=5)
    taking = [(now, seen(ConnectionPhase.ANSWER, flushed=now, unsent=5)) for now in range(100)]
    verdict = first_verdict(*taking, (100, stuck), END)
    assert verdict == (121, "the answer is not taken")


def test_every_exchange_starts_anew() -> None:
    heads = [(9 * number, seen(ConnectionPhase.HEAD, exchanges=number)) for number in range(20)]
    assert first_verdict(*heads) is None


def test_a_loop_that_stood_still_is_not_the_peers_fault() -> None:
    patience = Timeouts(LIMITS, 0)
    assert patience.exceeded(1, seen(ConnectionPhase.HEAD)) is None
    assert patience.exceeded(500, seen(ConnectionPhase.HEAD)) is None
    verdicts = [
        patience.exceeded(500 + second, seen(ConnectionPhase.HEAD)) for second in range(1, 12)
    ]
    assert verdicts.index("the head was not there after 10 s") == 8
