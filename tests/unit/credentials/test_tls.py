"""TLS: contexts that work together, and files that do not work at all."""

from __future__ import annotations

import ssl
import subprocess
from datetime import UTC, datetime, timedelta
from http.client import RemoteDisconnected
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from papaya.config.deployment import Deployment
from papaya.credentials.tls import (
    between_servers,
    client_context,
    explain,
    explain_connecting,
    server_context,
    unnamed_host,
)
from papaya.errors import ConfigError, OperatorError
from papaya.server.certificates import Certificates
from tests.system.tls import Authority


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for localhost, signed by itself, another one, and a key with a passphrase."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("one", "other"):
        openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem", "-days", "2"),
            *("-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost"),
        )
    key, closed = folder / "one.key", folder / "closed.key"
    openssl("pkey", "-in", key, "-aes256", "-passout", "pass:secret", "-out", closed)
    (folder / "garbage.pem").write_text("this is no PEM\n", encoding="ascii")
    return folder


def deployment(folder: Path, certificate: str, key: str, authority: str | None) -> Deployment:
    return Deployment(
        tls_certificate=str(folder / certificate),
        tls_key=str(folder / key),
        tls_authority=None if authority is None else str(folder / authority),
    )


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str = "localhost") -> str:
    """Both sides in memory; the version that they agree on."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    waiting = list(sides)
    for _ in range(10):
        for side in list(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                continue
    assert waiting == []
    assert [side.selected_alpn_protocol() for side in sides] == ["http/1.1"] * 2
    return str(sides[0].version())


def test_without_options_there_is_no_tls() -> None:
    assert server_context(Deployment()) is None
    assert between_servers(Deployment()) is None


def test_a_peer_cannot_ask_for_another_handshake(folder: Path) -> None:
    """In TLS 1.2 it could, again and again, on one connection."""
    context = server_context(deployment(folder, "one.pem", "one.key", None))
    assert context is not None
    assert context.options & ssl.OP_NO_RENEGOTIATION


def test_servers_of_one_installation_trust_each_other(folder: Path) -> None:
    configured = deployment(folder, "one.pem", "one.key", "one.pem")
    server, client = server_context(configured), between_servers(configured)
    assert server is not None
    assert client is not None
    assert handshake(server, client) == "TLSv1.3"
    for context in (server, client):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_roles_on_a_protected_network_can_do_without_tls(folder: Path) -> None:
    configured = msgspec.structs.replace(
        deployment(folder, "one.pem", "one.key", "one.pem"), servers_tls=False
    )
    certificates = Certificates(configured, ("selector", "aggregator"))
    assert certificates.doors is not None
    assert certificates.servers is None
    assert certificates.calls("aggregator") is None


def test_certificates_between_roles_need_tls_between_roles() -> None:
    mutual = {f"servers_{name}": "file.pem" for name in ("certificate", "key", "authority")}
    with pytest.raises(ConfigError, match="need TLS between roles"):
        Deployment(servers_tls=False, **mutual)  # type: ignore[arg-type]


@pytest.mark.parametrize(("authority", "name"), [("other.pem", "localhost"), ("one.pem", "else")])
def test_a_server_with_a_foreign_certificate_or_name_is_not_trusted(
    folder: Path, authority: str, name: str
) -> None:
    server = server_context(deployment(folder, "one.pem", "one.key", None))
    assert server is not None
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, client_context(str(folder / authority)), name)


def test_without_an_authority_the_systems_roots_count(folder: Path) -> None:
    server = server_context(deployment(folder, "one.pem", "one.key", None))
    assert server is not None
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, client_context())


@pytest.mark.parametrize(
    ("certificate", "key", "problem"),
    [
        ("missing.pem", "one.key", "tls_certificate"),
        ("one.pem", "missing.key", "tls_key"),
        ("one.pem", ".", "tls_key"),
        ("one.pem", "other.key", "do not work"),
        ("garbage.pem", "one.key", "do not work"),
        ("one.pem", "garbage.pem", "do not work"),
        ("one.pem", "closed.key", "passphrase"),
    ],
)
def test_files_that_do_not_work_are_explained(
    folder: Path, certificate: str, key: str, problem: str
) -> None:
    with pytest.raises(OperatorError, match=problem) as refused:
        server_context(deployment(folder, certificate, key, None))
    assert refused.value.hint


@pytest.mark.parametrize("authority", ["missing.pem", "garbage.pem", "one.key"])
def test_an_authority_that_does_not_work_is_explained(folder: Path, authority: str) -> None:
    with pytest.raises(OperatorError, match="tls_authority") as refused:
        between_servers(deployment(folder, "one.pem", "one.key", authority))
    assert refused.value.hint


@pytest.mark.parametrize(("days", "problem"), [(-1, "expired at"), (3, "")])
def test_a_server_says_at_its_start_that_its_certificate_ends(
    tmp_path: Path, days: int, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).serial_number(1)
    made = made.public_key(key.public_key()).not_valid_before(now - timedelta(days=9))
    signed = made.not_valid_after(now + timedelta(days=days)).sign(key, None)
    certificate, private = tmp_path / "c.pem", tmp_path / "k.pem"
    certificate.write_bytes(signed.public_bytes(Encoding.PEM))
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    tls = Deployment(tls_certificate=str(certificate), tls_key=str(private))
    if problem:
        with pytest.raises(OperatorError, match=problem):
            server_context(tls)
    else:
        assert server_context(tls) is not None
        assert "renew it" in caplog.text


@pytest.mark.parametrize("error", [ssl.SSLEOFError(8, "EOF"), ConnectionResetError()])
def test_a_connection_that_is_closed_in_the_handshake_is_explained(error: Exception) -> None:
    """As by a server that does not expect the PROXY protocol of its load balancer."""
    problem, hint = explain_connecting(error, "https://papaya.example")
    assert problem == "it closed the connection during the TLS handshake"
    assert "proxies" in hint


def test_a_connection_that_is_closed_later_is_not_a_matter_of_load_balancers() -> None:
    problem, hint = explain(RemoteDisconnected("closed without response"), "https://papaya.example")
    assert (problem, hint) == ("closed without response", "")


@pytest.mark.parametrize(
    ("host", "is_named"),
    [
        ("10.0.0.21", True),
        ("aggregator-1.internal", True),
        ("Aggregator-1.Internal", True),
        ("a.uploads.example", True),
        (None, True),
        ("10.0.0.22", False),
        ("uploads.example", False),
        ("a.b.uploads.example", False),
    ],
)
def test_a_certificate_must_name_where_other_servers_call(
    tmp_path: Path, host: str | None, is_named: bool
) -> None:
    """Without certificates between roles, servers show each other the one for devices."""
    hosts = ["10.0.0.21", "aggregator-1.internal", "*.uploads.example"]
    made = Authority(tmp_path).issue("server", hosts=hosts)
    listeners: dict[str, Any] = {**made.listeners()}
    servers: dict[str, Any] = {**made.servers()}
    assert bool(unnamed_host(Deployment(**listeners), host)) != is_named
    assert not unnamed_host(Deployment(**listeners, **servers), host)
    assert not unnamed_host(Deployment(**listeners, servers_tls=False), host)
    assert not unnamed_host(Deployment(), host)
