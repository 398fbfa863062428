"""One device with a token of its own, against a whole server: it gets one place, not all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from papaya.config import AsyncFL
from tests.hostile.running_server import MODEL_LENGTH, PatientConfig, RunningServer

UPDATE = bytes(4 * MODEL_LENGTH)
REPLACED = {"type": "Aborted", "reason": "replaced"}


def a_server(folder: Path, device_tokens: str = "signed", silent_s: float = 120.0) -> RunningServer:
    config = PatientConfig(silent_s=silent_s)
    return RunningServer(folder, server=config, device_tokens=device_tokens)


def a_server_again(folder: Path) -> RunningServer:
    return a_server(folder, silent_s=15.0)


def take_part(server: RunningServer, device: str) -> Any:
    """Why the update was discarded; None if it is counted."""
    answer = server.send_all(server.report(device)["ticket"], UPDATE)
    assert answer.kind == "Completed", answer
    return answer.message["discarded"]


def test_one_device_gets_one_of_40_sessions(tmp_path: Path) -> None:
    with a_server(tmp_path) as server:
        server.submit(concurrency=40)
        tickets = [server.join("greedy")["ticket"] for _ in range(40)]
        answers = [server.heartbeat(ticket) for ticket in tickets]
        assert answers == [*[REPLACED] * 39, {"type": "Alive"}]


def test_one_device_gets_one_place_in_a_buffer_also_after_a_restart(tmp_path: Path) -> None:
    with a_server(tmp_path) as server:
        server.submit(regime=AsyncFL(aggregation_goal=3))
        # The second update waits in the buffer after the next one.
        answers = [take_part(server, "greedy") for _ in range(5)]
        assert answers == [None, None, *["already_counted"] * 3]
        assert server.version() == 0
    with a_server_again(tmp_path) as server:
        assert take_part(server, "greedy") == "already_counted"
        assert take_part(server, "honest-1") is None
        assert take_part(server, "honest-2") is None
        server.until(server.version, lambda version: version == 1)
        assert take_part(server, "greedy") is None


def test_the_database_does_not_name_devices(tmp_path: Path) -> None:
    with a_server(tmp_path) as server:
        server.submit("words")
        assert take_part(server, "alice-s-phone") is None
        server.admin("POST", "/admin/tasks/words/cancel", b"{}")
        stored = b"".join(path.read_bytes() for path in server.data.glob("state.db*"))
        assert b"words" in stored
        assert b"alice-s-phone" not in stored


def accepted(server: RunningServer, device: str) -> None:
    """It checks in until it is."""
    server.until(lambda: server.check_in(device=device), lambda answer: answer.kind == "Accepted")


def test_assignments_that_nobody_joins_leave_room_for_others(tmp_path: Path) -> None:
    with a_server(tmp_path) as server:
        server.submit(concurrency=4)
        for _ in range(2):
            accepted(server, "greedy")
        assert [server.check_in(device="greedy").kind for _ in range(2)] == ["Rejected"] * 2
        accepted(server, "honest")


def test_joins_that_the_aggregator_does_not_get_leave_room_for_others(tmp_path: Path) -> None:
    """Each join is answered Retry and its lease lasts, as happens while a task moves."""
    with a_server(tmp_path) as server:
        server.submit(concurrency=6)
        accepted(server, "early")
        server.cut_off("aggregator")
        taken = 0
        for _ in range(6):
            answer = server.check_in(device="greedy")
            if answer.kind == "Accepted":
                taken += 1
                ticket = answer.message["ticket"]
                assert server.post("join", {"type": "Join", "ticket": ticket}).kind == "Retry"
        assert taken == 2
        accepted(server, "honest")


def revoke(server: RunningServer, device: str, revoked: bool = True) -> None:
    body = json.dumps({"device": device, "revoked": revoked}).encode()
    answer = server.admin("POST", "/admin/revocations", body)
    assert answer.status == 200, answer


def test_a_revoked_device_is_stopped_until_the_revocation_is_taken_back(tmp_path: Path) -> None:
    with a_server(tmp_path) as server:
        server.submit()
        stolen, honest = server.join("stolen")["ticket"], server.join("honest")["ticket"]
        revoke(server, "stolen")
        server.until(
            lambda: server.heartbeat(stolen),
            lambda answer: answer == {"type": "Aborted", "reason": "revoked"},
        )
        assert server.heartbeat(honest) == {"type": "Alive"}
        refused = server.check_in(device="stolen")
        assert (refused.status, refused.message["reason"]) == (403, "this device was revoked")
    with a_server_again(tmp_path) as server:
        assert server.check_in(device="stolen").kind == "Refused", "known from the first request on"
        revoke(server, "stolen", revoked=False)
        server.join("stolen")


@pytest.mark.parametrize("device_tokens", ["shared", "none"])
def test_without_identities_none_of_this_holds(tmp_path: Path, device_tokens: str) -> None:
    with a_server(tmp_path, device_tokens) as server:
        server.submit()
        tickets = [server.join()["ticket"] for _ in range(3)]
        assert [server.heartbeat(ticket) for ticket in tickets] == [{"type": "Alive"}] * 3
        assert [take_part(server, "") for _ in range(4)] == [None] * 4
