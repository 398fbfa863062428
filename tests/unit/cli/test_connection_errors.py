"""Why a connection failed, and the right hint, from `papaya task` and from a device."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from papaya.cli.admin_client import AdminClient
from papaya.cli.client.client import Printer
from papaya.cli.output import print_data, print_json, printable
from papaya.device.events import SelectorUnreachable, VisitEnded
from papaya.device.limits import DeviceLimits
from papaya.device.selectors import Selectors, open_session
from papaya.errors import OperatorError
from papaya.messages.selection import Capabilities, CheckIn
from papaya.server.admin.views import TaskView

CASES = [
    ("expired", "https://127.0.0.1:{port}", "has expired", "date"),
    ("valid", "https://localhost:{port}", "is for another name", "one of the names"),
    ("stranger", "https://127.0.0.1:{port}", "is not trusted", "--ca FILE"),
    ("valid", "http://127.0.0.1:{port}", "", "https://127.0.0.1:{port}"),
    ("plain", "https://127.0.0.1:{port}", "does not use TLS", "http://127.0.0.1:{port}"),
    ("plain", "http://nowhere.invalid:{port}", "unknown host nowhere.invalid", "host name"),
]


def make_certificate(folder: Path, days: int) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 that ends in `days`; it is its own authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "papaya")])
    now = datetime.now(UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=10))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(names, critical=False)
        .sign(key, hashes.SHA256())
    )
    certificate, key_file = folder / f"{days}.pem", folder / f"{days}.key"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return certificate, key_file


@contextmanager
def a_listener(context: ssl.SSLContext | None) -> Iterator[int]:
    """A server that handshakes, if it has TLS, and then closes every connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    taken, _ = listening.accept()
                except OSError:
                    return
                with taken:
                    try:
                        if context is None:
                            taken.recv(1 << 16)
                            taken.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                        else:
                            context.wrap_socket(taken, server_side=True).close()
                    except OSError:
                        continue

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(300)


@contextmanager
def a_case(kind: str, folder: Path) -> Iterator[tuple[int, Path]]:
    """The port of such a server, and the authority that its client trusts."""
    good, bad = make_certificate(folder, 10), make_certificate(folder, -1)
    served = bad if kind == "expired" else good
    context = None
    if kind != "plain":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*served)
    with a_listener(context) as port:
        yield port, bad[0] if kind in ("expired", "stranger") else good[0]


@pytest.mark.parametrize(("kind", "url", "problem", "hint"), CASES)
def test_a_command_says_what_is_wrong_with_a_connection(
    tmp_path: Path, kind: str, url: str, problem: str, hint: str
) -> None:
    with a_case(kind, tmp_path) as (port, authority):
        client = AdminClient(url.format(port=port), "0123456789abcdef", authority.read_text())
        with pytest.raises(OperatorError) as caught:
            client.get("/admin/tasks", tuple[TaskView, ...])
    assert problem in str(caught.value)
    assert hint.format(port=port) in caught.value.hint


@pytest.mark.parametrize(("kind", "url", "problem", "hint"), CASES)
def test_a_device_says_what_is_wrong_with_a_connection(
    tmp_path: Path, kind: str, url: str, problem: str, hint: str
) -> None:
    told: list[tuple[str, str | None, str]] = []

    async def ask(address: str, authority: Path) -> None:
        async with open_session(authority) as session:
            selectors = Selectors(session, DeviceLimits(), lambda *words: told.append(words))
            message = CheckIn(1, Capabilities("torch", (), 0, ()))
            assert await selectors.ask(address, None, message, 300.0) is None

    with a_case(kind, tmp_path) as (port, authority):
        asyncio.run(ask(url.format(port=port), authority))
    [(_, found, advice)] = told
    assert problem in (found or "")
    assert hint.format(port=port) in advice


def test_text_of_a_server_is_escaped_before_it_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No escape sequence reaches the terminal, and no text can look like another line."""
    printer, evil = Printer("text"), "\x1b]0;owned\x07\x9b2J\n\u202etxt"
    printer.on_event(VisitEnded("phone", 0.0, "rejected", evil, None))
    printer.on_event(SelectorUnreachable("process", 0.0, "http://x", evil))
    print_data(evil)
    print_json(evil)
    out, err = capsys.readouterr()
    for character in "\x1b\x07\x9b\u202e":
        assert character not in out + err
    assert out.splitlines()[0] == r"phone rejected (\x1b]0;owned\x07\x9b2J\n\u202etxt)"
    assert err.splitlines()[0].endswith("; trying again")
    assert printable("– K = 10 → ▁█ é") == "– K = 10 → ▁█ é"
