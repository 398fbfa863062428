"""Clients that want more of an aggregator's memory than there is: each gets its turn, none all."""

from __future__ import annotations

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from papaya.aggregator.upload import STARTER_BYTES
from tests.hostile.running_server import DEADLINE_S, Answer, PatientConfig, RunningServer

CHUNK_BYTES = 64 << 10
BUFFERS = 16  # in a megabyte


def a_server(folder: Path, silent_s: float = 120.0) -> RunningServer:
    config = PatientConfig(chunk_bytes=CHUNK_BYTES, silent_s=silent_s)
    return RunningServer(folder, server=config, upload_memory_mb=1)


def free_buffers(server: RunningServer) -> int:
    text = server.ask("GET", "/metrics", listener="admin").body.decode()
    [(_, found)] = re.findall(r"^(papaya_\w*buffers\w*) ([0-9.e+]+)$", text, re.MULTILINE)
    return int(float(found))


def length_of(chunks: int) -> int:
    return chunks * CHUNK_BYTES // 4


def upload(server: RunningServer, ticket: str, chunks: int) -> Answer:
    """As a client does: what is not taken is sent again, and so is what a lost slot took along."""
    missing = list(range(chunks))
    while True:
        for index in missing:
            send = partial(server.chunk, ticket, index, bytes(CHUNK_BYTES))
            answer = server.until(send, lambda answer: answer.kind != "Retry")
            assert answer.kind == "ChunkReceived", answer
        answer = server.complete(ticket)
        if answer.kind != "Incomplete":
            return answer
        missing = answer.message["missing"]


def test_uploads_that_do_not_fit_together_all_come_to_their_end(tmp_path: Path) -> None:
    """Eight of ten chunks each, and room for one at a time: else each would hold a few for ever."""
    with a_server(tmp_path) as server:
        server.submit(model_length=length_of(10))

        def take_part(_: int) -> Any:
            return upload(server, server.report()["ticket"], 10).message

        with ThreadPoolExecutor(8) as clients:
            answers = list(clients.map(take_part, range(8)))
        assert answers == [{"type": "Completed", "discarded": None}] * 8
        assert free_buffers(server) == BUFFERS


def test_a_model_that_does_not_fit_is_named_instead_of_promised(tmp_path: Path) -> None:
    with a_server(tmp_path) as server:
        server.submit(model_length=length_of(BUFFERS))
        task = server.until(
            lambda: server.admin("GET", "/admin/tasks/words").message["task"],
            lambda task: task["halted"],
        )
        assert "upload_memory_mb" in task["halted"]


def test_one_ticket_cannot_hold_the_memory(tmp_path: Path) -> None:
    """And what it does hold goes when nothing more comes of it."""
    with a_server(tmp_path, silent_s=15.0) as server, ExitStack() as lines:
        server.submit(model_length=length_of(10))
        greedy, honest = server.report()["ticket"], server.report()["ticket"]
        head = (
            f"PUT /v1/uploads/u/chunks/0 HTTP/1.1\r\nHost: x\r\nContent-Length: {CHUNK_BYTES}\r\n"
            f"Papaya-Ticket: {greedy}\r\nPapaya-Crc32: 00000000\r\n\r\n"
        )
        for _ in range(BUFFERS):
            line = socket.create_connection(server.address("devices"), timeout=DEADLINE_S)
            # More than a starter: two bodies are received into whole buffers, the rest is refused.
            lines.enter_context(line).sendall(head.encode() + bytes(STARTER_BYTES + 1))
        server.until(lambda: free_buffers(server), lambda free: free == BUFFERS - 2)
        assert upload(server, honest, 10).kind == "Completed"
        server.until(lambda: free_buffers(server), lambda free: free == BUFFERS)
