"""Secure aggregation with real processes: a TSA that is started, killed and left alone.

Devices seal for real and upload integers that name their session, so a version still tells whose
updates it is made of, by far more than fixed point rounds away. What may be lost is what the
TSA alone knew; it is counted, and versions only grow.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import structs

from papaya.aggregator.masked_sum import MaskedSum
from papaya.attestation.policy import DevicePolicy
from papaya.cli.demo.show import reading
from papaya.config import (
    AsyncFL,
    EvaluationPlan,
    OptimizerConfig,
    Requirements,
    SecureAggregation,
    TaskConfig,
)
from papaya.device.trust import Trust
from papaya.learning.definition import TaskTerms
from papaya.learning.evaluation import evaluation_vector
from papaya.messages.base import SessionId
from papaya.messages.storage import CLUSTER_KEY, ClusterKeyRow, RecordRow
from papaya.secagg.parameters import EXTRA_WORDS
from papaya.secagg.words import Ring
from papaya.tsa.client import TsaClient
from tests.system.admin import Admin
from tests.system.fleet import Book, Work, briefly, fleet
from tests.system.oracle import Books
from tests.system.processes import PAPAYA, Installation, ServerProcess, Toml, environment

STEP_S = 240.0
GOAL = 4
_DEVICES = 10
SERVER: dict[str, Toml] = {"heartbeat_s": 0.8}
# No client weighs more than another, so the mean names its members as it does in the clear.
CONFIG = TaskConfig(
    task="masked",
    concurrency=8,
    model_length=48,
    regime=AsyncFL(aggregation_goal=GOAL),
    optimizer=OptimizerConfig(kind="fedavg", rate=1.0),
    secure_aggregation=SecureAggregation(),
    clip=64.0,
    max_examples=1,
    participation_gap_s=0.0,
    commit_interval_s=0.02,
    keep_versions=100_000,
    training_timeout_s=3600.0,
)
TERMS = TaskTerms.of(CONFIG)
_LOST = "papaya_task_buffers_dropped_trusted_party_lost_total"


# -- a server, devices that believe its TSA, and books --------------------------------


def until(is_so: Callable[[], bool], what: str) -> None:
    """For what other processes do: they tell states, not events."""
    ends_at = time.monotonic() + STEP_S
    while not is_so():
        assert time.monotonic() < ends_at, f"not within {STEP_S:g} s: {what}"
        time.sleep(0.02)


def admin_of(installation: Installation, server: ServerProcess) -> Admin:
    return Admin(server.addresses["admin"], installation.secret("admin.token"))


def url(selector: ServerProcess) -> str:
    return f"http://{selector.addresses['devices']}"


def trust(installation: Installation, selector: ServerProcess, **changes: Any) -> Trust:
    """What the owner of a device writes down, once the log of the installation is there."""
    key = installation.data / "log.key.pub"
    until(key.exists, "a TSA is started, and logged")
    policy = DevicePolicy(
        log_key=key.read_text().strip(),
        log_url=f"{url(selector)}/v1/log",
        platforms=("software",),
        allow_insecure_software=True,
        allow_smt=True,
        minimum_threshold=GOAL,
    )
    checkpoint = installation.folder / "log-checkpoint"
    return Trust(structs.replace(policy, **changes), checkpoint, time.time)


class SecureBooks(Books):
    """`dropped`: versions that are the one before, because their masks were lost."""

    @property
    def cluster_key(self) -> Ed25519PrivateKey:
        row = self.rows[CLUSTER_KEY]
        assert isinstance(row, ClusterKeyRow)
        return Ed25519PrivateKey.from_private_bytes(row.key)

    @property
    def dropped(self) -> list[int]:
        found = self.versions
        return [v for v in found if v and found[v].parameters == found[v - 1].parameters]

    @property
    def ring(self) -> Ring:
        assert self.config.public_parameters is not None
        return self.config.public_parameters.ring

    def _check_version(self, version: int) -> None:
        if version in self.dropped:
            assert 1 <= len(self.consumed[version].members) <= GOAL
        else:
            super()._check_version(version)

    def _check_sum(self, record: RecordRow) -> None:
        words = self.config.model_length + EXTRA_WORDS
        total = MaskedSum.decode(self.blobs.get(record.sum), words, self.ring)
        assert total.weight == record.weight == len(record.members)


class Turnstile:
    """Lets sessions finish their training until `target` are counted in all: no more, no fewer."""

    def __init__(self, target: int) -> None:
        self.target: float = target
        self._passed: set[SessionId] = set()

    def work(self, book: Book, index: int) -> Work:
        async def wait(assignment: Any) -> None:
            await book.until(lambda: self._has_room(book), 2 * STEP_S, "a turn")
            self._passed.add(assignment.session)

        return wait

    def _has_room(self, book: Book) -> bool:
        on_their_way = self._passed - set(book.ended)
        return len(book.acknowledged) + len(on_their_way) < self.target


async def counted(book: Book, count: int) -> None:
    await book.until(lambda: len(book.acknowledged) >= count, STEP_S, f"{count} are counted")


async def over_a_failure(
    installation: Installation, selector: ServerProcess, admin: Admin, fail: Callable[[], None]
) -> Book:
    """One version and half of the next are there; then `fail`; then three versions more."""
    half = GOAL + GOAL // 2
    turnstile = Turnstile(half)
    believed = await asyncio.to_thread(trust, installation, selector)
    folder, token = installation.folder / "devices", installation.secret("device.token")
    async with fleet(
        folder, [url(selector)], token, _DEVICES, turnstile.work, trust=believed, terms=terms_of
    ) as flying:
        await counted(flying.book, half)
        await _version(admin, 1)
        await asyncio.to_thread(fail)
        turnstile.target = float("inf")
        flying.book.next_era()
        await counted(flying.book, half + 3 * GOAL)
        await _version(admin, 4)
        await flying.go_home(STEP_S)
    return flying.book


async def _version(admin: Admin, version: int) -> None:
    """An update counts before it is in a version: the masks may still be asked for."""
    await asyncio.to_thread(
        admin.until_task, CONFIG.task, lambda line: line["version"] >= version, STEP_S
    )


def test_masked_updates_make_versions_and_evaluations(tmp_path: Path) -> None:
    """Updates in words of 16 bits; evaluations are exact and have 32."""
    config = structs.replace(
        CONFIG,
        evaluation=EvaluationPlan(every_versions=2, clients=GOAL),
        requirements=Requirements(upload_bits=16),
    )
    with Installation(tmp_path) as installation:
        server = installation.add(server=SERVER).start()
        admin = admin_of(installation, server)
        admin.submit(config)
        book = asyncio.run(_until_evaluated(installation, server, admin, TaskTerms.of(config)))
        assert server.stop() == 0
        books = SecureBooks(installation.data, CONFIG.task)
        books.check(book.of(CONFIG.task))
        assert books.newest >= 2
        assert books.dropped == []


async def _until_evaluated(
    installation: Installation, server: ServerProcess, admin: Admin, terms: TaskTerms
) -> Book:
    believed = await asyncio.to_thread(trust, installation, server)
    folder, token = installation.folder / "devices", installation.secret("device.token")
    async with fleet(
        folder,
        [url(server)],
        token,
        _DEVICES,
        briefly,
        evaluation=lambda _: evaluation_vector(0, 3.5, 1).tobytes(),
        trust=believed,
        terms=lambda task: terms if task == CONFIG.task else None,
    ) as flying:
        line = await asyncio.to_thread(
            admin.until_task,
            CONFIG.task,
            lambda line: line["version"] >= 2 and line["loss"] is not None,
            STEP_S,
        )
        assert line["loss"] == pytest.approx(3.5, abs=1e-3)
        await flying.go_home(STEP_S)
    return flying.book


def test_a_killed_server_finds_its_tsa_again(tmp_path: Path) -> None:
    with Installation(tmp_path) as installation:
        server = installation.add(server=SERVER).start()
        admin = admin_of(installation, server)
        admin.submit(CONFIG)

        def fail() -> None:
            server.kill()
            server.start()

        with ended_at_last(installation):
            book = asyncio.run(over_a_failure(installation, server, admin, fail))
            assert server.stop() == 0
        books = SecureBooks(installation.data, CONFIG.task)
        books.check(book.acknowledged)
        assert books.newest >= 4
        assert books.dropped == []


def test_a_server_killed_with_its_tsa_loses_one_buffer(tmp_path: Path) -> None:
    with Installation(tmp_path) as installation:
        server = installation.add(server=SERVER).start()
        admin = admin_of(installation, server)
        admin.submit(CONFIG)

        def fail() -> None:
            [child] = children(server)
            server.kill()
            os.kill(child, signal.SIGKILL)
            server.start()

        with ended_at_last(installation):
            book = asyncio.run(over_a_failure(installation, server, admin, fail))
            check_one_buffer_was_dropped(installation, server, admin, book)


def test_a_killed_tsa_is_started_again(tmp_path: Path) -> None:
    with Installation(tmp_path) as installation:
        server = installation.add(server=SERVER).start()
        admin = admin_of(installation, server)
        admin.submit(CONFIG)
        killed: list[int] = []

        def fail() -> None:
            [child] = children(server)
            os.kill(child, signal.SIGKILL)
            killed.append(child)

        with ended_at_last(installation):
            book = asyncio.run(over_a_failure(installation, server, admin, fail))
            assert server.is_running
            [child] = children(server)
            assert child not in killed
            check_one_buffer_was_dropped(installation, server, admin, book)


def check_one_buffer_was_dropped(
    installation: Installation, server: ServerProcess, admin: Admin, book: Book
) -> None:
    _, metrics = admin.ask("GET", "/metrics")
    told = server.text().splitlines()
    [at] = [number for number, line in enumerate(told) if "buffer_dropped" in line]
    # A task that is taken again, as on a busy machine, begins to count at 0.
    is_taken_again = any("task_taken" in line for line in told[at:])
    assert is_taken_again or reading(metrics.decode(), _LOST, CONFIG.task) == 1
    assert server.stop() == 0
    books = SecureBooks(installation.data, CONFIG.task)
    books.check(book.acknowledged)  # which also says that no version is missing
    assert books.dropped == [2]
    assert books.newest >= 4


def terms_of(task: str) -> TaskTerms | None:
    """What devices know of the task and of its evaluations."""
    return TERMS if task == CONFIG.task else None


def children(server: ServerProcess) -> list[int]:
    """Process ids of TSAs that a server has started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue  # it ended meanwhile
        if parent == server.process.pid and b"\0tsa\0" in command:
            found.append(int(process.name))
    return found


