"""Bytes across the boundary: counted from the wire format, moved for real."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from papaya.secagg.parameters import PublicParameters
from papaya.study.experiments.tee_transfer import (
    BYTES_PER_CLIENT,
    GOALS,
    MODEL_BYTES,
    NAME_BYTES,
    SEED_MESSAGE_BYTES,
    Transfer,
    bytes_into_tee,
    bytes_out_of_tee,
    draw_transfer,
    in_turns,
    measure_transfer,
    seconds_of,
)
from papaya.tsa import wire
from papaya.tsa.service import TsaService
from papaya.tsa.tsa import TSA
from tests.unit.secagg.builders import NOW, Deployment, a_task, entropy
from tests.unit.tsa.running import authenticated, serving


def test_a_client_sends_the_same_few_bytes_whatever_the_model() -> None:
    for k in GOALS:
        small, large = (bytes_into_tee(k, size, "asynchronous") for size in (4, MODEL_BYTES))
        assert small == large
        assert small <= 256 * (k + 1)
    assert (SEED_MESSAGE_BYTES, NAME_BYTES) == (85, 8)


def test_one_more_client_is_as_many_bytes_as_the_documentation_says() -> None:
    counts = [bytes_into_tee(k, MODEL_BYTES, "asynchronous") for k in (1, 2, 3)]
    assert [b - a for a, b in pairwise(counts)] == [BYTES_PER_CLIENT, BYTES_PER_CLIENT]
    text = Path("docs/secure-aggregation.md").read_text()
    assert f"receives {BYTES_PER_CLIENT} bytes per client" in text
    assert f"{SEED_MESSAGE_BYTES} with the sealed seed" in text


def test_naive_aggregation_is_k_times_m_and_ours_k_plus_m() -> None:
    for k in GOALS:
        naive = bytes_into_tee(k, MODEL_BYTES, "naive")
        assert k * MODEL_BYTES < naive <= k * (MODEL_BYTES + 16) + 64
        ours = bytes_into_tee(k, MODEL_BYTES, "asynchronous")
        ours += bytes_out_of_tee(k, MODEL_BYTES, "asynchronous")
        assert ours <= MODEL_BYTES + 128 * (k + 1)


@pytest.mark.parametrize("k", [1, 7])
def test_the_count_is_what_a_tsa_is_sent_and_answers(k: int) -> None:
    task = a_task(length=33, aggregation_goal=k, threshold=k)
    into, out = exchanged(task, k)
    assert into == bytes_into_tee(k, 4 * task.length, "asynchronous")
    assert out == bytes_out_of_tee(k, 4 * task.length, "asynchronous")


def exchanged(task: PublicParameters, k: int) -> tuple[int, int]:
    """Real requests to the real service; offers are made ahead and are no part of it."""
    deployment = Deployment(task)
    session = serving(deployment.tsa, task)
    updates = [deployment.sealed(np.zeros(task.length, np.float32)) for _ in range(k)]
    requests = [wire.accept_request(u.index, 0, u.sealed) for u in updates]
    requests.append(wire.release_request(task.digest(), 0, [u.index for u in updates]))
    answers = [session.answer(request[4:], NOW) for request in requests]
    assert all(answer[0][4] == wire.DONE for answer in answers)
    return sum(map(len, requests)), sum(len(part) for answer in answers for part in answer)


def test_a_service_refuses_what_the_count_does_not_have() -> None:
    """The other direction of the count: a byte less is no request."""
    session = authenticated(TsaService(TSA(entropy("other"))))
    [answer] = session.answer(wire.accept_request(0, 0, bytes(64))[4:-1], NOW)
    assert answer[4] != wire.DONE


def test_what_is_measured_was_moved_and_the_rest_is_only_counted() -> None:
    found = measure_transfer((1, 3), 2_000_000, naive_up_to=1, turns=1)
    assert [(t.design, t.k) for t in found] == [
        ("asynchronous", 1), ("asynchronous", 3), ("naive", 1), ("naive", 3),
    ]  # fmt: skip
    assert [t.seconds is not None for t in found] == [True, True, True, False]
    assert all(t.seconds > 0 for t in found if t.seconds is not None)
    for t in found:
        assert t.bytes_in == bytes_into_tee(t.k, 2_000_000, t.design)


def test_both_designs_have_as_many_turns() -> None:
    found = measure_transfer((1, 3), 2_000_000, naive_up_to=1, turns=3)
    assert [t.turns for t in found] == [3, 3, 3, 0]


@pytest.mark.parametrize(("naive_s", "turns"), [(0.1, 3), (2.0, 3), (3.0, 2), (60.0, 1)])
def test_what_takes_long_takes_fewer_turns_of_both(naive_s: float, turns: int) -> None:
    order: list[float] = []

    def moving(seconds: float) -> float:
        order.append(seconds)
        return seconds

    times = in_turns([lambda: moving(0.01), lambda: moving(naive_s)], 3)
    assert times == [[0.01] * turns, [naive_s] * turns]
    assert order == [0.01, naive_s] * turns


def test_a_time_that_was_not_measured_follows_from_the_largest_that_was() -> None:
    measured = [Transfer("naive", 1, 10, 10, 1.0), Transfer("naive", 2, 20, 10, 3.0)]
    assert seconds_of(measured[0], measured) == 1.0
    assert seconds_of(Transfer("naive", 5, 50, 10), measured) == 6.0


def test_the_figure_tells_what_was_measured_from_what_was_not(tmp_path: Path) -> None:
    transfers = [
        Transfer("asynchronous", 1, 130, 2_000_000, 0.01),
        Transfer("naive", 1, 2_000_000, 2_000_000, 0.01),
        Transfer("naive", 3, 6_000_000, 2_000_000),
    ]
    drawn = draw_transfer(transfers, tmp_path / "counted.svg").read_text()
    transfers[-1] = replace(transfers[-1], seconds=0.02)  # where the line goes through anyway
    measured = draw_transfer(transfers, tmp_path / "measured.svg").read_text()
    assert drawn.count("fill: #ffffff") > measured.count("fill: #ffffff")
