"""The connection to a TSA that does not answer, is slow, or was restarted."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from papaya.aggregator.masked_sum import LOST, TsaError
from papaya.aggregator.work import UNREACHABLE
from papaya.config import Deployment
from papaya.secagg.channel import SEALED_BYTES
from papaya.secagg.offer import Offer
from papaya.secagg.words import WORD, Words
from papaya.server import tsa as server_tsa
from papaya.server.tsa import TsaConnection
from papaya.tsa import endpoint, wire
from papaya.tsa.client import TsaClient
from papaya.tsa.errors import RefusalReason, TsaRefused, Unavailable
from papaya.tsa.tsa import TSA
from tests.unit.secagg.builders import a_task, entropy
from tests.unit.server.stuck_child import StuckChild
from tests.unit.tsa.running import CLUSTER, PATIENCE_S, received, running

PARAMETERS = a_task()
LONG_S = 300.0  # for a child to start or to end
SHORT_S = 0.2
NEVER_S = 1e6
# What a child does that does not start. The second one prints all the time, but never a whole line.
STUCK = pytest.mark.parametrize(
    "then", ["kill -STOP $$", "trap '' PIPE; while :; do printf ........; done 2> /dev/null"]
)


class Clock:
    now = 100.0


def a_connection(
    clock: Clock,
    data: Path,
    tsa: str = "",
    connect_s: float = PATIENCE_S,
    start_s: float = PATIENCE_S,
) -> TsaConnection:
    deployment, deadlines_s = Deployment(data=str(data), tsa=tsa), (connect_s, PATIENCE_S, start_s)
    return TsaConnection(deployment, tsa, lambda: clock.now, CLUSTER, *deadlines_s)


def logged(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


def test_the_breaker_opens_when_nobody_answers_and_closes_when_somebody_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It accepts connections and never answers. This is logged once, and so is its return."""
    caplog.set_level(logging.INFO)
    clock, where = Clock(), f"unix:{tmp_path / 'tsa'}"
    connection = a_connection(clock, tmp_path, where, SHORT_S)
    with endpoint.listen(where):
        for _ in range(3):
            with pytest.raises(Unavailable):
                connection.register(PARAMETERS)
            clock.now += 1.0
        assert (connection.breaker.open_s, connection.breaker.outages) == (3.0, 1)
    connection._deadlines_s = (PATIENCE_S, PATIENCE_S)
    with running(where):
        clock.now -= 1.0
        with pytest.raises(Unavailable, match="has not answered for 2 s"):
            connection.register(PARAMETERS)  # too soon after the last attempt
        clock.now += 1.0
        assert connection.register(PARAMETERS) == PARAMETERS.digest()
        assert connection.breaker.open_s == 0
        connection.close()
    assert len(logged(caplog, "tsa_unreachable")) == 1
    assert len(logged(caplog, "tsa_back")) == 1


class Freezing(TSA):
    """Stops in the middle of an answer, and everything waits, as for a stopped process."""

    def __init__(self) -> None:
        super().__init__(entropy("freezing"))
        self.thawed = Event()
        self.thawed.set()

    def offers(self, parameters_hash: bytes, count: int, now: float) -> list[Offer]:
        assert self.thawed.wait(PATIENCE_S)
        return super().offers(parameters_hash, count, now)


def test_a_call_that_is_not_answered_in_time_is_not_repeated_and_nothing_is_lost(
    tmp_path: Path,
) -> None:
    clock, tsa = Clock(), Freezing()
    with running(tsa=tsa) as where:
        connection = a_connection(clock, tmp_path, where)
        digest = connection.register(PARAMETERS)
        identity = connection.identity_public_key
        tsa.thawed.clear()
        assert connection._client is not None
        connection._client._answer_s = SHORT_S
        with pytest.raises(Unavailable):
            connection.offers(digest, 1)
        assert connection.breaker.is_open
        began_at = time.monotonic()
        for _ in range(1000):
            with pytest.raises(Unavailable, match="has not answered"):
                connection.offers(digest, 1)
        assert time.monotonic() - began_at < 1000 * SHORT_S
        tsa.thawed.set()
        assert (
            _eventually(connection, clock, digest)[0].index == 1
        )  # the first call was carried out
        assert connection.identity_public_key == identity
        connection.close()


