"""The logs of real processes: a failover is told completely, and no secret is told at all."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from base64 import b64encode, urlsafe_b64encode
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from papaya.messages.storage import (
    CLUSTER_KEY,
    LEADER_KEY,
    TASKS,
    TICKET_KEYS,
    ClusterKeyRow,
    FenceRow,
    LeaderRow,
    Row,
    TaskRow,
    TicketKeyRow,
    fence_key,
)
from papaya.store.state import SqliteState
from tests.system.admin import Admin
from tests.system.fleet import briefly, fleet
from tests.system.processes import Installation, ServerProcess
from tests.system.test_roles_apart import CONFIG, Apart

STEP_S = 240.0
_POLL_S = 0.05
MARK = "mark3d-s3cret"


def events(*servers: ServerProcess) -> list[dict[str, Any]]:
    """The logs of these servers, put together by time."""
    lines = [line for server in servers for line in server.text().splitlines() if line[:1] == "{"]
    return sorted((json.loads(line) for line in lines), key=lambda event: event["time"])


def rows(data: Path, *prefixes: str) -> dict[str, Row]:
    state = SqliteState(data / "state.db")
    try:
        return state.read(prefixes)
    finally:
        state.close()


def until_taken(apart: Apart, but: str = "") -> FenceRow:
    """The row that says who holds the task, once it is another than `but` and has taken it."""
    ends_at, key = time.monotonic() + STEP_S, fence_key(CONFIG.task)
    while time.monotonic() < ends_at:
        row = rows(apart.installation.data, key).get(key)
        if isinstance(row, FenceRow) and row.aggregator not in ("", but):
            told = events(apart.aggregator(row.aggregator))
            if any((e["event"], e.get("seq")) == ("task_taken", row.seq) for e in told):
                return row
        time.sleep(_POLL_S)
    raise AssertionError(f"no other aggregator than {but!r} took the task in {STEP_S:g} s")


def until_found(leader: ServerProcess) -> None:
    """Wait for `task_found` after its latest `leadership_gained`: a slow machine may have made this
    coordinator the leader before.
    """
    ends_at = time.monotonic() + STEP_S
    while time.monotonic() < ends_at:
        told = [each["event"] for each in events(leader)]
        if "leadership_gained" in told:
            since = len(told) - told[::-1].index("leadership_gained")
            if "task_found" in told[since:]:
                return
        time.sleep(_POLL_S)
    raise AssertionError(f"{leader.name} did not find the task in {STEP_S:g} s")


def test_a_failover_can_be_told_from_the_logs_alone(tmp_path: Path) -> None:
    with Installation(tmp_path) as installation:
        server = {"heartbeat_s": 0.8}
        apart = Apart(installation, selectors=1, aggregators=2, coordinators=2, server=server)
        for each in installation.servers:
            each.use("--log-format", "json", "--log-level", "debug")
        apart.start()
        apart.admin().submit(CONFIG)
        first = until_taken(apart)
        apart.aggregator(first.aggregator).kill()
        second = until_taken(apart, but=first.aggregator)
        leader = apart.leader()
        [standby] = [each for each in apart.coordinators if each is not leader]
        leader.kill()
        assert apart.leader() is standby
        until_found(standby)
        apart.stop()
        told = events(*installation.servers)
        found = rows(installation.data, LEADER_KEY, fence_key(CONFIG.task))

    gained = [event for event in told if event["event"] == "leadership_gained"]
    # On a busy machine a leader may renew its lease late, and goes on in the same epoch.
    leaders = [event for event in gained if event["why"] != "its lease was renewed late"]
    leaders.sort(key=lambda event: event["epoch"])  # a busy leader may log it late
    assert [event["epoch"] for event in leaders] == list(range(1, len(leaders) + 1))
    row = found[LEADER_KEY]
    assert isinstance(row, LeaderRow)
    assert (leaders[-1]["node"], leaders[-1]["epoch"]) == (row.holder, row.epoch)
    assert leaders[-1]["why"] == f"{leaders[-2]['node']} did not renew its lease"

    of_task = [event for event in told if event.get("task") == CONFIG.task]
    places = [e for e in of_task if e["event"] in ("task_placed", "task_moved")]
    places.sort(key=lambda event: event["seq"])
    fence = found[fence_key(CONFIG.task)]
    assert isinstance(fence, FenceRow)
    assert [event["seq"] for event in places] == list(range(1, fence.seq + 1))
    assert places[-1]["holder"] == fence.aggregator
    # On a busy machine there may be more than one move.
    moves = [event for event in places if first.seq < event["seq"] <= second.seq]
    assert {event["event"] for event in moves} == {"task_moved"}
    assert (first.aggregator, "its holder is silent") in [(e["before"], e["why"]) for e in moves]
    assert moves[-1]["holder"] == second.aggregator
    taken = {event["seq"]: event["node"] for event in of_task if event["event"] == "task_taken"}
    for row in (first, second):
        assert taken[row.seq] == row.aggregator
    silent = [event["peer"] for event in told if event["event"] == "server_silent"]
    assert first.aggregator in silent
    assert {event["event"] for event in told} >= {
        "server_started",
        "node_started",
        "server_seen",
        "change_made",
        "task_found",
        "server_stopping",
    }


def test_no_secret_is_in_a_log(tmp_path: Path) -> None:
    """With every event on, wrong tokens everywhere, and a device that takes part."""
    with Installation(tmp_path) as installation:
        deployment = {"device_tokens": "shared", "log_format": "json"}
        server = installation.add(deployment=deployment)
        server.use("--log-level", "debug")
        server.start()
        token = installation.secret("admin.token")
        admin = Admin(server.addresses["admin"], token)
        admin.submit(structs.replace(CONFIG, concurrency=2, task="secrets"))
        for where, path in (("admin", "/admin/tasks"), ("devices", "/v1/check-in")):
            ask_with_wrong_token(server.addresses[where], path)
        admin.post("/admin/tasks/secrets/pause", {"why": "to see it"})
        admin.ask("POST", "/admin/tasks/secrets/pause", b'{"why": "again"}')
        admin.post("/admin/tasks/secrets/resume")
        device_token = installation.secret("device.token")
        devices = installation.folder / "devices"

        async def take_part() -> None:
            urls = [f"http://{server.addresses['devices']}"]
            async with fleet(devices, urls, device_token, 2, briefly) as flying:
                await flying.book.until(lambda: len(flying.book.acknowledged) >= 4, STEP_S, "4")
                await flying.go_home(STEP_S)

        asyncio.run(take_part())
        assert server.stop() == 0
        text, told = server.text(), events(server)
        stored = rows(installation.data, CLUSTER_KEY, TICKET_KEYS, TASKS)
        sessions = installation.secret("server.token")

    names = {event["event"] for event in told}
    assert names >= {"credentials_rejected", "change_made", "change_refused", "version_published"}
    secrets = [MARK, token, device_token, sessions]
    for row in stored.values():
        match row:
            case ClusterKeyRow() | TicketKeyRow():
                secrets += as_text(row.key)
            case TaskRow():
                secrets += as_text(row.pseudonym_key)
    assert len(secrets) > 8
    for secret in secrets:
        assert secret not in text
    assert "device-0" not in text


def as_text(key: bytes) -> list[str]:
    encoded = [b64encode(key).decode(), urlsafe_b64encode(key).decode().rstrip("=")]
    return [key.hex(), *encoded, ascii(key)[2:-1], msgspec.json.encode(key).decode()]


def ask_with_wrong_token(address: str, path: str) -> None:
    for header in (f"Bearer {MARK}", f"Basic {MARK}", MARK):
        connection = http.client.HTTPConnection(address, timeout=STEP_S)
        try:
            method = "GET" if path.startswith("/admin") else "POST"
            body = None if method == "GET" else b"{}"
            connection.request(method, path, body=body, headers={"Authorization": header})
            assert connection.getresponse().status == 401
        finally:
            connection.close()
