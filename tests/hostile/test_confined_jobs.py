"""Code of a task that attacks the device it trains on: the kernel refuses all of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Coroutine, Iterator
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import numpy as np
import pytest
from msgspec import structs

from papaya.bundle import archive
from papaya.bundle.errors import BundleError
from papaya.bundle.head import BundleHead
from papaya.bundle.manifest import BlobRef, TaskManifest
from papaya.device.bundles import Bundle, BundleStore
from papaya.device.executor import Job, JobFailed, TaskFile
from papaya.device.owners import OwnerPolicy
from papaya.device.sandbox import Sandbox
from papaya.device.training import ExecutorTrainer
from papaya.errors import OperatorError
from papaya.learning.client_training import StepDone, unwatched
from papaya.learning.definition import ClientSGD
from papaya.learning.parameters import encode
from tests.confined import needs_confinement
from tests.unit.bundle.builders import KEY, NOW, a_lease, a_manifest, public

pytestmark = needs_confinement

T = TypeVar("T")

# A task whose examples are Python expressions. The result of one is in the error.
SOURCE = """
import ctypes, mmap, os, signal, socket, subprocess, sys, threading, time
import torch
from papaya.learning.task import ClientSGD, Examples, Task

libc = ctypes.CDLL(None, use_errno=True)

