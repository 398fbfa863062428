"""Devices that do not play by the rules, at the door of a real server.

After each of them the server still serves an honest client, and nothing that was accepted is lost.
"""

from __future__ import annotations

import json
import socket
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from papaya.messages.tickets import AssignmentTicket, Keyring, SessionTicket, UploadTicket
from tests.hostile.running_server import (
    CHUNK_BYTES,
    DEADLINE_S,
    MODEL_LENGTH,
    PatientConfig,
    RunningServer,
    sealed,
)

UPDATE = np.ones(MODEL_LENGTH, np.float32).tobytes()
FIRST = UPDATE[:CHUNK_BYTES]
FOREIGN = Keyring({1: b"somebody else's key"})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(tmp_path_factory.mktemp("server")) as running:
        running.submit(concurrency=500)  # many sessions here are left open
        is_served(running)
        yield running


def is_served(server: RunningServer) -> None:
    """An honest client goes all the way."""
    granted = server.report()
    answer = server.send_all(granted["ticket"], UPDATE)
    assert answer.message == {"type": "Completed", "discarded": None}


# -- tokens ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer x", "Basic abc", "Bearer " + "a" * 600, "bearer \x7f"],
)
def test_a_device_without_the_token_is_refused(
    server: RunningServer, authorization: str | None
) -> None:
    body = json.dumps({"type": "CheckIn", "protocol": 1, "capabilities": {}}).encode()
    headers = {} if authorization is None else {"Authorization": authorization}
    answer = server.ask("POST", "/v1/check-in", body, headers)
    assert answer.status in (400, 401)
    assert answer.kind == "Refused"


@pytest.mark.parametrize("name", ["device", "server"])
def test_no_other_token_opens_the_admin_api(server: RunningServer, name: str) -> None:
    headers = {"Authorization": f"Bearer {server.token(name)}"}
    for method, path in [("GET", "/admin/tasks"), ("POST", "/admin/tasks/words/cancel")]:
        assert server.ask(method, path, headers=headers, listener="admin").status == 401
    assert server.ask("GET", "/admin/tasks", headers={}, listener="admin").status == 401


def test_the_admin_api_is_not_at_the_devices_door(server: RunningServer) -> None:
    headers = {"Authorization": f"Bearer {server.token('admin')}"}
    assert server.ask("GET", "/admin/tasks", headers=headers).status == 404
    assert server.ask("GET", "/metrics").status == 404


def test_a_protocol_of_another_age_is_refused_with_a_hint(server: RunningServer) -> None:
    answer = server.check_in(protocol=99)
    assert answer.status == 403
    assert answer.message["hint"] == "update the client"


# -- tickets --------------------------------------------------------------------------------


def forged(kind: str) -> str:
    match kind:
        case "join":
            return sealed(FOREIGN.seal(AssignmentTicket("words", "f" * 24, 1, 2e9)))
        case "complete":
            ticket = UploadTicket("words", "f" * 24, 1, 0, "blob", 2e9, 0, 1, 2e9)
            return sealed(FOREIGN.seal(ticket))
    return sealed(FOREIGN.seal(SessionTicket("words", "f" * 24, 1, 0, "blob", 2e9)))


REQUESTS: dict[str, dict[str, Any]] = {
    "join": {"type": "Join"},
    "heartbeat": {"type": "Heartbeat"},
    "report": {"type": "Report", "examples": 1},
    "complete": {"type": "Complete", "upload": "u1"},
    "leave": {"type": "Leave", "reason": "bored"},
}


@pytest.mark.parametrize("path", REQUESTS)
def test_a_forged_ticket_is_refused(server: RunningServer, path: str) -> None:
    answer = server.post(path, {**REQUESTS[path], "ticket": forged(path)})
    assert (answer.status, answer.kind) == (403, "Refused")
    assert answer.message["hint"] == "check in again: this session is over"


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("ticket", ["", "AAAA", sealed(b"\x00" * 200), sealed(b"\xff" * 900)])
def test_a_ticket_that_is_none_is_refused(server: RunningServer, path: str, ticket: str) -> None:
    answer = server.post(path, {**REQUESTS[path], "ticket": ticket})
    assert (answer.status, answer.kind) == (403, "Refused")


