"""A TSA on a thread of this process, behind a real socket."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from papaya.secagg.parameters import PublicParameters
from papaya.tsa import endpoint, wire
from papaya.tsa.client import Dial, TsaClient
from papaya.tsa.process import Process
from papaya.tsa.service import MakeEvidence, TsaService, TsaSession
from papaya.tsa.tsa import TSA
from tests.unit.secagg.builders import NOW, entropy

CLUSTER = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PATIENCE_S = 60.0


def a_client(address: str, dial: Dial = endpoint.connect) -> TsaClient:
    """A client that waits for answers for as long as a slow machine may need."""
    return TsaClient(address, CLUSTER, PATIENCE_S, PATIENCE_S, dial)


@contextmanager
def running(
    address: str | None = None,
    evidence: MakeEvidence | None = None,
    tsa: TSA | None = None,
    service: TsaService | None = None,
) -> Iterator[str]:
    """Yields the address; on leaving, the loop must end by itself."""
    service = service or TsaService(tsa or TSA(entropy("TSA")), evidence)
    stop, wake = socket.socketpair()
    with tempfile.TemporaryDirectory() as folder, stop, wake:
        where = address or f"unix:{Path(folder) / 'tsa'}"
        with endpoint.listen(where) as listener:
            process = Process(service, listener, lambda: NOW)
            thread = threading.Thread(target=process.run, args=(stop,))
            thread.start()
            try:
                yield endpoint.address_of(listener)
            finally:
                wake.send(b"1")
                thread.join(PATIENCE_S)
            assert not thread.is_alive()


def authenticated(service: TsaService, key: Ed25519PrivateKey = CLUSTER) -> TsaSession:
    """A session that has proved this key, as TsaClient does."""
    session = service.session()
    [answer] = session.answer(wire.identity_request()[4:], NOW)
    identity, challenge = answer[6:38], answer[38:]
    signature = key.sign(wire.proof_of(bytes(identity), bytes(challenge)))
    request = wire.authenticate_request(key.public_key().public_bytes_raw(), signature)
    assert session.answer(request[4:], NOW) == [wire.frame(wire.DONE)]
    return session


def serving(
    tsa: TSA, parameters: PublicParameters, evidence: MakeEvidence | None = None
) -> TsaSession:
    """A session of the cluster that registered these parameters."""
    session = authenticated(TsaService(tsa, evidence))
    [answer] = session.answer(wire.register_request(parameters.encode())[4:], NOW)
    assert answer[4] == wire.DONE
    return session


def received(connection: socket.socket, size: int) -> bytes:
    """So many bytes, or as many as come before the end."""
    data = b""
    while len(data) < size and (more := connection.recv(size - len(data))):
        data += more
    return data
