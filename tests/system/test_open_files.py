"""A server with few file descriptors under a flood of connections that never send a byte.

With TLS they never finish their handshake.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from papaya.config import AsyncFL, TaskConfig
from tests.system.admin import Admin
from tests.system.processes import PAPAYA, START_S, Installation, ServerProcess, Toml
from tests.system.tls import make_certificates

OPEN_FILES = 1024
WITH_FEW_FILES = ("sh", "-c", f'ulimit -n {OPEN_FILES} && exec "$@"', "sh", *PAPAYA)
REFUSED = "connections are refused"
_BATCH_S = 30.0
TASK = TaskConfig(task="words", concurrency=4, model_length=10, regime=AsyncFL(aggregation_goal=2))


def address_of(text: str) -> tuple[str, int]:
    host, port = text.rsplit(":", 1)
    return host, int(port)


def flood(stack: ExitStack, server: ServerProcess, address: tuple[str, int]) -> None:
    """Silent connections, until the listener refuses some.

    Those after them are closed where addresses are limited, and elsewhere not accepted.
    """
    before = server.text().count(REFUSED)
    ends_at = time.monotonic() + START_S
    batch = stack.enter_context(ExitStack())
    while server.text().count(REFUSED) == before:
        assert time.monotonic() < ends_at, server.text()
        batch.close()  # this process has a limit on open files, too
        for _ in range(OPEN_FILES // 3):
            batch.enter_context(socket.create_connection(address))
        with suppress(AssertionError):  # a busy server closes the first before the last arrive
            server.until_logged(REFUSED, _BATCH_S, after=before)


def connection_to(
    address: tuple[str, int], tls: ssl.SSLContext | None, source: str = "127.0.0.1"
) -> http.client.HTTPConnection:
    if tls is None:
        return http.client.HTTPConnection(*address, timeout=120, source_address=(source, 0))
    return http.client.HTTPSConnection(
        *address, timeout=120, source_address=(source, 0), context=tls
    )


class KeptAdmin(Admin):
    """Sends all requests over one connection, which was opened before the flood."""

    def __init__(self, address: tuple[str, int], token: str, tls: ssl.SSLContext | None) -> None:
        super().__init__("", token, tls)
        self._headers = {"Authorization": f"Bearer {token}"}
        self._kept = connection_to(address, tls)
        self.close = self._kept.close

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        self._kept.request(method, path, body, self._headers)
        response = self._kept.getresponse()
        return response.status, response.read()


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
def test_silent_connections_leave_files_for_storage(tmp_path: Path, is_tls: bool) -> None:
    deployment: dict[str, Toml] = {}
    tls = None
    if is_tls:
        made = make_certificates(tmp_path / "tls")
        deployment |= made.listeners()
        tls = ssl.create_default_context(cafile=made.authority)
    with Installation(tmp_path, program=WITH_FEW_FILES) as installation, ExitStack() as stack:
        server = installation.add(deployment=deployment).start()
        devices, own = (address_of(server.addresses[name]) for name in ("devices", "admin"))
        admin = KeptAdmin(own, installation.secret("admin.token"), tls)
        stack.callback(admin.close)
        assert admin.ask("GET", "/health")[0] == 200
        flood(stack, server, devices)
        other = connection_to(devices, tls, "127.0.0.2")
        stack.callback(other.close)
        other.request("GET", "/nowhere")
        assert other.getresponse().status == 404  # the flood has not taken all places
        flood(stack, server, own)
        files = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
        assert files < OPEN_FILES - 200
        assert admin.ask("GET", "/health")[0] == 200
        admin.submit(TASK)  # opens files: the parameters and the state
        assert admin.task("words")["state"] == "running"