def call(*arguments):
    if libc.syscall(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return "done"

def own_memory(marker):
    "How often it holds these bytes; the marker comes reversed, so that it is not its own finding."
    found, marker = 0, marker[::-1].encode()
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps.read().splitlines():
            span, rights, *_ = line.split()
            low, high = (int(place, 16) for place in span.split("-"))
            if not rights.startswith("rw"):
                continue
            try:
                memory.seek(low)
                found += memory.read(high - low).count(marker)
            except (OSError, ValueError):
                pass
    return found - 1  # this function's own copy

class Number(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.value = torch.nn.Parameter(torch.zeros(2))

def batch(examples):
    for example in examples:
        if example != b"train":
            raise ValueError(f"result: {eval(example)}")
    return (torch.ones(len(examples)),)

task = Task(
    name="number", model=Number, batch=batch,
    loss=lambda module, ones: (module.value.sum() * ones).mean(),
    examples=Examples("numbers"), client=ClientSGD(rate=1.0), concurrency=10,
)
"""


class Attacker:
    def __init__(self, runner: asyncio.Runner, folder: Path, *, confined: bool = True) -> None:
        self._runner = runner
        self.file = folder / "attack.py"
        self.file.write_text("import colorsys\n" + SOURCE)
        self.sandbox = Sandbox([self.file], confined=confined, report_interval_s=0.0)
        self.do(self.sandbox.start())

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def train(
        self, *examples: str, bundle: str | None = None, step_done: StepDone = unwatched
    ) -> bytes:
        """Train its own task file, or a bundle that was added to the sandbox."""
        encoded = tuple(example.encode() for example in examples)
        job = Job("train", bundle or str(self.file), encode(np.zeros(2, np.float32), {}), encoded)
        return self.do(self.sandbox.run(job, 300.0, step_done)).update

    def result(self, expression: str, bundle: str | None = None) -> str:
        with pytest.raises(JobFailed) as raised:
            self.train(expression, bundle=bundle)
        return raised.value.reason

    def close(self) -> None:
        self.do(self.sandbox.close())


@pytest.fixture(scope="module")
def attacker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacker]:
    with asyncio.Runner() as runner:
        found = Attacker(runner, tmp_path_factory.mktemp("attack"))
        assert found.sandbox.unconfined == ""
        yield found
        assert found.train("train") == np.array([-1, -1], np.float32).tobytes()
        found.close()


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacker]:
    """The same without confinement, to show that an attempt would succeed."""
    with asyncio.Runner() as runner:
        found = Attacker(runner, tmp_path_factory.mktemp("free"), confined=False)
        assert found.sandbox.unconfined != ""
        yield found
        found.close()


def test_a_confined_job_trains(attacker: Attacker) -> None:
    assert attacker.train("train") == np.array([-1, -1], np.float32).tobytes()
    assert "result: 3" in attacker.result("1 + 2")


@pytest.mark.parametrize(
    "expression",
    [
        # the network, and other processes over sockets
        "socket.socket()",
        "socket.socket(socket.AF_UNIX)",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "socket.socketpair()",
        # files of the user
        "open('/etc/passwd').read()",
        "os.listdir('/')",
        "os.listdir(os.path.expanduser('~'))",
        "open('/proc/self/environ').read()",
        "open('/proc/self/mem', 'rb')",
        "os.listdir('/proc')",
        # changes to the disk
        "open('/tmp/papaya-escape', 'w')",
        "open(__file__, 'a')",
        "open('/dev/null', 'w')",
        "os.mkdir('/tmp/papaya-escape')",
        "os.unlink(__file__)",
        "os.rename(__file__, __file__ + '2')",
        "os.symlink('/etc', '/tmp/papaya-escape')",
        "os.chmod(__file__, 0o777)",
        "os.truncate(__file__, 0)",
        # processes and programs
        "os.fork()",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "os.execv('/bin/true', ['true'])",
        "subprocess.run(['true'])",
        "os.kill(os.getppid(), 0)",
        "os.kill(1, 9)",
        "os.pidfd_open(os.getppid())",
        "os.setpriority(os.PRIO_PROCESS, 0, 19)",
    ],
)
def test_an_attempt_to_leave_fails(attacker: Attacker, expression: str) -> None:
    reason = attacker.result(expression)
    assert "Operation not permitted" in reason or "Permission denied" in reason


def test_a_thread_bomb_is_refused_at_its_first_thread(attacker: Attacker) -> None:
    """Neither the filter nor a limit for the user could count the threads of one job."""
    bomb = "[threading.Thread(target=time.sleep, args=(60,)).start() for _ in range(100000)]"
    assert "can't start new thread" in attacker.result(bomb)
    assert "result: 1" in attacker.result("threading.active_count()")


def test_a_fork_bomb_is_refused_at_its_first_process(attacker: Attacker) -> None:
    bomb = "[os.fork() for _ in range(100000)]"
    assert "Operation not permitted" in attacker.result(bomb)


@pytest.mark.parametrize("limit", ["CPU", "FSIZE", "AS"])
def test_a_job_cannot_change_its_limits(attacker: Attacker, limit: str) -> None:
    resource = "__import__('resource')"
    change = f"{resource}.setrlimit({resource}.RLIMIT_{limit}, (10**6, 10**6))"
    assert "not allowed to raise maximum limit" in attacker.result(change)


@pytest.mark.parametrize(
    "number",
    [
        101,  # ptrace
        *(155, 161, 165, 166, 272, 308),  # pivot_root, chroot, mount, umount, unshare, setns
        *(175, 246, 248, 250, 298, 321),  # modules, kexec, keys, perf, bpf
        *(303, 304, 310, 311, 312),  # file handles, memory of others, kcmp
        *(319, 322, 323, 425, 428, 434, 442),  # memfd, execveat, userfaultfd, io_uring, mounts
        *(57, 58, 59, 62, 129, 200, 297, 424),  # fork, vfork, execve, signals
        0x40000000 | 41,  # socket by the numbers of x32
    ],
)
def test_a_dangerous_system_call_is_refused(attacker: Attacker, number: int) -> None:
    assert "Operation not permitted" in attacker.result(f"call({number}, 0, 0, 0, 0, 0, 0)")


def test_new_processes_are_refused_however_they_are_asked_for(attacker: Attacker) -> None:
    thread = "0x10f00"  # memory, files and signal handlers are shared
    for attempt in ("56, signal.SIGCHLD", f"56, {thread}", "435, 0"):
        assert "Operation not permitted" in attacker.result(f"call({attempt}, 0, 0, 0, 0)")


def test_a_pipe_cannot_be_made_to_signal_another_process(attacker: Attacker) -> None:
    """With F_SETOWN and F_SETSIG, a write would send SIGKILL to any process of the user."""
    for command in (8, 10, 15):  # F_SETOWN, F_SETSIG, F_SETOWN_EX
        change = f"__import__('fcntl').fcntl(os.pipe()[0], {command}, {os.getpid()})"
        assert "Operation not permitted" in attacker.result(change)
    assert "result:" in attacker.result("__import__('fcntl').fcntl(os.pipe()[0], 3)")


def test_a_listening_device_hears_nothing(attacker: Attacker) -> None:
    """The attempt is made against an open port, so that only the confinement stands in its way."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "not permitted" in attacker.result(
            f"socket.create_connection(('127.0.0.1', {port}))"
        )
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_the_examples_of_another_task_cannot_be_read(
    attacker: Attacker, free: Attacker, tmp_path: Path
) -> None:
    store = tmp_path / "device.db"
    store.write_bytes(b"examples")
    attempt = f"open({str(store)!r}, 'rb').read()"
    assert "Permission denied" in attacker.result(attempt)
    assert "examples" in free.result(attempt)


def test_a_job_finds_nothing_of_earlier_jobs_in_its_memory(free: Attacker) -> None:
    """The fork-server is the parent of all jobs: what it had in memory, each of them would have.

    Without confinement, so that a job can read its memory.
    """
    marker = "".join(f"{number:02x}" for number in os.urandom(16))
    assert f"result: {marker}" in free.result(f"{marker!r}")
    assert "result: 0" in free.result(f"own_memory({marker[::-1]!r})")
    assert "result: 0" not in free.result(f"(own_memory({marker[::-1]!r}), {marker!r})")


# -- bundles ------------------------------------------------------------------------------------

MANIFEST = a_manifest(layout=(("value", (2,)),), clip=None)


def a_bundle(
    attacker: Attacker, folder: Path, source: str = SOURCE, manifest: TaskManifest = MANIFEST
) -> str:
    """Adds a program as a device has unpacked it, and returns the name of its run."""
    folder.mkdir()
    (folder / "task.py").write_text(source)
    (folder / "helper.py").write_text("answer = 42\n")
    path, terms = str(folder / "task.py"), Bundle(manifest, 0.0, folder).terms
    file = TaskFile(path, manifest.task, "", terms, manifest.examples, manifest.encode())
    attacker.sandbox.add_bundle(str(folder), file)
    return str(folder)


def memory_of(pid: int) -> bytes:
    """Everything in the writable memory of a process."""
    found = []
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            low, high = (int(place, 16) for place in span.split("-"))
            if rights.startswith("rw"):
                memory.seek(low)
                with contextlib.suppress(OSError, ValueError):  # a region of the kernel
                    found.append(memory.read(high - low))
    return b"".join(found)


def test_a_bundle_shares_no_memory_with_task_files_or_other_owners(
    attacker: Attacker, tmp_path: Path
) -> None:
    """A job inherits what its fork-server has in memory."""
    marker = f"marker-{os.urandom(8).hex()}"
    source = f"import wave\nMARKER = {marker!r}\n" + SOURCE
    one = a_bundle(attacker, tmp_path / "one", source, structs.replace(MANIFEST, task=marker))
    other = a_bundle(attacker, tmp_path / "other")
    imported = "[name for name in ('colorsys', 'wave') if name in sys.modules]"

    assert f"result: {marker}" in attacker.result(f"MARKER or {marker!r}", one)
    assert "result: ['wave']" in attacker.result(imported, one)
    assert "result: []" in attacker.result(imported, other)
    assert "result: ['colorsys']" in attacker.result(imported)
    parent = attacker.result("os.getppid()", other).rpartition(" ")[2]
    assert marker.encode() not in memory_of(int(parent))
    assert b"papaya.learning.torch.engine" in memory_of(int(parent))


def test_a_long_job_of_a_bundle_reports_its_progress(attacker: Attacker, tmp_path: Path) -> None:
    client = ClientSGD(rate=0.1, batch_size=1, epochs=2)
    manifest = structs.replace(MANIFEST, client=client)
    run = a_bundle(attacker, tmp_path / "run", manifest=manifest)
    steps: list[tuple[int, int]] = []
    attacker.train("train", "train", bundle=run, step_done=lambda *step: steps.append(step))
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_the_policy_for_an_owner_limits_the_memory_of_its_jobs(
    attacker: Attacker, tmp_path: Path
) -> None:
    """The code takes 300 MB when it is loaded; the device's own limit is 1024."""
    packed = archive.pack({"task.py": f"{SOURCE}\nbytearray(300 << 20)\n".encode()})
    program = BlobRef(archive.digest(packed), len(packed))
    manifest = structs.replace(MANIFEST, program=program)
    head = BundleHead(manifest.sign(KEY), a_lease(manifest), "program").encode()

    class Source:
        async def blob(self, key: str, limit: int) -> bytes:
            return head

        async def file(self, key: str, limit: int, path: Path) -> None:
            path.write_bytes(packed)

    async def accept(limit_mb: int | None) -> None:
        policy = OwnerPolicy(
            key=public(KEY).hex(),
            collections=("*",),
            engines=("torch",),
            max_memory_mb=limit_mb,
        )
        store = BundleStore(tmp_path / str(limit_mb), {policy.pin.owner: policy})
        sandbox, rng = attacker.sandbox, Random(1)
        version = sandbox.engine_version
        trainer = ExecutorTrainer(sandbox, lambda: NOW, rng, None, "torch", version)
        key = f"{Bundle(manifest, 0.0, Path()).run}/0/bundle-3-{'0' * 32}"
        try:
            await store.fetch(key, Source(), trainer.add_bundle, NOW)
        finally:
            store.close()

    attacker.do(accept(None))
    attacker.do(accept(700))
    with pytest.raises(BundleError, match="MemoryError"):
        attacker.do(accept(150))


def test_the_code_of_a_bundle_is_first_read_in_the_confined_job(
    attacker: Attacker, tmp_path: Path
) -> None:
    """The attack is at the top level, which runs when the file is loaded."""
    attempt = (
        "try:\n    import socket\n    socket.socket()\n    at_import = 'open'\n"
        "except OSError:\n    at_import = 'refused'\n"
        "from helper import answer\n"
    )
    run = a_bundle(attacker, tmp_path / "run", attempt + SOURCE)
    assert "result: ('refused', 42)" in attacker.result("(at_import, answer)", run)


def test_the_manifest_replaces_the_settings_in_the_file(attacker: Attacker, tmp_path: Path) -> None:
    """A new rate reaches devices as a new manifest, with the same program."""
    run = a_bundle(attacker, tmp_path / "run")
    # The file says rate=1.0, the manifest 0.1.
    assert attacker.train("train", bundle=run) == np.array([-0.1, -0.1], np.float32).tobytes()


def test_the_program_of_one_owner_cannot_read_that_of_another(
    attacker: Attacker, tmp_path: Path
) -> None:
    one, other = a_bundle(attacker, tmp_path / "one"), a_bundle(attacker, tmp_path / "other")
    assert "Permission denied" in attacker.result(f"open('{other}/task.py').read()", one)


def test_a_program_with_another_model_than_the_signed_one_is_refused(
    attacker: Attacker, tmp_path: Path
) -> None:
    source = SOURCE.replace("torch.zeros(2)", "torch.zeros(3)")
    run = a_bundle(attacker, tmp_path / "run", source)
    assert "does not have the layout in the manifest" in attacker.result("1", run)


def test_a_program_with_other_frozen_tensors_than_the_signed_ones_is_refused(
    attacker: Attacker, tmp_path: Path
) -> None:
    held = "self.value = torch.nn.Parameter(torch.zeros(2))"
    changed = SOURCE.replace(held, f"{held}; self.register_buffer('base', torch.ones(3))")
    run = a_bundle(attacker, tmp_path / "run", changed)
    assert "does not have the frozen tensors in the manifest" in attacker.result("1", run)


def test_code_of_a_bundle_never_runs_unconfined(free: Attacker, tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="does not run the code of bundles"):
        a_bundle(free, tmp_path / "run")
