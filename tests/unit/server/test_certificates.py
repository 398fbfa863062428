"""Certificates between roles: who is accepted, who is refused and why, and renewal."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from papaya.config import Deployment
from papaya.errors import ConfigError, OperatorError
from papaya.http.client_connection import Response
from papaya.http.errors import PeerUnavailable
from papaya.http.exchange import Exchange
from papaya.http.listener import Listener, serve
from papaya.http.pool import ConnectionPool
from papaya.http.routes import Buffered
from papaya.http.tls import Tls
from papaya.server.certificates import Certificates
from tests.system.tls import Authority
from tests.system.tls import Certificates as Files
from tests.unit.http.loopback import LOOPS, PATIENT, PatientPool, run


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


def on_hello(exchange: Exchange, body: bytes) -> None:
    exchange.answer(200, b"hello")


def of(files: Files, *roles: str) -> Certificates:
    return Certificates(files.deployment(), roles)


@asynccontextmanager
async def listening(own: Certificates) -> AsyncIterator[Listener]:
    routes = [Buffered("GET", "/", on_hello)]
    listener = await serve(routes, "127.0.0.1", 0, limits=PATIENT, tls=own.servers)
    try:
        yield listener
    finally:
        await listener.drain(0)


async def ask(own: Certificates, role: str, listener: Listener) -> Response:
    pool = PatientPool(tls=own.calls(role))
    try:
        return await pool.request(f"127.0.0.1:{listener.port}", "GET", "/")
    finally:
        await pool.close()


def test_roles_that_call_each_other_are_accepted(authority: Authority) -> None:
    coordinator = of(authority.issue("c", ["coordinator"]), "coordinator")
    aggregator = of(authority.issue("a", ["aggregator"]), "aggregator")

    async def main() -> None:
        async with listening(coordinator) as listener:
            assert (await ask(aggregator, "coordinator", listener)).body == b"hello"
        async with listening(aggregator) as listener:
            assert (await ask(coordinator, "aggregator", listener)).body == b"hello"

    asyncio.run(main())


def test_a_caller_of_another_role_is_told_so(authority: Authority) -> None:
    selector = of(authority.issue("s", ["selector"]), "selector")
    aggregator = of(authority.issue("a2", ["aggregator"]), "aggregator")

    async def main() -> Response:
        async with listening(selector) as listener:
            return await ask(aggregator, "selector", listener)

    answer = asyncio.run(main())
    assert answer.status == 503, "devices whose requests it passes on may try again"
    assert b"the certificate names aggregator; coordinator is needed" in answer.body


def test_a_server_of_another_role_is_not_called(authority: Authority) -> None:
    """A selector, which devices reach, must not pass for a coordinator on the same host."""
    selector = of(authority.issue("s2", ["selector"]), "selector")
    aggregator = of(authority.issue("a3", ["aggregator"]), "aggregator")

    async def main() -> None:
        async with listening(selector) as listener:
            await ask(aggregator, "coordinator", listener)

    with pytest.raises(PeerUnavailable, match="names selector; coordinator is needed"):
        asyncio.run(main())


def test_a_caller_of_another_authority_gets_no_answer(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = of(authority.issue("c2", ["coordinator"]), "coordinator")
    stranger = Authority(tmp_path, "stranger").issue("a", ["aggregator"])
    foreign = of(stranger, "aggregator")
    foreign.calls("coordinator").context.load_verify_locations(str(authority.file))  # type: ignore[union-attr]

    async def main() -> None:
        async with listening(coordinator) as listener:
            await ask(foreign, "coordinator", listener)

    with pytest.raises(PeerUnavailable):
        asyncio.run(main())
    assert "the TLS handshake of 127.0.0.1 failed" in caplog.text
    assert "servers_authority" in caplog.text


@pytest.mark.parametrize("loop", LOOPS)
def test_a_certificate_that_expired_while_its_server_ran_is_refused(
    authority: Authority, loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = of(authority.issue("c3", ["coordinator"]), "coordinator")
    old = authority.issue("a4", ["aggregator"], age=timedelta(days=200))
    calling = ssl.create_default_context(cafile=str(authority.file))
    calling.load_cert_chain(old.certificate, old.key)

    async def main() -> None:
        async with listening(coordinator) as listener:
            pool = PatientPool(tls=Tls(calling))
            with pytest.raises(PeerUnavailable):
                await pool.request(f"127.0.0.1:{listener.port}", "GET", "/")
            await pool.close()

    run(main(), loop)
    assert "the TLS handshake of 127.0.0.1 failed: certificate has expired" in caplog.text


@pytest.mark.parametrize(
    ("age_days", "roles", "problem"),
    [
        (200, ["aggregator"], "expired at"),
        (-200, ["aggregator"], "is not valid before"),
        (0, [], "does not name the role aggregator; it names none"),
        (0, ["selector"], "does not name the role aggregator; it names selector"),
    ],
)
def test_our_own_certificate_is_checked_at_the_start(
    tmp_path: Path, age_days: int, roles: list[str], problem: str
) -> None:
    files = Authority(tmp_path).issue("own", roles, age=timedelta(days=age_days))
    with pytest.raises(OperatorError, match=problem) as refused:
        of(files, "aggregator")
    assert refused.value.hint


def test_a_certificate_of_another_authority_is_refused_at_the_start(tmp_path: Path) -> None:
    files = Authority(tmp_path, "one").issue("own", ["aggregator"])
    other = Authority(tmp_path, "other").file
    with pytest.raises(OperatorError, match="is refused by servers_authority") as refused:
        of(files._replace(authority=other), "aggregator")
    assert refused.value.hint


def test_a_certificate_for_another_host_is_refused_at_the_start(authority: Authority) -> None:
    files = authority.issue("elsewhere", ["aggregator"], ["aggregator-1.example"])
    Certificates(files.deployment(), ("aggregator",), "aggregator-1.example")
    for host in ("aggregator-2.example", "127.0.0.5"):
        with pytest.raises(OperatorError, match=f"is not for {host}") as refused:
            Certificates(files.deployment(), ("aggregator",), host)
        assert "subjectAltName" in refused.value.hint


def test_half_of_the_settings_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a certificate, its key and an authority"):
        Deployment(servers_certificate="a.pem", servers_key="a.key")


def replace(files: Files, by: Files) -> None:
    os.replace(by.key, files.key)
    os.replace(by.certificate, files.certificate)


def test_renewed_certificates_are_used_without_a_restart(authority: Authority) -> None:
    """By the listener, by calls, and by connections that were kept."""
    files = authority.issue("renewed", ["coordinator", "selector"])
    own = of(files, "coordinator", "selector")

    def serial(pool: ConnectionPool) -> str:
        [connection] = next(iter(pool._pools.values()))._connections
        return str(connection.certificate["serialNumber"])

    async def main() -> None:
        async with listening(own) as listener:
            pool, where = PatientPool(tls=own.calls("coordinator")), f"127.0.0.1:{listener.port}"
            assert (await pool.request(where, "GET", "/")).body == b"hello"
            before = serial(pool)
            replace(files, authority.issue("next", ["coordinator", "selector"]))
            own.refresh()
            assert (await pool.request(where, "GET", "/")).body == b"hello"
            assert serial(pool) != before
            await pool.close()

    asyncio.run(main())


def test_devices_see_a_renewed_certificate(authority: Authority) -> None:
    files = authority.issue("devices")
    own = Certificates(
        Deployment(tls_certificate=str(files.certificate), tls_key=str(files.key)), ("selector",)
    )
    trusting = ssl.create_default_context(cafile=str(authority.file))

    async def shown(port: int) -> str:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        found = str(writer.get_extra_info("peercert")["serialNumber"])
        writer.close()
        await writer.wait_closed()
        return found

    async def main() -> None:
        listener = await serve([], "127.0.0.1", 0, limits=PATIENT, tls=own.doors)
        before = await shown(listener.port)
        own.refresh()
        assert await shown(listener.port) == before
        replace(files, authority.issue("devices-next"))
        own.refresh()
        assert await shown(listener.port) != before
        await listener.drain(0)

    asyncio.run(main())


def test_files_that_do_not_work_are_reported_once_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    issuer = Authority(tmp_path)
    files = issuer.issue("own", ["aggregator"])
    own = of(files, "aggregator")
    assert own.servers is not None
    before, expiry = own.servers.context, own.expiry
    assert set(expiry) == {"servers_certificate"}
    for wrong in (
        issuer.issue("old", ["aggregator"], age=timedelta(days=200)),
        issuer.issue("other", ["selector"]),
    ):
        caplog.clear()
        replace(files, wrong)
        own.refresh()
        own.refresh()
        assert own.servers.context is before
        assert own.expiry is expiry
        assert caplog.text.count("certificates_refused") == 1
    files.certificate.unlink()
    own.refresh()
    assert own.servers.context is before
    replace(files, issuer.issue("good", ["aggregator"]))
    own.refresh()
    assert own.servers.context is not before
