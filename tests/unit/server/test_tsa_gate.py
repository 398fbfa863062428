"""The gate before a TSA: aggregators with certificates get through, and nobody else."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from papaya.config import Deployment
from papaya.errors import ConfigError, OperatorError
from papaya.secagg.words import WORD, Words
from papaya.server import tsa_gate
from papaya.server.certificates import Certificates
from papaya.server.tsa_gate import TsaGate
from papaya.tsa.errors import Unavailable
from papaya.tsa.tsa import TSA
from tests.system.tls import Authority
from tests.system.tls import Certificates as Files
from tests.unit.secagg.builders import a_task, entropy
from tests.unit.tsa.running import PATIENCE_S, a_client, running

PARAMETERS = a_task()
LARGE = a_task(length=3_000_000)
HOST = "127.0.0.9"


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handshake may take long on a busy machine."""
    patient = structs.replace(tsa_gate._LIMITS, head_timeout_s=PATIENCE_S)
    monkeypatch.setattr(tsa_gate, "_LIMITS", patient)
    monkeypatch.setattr(tsa_gate, "_CONNECT_S", PATIENCE_S)


def of(files: Files, role: str) -> Certificates:
    return Certificates(files.deployment(), (role,))


def behind_a_gate(authority: Authority, tsa: str, ask: Callable[[str], None]) -> None:
    """Run `ask` on a thread, with the address of a gate before `tsa`."""

    async def main() -> None:
        files = authority.issue("gate", ["tsa"], [HOST])
        gate = TsaGate(files.deployment(), f"tls:{HOST}:0", tsa, look_s=0.05)
        where, stop = await gate.bind(), asyncio.Event()
        running_gate = asyncio.create_task(gate.run(stop))
        try:
            await asyncio.to_thread(ask, where)
        finally:
            stop.set()
            await running_gate

    asyncio.run(main())


class Released(TSA):
    """Has seeds for everybody."""

    def release(self, parameters_hash: bytes, group: int, members: object) -> Words:
        masks: Words = np.arange(LARGE.vector_words).astype(WORD)
        return masks


def test_aggregators_reach_the_tsa_with_large_answers(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    aggregator = of(authority.issue("a", ["aggregator"]), "aggregator")

    def ask(where: str) -> None:
        clients = [a_client(where, aggregator.dial_tsa) for _ in range(3)]
        for client in clients:
            assert client.register(LARGE) == LARGE.digest()
            heard: list[Words] = []
            client.release(LARGE, 1, [1, 2], lambda at, m, heard=heard: heard.append(m.copy()))  # type: ignore[misc]
            assert np.array_equal(np.concatenate(heard), np.arange(LARGE.vector_words))
            client.close()

    with running(tsa=Released(entropy("released"))) as tsa:
        behind_a_gate(authority, tsa, ask)


@pytest.mark.parametrize("role", ["selector", "tsa"])
def test_another_role_is_refused(
    tmp_path: Path, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    wrong = of(authority.issue("wrong", [role]), role)

    def ask(where: str) -> None:
        with pytest.raises(Unavailable):
            a_client(where, wrong.dial_tsa)

    with running() as tsa:
        behind_a_gate(authority, tsa, ask)
    assert f"the certificate names {role}; aggregator is needed" in caplog.text


def test_without_a_certificate_nothing_reaches_the_tsa(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)

    def ask(where: str) -> None:
        host, _, port = where.removeprefix("tls:").rpartition(":")
        trusting = ssl.create_default_context(cafile=str(authority.file))
        with (
            socket.create_connection((host, int(port)), PATIENCE_S) as plain,
            trusting.wrap_socket(plain, server_hostname=host) as stream,
            suppress(ssl.SSLError, ConnectionResetError),  # an alert, if it gets through
        ):
            assert stream.recv(1) == b""

    behind_a_gate(authority, "unix:/nowhere", ask)
    assert "PEER_DID_NOT_RETURN_A_CERTIFICATE" in caplog.text
    assert "the TSA cannot be reached" not in caplog.text, "nobody tried to"


def test_an_impostor_of_another_role_is_not_asked(tmp_path: Path) -> None:
    """It has a certificate of ours for this host, but is not a TSA."""
    authority = Authority(tmp_path)
    aggregator = of(authority.issue("a", ["aggregator"]), "aggregator")
    impostor = of(authority.issue("selector", ["selector"], [HOST]), "selector")
    assert impostor.servers is not None
    with socket.create_server((HOST, 0)) as listener:
        listener.settimeout(PATIENCE_S)

        def accept() -> None:
            connection, _ = listener.accept()
            assert impostor.servers is not None
            with impostor.servers.context.wrap_socket(connection, server_side=True) as stream:
                assert stream.recv(1) == b""

        async def main() -> None:
            accepting = asyncio.create_task(asyncio.to_thread(accept))
            where = f"tls:{HOST}:{listener.getsockname()[1]}"
            with pytest.raises(Unavailable, match="names selector; tsa is needed"):
                await asyncio.to_thread(a_client, where, aggregator.dial_tsa)
            await accepting

        asyncio.run(main())


RETRANSMITS, CHECKS_PEER = "01", "02"  # timers in /proc/net/tcp


def timer(local: int, remote: int) -> str:
    """Which timer of the kernel runs for the connection between these ports."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if [int(field.rpartition(":")[2], 16) for field in fields[1:3]] == [local, remote]:
            return fields[5].partition(":")[0]
    raise AssertionError("there is no such connection")


def test_the_kernel_finds_aggregators_that_are_gone_without_a_word(tmp_path: Path) -> None:
    """After a power failure nothing arrives. Else each one keeps one of the places of the gate."""
    authority = Authority(tmp_path)
    aggregator = of(authority.issue("a", ["aggregator"]), "aggregator")

    def ask(where: str) -> None:
        with aggregator.dial_tsa(where, PATIENCE_S) as stream:
            ports = stream.getpeername()[1], stream.getsockname()[1]
            while (found := timer(*ports)) == RETRANSMITS:  # the end of the handshake
                time.sleep(0.01)
            assert found == CHECKS_PEER

    with running() as tsa:
        behind_a_gate(authority, tsa, ask)


def test_a_tsa_that_does_not_run_is_unavailable_and_the_gate_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    aggregator = of(authority.issue("a", ["aggregator"]), "aggregator")

    def ask(where: str) -> None:
        with pytest.raises(Unavailable):
            a_client(where, aggregator.dial_tsa)

    caplog.set_level(logging.WARNING)
    behind_a_gate(authority, f"unix:{tmp_path / 'nobody'}", ask)
    assert "the TSA cannot be reached" in caplog.text


def test_a_gate_needs_certificates_and_so_do_its_callers(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="without certificates") as refused:
        TsaGate(Deployment(), "tls:0.0.0.0:8760", "unix:tsa.sock")
    assert "servers_certificate" in refused.value.hint
    with pytest.raises(ConfigError, match="called with certificates only"):
        Deployment(tsa=f"tls:{HOST}:8760")
    for where in ("10.0.0.5:8760", "tcp:10.0.0.5:8760", "tcp:tsa.example:8760"):
        with pytest.raises(ConfigError, match="is not the address of a TSA"):
            Deployment(tsa=(where,))
    files = Authority(tmp_path).issue("gate", ["tsa"], [HOST])
    with pytest.raises(OperatorError, match="is not an address for a gate"):
        TsaGate(files.deployment(), "tcp:127.0.0.1:8760", "unix:tsa.sock")