@pytest.mark.parametrize("path", REQUESTS)
def test_a_missing_ticket_is_malformed(server: RunningServer, path: str) -> None:
    answer = server.post(path, REQUESTS[path])
    assert (answer.status, answer.kind) == (400, "Refused")


def test_a_ticket_of_another_stage_is_refused(server: RunningServer) -> None:
    ticket = server.join()["ticket"]
    for path in ("join", "complete"):
        answer = server.post(path, {**REQUESTS[path], "ticket": ticket})
        assert answer.kind == "Refused", (path, answer)
    assert server.chunk(ticket, 0, FIRST).kind == "Refused"
    assert server.post("leave", {**REQUESTS["leave"], "ticket": ticket}).kind == "Left"


def test_every_flipped_bit_of_a_ticket_is_noticed(server: RunningServer) -> None:
    ticket = b64decode(server.join()["ticket"])
    for position in range(0, len(ticket), 7):
        broken = bytearray(ticket)
        broken[position] ^= 1
        answer = server.post("heartbeat", {"type": "Heartbeat", "ticket": sealed(bytes(broken))})
        assert answer.kind in ("Refused", "Retry"), (position, answer)
    answer = server.post("leave", {**REQUESTS["leave"], "ticket": sealed(ticket)})
    assert answer.kind == "Left"


def test_a_ticket_that_has_expired_is_refused(tmp_path: Path) -> None:
    with RunningServer(tmp_path) as server:
        server.submit(training_timeout_s=0.05, upload_timeout_s=0.05)
        ticket = server.join()["ticket"]
        report = {**REQUESTS["report"], "ticket": ticket}
        over = server.until(lambda: server.post("report", report), lambda a: a.kind != "Retry")
        server.until(
            lambda: server.post("heartbeat", {"type": "Heartbeat", "ticket": ticket}),
            lambda a: a.kind in ("Refused", "Aborted"),
        )
        assert over.kind in ("UploadGranted", "Refused", "Aborted")


# -- chunks ---------------------------------------------------------------------------------


def test_chunks_may_come_twice_and_in_any_order(server: RunningServer) -> None:
    ticket = server.report()["ticket"]
    pieces = [UPDATE[i : i + CHUNK_BYTES] for i in range(0, len(UPDATE), CHUNK_BYTES)]
    for index in (2, 0, 2, 0, 1, 1):
        assert server.chunk(ticket, index, pieces[index]).kind == "ChunkReceived"
    for _ in range(2):
        assert server.complete(ticket).message == {"type": "Completed", "discarded": None}


def test_what_is_missing_is_named(server: RunningServer) -> None:
    ticket = server.report()["ticket"]
    assert server.complete(ticket).message == {"type": "Incomplete", "missing": [0, 1, 2]}
    server.chunk(ticket, 1, UPDATE[CHUNK_BYTES : 2 * CHUNK_BYTES])
    assert server.complete(ticket).message["missing"] == [0, 2]
    assert server.complete(ticket, upload="another").message["missing"] == [0, 1, 2]


def test_a_damaged_chunk_is_sent_again(server: RunningServer) -> None:
    ticket = server.report()["ticket"]
    answer = server.chunk(ticket, 0, FIRST, checksum="00000000")
    assert (answer.status, answer.kind) == (503, "Retry")
    assert server.complete(ticket).message["missing"] == [0, 1, 2]
    assert server.send_all(ticket, UPDATE).kind == "Completed"


@pytest.mark.parametrize("checksum", ["", "12345", "zzzzzzzz", "0000000000", "ABCDEF00"])
def test_a_checksum_that_is_none_is_malformed(server: RunningServer, checksum: str) -> None:
    ticket = server.report()["ticket"]
    assert server.chunk(ticket, 0, FIRST, checksum=checksum).status == 400


