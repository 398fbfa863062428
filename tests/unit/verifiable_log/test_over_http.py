"""A log's files over HTTP: whoever serves them, it ends in time."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from pathlib import Path

import pytest

from papaya.verifiable_log.errors import LogError, LogSourceUnreachable, MissingFile
from papaya.verifiable_log.over_http import over_http
from tests.system.tls import make_certificates
from tests.unit.verifiable_log.hosts import Dripping, serving

# A TLS record of sixteen thousand bytes, of which one comes now and then.
_HANDSHAKE = b"\x16\x03\x03\x40\x00"
_LONG_S = 120.0


def test_a_file_is_read_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_certificates(tmp_path / "tls")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certificate, made.key)
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "checkpoint").write_bytes(b"a log")
    with serving(tmp_path / "log", context) as address:
        with pytest.raises(LogSourceUnreachable, match="certificate"):
            over_http(address)("checkpoint")
        fetch = over_http(address, tls=ssl.create_default_context(cafile=made.authority))
        assert fetch("checkpoint") == b"a log"
        monkeypatch.setenv("SSL_CERT_FILE", str(made.authority))
        fetch = over_http(address)
        assert fetch("checkpoint") == b"a log"
        with pytest.raises(MissingFile, match="does not exist"):
            fetch("tile/0/000")


@pytest.mark.parametrize(
    ("scheme", "first"),
    [
        ("http", b"HTTP/1.0 200 OK\r\n\r\n"),
        ("http", b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n"),
        ("http", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1000\r\n"),
        ("http", b"HTTP/1.1 200 OK\r\nServer: "),
        ("http", b""),
        ("https", _HANDSHAKE),
    ],
    ids=["body", "length", "chunked", "headers", "status", "handshake"],
)
def test_a_host_that_drips_is_left_in_time(scheme: str, first: bytes) -> None:
    """Each byte comes long before a socket's own timeout."""
    began = time.monotonic()
    with Dripping(first) as host:
        fetch = over_http(f"{scheme}://127.0.0.1:{host.port}", file_s=0.3)
        with pytest.raises(LogSourceUnreachable, match="no complete response within"):
            fetch("checkpoint")
    assert time.monotonic() - began < _LONG_S


def test_all_files_of_one_reading_have_one_time(tmp_path: Path) -> None:
    """Or a host would drip each of many tiles for as long as it is let."""
    with Dripping(b"HTTP/1.0 200 OK\r\n\r\n") as host:
        fetch = over_http(f"http://127.0.0.1:{host.port}", file_s=_LONG_S, all_s=0.3)
        with pytest.raises(LogSourceUnreachable, match="no complete response within"):
            fetch("checkpoint")
        with pytest.raises(LogSourceUnreachable, match="was not read"):
            fetch("tile/0/000")


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://example.org", "log"])
def test_only_http_is_fetched(url: str) -> None:
    with pytest.raises(LogError, match="invalid HTTP address"):
        over_http(url)


@pytest.mark.parametrize("scheme", ["http", "https", "ftp", "file", "data"])
@pytest.mark.parametrize("status", [b"301 Moved", b"302 Found", b"303 See Other", b"307 T"])
def test_no_redirect_is_followed(scheme: str, status: bytes) -> None:
    """Otherwise a log's host could make a device connect to any other host, or read a file."""
    with Dripping(b"") as other:
        to = f"Location: {scheme}://127.0.0.1:{other.port}/checkpoint".encode()
        answer = b"HTTP/1.0 " + status + b"\r\n" + to + b"\r\nContent-Length: 0\r\n\r\n"
        with Dripping(answer) as host, pytest.raises(LogSourceUnreachable, match="HTTP 30"):
            over_http(f"http://127.0.0.1:{host.port}", file_s=_LONG_S)("checkpoint")
        assert not other.asked.acquire(blocking=False)


def test_a_name_server_that_does_not_answer_is_left_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over = threading.Event()

    def wait(*_: object, **__: object) -> list[object]:
        over.wait(_LONG_S)
        raise OSError("no answer")

    monkeypatch.setattr(socket, "getaddrinfo", wait)
    began = time.monotonic()
    with pytest.raises(LogSourceUnreachable, match=r"no complete response within 0\.3 s"):
        over_http("http://log.example", file_s=0.3)("checkpoint")
    assert time.monotonic() - began < _LONG_S / 2
    readers = [thread for thread in threading.enumerate() if thread.name == "papaya-log"]
    assert readers
    assert all(thread.daemon for thread in readers), "they must not keep the process alive"
    over.set()
    for thread in readers:
        thread.join()
