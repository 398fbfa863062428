"""A server that was suspended, in real processes: it never counts a replayed upload twice.

The server is frozen for longer than tickets live. When it goes on, it deletes what proves that the
first update was counted. Then it starts again with its clock behind, like a resumed virtual machine
whose clock has not been corrected yet, so that the old ticket looks valid.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

from papaya.aggregator.sessions import ticket_life_s
from papaya.config import AsyncFL, ServerConfig, TaskConfig
from tests.hostile.running_server import CHUNK_BYTES, MODEL_LENGTH, Answer, PlainClient
from tests.hostile.test_clock_jumps import counted_sessions
from tests.system.admin import Admin
from tests.system.processes import START_S, Installation, ServerProcess, Toml

HEARTBEAT_S = 2.0
HOUR_S = 3600.0
TASK = TaskConfig(
    task="words",
    concurrency=8,
    model_length=MODEL_LENGTH,
    regime=AsyncFL(aggregation_goal=1),
    participation_gap_s=0.0,
    training_timeout_s=6.0,
    upload_timeout_s=6.0,
)
TICKET_LIFE_S = ticket_life_s(TASK, ServerConfig(heartbeat_s=HEARTBEAT_S))
UPDATE = bytes(4 * MODEL_LENGTH)
# Read when the interpreter starts, before Papaya takes the time.
WRONG_CLOCK = """
import time
from pathlib import Path
behind_s, wall = float(Path({file!r}).read_text()), time.time
time.time = lambda: wall() - behind_s
"""


class Client(PlainClient):
    def __init__(self, data: Path, server: ServerProcess) -> None:
        self.data = data
        self._server = server

    def address(self, listener: str) -> tuple[str, int]:
        host, port = self._server.addresses[listener].rsplit(":", 1)
        return host, int(port)

    def make_version(self) -> str:
        """Let a client make a version, and return its upload ticket. Retry if it is too slow."""
        ends_at = time.monotonic() + START_S
        while time.monotonic() < ends_at:
            joined = self.join()
            if joined["type"] != "Joined":
                continue
            report = {"type": "Report", "ticket": joined["ticket"], "examples": 1}
            granted = self.post_until("report", report)
            if granted["type"] != "UploadGranted":
                continue
            ticket = str(granted["ticket"])
            for index in range(0, len(UPDATE), CHUNK_BYTES):
                self.chunk(ticket, index // CHUNK_BYTES, UPDATE[index : index + CHUNK_BYTES])
            complete = {"type": "Complete", "ticket": ticket, "upload": "u1"}
            if self.post_until("complete", complete) == {"type": "Completed", "discarded": None}:
                return ticket
        raise AssertionError(f"no client made a version within {START_S:g} s")

    def replay(self, ticket: str) -> Answer:
        """The first answer to the first chunk that is not a Retry."""
        answer: Answer = self.until(
            lambda: self.chunk(ticket, 0, UPDATE[:CHUNK_BYTES]),
            lambda answer: answer.kind != "Retry",
        )
        return answer


def test_a_replayed_upload_is_counted_once_after_a_suspension(tmp_path: Path) -> None:
    behind, hook = tmp_path / "behind", tmp_path / "clock" / "sitecustomize.py"
    behind.write_text("0", encoding="ascii")
    hook.parent.mkdir()
    hook.write_text(WRONG_CLOCK.format(file=str(behind)), encoding="utf-8")
    settings: dict[str, Toml] = {"heartbeat_s": HEARTBEAT_S, "chunk_bytes": CHUNK_BYTES}
    with Installation(tmp_path, PYTHONPATH=str(hook.parent)) as installation:
        server = installation.add(server=settings).start()
        Admin(server.addresses["admin"], installation.secret("admin.token")).submit(TASK)
        client = Client(installation.data, server)
        began = time.time()
        ticket = client.make_version()
        client.make_version()

        server.send(signal.SIGSTOP)
        time.sleep(TICKET_LIFE_S + 1)  # for its clock, not for an event
        server.send(signal.SIGCONT)
        assert client.replay(ticket).kind != "ChunkReceived"
        client.make_version()
        assert counted_sessions(tmp_path) < 3, "nothing was deleted, so nothing is shown"

        assert server.stop() == 0
        behind.write_text(str(time.time() - began + HOUR_S), encoding="ascii")
        server.start()
        assert client.replay(ticket).message == {"type": "Aborted", "reason": "stale"}
        assert client.version() == 3