@pytest.mark.parametrize(
    ("index", "data", "status"),
    [
        (0, FIRST + b"x", 403),
        (0, FIRST[:-1], 403),
        (0, b"", 400),
        (2, FIRST, 403),
        (3, FIRST, 403),
        (4096, FIRST, 400),
        (99999, FIRST, 400),
    ],
)
def test_a_chunk_of_the_wrong_size_or_number_is_refused(
    server: RunningServer, index: int, data: bytes, status: int
) -> None:
    ticket = server.report()["ticket"]
    answer = server.chunk(ticket, index, data)
    assert (answer.status, answer.kind) == (status, "Refused")
    assert server.send_all(ticket, UPDATE).kind == "Completed"


def test_a_chunk_above_the_limit_is_refused_before_it_is_read(server: RunningServer) -> None:
    ticket = server.report()["ticket"]
    with socket.create_connection(server.address("devices"), DEADLINE_S) as peer:
        head = (
            f"PUT /v1/uploads/u1/chunks/0 HTTP/1.1\r\nHost: x\r\nPapaya-Ticket: {ticket}\r\n"
            "Papaya-Crc32: 00000000\r\nContent-Length: 1000000000\r\n\r\n"
        )
        peer.sendall(head.encode())
        assert peer.recv(4096).startswith(b"HTTP/1.1 413 ")
    is_served(server)


@pytest.mark.parametrize("upload", ["..", "a b", "%2e%2e", "x" * 65, "é"])
def test_an_upload_id_that_is_none_is_refused(server: RunningServer, upload: str) -> None:
    ticket = server.report()["ticket"]
    with socket.create_connection(server.address("devices"), DEADLINE_S) as peer:
        head = (
            f"PUT /v1/uploads/{upload}/chunks/0 HTTP/1.1\r\nHost: x\r\nPapaya-Ticket: {ticket}\r\n"
            f"Papaya-Crc32: 00000000\r\nContent-Length: {len(FIRST)}\r\n\r\n"
        )
        peer.sendall(head.encode() + FIRST)
        assert peer.recv(4096).startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 404 "))
    is_served(server)


def test_a_chunk_after_completion_changes_nothing(server: RunningServer) -> None:
    ticket = server.report()["ticket"]
    assert server.send_all(ticket, UPDATE).kind == "Completed"
    for upload in ("u1", "u2"):
        answer = server.chunk(ticket, 0, FIRST, upload=upload)
        assert answer.message == {"type": "Completed", "discarded": None}


def test_another_upload_id_starts_again_at_chunk_0(server: RunningServer) -> None:
    ticket = server.report()["ticket"]
    assert server.chunk(ticket, 0, FIRST).kind == "ChunkReceived"
    assert server.chunk(ticket, 1, FIRST, upload="u2").kind == "Refused"
    assert server.complete(ticket).message["missing"] == [1, 2]
    assert server.send_all(ticket, UPDATE, upload="u3").kind == "Completed"


