"""An owner submits, changes and repeats a task; the devices, started once, follow."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from papaya.cli.demo.demo import write_trust
from papaya.device.executor import EngineName
from tests.confined import needs_confinement
from tests.system.admin import Admin
from tests.system.processes import PAPAYA, Installation, ServerProcess, Toml, run_to_the_end
from tests.system.test_secure import until

pytestmark = needs_confinement

STEP_S = 240.0
SERVER: dict[str, Toml] = {"heartbeat_s": 1.0}
DEVICES = 4  # of a world, unless it says otherwise
TASK = """
import torch
from helper import to_tensors
from papaya.learning.task import AsyncFL, ClientSGD, Examples, Task

task = Task(
    name="opened", model=lambda: torch.nn.Linear(1, 1), batch=to_tensors,
    loss=lambda module, x, y: ((module(x) - y) ** 2).mean(), examples=Examples("numbers"),
    client=ClientSGD(rate=0.01), regime=AsyncFL(aggregation_goal=6), concurrency=12,
    participation_gap_s=0.0,
)
"""
# The same on devices without torch: fields instead of a function, and a sample to compare with.
COMPILED = """
import torch
from helper import FIELDS
from papaya.learning.task import AsyncFL, ClientSGD, Examples, SecureAggregation, Task

task = Task(
    name="opened", model=lambda: torch.nn.Linear(1, 1), batch=FIELDS,
    loss=lambda module, x, y: (module(x) - y).square()[:, 0], examples=Examples("numbers"),
    client=ClientSGD(rate=0.01), regime=AsyncFL(aggregation_goal=2), concurrency=3,
    participation_gap_s=0.0, clip=5.0, secure_aggregation=SecureAggregation(),
    sample=[b"1,2", b"2,5", b"-1,0"],
)
"""
FIELDS = """
from papaya.learning.example_fields import Numbers

FIELDS = (Numbers(1), Numbers(1, start=1))
"""
HELPER = """
import torch

def to_tensors(examples):
    rows = [[float(value) for value in line.split(b",")] for line in examples]
    return torch.tensor([[x] for x, _ in rows]), torch.tensor([[y] for _, y in rows])