def _eventually(connection: TsaConnection, clock: Clock, digest: bytes) -> list[Offer]:
    ends_at = time.monotonic() + PATIENCE_S
    while True:
        clock.now += 1.0
        try:
            return connection.offers(digest, 1)
        except Unavailable:
            assert time.monotonic() < ends_at


def test_a_refusal_is_an_answer(tmp_path: Path) -> None:
    clock, where = Clock(), f"unix:{tmp_path / 'tsa'}"
    connection = a_connection(clock, tmp_path, where)
    with pytest.raises(Unavailable):
        connection.register(PARAMETERS)
    clock.now += 1.0
    with running(where):
        with pytest.raises(TsaRefused) as caught:
            connection.offers(bytes(32), 1)
        assert caught.value.reason is RefusalReason.UNKNOWN_PARAMETERS
        assert not connection.breaker.is_open
        connection.close()


def test_another_identity_at_the_address_is_a_restart(tmp_path: Path) -> None:
    clock, where = Clock(), f"unix:{tmp_path / 'tsa'}"
    connection = a_connection(clock, tmp_path, where)
    with running(where):
        connection.register(PARAMETERS)
    with running(where, tsa=TSA(entropy("another"))):
        with pytest.raises(TsaError) as caught:
            connection.accept(0, 1, bytes(SEALED_BYTES))
        assert caught.value.reason == LOST
        assert not connection.breaker.is_open
        connection.close()


def test_a_frozen_child_is_not_started_a_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TsaConnection, "_start_child", lambda self: pytest.fail("was started"))
    connection = a_connection(Clock(), tmp_path, connect_s=SHORT_S)
    with endpoint.listen(f"unix:{tmp_path / 'tsa.sock'}"), pytest.raises(Unavailable):
        connection.register(PARAMETERS)
    connection.close()