@contextmanager
def ended_at_last(installation: Installation) -> Iterator[None]:
    """A TSA outlives a server that is killed, so a test that fails has to end it."""
    try:
        yield
    finally:
        with suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((installation.data / "tsa-child.pid").read_text()), signal.SIGKILL)


# -- roles apart --------------------------------------------------------------------------------


@contextmanager
def trusted_process(folder: Path, packages: Path | None = None) -> Iterator[str]:
    """`papaya serve tsa` on its own, which outlives every aggregator; its address.

    `packages`: a folder with another Papaya.
    """
    command = [*PAPAYA, "serve", "tsa", "--listen", f"unix:{folder / 'tsa.sock'}"]
    variables = environment()
    if packages is not None:
        variables |= {"PYTHONPATH": str(packages), "PYTHONSAFEPATH": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=variables
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            assert process.wait(STEP_S) == 0


def test_a_killed_aggregator_loses_nothing_while_the_tsa_lives(tmp_path: Path) -> None:
    with trusted_process(tmp_path) as tsa, Installation(tmp_path) as installation:
        leader = installation.reserve()
        shared: dict[str, Toml] = {"coordinators": [leader], "tsa": tsa}

        def add(role: str, number: int = 0, **own: str) -> ServerProcess:
            deployment = {**shared, **own}
            name = f"{role}-{number}"
            return installation.add(name, role, deployment=deployment, server=SERVER).start()

        coordinator = add("coordinator", servers=leader)
        selector = add("selector")
        aggregators = [add("aggregator", number) for number in range(2)]
        admin = admin_of(installation, coordinator)
        admin.submit(CONFIG)

        def fail() -> None:
            holder(admin, aggregators).kill()

        book = asyncio.run(over_a_failure(installation, selector, admin, fail))
        for server in installation.servers:
            assert not server.is_running or server.stop() == 0
        books = SecureBooks(installation.data, CONFIG.task)
        books.check(book.acknowledged)
        assert books.newest >= 4
        assert books.dropped == []
        check_releases_are_repeated(tsa, books)


def holder(admin: Admin, aggregators: list[ServerProcess]) -> ServerProcess:
    node = admin.until_task(CONFIG.task, lambda line: line["holder"], STEP_S)["holder"]
    [found] = [a for a in aggregators if node == f"aggregator@{a.addresses['servers']}"]
    return found


def check_releases_are_repeated(tsa: str, books: SecureBooks) -> None:
    """A successor that finds a full buffer asks for what its predecessor may have got already."""
    parameters = CONFIG.public_parameters
    assert parameters is not None
    members = [member.offer for member in books.consumed[books.newest].members]
    with TsaClient(tsa, books.cluster_key, STEP_S, STEP_S) as client:
        heard: list[tuple[int, bytes]] = []
        for _ in range(2):
            client.release(
                parameters, books.newest, members, lambda at, m: heard.append((at, m.tobytes()))
            )
        half = len(heard) // 2
        assert heard[:half] == heard[half:] != []
