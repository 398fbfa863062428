"""TLS under the endpoint and between servers."""

from __future__ import annotations

import ssl

import pytest

from papaya.http.errors import PeerUnavailable
from papaya.http.tls import Tls
from tests.unit.http.loopback import (
    LOOPS,
    PatientPool,
    Shop,
    a_client,
    a_request,
    a_server,
    run,
    tls_contexts,
)

BIG = bytes(range(256)) * 12_000


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The server's and the client's."""
    return tls_contexts(tmp_path_factory.mktemp("tls"))


@pytest.mark.parametrize("loop", LOOPS)
def test_bodies_go_both_ways_over_tls(
    loop: str, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    shop = Shop(room_bytes=70_000)

    async def main() -> None:
        async with (
            a_server(shop.routes, ssl=contexts[0]) as server,
            a_client(server.port, ssl=contexts[1]) as client,
        ):
            stream = a_request("PUT", "/stream/a", BIG) + a_request("POST", "/echo", b"next")
            client.send(stream)
            assert (await client.response()).body == BIG
            assert (await client.response()).body == b"next"
            client.send(a_request("PUT", "/nowhere", BIG))
            assert (await client.response()).status == 404

    run(main(), loop)
    assert [receiver.ends for receiver in shop.receivers] == [["finished"]]


@pytest.mark.parametrize("loop", LOOPS)
def test_servers_talk_over_tls(loop: str, contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    async def main() -> None:
        async with a_server(Shop().routes, ssl=contexts[0]) as server:
            address = f"127.0.0.1:{server.port}"
            connections = PatientPool(tls=Tls(contexts[1]))
            assert (await connections.request(address, "POST", "/echo", (), b"x")).body == b"x"
            assert (await connections.request(address, "PUT", "/stream/a", (), BIG)).body == BIG
            await connections.close()

            distrustful = PatientPool(tls=Tls(ssl.create_default_context()))
            with pytest.raises(PeerUnavailable, match="cannot connect"):
                await distrustful.request(address, "GET", "/echo")
            await distrustful.close()

    run(main(), loop)