"""


class SignedWorld:
    """A server, an owner with a key, and devices that have pinned it."""

    def __init__(
        self,
        folder: Path,
        server: ServerProcess,
        installation: Installation,
        engine: EngineName = "torch",
        text: str | None = None,
    ) -> None:
        """`text`: another task than the usual one, with the same helper."""
        self.folder = folder
        self._engine = engine
        self._data = installation.data
        self.admin = Admin(server.addresses["admin"], installation.secret("admin.token"))
        self._server = server
        self._token = folder / "admin.token"
        self._token.write_text(installation.secret("admin.token"))
        self._token.chmod(0o600)
        self.program = folder / "program"
        self.program.mkdir()
        texts = (text or TASK, HELPER) if engine == "torch" else (COMPILED, FIELDS)
        for name, text in zip(("task.py", "helper.py"), texts, strict=True):
            (self.program / name).write_text(text)
        self.key = folder / "owner.key"
        shown = self._run("owner", "key", "--output", str(self.key), "--format", "json")
        self.owner = json.loads(shown)

    def task(self, *arguments: str) -> Any:
        """A command of the owner; its answer."""
        return json.loads(self._run(*self._owned(*arguments), "--format", "json"))

    @property
    def place(self) -> tuple[str, ...]:
        """The options for the server of this world."""
        url = f"http://{self._server.addresses['admin']}"
        return ("--admin", url, "--token-file", str(self._token))

    def _owned(self, *arguments: str) -> tuple[str, ...]:
        return ("task", *arguments, *self.place, "--owner", str(self.key))

    def refused(self, *arguments: str) -> str:
        """A command of the owner that fails; its message."""
        ended = run_to_the_end(*self._owned(*arguments), seconds=STEP_S)
        assert ended.returncode != 0
        return ended.stderr

    def _run(self, *arguments: str) -> str:
        ended = run_to_the_end(*arguments, seconds=STEP_S)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    @contextmanager
    def devices(
        self, *, secure: bool = False, count: int = DEVICES, identified: bool = False
    ) -> Iterator[Path]:
        """Devices that know no task file, only the owner's key. Yields their log.

        `identified`: each has a token of its own.
        """
        owners = self.folder / "owners.toml"
        owners.write_text(
            f'[owners.me]\nkey = "{self.owner["key"]}"\ncollections = ["numbers"]\n'
            f'engines = ["{self._engine}"]\n'
        )
        for number in range(count):
            lines = "\n".join(f"{x},{2 * x + number}" for x in range(40))
            (self.folder / f"lines-{number}.txt").write_text(lines)
        examples = self.folder / "examples"
        examples.mkdir()
        for path in self.folder.glob("lines-*.txt"):
            path.rename(examples / path.name)
        log = self.folder / "devices.log"
        command: tuple[str, ...] = (
            *("--server", f"http://{self._server.addresses['devices']}"),
            *("--owners", str(owners), "--bundles", str(self.folder / "bundles")),
            *("--import", f"numbers={examples}", "--store", str(self.folder / "stores")),
            *("--devices", str(count), "--assume", "idle,charging,unmetered"),
            *("--participation-floor", "0", "--pause", "0.2"),
            *("--engine", self._engine),
        )
        shared = self._data / "device.token"
        tokens = self._own_tokens(count) if identified else [shared]
        command += tuple(part for token in tokens for part in ("--token-file", str(token)))
        if secure:
            trust = self.folder / "trust.toml"
            write_trust(trust, self._data, self._server.addresses["devices"], goal=2)
            command = (*command, "--trust", str(trust))
        with (
            log.open("wb") as output,
            subprocess.Popen(
                [*PAPAYA, "client", *command], stdout=output, stderr=subprocess.STDOUT
            ) as process,
        ):
            try:
                yield log
            finally:
                process.terminate()
                process.wait(STEP_S)

    def _own_tokens(self, count: int) -> list[Path]:
        data = ("--data", str(self._data))
        made = self._run("token", "make", "--device", "phone", "--count", str(count), *data)
        tokens = [line.split("\t")[1] for line in made.splitlines()]
        paths = [self.folder / f"device-{number}.token" for number in range(count)]
        for path, token in zip(paths, tokens, strict=True):
            path.write_text(token)
            path.chmod(0o600)
        return paths

    def until_version(self, run: str, version: int) -> None:
        self.admin.until_task(run, lambda found: found["version"] >= version, STEP_S)


def until_told(log: Path, *runs: Any) -> None:
    """Devices say that they were counted in each of these runs."""
    wanted = [f"counted {run['task']}" for run in runs]
    until(lambda: all(text in log.read_text() for text in wanted), ", ".join(wanted))


def test_a_task_is_submitted_changed_and_repeated_without_touching_a_device(
    tmp_path: Path,
) -> None:
    with Installation(tmp_path) as installation:
        server = installation.add(server=SERVER).start()
        world = SignedWorld(tmp_path, server, installation)
        first = world.task("submit", str(world.program))
        assert first["name"] == "opened"
        with world.devices(count=60) as log:
            world.until_version(first["task"], 2)

            world.task("update", "opened", "--set", "client.rate=0.005")
            changed = world.admin.get("/admin/tasks/opened")
            world.until_version(first["task"], changed["task"]["version"] + 2)

            switched = world.task("update", "opened", "--set", "regime=sync")
            assert switched["regime"] == "SyncFL"
            world.until_version(first["task"], switched["version"] + 2)

            second = world.task("submit", str(world.program), "--replace")
            assert second["task"] != first["task"]
            assert world.admin.task(first["task"])["state"] == "cancelled"
            world.until_version(second["task"], 2)
            assert world.admin.task("opened")["task"] == second["task"]
            until_told(log, first, second)
        assert server.stop() == 0


def test_a_signed_task_reaches_devices_without_torch(tmp_path: Path) -> None:
    """Submitted from Python files; the devices get a program, and sums stay masked."""
    with Installation(tmp_path) as installation:
        server = installation.add(server=SERVER).start()
        world = SignedWorld(tmp_path, server, installation, "executorch")
        submit = ("submit", str(world.program), "--engine", "executorch")
        first = world.task(*submit)
        with world.devices(secure=True) as log:
            world.until_version(first["task"], 2)

            refused = world.refused("update", "opened", "--set", "client.batch_size=8")
            assert "has a batch size of 32" in refused
            changed = world.task("update", "opened", "--set", "client.rate=0.005")
            world.until_version(first["task"], changed["version"] + 2)

            second = world.task(*submit, "--replace")
            world.until_version(second["task"], 1)
            until_told(log, first, second)
        assert server.stop() == 0
