"""A server process up and down: what it refuses, what it shares, what it leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from base64 import b64encode
from contextlib import AsyncExitStack, closing, suppress
from pathlib import Path
from zlib import crc32

import pytest
from msgspec import structs

from papaya import __version__
from papaya.aggregator.work import GetOffers, Restore
from papaya.cli.main import main
from papaya.clock import Clock
from papaya.config import Deployment, ServerConfig
from papaya.config.deployment import ROLES, Role
from papaya.errors import ConfigError, OperatorError, ProtocolError
from papaya.messages import wire
from papaya.messages.participation import Complete, Retry
from papaya.messages.storage import (
    FORMAT,
    FORMAT_KEY,
    BootRow,
    FormatRow,
    Member,
    Outcome,
    RecordRow,
    Row,
    Transaction,
    boot_key,
)
from papaya.messages.tickets import Keyring, UploadTicket
from papaya.server.formats import Formats
from papaya.server.host import AggregatorHost
from papaya.server.peers import address_of
from papaya.server.server import Server
from papaya.store.state import SqliteState
from tests.system.admin import Admin
from tests.system.tls import Authority
from tests.unit.http.loopback import PatientPool, a_client, a_request
from tests.unit.server.stuck_child import StuckChild
from tests.unit.server.worker_builders import SECURE, WORDS, MemoryBlobs

FAST = ServerConfig(heartbeat_s=0.2)
CALM = ServerConfig(heartbeat_s=2.0)  # no lease ends while the machine is busy
DEADLINE_S = 180.0


def deployment(folder: Path, **changes: object) -> Deployment:
    values = {
        "data": str(folder / "data"),
        "devices": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "servers": "127.0.0.1:0",
    }
    return Deployment(**{**values, **changes})  # type: ignore[arg-type]


def test_two_servers_of_one_name_do_not_share_a_folder(tmp_path: Path) -> None:
    async def run() -> None:
        first, second = Server(deployment(tmp_path)), Server(deployment(tmp_path))
        await first.start()
        try:
            with pytest.raises(OperatorError, match="already runs") as caught:
                await second.start()
            assert "--data" in caught.value.hint
        finally:
            await first.stop()
        await second.start()
        await second.stop()

    asyncio.run(run())


def test_a_stopped_server_leaves_no_lock_to_a_child_that_was_just_forked(tmp_path: Path) -> None:
    """Between fork and exec a child has every file of its parent open."""

    def lock_of_the_folder() -> int:
        wanted = tmp_path / "data" / "server.lock"
        for link in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # another thread has closed it
                if Path(os.readlink(link)) == wanted:
                    return int(link.name)
        raise AssertionError("the folder has no lock")

    async def run() -> None:
        first, second = Server(deployment(tmp_path)), Server(deployment(tmp_path))
        await first.start()
        childs = os.dup(lock_of_the_folder())
        try:
            await first.stop()
            await second.start()
            await second.stop()
        finally:
            os.close(childs)

    asyncio.run(run())


def test_a_server_stops_while_its_tsa_is_stuck_in_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, only SIGKILL ended the server."""
    stuck = StuckChild(tmp_path, monkeypatch)

    async def run() -> None:
        server = Server(deployment(tmp_path))
        await server.start()
        assert server._tsas is not None
        [link] = server._tsas.links
        link._start_s = 1e6
        aggregator = server._hosts["aggregator"]
        assert isinstance(aggregator, AggregatorHost)
        aggregator.workers.perform(GetOffers(SECURE, 1, 1))
        await asyncio.to_thread(stuck.wait_until_it_runs)
        await asyncio.wait_for(server.stop(), DEADLINE_S)

    asyncio.run(run())
    assert [child.returncode for child in stuck.started] == [-signal.SIGKILL]