def test_a_body_shorter_than_its_length_counts_for_nothing(server: RunningServer) -> None:
    ticket = server.report()["ticket"]
    with socket.create_connection(server.address("devices"), DEADLINE_S) as peer:
        head = (
            f"PUT /v1/uploads/u1/chunks/0 HTTP/1.1\r\nHost: x\r\nPapaya-Ticket: {ticket}\r\n"
            f"Papaya-Crc32: 00000000\r\nContent-Length: {len(FIRST)}\r\n\r\n"
        )
        peer.sendall(head.encode() + FIRST[: CHUNK_BYTES // 2])
    assert server.complete(ticket).message["missing"] == [0, 1, 2]
    assert server.send_all(ticket, UPDATE).kind == "Completed"


@pytest.mark.parametrize(
    ("number", "reason"), [(np.nan, "not_finite"), (np.inf, "not_finite"), (1e30, "over_norm")]
)
def test_an_update_that_must_not_enter_the_sum_is_discarded(
    server: RunningServer, number: float, reason: str
) -> None:
    ticket = server.report()["ticket"]
    bad = np.full(MODEL_LENGTH, number, np.float32).tobytes()
    assert server.send_all(ticket, bad).message == {"type": "Completed", "discarded": reason}
    is_served(server)


def test_without_memory_a_chunk_is_answered_before_its_body_is_read(tmp_path: Path) -> None:
    chunk = bytes(256 << 10)
    config = PatientConfig(chunk_bytes=len(chunk))
    with RunningServer(tmp_path, server=config, upload_memory_mb=1) as server:
        server.submit(model_length=2 * len(chunk) // 4)  # an upload needs all of the memory
        first, second = server.report()["ticket"], server.report()["ticket"]
        assert server.chunk(first, 0, chunk).kind == "ChunkReceived"
        with socket.create_connection(server.address("devices"), DEADLINE_S) as peer:
            head = (
                f"PUT /v1/uploads/u2/chunks/0 HTTP/1.1\r\nHost: x\r\nPapaya-Ticket: {second}\r\n"
                f"Papaya-Crc32: 00000000\r\nContent-Length: {len(chunk)}\r\n\r\n"
            )
            peer.sendall(head.encode())  # not a byte of the body
            answer = peer.recv(4096)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: " in answer
        assert server.chunk(first, 1, chunk).kind == "ChunkReceived"
        assert server.complete(first).kind == "Completed"


# -- garbage --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'{"type":"Chunk"}',
        b'{"type":"CheckIn"}',
        b"\xff\xfe",
        b"[" * 9000,
    ],
)
@pytest.mark.parametrize("path", ["check-in", "join", "report"])
def test_garbage_is_answered_in_words(server: RunningServer, path: str, body: bytes) -> None:
    headers = {"Authorization": f"Bearer {server.token('device')}"}
    answer = server.ask("POST", f"/v1/{path}", body, headers)
    assert (answer.status, answer.kind) == (400, "Refused")


@pytest.mark.parametrize(
    "key",
    [
        "words/0/optimizer-0-" + "0" * 32,
        "words/1/sum-1-1-" + "0" * 32,
        "words/0/version-0-" + "0" * 32,
        "words/0/version-0",
        "a",
    ],
)
def test_only_parameters_have_a_public_address(server: RunningServer, key: str) -> None:
    assert server.ask("GET", f"/v1/parameters/{key}").status == 404


def test_parameters_are_immutable_and_cacheable(server: RunningServer) -> None:
    joined = server.join()
    path = f"/v1/parameters/{joined['parameters']}"
    answer = server.ask("GET", path)
    assert answer.status == 200
    assert len(answer.body) > 4 * MODEL_LENGTH
    assert "immutable" in answer.headers["cache-control"]
    tag = answer.headers["etag"]
    assert server.ask("GET", path, headers={"If-None-Match": tag}).status == 304
    head = server.ask("HEAD", path)
    assert (head.status, head.body) == (200, b"")


def test_a_download_of_parameters_can_be_resumed(server: RunningServer) -> None:
    path = f"/v1/parameters/{server.join()['parameters']}"
    whole = server.ask("GET", path)
    assert whole.headers["accept-ranges"] == "bytes"
    tag, size = whole.headers["etag"], len(whole.body)
    rest = {"Range": "bytes=10-", "If-Range": tag}
    part = server.ask("GET", path, headers=rest)
    assert (part.status, part.body) == (206, whole.body[10:])
    assert part.headers["content-range"] == f"bytes 10-{size - 1}/{size}"
    assert "immutable" in part.headers["cache-control"]
    behind = server.ask("GET", path, headers={"Range": f"bytes={size}-"})
    assert (behind.status, behind.message["type"]) == (416, "Refused")
    assert server.ask("GET", path, headers={**rest, "If-None-Match": tag}).status == 304


def test_after_all_that_the_server_still_serves(server: RunningServer) -> None:
    before = server.version()
    for _ in range(2):
        is_served(server)
    server.until(server.version, lambda version: version > before)
