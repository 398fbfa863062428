"""The TSA over sockets, with its own client: every operation, real processes."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from papaya.secagg.parameters import PublicParameters
from papaya.secagg.participant import SealedUpdate, Terms, UnsealedUpdate
from papaya.secagg.unmask import Unmasking
from papaya.secagg.words import BLOCK, WORD
from papaya.tsa import endpoint, wire
from papaya.tsa.client import TsaClient
from papaya.tsa.errors import RefusalReason, TsaRefused, Unavailable
from papaya.tsa.evidence import EvidenceError
from papaya.tsa.process import platform_limits, wall_clock
from papaya.tsa.service import MakeEvidence
from papaya.tsa.tsa import TSA, TsaStatus
from tests.unit.secagg.builders import NOW, a_policy, a_task, entropy
from tests.unit.tsa.running import a_client, received, running

TASK = a_task(length=2 * BLOCK - 1, aggregation_goal=12, threshold=10)
DELTA = np.full(TASK.length, 2**-10, np.float32)
SERVE = """
import sys
from papaya.tsa.process import serve_until_signal
serve_until_signal(sys.argv[1], lambda address: print(address, flush=True))
"""


def sealed_by(client: TsaClient, parameters_hash: bytes) -> SealedUpdate:
    [offer] = client.offers(parameters_hash, 1)
    terms = Terms(client.identity_public_key, TASK, a_policy(TASK))
    draw = entropy(f"device {offer.index}")
    return UnsealedUpdate(DELTA, 100, 3).seal(terms, offer, 3, NOW, draw)


@pytest.mark.parametrize("address", [None, "tcp:127.0.0.1:0"])
def test_a_whole_group_over_a_socket(address: str | None) -> None:
    with running(address) as where, a_client(where) as client:
        parameters_hash = client.register(TASK)
        assert parameters_hash == TASK.digest()
        updates = [sealed_by(client, parameters_hash) for _ in range(11)]
        for update in updates:
            client.accept(update.index, 7, update.sealed)
        total = sum((update.masked for update in updates), np.zeros(TASK.vector_words, WORD))
        unmasking = Unmasking(total, 11, TASK)
        client.release(TASK, 7, [u.index for u in reversed(updates)], unmasking.take)
        found = unmasking.result()
        assert found.weight == 11
        assert np.allclose(found.vector, 11 * 2**-10)
        assert client.status(parameters_hash) == TsaStatus(0, 0, 7, ())


def test_refusals_keep_their_reason_and_the_connection() -> None:
    with running() as where, a_client(where) as client:
        with pytest.raises(TsaRefused, match="no task") as caught:
            client.offers(TASK.digest(), 1)
        assert caught.value.reason is RefusalReason.UNKNOWN_PARAMETERS
        with pytest.raises(TsaRefused) as caught:
            client.release(TASK, 0, [], lambda start, masks: None)
        assert caught.value.reason is RefusalReason.UNKNOWN_PARAMETERS
        assert client.register(TASK) == TASK.digest()


def test_seeds_are_summed_while_nobody_asks() -> None:
    """A status is read until nothing waits: no answer takes part in the summing itself."""
    with running() as where, a_client(where) as client:
        parameters_hash = client.register(TASK)
        for _ in range(3):
            update = sealed_by(client, parameters_hash)
            client.accept(update.index, 0, update.sealed)
        while (status := client.status(parameters_hash)).waiting_seeds:
            pass
        assert status.groups == ((0, 3),)


def test_a_smaller_vector_that_is_registered_meanwhile_shortens_no_deadline() -> None:
    """Each secure task registers on a thread of its own."""
    large, small = a_task(task="large", length=BLOCK), a_task(task="small")

    class Slow(PublicParameters):
        """Another thread registers larger parameters while `vector_bytes` is computed."""

        @property
        def vector_bytes(self) -> int:
            thread = threading.Thread(target=client.register, args=(large,))
            thread.start()
            thread.join()
            return small.vector_bytes

    with running() as where, a_client(where) as client:
        client.register(Slow(**{each.name: getattr(small, each.name) for each in fields(small)}))
        assert client._largest_bytes == large.vector_bytes


def test_open_groups_can_be_dropped() -> None:
    with running() as where, a_client(where) as client:
        parameters_hash = client.register(TASK)
        for group in (0, 0, 1):
            update = sealed_by(client, parameters_hash)
            client.accept(update.index, group, update.sealed)
        assert client.drop(parameters_hash, 0) == 2
        assert client.forget(parameters_hash) == 1


def a_quote(report_data: bytes) -> bytes:
    return b"quote over " + report_data


def test_evidence_is_asked_of_the_platform() -> None:
    with running(evidence=a_quote) as where, a_client(where) as client:
        parameters_hash = client.register(TASK)
        expected = b"quote over " + client.identity_public_key + parameters_hash
        assert client.evidence(parameters_hash) == expected
        with pytest.raises(TsaRefused):
            client.evidence(bytes(32))


def no_quote(_: bytes) -> bytes:
    raise EvidenceError("not in an enclave")


@pytest.mark.parametrize("evidence", [None, no_quote])
def test_a_platform_without_evidence_says_so(evidence: MakeEvidence | None) -> None:
    with running(evidence=evidence) as where, a_client(where) as client:
        parameters_hash = client.register(TASK)
        with pytest.raises(TsaRefused) as caught:
            client.evidence(parameters_hash)
        assert caught.value.reason is RefusalReason.NO_EVIDENCE


def test_nobody_there_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        a_client(f"unix:{tmp_path}/none")


def test_a_client_whose_tsa_ended_is_told_and_stays_told() -> None:
    with running() as where:
        client = a_client(where)
    for _ in range(2):
        with pytest.raises(Unavailable):
            client.register(TASK)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\0\0\0\0\0",
        b"\xff\xff\xff\xff\0",
        wire.frame(wire.DONE, bytes(20)),
        wire.frame(wire.DONE, b"\x02" + bytes(32)),
        wire.frame(77, b"x" * 5000),
    ],
)
def test_a_client_believes_no_answer_that_it_did_not_expect(tmp_path: Path, answer: bytes) -> None:
    where = f"unix:{tmp_path}/liar"
    with endpoint.listen(where) as listener:
        liar = threading.Thread(target=lie, args=(listener, answer))
        liar.start()
        with pytest.raises(Unavailable):
            a_client(where)
        liar.join(timeout=60)


def lie(listener: socket.socket, answer: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        received(connection, len(wire.identity_request()))
        connection.sendall(answer)


def test_it_is_a_process_of_its_own_and_ends_by_signal(tmp_path: Path) -> None:
    where = f"unix:{tmp_path}/tsa"
    command = [sys.executable, "-c", SERVE, where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == f"{where}\n"
        with a_client(where) as client:
            parameters_hash = client.register(TASK)
            assert len(client.offers(parameters_hash, 1000)) == 1000
        assert stat.S_IMODE(os.stat(tmp_path / "tsa").st_mode) == 0o600
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=60) == 0


def test_the_socket_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    where = f"unix:{tmp_path}/tsa"
    endpoint.listen(where).close()  # leaves its file, as a killed process does
    with running(where) as again, a_client(again) as client:
        assert client.register(TASK)
        with pytest.raises(OSError, match="in use"):
            endpoint.listen(where)


def test_the_socket_of_a_process_that_accepts_nobody_is_left_to_it(tmp_path: Path) -> None:
    """A stopped process keeps its socket. A blocking connect to a full backlog has no end."""
    where = f"unix:{tmp_path}/tsa"
    with endpoint.listen(where), ExitStack() as crowd:
        with suppress(BlockingIOError):
            while True:
                visitor = crowd.enter_context(socket.socket(socket.AF_UNIX))
                visitor.setblocking(False)
                visitor.connect(f"{tmp_path}/tsa")
        endpoint.remove_left_over(f"{tmp_path}/tsa")
        assert (tmp_path / "tsa").exists()
        with pytest.raises(OSError, match="in use"):
            endpoint.listen(where)


@pytest.mark.parametrize(
    "address",
    ["", "unix:", "tcp:0.0.0.0:80", "tcp:10.0.0.1:80", "tcp:127.0.0.1", "tcp:127.0.0.1:x",
     "tcp:localhost:80", "tcp:127.0.0.1:70000", "udp:127.0.0.1:80"],
)  # fmt: skip
def test_only_this_machine_is_listened_to(address: str) -> None:
    with pytest.raises(ValueError, match=r"neither|this machine"):
        endpoint.listen(address)


class OutOfMemory(TSA):
    """There is never enough to work ahead."""

    def sum_waiting(self) -> bool:
        raise MemoryError


def test_want_of_memory_ends_neither_the_process_nor_what_it_has() -> None:
    starved = OutOfMemory(entropy("TSA"))
    with running(tsa=starved) as where, a_client(where) as client:
        parameters_hash = client.register(TASK)
        updates = [sealed_by(client, parameters_hash) for _ in range(10)]
        for update in updates:
            client.accept(update.index, 1, update.sealed)
        total = sum((update.masked for update in updates), np.zeros(TASK.vector_words, WORD))
        unmasking = Unmasking(total, 10, TASK)
        client.release(TASK, 1, [update.index for update in updates], unmasking.take)
        assert unmasking.result().weight == 10


def test_a_connection_that_cannot_be_set_up_costs_nobody_else_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_options(_: socket.socket) -> None:
        raise OSError("the peer is gone")

    with running() as where:
        monkeypatch.setattr(endpoint, "tune", no_options)
        with socket.socket(socket.AF_UNIX) as visitor:
            visitor.settimeout(60.0)
            visitor.connect(where.removeprefix("unix:"))
            assert received(visitor, 1) == b""
        monkeypatch.undo()
        with a_client(where) as client:
            assert client.register(TASK) == TASK.digest()


def test_its_clock_follows_the_wall_clock_and_never_falls() -> None:
    """After a sleep of the machine, or when the wall clock is set: offers end by the same time."""
    shown = [100.0]
    now = wall_clock(lambda: shown[0])
    shown[0] = 7300.0  # the machine slept for two hours
    assert now() == 7300.0
    shown[0] = 50.0
    assert now() == 7300.0
    shown[0] = 7301.0
    assert now() == 7301.0


def test_sums_may_take_half_of_the_memory_there_is() -> None:
    meminfo = Path("/proc/meminfo").read_text().split()
    total = int(meminfo[meminfo.index("MemTotal:") + 1]) << 10
    assert platform_limits().memory_bytes == pytest.approx(total / 2, rel=0.01)