@contextmanager
def another_starts(data: Path) -> Iterator[None]:
    """Another aggregator with this data folder is starting its child."""
    with (data / "tsa-start.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@STUCK
def test_a_child_that_never_says_that_it_listens_is_killed(
    then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = StuckChild(tmp_path, monkeypatch, then)
    connection = a_connection(Clock(), tmp_path, start_s=SHORT_S)
    with pytest.raises(Unavailable, match=r"did not start within 0\.2 s; its output is in .*log"):
        connection.register(PARAMETERS)
    assert connection.breaker.is_open
    assert [child.returncode for child in stuck.started] == [-signal.SIGKILL]
    with another_starts(tmp_path):
        pass  # nobody has the lock
    assert not (tmp_path / "tsa-child.pid").exists()
    connection.close()


@STUCK
@pytest.mark.parametrize("end", [TsaConnection.stop, TsaConnection.close])
def test_a_stop_does_not_wait_for_a_child_that_starts(
    end: Callable[[TsaConnection], None],
    then: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stuck = StuckChild(tmp_path, monkeypatch, then)
    connection = a_connection(Clock(), tmp_path, start_s=NEVER_S)
    with ThreadPoolExecutor() as threads:
        asking = threads.submit(connection.register, PARAMETERS)
        stuck.wait_until_it_runs()
        end(connection)
        with pytest.raises(Unavailable, match="the server is stopping"):
            asking.result(PATIENCE_S)
    with pytest.raises(Unavailable, match="the server is stopping"):
        connection.register(PARAMETERS)  # no other one is started
    assert [child.returncode for child in stuck.started] == [-signal.SIGKILL]
    assert not connection.breaker.is_open  # this is no outage
    connection.close()


def test_a_child_that_cannot_be_forked_is_a_tsa_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is at a limit. Nothing is lost, and updates wait."""

    def refuse(*arguments: object, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    connection = a_connection(Clock(), tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", refuse)
        with pytest.raises(TsaError, match="cannot be started") as refused:
            connection.adapter.accept(PARAMETERS, 0, 1, bytes(SEALED_BYTES))
        with pytest.raises(TsaError, match="has not answered") as away:
            connection.adapter.reach(PARAMETERS)
    assert [error.value.reason for error in (refused, away)] == 2 * [UNREACHABLE]
    assert connection.breaker.outages == 1
    connection.close()


def test_the_place_of_the_collateral_is_only_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not only operators read why there are no offers."""
    missing, where = str(tmp_path / "collateral.json"), f"unix:{tmp_path / 'tsa'}"
    deployment = Deployment(
        data=str(tmp_path), tsa=where, tsa_platform="sgx", tsa_leaf=1, tsa_collateral=missing
    )
    connection = TsaConnection(deployment, where, lambda: 100.0, CLUSTER)
    with pytest.raises(TsaError, match="see the log of the aggregator") as caught:
        connection._read_collateral()
    connection.close()
    assert missing not in str(caught.value)
    assert missing in caplog.text


def test_the_wait_for_another_aggregator_that_starts_the_child_has_an_end(tmp_path: Path) -> None:
    connection = a_connection(Clock(), tmp_path, start_s=SHORT_S)
    with another_starts(tmp_path), pytest.raises(Unavailable, match=r"has held .*tsa-start\.lock"):
        connection.register(PARAMETERS)
    assert connection.breaker.is_open
    connection.close()


def test_a_stop_ends_the_wait_for_another_aggregator(tmp_path: Path) -> None:
    connection = a_connection(Clock(), tmp_path, start_s=NEVER_S)
    with another_starts(tmp_path), ThreadPoolExecutor() as threads:
        asking = threads.submit(connection.register, PARAMETERS)
        connection.stop()
        with pytest.raises(Unavailable, match="the server is stopping"):
            asking.result(PATIENCE_S)
        connection.close()


def test_a_server_that_stops_leaves_the_child_to_an_aggregator_that_is_starting_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_tsa, "_RELEASE_S", SHORT_S)
    connection = a_connection(Clock(), tmp_path)
    (tmp_path / "tsa-child.pid").write_text("1234567890\n")
    with another_starts(tmp_path):
        connection.close()
    assert (tmp_path / "tsa-child.pid").exists()
    assert len(logged(caplog, "hint: if no aggregator runs there, end the process")) == 1


def test_a_child_that_was_stopped_ends_with_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_tsa, "_END_S", SHORT_S)
    connection = a_connection(Clock(), tmp_path)
    catching = "import signal; signal.signal(signal.SIGTERM, print); print(1, flush=True); input()"
    command = [sys.executable, "-c", catching, f"unix:{tmp_path / 'tsa.sock'}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"1\n"
        (tmp_path / "tsa-child.pid").write_text(f"{child.pid}\n")
        os.kill(child.pid, signal.SIGSTOP)
        connection._child = child
        connection.close()
        assert child.returncode == -signal.SIGKILL


@pytest.mark.parametrize("starter_is_last", [False, True])
def test_aggregators_with_one_folder_share_a_child_and_the_last_one_ends_it(
    starter_is_last: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")  # the child writes the end of its line apart
    monkeypatch.setattr(server_tsa, "_END_S", LONG_S)  # so that a slow child is not killed
    apart = Deployment(data=str(tmp_path), coordinators=("127.0.0.1:1",))
    deadlines_s = (PATIENCE_S, PATIENCE_S, LONG_S)
    links = [TsaConnection(apart, "", time.time, CLUSTER, *deadlines_s) for _ in range(2)]
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda link: link.register(PARAMETERS), links))
    [child] = [link._child for link in links if link._child is not None]
    first, second = sorted(links, key=lambda link: (link._child is child) == starter_is_last)
    assert first.identity_public_key == second.identity_public_key
    first.close()
    assert child.poll() is None
    assert second.open_groups(second.register(PARAMETERS)) == []
    second.close()
    assert child.wait(PATIENCE_S) is not None
    assert not (tmp_path / "tsa-child.pid").exists()
    assert not (tmp_path / "tsa.sock").exists()
    assert len(logged(caplog, "hint: run the TSA as a process of its own: papaya serve tsa")) == 2


def test_an_aggregator_of_0_4_does_not_end_the_child_that_a_newer_one_uses(tmp_path: Path) -> None:
    """0.4.0 ends the process in `tsa.pid` when it stops, and has written its own child there."""
    where, pipe = f"unix:{tmp_path / 'tsa.sock'}", subprocess.PIPE
    command = [sys.executable, "-c", "print(flush=True); input()", where]
    with running(where), subprocess.Popen(command, stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        child.stdout.readline()  # until it runs, /proc shows no arguments of it
        (tmp_path / "tsa.pid").write_text(f"{child.pid}\n")
        connection = a_connection(Clock(), tmp_path)
        connection.register(PARAMETERS)
        assert not (tmp_path / "tsa.pid").exists()
        assert (tmp_path / "tsa-child.pid").read_text() == f"{child.pid}\n"
        connection.close()
        assert child.wait(PATIENCE_S) == -signal.SIGTERM
        assert (tmp_path / "tsa.sock").exists()  # a TSA still answers there


def test_what_0_4_has_left_does_not_hide_the_child(tmp_path: Path) -> None:
    """Its `tsa.pid` may name a process of before the last restart of the machine."""
    with running(f"unix:{tmp_path / 'tsa.sock'}"):
        (tmp_path / "tsa.pid").write_text(f"{os.getpid()}\n")
        (tmp_path / "tsa-child.pid").write_text("1234567890\n")
        connection = a_connection(Clock(), tmp_path)
        connection.register(PARAMETERS)
        assert (tmp_path / "tsa-child.pid").read_text() == "1234567890\n"
        connection.close()


# -- releases -------------------------------------------------------------------------------------

PIECES = 20
PAUSE_S = 3.0
ANSWER_S = 5.0


class SlowLine(socket.socket):
    """Large answers arrive in pieces, PAUSE_S after each other by the monotonic clock. The test
    does not wait, because this class advances the clock itself.
    """

    waits_s: float | None = None

    def __init__(self, *, fileno: int) -> None:
        super().__init__(fileno=fileno)
        self.now = time.monotonic()

    def settimeout(self, value: float | None) -> None:
        self.waits_s = value
        super().settimeout(PATIENCE_S)

    def recv_into(self, buffer: memoryview) -> int:  # type: ignore[override]
        size = LARGE.vector_bytes // PIECES
        if len(buffer) < size:
            return super().recv_into(buffer)
        if self.waits_s is not None and self.waits_s < PAUSE_S:
            self.now += self.waits_s
            raise TimeoutError
        self.now += PAUSE_S
        return super().recv_into(buffer[:size])


@contextmanager
def half_line(upstream: str, folder: Path) -> Iterator[str]:
    """A relay to the TSA that passes on only half of a large answer."""
    where = f"unix:{folder / 'slow'}"
    with endpoint.listen(where) as listener:

        def relay() -> None:
            device, _ = listener.accept()
            with device, endpoint.connect(upstream, PATIENCE_S) as tsa:
                while request := device.recv(1 << 20):
                    tsa.sendall(request)
                    head = received(tsa, wire.LENGTH.size)
                    answer = head + received(tsa, *wire.LENGTH.unpack(head))
                    if len(answer) < 1000:
                        device.sendall(answer)
                    else:
                        device.sendall(answer[: len(answer) // 2])

        thread = threading.Thread(target=relay)
        thread.start()
        yield where
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


class Released(TSA):
    """Has seeds for everybody."""

    def release(self, parameters_hash: bytes, group: int, members: Sequence[int]) -> Words:
        masks: Words = np.arange(LARGE.vector_words).astype(WORD)
        return masks


LARGE = a_task(length=20_000)


def test_a_release_that_makes_progress_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it takes longer than the deadline, which is for the next bytes only."""
    heard: list[int] = []
    dialled: list[SlowLine] = []

    def dial(address: str, timeout_s: float) -> socket.socket:
        made = SlowLine(fileno=endpoint.connect(address, timeout_s).detach())
        made.settimeout(timeout_s)
        dialled.append(made)
        return made

    with (
        running(tsa=Released(entropy("released"))) as tsa,
        TsaClient(tsa, CLUSTER, PATIENCE_S, ANSWER_S, dial) as client,
    ):
        client.register(LARGE)
        [line] = dialled
        began_at = line.now
        with monkeypatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: line.now)
            client.release(LARGE, 1, [1, 2], lambda at, masks: heard.extend(masks.tolist()))
        assert line.now - began_at > 2 * ANSWER_S
    assert heard == list(range(LARGE.vector_words))


def test_a_release_without_progress_is_given_up(tmp_path: Path) -> None:
    with (
        running(tsa=Released(entropy("released"))) as tsa,
        half_line(tsa, tmp_path) as where,
        TsaClient(where, CLUSTER, PATIENCE_S, PATIENCE_S) as client,
    ):
        client.register(LARGE)
        client._answer_s = SHORT_S
        with pytest.raises(Unavailable) as caught:
            client.release(LARGE, 1, [1, 2], lambda at, masks: None)
        assert isinstance(caught.value.__cause__, TimeoutError)
