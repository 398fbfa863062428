"""Uploads under TLS that only the aggregator decrypts. Who is in front chooses it by name: haproxy
with `deploy/haproxy/haproxy.cfg`, or a selector.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.system.admin import Admin
from tests.system.fleet import Book, fleet, some_across_failures
from tests.system.oracle import Books
from tests.system.processes import Installation, ServerProcess, Toml
from tests.system.test_roles_apart import CONFIG, Apart
from tests.system.tls import Authority, Certificates

HAPROXY = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
CONFIGURATION = Path(__file__).parents[2] / "deploy" / "haproxy" / "haproxy.cfg"
_DOMAIN = "uploads.example"
_STEP_S = 240.0
_GOAL = CONFIG.aggregation_goal
_PER_ADDRESS = 30  # connections; the devices need fewer
# These need root, or more open files than a test may have.
_FOR_SERVICES = "  user haproxy\n  group haproxy\n  chroot /var/lib/haproxy\n  maxconn 20000\n"
_ANSWERED = r'papaya_http_requests_total\{listener="devices",route="/v1/complete",status="200"\}'
_PASSED = r'papaya_passthrough_connections_total\{outcome="passed"\}'


class Named(Apart):
    """Devices reach every listener through one address only."""

    def __init__(self, installation: Installation, made: Certificates) -> None:
        self.front = installation.reserve()
        self.tls = ssl.create_default_context(cafile=str(made.authority))
        shared: dict[str, Toml] = {
            **made.listeners(),
            "proxies": ["127.0.0.1"],
            "max_connections_per_address": _PER_ADDRESS,
        }
        super().__init__(installation, selectors=2, aggregators=2, shared=shared, direct="https")

    def _uploads(self, url: str) -> dict[str, Toml]:
        return super()._uploads(url) | {"upload_url": self.name(self.upload_urls.index(url))}

    def name(self, number: int) -> str:
        """Where devices upload to an aggregator."""
        return f"https://aggregator-{number + 1}.{_DOMAIN}:{self.front.rpartition(':')[2]}"

    def admin(self, tls: ssl.SSLContext | None = None) -> Admin:
        return super().admin(tls or self.tls)

    def answered_directly(self, number: int) -> int:
        """`Complete` requests of devices that this aggregator answered itself."""
        return self._count(self.aggregators[number], _ANSWERED)

    def _count(self, server: ServerProcess, series: str) -> int:
        """The sum of what its metrics have under these series."""
        _, metrics = Admin(server.addresses["admin"], "", self.tls).ask("GET", "/metrics")
        found = re.findall(rf"^{series} (\S+)$", metrics.decode(), re.MULTILINE)
        return sum(int(float(count)) for count in found)


class Balanced(Named):
    """haproxy is in front of two selectors and two aggregators."""

    def configuration(self) -> str:
        """The file that we ship, with the addresses of this test."""
        text = CONFIGURATION.read_text(encoding="ascii")
        for shipped, own in ((_FOR_SERVICES, ""), ("bind :443", f"bind {self.front}")):
            assert shipped in text
            text = text.replace(shipped, own)
        for role, servers in (("selector", self.selectors), ("aggregator", self.aggregators)):
            for number, server in enumerate(servers, 1):
                shipped = f"{role}-{number}.internal:8750"
                assert shipped in text
                text = text.replace(shipped, server.addresses["devices"])
        return text


class Passed(Named):
    """Devices know one selector, and the names of the aggregators lead to it."""

    def _door(self, number: int) -> dict[str, Toml]:
        """Its own limit is high: that of the aggregator is looked at."""
        own: dict[str, Toml] = {"proxies": [], "max_connections_per_address": 1000}
        if number:
            return own
        listening = [url.rpartition("/")[2] for url in self.upload_urls]
        routes = {f"aggregator-{i}.{_DOMAIN}": where for i, where in enumerate(listening, 1)}
        return own | {"devices": self.front, "upload_routes": routes}

    def passed_on(self) -> int:
        return self._count(self.selectors[0], _PASSED)


@contextmanager
def balancing(apart: Balanced, folder: Path) -> Iterator[None]:
    file = folder / "haproxy.cfg"
    file.write_text(apart.configuration(), encoding="ascii")
    assert HAPROXY is not None
    with subprocess.Popen([HAPROXY, "-db", "-f", str(file)]) as process:
        try:
            _wait_for(apart.front, process)
            yield
        finally:
            process.terminate()


def _wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    host, _, port = address.rpartition(":")
    ends_at = time.monotonic() + _STEP_S
    while time.monotonic() < ends_at:
        assert process.poll() is None, "haproxy ended"
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError(f"haproxy does not listen on {address}")


@pytest.fixture
def _names_lead_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of the aggregators resolve to this machine (aiohttp without aiodns asks here)."""
    real = socket.getaddrinfo

    def here(host: Any, *arguments: Any, **more: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        is_ours = name is not None and name.endswith(f".{_DOMAIN}")
        return real("127.0.0.1" if is_ours else host, *arguments, **more)

    monkeypatch.setattr(socket, "getaddrinfo", here)


@pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed")
@pytest.mark.usefixtures("_names_lead_here")
def test_haproxy_routes_uploads_by_name_and_they_count_once_across_a_kill(tmp_path: Path) -> None:
    made = _certificates(tmp_path)
    with Installation(tmp_path) as installation:
        apart = Balanced(installation, made)
        apart.start()
        apart.admin().submit(CONFIG)
        with balancing(apart, tmp_path):
            book = asyncio.run(_upload(apart, made))
            _limits_are_per_device(apart)
        assert set(apart.stop().values()) == {0}
        Books(installation.data, CONFIG.task).check(book.acknowledged)


@pytest.mark.usefixtures("_names_lead_here")
def test_a_selector_passes_uploads_on_by_name_and_they_count_once_across_a_kill(
    tmp_path: Path,
) -> None:
    made = _certificates(tmp_path)
    with Installation(tmp_path) as installation:
        apart = Passed(installation, made)
        apart.start()
        apart.admin().submit(CONFIG)
        book = asyncio.run(_upload(apart, made))
        _limits_are_per_device(apart)
        assert apart.passed_on() > 0
        assert set(apart.stop().values()) == {0}
        Books(installation.data, CONFIG.task).check(book.acknowledged)


def _certificates(folder: Path) -> Certificates:
    return Authority(folder / "tls").issue("server", hosts=["127.0.0.1", f"*.{_DOMAIN}"])


async def _upload(apart: Named, made: Certificates) -> Book:
    installation = apart.installation
    folder, token = installation.folder / "devices", installation.secret("device.token")
    book = Book()
    async with fleet(
        folder,
        [f"https://{apart.front}"],
        token,
        12,
        some_across_failures,
        certificates=made.authority,
        upload_hosts=[f"*.{_DOMAIN}:*"],
        book=book,
    ) as flying:
        await book.more(3 * _GOAL, _STEP_S)
        holder = apart.aggregators.index(await asyncio.to_thread(apart.holder))
        await _answers_more(apart, book, holder)
        before = await asyncio.to_thread(apart.answered_directly, 1 - holder)
        apart.aggregators[holder].kill()
        book.next_era()
        await book.more(3 * _GOAL, _STEP_S)
        await _answers_more(apart, book, 1 - holder, before)
        await flying.go_home(_STEP_S)
        assert flying.process.direct > 0, "devices know it too"
    return book


async def _answers_more(apart: Named, book: Book, number: int, than: int = 0) -> None:
    """Wait until this aggregator has answered more requests itself. On a busy machine some uploads
    fall back to selectors.
    """
    ends_at = time.monotonic() + _STEP_S
    while await asyncio.to_thread(apart.answered_directly, number) <= than:
        await book.more(1, ends_at - time.monotonic())


def _limits_are_per_device(apart: Named) -> None:
    """The aggregator knows the address of a device: one at its limit does not bar the others."""
    living = next(i for i, server in enumerate(apart.aggregators) if server.is_running)
    with ExitStack() as stack:
        while (status := _status(stack, apart, living, "127.0.0.2")) == 404:
            pass
        assert status == 503
        assert _status(stack, apart, living, "127.0.0.1") == 404


def _status(stack: ExitStack, apart: Named, number: int, source: str) -> int:
    """Of a request from this address to an unknown path. The connection stays open.

    On a busy machine the server may give a refused connection up before it is answered, and who is
    in front the server: then again.
    """
    host, _, port = apart.front.rpartition(":")
    name = apart.name(number).removeprefix("https://").partition(":")[0]
    ends_at = time.monotonic() + _STEP_S
    while True:
        try:
            plain = stack.enter_context(
                socket.create_connection((host, int(port)), _STEP_S, source_address=(source, 0))
            )
            connection = stack.enter_context(apart.tls.wrap_socket(plain, server_hostname=name))
            connection.sendall(f"GET / HTTP/1.1\r\nHost: {name}\r\n\r\n".encode())
            if answer := connection.recv(4096):
                return int(answer.split()[1])
        except OSError:
            pass
        assert time.monotonic() < ends_at, f"no answer from {name}"
