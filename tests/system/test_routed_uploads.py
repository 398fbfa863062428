"""Runs `deploy/haproxy/haproxy.cfg` in front of all servers: haproxy passes TLS on and chooses the
aggregator by name.
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
from tests.system.processes import Installation, Toml
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
_ANSWERED = (
    r'^papaya_http_requests_total\{listener="devices",route="/v1/complete",status="200"\} (\S+)$'
)

pytestmark = pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed")


class Routed(Apart):
    """Devices reach every listener through the load balancer only."""

    def __init__(self, installation: Installation, made: Certificates) -> None:
        self.balancer = installation.reserve()
        self.tls = ssl.create_default_context(cafile=str(made.authority))
        shared: dict[str, Toml] = {
            **made.listeners(),
            "proxies": ["127.0.0.1"],
            "max_connections_per_address": _PER_ADDRESS,
        }
        super().__init__(installation, selectors=2, aggregators=2, shared=shared, direct="https")

    def _uploads(self, url: str) -> dict[str, str]:
        return super()._uploads(url) | {"upload_url": self.name(self.upload_urls.index(url))}

    def name(self, number: int) -> str:
        """Where devices upload to an aggregator."""
        return f"https://aggregator-{number + 1}.{_DOMAIN}:{self.balancer.rpartition(':')[2]}"

    def admin(self, tls: ssl.SSLContext | None = None) -> Admin:
        return super().admin(tls or self.tls)

    def answered_directly(self, number: int) -> int:
        """`Complete` requests of devices that this aggregator answered itself."""
        aggregator = self.aggregators[number]
        admin = Admin(aggregator.addresses["admin"], "", self.tls)
        _, metrics = admin.ask("GET", "/metrics")
        found = re.findall(_ANSWERED, metrics.decode(), re.MULTILINE)
        return sum(int(float(count)) for count in found)

    def configuration(self) -> str:
        """The file that we ship, with the addresses of this test."""
        text = CONFIGURATION.read_text(encoding="ascii")
        for shipped, own in ((_FOR_SERVICES, ""), ("bind :443", f"bind {self.balancer}")):
            assert shipped in text
            text = text.replace(shipped, own)
        for role, servers in (("selector", self.selectors), ("aggregator", self.aggregators)):
            for number, server in enumerate(servers, 1):
                shipped = f"{role}-{number}.internal:8750"
                assert shipped in text
                text = text.replace(shipped, server.addresses["devices"])
        return text


@contextmanager
def balancing(apart: Routed, folder: Path) -> Iterator[None]:
    file = folder / "haproxy.cfg"
    file.write_text(apart.configuration(), encoding="ascii")
    assert HAPROXY is not None
    with subprocess.Popen([HAPROXY, "-db", "-f", str(file)]) as process:
        try:
            _wait_for(apart.balancer, process)
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


@pytest.mark.usefixtures("_names_lead_here")
def test_uploads_are_routed_by_name_and_count_once_across_a_kill(tmp_path: Path) -> None:
    made = Authority(tmp_path / "tls").issue("server", hosts=["127.0.0.1", f"*.{_DOMAIN}"])
    with Installation(tmp_path) as installation:
        apart = Routed(installation, made)
        apart.start()
        apart.admin().submit(CONFIG)
        with balancing(apart, tmp_path):
            book = asyncio.run(_upload(apart, made))
            _limits_are_per_device(apart)
        assert set(apart.stop().values()) == {0}
        Books(installation.data, CONFIG.task).check(book.acknowledged)


async def _upload(apart: Routed, made: Certificates) -> Book:
    installation = apart.installation
    folder, token = installation.folder / "devices", installation.secret("device.token")
    book = Book()
    async with fleet(
        folder,
        [f"https://{apart.balancer}"],
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
    return book


async def _answers_more(apart: Routed, book: Book, number: int, than: int = 0) -> None:
    """Wait until this aggregator has answered more requests itself. On a busy machine some uploads
    fall back to selectors.
    """
    ends_at = time.monotonic() + _STEP_S
    while await asyncio.to_thread(apart.answered_directly, number) <= than:
        await book.more(1, ends_at - time.monotonic())


def _limits_are_per_device(apart: Routed) -> None:
    """haproxy tells the address of a device: one address at its limit does not bar the others."""
    living = next(i for i, server in enumerate(apart.aggregators) if server.is_running)
    with ExitStack() as stack:
        while (status := _status(stack, apart, living, "127.0.0.2")) == 404:
            pass
        assert status == 503
        assert _status(stack, apart, living, "127.0.0.1") == 404


def _status(stack: ExitStack, apart: Routed, number: int, source: str) -> int:
    """Of a request from this address to an unknown path. The connection stays open.

    On a busy machine the server may give a refused connection up before it is answered, and haproxy
    the server: then again.
    """
    host, _, port = apart.balancer.rpartition(":")
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