def test_a_role_that_runs_already_is_named_with_its_address(tmp_path: Path) -> None:
    taken = deployment(tmp_path, coordinators=("127.0.0.1:1",), announce="here.example:8773")

    async def run() -> None:
        first, second = (Server(taken, ("aggregator",)) for _ in range(2))
        await first.start()
        try:
            with pytest.raises(
                OperatorError, match=r"aggregator@here\.example:8773 already"
            ) as found:
                await second.start()
            assert "--servers" in found.value.hint
            assert "--data" not in found.value.hint
        finally:
            await first.stop()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("role", "url", "more", "warning"),
    [
        ("aggregator", "http://up.example:9", {}, "devices upload to http://up.example:9, but"),
        ("aggregator", "http://up.example:9", {"proxies": ("127.0.0.1",)}, ""),
        ("aggregator", "", {}, ""),
        ("selector", "http://up.example:9", {}, "has no effect: this process is not an aggregator"),
    ],
)
def test_an_upload_url_that_devices_may_not_reach_is_logged(
    role: Role,
    url: str,
    more: dict[str, object],
    warning: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    where = deployment(tmp_path, coordinators=("127.0.0.1:1",), upload_url=url, **more)

    async def run() -> None:
        server = Server(where, (role,))
        await server.start()
        await server.stop()

    asyncio.run(run())
    logged = [each.getMessage() for each in caplog.records if "upload" in each.getMessage()]
    found = [line for line in logged if "hint: " in line]
    assert [warning in line for line in found] == ([True] if warning else [])


def test_a_server_that_cannot_start_threads_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def run() -> None:
        with pytest.raises(OperatorError, match="cannot start enough threads") as caught:
            await Server(deployment(tmp_path)).start()
        assert "ulimit -u" in caught.value.hint

    with monkeypatch.context() as limit:
        limit.setattr(threading.Thread, "start", refuse)
        asyncio.run(run())


def test_a_role_alone_needs_to_know_its_coordinators(tmp_path: Path) -> None:
    async def run() -> None:
        with pytest.raises(OperatorError, match="without a coordinator") as caught:
            await Server(deployment(tmp_path), ("selector",)).start()
        assert "coordinators = " in caught.value.hint

    asyncio.run(run())


def test_a_port_in_use_is_named_and_nothing_stays_open(tmp_path: Path) -> None:
    async def run() -> None:
        first = Server(deployment(tmp_path / "a"))
        await first.start()
        try:
            taken = first.addresses["admin"]
            second = Server(deployment(tmp_path / "b", admin=taken))
            with pytest.raises(OperatorError, match=taken) as refused:
                await second.start()
            assert "--admin 127.0.0.1:PORT" in refused.value.hint
        finally:
            await first.stop()

    before = set(threading.enumerate())
    asyncio.run(run())
    assert set(threading.enumerate()) <= before


def test_a_server_that_is_alone_is_called_by_nobody(tmp_path: Path) -> None:
    """Its certificate is for calls to a TSA, so it need not name a host."""
    files = Authority(tmp_path / "tls").issue("alone", ROLES, ["elsewhere.example"])

    async def run() -> None:
        server = Server(deployment(tmp_path / "data", **files.servers()))
        await server.start()
        await server.stop()
        apart = deployment(tmp_path / "data", coordinators=("127.0.0.1:1",), **files.servers())
        with pytest.raises(OperatorError, match=r"is not for 127\.0\.0\.1"):
            await Server(apart, ("aggregator",)).start()

    asyncio.run(run())


def test_health_and_metrics_need_no_token_and_the_admin_api_does(tmp_path: Path) -> None:
    async def run() -> None:
        server = Server(deployment(tmp_path))
        await server.start()
        connections = PatientPool()
        try:
            where = server.addresses["admin"]
            health = await connections.request(where, "GET", "/health")
            assert json.loads(health.body)["nodes"] == ["coordinator", "selector", "aggregator"]
            metrics = await connections.request(where, "GET", "/metrics")
            assert b"papaya_coordinator_aggregators" in metrics.body
            assert b"papaya_http_requests_total" in metrics.body
            assert (await connections.request(where, "GET", "/admin/status")).status == 401
            token = (tmp_path / "data" / "admin.token").read_text().strip()
            headers = (("Authorization", f"Bearer {token}"),)
            assert (await connections.request(where, "GET", "/admin/status", headers)).status == 200
        finally:
            await connections.close()
            await server.stop()

    asyncio.run(run())


def test_roles_apart_take_messages_only_from_servers(tmp_path: Path) -> None:
    async def run() -> None:
        server = Server(deployment(tmp_path), ("coordinator",))
        await server.start()
        connections = PatientPool()
        try:
            where = server.addresses["servers"]
            path = "/internal/messages"
            answer = await connections.request(where, "POST", path, body=b"{}")
            assert answer.status == 401
            token = (tmp_path / "data" / "server.token").read_text().strip()
            allowed = ("Authorization", f"Bearer {token}")
            stranger = (allowed, ("Papaya-To", "aggregator@nowhere:1"))
            answer = await connections.request(where, "POST", path, stranger, b"{}")
            assert answer.status == 400
            garbage = (allowed, ("Papaya-To", f"coordinator@{where}"))
            answer = await connections.request(where, "POST", path, garbage, b"{}")
            assert answer.status == 400
        finally:
            await connections.close()
            await server.stop()

    asyncio.run(run())


def test_an_aggregator_takes_uploads_from_devices_and_nothing_else(tmp_path: Path) -> None:
    async def run() -> None:
        where = deployment(
            tmp_path, coordinators=("127.0.0.1:1",), upload_url="http://aggregator.example:8750"
        )
        server = Server(where, ("aggregator",))
        await server.start()
        try:
            pool, devices = PatientPool(), server.addresses["devices"]
            claim = UploadTicket("task", "s1", 1, 0, "key", 9e9, 0, 1, 9e9)
            ticket = Keyring({1: bytes(32)}).seal(claim)
            complete = wire.encode(Complete(ticket, "u"))
            asked = await pool.request(devices, "POST", "/v1/complete", (), complete)
            answer = wire.to_device.parse(asked.body)
            assert isinstance(answer, Retry)
            assert answer.elsewhere
            headers = (
                ("Papaya-Ticket", b64encode(ticket).decode()),
                ("Papaya-Crc32", f"{crc32(b'data'):08x}"),
            )
            chunk = await pool.request(devices, "PUT", "/v1/uploads/u/chunks/0", headers, b"data")
            assert wire.to_device.parse(chunk.body) == answer
            for path in ("check-in", "join", "heartbeat", "report", "leave"):
                assert (await pool.request(devices, "POST", f"/v1/{path}")).status == 404
            assert (await pool.request(devices, "POST", "/internal/messages")).status == 404
            await pool.close()
        finally:
            await server.stop()

    asyncio.run(run())


def test_an_aggregator_without_an_upload_url_does_not_listen_for_devices(tmp_path: Path) -> None:
    async def run() -> None:
        server = Server(deployment(tmp_path, coordinators=("127.0.0.1:1",)), ("aggregator",))
        await server.start()
        try:
            assert sorted(server.addresses) == ["admin", "servers"]
        finally:
            await server.stop()

    asyncio.run(run())


def test_idle_connections_of_selectors_do_not_keep_chunks_out(tmp_path: Path) -> None:
    """Selectors keep connections for later chunks. No chunk is being received over them."""

    async def run() -> None:
        where = deployment(tmp_path, coordinators=("127.0.0.1:1",), max_connections=8)
        server = Server(where, ("aggregator",))
        await server.start()
        try:
            token = (tmp_path / "data" / "server.token").read_text().strip()
            ticket = Keyring({1: bytes(32)}).seal(UploadTicket("t", "s", 1, 0, "k", 9e9, 0, 1, 9e9))
            headers = (
                ("Authorization", f"Bearer {token}"),
                ("Papaya-Ticket", b64encode(ticket).decode()),
                ("Papaya-Crc32", f"{crc32(b'data'):08x}"),
            )
            chunk = a_request("PUT", "/v1/uploads/u/chunks/0", b"data", headers)
            async with AsyncExitStack() as stack:
                port = int(server.addresses["servers"].rpartition(":")[2])
                for _ in range(8):
                    client = await stack.enter_async_context(a_client(port))
                    client.send(chunk)
                    retry = wire.to_device.parse((await client.response()).body)
                    assert isinstance(retry, Retry)
                    assert retry.reason != "too many chunks are being received"
        finally:
            await server.stop()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("url", "more"),
    [
        ("aggregator.example:8750", {}),
        ("https://aggregator.example/path", {}),
        ("https://aggregator.example:99999", {}),
        ("https://aggregator.example.:8750", {}),
        ("https://aggregator..example:8750", {}),
        (f"https://{'a' * 505}", {}),
        ("https://user@aggregator.example", {}),
        ("http://aggregator.example", {"tls_certificate": "c.pem", "tls_key": "c.key"}),
    ],
)
def test_an_upload_url_that_devices_cannot_use_is_refused(
    tmp_path: Path, url: str, more: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match="upload_url"):
        deployment(tmp_path, upload_url=url, **more)


