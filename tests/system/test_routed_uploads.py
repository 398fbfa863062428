"""haproxy in front of everything, as `deploy/haproxy/haproxy.cfg` has it: it passes TLS on, and
chooses the aggregator of an upload by its name.
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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.system.admin import Admin
from tests.system.fleet import Book, fleet, some_across_failures
from tests.system.oracle import Books
from tests.system.processes import Installation
from tests.system.test_roles_apart import CONFIG, Apart
from tests.system.tls import Authority, Certificates

HAPROXY = shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
CONFIGURATION = Path(__file__).parents[2] / "deploy" / "haproxy" / "haproxy.cfg"
_DOMAIN = "uploads.example"
_STEP_S = 240.0
_GOAL = CONFIG.aggregation_goal
_MOST_OTHERS = 50  # on a busy machine, uploads fall back to selectors
_COMPLETED = (
    r'^papaya_http_requests_total\{listener="devices",route="/v1/complete",status="200"\} (\S+)$'
)

pytestmark = pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed")


class Routed(Apart):
    """Devices reach every listener through the load balancer only."""

    def __init__(self, installation: Installation, made: Certificates) -> None:
        self.balancer = installation.reserve()
        self.tls = ssl.create_default_context(cafile=str(made.authority))
        shared = {**made.listeners(), "proxies": ["127.0.0.1"]}
        super().__init__(installation, selectors=2, aggregators=2, shared=shared, direct="https")

    def _uploads(self, url: str) -> dict[str, str]:
        return super()._uploads(url) | {"upload_url": self.name(self.upload_urls.index(url))}

    def name(self, number: int) -> str:
        """Where devices upload to an aggregator."""
        return f"https://aggregator-{number + 1}.{_DOMAIN}:{self.balancer.rpartition(':')[2]}"

    def taken_directly(self, number: int) -> int:
        """Uploads that devices completed at an aggregator without a selector in between."""
        aggregator = self.aggregators[number]
        admin = Admin(aggregator.addresses["admin"], "", self.tls)
        _, metrics = admin.ask("GET", "/metrics")
        found = re.findall(_COMPLETED, metrics.decode(), re.MULTILINE)
        return sum(int(float(count)) for count in found)

    def configuration(self) -> str:
        """The file that we ship, with the addresses of this test."""
        text = CONFIGURATION.read_text(encoding="ascii").replace(
            "bind :443", f"bind {self.balancer}"
        )
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
    """The names of the aggregators resolve to this machine."""
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
        apart.admin(apart.tls).submit(CONFIG)
        with balancing(apart, tmp_path):
            book = asyncio.run(_upload(apart, made))
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
        holder = await _taker(apart, book, 0, 1)
        apart.aggregators[holder].kill()
        book.next_era()
        await book.more(3 * _GOAL, _STEP_S)
        await _taker(apart, book, 1 - holder)
        await flying.go_home(_STEP_S)
    return book


async def _taker(apart: Routed, book: Book, *among: int) -> int:
    """The first of these aggregators to which a device has uploaded directly."""
    for _ in range(_MOST_OTHERS):
        for number in among:
            if await asyncio.to_thread(apart.taken_directly, number):
                return number
        await book.more(1, _STEP_S)
    raise AssertionError(f"{_MOST_OTHERS} more updates were counted, none of them directly")