def test_the_address_of_a_node_is_in_its_name() -> None:
    assert address_of("aggregator@10.0.0.7:8752") == "10.0.0.7:8752"
    with pytest.raises(ProtocolError, match="has no address"):
        address_of("aggregator")


def test_a_stranger_is_refused_before_what_it_sends_is_kept(tmp_path: Path) -> None:
    async def run() -> None:
        server = Server(deployment(tmp_path), ("coordinator",))
        await server.start()
        try:
            for listener, path in (("servers", "/internal/messages"), ("admin", "/admin/tasks")):
                port = int(server.addresses[listener].rpartition(":")[2])
                async with a_client(port) as client:
                    client.send(a_request("POST", path, bytes(1000))[:-1])
                    response = await asyncio.wait_for(client.response(), DEADLINE_S)
                    assert response.status == 401, "its last byte never came"
        finally:
            await server.stop()

    asyncio.run(run())


def test_a_server_whose_store_fails_is_not_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> list[Outcome]:
        raise OperatorError("the disk is full", hint="make room")

    async def run() -> None:
        server = Server(deployment(tmp_path))
        await server.start()
        connections = PatientPool()
        try:
            where = server.addresses["admin"]
            assert (await connections.request(where, "GET", "/health")).status == 200
            monkeypatch.setattr(SqliteState, "transact_all", fails)
            assert await server._resources.state.transact(Transaction()) == "unknown"
            health = await connections.request(where, "GET", "/health")
            assert health.status == 503
            assert (await connections.request(where, "GET", "/live")).status == 200
            assert json.loads(health.body)["problem"] == "the last commit failed"
        finally:
            await connections.close()
            await server.stop()

    asyncio.run(run())


def test_the_status_of_a_server_whose_blobs_fail_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The status and /health name the task, but not the bucket, because not only operators read
    them. /health answers 200: other tasks go on, and operators have to reach the server.
    """

    class Expired(MemoryBlobs):
        is_expired = True

        def get(self, key: str) -> bytes:
            if self.is_expired:
                raise OperatorError("s3://bucket: the token is expired", hint="renew it")
            return super().get(key)

    record = RecordRow(1, "words/1/sum-1-1-0", (Member("a", 0, 0, 1, 0.0),), 1.0)

    async def run() -> None:
        server, blobs = Server(deployment(tmp_path, server=CALM)), Expired()
        await server.start()
        where, token = server.addresses["admin"], tmp_path / "data" / "admin.token"
        admin = Admin(where, token.read_text().strip())
        status = ["status", "--admin", f"http://{where}", "--token-file", str(token)]

        async def until(code: int, told: str) -> None:
            """Wait until `papaya status` exits with `code`, and its messages and the problem of
            /health are `told`. On a slow machine the leader may be late meanwhile.
            """
            last: tuple[int, str] | None = None
            ends_at = time.monotonic() + DEADLINE_S
            while last != (code, told) and time.monotonic() < ends_at:
                exit_code = await asyncio.to_thread(main, status)
                found, body = await asyncio.to_thread(admin.ask, "GET", "/health")
                assert found == 200
                last = exit_code, f"{capsys.readouterr().err}{json.loads(body)['problem']}"
            assert last == (code, told)

        try:
            await asyncio.to_thread(admin.submit, WORDS)
            await asyncio.to_thread(admin.until_task, "words", lambda it: it["demand"], DEADLINE_S)
            await until(0, "")
            host = server._hosts["aggregator"]
            assert isinstance(host, AggregatorHost)
            host.workers._blobs = blobs
            host.workers.perform(Restore(WORDS, 1, (record,), ()))
            problem = "task words halted: blobs cannot be read"
            await until(1, f"problem: {problem}\nblobs of task words cannot be read")
            assert (await asyncio.to_thread(admin.ask, "GET", "/live"))[0] == 200
            blobs.is_expired = False  # the record is lost, so the task is loaded again, without it
            await until(0, "")
        finally:
            await server.stop()

    asyncio.run(run())


def test_a_part_that_fails_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise ZeroDivisionError("a bug")

    async def run() -> None:
        server = Server(deployment(tmp_path))
        await server.start()
        try:
            assert not server.failed.is_set()
            server._look_after(fails())
            await asyncio.wait_for(server.failed.wait(), DEADLINE_S)
        finally:
            await server.stop()

    asyncio.run(run())
    assert "ZeroDivisionError: a bug" in caplog.text


def test_parts_that_are_stopped_have_not_failed(tmp_path: Path) -> None:
    async def run() -> None:
        server = Server(deployment(tmp_path))
        await server.start()
        await server.stop()
        assert not server.failed.is_set()

    asyncio.run(run())


def test_connections_are_capped_by_open_files(tmp_path: Path) -> None:
    asked = deployment(tmp_path, max_connections=900)
    assert Server(asked)._limits.max_connections == 900
    two, four = 256 + 2 * 64 + 3 * 500, 256 + 4 * 64 + 5 * 500
    assert Server(asked, open_files=two)._limits.max_connections == 500
    assert Server(asked, ("coordinator",), open_files=two)._limits.max_connections == 500
    # A selector may have a connection to an aggregator for each device.
    assert Server(asked, ("selector",), open_files=four)._limits.max_connections == 500
    assert Server(asked, open_files=two)._device_limits.max_connections == 500


@pytest.mark.parametrize(("chosen", "each"), [(None, 125), (1, 1), (1000, 1000)])
def test_open_files_also_cap_connections_per_address_unless_they_were_chosen(
    tmp_path: Path, chosen: int | None, each: int
) -> None:
    asked = deployment(tmp_path, max_connections_per_address=chosen)
    server = Server(asked, open_files=256 + 2 * 64 + 3 * 500)
    assert server._device_limits.max_connections_per_address == each


def test_a_server_that_takes_fewer_connections_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run(open_files: int) -> None:
        asked = deployment(tmp_path, max_connections=900)
        server = Server(asked, open_files=open_files)
        await server.start()
        await server.stop()

    asyncio.run(run(256 + 2 * 64 + 3 * 900))
    assert "max_connections" not in caplog.text
    asyncio.run(run(256 + 2 * 64 + 3 * 500))
    assert "each listener takes 500 (hint: raise the limit with ulimit -n" in caplog.text


@pytest.mark.parametrize("roles", [ROLES, ("aggregator",)])
def test_proxies_and_the_limit_per_address_are_for_devices(
    tmp_path: Path, roles: tuple[Role, ...]
) -> None:
    """At a selector, and at an aggregator to which devices upload directly."""
    own: dict[str, object] = {}
    if roles != ROLES:
        own = {"coordinators": ("127.0.0.1:1",), "upload_url": "http://aggregator.example:8750"}

    async def run() -> None:
        limits = {"proxies": ("127.0.0.1",), "max_connections_per_address": 1}
        server = Server(deployment(tmp_path, **limits, **own), roles)
        server._device_limits = structs.replace(server._device_limits, head_timeout_s=DEADLINE_S)
        await server.start()
        try:
            devices, admin = (
                int(server.addresses[name].rpartition(":")[2]) for name in ("devices", "admin")
            )
            header = b"PROXY TCP4 198.51.100.8 10.0.0.1 4711 443\r\n"
            request = a_request("GET", "/nowhere")
            async with a_client(devices) as first, a_client(devices) as second:
                first.send(header + request)
                assert (await first.response()).status == 404
                second.send(header + request)
                refused = await second.response()
                assert refused.status == 503
                retry = wire.to_device.parse(refused.body)
                assert isinstance(retry, Retry)
                assert 5 <= retry.after_s == int(refused.headers["retry-after"]) <= 15
                assert retry.elsewhere
            async with a_client(admin) as first, a_client(admin) as second:
                assert (await first.ask("GET", "/health")).status == 200
                assert (await second.ask("GET", "/health")).status == 200
        finally:
            await server.stop()

    asyncio.run(run())


@pytest.mark.parametrize(
    "wrong",
    [{"proxies": ("10.0.0.0/33",)}, {"proxies": ("lb",)}, {"max_connections_per_address": 0}],
)
def test_limits_that_make_no_sense_are_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        deployment(tmp_path, **wrong)


@pytest.mark.parametrize(
    ("key", "before", "after", "why"),
    [
        (
            boot_key("aggregator"),
            BootRow(1, FORMAT, __version__),
            BootRow(2, FORMAT, __version__),
            "another process has started as aggregator",
        ),
        (FORMAT_KEY, None, FormatRow(FORMAT + 1), f"the servers write format {FORMAT + 1}"),
    ],
)
def test_a_server_stops_when_a_row_says_so(
    tmp_path: Path, key: str, before: Row | None, after: Row, why: str
) -> None:
    async def run() -> None:
        server = Server(deployment(tmp_path, server=FAST))
        await server.start()
        try:
            path = tmp_path / "data" / "state.db"
            with closing(SqliteState(path, busy_timeout_s=DEADLINE_S)) as state:
                change = Transaction(require=((key, before),), put=((key, after),))
                assert state.transact(change) == "committed"
            await asyncio.wait_for(server.failed.wait(), DEADLINE_S)
            assert why in str(server.failure)
        finally:
            await server.stop()

    asyncio.run(run())


def test_a_server_does_not_start_if_the_others_write_a_later_format(tmp_path: Path) -> None:
    later = FormatRow(FORMAT + 1)
    with closing(SqliteState(tmp_path / "data" / "state.db")) as state:
        state.transact(Transaction(put=((FORMAT_KEY, later),)))
        with pytest.raises(OperatorError, match="this Papaya knows formats up to"):
            asyncio.run(Server(deployment(tmp_path, server=FAST)).start())
        assert state.read(Formats.prefixes) == {FORMAT_KEY: later}  # it took no boot number


def test_an_aggregator_whose_clock_is_an_hour_ahead_is_refused_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        leader = Server(deployment(tmp_path, server=FAST), ("coordinator",))
        await leader.start()
        places = deployment(tmp_path, server=FAST, coordinators=(leader.addresses["servers"],))
        clock = Clock(wall=lambda: time.time() + 3600.0)
        late = Server(places, ("aggregator",), clock=clock)
        try:
            await late.start()
            async with asyncio.timeout(DEADLINE_S):
                while "is_refused=true" not in caplog.text:
                    await asyncio.sleep(FAST.heartbeat_s)
        finally:
            await late.stop()
            await leader.stop()

    asyncio.run(run())
    assert "clock_differs peer=aggregator" in caplog.text


def test_a_server_starts_only_with_the_extensions_that_it_allows(tmp_path: Path) -> None:
    async def run() -> None:
        allowed = deployment(tmp_path, extensions=("server_optimizers:not_installed",))
        with pytest.raises(OperatorError, match="not_installed of the group") as caught:
            await Server(allowed).start()
        assert "install" in caught.value.hint

    asyncio.run(run())


@pytest.mark.parametrize("extension", ["lamb", "optimizers:lamb", "server_optimizers:La mb"])
def test_an_extension_is_named_by_its_group(tmp_path: Path, extension: str) -> None:
    with pytest.raises(ConfigError, match="extensions = ") as caught:
        deployment(tmp_path, extensions=(extension,))
    assert 'extensions = ["server_optimizers:lamb"]' in caught.value.hint
